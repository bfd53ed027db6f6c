"""Shim (loop side, above the client): rules that verl's keys share.

Imports the rules of all shims. `keys` says how the tables are read.
"""

from __future__ import annotations

from typing import Final

from ..common.rules import ByMode, Irrelevant, Only, Rule

SYNC: Final = "sync"
SEPARATE_ASYNC: Final = "separate_async"


def by_mode(*, sync: Rule, separate_async: Rule) -> ByMode:
    """Another rule in each mode of verl's V1 trainer."""
    return ByMode({SYNC: sync, SEPARATE_ASYNC: separate_async})


LAYOUT = Irrelevant(
    "it changes the speed and memory of an engine inside verl; the server's own configuration "
    "lays its engine out"
)
UNREAD = Irrelevant("verl's V1 trainer reads it nowhere, with any engine")
CALLED = Irrelevant("the class that verl builds the section with; set by verl")
FILLED = Only((), "verl fills it in at run time")
REMOTE_LAYOUT: Final = "the accelerators belong to the server, whose own configuration lays it out"
PRECISION: Final = (
    "the precision is the server's own configuration; set it there and leave this key alone"
)
