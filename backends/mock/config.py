"""Mock backend: its options (imports attrs and remote_rl's contract only)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs

from remote_rl import errors
from remote_rl.byte_tokenizer import ByteTokenizer
from remote_rl.errors import InvalidRequestError, RemoteRLError, nearest
from remote_rl.ops import ALWAYS_OFFERED, OPERATIONS
from remote_rl.types.fields import (
    as_tuple,
    each,
    instance_of,
    integer,
    number,
    one_of,
    optional,
    plain,
    strict,
    text,
)

#: what the dispatcher hands to the backend
BACKEND_OPERATIONS = frozenset(OPERATIONS) - ALWAYS_OFFERED
#: keys of `latency`: an operation, the start, or one generated token of one request
LATENCY_KEYS = BACKEND_OPERATIONS | {"start", "token"}

HANG, EXIT = "hang", "exit"
BYTES = 256


def _as_error(value: Any) -> Any:
    """A class of the tree, or the name of one, to an instance; all else stays."""
    if isinstance(value, str) and value not in (HANG, EXIT):
        names = [name for name in errors.__all__ if name != "RemoteRLError"]
        if value not in names:
            raise InvalidRequestError(
                f"Fault.error can't be {value!r}; {nearest(value, [*names, HANG, EXIT])}",
                field="error",
            )
        value = getattr(errors, value)
    if isinstance(value, type) and issubclass(value, BaseException):
        return value("a fault that the options of the mock backend asked for")
    return value


def _check_error(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value not in (HANG, EXIT) and not isinstance(value, Exception):
        raise InvalidRequestError(
            'Fault.error must be an exception, an exception class, its name, "hang" or "exit", '
            f"not {value!r}",
            field="error",
        )


@strict
@attrs.frozen(kw_only=True)
class Fault:
    """One failure on purpose.

    operation: whose; "start" is the backend's start. call: of that operation, 1 is the first.
    error: raised instead of the result, an exception, a class, or the name of one of
    remote_rl.errors; "hang", which neither ends nor reports anything until the backend is killed;
    or "exit", which ends the process that hosts the backend at once, with code 70.
    when: before the operation does anything, or after it has done everything.
    """

    operation: str = attrs.field(validator=one_of(BACKEND_OPERATIONS | {"start"}))
    call: int = attrs.field(default=1, converter=plain, validator=integer(minimum=1))
    error: Exception | Literal["hang", "exit"] = attrs.field(
        default="BackendError", converter=_as_error, validator=_check_error
    )
    when: Literal["before", "after"] = attrs.field(
        default="before", validator=one_of(("before", "after"))
    )

    def exception(self) -> Exception:
        """What to raise, with a traceback of its own."""
        assert isinstance(self.error, Exception)
        return self.error.copy() if isinstance(self.error, RemoteRLError) else self.error


def _as_faults(value: Any) -> Any:
    if isinstance(value, (Fault, Mapping)):
        value = (value,)
    if not isinstance(value, Iterable):
        return value
    return tuple(Fault(**item) if isinstance(item, Mapping) else item for item in value)


def _check_faults(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(item, Fault) for item in value):
        raise InvalidRequestError(
            "faults must be Fault objects, or mappings of their fields such as "
            '{"operation": "sync", "call": 2, "error": "BackendError"}',
            field="faults",
        )


def _as_latency(value: Any) -> Any:
    value = plain(value)
    return dict(value) if isinstance(value, Mapping) else value


def _check_latency(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    seconds = number(minimum=0)
    if not isinstance(value, Mapping):
        seconds(instance, attribute, value)
        return
    for name, item in value.items():
        if name not in LATENCY_KEYS:
            raise InvalidRequestError(
                f"latency has no key {name!r}; {nearest(str(name), LATENCY_KEYS)}", field="latency"
            )
        seconds(instance, attribute, item)


def _size(default: int) -> Any:
    return attrs.field(default=default, converter=plain, validator=integer(minimum=1))


@strict
@attrs.frozen(kw_only=True)
class MockConfig:
    """Options of the mock backend, the keyword arguments of `connect("mock", ...)`.

    model: its name, for `connect(model=...)`.
    vocab_size: ids lie below it; the default is that of the byte tokenizer.
    eos_token_ids: end a response; None is the byte tokenizer's where the vocabulary has it.
    window: how many tokens back the policy sees. embedding_size, hidden_size: of its layers.
    initial_scale: standard deviation of the base's logits; near 0 it is near uniform.
    context_length: prompt plus response, at most; None is unlimited.
    seed: of the base weights and of generates that bring none.
    micro_batch_rows: responses per forward and backward pass; None is the whole batch. Values,
    gradients and outputs don't depend on it.
    latency: seconds that operations take beside their work, one number for every operation or
    a mapping of LATENCY_KEYS; "token" is for each step of a generate.
    peak_flops: operations a second that `info` gives the device, so that a loop's utilisation is a
    number; None is unknown.
    faults: failures on purpose, `Fault` objects or mappings of their fields.
    call_log: a list of the caller's, to which every `journal.Call` is appended as it happens.
    """

    model: str = attrs.field(default="mock", validator=text())
    vocab_size: int = _size(259)
    eos_token_ids: tuple[int, ...] | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(as_tuple),
        validator=optional(each(integer(minimum=0))),
    )
    window: int = _size(8)
    embedding_size: int = _size(32)
    hidden_size: int = _size(256)
    initial_scale: float = attrs.field(default=0.1, converter=plain, validator=number(minimum=0))
    context_length: int | None = attrs.field(
        default=None, converter=plain, validator=optional(integer(minimum=2))
    )
    seed: int = attrs.field(
        default=0, converter=plain, validator=integer(minimum=0, maximum=2**63 - 1)
    )
    micro_batch_rows: int | None = attrs.field(
        default=None, converter=plain, validator=optional(integer(minimum=1))
    )
    latency: float | Mapping[str, float] = attrs.field(
        default=0.0, converter=_as_latency, validator=_check_latency
    )
    peak_flops: float | None = attrs.field(
        default=None, converter=plain, validator=optional(number(above=0))
    )
    faults: tuple[Fault, ...] = attrs.field(
        default=(), converter=_as_faults, validator=_check_faults
    )
    call_log: list[Any] | None = attrs.field(
        default=None, repr=False, validator=optional(instance_of(list))
    )

    def __attrs_post_init__(self) -> None:
        outside = [token for token in self.eos_token_ids or () if token >= self.vocab_size]
        if outside:
            raise InvalidRequestError(
                f"eos_token_ids holds {outside[0]}, outside the vocabulary of {self.vocab_size}",
                field="eos_token_ids",
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Of the model's layers, by name."""
        names = ("vocab_size", "window", "embedding_size", "hidden_size")
        return {name: getattr(self, name) for name in names}

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end a response."""
        if self.eos_token_ids is not None:
            return self.eos_token_ids
        return (ByteTokenizer.eos_token_id,) if self.has_text else ()

    @property
    def has_text(self) -> bool:
        """Whether the vocabulary holds the byte tokenizer's."""
        return self.vocab_size >= len(ByteTokenizer())

    def seconds(self, key: str) -> float:
        """The latency of an operation, the start, or a token."""
        if isinstance(self.latency, Mapping):
            return self.latency.get(key, 0.0)
        return self.latency if key not in ("start", "token") else 0.0
