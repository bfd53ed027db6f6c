"""The launchers of examples/verl: what they give to verl's own command line, verl and the shim
accept, and what their scripts prepare, verl's own reward scores."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import tomllib
from contextlib import closing
from pathlib import Path
from typing import Any

import hydra
import pyarrow
import pytest
from pyarrow import parquet
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.reward_score import default_compute_score

from remote_rl.errors import InvalidRequestError, UnsupportedError
from shims.common.rules import Irrelevant, Only, find
from shims.verl.config import check
from shims.verl.keys import TABLE

FOLDER = Path(__file__).parents[2] / "examples" / "verl"
LAUNCHERS = sorted(FOLDER.glob("*.sh"))
URL = "http://127.0.0.1:7711"

#: stands first on the PATH of a launcher: writes down what it is called with
_PYTHON = """#!/bin/sh
printf '%s\\n' "$@" > "$SEEN"
"""


def arguments_of(launcher: Path, folder: Path, *more: str) -> list[str]:
    """What the launcher, run by bash, starts Python with."""
    python, seen = folder / "bin" / "python", folder / "seen"
    python.parent.mkdir(exist_ok=True)
    python.write_text(_PYTHON, encoding="utf-8")
    python.chmod(0o755)
    environment = {
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "SEEN": str(seen),
        "MODEL": str(folder / "the model"),
        "DATA": str(folder / "data"),
        "URL": URL,
    }
    subprocess.run(["bash", str(launcher), *more], env=environment, cwd=folder, check=True)
    return seen.read_text(encoding="utf-8").splitlines()


def composed(launcher: Path, folder: Path, *more: str) -> Any:
    """verl's whole configuration, by the grammar and the schema of its command line."""
    module, name, *overrides = arguments_of(launcher, folder, *more)
    assert (module, name) == ("-m", "verl.trainer.main_ppo")
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer", overrides)


def run(script: str, *arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_both_golden_runs_are_there() -> None:
    assert [each.stem for each in LAUNCHERS] == ["bird_text_to_sql", "gsm8k_qwen3"]


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda each: each.stem)
def test_verl_and_the_shim_accept_a_launcher(launcher: Path, tmp_path: Path) -> None:
    config = composed(launcher, tmp_path)
    assert check(config).url == URL
    validate_config(
        config=config,
        use_reference_policy=need_reference_policy(config),
        use_critic=need_critic(config),
    )
    assert not need_critic(config)
    assert need_reference_policy(config)
    assert config.actor_rollout_ref.model.path == str(tmp_path / "the model")
    assert config.data.train_files == str(tmp_path / "data" / "train.parquet")


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda each: each.stem)
def test_further_arguments_win_and_a_refused_one_is_refused(launcher: Path, tmp_path: Path) -> None:
    assert composed(launcher, tmp_path, "trainer.total_epochs=1").trainer.total_epochs == 1
    with pytest.raises(UnsupportedError, match=r"lora_rank=8"):
        check(composed(launcher, tmp_path, "actor_rollout_ref.model.lora_rank=8"))


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda each: each.stem)
def test_a_launcher_says_what_it_lacks(launcher: Path) -> None:
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", str(launcher)], env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "MODEL: the directory of the model that the server serves" in done.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda each: each.stem)
def test_lengths_fit_the_server(launcher: Path, tmp_path: Path) -> None:
    config = composed(launcher, tmp_path)
    server = tomllib.loads(launcher.with_suffix(".toml").read_text(encoding="utf-8"))
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert server["model"]["context_length"] == longest
    group = config.data.max_prompt_length
    group += config.actor_rollout_ref.rollout.n * config.data.max_response_length
    assert server["training"]["token_budget"] >= group  # so that a prompt is computed once
    assert config.data.train_batch_size % config.actor_rollout_ref.actor.ppo_mini_batch_size == 0


def test_verls_rule_scores_prepared_gsm8k(tmp_path: Path) -> None:
    source, out = tmp_path / "train.jsonl", tmp_path / "made" / "train.parquet"
    problem = {"question": "How many legs have 300 spiders?", "answer": "8 each.\n#### 2,400"}
    source.write_text(json.dumps(problem) + "\n", encoding="utf-8")
    assert "1 problems" in run("prepare_gsm8k.py", source, out)
    (row,) = parquet.read_table(out).to_pylist()
    assert row["prompt"][0]["content"].startswith(problem["question"])
    truth = row["reward_model"]["ground_truth"]
    for said, wanted in (("It is\n#### 2,400", 1), ("#### 240", 0), ("2400", 0)):
        assert default_compute_score(row["data_source"], said, truth, row["extra_info"]) == wanted

    again = tmp_path / "again.parquet"  # as Hugging Face ships it
    parquet.write_table(pyarrow.Table.from_pylist([problem]), again)
    run("prepare_gsm8k.py", again, out)
    assert parquet.read_table(out).to_pylist() == [row]


