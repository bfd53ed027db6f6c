"""Each semantic field of the training, checkpoint and file requests, and of AdamW, changes what
the mock does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from client_double import ended
from client_proofs import Lab, Proof, check, outcome
from client_support import SessionFactory, learn, logprobs

from remote_rl import AdamW, Batch, losses
from remote_rl.requests import ListFiles, ReadFile

BATCH = Batch(prompts=[[1, 2]], prompt_index=[0, 0], responses=[[3, 4, 5], [6]], temperature=1.0)
OTHER = BATCH.replace(responses=[[3, 4, 7], [6]])


def stepped(lab: Lab, optimizer: AdamW) -> Any:
    """The policy after two steps of different gradients."""
    for batch in (BATCH, OTHER):
        lab.rl.training.forward_backward(batch, losses.CrossEntropy())
        lab.rl.training.optim_step(optimizer).result()
    return logprobs(lab.rl, BATCH)


def of_adamw(field: str, one: Any, other: Any, **rest: Any) -> Proof:
    both = [AdamW(**{"lr": 0.05, **rest, field: value}) for value in (one, other)]
    return Proof(stepped, *both)


def forwarded(lab: Lab, options: dict[str, Any]) -> Any:
    learn(lab.rl, BATCH)
    return sorted(
        (name, rows.values.tolist())
        for name, rows in lab.rl.training.forward(**options).result().values.items()
    )


def trained_on(lab: Lab, batch_and_loss: Any) -> Any:
    return outcome(lab.rl.training.forward_backward(*batch_and_loss)).value


def two_snapshots(lab: Lab) -> None:
    lab.rl.training.snapshot("a").result()
    learn(lab.rl, BATCH)
    lab.rl.training.snapshot("b").result()
    learn(lab.rl, BATCH)


def snapshot(lab: Lab, name: str) -> Any:
    lab.rl.training.snapshot(name).result()
    found = outcome(lab.rl.training.forward(BATCH, policy="a"))
    return found if isinstance(found, tuple) else "found"


def restored(lab: Lab, name: str) -> Any:
    two_snapshots(lab)
    lab.rl.training.restore_snapshot(name).result()
    return logprobs(lab.rl, BATCH)


def dropped(lab: Lab, name: str) -> Any:
    two_snapshots(lab)
    lab.rl.training.drop_snapshot(name).result()
    return snapshot_names(lab)


def snapshot_names(lab: Lab) -> list[bool]:
    return [
        isinstance(outcome(lab.rl.training.forward(BATCH, policy=name)), tuple) for name in "ab"
    ]


def referenced(lab: Lab, source: str) -> Any:
    two_snapshots(lab)
    lab.rl.training.set_reference(source).result()
    return logprobs(lab.rl, BATCH, "reference")


def saved(lab: Lab, options: dict[str, Any]) -> Any:
    learn(lab.rl, BATCH)
    lab.rl.training.save(**options).result()
    (info,) = lab.rl.training.checkpoints().result()
    loaded = outcome(lab.rl.training.load(info.name))
    return info.name, info.metadata, info.optimizer, loaded


def two_checkpoints(lab: Lab) -> None:
    for name in "ab":
        learn(lab.rl, BATCH)
        lab.rl.training.save(name).result()
        lab.rl.training.export(name).result()


def loaded(lab: Lab, options: dict[str, Any]) -> Any:
    """What a loaded run goes on to."""
    two_checkpoints(lab)
    result = lab.rl.training.load(**options).result()
    return result.saved_version, stepped(lab, AdamW(lr=0.05))


def deleted(lab: Lab, options: dict[str, Any]) -> Any:
    two_checkpoints(lab)
    lab.rl.training.delete(**options).result()
    exports = [
        isinstance(
            outcome(lab.rl._submit("list_files", ListFiles(kind="export", name=name))), tuple
        )
        for name in "ab"
    ]
    return [info.name for info in lab.rl.training.checkpoints().result()], exports


def exported(lab: Lab, name: str) -> Any:
    lab.rl.training.export(name).result()
    found = outcome(lab.rl._submit("list_files", ListFiles(kind="export", name="a")))
    return found if isinstance(found, tuple) else found.paths


def abandoned(lab: Lab, word: str) -> Any:
    """The words that the client's own function failed with are the later ops' cause."""

    def wrong(batch: Batch, outputs: Any) -> Any:
        raise LookupError(word)

    failed = lab.rl.training.forward_backward(BATCH, losses.custom(wrong, framework=None))
    ended(failed)
    step = lab.rl.training.optim_step(AdamW(lr=0.1))
    ended(step)
    cause = step._call.error.__cause__  # type: ignore[union-attr]
    return str(cause)


def listed(lab: Lab, options: dict[str, Any]) -> Any:
    two_checkpoints(lab)
    lab.rl.training.save("c", optimizer=False).result()
    return outcome(lab.rl._submit("list_files", ListFiles(**options))).paths


def read(lab: Lab, options: dict[str, Any]) -> Any:
    two_checkpoints(lab)
    whole = {"kind": "export", "name": "a", "path": "config.json", "offset": 0, "length": 50}
    chunk = outcome(lab.rl._submit("read_file", ReadFile(**{**whole, **options})))
    if isinstance(chunk, tuple):  # refused
        return chunk
    return chunk.size, chunk.data.tobytes()


WEIGHTS = {"kind": "export", "path": "model.safetensors", "length": 10**6}
CHECKPOINT = {"kind": "checkpoint", "name": "b"}
PROOFS: dict[str, Proof] = {
    "AdamW.lr": of_adamw("lr", 0.05, 0.1),
    "AdamW.betas": of_adamw("betas", (0.9, 0.999), (0.5, 0.999)),
    "AdamW.eps": of_adamw("eps", 1e-8, 0.1),
    "AdamW.weight_decay": of_adamw("weight_decay", 0.01, 0.5),
    "AdamW.max_grad_norm": of_adamw("max_grad_norm", None, 0.01, eps=0.1),
    "OptimStep.optimizer": of_adamw("lr", 0.01, 0.02),
    "Forward.batch": Proof(forwarded, {"batch": BATCH}, {"batch": OTHER}),
    "Forward.outputs": Proof(
        forwarded, {"batch": BATCH}, {"batch": BATCH, "outputs": {"logprobs", "entropy"}}
    ),
    "Forward.policy": Proof(forwarded, {"batch": BATCH}, {"batch": BATCH, "policy": "reference"}),
    "ForwardBackward.batch": Proof(
        trained_on, (BATCH, losses.CrossEntropy()), (OTHER, losses.CrossEntropy())
    ),
    "ForwardBackward.loss": Proof(
        trained_on, (BATCH, losses.CrossEntropy()), (BATCH, losses.CrossEntropy(scale=2.0))
    ),
    "Snapshot.name": Proof(snapshot, "a", "b"),
    "RestoreSnapshot.name": Proof(restored, "a", "b"),
    "DropSnapshot.name": Proof(dropped, "a", "b"),
    "SetReference.source": Proof(referenced, "a", "current"),
    "Save.name": Proof(saved, {"name": "a"}, {"name": "b"}),
    "Save.metadata": Proof(
        saved, {"name": "a", "metadata": {"step": 1}}, {"name": "a", "metadata": {"step": 2}}
    ),
    "Save.optimizer": Proof(saved, {"name": "a"}, {"name": "a", "optimizer": False}),
    "Load.name": Proof(loaded, {"name": "a"}, {"name": "b"}),
    "Load.optimizer": Proof(loaded, {"name": "b"}, {"name": "b", "optimizer": False}),
    "Delete.name": Proof(deleted, {"name": "a"}, {"name": "b"}),
    "Delete.kind": Proof(deleted, {"name": "a"}, {"name": "a", "kind": "export"}),
    "Export.name": Proof(exported, "a", "b"),
    "Abandon.reason": Proof(abandoned, "one", "two"),
    "ListFiles.kind": Proof(listed, CHECKPOINT, {**CHECKPOINT, "kind": "export"}),
    "ListFiles.name": Proof(listed, CHECKPOINT, {**CHECKPOINT, "name": "c"}),
    "ReadFile.kind": Proof(
        read, {"path": "state/trainer.json", "kind": "checkpoint"}, {"path": "config.json"}
    ),
    "ReadFile.name": Proof(read, {**WEIGHTS, "name": "a"}, {**WEIGHTS, "name": "b"}),
    "ReadFile.path": Proof(read, {}, {"path": "generation_config.json"}),
    "ReadFile.offset": Proof(read, {}, {"offset": 1}),
    "ReadFile.length": Proof(read, {}, {"length": 49}),
    "ReadFile.identity": Proof(read, {}, {"identity": "another's"}),
}


@pytest.mark.parametrize("field", PROOFS)
def test_the_field_changes_what_is_done(
    field: str, session_factory: SessionFactory, tmp_path: Path
) -> None:
    check(PROOFS[field], session_factory, tmp_path)
