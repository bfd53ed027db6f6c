"""Client: what the faces of a session have in common: check, number, send
(imports the contract)."""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Callable
from numbers import Real
from typing import Any, TypeVar

from ..errors import DeadlineExceededError, InvalidRequestError, UnknownNameError, nearest
from ..requests import Request
from .connection import Connection
from .operation import Operation, as_it_is

T = TypeVar("T")


def check_deadline(deadline: Any) -> None:
    """Refuses what is no number of seconds from now."""
    if deadline is None:
        return
    number = isinstance(deadline, Real) and not isinstance(deadline, bool)
    if not number or not math.isfinite(deadline) or deadline <= 0:
        raise InvalidRequestError(
            f"deadline must be a finite number > 0 (seconds from now) or None, not {deadline!r}",
            field="deadline",
        )


def time_left(deadline: float | None, begin: float, doing: str) -> float | None:
    """Seconds that are left of a deadline that counts from `begin` (on the monotonic clock). Raises
    `DeadlineExceededError` where none are; `doing`: what took them."""
    if deadline is None:
        return None
    left = deadline - (time.monotonic() - begin)
    if left <= 0:
        raise DeadlineExceededError(f"the deadline of {deadline:g} s passed while {doing}")
    return left


def _nearest_keyword(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, with an unknown keyword refused by name instead of by a bare TypeError."""
    names = [name for name in inspect.signature(method).parameters if name != "self"]

    @functools.wraps(method)
    def checked(self: Any, *positional: Any, **named: Any) -> Any:
        for name in named:
            if name not in names:
                raise UnknownNameError(
                    f"{method.__name__} has no argument {name!r}; {nearest(name, names)}",
                    field=name,
                )
        return method(self, *positional, **named)

    return checked


class Face:
    """One face of a session. What it can refuse raises at the call, takes no number and changes
    nothing; everything else is in the returned operation."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, member in list(vars(cls).items()):
            if inspect.isfunction(member) and not name.startswith("_"):
                setattr(cls, name, _nearest_keyword(member))

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def _check(self, name: str, request: Request) -> None:
        info = self._connection.grant.info
        info.capabilities.check(name, request, info.backend)
        # the run looks at every token as well, and it looks last
        info.model.check(request, again=False)

    def _submit(
        self,
        name: str,
        request: Request,
        convert: Callable[[Any], Any] = as_it_is,
        deadline: float | None = None,
        kind: type[Operation[Any]] = Operation,
    ) -> Any:
        check_deadline(deadline)
        self._check(name, request)
        connection = self._connection
        digest = connection.transport.digest(request)
        with connection.ordering:
            call = connection.reserve(name, convert)
            connection.send(call, request, digest, deadline)
        return kind(call)
