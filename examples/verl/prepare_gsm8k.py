"""GSM8K as verl reads it: one row a problem, rewarded by verl's own rule for this data set.

    python prepare_gsm8k.py SOURCE gsm8k/train.parquet

SOURCE is a local file with the columns question and answer, .jsonl or .parquet. Nothing is
downloaded. Needs pyarrow, which verl brings along.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

#: what verl chooses its reward by: verl.utils.reward_score
DATA_SOURCE = "openai/gsm8k"
ASKED = 'Reason step by step, and end with the answer as a number after "####".'


def read(source: Path) -> list[dict[str, Any]]:
    """The problems of a local file."""
    from pyarrow import json, parquet

    readers = {".jsonl": json.read_json, ".parquet": parquet.read_table}
    if source.suffix not in readers:
        raise SystemExit(f"{source} must be .jsonl or .parquet")
    rows: list[dict[str, Any]] = readers[source.suffix](source).to_pylist()
    return rows


def row(problem: dict[str, Any], index: int) -> dict[str, Any]:
    """A problem in verl's columns; its solution ends with "#### " and the number."""
    found = re.search(r"#### *(-?[0-9.,]+)\s*$", problem["answer"])
    if found is None:
        raise SystemExit(f'problem {index}: its answer does not end with "#### " and a number')
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{problem['question']}\n\n{ASKED}"}],
        "reward_model": {"style": "rule", "ground_truth": found[1].replace(",", "")},
        "extra_info": {"index": index},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    rows = [row(problem, index) for index, problem in enumerate(read(arguments.source))]

    import pyarrow
    from pyarrow import parquet

    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), arguments.out)
    print(f"{len(rows)} problems in {arguments.out}")


if __name__ == "__main__":
    main()
