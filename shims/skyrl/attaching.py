"""Shim (loop side, above the client): the training's driver attaches to the run.

Imports SkyRL's configuration, remote_rl and what all shims share. What is refused here would else
fail in the middle of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
from skyrl.backends.skyrl_train.inference_servers.engine_utils import (
    get_sampling_params_for_backend,
)
from skyrl.train.config import SkyRLTrainConfig

from remote_rl import RunInfo, Session, connect, errors

from ..common.offers import (
    Need,
    check_offers,
    check_vocabulary,
    missing_end_ids,
    sampling_needs,
)
from ..common.rules import refuse
from .losses import loss_kinds
from .options import PATH, Options
from .own_losses import needed_outputs
from .sampling import to_params

_SAMPLING = "generator.sampling_params"
_TRAINER_OPERATIONS = ("forward", "forward_backward", "optim_step", "zero_grad", "sync", "generate")


@attrs.frozen(kw_only=True)
class Attached:
    """session: the driver's. info: of the run. end_token_ids: end-of-sequence ids of SkyRL's
    tokenizer that the server's model does not end a response at by itself."""

    session: Session
    info: RunInfo
    end_token_ids: tuple[int, ...]


def attach(config: SkyRLTrainConfig, options: Options, tokenizer: Any) -> Attached:
    """Connects as the driver and refuses, by SkyRL's key, what the server lacks; a refusal gives
    the run back."""
    session = _connected(options)
    try:
        info = session.info().result()
        check_server(config, options, tokenizer, info)
        if _needs_reference(config) and options.start != "base":
            session.training.set_reference("current").result()
        return Attached(
            session=session,
            info=info,
            end_token_ids=missing_end_ids(info, tokenizer.eos_token_id),
        )
    except BaseException:
        session.detach()
        raise


def _connected(options: Options) -> Session:
    try:
        return connect(
            options.target,
            model=options.model,
            start=options.start,
            takeover=options.takeover,
            **options.backend,
        )
    except errors.RemoteRLError as error:
        given = [f"{PATH}.target={options.target}"]
        given += [f"{PATH}.backend.{name}" for name in options.backend]
        error.add_note(f"that is of {', '.join(given)}")
        raise


def check_server(config: SkyRLTrainConfig, options: Options, tokenizer: Any, info: RunInfo) -> None:
    """Raises `UnsupportedError`, naming SkyRL's key, for the first thing the server lacks."""
    key = "trainer.policy.model.path"
    check_vocabulary(info, len(tokenizer), key=key, path=config.trainer.policy.model.path)
    _check_length(config, info)
    check_offers(info, _needs(config, options))
    saves = ("trainer.ckpt_interval", "trainer.hf_save_interval")
    for path, value in zip(
        saves, (config.trainer.ckpt_interval, config.trainer.hf_save_interval), strict=True
    ):
        if value > 0 and not info.checkpoint_dir:
            refuse(
                path,
                value,
                "the server can't save; start it with --checkpoint-dir (or give "
                f"{PATH}.backend.checkpoint_dir), or set {path}=-1",
            )


def _check_length(config: SkyRLTrainConfig, info: RunInfo) -> None:
    context, longest = info.model.context_length, config.generator.max_input_length
    for path, sampling in _sampled(config):
        if context is not None and longest + sampling.max_generate_length > context:
            refuse(
                f"{path}.max_generate_length",
                sampling.max_generate_length,
                f"with generator.max_input_length={longest} it exceeds the {context} tokens of the "
                f"server's model {info.model.name!r}; shorten one of them",
            )


def _sampled(config: SkyRLTrainConfig) -> Iterator[tuple[str, Any]]:
    """(path, section) of the sampling parameters that the training will draw with."""
    yield _SAMPLING, config.generator.sampling_params
    if config.trainer.eval_interval > 0:
        yield "generator.eval_sampling_params", config.generator.eval_sampling_params


def _needs(config: SkyRLTrainConfig, options: Options) -> Iterator[Need]:
    algorithm, trainer = config.trainer.algorithm, config.trainer
    for name in _TRAINER_OPERATIONS:
        yield "operations", name, "trainer.override_entrypoint"
    if trainer.ckpt_interval > 0:
        for name in ("save", "load"):
            yield "operations", name, "trainer.ckpt_interval"
    if trainer.hf_save_interval > 0:
        yield "operations", "export", "trainer.hf_save_interval"
    if trainer.update_ref_every_epoch and _needs_reference(config):
        yield "operations", "set_reference", "trainer.update_ref_every_epoch"
    if _needs_reference(config) and options.start != "base":
        yield "operations", "set_reference", f"{PATH}.start"
    for name in loss_kinds(algorithm):
        yield "losses", name, "trainer.algorithm.policy_loss_type"
    for name in sorted(needed_outputs(algorithm)):
        yield "outputs", name, "trainer.algorithm.policy_loss_type"
    yield "in_flight", options.in_flight, f"{PATH}.in_flight"
    yield "optimizers", "AdamW", "trainer.policy.optimizer_config"
    backend = config.generator.inference_engine.backend
    for path, section in _sampled(config):
        params = to_params(get_sampling_params_for_backend(backend, section), path=path)
        keys = {name: f"{path}.{name}" for name in ("temperature", "top_p", "top_k", "min_p")}
        keys |= {"stop": f"{path}.stop", "include_stop": f"{path}.stop"}
        keys |= {name: f"{path}.additional_kwargs.{name}" for name in ("seed", "stop_token_ids")}
        keys["min_tokens"] = f"{path} (SkyRL asks for min_tokens=1)"
        yield from sampling_needs(params, keys, f"{path}.logprobs")


def _needs_reference(config: SkyRLTrainConfig) -> bool:
    algorithm = config.trainer.algorithm
    return bool(algorithm.use_kl_loss or algorithm.use_kl_in_reward)
