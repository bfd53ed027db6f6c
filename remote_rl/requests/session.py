"""Contract: requests of the session face (imports the contract's types and losses)."""

from __future__ import annotations

import attrs

from ..types.fields import (
    SCHEDULING,
    SEMANTIC,
    integer,
    one_of,
    optional,
    plain,
    strict,
    text,
)
from .base import FileKind, Half, Request, check_name


@strict
@attrs.frozen(kw_only=True)
class Info(Request):
    """Asks what the run is and what its backend offers."""


@strict
@attrs.frozen(kw_only=True)
class Tokenizer(Request):
    """Asks for the tokenizer's files."""


@strict
@attrs.frozen(kw_only=True)
class Reset(Request):
    """Back to the base weights: optimizer, seeds, reference and snapshots too."""


@strict
@attrs.frozen(kw_only=True)
class Sleep(Request):
    """Lets one half give its memory back; an operation that needs it wakes it."""

    half: Half = attrs.field(metadata=SCHEDULING, validator=one_of(("training", "sampling")))


@strict
@attrs.frozen(kw_only=True)
class Wake(Request):
    """Wakes one half before it is needed."""

    half: Half = attrs.field(metadata=SCHEDULING, validator=one_of(("training", "sampling")))


@strict
@attrs.frozen(kw_only=True)
class ListFiles(Request):
    """Names and sizes of the files of a checkpoint or export."""

    kind: FileKind = attrs.field(metadata=SEMANTIC, validator=one_of(("checkpoint", "export")))
    name: str = attrs.field(metadata=SEMANTIC, validator=check_name)


@strict
@attrs.frozen(kw_only=True)
class ReadFile(Request):
    """`length` bytes of one of those files, from `offset`. identity: the listing's; refused with
    `ConflictError` where something else has the name by now."""

    kind: FileKind = attrs.field(metadata=SEMANTIC, validator=one_of(("checkpoint", "export")))
    name: str = attrs.field(metadata=SEMANTIC, validator=check_name)
    path: str = attrs.field(metadata=SEMANTIC, validator=text())
    offset: int = attrs.field(metadata=SEMANTIC, converter=plain, validator=integer(minimum=0))
    length: int = attrs.field(metadata=SEMANTIC, converter=plain, validator=integer(minimum=0))
    identity: str | None = attrs.field(default=None, metadata=SEMANTIC, validator=optional(text()))
