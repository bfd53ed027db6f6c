"""Every key of SkyRL's configuration is known; what can't be honoured is refused by its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import skyrl_configuration_page
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.train.config import AlgorithmConfig, SkyRLTrainConfig
from skyrl.train.utils import validate_cfg
from skyrl_workload import overrides

from remote_rl import errors
from shims.common.options import public
from shims.common.rules import Irrelevant, Mapped, Not, Only, Theirs, find, in_mode, plain
from shims.skyrl.config import check, prepare
from shims.skyrl.entrypoint import parse
from shims.skyrl.keys import TABLE
from shims.skyrl.options import Options
from shims.skyrl.rules import FULLY_ASYNC, SYNC
from shims.skyrl.section import RemoteSection, config_class

#: what makes the tests' training a fully asynchronous one
ASYNC = (
    "trainer.fully_async.enabled=true",
    "trainer.policy_mini_batch_size=4",
    "trainer.fully_async.num_parallel_generation_workers=4",
    "trainer.algorithm.policy_loss_type=rollout_is",
)


def leaves(node: Any, path: str = "") -> Iterator[str]:
    for field in dataclasses.fields(node):
        below = f"{path}.{field.name}" if path else field.name
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, below)
        else:
            yield below


def value_at(node: Any, path: str) -> Any:
    for name in path.split("."):
        node = getattr(node, name)
    return node


def with_value(config: Any, path: str, value: Any) -> Any:
    section, _, name = path.rpartition(".")
    setattr(value_at(config, section) if section else config, name, value)
    return config


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., SkyRLTrainConfig]:
    """The tests' training with further `key=value` overrides, before it is accepted."""
    inputs = {"model": tmp_path / "model", "gsm8k": tmp_path / "gsm8k.jsonl"}

    def made(*more: str) -> SkyRLTrainConfig:
        given = overrides(inputs, "http://127.0.0.1:7700", tmp_path)
        return config_class().from_cli_overrides([*given, *more])

    return made


STOCK = list(leaves(SkyRLTrainConfig()))


def test_every_key_of_skyrl_has_a_rule() -> None:
    assert [path for path in STOCK if find(path, TABLE) is None] == []


def test_every_rule_is_of_a_key_of_skyrl() -> None:
    known = {path.removesuffix(".*") for path in TABLE} - {"trainer.remote"}
    stale = {
        each for each in known if not any(p == each or p.startswith(f"{each}.") for p in STOCK)
    }
    assert stale == set()


def test_the_stock_defaults_are_honoured(config: Callable[..., SkyRLTrainConfig]) -> None:
    """What a user leaves alone is never refused, in either trainer."""
    stock = SkyRLTrainConfig()
    for mode in (SYNC, FULLY_ASYNC):
        for path in STOCK:
            rule = find(path, TABLE)
            assert rule is not None
            held, value = in_mode(rule, mode), plain(value_at(stock, path))
            if isinstance(held, Only):
                assert value in held.values, path
            if isinstance(held, Not):
                assert value not in held.values, path
    assert check(config()).target == "http://127.0.0.1:7700"
    assert check(config(*ASYNC)).target == "http://127.0.0.1:7700"


ONLY = [
    (path, rule)
    for path in STOCK
    if isinstance(rule := in_mode(find(path, TABLE), SYNC), Only)  # type: ignore[arg-type]
]
#: another value of each type, for keys that take few values
OTHERS = (True, False, 7, "other", ["a"], {"a": 1}, 0.5)


@pytest.mark.parametrize(("path", "rule"), ONLY, ids=[path for path, _ in ONLY])
def test_another_value_is_refused_by_the_keys_name(
    config: Callable[..., SkyRLTrainConfig], path: str, rule: Only
) -> None:
    value = next(each for each in OTHERS if plain(each) not in rule.values)
    with pytest.raises(errors.UnsupportedError) as caught:
        check(with_value(config(), path, value))
    assert caught.value.details["key"] == path
    assert str(caught.value).startswith(f"{path}={value!r} is not supported with remote_rl: ")


def test_all_refusals_come_in_one_error(config: Callable[..., SkyRLTrainConfig]) -> None:
    given = config(
        "trainer.critic.model.path=critic",
        "trainer.policy.model.lora.rank=8",
        "generator.vision_language_generator=true",
    )
    with pytest.raises(errors.UnsupportedError) as caught:
        check(given)
    for path in (
        "trainer.critic.model.path",
        "trainer.policy.model.lora.rank",
        "generator.vision_language_generator",
    ):
        assert path in str(caught.value)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ("trainer.ref.model.path=another", "trainer.ref.model.path"),
        ("trainer.ckpt_path=s3://bucket/ckpts", "trainer.ckpt_path"),
        ("trainer.export_path=gs://bucket/exports", "trainer.export_path"),
        ("trainer.algorithm.temperature=0.0", "trainer.algorithm.temperature"),
        (
            "trainer.policy.optimizer_config.scheduler=reduce_lr_on_plateau",
            "trainer.policy.optimizer_config.scheduler",
        ),
        (
            "trainer.policy.optimizer_config.scheduler=exponential",
            "trainer.policy.optimizer_config.scheduler",
        ),
        (
            "generator.sampling_params.additional_kwargs={min_tokens: 0}",
            "generator.sampling_params.additional_kwargs.min_tokens",
        ),
        (
            "generator.eval_sampling_params.additional_kwargs={best_of: 4}",
            "generator.eval_sampling_params.additional_kwargs.best_of",
        ),
        ("trainer.algorithm.policy_loss_type=mine", "trainer.algorithm.policy_loss_type"),
        ("trainer.algorithm.kl_estimator_type=k7", "trainer.algorithm.kl_estimator_type"),
    ],
)
def test_values_that_no_table_lists(
    config: Callable[..., SkyRLTrainConfig], given: str, key: str
) -> None:
    with pytest.raises(errors.UnsupportedError) as caught:
        check(config(given))
    assert caught.value.details["key"] == key
    assert key in str(caught.value)


