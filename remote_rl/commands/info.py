"""Command line: `remote-rl info` (imports commands.asking)."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import TYPE_CHECKING, Any

from .asking import add_server_arguments, ask, server_of

if TYPE_CHECKING:
    from ..run_info import RunInfo

NAME = "info"
SUMMARY = "say what a server runs and offers"
DESCRIPTION = """\
Asks a server what its run is. Takes no lease, so it disturbs nobody who works there.

  $ remote-rl info http://127.0.0.1:7700
  $ remote-rl info https://gpu-box:7700 --token-file token --ca-file ca.pem --json

Exit codes: 0 it answered (also where it says that its run is lost), 1 nothing answers or the token
is wrong, 2 wrong usage.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's own arguments."""
    add_server_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def run(arguments: argparse.Namespace) -> int:
    """Prints what the server says."""
    answer = asyncio.run(_ask(arguments))
    if arguments.json:
        print(json.dumps(as_json(answer), indent=2))
    else:
        print("\n".join(as_lines(answer)))
    return 0


async def _ask(arguments: argparse.Namespace) -> RunInfo:
    from ..messages import Describe

    async with server_of(arguments) as server:
        answer: RunInfo = await ask(server, Describe(), arguments.timeout)
        return answer


def as_json(answer: RunInfo) -> dict[str, Any]:
    """The fields as JSON values, sets sorted."""
    import attrs

    def plain(_: Any, __: Any, value: Any) -> Any:
        return sorted(value) if isinstance(value, frozenset) else value

    return attrs.asdict(answer, value_serializer=plain)


def as_lines(answer: RunInfo) -> list[str]:
    """The same for reading."""
    model, versions = answer.model, answer.versions
    sampler = "unknown" if versions.sampler is None else str(versions.sampler)
    label = "" if versions.label is None else f" (label {versions.label})"
    context = "unlimited" if model.context_length is None else str(model.context_length)
    parameters = "" if model.parameters is None else f", {model.parameters:,} parameters"
    rows = [
        ("run", answer.instance_id),
        ("software", f"{answer.software}, protocol {_listed(answer.protocol_versions)}"),
        ("backend", answer.backend),
        ("model", f"{model.name}: vocabulary {model.vocab_size}, context {context}{parameters}"),
        ("weights", f"trainer {versions.trainer}, sampler {sampler}{label}"),
        ("state", _state(answer)),
        ("devices", _devices(answer)),
        ("driver", "connected" if answer.driver else "none"),
        ("checkpoints", "can be saved" if answer.checkpoint_dir else "no --checkpoint-dir"),
    ]
    rows += [
        (name.replace("_", " "), _listed(sorted(offered)) or "none")
        for name, offered in as_json(answer)["capabilities"].items()
    ]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _state(answer: RunInfo) -> str:
    if answer.lost is not None:
        return f"LOST: {answer.lost}"
    state = "pristine" if answer.pristine else "trained or loaded"
    return f"{state}, generation paused" if answer.paused else state


def _devices(answer: RunInfo) -> str:
    held = answer.devices
    if held is None:
        return "not said"
    peak = held.reason if held.peak_flops is None else f"{held.peak_flops / 1e12:g} TFLOP/s each"
    others = f", {held.total} in all" if held.total > held.count else ""
    return f"{held.count} x {held.kind}, training in {held.dtype}{others}; {peak}"


def _listed(names: Any) -> str:
    return ", ".join(map(str, names))
