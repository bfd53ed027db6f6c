"""Shim (loop side, above the client): a run of remote_rl as verl's `RemoteBackend`.

Imports verl's seam, omegaconf and remote_rl. On the driver it is the run's driver session, in
workers and replicas a member's; the six methods are all that verl itself calls.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

import attrs
from omegaconf import DictConfig
from verl.remote_backend import RemoteBackend
from verl.utils.config import omega_conf_to_dataclass

from remote_rl import Session, errors

from .. import NAME, sessions
from ..config import check
from ..driver import attach
from ..options import PATH, Options
from .keys import TABLE


@attrs.frozen(kw_only=True)
class SeamHandle:
    """What a worker or a replica needs to join, as plain JSON values in verl's hands.

    run: the driver's handle. end_token_ids, hints: see `driver.Driver`.
    """

    run: Mapping[str, Any]
    end_token_ids: tuple[int, ...]
    hints: tuple[str, ...]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SeamHandle:
        """From `RemoteRun.reconnect_handle`; raises `InvalidRequestError` for anything else."""
        known = [field.name for field in attrs.fields(cls)]
        if sorted(values) != sorted(known):
            raise errors.InvalidRequestError(
                f"a backend_handle with the keys {sorted(values)} is not one of backend {NAME!r}, "
                f"which has {sorted(known)}; set trainer.remote_backend={NAME}"
            )
        return cls(
            run=dict(values["run"]),
            end_token_ids=tuple(values["end_token_ids"]),
            hints=tuple(values["hints"]),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "run": dict(self.run),
            "end_token_ids": list(self.end_token_ids),
            "hints": list(self.hints),
        }


class RemoteRun(RemoteBackend):
    """`trainer.remote_backend=remote_rl`."""

    def __init__(self, session: Session, handle: SeamHandle) -> None:
        self.session = session
        self._handle = handle

    @classmethod
    def from_config(
        cls, main_config: DictConfig, *, handle: Mapping[str, Any] | None = None
    ) -> RemoteRun:
        """Without a handle: checks the whole configuration and attaches as the run's driver. With
        one: joins that run as a member, one session a process.

        Raises `UnsupportedError` or `InvalidRequestError`, naming verl's key.
        """
        if handle is not None:
            joined = SeamHandle.of(handle)
            return cls(sessions.member(joined.run), joined)
        options = check(main_config, TABLE)
        _refuse_poll(options)
        model = omega_conf_to_dataclass(main_config.actor_rollout_ref.model)
        driver = attach(main_config, options, model.tokenizer)
        return cls(
            driver.session,
            SeamHandle(
                run=driver.session.handle().to_dict(),
                end_token_ids=driver.end_token_ids,
                hints=tuple(sorted(driver.hints)),
            ),
        )

    def reconnect_handle(self) -> dict[str, Any]:
        """JSON values that `from_config(..., handle=...)` takes in another process."""
        return self._handle.to_dict()

    async def destroy(self) -> None:
        """The driver leaves the run, which goes on at its server; may be repeated. A member's
        session belongs to its process and ends with it."""
        if self.session.role == "driver":
            await asyncio.to_thread(self.session.detach)

    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Trainer to sampler, on the server; samples carry `global_steps` from then on. Returns
        the version that the sampler then has."""
        receipt = await self.session.weights.sync(label=global_steps)
        return {"version": receipt.version}

    async def save_checkpoint(self) -> dict[str, Any]:
        """Saves model and optimizer under a new name, which it returns. (verl's own checkpoints,
        with a path and a step, go through the worker.)"""
        name = f"verl-{uuid.uuid4().hex[:12]}"
        await self.session.training.save(name, metadata={"framework": "verl"})
        return {"checkpoint": name}

    def requires_single_forwarder(self) -> bool:
        """Yes: the one worker forwards whole batches, and the server spreads them."""
        return True


def _refuse_poll(options: Options) -> None:
    if options.poll_seconds is not None:
        raise errors.UnsupportedError(
            f"{PATH}.poll_seconds={options.poll_seconds} is not supported with "
            f"trainer.remote_backend={NAME}: verl's own trainer builds its replay buffer there; "
            "leave it out",
            key=f"{PATH}.poll_seconds",
        )
