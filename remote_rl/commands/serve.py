"""Command line: `remote-rl serve` (imports commands.values, errors; the
server in `run`)."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError
from .values import (
    add_backend_options,
    add_token_file,
    backend_options,
    port,
    positive_seconds,
    read_token,
    seconds,
    size_in_bytes,
    warn_of_readers,
)

if TYPE_CHECKING:
    from ..server.serve import Limits

NAME = "serve"
SUMMARY = "run a backend and serve it over HTTP, or in a Ray actor"
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

For processes of the same Ray cluster, in an actor that ends with this process; arrays cross through
the nodes' shared memory (pip install 'remote-rl[ray]'; docs/ray.md):

  $ remote-rl serve mock --ray-name run
  remote_rl: serving mock at ray:run - connect("ray:run")

GET /healthz says whether the run lives, GET /metrics (with the token) what it does, for Prometheus;
`remote-rl top URL` shows it in a terminal. A stop lets what runs end within --grace seconds and
refuses what is new; a second Ctrl-C cuts it short. docs/operations.md says more.

Exit codes: 0 stopped by a signal, 1 the backend did not start or the run was lost (start it again:
clients go on from the last checkpoint), 2 wrong usage, 130 cut short by a second Ctrl-C.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's own arguments."""
    parser.add_argument("backend", help="its name, e.g. mock or arctic")
    address = parser.add_argument_group("where")
    address.add_argument("--host", help="address to listen on (127.0.0.1)")
    address.add_argument("--port", type=port, help="0 takes a free one (7700)")
    address.add_argument(
        "--max-body",
        type=size_in_bytes,
        default=4 << 30,
        metavar="SIZE",
        help="largest message, in bytes or as 512M, 4G (4G)",
    )
    address.add_argument(
        "--io-timeout",
        type=positive_seconds,
        metavar="SECONDS",
        help="after which a body or a connection that doesn't move is given up (60)",
    )
    access = parser.add_argument_group("who may connect")
    add_token_file(access)
    access.add_argument("--tls-cert", metavar="FILE", help="certificate chain, PEM")
    access.add_argument("--tls-key", metavar="FILE", help="its key, PEM")
    ray = parser.add_argument_group("in a Ray actor, instead of over HTTP")
    ray.add_argument("--ray-name", metavar="NAME", help="of the actor, for connect('ray:NAME')")
    ray.add_argument("--ray-namespace", metavar="NAME", help="of the actor (remote_rl)")
    ray.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="of the cluster (RAY_ADDRESS, else the one on this machine)",
    )
    run_group = parser.add_argument_group("the run")
    run_group.add_argument(
        "--checkpoint-dir", metavar="DIR", help="for save and export; without it they are refused"
    )
    add_backend_options(run_group)
    run_group.add_argument(
        "--lease",
        type=positive_seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long a silent client keeps its rights (%(default)g)",
    )
    run_group.add_argument(
        "--stall-timeout",
        type=positive_seconds,
        default=300.0,
        metavar="SECONDS",
        help="how long a running operation may report nothing (%(default)g)",
    )
    run_group.add_argument(
        "--budget",
        type=size_in_bytes,
        default=4 << 30,
        metavar="SIZE",
        help="what is kept for one client, requests and results; above it its submits wait (4G)",
    )
    run_group.add_argument(
        "--grace",
        type=seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long what runs may go on after a stop was asked for (%(default)g)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves; 0 after a stop by signal."""
    serving = _over_http(arguments) if arguments.ray_name is None else _in_ray(arguments)
    asyncio.run(_to_the_end(serving))
    return 0


#: what means nothing over the other transport
_ONLY_HTTP = ("host", "port", "io_timeout", "token_file", "tls_cert", "tls_key")
_ONLY_RAY = ("ray_namespace", "ray_address")


def _refuse(arguments: argparse.Namespace, names: tuple[str, ...], reason: str) -> None:
    for name in names:
        if getattr(arguments, name) is not None:
            raise InvalidRequestError(f"--{name.replace('_', '-')} {reason}", field=name)


def _over_http(arguments: argparse.Namespace) -> Coroutine[Any, Any, None]:
    from ..server.serve import DEFAULT_PORT, Endpoint, serve

    _refuse(arguments, _ONLY_RAY, "is for an actor; give its --ray-name")
    endpoint = Endpoint(
        host="127.0.0.1" if arguments.host is None else arguments.host,
        port=DEFAULT_PORT if arguments.port is None else arguments.port,
        token=read_token(arguments.token_file),
        certificate=arguments.tls_cert,
        key=arguments.tls_key,
    )
    endpoint.tls()  # so that what can't be read is said first
    if arguments.tls_key is not None:
        warn_of_readers("TLS key", arguments.tls_key)
    return serve(
        arguments.backend,
        backend_options(arguments.config, arguments.settings),
        endpoint,
        checkpoint_dir=arguments.checkpoint_dir,
        limits=_limits(arguments),
    )


def _in_ray(arguments: argparse.Namespace) -> Coroutine[Any, Any, None]:
    from ..server.ray_server import serve
    from ..transports.ray_cluster import NAMESPACE, Place

    _refuse(arguments, _ONLY_HTTP, "is for HTTP; an actor has no port, and its cluster is trusted")
    return serve(
        arguments.backend,
        backend_options(arguments.config, arguments.settings),
        Place(arguments.ray_name, arguments.ray_namespace or NAMESPACE),
        address=arguments.ray_address,
        checkpoint_dir=arguments.checkpoint_dir,
        limits=_limits(arguments),
    )


def _limits(arguments: argparse.Namespace) -> Limits:
    from ..server.serve import Limits

    own = {} if arguments.io_timeout is None else {"io_timeout": arguments.io_timeout}
    return Limits(
        max_body=arguments.max_body,
        budget=arguments.budget,
        lease=arguments.lease,
        stall=arguments.stall_timeout,
        grace=arguments.grace,
        **own,
    )


async def _to_the_end(serving: Coroutine[Any, Any, None]) -> None:
    """Serves; once that is over, nothing that hangs keeps the process."""
    from ..server.leaving import SECONDS, leave_within

    code = 1
    try:
        await serving
        code = 0
    finally:
        leave_within(SECONDS, code)
