"""The suite passes on what is right, over every transport, and covers what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.mock import create
from remote_rl import Session, connect
from remote_rl.cli import main
from remote_rl.client.connection import Connection
from remote_rl.ops import OPERATIONS
from remote_rl.protocol import Capabilities
from remote_rl.testing import conformance
from remote_rl.testing.conformance import runner
from remote_rl.testing.conformance.runner import Report, Target, area_names, run

PAGES = Path(__file__).parents[2] / "docs"
SMALL: dict[str, Any] = {
    "window": 3,
    "embedding_size": 4,
    "hidden_size": 16,
    "initial_scale": 1.0,
}
#: what may be left out although the backend has it: nothing to ask about
NOTHING_TO_ASK = re.compile(r"leaves no .* undeclared|takes every dtype|context is unlimited")


def reports_of(session: Session, **options: Any) -> list[Report]:
    """The suite on a session, which ends with it."""
    try:
        return run(Target(session=session, tolerance=1e-5, learning_rate=1e-2), **options)
    finally:
        session.detach()


def names(reports: list[Report], verdict: str) -> dict[str, str]:
    return {report.name: report.reason for report in reports if report.verdict == verdict}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The operations that any session asks for from now on."""
    seen: set[str] = set()
    original = Connection.reserve

    def reserve(self: Connection, name: str, *arguments: Any) -> Any:
        seen.add(name)
        return original(self, name, *arguments)

    monkeypatch.setattr(Connection, "reserve", reserve)
    return seen


