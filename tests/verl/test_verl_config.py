"""verl's configuration: every key is known, what can't be honoured is refused by its own name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import configuration_page
import pytest
from omegaconf import DictConfig, OmegaConf
from verl.trainer import config as trainer_config
from verl.workers import config as worker_config
from verl.workers.config.disaggregation import DisaggregationConfig

from remote_rl import errors
from shims.common.options import public
from shims.common.rules import Not, Only, find, in_mode, sections
from shims.verl import ASYNC_NAME
from shims.verl.config import check, check_keys
from shims.verl.keys import CLOSED, OLDER, TABLE
from shims.verl.options import Options
from shims.verl.rules import SEPARATE_ASYNC, SYNC

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
OPTIONS = f"{ROLLOUT}.engine_kwargs.remote_rl"

INNER = sections(TABLE)

#: what a training in verl's separate_async mode says besides
ASYNC = (
    f"trainer.v1.trainer_mode={ASYNC_NAME}",
    "actor_rollout_ref.hybrid_engine=false",
    f"{ROLLOUT}.nnodes=1",
    f"{ROLLOUT}.checkpoint_engine.backend=remote_rl",
)

#: verl's dataclasses by the section that they are built from
DATACLASSES = {
    ACTOR: worker_config.FSDPActorConfig,
    f"{ACTOR}.policy_loss": worker_config.PolicyLossConfig,
    f"{ACTOR}.optim": worker_config.FSDPOptimizerConfig,
    f"{ACTOR}.fsdp_config": worker_config.FSDPEngineConfig,
    f"{ACTOR}.fsdp_config.qat": worker_config.QATEngineConfig,
    f"{ACTOR}.checkpoint": trainer_config.CheckpointConfig,
    "actor_rollout_ref.ref.fsdp_config": worker_config.FSDPEngineConfig,
    "actor_rollout_ref.ref.fsdp_config.qat": worker_config.QATEngineConfig,
    ROLLOUT: worker_config.RolloutConfig,
    f"{ROLLOUT}.val_kwargs": worker_config.SamplingConfig,
    f"{ROLLOUT}.multi_turn": worker_config.MultiTurnConfig,
    f"{ROLLOUT}.agent": worker_config.AgentLoopConfig,
    f"{ROLLOUT}.agent.custom_async_server": worker_config.CustomAsyncServerConfig,
    f"{ROLLOUT}.trace": worker_config.TraceConfig,
    f"{ROLLOUT}.server": worker_config.ServerConfig,
    f"{ROLLOUT}.prometheus": worker_config.PrometheusConfig,
    f"{ROLLOUT}.checkpoint_engine": worker_config.CheckpointEngineConfig,
    f"{ROLLOUT}.disaggregation": DisaggregationConfig,
    "actor_rollout_ref.model": worker_config.HFModelConfig,
    "actor_rollout_ref.model.mtp": worker_config.MtpConfig,
    "algorithm": trainer_config.AlgoConfig,
    "algorithm.filter_groups": trainer_config.FilterGroupsConfig,
    "algorithm.kl_ctrl": trainer_config.KLControlConfig,
    "algorithm.rollout_correction": trainer_config.RolloutCorrectionConfig,
    "trainer.v1.separate_async.hybrid_rollout": trainer_config.HybridRolloutSwitchConfig,
}

#: keys that verl's V1 trainer reads, though neither its YAML nor a dataclass has them
READ_ONLY_IN_CODE = {"trainer.remove_previous_ckpt_in_save"}


def leaves(node: DictConfig, path: str = "") -> Iterator[str]:
    """Paths of `node`, down to where the table has no section."""
    for name in node:
        below = f"{path}.{name}" if path else str(name)
        if below in INNER and OmegaConf.is_dict(node[name]):
            yield from leaves(node[name], below)
        else:
            yield below


def of_dataclasses() -> Iterator[str]:
    for section, cls in DATACLASSES.items():
        for field in dataclasses.fields(cls):
            path = f"{section}.{field.name}"
            if path not in INNER:
                yield path


@pytest.fixture(scope="module")
def stock_paths(stock_config: Any) -> set[str]:
    """Every key of verl's YAML."""
    return set(leaves(stock_config))


def test_the_training_of_the_tests_is_accepted(config: Callable[..., Any]) -> None:
    options = check(config())
    assert options == Options(url="http://127.0.0.1:7700")
    assert options.start == "base"


def test_an_asynchronous_training_is_accepted(config: Callable[..., Any]) -> None:
    assert check(config(*ASYNC)).url == "http://127.0.0.1:7700"


def test_every_key_of_verls_yaml_has_a_rule(stock_paths: set[str]) -> None:
    assert not {path for path in stock_paths if find(path, TABLE) is None}


def test_every_field_of_verls_dataclasses_has_a_rule() -> None:
    assert not {path for path in of_dataclasses() if find(path, TABLE) is None}


