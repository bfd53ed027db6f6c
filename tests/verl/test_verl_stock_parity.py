"""What the shim's update applies, against verl's own loss on the same rows: every policy loss of
verl's registry, aggregation, KL estimator and knob, from verl's rows to the weights' gradient.

The gradient is the mock trainer's accumulator when the step arrives; what it should be, torch's
autograd through the mock's policy and verl's `ppo_loss`, the mini-batch in one piece."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss
from verl_rows import VOCABULARY, Mock, random_rows, replaced, stock_step

from backends.mock import create
from remote_rl import Session, connect, errors
from shims.verl.config import check
from shims.verl.losses import build_loss, is_named
from shims.verl.optimizer import Optimizer
from shims.verl.updates import update

ACTOR = "actor_rollout_ref.actor"
TOLERANCE = 1e-5  # of the largest gradient
AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
BASE_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
ESTIMATORS = (*BASE_ESTIMATORS, *(f"{name}+" for name in BASE_ESTIMATORS))
#: knobs that a loss of its own reads, away from where they would do nothing
KNOBS = {
    "dppo_tv": ("clip_ratio_low=0.02", "clip_ratio_high=0.03", "clip_ratio_c=1.2"),
    "dppo_kl": ("clip_ratio_low=0.002", "clip_ratio_high=0.003", "clip_ratio_c=1.2"),
    "sapo": ("tau_pos=1.3", "tau_neg=2.0"),
    "clip_cov": (
        "policy_loss.clip_cov_ratio=0.3",
        "policy_loss.clip_cov_lb=-1.0",
        "policy_loss.clip_cov_ub=2.0",
    ),
    "kl_cov": ("policy_loss.kl_cov_ratio=0.3", "policy_loss.ppo_kl_coef=0.7"),
    "dro": ("policy_loss.dro_beta=0.3",),
    "bypass_mode": (
        "policy_loss.rollout_correction.loss_type=reinforce",
        "policy_loss.rollout_correction.rollout_is=token",
        "policy_loss.rollout_correction.rollout_is_threshold=1.2",
    ),
}


@pytest.fixture(scope="module")
def session_and_backend() -> Iterator[tuple[Session, Any]]:
    backend = create(vocab_size=VOCABULARY, initial_scale=1.0)
    with connect(backend) as session:
        session.training.snapshot("start").result()
        yield session, backend


@pytest.fixture
def mock(session_and_backend: tuple[Session, Any]) -> Mock:
    session, backend = session_and_backend
    session.training.restore_snapshot("start").result()
    return Mock(session, backend)


@pytest.fixture(scope="module")
def actor(config: Callable[..., Any]) -> Callable[..., Any]:
    """verl's actor dataclass with overrides, no KL or entropy unless asked for; a fixed width."""
    settings = ("use_kl_loss=false", "entropy_coeff=0", "loss_scale_factor=7")
    whole = config(
        *[f"{ACTOR}.{each}" for each in settings], f"{ACTOR}.optim.total_training_steps=5"
    )
    base = omega_conf_to_dataclass(whole.actor_rollout_ref.actor)

    def build(*overrides: str) -> Any:
        return replaced(base, *overrides)

    return build


def compare(
    mock: Mock, actor: Any, rows: TensorDict, seed: int = 11, *, moves: bool = True
) -> dict[str, Any]:
    """Runs the shim's update and verl's loss from the same random state; returns both metrics.
    moves: the gradient must not be zero."""
    weights = mock.policy
    torch.manual_seed(seed)
    found = update(mock, actor, Optimizer(actor.optim), rows)  # type: ignore[arg-type]
    torch.manual_seed(seed)
    value, metrics, wanted = stock_step(actor, weights, rows)
    assert found["loss"] == pytest.approx([value], rel=TOLERANCE, abs=TOLERANCE)
    largest = max(np.abs(each).max() for each in wanted.values())
    assert largest > 0 or not moves
    for name, each in wanted.items():
        np.testing.assert_allclose(
            mock.gradients[-1][name], each, rtol=0, atol=TOLERANCE * largest, err_msg=name
        )
    return {"found": found, "stock": metrics}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("mode", sorted(POLICY_LOSS_REGISTRY))
