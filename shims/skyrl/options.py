"""Shim (loop side, above the client): the shim's own options, inside SkyRL's configuration.

Imports attrs, SkyRL's configuration, remote_rl and what all shims share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

import attrs
from skyrl.train.config import SkyRLTrainConfig

from remote_rl import errors
from remote_rl.requests import InFlight
from remote_rl.types.fields import flag, integer, one_of, optional, text

from ..common.options import build, option

PATH: Final = "trainer.remote"


@attrs.frozen(kw_only=True)
class Options:
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
        "on with them), `abort` (they end, and are continued as new requests) or `wait` (they end "
        "first)",
        default="keep",
        validator=one_of(get_args(InFlight)),
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
