"""What the shim overrides, subclasses and calls of verl is as declared, in the installed verl.

`nox -s verl-signatures -- 0.9.0` asks another version.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import verl_signatures
from verl_signatures import Call, Use, declared, differences, scan

DECLARED = declared()
USES = scan(DECLARED)

_SUBCLASS = """
from verl.utils.metric import Metric
from verl.workers.rollout import replica

class Own(replica.RolloutReplica):
    async def sleep(self):
        await super().wake_up()
        return self.server_address, self.mine

    def mine(self):
        return Metric("mean")
"""


def test_whatever_is_used_is_declared_and_nothing_else() -> None:
    assert set(USES) == set(DECLARED), "run python tests/verl/verl_signatures.py --write"


def test_the_scan_sees_bases_overrides_calls_and_inherited_members(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(_SUBCLASS)
    found = set(scan({}, tmp_path)) - set(verl_signatures.BY_HAND)
    base = "verl.workers.rollout:replica.RolloutReplica"
    assert found == {
        base,
        f"{base}.sleep",
        f"{base}.wake_up",
        f"{base}.server_address",
        "verl.utils.metric:Metric",
    }


@pytest.mark.parametrize("symbol", sorted(DECLARED))
def test_the_installed_verl_has_it_as_declared(symbol: str) -> None:
    assert verl_signatures.look_up(symbol) == DECLARED[symbol]
    assert list(differences(symbol, DECLARED[symbol], USES[symbol])) == []


@pytest.fixture
def other_verl(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module in whose functions a test says what another version of verl has."""
    module = types.ModuleType("another")
    monkeypatch.setitem(sys.modules, "another", module)
    return module


@pytest.mark.parametrize(
    ("there", "call", "told"),
    [
        ("def f(a, b=1): ...", Call("w:1", 2, (), False), None),
        ("def f(a, b=1, c=2): ...", Call("w:1", 1, ("b",), False), None),
        ("def f(x, b=1): ...", Call("w:1", 0, ("a",), False), "does not take a, passed at w:1"),
        ("def f(a, c, b=1): ...", Call("w:1", 1, (), False), "wants 'c', not passed at w:1"),
        ("def f(a, b=2): ...", Call("w:1", 1, (), False), "another default of 'b' than 1"),
        ("def f(a, b=2): ...", Call("w:1", 1, ("b",), False), None),
        ("f = 3", Call("w:1", 1, (), False), "another:f is value, not (a, b=1)"),
        ("g = 3", Call("w:1", 1, (), False), "another:f is missing"),
    ],
)
def test_what_breaks_a_call_is_named_in_one_line(
    other_verl: Any, there: str, call: Call, told: str | None
) -> None:
    exec(there, other_verl.__dict__)
    lines = list(differences("another:f", "(a, b=1)", Use(calls=[call])))
    assert len(lines) == (told is not None)
    if told is not None:
        assert told in lines[0]
        assert "\n" not in lines[0]


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ("def sleep(self, level=1): ...", []),
        ("def sleep(self): ...", []),
        ("def sleep(self, level=2): ...", ["another default of 'level' at own.py:5"]),
        (
            "def sleep(self, level=1, tag=None): ...",
            ["may be called with 'tag'; not at own.py:5"],
        ),
        ("def slept(self): ...", ["another:Base.sleep is missing"]),
    ],
)
def test_what_an_override_does_not_cover_is_named(
    other_verl: Any, tmp_path: Path, there: str, told: list[str]
) -> None:
    exec(f"class Base:\n    {there}", other_verl.__dict__)
    (tmp_path / "own.py").write_text(
        "from verl import Base\n\nclass Own(Base):\n"
        "    kept = None\n    def sleep(self, level=1):\n        return level\n"
    )
    use = scan({"verl:Base.sleep": "(self, level=1)"}, tmp_path)["verl:Base.sleep"]
    lines = list(differences("another:Base.sleep", "(self, level=1)", use))
    assert len(lines) == len(told)
    for line, part in zip(lines, told):
        assert part in line