def test_a_key_that_skyrl_adds_is_refused_only_away_from_its_default(
    config: Callable[..., SkyRLTrainConfig],
) -> None:
    known = {path: rule for path, rule in TABLE.items() if path != "trainer.epochs"}
    with pytest.raises(errors.UnsupportedError, match=r"^trainer\.epochs is not known") as caught:
        check(config(), known)
    assert caught.value.details["key"] == "trainer.epochs"
    check(config("trainer.epochs=1"), known)


def test_sections_of_the_users_own_are_theirs(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Mine(AlgorithmConfig):
        strength: float = 1.0

    inputs = {"model": tmp_path / "model", "gsm8k": tmp_path / "gsm8k.jsonl"}
    given = overrides(inputs, "mock", tmp_path)
    made = config_class(Mine).from_cli_overrides([*given, "trainer.algorithm.strength=2.0"])
    assert check(made).target == "mock"
    assert made.trainer.algorithm.strength == 2.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("trainer.remote.start=", "trainer.remote.start must be"),
        ("trainer.remote.in_flight=drop", "trainer.remote.in_flight can't be"),
        ("trainer.remote.generation_attempts=0", "trainer.remote.generation_attempts must be"),
        ("trainer.remote.target=null", "trainer.remote.target is missing"),
    ],
)
def test_options_of_the_shim_are_checked_by_their_full_path(
    config: Callable[..., SkyRLTrainConfig], given: str, message: str
) -> None:
    with pytest.raises(errors.InvalidRequestError, match=message):
        check(config(given))


def test_the_parsed_section_has_every_option_with_its_default() -> None:
    section = RemoteSection()
    assert set(public(Options)) == {field.name for field in dataclasses.fields(RemoteSection)}
    assert Options(target="mock") == Options(**{**dataclasses.asdict(section), "target": "mock"})


def test_skyrls_own_checks_find_nothing_to_place(
    config: Callable[..., SkyRLTrainConfig],
) -> None:
    """Layouts that a user has for local accelerators, and whose divisibility SkyRL would check."""
    given = config(
        "trainer.placement.policy_num_gpus_per_node=8",
        "generator.inference_engine.num_engines=8",
        "generator.inference_engine.tensor_parallel_size=4",
        "generator.inference_engine.expert_parallel_size=4",
        "trainer.policy.sequence_parallel_size=8",
        "trainer.ref.sequence_parallel_size=4",
        "generator.inference_engine.delta_weight_sync.sync_dir=shared",
    )
    check(given)
    prepare(given)
    validate_cfg(given)
    assert given.trainer.placement.colocate_all is False


@pytest.mark.parametrize("section", ["policy", "ref"])
def test_a_precision_of_its_own_is_refused_wherever_skyrl_has_one(
    config: Callable[..., SkyRLTrainConfig], section: str
) -> None:
    key = f"trainer.{section}.fsdp_config.mixed_precision.param_dtype"
    with pytest.raises(errors.UnsupportedError, match=r"mixed_precision.*precision") as caught:
        check(config(f"{key}=fp32"))
    assert caught.value.details["key"] == key


def test_the_entry_points_own_flag_is_no_key(tmp_path: Path) -> None:
    inputs = {"model": tmp_path / "model", "gsm8k": tmp_path / "gsm8k.jsonl"}
    given = overrides(inputs, "mock", tmp_path)
    made = parse(["trainer.override_entrypoint=shims.skyrl", *given])
    assert made.trainer.remote.target == "mock"


def test_every_registered_loss_passes_the_check(
    config: Callable[..., SkyRLTrainConfig],
) -> None:
    for name in PolicyLossRegistry.list_available():
        check(config(f"trainer.algorithm.policy_loss_type={name}"))


def test_the_page_is_what_the_tables_say() -> None:
    assert skyrl_configuration_page.PAGE.read_text(encoding="utf-8") == (
        skyrl_configuration_page.page()
    )


def test_rules_are_of_the_known_kinds() -> None:
    for path, rule in TABLE.items():
        for mode in (SYNC, FULLY_ASYNC):
            held = in_mode(rule, mode)
            assert isinstance(held, (Mapped, Theirs, Irrelevant, Only, Not)), path
