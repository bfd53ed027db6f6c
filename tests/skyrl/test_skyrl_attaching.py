"""What SkyRL is set to do, compared with what the server offers before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from skyrl.train.config import SkyRLTrainConfig
from skyrl_workload import VOCABULARY, build_inputs, overrides
from verl_runs import serve_mock

from remote_rl import RunInfo, connect, errors
from shims.skyrl.attaching import attach, check_server
from shims.skyrl.entrypoint import parse
from shims.skyrl.options import Options

SAMPLING, EVALUATION = "generator.sampling_params", "generator.eval_sampling_params"
ENTRY, LOSS = "trainer.override_entrypoint", "trainer.algorithm.policy_loss_type"
Parsed = Callable[..., SkyRLTrainConfig]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> RunInfo:
    """What a mock of the tests' vocabulary says of itself."""
    folder = tmp_path_factory.mktemp("server")
    words = len(VOCABULARY)
    with connect("mock", vocab_size=words, context_length=64, checkpoint_dir=folder) as session:
        return session.info().result()


@pytest.fixture(scope="module")
def tokenizer(inputs: dict[str, Path]) -> Any:
    from skyrl.utils.tok import get_tokenizer

    return get_tokenizer(str(inputs["model"]))


@pytest.fixture
def parsed(inputs: dict[str, Path], tmp_path: Path) -> Parsed:
    """The tests' training with further `key=value` overrides."""

    def made(*more: str) -> SkyRLTrainConfig:
        return parse([*overrides(inputs, "mock", tmp_path), *more])

    return made


def check(config: SkyRLTrainConfig, tokenizer: Any, info: RunInfo) -> None:
    check_server(config, Options.of(config), tokenizer, info)


def without(info: RunInfo, kind: str, name: str) -> RunInfo:
    """The same server, but for one thing it can do."""
    kept = getattr(info.capabilities, kind) - {name}
    return attrs.evolve(info, capabilities=attrs.evolve(info.capabilities, **{kind: kept}))


@pytest.mark.parametrize(
    ("kind", "name", "more", "key"),
    [
        ("operations", "forward_backward", (), ENTRY),
        ("operations", "save", ("trainer.ckpt_interval=1",), "trainer.ckpt_interval"),
        ("operations", "export", ("trainer.hf_save_interval=1",), "trainer.hf_save_interval"),
        (
            "operations",
            "set_reference",
            ("trainer.update_ref_every_epoch=true",),
            "trainer.update_ref_every_epoch",
        ),
        (
            "operations",
            "set_reference",
            ("trainer.remote.start=current",),
            "trainer.remote.start",
        ),
        ("losses", "PPO", (), LOSS),
        ("losses", "Cotangents", (f"{LOSS}=sapo",), LOSS),
        ("outputs", "entropy", (), LOSS),
        ("in_flight", "abort", ("trainer.remote.in_flight=abort",), "trainer.remote.in_flight"),
        ("optimizers", "AdamW", (), "trainer.policy.optimizer_config"),
        ("sampling_options", "temperature", (f"{SAMPLING}.temperature=0.7",), None),
        ("sampling_options", "top_p", (f"{SAMPLING}.top_p=0.9",), f"{SAMPLING}.top_p"),
        (
            "sampling_options",
            "top_k",
            ("trainer.eval_interval=1", f"{EVALUATION}.top_k=4"),
            f"{EVALUATION}.top_k",
        ),
        ("sampling_outputs", "drawn_logprobs", (), f"{SAMPLING}.logprobs"),
    ],
)
def test_what_the_server_lacks_is_refused_by_skyrls_key(
    parsed: Parsed,
    tokenizer: Any,
    info: RunInfo,
    kind: str,
    name: str,
    more: tuple[str, ...],
    key: str | None,
) -> None:
    config = parsed(*more)
    check(config, tokenizer, info)
    with pytest.raises(errors.UnsupportedError) as raised:
        check(config, tokenizer, without(info, kind, name))
    assert raised.value.details["key"] == (key or f"{SAMPLING}.{name}")
    assert repr(name) in str(raised.value)


def test_options_of_evaluation_count_only_where_it_runs(
    parsed: Parsed, tokenizer: Any, info: RunInfo
) -> None:
    poorer = without(info, "sampling_options", "top_k")
    more = (f"{EVALUATION}.top_k=4", f"{EVALUATION}.max_generate_length=60")
    check(parsed("trainer.eval_interval=-1", *more), tokenizer, poorer)


@pytest.mark.parametrize("key", ["trainer.ckpt_interval", "trainer.hf_save_interval"])
def test_a_server_that_can_not_save(
    parsed: Parsed, tokenizer: Any, info: RunInfo, key: str
) -> None:
    bare = attrs.evolve(info, checkpoint_dir=False)
    check(parsed(), tokenizer, bare)
    with pytest.raises(errors.UnsupportedError, match=f"{key}=2 .*--checkpoint-dir"):
        check(parsed(f"{key}=2"), tokenizer, bare)


@pytest.mark.parametrize(
    ("fields", "more", "key"),
    [
        ({"vocab_size": 3}, (), "trainer.policy.model.path"),
        ({"context_length": 21}, (), f"{SAMPLING}.max_generate_length"),
        (
            {"context_length": 22},
            ("trainer.eval_interval=1", f"{EVALUATION}.max_generate_length=7"),
            f"{EVALUATION}.max_generate_length",
        ),
    ],
)
def test_another_model(
    parsed: Parsed, tokenizer: Any, info: RunInfo, fields: Any, more: tuple[str, ...], key: str
) -> None:
    config = parsed(*more)
    check(config, tokenizer, info)
    other = attrs.evolve(info, model=attrs.evolve(info.model, **fields))
    with pytest.raises(errors.UnsupportedError, match=key):
        check(config, tokenizer, other)


def test_a_refused_training_gives_the_run_back(
    parsed: Parsed, tokenizer: Any, tmp_path: Path
) -> None:
    with serve_mock(tmp_path / "server", vocab_size=3) as url:
        config = parsed(f"trainer.remote.target={url}")
        with pytest.raises(errors.UnsupportedError, match=r"trainer\.policy\.model\.path"):
            attach(config, Options.of(config), tokenizer)
        with connect(url, start="base") as session:  # another driver that is alive is refused
            assert session.info().result().model.vocab_size == 3


@pytest.mark.parametrize(
    ("more", "kind", "note"),
    [
        (("trainer.remote.target=mokc",), errors.UnknownNameError, "trainer.remote.target=mokc"),
        (
            ("trainer.remote.target=http://127.0.0.1:9", "trainer.remote.backend.vocab_size=3"),
            errors.InvalidRequestError,
            "trainer.remote.backend.vocab_size",
        ),
    ],
)
def test_a_target_that_can_not_be_is_named_by_its_key(
    parsed: Parsed,
    tokenizer: Any,
    more: tuple[str, ...],
    kind: type[errors.RemoteRLError],
    note: str,
) -> None:
    config = parsed(*more)
    with pytest.raises(kind) as raised:
        attach(config, Options.of(config), tokenizer)
    assert note in raised.value.__notes__[0]
