"""Contract: the tree of exceptions, the same classes on both sides of every transport (imports
nothing of remote_rl).

RemoteRLError
├── InvalidRequestError      (ValueError)       the request itself is wrong
│   └── UnknownNameError     (AttributeError)   a field, option or keyword that does not exist
├── UnsupportedError         (NotImplementedError) right, but this backend does not offer it
├── ConflictError            it contradicts what the run has already accepted or holds
├── DirtyGradientsError      an earlier forward_backward failed; zero_grad first
├── OperationCancelled       cancelled before it started, or an aborted wait
├── BackendError             the engine failed while it worked (worker and traceback attached)
├── LeaseError               this client has no right to the run (any more)
├── RunLostError             the run itself is gone; names the last checkpoint
├── UnreachableError         (ConnectionError)  nothing answers at the address
├── StalledError             (TimeoutError)     no progress for `stall_timeout`
├── DeadlineExceededError    (TimeoutError)     the caller's own deadline passed
├── AuthenticationError      (PermissionError)  missing or wrong token
├── ProtocolError            the two sides can't understand each other
└── ForkedProcessError       (RuntimeError)     a session was used after os.fork()

Each message is one sentence: what was wrong, where, and what to do. Each instance pickles, and
`to_wire` / `from_wire` carry it over a transport with its cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Self

__all__ = [
    "AuthenticationError",
    "BackendError",
    "ConflictError",
    "DeadlineExceededError",
    "DirtyGradientsError",
    "ForkedProcessError",
    "InvalidRequestError",
    "LeaseError",
    "OperationCancelled",
    "ProtocolError",
    "RemoteRLError",
    "RunLostError",
    "StalledError",
    "UnknownNameError",
    "UnreachableError",
    "UnsupportedError",
]

_MAX_CAUSES = 16
_BY_NAME: dict[str, type[RemoteRLError]] = {}


class RemoteRLError(Exception):
    """Base of every error this package raises on purpose.

    `message` is the sentence; `details` holds JSON values that name the place (a field, a row,
    a worker, a traceback) for programs that react to the error.
    """

    def __init__(self, message: str, /, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _BY_NAME.setdefault(cls.__name__, cls)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        cause = self.__cause__
        if cause is not None and type(cause).__module__ != "builtins":
            cause = as_remote_error(cause)  # many libraries' errors pickle but don't unpickle
        return (_rebuild, (type(self), self.message, self.details, cause))

    def copy(self) -> Self:
        """A fresh instance with the same contents: one failure raised in several places keeps
        a traceback of its own in each."""
        twin = type(self)(self.message, **self.details)
        twin.__cause__ = self.__cause__
        return twin

    def to_wire(self, depth: int = 0) -> dict[str, Any]:
        """JSON values: class name, message, details, and the chain of causes (16 at most)."""
        cause = self.__cause__ if depth < _MAX_CAUSES else None
        return {
            "error": type(self).__name__,
            "message": self.message,
            "details": {name: _json_value(value) for name, value in self.details.items()},
            "cause": None if cause is None else as_remote_error(cause).to_wire(depth + 1),
        }

    @staticmethod
    def from_wire(data: Mapping[str, Any], depth: int = 0) -> RemoteRLError:
        """The error that `to_wire` described; an unknown class name becomes `BackendError`."""
        if not isinstance(data, Mapping):
            raise ProtocolError(
                f"an error object was expected in the answer, not a {type(data).__name__}; "
                "the other side does not speak this protocol"
            )
        name, message = data.get("error"), data.get("message")
        details, cause = data.get("details", {}), data.get("cause")
        if not (isinstance(name, str) and isinstance(message, str) and isinstance(details, dict)):
            raise ProtocolError(
                "the error object of the answer lacks its class name, message or details; "
                "the other side does not speak this protocol"
            )
        if cause is not None and (not isinstance(cause, dict) or depth > _MAX_CAUSES):
            raise ProtocolError("the error object's cause is not an error object or never ends")
        error_class = _BY_NAME.get(name, BackendError)
        error = error_class(message, **{str(key): value for key, value in details.items()})
        if cause is not None:
            error.__cause__ = RemoteRLError.from_wire(cause, depth + 1)
        return error


def _rebuild(
    error_class: type[RemoteRLError],
    message: str,
    details: dict[str, Any],
    cause: BaseException | None,
) -> RemoteRLError:
    error = error_class(message, **details)
    error.__cause__ = cause
    return error


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if isinstance(value, Mapping):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_json_value(item) for item in value]
    return repr(value)


class InvalidRequestError(RemoteRLError, ValueError):
    """The request is wrong in itself: shapes, lengths, ranges, NaN, a missing field.

    Raised at the call, before anything is sent or counted, whenever the client can see it.
    """


class UnknownNameError(InvalidRequestError, AttributeError):
    """A name that does not exist; the message gives the nearest one that does."""


class UnsupportedError(RemoteRLError, NotImplementedError):
    """The request is right, but this backend does not declare what it needs."""


class ConflictError(RemoteRLError):
    """The request contradicts what the run has accepted or holds: a number used twice with other
    contents, an acknowledged number sent again, an existing checkpoint's name, cotangents of
    other weights."""


class DirtyGradientsError(RemoteRLError):
    """An earlier forward_backward failed, so the accumulated gradient is not the one asked for.

    The first failure is the cause (`__cause__`); `zero_grad` discards the gradient and goes on.
    """


class OperationCancelled(RemoteRLError):
    """The operation was cancelled before it started, and will never run."""


class BackendError(RemoteRLError):
    """The engine raised while it worked. `details` may hold `worker` and `traceback`."""


class LeaseError(RemoteRLError):
    """This client's right to the run has ended, was revoked, or was never granted."""