def test_verl_has_every_key_of_the_table(stock_paths: set[str], stock_config: Any) -> None:
    there = {*stock_paths, *of_dataclasses(), *READ_ONLY_IN_CODE, OPTIONS}
    for path in set(TABLE) - set(OLDER):
        section = path.removesuffix(".*")
        if path == section:
            assert path in there, f"verl has no {path} any more"
        else:
            in_yaml = OmegaConf.select(stock_config, section, default="absent") != "absent"
            assert in_yaml or section in there, f"verl has no section {section} any more"


def test_keys_of_an_older_verl_are_in_this_one_no_more(stock_paths: set[str]) -> None:
    assert not stock_paths & set(OLDER)


def test_the_generated_yaml_is_what_hydra_composes(stock_paths: set[str]) -> None:
    """The tables are compared with the composed configuration, users read the generated file."""
    generated = OmegaConf.load(
        Path(trainer_config.__file__).with_name("_generated_ppo_trainer.yaml")
    )
    assert isinstance(generated, DictConfig)
    # model_engine chooses among the generated files
    assert {*leaves(generated), "model_engine"} == stock_paths


def test_the_page_of_keys_is_what_the_table_says() -> None:
    assert configuration_page.PAGE.read_text(encoding="utf-8") == configuration_page.page(), (
        "run python tests/verl/configuration_page.py"
    )


def illegal(rule: Only | Not) -> Any:
    """A value of about the right kind that the rule refuses."""
    if isinstance(rule, Not):
        return rule.values[0]
    legal = rule.values[0] if rule.values else None
    others: dict[type, Any] = {
        bool: not legal,
        int: (legal or 0) + 1 if isinstance(legal, int) else None,
        float: 2.5,
        str: "another",
        dict: {"option": 1},
    }
    return others.get(type(legal), "another")


def refusing() -> list[tuple[str, str]]:
    return [
        (mode, path)
        for mode in (SYNC, SEPARATE_ASYNC)
        for path, rule in TABLE.items()
        if isinstance(in_mode(rule, mode), (Only, Not))
    ]


@pytest.fixture(scope="module")
def trainings(config: Callable[..., Any]) -> dict[str, DictConfig]:
    """One training a mode; tests put back what they change."""
    return {SYNC: config(), SEPARATE_ASYNC: config(*ASYNC)}


@pytest.mark.parametrize(("mode", "path"), refusing())
def test_each_refused_key_is_refused_by_its_name(
    trainings: dict[str, DictConfig], mode: str, path: str
) -> None:
    training = trainings[mode]
    rule = in_mode(TABLE[path], mode)
    assert isinstance(rule, (Only, Not))
    before = OmegaConf.select(training, path, default="absent")
    assert before == "absent" or (before in rule.values) is isinstance(rule, Only)
    OmegaConf.update(training, path, illegal(rule), force_add=True, merge=False)
    with pytest.raises(errors.UnsupportedError) as raised:
        check_keys(training)
    assert f"{path}={illegal(rule)!r} is not supported" in str(raised.value)
    assert rule.because in str(raised.value)
    if path != "trainer.v1.trainer_mode":  # it decides which other keys are refused
        assert raised.value.details["key"] == path
    if before == "absent":
        section, _, name = path.rpartition(".")
        del OmegaConf.select(training, section)[name]
    else:
        OmegaConf.update(training, path, before, merge=False)
    check_keys(training)


def test_all_refusals_are_told_at_once(stock_config: Any) -> None:
    with pytest.raises(errors.UnsupportedError) as raised:
        check_keys(stock_config)
    for told in (
        f"{ROLLOUT}.name='???'",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        "trainer.n_gpus_per_node=8",
        "trainer.v1.trainer_mode='sync'",
    ):
        assert told in str(raised.value)


