"""Shim (loop side, above the client): the shim's own options, inside verl's configuration.

Imports attrs, omegaconf, remote_rl and what all shims share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
from omegaconf import DictConfig, OmegaConf

from remote_rl import errors
from remote_rl.types.fields import number, optional, text

from ..common.options import RunOptions, build, option
from . import NAME

PATH: Final = f"actor_rollout_ref.rollout.engine_kwargs.{NAME}"
#: of verl's own replay buffers, unless a training says otherwise
POLL_SECONDS: Final = 0.2


@attrs.frozen(kw_only=True)
class Options(RunOptions):
    """The block `actor_rollout_ref.rollout.engine_kwargs.remote_rl`; docs/verl-configuration.md has
    its table.

    verl hands `engine_kwargs` to every process of a training as it is, so a key needs no schema of
    verl's: `+actor_rollout_ref.rollout.engine_kwargs.remote_rl.url=...` on the command line.
    """

    url: str = option("address that `remote-rl serve` printed", validator=text())
    model: str | None = option(
        "name that the server must report; none accepts any",
        default=None,
        validator=optional(text()),
    )
    start: str = option(
        "what a new training starts from: `base`, `current`, or a checkpoint's name on the server; "
        "its weights are also the reference policy, as those of `model.path` are in verl. A "
        "checkpoint that `trainer.resume_mode` finds is loaded on top of it",
        default="base",
        validator=text(),
    )
    poll_seconds: float | None = option(
        "seconds between two looks of the trainer for finished rollouts; none: "
        f"{POLL_SECONDS} with verl's own replay buffers, which say 2 and have no key for it, and "
        "what a `trainer.v1.sampler.custom_sampler` itself says",
        default=None,
        validator=optional(number(above=0)),
    )
    #: the driver's, written by the trainer for the other processes
    handle: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, rollout: Any) -> Options:
        """From verl's rollout section (an OmegaConf node or its dataclass).

        Raises `InvalidRequestError`, which names the option by its full path.
        """
        given = rollout.engine_kwargs.get(NAME)
        if isinstance(given, DictConfig):
            given = OmegaConf.to_container(given, resolve=True)
        if given is not None and not isinstance(given, Mapping):
            raise errors.InvalidRequestError(
                f"{PATH} must be a block of options, not {given!r}; write {PATH}.url=..."
            )
        if not given or not given.get("url"):
            raise errors.InvalidRequestError(
                f"{PATH}.url is missing; give the address that `remote-rl serve` printed"
            )
        return build(cls, given, PATH)
