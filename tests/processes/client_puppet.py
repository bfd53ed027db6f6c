"""A client in a process of its own: runs each line of stdin (JSON text of Python source) and
answers with a line of JSON, its value or its error."""

from __future__ import annotations

import json
import sys
from typing import Any

from remote_rl import AdamW, Batch, SamplingParams, connect, errors, losses

SPACE: dict[str, Any] = {
    "AdamW": AdamW,
    "Batch": Batch,
    "SamplingParams": SamplingParams,
    "connect": connect,
    "errors": errors,
    "losses": losses,
}


def told(error: BaseException | None) -> Any:
    """An error as JSON, causes included."""
    if error is None:
        return None
    return {
        "error": type(error).__name__,
        "message": str(error),
        "details": {name: repr(value) for name, value in getattr(error, "details", {}).items()},
        "cause": told(error.__cause__),
    }


def answer(source: str) -> Any:
    """What a line gives: an expression's value, or nothing."""
    try:
        code = compile(source, "<test>", "eval")
    except SyntaxError:
        exec(compile(source, "<test>", "exec"), SPACE)
        return None
    return eval(code, SPACE)


def main() -> None:
    for line in sys.stdin:
        try:
            reply: Any = {"value": answer(json.loads(line))}
        except Exception as error:  # noqa: BLE001 - it is the answer
            reply = told(error)
        print(json.dumps(reply, default=repr), flush=True)


if __name__ == "__main__":
    main()
