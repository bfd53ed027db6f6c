"""Reward of BIRD text-to-SQL: 1 where the predicted query returns what the reference returns.

verl calls `compute_score` (reward.custom_reward_function). Predicted SQL is a stranger's: it may
read its database alone, which is opened read-only, one statement, for some seconds of its own, and
its rows are compared as they come, so that no more are kept than the reference has.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Any

READING = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
#: in bytes: of a value or row, of a pattern of LIKE (whose time grows with a power of it)
LIMITS = {sqlite3.SQLITE_LIMIT_LENGTH: 2**20, sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 200}
STEPS = 1000  # of SQLite's machine between two looks at the clock
REFERENCE_SECONDS = 60.0  # prepare_bird.py keeps only what took far less
REFUSED = (sqlite3.Error, sqlite3.Warning, ValueError)  # ValueError: a NUL in the statement


def rows_of(database: str, sql: str, seconds: float) -> Iterator[tuple[Any, ...]]:
    """The rows of one reading statement; one of `REFUSED` where it is none or takes too long."""
    address = f"{Path(database).resolve().as_uri()}?mode=ro"
    with closing(sqlite3.connect(address, uri=True)) as connection:
        connection.text_factory = lambda raw: raw.decode(errors="replace")
        for limit, value in LIMITS.items():
            connection.setlimit(limit, value)
        connection.set_authorizer(
            lambda action, *_: sqlite3.SQLITE_OK if action in READING else sqlite3.SQLITE_DENY
        )
        end = time.monotonic() + seconds
        connection.set_progress_handler(lambda: time.monotonic() > end, STEPS)
        yield from connection.execute(sql)


@lru_cache(maxsize=256)
def reference(database: str, sql: str) -> frozenset[tuple[Any, ...]]:
    """What the reference returns; it is the data set's, so that its failure is an error."""
    try:
        return frozenset(rows_of(database, sql, REFERENCE_SECONDS))
    except REFUSED as error:
        raise RuntimeError(f"the reference query failed on {database}: {error}: {sql}") from error


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any],
    seconds: float = 5.0,
    **_: Any,
) -> float:
    """1.0 or 0.0: whether the last ```sql block returns the same set of rows as ground_truth."""
    wanted = reference(extra_info["database"], ground_truth)
    blocks = re.findall(r"```sql\s+(.*?)```", solution_str, re.DOTALL | re.IGNORECASE)
    seen = set()
    try:
        for row in rows_of(extra_info["database"], blocks[-1] if blocks else "", seconds):
            if row not in wanted:
                return 0.0
            seen.add(row)
    except REFUSED:
        return 0.0
    return float(bool(blocks) and seen == wanted)
