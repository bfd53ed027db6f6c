"""Testing: weights pushed by a client (imports numpy, the contract, base, checks, probe)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from ...errors import ConflictError, InvalidRequestError, UnsupportedError
from ...requests import Push, PushPart
from ...types import Piece, Tensor, TensorForm
from ...types.results import TENSOR_DTYPES
from .base import Conformance
from .checks import refuses
from .probe import Probe

#: dtype names of a safetensors header -> tags of TENSOR_DTYPES
_SAFETENSORS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


class Pushes(Conformance):
    """push, with the tensors of an export: override `pushed_tensors` where they have other names.

    pushed_tensors: fixture, name to Tensor (or numpy array), every tensor of the model as the
    trainer holds it now.
    """

    @pytest.fixture
    def pushed_tensors(self, probe: Probe, tmp_path: Path) -> Mapping[str, Tensor]:
        """The tensors of an export of the current weights."""
        probe.needs("push", "export")
        if not probe.info.checkpoint_dir:
            pytest.skip("the run has no checkpoint_dir to export to")
        name = probe.name("pushed", "export")
        probe.rl.training.export(name).result()
        folder = probe.rl.download("export", name, tmp_path / "pushed")
        # what lies deeper than the model is something else, such as an adapter's own tensors
        paths = sorted(folder.rglob("*.safetensors"), key=lambda path: (len(path.parts), path))
        paths = [path for path in paths if path.parent == paths[0].parent]
        tensors = {name: tensor for path in paths for name, tensor in _tensors(path)}
        assert tensors, f"the export {folder} holds no safetensors"
        missing = {tensor.dtype for tensor in tensors.values()} - probe.capabilities.push_dtypes
        if missing:
            pytest.skip(f"push does not take the export's dtype {missing.pop()!r}")
        return tensors

    def test_a_push_is_what_the_sampler_serves(
        self, probe: Probe, pushed_tensors: Mapping[str, Tensor]
    ) -> None:
        """push gives the sampler the client's tensors, under a new version and label, whatever it
        served before."""
        probe.needs_training()
        probe.needs("push", "sync", "generate", sampling_output="logprobs")
        before = probe.greedy()
        probe.train(probe.batch(), lr=10 * probe.rate)
        synced = probe.sync()
        receipt = probe.rl.weights.push(pushed_tensors, label="pushed").result()
        assert receipt.version > synced
        assert (receipt.label, receipt.tensors) == ("pushed", len(pushed_tensors))
        assert receipt.source_fingerprint == receipt.sampler_fingerprint
        assert probe.rl.weights.version().result().sampler == receipt.version
        after = probe.greedy()
        for old, new in zip(before, after):
            assert (new.first_version, new.label) == (receipt.version, "pushed")
            assert new.tokens.tolist() == old.tokens.tolist(), "pushed weights draw other tokens"
            probe.same(new.logprobs, old.logprobs, "logprobs of the pushed weights")
        with refuses(ConflictError, "sync"):
            probe.rl.weights.sync().result()
        probe.train(probe.batch())
        assert probe.sync() > receipt.version

    def test_a_push_takes_exactly_the_models_tensors(
        self, probe: Probe, pushed_tensors: Mapping[str, Tensor]
    ) -> None:
        """A push with a missing, an unknown or a misshaped tensor is refused by its name, and the
        sampler serves what it did."""
        probe.needs("push", "generate")
        before = [sample.tokens.tolist() for sample in probe.greedy()]
        name = min(pushed_tensors)
        rest = {each: tensor for each, tensor in pushed_tensors.items() if each != name}
        tensor = Tensor.of(pushed_tensors[name])
        longer = Tensor(data=np.stack([tensor.data, tensor.data]), dtype=tensor.dtype)
        for tensors, wrong in (
            (rest, name),
            ({**pushed_tensors, "no.such.tensor": tensor}, "no.such.tensor"),
            ({**rest, name: longer}, name),
        ):
            with refuses(InvalidRequestError, wrong):
                probe.rl.weights.push(tensors).result()
        assert [sample.tokens.tolist() for sample in probe.greedy()] == before

    def test_a_push_in_parts_is_the_same_push(
        self, probe: Probe, pushed_tensors: Mapping[str, Tensor]
    ) -> None:
        """However a push is cut into messages, the sampler holds the same tensors afterwards."""
        probe.needs("push", "push_part", "generate", sampling_output="logprobs")
        whole = probe.rl.weights.push(pushed_tensors).result()
        wanted = _drawn(probe)
        total = sum(Tensor.of(tensor).nbytes for tensor in pushed_tensors.values())
        for share in (2, 3, 7):
            # something else in between, so that what is there before can't be taken for it
            probe.rl.weights.push(_turned(pushed_tensors)).result()
            receipt = probe.rl.weights.push(
                pushed_tensors, label=share, part_bytes=max(1, total // share)
            ).result()
            again: dict[str, Any] = {"version": receipt.version, "label": share}
            again["seconds"] = receipt.seconds
            assert receipt == attrs.evolve(whole, **again), f"in {share} parts"
            assert probe.rl.weights.version().result().sampler == receipt.version
            _check_served(probe, wanted, f"after a push in {share} parts")

    def test_the_sampler_changes_only_when_a_push_is_whole(
        self, probe: Probe, pushed_tensors: Mapping[str, Tensor]
    ) -> None:
        """While the parts of a push come the sampler serves what it did; a push before all have
        come is refused, and one after another delivery as well."""
        probe.needs("push", "push_part", "generate", sampling_output="logprobs")
        probe.rl.weights.push(pushed_tensors).result()
        wanted = _drawn(probe)
        served = probe.rl.weights.push(_turned(pushed_tensors)).result().version
        before = _drawn(probe)
        assert before[0] != wanted[0] or not np.array_equal(before[1], wanted[1])
        tensors = {name: Tensor.of(tensor) for name, tensor in pushed_tensors.items()}
        forms = {name: TensorForm.of(tensor) for name, tensor in tensors.items()}
        pieces = {
            name: Piece(offset=0, data=np.ascontiguousarray(each.data).reshape(-1).view(np.uint8))
            for name, each in tensors.items()
            if each.nbytes
        }
        last = max(pieces)
        send, push = probe.wire.unchecked, Push(transfer="conformance", label="in parts")
        send("push_part", PushPart(transfer="conformance", forms=forms)).result()
        for name in [name for name in pieces if name != last]:
            send("push_part", PushPart(transfer="conformance", pieces={name: pieces[name]}))
        with refuses(ConflictError, "conformance", last):
            send("push", push).result()
        _check_served(probe, before, "before a push is whole")
        assert probe.rl.weights.version().result().sampler == served
        send("push_part", PushPart(transfer="conformance", pieces={last: pieces[last]})).result()
        _check_served(probe, before, "when all parts have come, and not their push")
        receipt = send("push", push).result()
        assert (receipt.version, receipt.label) == (served + 1, "in parts")
        _check_served(probe, wanted, "after the push of a transfer")
        with refuses(ConflictError, "conformance"):
            send("push", push).result()

    def test_parts_are_of_exactly_the_models_tensors(
        self, probe: Probe, pushed_tensors: Mapping[str, Tensor]
    ) -> None:
        """Parts of missing, unknown or misshaped tensors are refused by the first of them, which
        says the forms, before any of their bytes is sent."""
        probe.needs("push", "push_part")
        forms = {name: TensorForm.of(Tensor.of(each)) for name, each in pushed_tensors.items()}
        name = min(forms)
        rest = {each: form for each, form in forms.items() if each != name}
        longer = attrs.evolve(forms[name], shape=(2, *forms[name].shape))
        for wrong, words in (
            (rest, name),
            ({**forms, "no.such.tensor": longer}, "no.such.tensor"),
            ({**rest, name: longer}, name),
        ):
            with refuses(InvalidRequestError, words):
                request = PushPart(transfer="conformance", forms=wrong)
                probe.wire.unchecked("push_part", request).result()

    def test_a_push_of_another_dtype_is_refused_by_it(self, probe: Probe) -> None:
        """A dtype that is not among push_dtypes is refused by its name."""
        probe.needs("push")
        others = sorted(set(TENSOR_DTYPES) - probe.capabilities.push_dtypes)
        if not others:
            pytest.skip(f"backend {probe.info.backend!r} takes every dtype")
        for dtype in others:
            tensor = Tensor(data=np.zeros(2, TENSOR_DTYPES[dtype]), dtype=dtype)
            with refuses(UnsupportedError, repr(dtype)):
                probe.rl.weights.push({"any": tensor}).result()


def _drawn(probe: Probe) -> tuple[list[list[int]], list[float]]:
    """Tokens and logprobs of a sample of each prompt without chance."""
    samples = probe.greedy()
    logprobs = np.concatenate([np.asarray(sample.logprobs) for sample in samples])
    return [sample.tokens.tolist() for sample in samples], logprobs.tolist()


def _check_served(probe: Probe, wanted: tuple[list[list[int]], list[float]], when: str) -> None:
    tokens, logprobs = _drawn(probe)
    assert tokens == wanted[0], f"{when} the sampler serves other tensors: other tokens are drawn"
    probe.same(logprobs, wanted[1], f"{when} the sampler serves other tensors: logprobs")


def _turned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Others of the same forms: each tensor's halves change places."""
    turned = {}
    for name, given in tensors.items():
        tensor = Tensor.of(given)
        flat = np.ascontiguousarray(tensor.data).reshape(-1)
        data = np.roll(flat, flat.size // 2).reshape(tensor.shape)
        turned[name] = Tensor(data=data, dtype=tensor.dtype)
    return turned


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a safetensors file: a header's length, a JSON header, the raw arrays."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        if name == "__metadata__":
            continue
        dtype = _SAFETENSORS[entry["dtype"]]
        begin, end = (start + offset for offset in entry["data_offsets"])
        array = np.frombuffer(data[begin:end], TENSOR_DTYPES[dtype]).reshape(entry["shape"])
        yield name, Tensor(data=array, dtype=dtype)
