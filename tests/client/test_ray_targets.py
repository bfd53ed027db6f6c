"""Targets over Ray, as far as they are judged without it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from remote_rl import connect
from remote_rl.errors import InvalidRequestError, UnsupportedError


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        ("ray:", {}, "letters, digits"),
        ("ray:a/b/c", {}, "letters, digits"),
        ("ray:a b", {}, "letters, digits"),
        ("ray://head:10001", {}, "RAY_ADDRESS"),
        ("ray:a", {"token": "secret"}, "token= is for an http:// address"),
        ("ray:a", {"ca_file": "file"}, "ca_file= is for an http:// address"),
        ("ray:a", {"vocab_size": 3}, "vocab_size= is for a run in this process"),
    ],
)
def test_targets_that_make_no_sense(target: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        connect(target, **options)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'remote-rl\[ray\]'"):
        connect("ray:run")
