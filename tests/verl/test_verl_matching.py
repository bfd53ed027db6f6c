"""What verl is set to do, compared with what the server offers before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from remote_rl import RunInfo, connect, errors
from shims.verl.matching import check_server, end_token_ids

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> RunInfo:
    """What a mock of the tests' vocabulary says of itself."""
    folder = tmp_path_factory.mktemp("server")
    with connect("mock", vocab_size=28, context_length=64, checkpoint_dir=folder) as session:
        return session.info().result()


@pytest.fixture(scope="module")
def tokenizer(inputs: dict[str, Path]) -> Any:
    from verl.utils import hf_tokenizer

    return hf_tokenizer(str(inputs["model"]))


def without(info: RunInfo, kind: str, name: str) -> RunInfo:
    """The same server, but for one thing it can do."""
    kept = getattr(info.capabilities, kind) - {name}
    return attrs.evolve(info, capabilities=attrs.evolve(info.capabilities, **{kind: kept}))


def test_the_mock_offers_all_that_the_training_needs(
    config: Callable[..., Any], tokenizer: Any, info: RunInfo
) -> None:
    check_server(config(), tokenizer, info)


@pytest.mark.parametrize(
    ("kind", "name", "overrides", "key"),
    [
        ("operations", "forward_backward", (), "trainer.v1.trainer_mode"),
        ("operations", "save", (), "trainer.save_freq"),
        ("losses", "PPO", (), f"{ACTOR}.policy_loss.loss_mode"),
        (
            "losses",
            "Cotangents",
            (f"{ACTOR}.policy_loss.loss_mode=sapo",),
            f"{ACTOR}.policy_loss.loss_mode",
        ),
        ("outputs", "entropy", (), "trainer.v1.trainer_mode"),
        ("sampling_options", "temperature", (), f"{ROLLOUT}.temperature"),
        ("sampling_options", "top_p", (f"{ROLLOUT}.top_p=0.9",), f"{ROLLOUT}.top_p"),
        (
            "sampling_options",
            "top_k",
            ("trainer.test_freq=1", f"{ROLLOUT}.val_kwargs.top_k=4"),
            f"{ROLLOUT}.val_kwargs.top_k",
        ),
        ("sampling_outputs", "logprobs", (), f"{ROLLOUT}.calculate_log_probs"),
        (
            "sampling_outputs",
            "drawn_logprobs",
            (f"{ROLLOUT}.top_p=0.9",),
            f"{ROLLOUT}.calculate_log_probs",
        ),
        (
            "operations",
            "set_reference",
            (f"{ROLLOUT}.engine_kwargs.remote_rl.start=current",),
            f"{ROLLOUT}.engine_kwargs.remote_rl.start",
        ),
    ],
)
def test_what_the_server_lacks_is_refused_by_verls_key(
    config: Callable[..., Any],
    tokenizer: Any,
    info: RunInfo,
    kind: str,
    name: str,
    overrides: tuple[str, ...],
    key: str,
) -> None:
    check_server(config(*overrides), tokenizer, info)
    with pytest.raises(errors.UnsupportedError) as raised:
        check_server(config(*overrides), tokenizer, without(info, kind, name))
    assert raised.value.details["key"] == key
    assert repr(name) in str(raised.value)


def test_validation_options_count_only_where_validation_runs(
    config: Callable[..., Any], tokenizer: Any, info: RunInfo
) -> None:
    overrides = ("trainer.test_freq=-1", f"{ROLLOUT}.val_kwargs.top_k=4")
    check_server(config(*overrides), tokenizer, without(info, "sampling_options", "top_k"))


def test_a_server_that_can_not_save(
    config: Callable[..., Any], tokenizer: Any, info: RunInfo
) -> None:
    bare = attrs.evolve(info, checkpoint_dir=False)
    check_server(config("trainer.save_freq=-1"), tokenizer, bare)
    with pytest.raises(errors.UnsupportedError, match=r"trainer\.save_freq=1.*--checkpoint-dir"):
        check_server(config(), tokenizer, bare)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 20}, r"model\.path=.* has 28 tokens, .* has 20"),
        ({"context_length": 10}, r"prompt_length=8 plus response_length=6 exceeds the 10 tokens"),
    ],
)
def test_another_model(
    config: Callable[..., Any], tokenizer: Any, info: RunInfo, fields: Any, message: str
) -> None:
    other = attrs.evolve(info, model=attrs.evolve(info.model, **fields))
    with pytest.raises(errors.UnsupportedError, match=message):
        check_server(config(), tokenizer, other)


def test_end_ids_that_only_verl_knows(
    config: Callable[..., Any], tokenizer: Any, info: RunInfo
) -> None:
    assert end_token_ids(config(), tokenizer, info) == (1,)
    knows = attrs.evolve(info, model=attrs.evolve(info.model, eos_token_ids=(1, 5)))
    assert end_token_ids(config(), tokenizer, knows) == ()
