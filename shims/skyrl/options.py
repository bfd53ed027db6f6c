"""Shim (loop side, above the client): the shim's own options, inside SkyRL's configuration.

Imports attrs, SkyRL's configuration, remote_rl and what all shims share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import attrs
from skyrl.train.config import SkyRLTrainConfig

from remote_rl import errors
from remote_rl.types.fields import optional, text

from ..common.options import RunOptions, build, option

PATH: Final = "trainer.remote"


@attrs.frozen(kw_only=True)
class Options(RunOptions):
    """The section `trainer.remote`; docs/skyrl.md has its table."""

    target: str = option(
        "address that `remote-rl serve` printed, `ray:NAME`, or a backend's name to run it inside "
        "this process",
        validator=text(),
    )
    model: str | None = option(
        "name that the server must report, none accepts any; for a backend inside this process "
        "the model it is made with",
        default=None,
        validator=optional(text()),
    )
    start: str = option(
        "what a new training starts from: `base`, `current`, or a checkpoint's name on the server; "
        "its weights are also the reference policy, as those of `trainer.policy.model.path` are "
        "in SkyRL. A checkpoint that `trainer.resume_mode` finds is loaded on top of it",
        default="base",
        validator=text(),
    )
    backend: Mapping[str, Any] = option(
        "options of a backend inside this process, e.g. `trainer.remote.backend.vocab_size=256` "
        "with `target=mock`",
        factory=dict,
    )

    @classmethod
    def of(cls, config: SkyRLTrainConfig) -> Options:
        """From SkyRL's configuration.

        Raises `InvalidRequestError`, which names the option by its full path.
        """
        section = getattr(config.trainer, "remote", None)
        given = {} if section is None else dataclasses.asdict(section)
        if not given.get("target"):
            raise errors.InvalidRequestError(
                f"{PATH}.target is missing; give the address that `remote-rl serve` printed, or a "
                "backend's name"
            )
        return build(cls, given, PATH)
