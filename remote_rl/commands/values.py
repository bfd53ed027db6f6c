"""Command line: what arguments mean, shared by the subcommands (imports errors only)."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import stat
import tomllib
from pathlib import Path
from typing import Any

from ..errors import InvalidRequestError

log = logging.getLogger("remote_rl.commands")


def add_token_file(group: argparse._ActionsContainer) -> None:
    """--token-file, for `read_token`."""
    group.add_argument(
        "--token-file", metavar="FILE", help="holds the token (else REMOTE_RL_TOKEN)"
    )


def add_access(group: argparse._ActionsContainer) -> None:
    """What a client of a server needs: --token-file and --ca-file."""
    add_token_file(group)
    group.add_argument("--ca-file", metavar="FILE", help="certificates to trust, PEM")


def add_backend_options(group: argparse._ActionsContainer) -> None:
    """--config and --set, for `backend_options`."""
    group.add_argument("--config", metavar="FILE.toml", help="options of the backend")
    group.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one option of the backend, VALUE as JSON or a bare word; may be repeated",
    )


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size_in_bytes(text: str) -> int:
    """Bytes, as 512M, 4G, 4GiB or a plain number; for argparse."""
    digits = text.removesuffix("iB").rstrip("KMG")
    unit = _UNITS.get(text.removesuffix("iB")[len(digits) :])
    if unit is None or not digits.isdecimal() or not int(digits):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes, or as 512M, 4G")
    return int(digits) * unit


def seconds(text: str) -> float:
    """A finite number of seconds, 0 or more; for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return number


def positive_seconds(text: str) -> float:
    """A finite number of seconds above 0; for argparse."""
    number = seconds(text)
    if not number:
        raise argparse.ArgumentTypeError("it must be more than 0 seconds")
    return number


def port(text: str) -> int:
    """0 to 65535; for argparse."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; one is 0 to 65535")
    return int(text)


def read_token(path: str | None) -> str | None:
    """The token: the file's contents, else the environment's REMOTE_RL_TOKEN, else None."""
    if path is None:
        return os.environ.get("REMOTE_RL_TOKEN") or None
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the token file {path!r} can't be read: {error}") from error
    if not token or not token.isascii() or not token.isprintable():
        raise InvalidRequestError(
            f"the token file {path!r} must hold one line of printable ASCII, e.g. from "
            "`openssl rand -hex 32`"
        )
    warn_of_readers("token file", path)
    return token


def warn_of_readers(what: str, path: str) -> None:
    """Warns where every user of this machine can read a secret."""
    if os.stat(path).st_mode & stat.S_IROTH:
        log.warning("the %s %r can be read by every user of this machine; chmod 600 it", what, path)


def backend_options(config: str | None, settings: list[str]) -> dict[str, Any]:
    """The options of a TOML file, and over them those of `--set NAME=VALUE`."""
    options = {} if config is None else _read_toml(config)
    given: set[str] = set()
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise InvalidRequestError(f"--set takes NAME=VALUE, not {setting!r}")
        if name in given:
            raise InvalidRequestError(f"--set {name} is given twice; give it once")
        given.add(name)
        options[name] = _json_or_text(name, value)
    return options


def _read_toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequestError(f"the configuration {path!r} can't be read: {error}") from error


def _json_or_text(name: str, value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        if value[:1] in ("[", "{", '"'):
            raise InvalidRequestError(f"--set {name}: {value!r} is not JSON: {error}") from error
        return value  # a bare word, such as a model's name