def test_every_policy_loss_of_the_registry(
    mock: Mock, actor: Callable[..., Any], mode: str, aggregation: str, weighted: bool
) -> None:
    section = actor(
        f"policy_loss.loss_mode={mode}", f"loss_agg_mode={aggregation}", *KNOBS.get(mode, ())
    )
    compare(mock, section, random_rows(mock.policy, weighted=weighted))


@pytest.mark.parametrize("mode", sorted(POLICY_LOSS_REGISTRY))
def test_metrics_are_stock_verls_where_the_loss_is_in_one_piece(
    mock: Mock, actor: Callable[..., Any], mode: str
) -> None:
    section = actor(
        f"policy_loss.loss_mode={mode}",
        "use_kl_loss=true",
        "kl_loss_coef=0.3",
        "entropy_coeff=0.2",
        *KNOBS.get(mode, ()),
    )
    both = compare(mock, section, random_rows(mock.policy, spread=0.8))
    for name, metric in both["stock"].items():
        wanted = metric.aggregate() if hasattr(metric, "aggregate") else metric
        if name not in both["found"]:
            assert wanted == 0.0, f"{name} is missing, and it is not constantly 0"
            continue
        assert both["found"][name] == pytest.approx([wanted], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("mode", ["vanilla", "gspo", "sapo"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_kl_estimator(mock: Mock, actor: Callable[..., Any], mode: str, name: str) -> None:
    section = actor(
        f"policy_loss.loss_mode={mode}",
        "use_kl_loss=true",
        "kl_loss_coef=0.7",
        f"kl_loss_type={name}",
        "loss_agg_mode=seq-mean-token-mean",
    )
    compare(mock, section, random_rows(mock.policy, spread=0.8))


@pytest.mark.parametrize("mode", ["vanilla", "dppo_tv"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_entropy_by_every_aggregation(
    mock: Mock, actor: Callable[..., Any], mode: str, aggregation: str
) -> None:
    section = actor(
        f"policy_loss.loss_mode={mode}", "entropy_coeff=0.5", f"loss_agg_mode={aggregation}"
    )
    with_entropy = compare(mock, section, random_rows(mock.policy))
    assert with_entropy["found"]["actor/entropy_loss"][0] > 0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(
    "clip",
    [
        ("clip_ratio=0.05", "clip_ratio_low=null", "clip_ratio_high=null"),
        ("clip_ratio_low=0.05", "clip_ratio_high=0.3"),
        ("clip_ratio_low=0.5", "clip_ratio_high=0.01", "clip_ratio_c=1.1"),
    ],
    ids=["symmetric", "asymmetric", "dual"],
)
@pytest.mark.parametrize("mode", ["vanilla", "gspo", "cispo", "geo_mean", "clip_cov"])
def test_clips(
    mock: Mock,
    actor: Callable[..., Any],
    mode: str,
    clip: tuple[str, ...],
    aggregation: str,
) -> None:
    section = actor(
        f"policy_loss.loss_mode={mode}",
        f"loss_agg_mode={aggregation}",
        *KNOBS.get(mode, ()),
        *clip,
    )
    compare(mock, section, random_rows(mock.policy, spread=0.8, random_seed=5))


@pytest.mark.parametrize("mode", ["vanilla", "gspo", "cispo", "gpg", "dppo_kl", "sapo"])
def test_log_ratios_beyond_verls_clamps(mock: Mock, actor: Callable[..., Any], mode: str) -> None:
    section = actor(f"policy_loss.loss_mode={mode}", "clip_ratio_c=50", *KNOBS.get(mode, ()))
    rows = random_rows(mock.policy, spread=15.0, random_seed=2)
    drift = (rows["old_log_probs"].values() + 3.3).abs().max()
    assert drift > 20
    compare(mock, section, rows)


BYPASS = [
    ("loss_type=ppo_clip",),
    ("loss_type=reinforce",),
    ("loss_type=reinforce", "rollout_is=sequence"),
    ("loss_type=reinforce", "rollout_is=token", "rollout_is_batch_normalize=true"),
    ("loss_type=ppo_clip", "rollout_rs=token_k1", "rollout_rs_threshold=0.7_1.4"),
]


@pytest.mark.parametrize("correction", BYPASS, ids=["+".join(each) for each in BYPASS])
def test_rollout_correction_in_bypass_mode(
    mock: Mock, actor: Callable[..., Any], correction: tuple[str, ...]
) -> None:
    section = actor(
        "policy_loss.loss_mode=bypass_mode",
        *[f"policy_loss.rollout_correction.{each}" for each in correction],
    )
    both = compare(mock, section, random_rows(mock.policy, spread=0.5))
    assert any(name.startswith("rollout_corr/") for name in both["found"])


def test_rejected_tokens_leave_verls_denominator_alone(
    mock: Mock, actor: Callable[..., Any]
) -> None:
    """verl's rejection sampling clears `response_mask` and keeps `loss_mask`, whose sum divides."""
    rows = random_rows(mock.policy)
    kept = [row.clone() for row in rows["response_mask"].unbind()]
    kept[2][:] = 0
    rows["response_mask"] = torch.nested.as_nested_tensor(kept, layout=torch.jagged)
    for mode in ("vanilla", "sapo"):
        mock.session.training.restore_snapshot("start").result()
        compare(mock, actor(f"policy_loss.loss_mode={mode}"), rows)


@pytest.mark.parametrize("mode", ["vanilla", "clip_cov"])
def test_mini_batches_go_on_from_the_same_random_state(
    mock: Mock, actor: Callable[..., Any], mode: str
) -> None:
    """Two mini-batches: each against verl's loss at the weights it met, one stream of random
    numbers for both."""
    section = actor(f"policy_loss.loss_mode={mode}", *KNOBS.get(mode, ()))
    rows = random_rows(mock.policy, mini_batch_size=3, global_batch_size=3)
    met: list[Any] = []
    real = mock.optim_step

    def optim_step(adamw: Any) -> Any:
        done = real(adamw)
        done.result()
        met.append(mock.policy)
        return done

    mock.optim_step = optim_step  # type: ignore[method-assign]
    met.append(mock.policy)
    torch.manual_seed(3)
    update(mock, section, Optimizer(section.optim), rows)  # type: ignore[arg-type]
    torch.manual_seed(3)
    for number, part in enumerate(([0, 1, 2], [3, 4, 5])):
        piece = tensordict_utils.index_select_tensor_dict(rows, part)
        _, _, wanted = stock_step(section, met[number], piece)
        largest = max(np.abs(each).max() for each in wanted.values())
        for name, each in wanted.items():
            np.testing.assert_allclose(
                mock.gradients[number][name], each, rtol=0, atol=TOLERANCE * largest
            )


@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    mode=st.sampled_from(sorted(POLICY_LOSS_REGISTRY)),
    aggregation=st.sampled_from(AGGREGATIONS),
    estimator=st.sampled_from((None, *ESTIMATORS)),
    entropy=st.sampled_from((None, 0.0, 0.3)),
    weighted=st.booleans(),
    lengths=st.lists(st.integers(1, 9), min_size=3, max_size=7),
    temperature=st.sampled_from((0.7, 1.0, 1.3)),
    spread=st.sampled_from((0.3, 0.8, 2.0)),  # far above float32's rounding of a logprob
    seed=st.integers(0, 2**16),
)
def test_any_combination(
    mock: Mock,
    actor: Callable[..., Any],
    mode: str,
    aggregation: str,
    estimator: str | None,
    entropy: float | None,
    weighted: bool,
    lengths: list[int],
    temperature: float,
    spread: float,
    seed: int,
) -> None:
    mock.session.training.restore_snapshot("start").result()
    overrides = [f"policy_loss.loss_mode={mode}", f"loss_agg_mode={aggregation}"]
    overrides += KNOBS.get(mode, ())
    if estimator is not None:
        overrides += ["use_kl_loss=true", "kl_loss_coef=0.1", f"kl_loss_type={estimator}"]
    overrides.append(f"entropy_coeff={entropy or 0.0}")
    rows = random_rows(
        mock.policy,
        random_seed=seed,
        lengths=tuple(lengths),
        spread=spread,
        weighted=weighted,
        temperature=temperature,
        calculate_entropy=entropy is not None,
    )
    compare(mock, actor(*overrides), rows, seed, moves=False)


def test_this_file_knows_every_aggregation_and_estimator_of_verl() -> None:
    """What verl adds fails here, by its name."""
    aggregations = re.findall(r'"((?:token|seq)-[a-z-]+)"', inspect.getsource(core_algos.agg_loss))
    assert set(aggregations) == set(AGGREGATIONS)
    source = inspect.getsource(core_algos.kl_penalty_forward)
    compared = re.findall(r"kl_penalty (?:==|in) (\(.*?\)|\".*?\")", source)
    estimators = {name for each in compared for name in re.findall(r'"(\w+)"', each)}
    assert estimators - {"full"} == set(BASE_ESTIMATORS)  # full needs whole distributions


def test_a_loss_that_the_user_registers_needs_no_code_of_the_shim(
    mock: Mock, config: Callable[..., Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "losses_of_a_user.py").write_text(
        "from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss\n\n\n"
        '@register_policy_loss("squared_ratio")\n'
        "def squared_ratio(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode,\n"
        "                  config=None, rollout_is_weights=None):\n"
        "    losses = -advantages * (2 * (log_prob - old_log_prob)).exp() * config.tau_neg\n"
        "    loss = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)\n"
        '    return loss, {"actor/largest": losses.max().item()}\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = [f"{ACTOR}.policy_loss.loss_mode=squared_ratio", f"{ACTOR}.use_kl_loss=false"]
    with pytest.raises(errors.UnsupportedError, match="loss_mode='squared_ratio'"):
        check(config(*settings))
    try:
        whole = config(*settings, "actor_rollout_ref.model.external_lib=losses_of_a_user")
        check(whole)
        section = omega_conf_to_dataclass(whole.actor_rollout_ref.actor)
        both = compare(mock, section, random_rows(mock.policy))
        assert len(both["found"]["actor/largest"]) == 1
    finally:
        POLICY_LOSS_REGISTRY.pop("squared_ratio", None)


def test_a_loss_registered_under_a_name_of_verls_is_the_users(
    mock: Mock, actor: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanilla(**given: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        losses = -given["log_prob"] * given["advantages"] * 3.0
        aggregated = core_algos.agg_loss(
            losses,
            given["response_mask"],
            given["loss_agg_mode"],
            **given["config"].global_batch_info,
        )
        return aggregated, {}

    section = actor()
    assert is_named(section)
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "vanilla", vanilla)
    assert not is_named(section)
    compare(mock, section, random_rows(mock.policy))


def test_a_loss_without_a_gradient_is_refused(
    mock: Mock, actor: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def constant(**given: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return given["log_prob"].detach().sum(), {}

    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "constant", constant)
    section = actor("policy_loss.loss_mode=constant")
    rows = random_rows(mock.policy, calculate_entropy=False)
    with pytest.raises(errors.InvalidRequestError, match="'constant' depends on no output"):
        update(mock, section, Optimizer(section.optim), rows)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("distillation.enabled=true", "distillation.enabled"),
        ("algorithm.adv_estimator=optimal_token_baseline", "algorithm.adv_estimator"),
        ("algorithm.adv_estimator=tir_optimal_token_baseline", "algorithm.adv_estimator"),
        (f"{ACTOR}.calculate_sum_pi_squared=true", f"{ACTOR}.calculate_sum_pi_squared"),
        (f"{ACTOR}.kl_loss_type=full", f"{ACTOR}.kl_loss_type"),
    ],
)
def test_what_needs_more_than_logprobs_and_entropies_is_refused_by_name(
    config: Callable[..., Any], override: str, key: str
) -> None:
    with pytest.raises(errors.UnsupportedError) as raised:
        check(config(override))
    assert raised.value.details["key"] == key
    assert key in str(raised.value)


#: losses whose stock result depends on how the mini-batch is cut, with what makes it so
PARTITIONED = {
    "clip_cov": (),
    "kl_cov": (),
    "geo_mean": (),
    "bypass_mode": ("policy_loss.rollout_correction.rollout_is_batch_normalize=true",),
}


@pytest.mark.parametrize("mode", sorted(POLICY_LOSS_REGISTRY))
def test_which_stock_results_depend_on_the_partition(
    actor: Callable[..., Any], mode: str, mock: Mock
) -> None:
    """verl alone: the sum over two micro-batches against one, the numbers of the whole given."""
    section = actor(
        f"policy_loss.loss_mode={mode}", *KNOBS.get(mode, ()), *PARTITIONED.get(mode, ())
    )
    same = []
    for seed in range(4):
        rows = random_rows(mock.policy, calculate_entropy=False, random_seed=seed, spread=0.8)
        whole = _stock_pieces(section, rows, [[0, 1, 2, 3, 4, 5]])
        cut = _stock_pieces(section, rows, [[0, 1, 2], [3, 4, 5]])
        same.append(bool(((whole - cut).abs() <= TOLERANCE * whole.abs().max()).all()))
    assert all(same) == (mode not in PARTITIONED)


def _stock_pieces(actor: Any, rows: TensorDict, pieces: list[list[int]]) -> torch.Tensor:
    """verl's derivative by each logprob, rows in order, the mini-batch cut into `pieces`."""
    torch.manual_seed(0)
    tokens = int(rows["loss_mask"].values().sum())
    found = []
    for piece in pieces:
        data = tensordict_utils.index_select_tensor_dict(rows, piece)
        tensordict_utils.assign_non_tensor(
            data, dp_size=1, batch_num_tokens=tokens, global_batch_size=len(rows)
        )
        prompts, responses = data["prompts"].unbind(), data["responses"].unbind()
        old = data["old_log_probs"].unbind()
        leaf = torch.cat([each + 0.1 * torch.arange(len(each)) for each in old])
        leaf.requires_grad_()
        parts = leaf.split([len(each) for each in responses])
        placed = [
            torch.cat([torch.zeros(len(prompt) - 1), part, torch.zeros(1)])
            for prompt, part in zip(prompts, parts, strict=True)
        ]
        jagged = torch.nested.as_nested_tensor(placed, layout=torch.jagged)
        value, _ = ppo_loss(actor, {"log_probs": jagged}, data)
        found.append(torch.autograd.grad(value, leaf)[0])
    return torch.cat(found)


def test_the_page_says_how_every_loss_of_verl_is_served(actor: Callable[..., Any]) -> None:
    """docs/verl.md against the registry, the shim's names, and what stock verl was measured to do
    above."""
    page = (Path(__file__).parents[2] / "docs" / "verl.md").read_text(encoding="utf-8")
    section = page.split("\n## Losses\n")[1].split("\n## ")[0]
    table = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", section, re.MULTILINE)[1:]
    assert sorted(mode for mode, _, _ in table) == sorted(POLICY_LOSS_REGISTRY)
    for mode, served, partition in table:
        chosen = actor(f"policy_loss.loss_mode={mode}")
        wanted = "cotangents"
        if is_named(chosen):
            loss = build_loss(chosen, tokens=1, sequences=1, entropy=False)
            wanted = f"named: `{type(loss).__name__}`"
        assert served.startswith(wanted), mode
        assert (not partition.startswith("no")) == (mode in PARTITIONED), mode