def test_another_engine_of_verl_is_refused_by_its_strategy() -> None:
    import hydra

    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        megatron = hydra.compose("ppo_trainer", ["model_engine=megatron"])
    with pytest.raises(errors.UnsupportedError, match=r"actor\.strategy='megatron'"):
        check_keys(megatron)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("algorithm.adv_estimator=gae", "algorithm.adv_estimator"),
        ("algorithm.adv_estimator=optimal_token_baseline", "algorithm.adv_estimator"),
        ("critic.enable=true", "critic.enable"),
        ("reward.reward_model.enable=true", "reward.reward_model.enable_resource_pool"),
        ("actor_rollout_ref.model.override_config={rope: 1}", "model.override_config.rope"),
        (f"{ROLLOUT}.logprobs_mode=raw_logprobs", f"{ROLLOUT}.logprobs_mode"),
        (f"{ROLLOUT}.temperature=0", f"{ROLLOUT}.temperature"),
        (f"{ACTOR}.policy_loss.loss_mode=vanila", f"{ACTOR}.policy_loss.loss_mode"),
        (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor"),
        (f"{ACTOR}.kl_loss_type=full", f"{ACTOR}.kl_loss_type"),
        (f"{ACTOR}.optim.clip_grad=0", f"{ACTOR}.optim.clip_grad"),
        (
            f"{ACTOR}.optim.override_optimizer_config={{amsgrad: true}}",
            f"{ACTOR}.optim.override_optimizer_config.amsgrad",
        ),
        (
            f"{ACTOR}.checkpoint.save_contents=[model,hf_model]",
            f"{ACTOR}.checkpoint.save_contents",
        ),
        (f"{ACTOR}.checkpoint.load_contents=[optimizer]", f"{ACTOR}.checkpoint.load_contents"),
        (f"{ACTOR}.entropy_cof=0.1", f"{ACTOR}.entropy_cof"),
        (f"{ACTOR}.optim.lrr=0.1", f"{ACTOR}.optim.lrr"),
        (f"{ROLLOUT}.val_kwargs.top_q=1", f"{ROLLOUT}.val_kwargs.top_q"),
        (f"{ROLLOUT}.engine_kwargs.other.x=1", f"{ROLLOUT}.engine_kwargs.other"),
        (f"{ROLLOUT}.custom_key=1", f"{ROLLOUT}.custom_key"),
        ("algorithm.gama=1", "algorithm.gama"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_key(
    config: Callable[..., Any], override: str, key: str
) -> None:
    with pytest.raises(errors.UnsupportedError) as raised:
        check(config(override))
    assert key in str(raised.value)
    assert key in raised.value.details["key"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("rollout_is=token",), None),
        (("rollout_is=token", "calculate"), "rollout_is"),
        (("rollout_rs=token_k1", "calculate"), "rollout_rs"),
        (("bypass_mode=true",), None),
        (("bypass_mode=true", "calculate"), "bypass_mode"),
        (("bypass_mode=true", "rollout_is=token"), "rollout_is"),
        (("bypass_mode=true", "rollout_is=token", "loss"), None),
    ],
)
def test_a_correction_that_verl_would_leave_out_is_refused(
    config: Callable[..., Any], overrides: tuple[str, ...], key: str | None
) -> None:
    others = {
        "calculate": f"{ROLLOUT}.calculate_log_probs=false",
        "loss": f"{ACTOR}.policy_loss.loss_mode=bypass_mode",
    }
    section = "algorithm.rollout_correction"
    training = config(*(others.get(each, f"{section}.{each}") for each in overrides))
    if key is None:
        check(training)
        return
    with pytest.raises(errors.UnsupportedError) as raised:
        check(training)
    assert raised.value.details["key"] == f"{section}.{key}"


def test_an_absent_section_is_fine(config: Callable[..., Any]) -> None:
    check(config("algorithm.filter_groups=null", "algorithm.rollout_correction=null"))


def test_an_own_advantage_estimator_may_have_own_keys(config: Callable[..., Any]) -> None:
    check(config("algorithm.adv_estimator=my_estimator", "algorithm.my_weight=0.5"))
    assert "algorithm" in CLOSED  # else the line above would prove nothing


def test_an_unknown_key_gets_the_nearest_one(config: Callable[..., Any]) -> None:
    with pytest.raises(errors.UnsupportedError, match="'entropy_coeff'"):
        check(config(f"{ACTOR}.entropy_cof=0.1"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{OPTIONS}.url=''", r"engine_kwargs\.remote_rl\.url is missing"),
        (f"{OPTIONS}.urll=x", r"engine_kwargs\.remote_rl\.urll does not exist; .*'url'"),
        (f"{OPTIONS}.generation_attempts=0", r"engine_kwargs\.remote_rl\.generation_attempts must"),
        (f"{OPTIONS}.poll_seconds=0", r"engine_kwargs\.remote_rl\.poll_seconds must .*> 0"),
        (f"{OPTIONS}.poll_seconds=often", r"engine_kwargs\.remote_rl\.poll_seconds must"),
        (f"{OPTIONS}.takeover=maybe", r"engine_kwargs\.remote_rl\.takeover must"),
        (f"{OPTIONS}.handle={{}}", r"engine_kwargs\.remote_rl\.handle is written by the trainer"),
        (f"{OPTIONS}=http://127.0.0.1:7700", r"engine_kwargs\.remote_rl must be a block"),
    ],
)
def test_wrong_options_of_the_shim_itself(
    config: Callable[..., Any], override: str, message: str
) -> None:
    with pytest.raises(errors.InvalidRequestError, match=message):
        check(config(override))


def test_options_work_from_the_command_line() -> None:
    """`main_ppo` reads verl's own folder of YAML only; no hydra.searchpath is set."""
    import hydra

    given = {
        "url": "http://gpu-box:7700",
        "model": "m",
        "start": "current",
        "takeover": True,
        "generation_attempts": 5,
        "in_flight": "abort",
        "poll_seconds": 0.05,
    }
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        composed = hydra.compose(
            "ppo_trainer",
            [f"+{OPTIONS}.{name}={value}" for name, value in given.items()],
        )
    options = Options.of(composed.actor_rollout_ref.rollout)
    assert {name: getattr(options, name) for name in given} == given
    assert set(given) == set(public(Options))
