"""The table of docs/skyrl.md that takes a script for local FSDP and vLLM to a run, held against
SkyRL's parser, SkyRL's own checks and the shim's."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints import main_base
from skyrl_workload import overrides

import shims.skyrl
from remote_rl.errors import InvalidRequestError, UnsupportedError
from shims.common.rules import Irrelevant, Only, find
from shims.skyrl.entrypoint import parse
from shims.skyrl.keys import TABLE

PAGE = Path(__file__).parents[2] / "docs" / "skyrl.md"
TARGET = "trainer.remote.target=http://127.0.0.1:7700"

# SkyRL 0.4.0 takes the old name that scripts have, with a word about it
pytestmark = pytest.mark.filterwarnings("ignore:trainer.strategy='fsdp2':DeprecationWarning")

Accept = Callable[[list[str]], SkyRLTrainConfig]


def migration() -> list[tuple[str, str]]:
    """Each row of the page's table: the script's line, and what to do with it."""
    page = PAGE.read_text(encoding="utf-8")
    section = page.partition("## From local FSDP and vLLM\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^`]+`|\(new\)) \| (\*\*.+?) \|", section, re.MULTILINE)
    return [(line.strip("`"), told) for line, told in rows]


def codes(told: str) -> list[str]:
    return re.findall(r"`([^`]+)`", told)


def line_for_line(line: str, told: str) -> list[str]:
    """What the page makes of a line."""
    if told.startswith("**add**"):
        return codes(told)[:1]
    if told.startswith("**change**"):
        return [f"{line.partition('=')[0]}={codes(told)[0]}"]
    return [] if told.startswith("**delete**") else [line]


FOLLOWED = [each for line, told in migration() for each in line_for_line(line, told)]
LINES = [(line, told) for line, told in migration() if line != "(new)"]
ADDED = [codes(told)[0] for line, told in migration() if line == "(new)"]


@pytest.fixture
def accept(tmp_path: Path) -> Accept:
    """The tests' training with further lines, as the command line takes them; where it runs is
    for the lines to say."""
    inputs = {"model": tmp_path / "model", "gsm8k": tmp_path / "gsm8k.jsonl"}
    base = [
        each
        for each in overrides(inputs, "mock", tmp_path)
        if not each.startswith("trainer.remote.")
    ]
    return lambda lines: parse([*base, *(each.replace("...", "a-model") for each in lines)])


def value_at(node: Any, path: str) -> Any:
    for name in path.split("."):
        node = getattr(node, name)
    return node


def test_a_local_script_is_accepted_once_the_page_was_followed(accept: Accept) -> None:
    assert len(migration()) > 18
    config = accept(FOLLOWED)
    assert f"trainer.remote.target={value_at(config, 'trainer.remote.target')}" == TARGET
    assert config.trainer.algorithm.policy_loss_type == "gspo"
    assert config.generator.n_samples_per_prompt == 8


@pytest.mark.parametrize(("line", "told"), LINES, ids=[line.partition("=")[0] for line, _ in LINES])
def test_a_line_of_a_local_script_is_refused_where_the_page_says_so(
    accept: Accept, line: str, told: str
) -> None:
    """With every other line as the page wants it."""
    key, _, value = line.partition("=")
    others = [each for a, b in migration() if a != line for each in line_for_line(a, b)]
    if told.startswith(("**stays**", "**may stay**")):
        config = accept([*others, line])
        rule = find(key, TABLE)
        if told.startswith("**stays**"):
            assert not isinstance(rule, Irrelevant), rule
            assert str(value_at(config, key)) == str(type(value_at(config, key))(value))
        elif not isinstance(rule, Only):  # such a rule says what may stay of several values
            assert isinstance(rule, Irrelevant), rule
    else:
        assert told.startswith(("**delete**", "**change**")), told
        with pytest.raises(UnsupportedError) as caught:
            accept([*others, line])
        assert caught.value.details["key"] == key, caught.value
    for refused in re.findall(r"`([^`]+)` is refused", told):
        with pytest.raises(UnsupportedError) as caught:
            accept([*others, f"{key}={refused}"])
        assert caught.value.details["key"] == key


@pytest.mark.parametrize(
    "path",
    [
        "trainer.policy_mini_batch_size",
        "trainer.update_epochs_per_batch",
        *[f"trainer.policy.optimizer_config.{name}" for name in ("adam_betas", "weight_decay")],
        *[f"trainer.policy.optimizer_config.{name}" for name in ("max_grad_norm", "scheduler")],
        "trainer.policy.optimizer_config.num_warmup_steps",
        "trainer.algorithm.eps_clip_low",
    ],
)
def test_what_stays_with_a_line_is_read(path: str) -> None:
    rule = find(path, TABLE)
    assert rule is not None
    assert not isinstance(rule, (Irrelevant, Only)), rule


def test_a_script_without_the_added_lines_goes_nowhere_else(
    accept: Accept, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, target = ADDED
    assert target == TARGET
    with pytest.raises(InvalidRequestError, match=r"trainer\.remote\.target is missing"):
        accept([each for each in FOLLOWED if each != target])
    called: list[str] = []
    monkeypatch.setattr(shims.skyrl, "main", lambda: called.append("shims.skyrl"))
    monkeypatch.setattr(sys, "argv", ["main_base", entry])
    main_base.main()
    assert called == ["shims.skyrl"]


def test_an_estimator_that_needs_a_critic_goes_with_it(accept: Accept) -> None:
    """SkyRL's own check."""
    (told,) = [told for line, told in LINES if line.startswith("trainer.critic.model.path=")]
    (estimator,) = codes(told)
    with pytest.raises(AssertionError, match=r"trainer\.critic\.model\.path"):
        accept([*FOLLOWED, f"trainer.algorithm.{estimator}"])
