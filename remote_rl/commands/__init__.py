"""Command line: one module a subcommand, each with NAME, SUMMARY, `add_arguments` and `run`
(imports nothing heavy until `run`).

A new subcommand is a new module here and one entry in `COMMANDS`.
"""

from types import ModuleType

from . import conformance, demo, info, serve, top

COMMANDS: tuple[ModuleType, ...] = (demo, serve, info, top, conformance)