def test_the_mock_passes_in_process_and_every_operation_is_tried(
    tmp_path: Path, asked: set[str]
) -> None:
    reports = reports_of(connect("mock", checkpoint_dir=tmp_path, **SMALL))
    assert names(reports, "failed") == {}
    skipped = names(reports, "skipped")
    assert [name for name, why in skipped.items() if not NOTHING_TO_ASK.search(why)] == []
    assert asked | {"abandon"} == set(OPERATIONS)
    assert list(tmp_path.glob("*/conformance*")) == [], "the suite removes what it wrote"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a `remote-rl serve mock` of its own."""
    folder = tmp_path_factory.mktemp("served")
    settings = [f"--set={name}={value}" for name, value in SMALL.items()]
    command = [sys.executable, "-m", "remote_rl", "serve", "mock", "--port", "0", *settings]
    with subprocess.Popen(
        [*command, "--checkpoint-dir", str(folder), "--log-level", "error"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            address = re.search(r"http://[\d.:]+", process.stdout.readline())
            assert address is not None
            yield address[0]
        finally:
            process.kill()


def test_the_mock_passes_over_http(server: str) -> None:
    reports = reports_of(connect(server))
    assert names(reports, "failed") == {}
    assert len(names(reports, "passed")) > 100


def test_the_command_runs_it_on_a_server_that_was_trained_before(
    server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with connect(server, start="base") as session:
        probe = conformance.probe.Probe(session, session.info().result(), 1e-5, 1e-2)
        probe.train(probe.batch())
        kept = session.training.save("theirs").result()
    arguments = ["conformance", server, "--destructive", "--log-level", "error"]
    assert main([*arguments, "-k", "hugging_face or listed or steps_once"]) == 0
    assert "3 passed, 0 skipped, 0 failed" in capsys.readouterr().out
    with connect(server, start="base") as session:
        assert session.training.checkpoints().result() == (kept,)
        session.training.delete("theirs").result()


def bigram() -> Any:
    """The backend that docs/writing-a-backend.md builds, a part of what the protocol offers."""
    page = (PAGES / "writing-a-backend.md").read_text(encoding="utf-8").partition("## Use it")[0]
    namespace: dict[str, Any] = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), namespace)
    return namespace["Bigram"]()


# numpy warns where the page's backend squares an infinite gradient
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_a_backend_that_offers_a_part_is_tested_for_it_and_refuses_the_rest(
    tmp_path: Path,
) -> None:
    reports = reports_of(connect(bigram(), checkpoint_dir=tmp_path))
    assert names(reports, "failed") == {}
    passed, skipped = names(reports, "passed"), names(reports, "skipped")
    refused = "test_what_is_not_declared_is_refused_by_name"
    kinds = ("operation", "output", "sampling_option", "sampling_output", "in_flight", "policy")
    assert {f"{refused}[{kind}]" for kind in kinds} <= set(passed)
    assert "test_a_load_without_the_optimizer_begins_a_fresh_one" in passed
    others = {name: why for name, why in skipped.items() if not NOTHING_TO_ASK.search(why)}
    assert "stop_string" in " ".join(others)
    for name, why in others.items():
        assert re.fullmatch(r"backend 'bigram' does not declare the .* '\w+'", why), (name, why)


def test_a_run_without_checkpoints_skips_them_by_name() -> None:
    reports = reports_of(connect("mock", **SMALL), areas={"Checkpoints", "Pushes"})
    assert names(reports, "failed") == {}
    assert "no checkpoint_dir" in names(reports, "skipped")["test_a_checkpoint_holds_the_weights"]


def test_a_backend_with_a_context_and_little_else() -> None:
    class Little:
        """The mock, of which only a forward and a generate are offered."""

        def __init__(self) -> None:
            self._mock = create(context_length=64, **SMALL)
            self.capabilities = Capabilities(
                operations={"forward", "generate"},
                outputs={"logprobs"},
                sampling_outputs={"logprobs"},
            )

        def __getattr__(self, name: str) -> Any:
            return getattr(self._mock, name)

    reports = reports_of(connect(Little()))
    assert names(reports, "failed") == {}
    passed = names(reports, "passed")
    assert "test_texts_longer_than_the_context_are_refused" in passed
    assert "test_what_is_not_declared_is_refused_by_name[operation]" in passed
    assert "test_sampler_and_trainer_agree_at_every_temperature[1.0]" in passed


def test_a_failing_test_leaves_the_session_usable_for_the_next(tmp_path: Path) -> None:
    """What a test that failed left behind is cleared: failures nobody looked at, a pause, a
    number that was reserved and never sent."""

    class Careless:
        def test_it(self, probe: conformance.probe.Probe) -> None:
            probe.rl.sampling.pause().result()
            probe.rl.sampling.generate(probe.prompts, probe.params())
            probe.wire.reserve("forward")
            probe.wire.unchecked("forward_backward", OPERATIONS["info"].request())
            raise AssertionError

    session = connect("mock", checkpoint_dir=tmp_path, **SMALL)
    info = session._connection.grant.info
    with session:
        for _ in range(2):
            probe = conformance.probe.Probe(session, info, 1e-5, 1e-2)
            probe.begin()
            with pytest.raises(AssertionError):
                Careless().test_it(probe)
            probe.end()
        assert not session.info().result().paused
        assert probe.logprobs(probe.batch()).shape == (10,)


def test_every_test_has_a_name_of_its_own_and_says_its_rule() -> None:
    seen: dict[str, str] = {}
    for area in conformance.Suite.__bases__:
        own = [name for name in vars(area) if not name.startswith("__")]
        assert any(name.startswith("test_") for name in own), area
        for name in own:
            assert name not in seen, f"{area.__name__} and {seen[name]} both have {name}"
            seen[name] = area.__name__
            documented = getattr(area, name).__doc__ or ""
            assert documented.strip().endswith("."), f"{area.__name__}.{name} says no rule"


def test_the_page_and_the_package_name_every_area() -> None:
    documented = conformance.__doc__ or ""
    page = (PAGES / "conformance.md").read_text(encoding="utf-8")
    for text in (documented, page):
        assert re.findall(r"^\| `(\w+)` *\|", text, re.MULTILINE)[: len(area_names())] == list(
            area_names()
        )
    assert set(conformance.__all__) == {*area_names(), "Conformance", "Suite"}
    modules = {path.stem for path in Path(runner.__file__).parent.glob("*.py")}
    asserting = modules - {"__init__", "runner", "target", "messages", "steps"}
    assert asserting == set(conformance._MODULES)


OWN_MODULE = """
import pytest
from remote_rl import connect
from remote_rl.testing import conformance

@pytest.fixture(scope="module")
def conformance_session(tmp_path_factory):
    with connect("mock", checkpoint_dir=tmp_path_factory.mktemp("run"), vocab_size=13) as session:
        yield session

class TestMine(conformance.Delivery, conformance.Refusals):
    tolerance = 1e-4
    skips = {"test_a_receipt_proves_the_delivery": "known, ticket 7"}

class TestStrict(conformance.SampledLogprobs):
    tolerance = 1e-30

class TestMisspelt(conformance.Outputs):
    skips = {"test_nothing_of_the_kind": "never"}
"""
WITHOUT_SESSION = """
from remote_rl.testing import conformance

class TestMine(conformance.Outputs):
    pass
"""


def test_a_module_of_ones_own_runs_it_with_what_it_overrides(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(OWN_MODULE)
    (tmp_path / "test_without.py").write_text(WITHOUT_SESSION)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-ra", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    out = result.stdout
    assert result.returncode == 1, out
    assert "known, ticket 7" in out
    failed = set(re.findall(r"^(?:FAILED|ERROR) test_\w+\.py::(\w+)::", out, re.MULTILINE))
    assert failed == {"TestStrict", "TestMisspelt", "TestMine"}, out
    assert "test_nothing_of_the_kind" in out
    assert "test_mine.py::TestMine" not in out.partition("short test summary")[2], out
    assert "there is no fixture conformance_session" in out
