"""Testing: checkpoints, exports and their files (imports the contract, base, checks, probe)."""

from __future__ import annotations

from pathlib import Path

from ...errors import ConflictError, InvalidRequestError
from ...losses import CrossEntropy
from ...types import AdamW
from .base import Conformance
from .checks import refuses, tokens_of
from .probe import Floats, Probe

UPHILL = CrossEntropy(scale=-1.0)


class Checkpoints(Conformance):
    """What save, load, checkpoints, delete, export and download promise."""

    def test_a_checkpoint_holds_the_weights(self, probe: Probe) -> None:
        """load gives back the weights, the metadata and what was saved, under the version
        max(current, saved) + 1, and discards the gradient."""
        probe.needs_training()
        probe.needs_checkpoints()
        batch, name = probe.batch(), probe.name("weights")
        probe.train(batch)
        kept = probe.logprobs(batch)
        metadata = {"step": 3, "nested": {"list": [1, None, "ü"]}}
        saved = probe.rl.training.save(name, metadata).result()
        assert (saved.name, saved.metadata, saved.optimizer) == (name, metadata, True)
        stepped = probe.train(batch)
        assert saved.version < stepped.version
        probe.rl.training.forward_backward(batch, CrossEntropy()).result()
        loaded = probe.rl.training.load(name).result()
        assert (loaded.name, loaded.metadata, loaded.optimizer) == (name, metadata, True)
        assert loaded.saved_version == saved.version
        assert loaded.version == stepped.version + 1 == probe.rl.weights.version().result().trainer
        probe.same(probe.logprobs(batch), kept, "logprobs after load")
        with refuses(ConflictError, "optim_step"):
            probe.rl.training.optim_step(AdamW(lr=0.0)).result()

    def test_a_load_with_the_optimizer_goes_on_as_if_never_stopped(self, probe: Probe) -> None:
        """The step after load(optimizer=True) is the one that the run took after the save."""
        probe.needs_training()
        probe.needs_checkpoints()
        name = probe.name("warm")
        _train_and_save(probe, name)
        wanted = _step(probe)
        probe.rl.training.load(name).result()
        probe.same(_step(probe), wanted, "logprobs of the step after load(optimizer=True)")

    def test_a_load_without_the_optimizer_begins_a_fresh_one(self, probe: Probe) -> None:
        """After load(optimizer=False) no moment is left: the first step is a fresh optimizer's,
        which is the same for all betas."""
        probe.needs_training()
        probe.needs_checkpoints()
        name = probe.name("cold")
        _train_and_save(probe, name)
        ends = []
        for betas in ((0.9, 0.999), (0.2, 0.5)):
            loaded = probe.rl.training.load(name, optimizer=False).result()
            assert not loaded.optimizer
            ends.append(_step(probe, betas=betas))
        probe.same(ends[1], ends[0], "logprobs of first steps after load(optimizer=False)")

    def test_a_checkpoint_without_optimizer_has_none_to_load(self, probe: Probe) -> None:
        """load(optimizer=True) of a checkpoint that was saved without is refused, and changes
        nothing."""
        probe.needs_training()
        probe.needs_checkpoints()
        batch, name = probe.batch(), probe.name("weights-only")
        saved = probe.rl.training.save(name, optimizer=False).result()
        assert not saved.optimizer
        probe.train(batch)
        before = probe.rl.training.forward(batch).result()
        with refuses(InvalidRequestError, name, "optimizer"):
            probe.rl.training.load(name).result()
        after = probe.rl.training.forward(batch).result()
        assert after.version == before.version
        probe.same(after.logprobs.values, before.logprobs.values, "logprobs after a refused load")
        assert not probe.rl.training.load(name, optimizer=False).result().optimizer

    def test_a_checkpoint_holds_the_reference(self, probe: Probe) -> None:
        """load gives back the reference that was set when it was saved."""
        probe.needs_training()
        probe.needs_checkpoints()
        probe.needs("reset", "set_reference", policy="reference")
        batch, name = probe.batch(), probe.name("reference")
        probe.train(batch)
        reference = probe.logprobs(batch)
        probe.rl.training.set_reference("current").result()
        probe.train(batch)
        assert probe.rl.training.save(name).result().reference
        probe.rl.reset().result()
        probe.rl.training.load(name).result()
        probe.same(probe.logprobs(batch, "reference"), reference, "the reference after load")

    def test_a_checkpoint_holds_the_count_of_unseeded_generates(self, probe: Probe) -> None:
        """After a load, generates without a seed draw what they drew after the save."""
        probe.needs_checkpoints()
        probe.needs("generate")
        name = probe.name("seeds")
        probe.draw(n=2)
        probe.rl.training.save(name).result()
        wanted = [tokens_of(probe.draw(n=2)) for _ in range(2)]
        probe.rl.training.load(name).result()
        drawn = [tokens_of(probe.draw(n=2)) for _ in range(2)]
        assert drawn == wanted, "generates without a seed differ after load"

    def test_save_refuses_what_it_can_not_hold(self, probe: Probe) -> None:
        """A taken name, a gradient that was not applied, and names that are none are refused."""
        probe.needs_checkpoints()
        probe.needs("forward_backward", "zero_grad", loss="CrossEntropy")
        name, save = probe.name("taken"), probe.rl.training.save
        save(name).result()
        with refuses(ConflictError, name):
            save(name).result()
        probe.rl.training.forward_backward(probe.batch(), CrossEntropy()).result()
        with refuses(ConflictError, "save"):
            save(probe.name("gradient")).result()
        probe.rl.training.zero_grad().result()
        for bad in ("../outside", "a/b", "", ".hidden", "current"):
            with refuses(InvalidRequestError, repr(bad)):
                save(bad).result()

    def test_checkpoints_are_listed_and_deleted(self, probe: Probe) -> None:
        """checkpoints lists all, oldest first, with size, time and metadata; delete removes one;
        an unknown name is refused with the nearest."""
        probe.needs_checkpoints()
        names = [probe.name("list-1"), probe.name("list-2")]
        for number, name in enumerate(names):
            probe.rl.training.save(name, {"number": number}).result()
        listed = {each.name: each for each in probe.rl.training.checkpoints().result()}
        assert [name for name in listed if name in names] == names, "oldest first"
        for number, name in enumerate(names):
            assert listed[name].metadata == {"number": number}
            assert listed[name].bytes > 0, f"{name} has {listed[name].bytes} bytes"
            assert listed[name].created > 0, f"{name} was created at {listed[name].created}"
        probe.rl.training.delete(names[0]).result()
        left = [each.name for each in probe.rl.training.checkpoints().result()]
        assert names[0] not in left
        assert names[1] in left
        with refuses(InvalidRequestError, names[0], names[1]):
            probe.rl.training.load(names[0]).result()

    def test_a_checkpoint_can_be_downloaded(self, probe: Probe, tmp_path: Path) -> None:
        """download copies a checkpoint's files over the transport."""
        probe.needs_checkpoints()
        name = probe.name("download")
        probe.rl.training.save(name).result()
        folder = probe.rl.download("checkpoint", name, tmp_path / "copy")
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
        assert sum(sizes) > 0, "the copy is empty"

    def test_an_export_holds_the_current_weights(self, probe: Probe, tmp_path: Path) -> None:
        """After a step an export has other weights, synced or not."""
        probe.needs_training()
        probe.needs("export")
        if not probe.info.checkpoint_dir:
            probe.needs_checkpoints()
        exports = []
        for number in range(2):
            if number:
                probe.train(probe.batch(), lr=10 * probe.rate)
            name = probe.name(f"export-{number}", "export")
            probe.rl.training.export(name).result()
            exports.append(_weights_of(probe.rl.download("export", name, tmp_path / name)))
        assert exports[0], "the export holds no files of weights"
        assert exports[1] != exports[0], "an export after a step has the weights from before it"

    def test_an_export_is_a_hugging_face_directory(self, probe: Probe, tmp_path: Path) -> None:
        """export writes a directory with a config.json; its receipt says its files and bytes, and
        download and delete work on it."""
        probe.needs("export")
        if not probe.info.checkpoint_dir:
            probe.needs_checkpoints()
        name = probe.name("export", "export")
        receipt = probe.rl.training.export(name).result()
        assert receipt.name == name
        assert receipt.version == probe.rl.weights.version().result().trainer
        assert "config.json" in receipt.files, f"files {receipt.files}"
        folder = probe.rl.download("export", name, tmp_path / "export")
        files = [path for path in folder.rglob("*") if path.is_file()]
        found = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
        assert set(found) == set(receipt.files)
        assert sum(found.values()) == receipt.bytes
        with refuses(ConflictError, name):
            probe.rl.training.export(name).result()
        probe.rl.training.delete(name, "export").result()
        with refuses(InvalidRequestError, name):
            probe.rl.training.delete(name, "export").result()


def _weights_of(folder: Path) -> dict[str, bytes]:
    """File to its tensors' bytes; a safetensors header may say when it was written."""
    found = {}
    for path in folder.rglob("*"):
        if path.suffix in (".safetensors", ".bin", ".pt"):
            data = path.read_bytes()
            header = 8 + int.from_bytes(data[:8], "little") if path.suffix == ".safetensors" else 0
            found[path.relative_to(folder).as_posix()] = data[header:]
    return found


def _step(probe: Probe, **knobs: object) -> Floats:
    # uphill after two downhill: a warm optimizer still goes down, a cold one turns
    probe.train(probe.batch(), UPHILL, **knobs)
    return probe.logprobs(probe.batch())


def _train_and_save(probe: Probe, name: str) -> None:
    for _ in range(2):
        probe.train(probe.batch())
    probe.rl.training.save(name).result()
