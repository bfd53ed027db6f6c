"""What the shim puts in the place of SkyRL's own can be called as SkyRL's own, in the installed
SkyRL; and whatever SkyRL's loops call of it is there."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import skyrl.train
from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInterface
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (
    RemoteInferenceClient,
)
from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch

from shims.skyrl.dispatch import RemoteDispatch
from shims.skyrl.sampler import RemoteSampler

TRAIN = Path(skyrl.train.__path__[0])


@attrs.frozen
class Stand:
    """A class of the shim in the place of some of SkyRL's.

    name: what SkyRL's code calls an object of it. modules: whose code is read, under skyrl/train.
    """

    ours: type
    theirs: tuple[type, ...]
    name: str
    modules: tuple[str, ...]

    def members(self) -> Iterator[tuple[str, Any, Any]]:
        """(name, ours, theirs) of every public member that both have."""
        for name in dir(self.ours):
            held = [each for each in self.theirs if not name.startswith("_") and name in dir(each)]
            if held:
                yield (
                    name,
                    inspect.getattr_static(self.ours, name),
                    inspect.getattr_static(held[0], name),
                )


STANDS = (
    Stand(
        RemoteSampler,
        (InferenceEngineInterface, RemoteInferenceClient),
        "inference_engine_client",
        (
            "trainer.py",
            "fully_async_trainer.py",
            "fully_async_trainer_sim.py",
            "evaluate.py",
            "generators/skyrl_gym_generator.py",
            "entrypoints/main_generate.py",
        ),
    ),
    Stand(
        RemoteDispatch,
        (WorkerDispatch,),
        "dispatch",
        ("trainer.py", "fully_async_trainer.py"),
    ),
)


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """What a call may look like, annotations apart."""
    signature = inspect.signature(function)
    return [(each.name, each.kind, each.default) for each in signature.parameters.values()]


def used(name: str, source: str) -> set[str]:
    """Attributes of whatever is called `name` or ends in it, getattr included."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=value, attr=attribute) if _is(name, value):
                found.add(attribute)
            case ast.Call(
                func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(attribute)), *_]
            ) if _is(name, value):
                found.add(attribute)
    return found


def _is(name: str, node: ast.expr) -> bool:
    match node:
        case ast.Name(id=held) | ast.Attribute(attr=held):
            return held == name
    return False


@pytest.mark.parametrize("stand", STANDS, ids=lambda stand: stand.ours.__name__)
def test_nothing_abstract_is_left(stand: Stand) -> None:
    assert not getattr(stand.ours, "__abstractmethods__", ())


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        pytest.param(ours, theirs, id=f"{stand.ours.__name__}.{name}")
        for stand in STANDS
        for name, ours, theirs in stand.members()
    ],
)
def test_it_is_called_as_skyrls_own(ours: Any, theirs: Any) -> None:
    assert isinstance(ours, property) == isinstance(theirs, property)
    if not isinstance(ours, property):
        assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(theirs)
        assert parameters(ours) == parameters(theirs)


@pytest.mark.parametrize("stand", STANDS, ids=lambda stand: stand.ours.__name__)
def test_whatever_skyrls_loops_use_is_there(stand: Stand) -> None:
    found = set()
    for module in stand.modules:
        found |= used(stand.name, (TRAIN / module).read_text(encoding="utf-8"))
    assert found, "the modules are those that use it"
    assert found <= set(dir(stand.ours))


def test_the_scan_sees_calls_attributes_and_getattr() -> None:
    source = """
async def f(self, engine):
    await self.engine.sleep()
    engine.version
    getattr(self.engine, "label", None)
    self.other.wake()
"""
    assert used("engine", source) == {"sleep", "version", "label"}
