"""The page docs/field-classes.md, from the fields' own metadata; run as a program, it writes it.

python tests/docs/field_classes.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from remote_rl import AdamW, Batch, SamplingParams, Tensor, losses
from remote_rl.ops import OPERATIONS
from remote_rl.types import Piece, TensorForm
from remote_rl.types.fields import KIND

PAGE = Path(__file__).parents[2] / "docs" / "field-classes.md"

CARRIED = (Batch, SamplingParams, AdamW, Tensor, TensorForm, Piece)

HEAD = """\
# Fields

Every field of every request, from the fields' own metadata. `python tests/docs/field_classes.py` \
writes this page, and a test compares it.

* **semantic**: it changes the result.
* **scheduling**: it may change when or where, never what.
* **reserved**: only its default is legal today; anything else is refused by name.
* **local**: kept by the client, never sent.
"""


def _default(field: attrs.Attribute[Any]) -> str:
    if field.default is attrs.NOTHING:
        return "required"
    if isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]
        made = getattr(field.default, "factory", None)
        return "empty" if made is dict else "by other fields"
    if isinstance(field.default, losses.Aggregation):
        return f"`{field.default.kind!r}`"
    if isinstance(field.default, frozenset):
        return f"`{{{', '.join(map(repr, sorted(field.default)))}}}`"
    return f"`{field.default!r}`"


def _rows(title: str, cls: Any) -> Iterator[str]:
    for field in attrs.fields(cls):
        kind = field.metadata.get(KIND)
        if kind is not None and field.name != "model":
            yield f"| {title} | `{field.name}` | {kind} | {_default(field)} |"


def page() -> str:
    """The whole page."""
    without = [name for name, row in OPERATIONS.items() if not list(_rows(name, row.request))]
    sections = {
        "operation": [(f"`{name}`", row.request) for name, row in OPERATIONS.items()],
        "carried": [(f"`{cls.__name__}`", cls) for cls in CARRIED],
        "loss or term": [
            (f"`{cls.__name__}`", cls)
            for cls in (*losses.LOSSES.values(), losses.KL, losses.Entropy, losses.Aggregation)
        ],
    }
    lines = [HEAD]
    for section, classes in sections.items():
        lines += [f"| {section} | field | class | default |", "|---|---|---|---|"]
        for title, cls in classes:
            lines += _rows(title, cls)
        lines.append("")
    lines.append(f"Operations without fields: {', '.join(f'`{name}`' for name in without)}.")
    lines.append("")
    lines.append(
        "Requests of the training, sampling and weights faces also have `model`, which is "
        "reserved: a run holds one model today, `'policy'`."
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
