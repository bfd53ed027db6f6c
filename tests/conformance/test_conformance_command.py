"""`remote-rl conformance`: what it prints, what it refuses, how it ends."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from remote_rl.cli import main

SMALL = ("--set", "vocab_size=13", "--set", "hidden_size=8", "--set", "initial_scale=1.0")


def test_it_prints_a_line_a_test_and_the_sum(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "mock", *SMALL, "--area", "Pushes", "--area", "Optimizer"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("conformance of mock: model mock, 13 ids")
    assert "  ok    test_betas_are_those_of_each_call" in lines
    assert lines.index("Optimizer") < lines.index("Pushes")
    skip = "  skip  test_a_push_of_another_dtype_is_refused_by_it: backend 'mock' takes every dtype"
    assert skip in lines
    assert lines[-1].startswith("14 tests in ")
    assert lines[-1].endswith("s: 13 passed, 1 skipped, 0 failed")


def test_a_failure_comes_with_its_rule_and_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["conformance", "mock", *SMALL, "--area", "SampledLogprobs"]
    assert main([*arguments, "-k", "trainer_agree", "-x", "--tolerance", "1e-30"]) == 1
    out = capsys.readouterr().out
    assert "  FAIL  test_sampler_and_trainer_agree_at_every_temperature[0.7]" in out
    assert "rule: After a sync, a token's logprob is the same from the sampler" in out
    assert "tolerance 1e-30" in out
    assert "1 tests in" in out, "-x stops at the first failure"
    assert "Traceback" not in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["http://127.0.0.1:9"], 2, "--destructive"),
        (["http://127.0.0.1:9", "--destructive", "--set", "seed=1"], 2, "--set"),
        (["http://127.0.0.1:9", "--destructive"], 1, "nothing answers"),
        (["mock", "--destructive"], 2, "--destructive is for a server"),
        (["mock", "--takeover"], 2, "--takeover is for a server"),
        (["mock", "--token-file", "none"], 2, "--token-file is for a server"),
        (["mokc"], 2, "did you mean 'mock'?"),
        (["mock", "--set", "vocab=3"], 2, "vocab_size"),
        (["mock", "--area", "Push"], 2, "did you mean 'Pushes'?"),
        (["mock", "-k", "no_such_test"], 2, "no test is chosen"),
        (["mock", "-k", "a ("], 2, "no expression"),
        (["ftp://host"], 2, "unknown scheme"),
    ],
)
def test_what_it_refuses(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["conformance", *arguments]) == code
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_without_pytest_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = importlib.util.find_spec

    def find_spec(name: str, *more: Any) -> Any:
        return None if name == "pytest" else original(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert main(["conformance", "mock"]) == 1
    assert "pip install 'remote-rl[testing]'" in capsys.readouterr().err


def test_its_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["conformance", "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    for word in (
        "--destructive",
        "--area",
        "--takeover",
        "--tolerance",
        "Exit codes",
        "$ remote-rl",
    ):
        assert word in out
