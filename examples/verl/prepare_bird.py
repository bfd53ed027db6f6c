"""BIRD as verl reads it: one row a question, with the schema of its database in the prompt.

    python prepare_bird.py train.json train_databases bird/train.parquet

Both are local, as BIRD's archives hold them; nothing is downloaded. A question whose reference
query fails, or takes longer than --seconds, is left out and counted. Needs pyarrow (verl has it).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bird_reward import REFUSED, rows_of

TABLES = "SELECT sql FROM sqlite_master WHERE type = 'table' AND sql IS NOT NULL ORDER BY name"
ASKED = "Think briefly, then answer with one SQLite query in a ```sql block."


def answers(database: Path, sql: str, seconds: float) -> bool:
    """Whether the query runs to its end."""
    try:
        for _ in rows_of(str(database), sql, seconds):
            pass
    except REFUSED:
        return False
    return True


def row(question: dict[str, Any], database: Path, index: int) -> dict[str, Any]:
    """A question in verl's columns."""
    schema = "\n\n".join(text for (text,) in rows_of(str(database), TABLES, 60.0))
    hint = f"\n\nHint: {question['evidence']}" if question.get("evidence") else ""
    content = f"{schema}\n\nQuestion: {question['question']}{hint}\n\n{ASKED}"
    return {
        "data_source": "bird",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"style": "rule", "ground_truth": question["SQL"]},
        "extra_info": {"index": index, "database": str(database)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", type=Path)
    parser.add_argument("databases", type=Path, help="holds NAME/NAME.sqlite for each db_id")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=5.0)
    arguments = parser.parse_args()
    questions = json.loads(arguments.questions.read_text(encoding="utf-8"))
    rows = []
    for index, question in enumerate(questions):
        name = question["db_id"]
        database = (arguments.databases / name / f"{name}.sqlite").resolve()
        if not database.is_file():
            raise SystemExit(f"question {index}: there is no {database}")
        if answers(database, question["SQL"], arguments.seconds):
            rows.append(row(question, database, index))

    import pyarrow
    from pyarrow import parquet

    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), arguments.out)
    print(f"{len(rows)} questions in {arguments.out}, {len(questions) - len(rows)} left out")


if __name__ == "__main__":
    main()
