"""Command line: what arguments mean, shared by the subcommands (imports errors only)."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

from ..errors import InvalidRequestError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size_in_bytes(text: str) -> int:
    """Bytes, as 512M, 4G, 4GiB or a plain number; for argparse, so it raises ValueError."""
    digits = text.removesuffix("iB").rstrip("KMG")
    size = int(digits) * _UNITS[text.removesuffix("iB")[len(digits) :]]
    if size < 1:
        raise ValueError(text)
    return size


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
    return token


def backend_options(config: str | None, settings: list[str]) -> dict[str, Any]:
    """The options of a TOML file, and over them those of `--set NAME=VALUE`."""
    options = {} if config is None else _read_toml(config)
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise InvalidRequestError(f"--set takes NAME=VALUE, not {setting!r}")
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
    except ValueError as error:
        if value[:1] in ("[", "{", '"'):
            raise InvalidRequestError(f"--set {name}: {value!r} is not JSON: {error}") from error
        return value  # a bare word, such as a model's name
