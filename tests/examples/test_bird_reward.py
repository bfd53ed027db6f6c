"""The reward of examples/verl/bird_reward.py, on a database of two tables."""

from __future__ import annotations

import importlib.util
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "examples" / "verl" / "bird_reward.py"
TOWNS = [("Aarau", 22), ("Bern", 134), ("Chur", 39)]
REFERENCE = "SELECT name FROM town WHERE people > 30"
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"


@pytest.fixture(scope="module")
def reward() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bird_reward", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "towns of #1?.sqlite"  # a URI must not end at these
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE town (name TEXT, people INTEGER)")
        connection.executemany("INSERT INTO town VALUES (?, ?)", TOWNS)
        connection.execute("CREATE TABLE odd (raw TEXT)")
        connection.execute("INSERT INTO odd VALUES (CAST(X'ff41' AS TEXT))")
    return path


def score(
    reward: ModuleType, database: Path, said: str, wanted: str = REFERENCE, **more: Any
) -> float:
    """As verl's reward manager calls it."""
    given: float = reward.compute_score(
        data_source="bird",
        solution_str=said,
        ground_truth=wanted,
        extra_info={"database": str(database), "num_turns": 2},
        **more,
    )
    return given


def fenced(sql: str) -> str:
    return f"The towns are needed.\n```sql\n{sql}\n```\n"


@pytest.mark.parametrize(
    "sql",
    [
        REFERENCE,
        REFERENCE + ";",
        "SELECT name FROM town WHERE people >= 39 ORDER BY name DESC",
        "SELECT name FROM town WHERE name <> 'Aarau' UNION ALL SELECT 'Bern'",  # sets, as in BIRD
        "WITH big AS (SELECT * FROM town WHERE people > 30) SELECT upper(substr(name, 1, 1)) "
        "|| substr(name, 2) FROM big",
    ],
)
def test_the_same_rows_are_right(reward: ModuleType, database: Path, sql: str) -> None:
    assert score(reward, database, fenced(sql)) == 1.0


@pytest.mark.parametrize(
    "said",
    [
        fenced("SELECT name FROM town"),
        fenced("SELECT name FROM town WHERE people > 100"),
        fenced("SELECT name, people FROM town WHERE people > 30"),
        fenced("SELECT nme FROM town"),
        fenced("SELEC name"),
        fenced("SELECT name FROM town WHERE people > 30; SELECT 1"),
        fenced("SELECT '\0'"),
        fenced("SELECT '\ud800'"),
        fenced(""),
        REFERENCE,
        "```\n" + REFERENCE + "\n```",
        "",
    ],
)
def test_other_rows_errors_and_no_block_are_wrong(
    reward: ModuleType, database: Path, said: str
) -> None:
    assert score(reward, database, said) == 0.0


def test_the_last_block_counts(reward: ModuleType, database: Path) -> None:
    wrong = fenced("SELECT 1")
    assert score(reward, database, wrong + fenced(REFERENCE)) == 1.0
    assert score(reward, database, fenced(REFERENCE) + wrong) == 0.0


def test_no_rows_equal_no_rows_but_no_block_does_not(reward: ModuleType, database: Path) -> None:
    nothing = "SELECT name FROM town WHERE people < 0"
    assert score(reward, database, fenced(nothing), wanted=nothing) == 1.0
    assert score(reward, database, "I do not know.", wanted=nothing) == 0.0


def test_text_that_is_no_utf8_is_compared_too(reward: ModuleType, database: Path) -> None:
    assert score(reward, database, fenced("SELECT raw FROM odd"), "SELECT raw FROM odd") == 1.0


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM town",
        "INSERT INTO town VALUES ('Davos', 10)",
        "DROP TABLE town",
        "CREATE TEMP TABLE t AS SELECT 1",
        "PRAGMA journal_mode = DELETE",
        "ATTACH DATABASE '{other}' AS other",
        "VACUUM INTO '{other}'",
    ],
)
def test_nothing_is_written(reward: ModuleType, database: Path, tmp_path: Path, sql: str) -> None:
    before, other = database.read_bytes(), tmp_path / "other.sqlite"
    statement = sql.format(other=other)
    assert score(reward, database, fenced(statement)) == 0.0
    with pytest.raises(sqlite3.DatabaseError, match=r"not authorized|prohibited|denied"):
        list(reward.rows_of(str(database), statement, 1.0))
    assert database.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == [database]


def test_a_database_that_is_absent_is_not_made(reward: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the reference query failed"):
        score(reward, tmp_path / "none.sqlite", fenced(REFERENCE))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "sql",
    [
        f"{ENDLESS} SELECT max(i) FROM n",
        f"{ENDLESS} SELECT 'Bern' FROM n",  # rows without end, each of them a right one
    ],
)
def test_a_query_without_end_is_stopped(reward: ModuleType, database: Path, sql: str) -> None:
    began = time.monotonic()
    assert score(reward, database, fenced(sql), seconds=0.05) == 0.0
    assert time.monotonic() - began < 60


def test_a_first_wrong_row_ends_it(reward: ModuleType, database: Path) -> None:
    # by the clock alone this would take an hour
    assert score(reward, database, fenced(f"{ENDLESS} SELECT i FROM n"), seconds=3600) == 0.0


@pytest.mark.parametrize(
    "value", ["zeroblob(1 << 24)", "replace(hex(zeroblob(1 << 18)), '00', 'abcdef')"]
)
def test_large_values_are_refused(reward: ModuleType, database: Path, value: str) -> None:
    with pytest.raises((sqlite3.DataError, sqlite3.OperationalError), match="too big"):
        list(reward.rows_of(str(database), f"SELECT {value}", 5.0))


def test_a_reference_that_fails_is_an_error(reward: ModuleType, database: Path) -> None:
    with pytest.raises(RuntimeError, match="no such table: city"):
        score(reward, database, fenced(REFERENCE), wanted="SELECT name FROM city")
