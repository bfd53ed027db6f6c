"""Shim (loop side, above the client): what the trainer looks at while it waits for rollouts, and
how often.

Imports ray, verl's replay buffers, remote_rl and the shim's options. verl's trainer polls for
finished rollouts and looks at nothing else, so it would wait for ever for those of a process that
has died.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import ray
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from remote_rl import errors

from .options import PATH, POLL_SECONDS


class Watch:
    """Ray actors that must stay alive."""

    def __init__(self) -> None:
        self._asked: dict[Any, tuple[str, Any]] = {}

    def over(self, what: str, actors: Iterable[Any]) -> None:
        """From now on also these; `what` names one of them in the error."""
        for actor in actors:
            self._ask(what, actor)

    def check(self) -> None:
        """Raises `BackendError` where one has died; never waits for an answer."""
        if not self._asked:
            return
        answered, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        for reference in answered:
            what, actor = self._asked.pop(reference)
            try:
                ray.get(reference)
            except ray.exceptions.RayActorError as error:
                raise errors.BackendError(
                    f"{what} of verl died, and rollouts that need it are lost ({error}); its "
                    "log in Ray's session folder says why; resume from the last checkpoint"
                ) from error
            self._ask(what, actor)

    def _ask(self, what: str, actor: Any) -> None:
        # a call that Ray answers itself as soon as the actor can take one
        self._asked[actor.__ray_ready__.remote()] = (what, actor)


def between_looks(replay_buffer: Any, check: Callable[[], None]) -> Any:
    """The same replay buffer, which also calls `check` each time it has looked in vain.

    verl offers no hook there, and the user may have chosen the class, so it is this one object
    that gets another way to wait; a class of one's own that waits otherwise is left alone.
    """
    wait = getattr(replay_buffer, "_wait_for_next_poll", None)
    if wait is not None:

        def check_and_wait(*arguments: Any) -> Any:
            check()
            return wait(*arguments)

        replay_buffer._wait_for_next_poll = check_and_wait
    return replay_buffer


def looking_every(replay_buffer: Any, seconds: float | None) -> Any:
    """The same replay buffer, which looks for finished rollouts every so many seconds. None: as
    often as the shim thinks right where it is verl's own, else as often as its class says.

    Raises `UnsupportedError` where `seconds` is given and the class has no `poll_interval`.
    """
    if seconds is None and type(replay_buffer) not in (ReplayBuffer, ReplayBufferAsync):
        return replay_buffer
    if not hasattr(replay_buffer, "poll_interval"):
        raise errors.UnsupportedError(
            f"{PATH}.poll_seconds={seconds} is not supported with the replay buffer "
            f"{type(replay_buffer).__qualname__}, which has no poll_interval as verl's has; leave "
            "it out, or give trainer.v1.sampler.custom_sampler a subclass of verl's ReplayBuffer"
        )
    replay_buffer.poll_interval = POLL_SECONDS if seconds is None else seconds
    return replay_buffer