class RunLostError(RemoteRLError):
    """The run that this session held is gone. `details["last_checkpoint"]` names where to go on,
    or is None."""


class UnreachableError(RemoteRLError, ConnectionError):
    """Nothing answers at the address: for 5 s at connect; later for 10 s where nothing listens any
    more, and for a lease's length of silence. `details["last_checkpoint"]`, where a session had it,
    names the last one that it saw."""


class StalledError(RemoteRLError, TimeoutError):
    """The operation reported no progress for `stall_timeout`; names what it was last doing."""


class DeadlineExceededError(RemoteRLError, TimeoutError):
    """The deadline that the caller set passed before the operation started or ended."""


class AuthenticationError(RemoteRLError, PermissionError):
    """The server wants a token, and the one given is missing or wrong."""


class ProtocolError(RemoteRLError):
    """The bytes are not what the protocol says, or the two versions don't overlap."""


class ForkedProcessError(RemoteRLError, RuntimeError):
    """A session opened in the parent was used in a forked child; attach by handle instead."""


#: what a backend raises to say that nothing has changed
REFUSALS = (InvalidRequestError, ConflictError, UnsupportedError)


def as_remote_error(error: BaseException) -> RemoteRLError:
    """`error` itself where it is of this tree, else a `BackendError` that carries its traceback."""
    if isinstance(error, RemoteRLError):
        return error
    import traceback

    text = "".join(traceback.format_exception(error))
    wrapped = BackendError(describe(error), traceback=text)
    wrapped.__cause__ = error.__cause__
    return wrapped


def describe(error: BaseException) -> str:
    """Class and message of any exception, also of one that can't say its own."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:  # noqa: BLE001 - its __str__ is somebody else's code
        return f"{name} (its message can't be read)"


def nearest(name: str, valid: Iterable[str]) -> str:
    """The hint for an unknown name: the nearest valid one, or the list of them."""
    import difflib  # only where something went wrong

    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"valid names are {', '.join(map(repr, names))}" if names else "no name is valid here"
