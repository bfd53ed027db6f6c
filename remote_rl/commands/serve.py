"""Command line: `remote-rl serve` (imports commands.values; the server in `run`)."""

from __future__ import annotations

import argparse
import asyncio

from .values import backend_options, read_token, size_in_bytes

NAME = "serve"
SUMMARY = "run a backend and serve it over HTTP"
DESCRIPTION = """\
Runs one backend in this process and serves it until Ctrl-C or SIGTERM. When clients can connect,
one line on stdout says where:

  $ remote-rl serve mock --port 0
  remote_rl: serving mock at http://127.0.0.1:41873 - connect("http://127.0.0.1:41873")

Options of the backend are its own; an unknown one is refused with the nearest that exists. They
come from a TOML file, from --set, or both, where --set wins:

  $ remote-rl serve mock --config mock.toml --set seed=3 --set 'latency={"generate": 0.1}'

From other machines a token is needed, and TLS unless the network is trusted:

  $ openssl rand -hex 32 > token
  $ remote-rl serve mock --host 0.0.0.0 --token-file token --tls-cert cert.pem --tls-key key.pem
  (elsewhere) $ REMOTE_RL_TOKEN=... python loop.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's own arguments."""
    parser.add_argument("backend", help="its name, e.g. mock or arctic")
    address = parser.add_argument_group("where")
    address.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    address.add_argument("--port", type=int, default=7700, help="0 takes a free one (%(default)s)")
    address.add_argument(
        "--max-body",
        type=size_in_bytes,
        default=4 << 30,
        metavar="SIZE",
        help="largest message, in bytes or as 512M, 4G (4G)",
    )
    access = parser.add_argument_group("who may connect")
    access.add_argument(
        "--token-file", metavar="FILE", help="holds the token (else REMOTE_RL_TOKEN)"
    )
    access.add_argument("--tls-cert", metavar="FILE", help="certificate chain, PEM")
    access.add_argument("--tls-key", metavar="FILE", help="its key, PEM")
    run_group = parser.add_argument_group("the run")
    run_group.add_argument(
        "--checkpoint-dir", metavar="DIR", help="for save and export; without it they are refused"
    )
    run_group.add_argument("--config", metavar="FILE.toml", help="options of the backend")
    run_group.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one option of the backend, VALUE as JSON or a bare word; may be repeated",
    )
    run_group.add_argument(
        "--lease",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long a silent client keeps its rights (%(default)g)",
    )
    run_group.add_argument(
        "--stall-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long a running operation may report nothing (%(default)g)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves; 0 after a stop by signal."""
    from ..server.serve import Endpoint, serve

    endpoint = Endpoint(
        host=arguments.host,
        port=arguments.port,
        token=read_token(arguments.token_file),
        certificate=arguments.tls_cert,
        key=arguments.tls_key,
    )
    asyncio.run(
        serve(
            arguments.backend,
            backend_options(arguments.config, arguments.settings),
            endpoint,
            checkpoint_dir=arguments.checkpoint_dir,
            max_body=arguments.max_body,
            lease_seconds=arguments.lease,
            stall_timeout=arguments.stall_timeout,
        )
    )
    return 0
