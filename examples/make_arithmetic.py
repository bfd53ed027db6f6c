"""Writes examples/data/arithmetic.jsonl: every sum of two digits that is itself one digit."""

from __future__ import annotations

import json
from pathlib import Path

TARGET = Path(__file__).parent / "data" / "arithmetic.jsonl"


def problems() -> list[dict[str, str]]:
    """{"prompt": "3+4=", "answer": "7"} and the other 54."""
    return [
        {"prompt": f"{left}+{right}=", "answer": str(left + right)}
        for left in range(10)
        for right in range(10)
        if left + right < 10
    ]


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text("".join(json.dumps(problem) + "\n" for problem in problems()))
    print(f"{len(problems())} problems in {TARGET.name}")
