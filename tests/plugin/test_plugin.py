"""The plug-in as a user's tests see it: fixtures, options, what fails and how it is said."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from plugin_support import INSTALLED, MODULE, NAME, run_pytest

import remote_rl.testing.pytest_plugin as plugin


def test_pytest_finds_it_by_its_entry_point() -> None:
    assert INSTALLED, "the distribution does not announce it; is it installed anew?"


def test_importing_it_imports_nothing_else() -> None:
    """Every pytest session of an environment with remote-rl pays for it."""
    script = (
        f"import sys, pytest; before = set(sys.modules); import {MODULE}; "
        "print(sorted(set(sys.modules) - before))"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True
    )
    expected = ["remote_rl", "remote_rl.__about__", "remote_rl.testing", MODULE]
    assert ran.stdout.strip() == str(expected)


def test_what_it_gives_to_pytest_has_its_name() -> None:
    allowed = ("remote_rl_", "_remote_rl_", "pytest_", "_")
    own = [name for name, value in vars(plugin).items() if callable(value)]
    imported = {"Callable", "Generator", "Iterator", "Any"}
    assert [name for name in own if not name.startswith(allowed) and name not in imported] == []
    assert {name for name in own if name.startswith("remote_rl_")} == {
        "remote_rl_mock",
        "remote_rl_connect",
        "remote_rl_server",
        "remote_rl_serve",
        "remote_rl_calls",
    }


def test_the_fixtures(tmp_path: Path) -> None:
    ran = run_pytest(
        tmp_path,
        """
        def test_mock(remote_rl_mock, remote_rl_calls):
            step(remote_rl_mock)
            assert remote_rl_calls.names()[1:] == ["generate", "forward_backward", "optim_step"]
            assert remote_rl_calls.requests("optim_step")[0].optimizer.lr == 0.1

        def test_each_test_has_a_run_and_a_log_of_its_own(remote_rl_mock, remote_rl_calls):
            assert remote_rl_mock.info().result().pristine
            assert remote_rl_calls.names() == ["start"]

        @pytest.mark.parametrize("over", ["inprocess", "http"])
        def test_sessions_with_options(remote_rl_connect, remote_rl_calls, over):
            small = remote_rl_connect(over=over, vocab_size=12, eos_token_ids=(), seed=3)
            large = remote_rl_connect(over=over, profile="full")
            assert small.info().result().model.vocab_size == 12
            assert large.info().result().model.parameters > 100_000
            assert (over == "http") == ("http" in repr(small))
            step(small)
            step(large)
            small.training.save("a").result()
            large.training.save("a").result()  # a directory of its own
            assert [run.count("save") for run in remote_rl_calls.runs()] in ([1, 1], [0, 2])

        def test_the_same_seed_gives_the_same_bits(remote_rl_connect):
            one, same, over_http, other = (
                step(remote_rl_connect(**options))
                for options in (dict(seed=1), dict(seed=1), dict(seed=1, over="http"), dict(seed=2))
            )
            assert one == same == over_http != other

        def test_runs_that_share_a_directory(remote_rl_connect, tmp_path):
            first = remote_rl_connect(checkpoint_dir=tmp_path / "here")
            step(first)
            first.training.save("one").result()
            second = remote_rl_connect(checkpoint_dir=tmp_path / "here", start="one", over="http")
            assert second.weights.version().result().trainer == 2

        def test_server(remote_rl_server, remote_rl_calls):
            with connect(remote_rl_server.url) as rl:
                step(rl)
            assert remote_rl_server.calls is remote_rl_calls
            assert remote_rl_calls.count("optim_step") == 1

        @pytest.mark.parametrize("over", ["inprocess", "http"])
        def test_transport_faults(remote_rl_connect, over):
            faults = Faults(lose_response=0.5, duplicate=0.5)
            bad = remote_rl_connect(over=over, transport_faults=faults)
            assert step(bad) == step(remote_rl_connect())
            assert faults.injected

        async def wait(operation):
            return await operation

        def test_from_an_event_loop(remote_rl_mock):
            import asyncio
            assert asyncio.run(wait(remote_rl_mock.weights.version())).trainer == 0
        """,
    )
    assert ran.code == 0, ran.output
    assert ran.counts["passed"] == 10


def test_marker_command_line_and_project_say_the_defaults(tmp_path: Path) -> None:
    tests = """
        pytestmark = pytest.mark.remote_rl(seed=3, vocab_size=20, eos_token_ids=())

        def test_module(remote_rl_mock):
            info = remote_rl_mock.info().result()
            assert info.model.vocab_size == 20
            assert "http" in repr(remote_rl_mock)

        @pytest.mark.remote_rl(vocab_size=30)
        class TestClass:
            @pytest.mark.remote_rl(over="inprocess")
            def test_the_closest_wins(self, remote_rl_mock, remote_rl_connect, remote_rl_server):
                assert remote_rl_mock.info().result().model.vocab_size == 30
                assert "http" not in repr(remote_rl_mock)
                assert remote_rl_connect(vocab_size=40).info().result().model.vocab_size == 40
                with connect(remote_rl_server.url) as rl:
                    assert rl.info().result().model.vocab_size == 30

        def test_size(remote_rl_mock):
            small = remote_rl_mock.info().result().model.parameters < 10_000
            print("small" if small else "large")
    """
    line = run_pytest(tmp_path, tests, "--remote-rl-over=http", "-rP")
    assert (line.code, line.counts["passed"]) == (0, 3), line.output
    assert "\nsmall\n" in line.output
    ini = "remote_rl_over = http\nremote_rl_profile = full\n"
    project = run_pytest(tmp_path, tests, "-rP", ini=ini)
    assert (project.code, project.counts["passed"]) == (0, 3), project.output
    assert "\nlarge\n" in project.output


def test_faults_come_out_by_name(tmp_path: Path) -> None:
    ran = run_pytest(
        tmp_path,
        """
        @pytest.mark.parametrize("over", ["inprocess", "http"])
        @pytest.mark.parametrize(
            ("given", "error"),
            [
                ("BackendError", errors.BackendError),
                (errors.InvalidRequestError, errors.InvalidRequestError),
                (ValueError("a wild one"), errors.BackendError),
                ("RunLostError", errors.RunLostError),
            ],
        )
        def test_each(remote_rl_connect, remote_rl_calls, over, given, error):
            rl = remote_rl_connect(over=over, faults=[fault("generate", call=2, error=given)])
            step(rl)
            with pytest.raises(errors.RemoteRLError) as caught:
                step(rl)
            assert type(caught.value) is error
            assert remote_rl_calls.failed == ["generate"]

        @pytest.mark.parametrize("over", ["inprocess", "http"])
        def test_a_hang_stalls(remote_rl_connect, over):
            rl = remote_rl_connect(
                over=over, faults=[fault("generate", error="hang")], stall_timeout=0.5
            )
            with pytest.raises(errors.StalledError):
                step(rl)
            step(rl)

        @pytest.mark.remote_rl(faults=[fault("optim_step", when="after")])
        def test_after_the_work(remote_rl_mock, remote_rl_calls):
            with pytest.raises(errors.BackendError):
                step(remote_rl_mock)
            with pytest.raises(errors.ConflictError):  # nobody knows the weights
                remote_rl_mock.weights.sync().result()

        def test_a_start_that_fails(remote_rl_connect):
            with pytest.raises(errors.BackendError):
                remote_rl_connect(faults=[fault("start")])
        """,
    )
    assert ran.code == 0, ran.output
    assert ran.counts["passed"] == 12


def test_what_is_misspelt_is_refused(tmp_path: Path) -> None:
    said = {
        "sede": "UnknownNameError: .*'sede'.*did you mean 'seed'",
        "marker": "UnknownNameError: .*'latenzy'.*did you mean 'latency'",
        "over": "over must be one of",
        "profile": "no profile 'slow'.*fast, full",
        "fault": "'generte'.*did you mean 'generate'",
        "lease": "lease_seconds= is for over='http'",
        "positional": "takes options by name",
    }
    ran = run_pytest(
        tmp_path,
        """
        @pytest.mark.parametrize(
            "options",
            [
                dict(sede=3),
                dict(over="tcp"),
                dict(profile="slow"),
                dict(faults=[fault("generte")]),
                dict(lease_seconds=3),
            ],
        )
        def test_call(remote_rl_connect, options):
            remote_rl_connect(**options)

        @pytest.mark.remote_rl(latenzy=3)
        def test_marker(remote_rl_server):
            pass

        @pytest.mark.remote_rl(3)
        def test_positional(remote_rl_mock):
            pass
        """,
    )
    assert (ran.code, ran.counts) == (1, {"failed": 5, "error": 2}), ran.output
    for name, sentence in said.items():
        assert re.search(sentence, ran.output), f"{name}: {ran.output}"


def test_what_nobody_looked_at_fails_the_test(tmp_path: Path) -> None:
    ran = run_pytest(
        tmp_path,
        """
        @pytest.mark.parametrize("over", ["inprocess", "http"])
        def test_operation(remote_rl_connect, over):
            remote_rl_connect(over=over, faults=[fault("sync")]).weights.sync()

        @pytest.mark.parametrize("over", ["inprocess", "http"])
        def test_two_sessions(remote_rl_connect, over):
            for operation in ("sync", "generate"):
                rl = remote_rl_connect(over=over, faults=[fault(operation)])
                rl.weights.sync()
                rl.sampling.generate([[1]], SamplingParams(max_tokens=2))

        def test_session(remote_rl_server):
            test_session.held = connect(remote_rl_server.url)

        def test_session_that_may_stay(remote_rl_serve):
            server = remote_rl_serve(leave_open=True)
            test_session_that_may_stay.held = connect(server.url)
        """,
    )
    assert (ran.code, ran.counts) == (1, {"passed": 6, "error": 5}), ran.output
    assert ran.output.count("raised by sync, whose result was not awaited") >= 4
    assert "besides: BackendError" in ran.output
    assert "a session still held the run at http://127.0.0.1:" in ran.output


def test_a_failed_test_shows_its_own_failure_and_waits_for_nothing(tmp_path: Path) -> None:
    ran = run_pytest(
        tmp_path,
        """
        @pytest.mark.remote_rl(faults=[fault("sync")])
        def test_noted(remote_rl_mock):
            held = remote_rl_mock.weights.sync()
            remote_rl_mock.weights.version().result()
            assert 1 == 2, "the user's own"

        @pytest.mark.remote_rl(faults=[fault("generate", error="hang")], stall_timeout=3000)
        @pytest.mark.parametrize("over", ["inprocess", "http"])
        def test_hanging(remote_rl_connect, over):
            rl = remote_rl_connect(over=over)
            rl.sampling.generate([[1]], SamplingParams(max_tokens=2))
            assert 1 == 3, "while something hangs"

        def test_session(remote_rl_server):
            test_session.held = connect(remote_rl_server.url)
            assert 1 == 4

        @pytest.mark.remote_rl(faults=[fault("sync")])
        def test_skipped(remote_rl_mock):
            remote_rl_mock.weights.sync()
            pytest.skip("no need")
        """,
    )
    assert (ran.code, ran.counts) == (1, {"failed": 4, "skipped": 1}), ran.output
    assert "the user's own" in ran.output
    assert ran.output.count("AssertionError: while something hangs") == 2
    assert "BackendError: a fault" in ran.output
    assert "raised by sync, whose result was not awaited" in ran.output


def test_a_server_that_dies_and_comes_back(tmp_path: Path) -> None:
    ran = run_pytest(
        tmp_path,
        """
        @pytest.mark.remote_rl(faults=[fault("optim_step", call=2)])
        def test_restart(remote_rl_server, remote_rl_calls):
            with pytest.raises(errors.RunLostError) as lost:
                with connect(remote_rl_server.url) as rl:
                    step(rl)
                    rl.training.save("one").result()
                    remote_rl_server.restart()
                    step(rl)
            with connect(remote_rl_server.url, start=lost.value.details["last_checkpoint"]) as rl:
                step(rl)
                step(rl)  # the fault belonged to the run that died
            before, after = remote_rl_calls.runs()
            assert before.names() == ["start", "generate", "forward_backward", "optim_step", "save"]
            assert after.names("load", "optim_step") == ["load", "optim_step", "optim_step"]

        def test_restart_with_other_options(remote_rl_server):
            remote_rl_server.restart(vocab_size=12, eos_token_ids=())
            with connect(remote_rl_server.url) as rl:
                assert rl.info().result().model.vocab_size == 12

        def test_crash(remote_rl_server):
            remote_rl_server.crash()
            with pytest.raises(errors.UnreachableError):
                connect(remote_rl_server.url)
        """,
    )
    assert (ran.code, ran.counts["passed"]) == (0, 3), ran.output


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    ran = run_pytest(tmp_path, "def test(remote_rl_mock): pass", "-p", f"no:{NAME}")
    assert (ran.code, ran.counts) == (1, {"error": 1})
    assert "fixture 'remote_rl_mock' not found" in ran.output


def test_it_explains_itself(tmp_path: Path) -> None:
    fixtures = run_pytest(tmp_path, "", "--fixtures").output
    for name in ("mock", "connect", "server", "serve", "calls"):
        assert f"remote_rl_{name}" in fixtures
    assert "_remote_rl_runs" not in fixtures
    assert "@pytest.mark.remote_rl(**options)" in run_pytest(tmp_path, "", "--markers").output
