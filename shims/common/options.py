"""Shim (loop side, above the client): options of a shim inside a framework's configuration.

Imports attrs and remote_rl.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeVar, get_args

import attrs

from remote_rl import errors
from remote_rl.requests import InFlight
from remote_rl.types.fields import flag, integer, one_of

MEANING: Final = "remote_rl.meaning"

T = TypeVar("T", bound=attrs.AttrsInstance)


def option(meaning: str, **arguments: Any) -> Any:
    """A field that a user may set; `meaning` is its row in the documentation."""
    return attrs.field(metadata={MEANING: meaning}, **arguments)


def public(options: type[attrs.AttrsInstance]) -> list[str]:
    """The options that a user may set."""
    return [field.name for field in attrs.fields(options) if MEANING in field.metadata]


def build(options: type[T], given: Mapping[str, Any], path: str) -> T:
    """`options` from what the configuration holds at `path`.

    Raises `InvalidRequestError`, which names the option by its full path.
    """
    known = [field.name for field in attrs.fields(options)]
    for name in given:
        if name not in known:
            raise errors.InvalidRequestError(
                f"{path}.{name} does not exist; {errors.nearest(str(name), public(options))}"
            )
    try:
        return options(**given)
    except errors.InvalidRequestError as error:
        raise errors.InvalidRequestError(
            f"{path}.{str(error).removeprefix(f'{options.__name__}.')}"
        ) from None


@attrs.frozen(kw_only=True)
class RunOptions:
    """What every shim asks about the run."""

    takeover: bool = option(
        "revoke another driver's lease instead of waiting for it", default=False, validator=flag()
    )
    generation_attempts: int = option(
        "tries of one generation before the training is stopped",
        default=3,
        validator=integer(minimum=1),
    )
    in_flight: Literal["keep", "wait", "abort"] = option(
        "what happens to generations that run while the sampler gets new weights: `keep` (they go "
        "on with them), `abort` (they end, and an asynchronous trainer's are continued as new "
        "requests) or `wait` (they end first)",
        default="keep",
        validator=one_of(get_args(InFlight)),
    )
