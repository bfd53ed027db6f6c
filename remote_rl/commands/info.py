"""Command line: `remote-rl info` (imports commands.values; the transport in `run`)."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import TYPE_CHECKING, Any

from .values import read_token

if TYPE_CHECKING:
    from ..run_info import RunInfo

NAME = "info"
SUMMARY = "say what a server runs and offers"
DESCRIPTION = """\
Asks a server what its run is. Takes no lease, so it disturbs nobody who works there.

  $ remote-rl info http://127.0.0.1:7700
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's own arguments."""
    parser.add_argument("url", help="http://HOST:PORT of the server")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument(
        "--token-file", metavar="FILE", help="holds the token (else REMOTE_RL_TOKEN)"
    )
    parser.add_argument("--ca-file", metavar="FILE", help="certificates to trust, PEM")
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="SECONDS", help="(%(default)g)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints what the server says."""
    answer = asyncio.run(_ask(arguments))
    if arguments.json:
        print(json.dumps(as_json(answer), indent=2))
    else:
        print("\n".join(as_lines(answer)))
    return 0


async def _ask(arguments: argparse.Namespace) -> RunInfo:
    from ..errors import UnreachableError
    from ..messages import ConnectionLost, Describe
    from ..transports.http import HttpTransport

    transport = HttpTransport(
        arguments.url, token=read_token(arguments.token_file), ca_file=arguments.ca_file
    )
    try:
        answer: RunInfo = await transport.call(Describe(), arguments.timeout)
        return answer
    except ConnectionLost as lost:
        raise UnreachableError(
            f"nothing answers at {transport.target} ({lost}); is `remote-rl serve` running there?"
        ) from lost
    finally:
        await transport.close()


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
        ("state", "pristine" if answer.pristine else "trained or loaded"),
        ("driver", "connected" if answer.driver else "none"),
        ("checkpoints", "can be saved" if answer.checkpoint_dir else "no --checkpoint-dir"),
    ]
    rows += [
        (name.replace("_", " "), _listed(sorted(offered)) or "none")
        for name, offered in as_json(answer)["capabilities"].items()
    ]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def _listed(names: Any) -> str:
    return ", ".join(map(str, names))
