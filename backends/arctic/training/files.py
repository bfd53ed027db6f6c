"""Arctic backend: checkpoints that any number of ranks and any ZeRO stage can load (imports torch,
the engine, shards, tensor_files, and remote_rl's errors).

    trainer.json                              what there is; written last, by rank 0
    weights-0000N-of-0000R.safetensors        whole float32 tensors by name, each in one file
    reference-...                             the same, where the reference is not the base
    exp_avg-..., exp_avg_sq-...               AdamW's moments, where the optimizer is saved

Each rank writes the tensors that fall to it, put together one at a time from the parts that the
ranks own, so no rank holds more than its part and one tensor. With LoRA the tensors are the
adapters'. Loading reads each rank's own parts and nothing else.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed

from remote_rl.errors import ConflictError, InvalidRequestError, RemoteRLError, describe

from ..weights.manifest import Form
from .joining import agree, agree_on_files
from .optimizer import MOMENTS
from .shards import Shard, Shards
from .tensor_files import (
    StoredTensor,
    read_part,
    stored_tensors,
    sync_directory,
    write_tensors,
)
from .zero import Zero

_FORMAT = 1
_INDEX = "trainer.json"
_WEIGHTS, _REFERENCE = "weights", "reference"


def save(directory: Path, zero: Zero, shards: Shards, optimizer: bool) -> bool:
    """Writes a checkpoint into an empty directory; True where a reference is inside. Raises
    `ConflictError` on all ranks where one of them can't write; the run goes on."""
    kinds: dict[str, Callable[[], Sequence[torch.Tensor]]] = {_WEIGHTS: lambda: zero.masters}
    reference = shards.reference
    if reference is not None:
        kinds[_REFERENCE] = lambda: reference
    if optimizer:
        for moment in MOMENTS:
            kinds[moment] = lambda moment=moment: [each[moment] for each in zero.moments()]  # type: ignore[misc]
    failures = [_attempt(lambda: directory.mkdir(parents=True, exist_ok=True))]
    failures += [_write_kind(directory, kind, zero, masters()) for kind, masters in kinds.items()]
    failures.append(_attempt(lambda: sync_directory(directory)))
    agree_on_files("checkpoint", failures)  # the index says that all is there
    facts = {
        "format": _FORMAT,
        "ranks": torch.distributed.get_world_size(),
        "kinds": sorted(kinds),
        "optimizer_steps": zero.optimizer.steps if optimizer else None,
        "tensors": {name: list(shape) for name, shape in zero.shapes().items()},
    }
    first = torch.distributed.get_rank() == 0
    failure = _attempt(lambda: _write_index(directory, facts)) if first else None
    agree_on_files("checkpoint", [failure])
    return reference is not None


def _attempt(function: Callable[[], None]) -> OSError | None:
    try:
        function()
    except OSError as error:
        return error
    return None


def _write_kind(
    directory: Path, kind: str, zero: Zero, masters: Sequence[torch.Tensor]
) -> OSError | None:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    shapes = zero.shapes()
    writers = assigned(shapes, world)
    own: dict[str, Form] = {
        name: (shape, "float32") for name, shape in shapes.items() if writers[name] == rank
    }

    def assembled() -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in shapes.items():
            whole = zero.assembled(name, masters, writers[name])
            if whole is not None:
                yield name, whole.reshape(shape)

    return write_tensors(directory / _file_name(kind, rank, world), own, assembled())


def assigned(shapes: dict[str, tuple[int, ...]], world: int) -> dict[str, int]:
    """Which rank writes which tensor: the largest first, each to the rank with the least."""
    loads = [0] * world
    chosen: dict[str, int] = {}
    for name in sorted(shapes, key=lambda each: -math.prod(shapes[each])):
        rank = loads.index(min(loads))
        chosen[name] = rank
        loads[rank] += math.prod(shapes[name])
    return chosen


def _file_name(kind: str, rank: int, world: int) -> str:
    return f"{kind}-{rank:05d}-of-{world:05d}.safetensors"


