"""Shim (loop side, above the client): the training's driver attaches to the run.

Imports attrs, verl's configuration and remote_rl. One function for every trainer of verl that the
shim serves.
"""

from __future__ import annotations

from typing import Any

import attrs
from omegaconf import DictConfig
from verl.trainer.ppo.utils import need_reference_policy

from remote_rl import Devices, Session, connect

from .config import Options
from .matching import check_server, end_token_ids


@attrs.frozen(kw_only=True)
class Driver:
    """The driver's session, and what the members that generate need to know.

    devices: what the server computes on. end_token_ids: end-of-sequence ids of verl's tokenizer
    that the server's model does not end a response at by itself. hints: the routing hints that the
    server takes (session_id, priority).
    """

    session: Session
    devices: Devices | None
    end_token_ids: tuple[int, ...]
    hints: frozenset[str]


def attach(config: DictConfig, options: Options, tokenizer: Any) -> Driver:
    """Connects as the driver and refuses, by verl's key, what the server lacks; a refusal gives
    the run back."""
    session = connect(
        options.url, model=options.model, start=options.start, takeover=options.takeover
    )
    try:
        info = session.info().result()
        check_server(config, tokenizer, info)
        if need_reference_policy(config) and options.start != "base":
            session.training.set_reference("current").result()
        return Driver(
            session=session,
            devices=info.devices,
            end_token_ids=end_token_ids(config, tokenizer, info),
            hints=info.capabilities.sampling_options & {"session_id", "priority"},
        )
    except BaseException:
        session.detach()
        raise