def test_a_solution_without_its_number_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "train.jsonl"
    source.write_text('{"question": "How many?", "answer": "Many."}\n', encoding="utf-8")
    command = [sys.executable, str(FOLDER / "prepare_gsm8k.py"), str(source), str(tmp_path / "o")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "problem 0: its answer does not end" in done.stderr


def test_the_launchers_own_reward_scores_prepared_bird(tmp_path: Path) -> None:
    database = tmp_path / "databases" / "towns" / "towns.sqlite"
    database.parent.mkdir(parents=True)
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE town (name TEXT, people INTEGER)")
        connection.execute("INSERT INTO town VALUES ('Chur', 39)")
    asked = {"db_id": "towns", "question": "Which towns?", "evidence": "towns are in town"}
    questions = [{**asked, "SQL": "SELECT name FROM town"}, {**asked, "SQL": "SELECT x FROM town"}]
    (tmp_path / "train.json").write_text(json.dumps(questions), encoding="utf-8")
    out = tmp_path / "train.parquet"
    printed = run("prepare_bird.py", tmp_path / "train.json", tmp_path / "databases", out)
    assert "1 questions" in printed
    assert "1 left out" in printed
    (row,) = parquet.read_table(out).to_pylist()
    content = row["prompt"][0]["content"]
    for part in ("CREATE TABLE town", "Question: Which towns?", "Hint: towns are in town"):
        assert part in content

    reward = get_custom_reward_fn(composed(FOLDER / "bird_text_to_sql.sh", tmp_path))
    assert reward is not None
    truth = row["reward_model"]["ground_truth"]
    for name, wanted in (("name", 1.0), ("people", 0.0)):
        given = reward(
            data_source=row["data_source"],
            solution_str=f"```sql\nSELECT {name} FROM town\n```",
            ground_truth=truth,
            extra_info=row["extra_info"],
        )
        assert given == wanted


def migration() -> list[tuple[str, str]]:
    """Each row of the page's table: the script's line, and what to do with it."""
    page = (FOLDER.parents[1] / "docs" / "verl.md").read_text(encoding="utf-8")
    section = page.partition("## From local FSDP and vLLM\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^`]+`|\(new\)) \| (\*\*.+?) \|", section, re.MULTILINE)
    return [(line.strip("`"), told) for line, told in rows]


def code(told: str) -> str:
    return re.findall(r"`([^`]+)`", told)[0]


def line_for_line(line: str, told: str) -> list[str]:
    """What the page makes of a line."""
    if told.startswith("**add**"):
        return [code(told)]
    if told.startswith("**change**"):
        return [f"{line.partition('=')[0]}={code(told)}"]
    return [] if told.startswith("**delete**") else [line]


def local_with(lines: list[str]) -> Any:
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer", lines)


def test_a_local_script_is_accepted_once_the_page_was_followed() -> None:
    assert len(migration()) > 40
    lines = [each for line, told in migration() for each in line_for_line(line, told)]
    config = local_with(lines)
    assert check(config).url == "http://127.0.0.1:7700"
    assert config.actor_rollout_ref.rollout.n == 8


@pytest.mark.parametrize(("line", "told"), migration(), ids=lambda each: each.partition("=")[0])
def test_a_line_of_a_local_script_is_refused_where_the_page_says_so(line: str, told: str) -> None:
    """With every other line as the page wants it."""
    others = [each for a, b in migration() if a != line for each in line_for_line(a, b)]
    if told.startswith(("**stays**", "**may stay**")):
        rule = find(line.partition("=")[0], TABLE)
        if not isinstance(rule, Only):  # such a rule says what may stay of several values
            assert isinstance(rule, Irrelevant) is told.startswith("**may stay**"), rule
        check(local_with([*others, line]))
    elif told.startswith("**add**"):
        with pytest.raises(InvalidRequestError, match=r"engine_kwargs\.remote_rl"):
            check(local_with(others))
    else:
        key = line.lstrip("+").partition("=")[0]
        section = key.rpartition(".")[0]
        with pytest.raises(UnsupportedError) as caught:
            check(local_with([*others, line]))
        assert caught.value.details["key"] in (key, section), caught.value