def _write_index(directory: Path, facts: dict[str, Any]) -> None:
    with (directory / _INDEX).open("w", encoding="utf-8") as file:
        json.dump(facts, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)


@attrs.frozen(eq=False)
class _Contents:
    """What a rank read of a checkpoint, as its own masters."""

    weights: Shard
    reference: Shard | None
    moments: dict[str, Shard] | None
    steps: int


def load(directory: Path, zero: Zero, shards: Shards, optimizer: bool) -> bool:
    """Restores a checkpoint; True where a reference is inside.

    Raises `InvalidRequestError` where it is of another model or lacks the optimizer, and
    `ConflictError` where its files are damaged; nothing has changed then."""
    failure: RemoteRLError | None = None
    contents: _Contents | None = None
    try:
        contents = _read(directory, zero, optimizer)
    except RemoteRLError as error:
        failure = error
    except (OSError, ValueError, KeyError, TypeError) as error:
        failure = ConflictError(
            f"the checkpoint's files are damaged ({describe(error)}); load another one"
        )
        failure.__cause__ = error
    agree(failure)
    assert contents is not None, "no failure is contents"
    zero.discard()
    shards.restore(contents.weights)
    shards.adopt_reference(contents.reference)
    if contents.moments is None:
        zero.optimizer.forget()
    else:
        for index, held in enumerate(zero.moments()):
            for name, tensor in held.items():
                tensor.copy_(contents.moments[name][index])
        zero.optimizer.set_steps(contents.steps)
    return contents.reference is not None


def _read(directory: Path, zero: Zero, optimizer: bool) -> _Contents:
    facts = json.loads((directory / _INDEX).read_text(encoding="utf-8"))
    if facts["format"] != _FORMAT:
        raise InvalidRequestError(
            f"the checkpoint has format {facts['format']}; this version reads {_FORMAT}"
        )
    _check_shapes(facts["tensors"], zero.shapes())
    steps = facts["optimizer_steps"]
    if optimizer and steps is None:
        raise InvalidRequestError(
            "the checkpoint was saved without its optimizer; load it with optimizer=False"
        )
    wanted = [_WEIGHTS] + [_REFERENCE] * (_REFERENCE in facts["kinds"])
    wanted += list(MOMENTS) if optimizer else []
    stored = {kind: _stored(directory, kind, facts) for kind in wanted}
    read = {kind: _own_part(zero, tensors) for kind, tensors in stored.items()}
    return _Contents(
        weights=read[_WEIGHTS],
        reference=read.get(_REFERENCE),
        moments={name: read[name] for name in MOMENTS} if optimizer else None,
        steps=int(steps) if optimizer else 0,
    )


def _check_shapes(held: dict[str, list[int]], wanted: dict[str, tuple[int, ...]]) -> None:
    for name in sorted(held.keys() | wanted.keys()):
        theirs, ours = held.get(name), wanted.get(name)
        if theirs is not None and ours is not None and tuple(theirs) == tuple(ours):
            continue
        there = "lacks it" if theirs is None else f"has it with shape {theirs}"
        here = "this run has no such tensor" if ours is None else f"this run's has {list(ours)}"
        raise InvalidRequestError(
            f"the checkpoint is of another model: for {name!r}, it {there}, and {here}; start the "
            "run with the model and the LoRA options that it was saved under",
            field=name,
        )


def _stored(directory: Path, kind: str, facts: dict[str, Any]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for rank in range(facts["ranks"]):
        found |= stored_tensors(directory / _file_name(kind, rank, facts["ranks"]))
    for name, shape in facts["tensors"].items():
        if name not in found or found[name].shape != tuple(shape):
            raise ValueError(f"the files of {kind} lack tensor {name!r}")
    return found


def _own_part(zero: Zero, stored: dict[str, StoredTensor]) -> Shard:
    masters = tuple(torch.zeros(each.shape, dtype=torch.float32) for each in zero.masters)
    for fragment in zero.fragments:
        zero.pulse += 1
        part = read_part(stored[fragment.name], fragment.start, fragment.length)
        flat = masters[fragment.master].view(-1)
        flat[fragment.offset : fragment.offset + fragment.length] = part
    return masters
