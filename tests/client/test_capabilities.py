"""What a backend does not declare is refused at the call: by its name, with nothing sent, no number
taken and nothing dirty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import pytest
from client_support import SessionFactory, small_mock

from remote_rl import AdamW, Batch, SamplingParams, Session, Tensor, connect, losses
from remote_rl.client.faces import Face
from remote_rl.errors import InvalidRequestError, UnknownNameError, UnsupportedError
from remote_rl.losses import LOSSES
from remote_rl.messages import Message, Submit
from remote_rl.ops import ALWAYS_OFFERED, OPERATIONS
from remote_rl.protocol import Capabilities
from remote_rl.types.results import TENSOR_DTYPES

Call = Callable[[Session, Batch], Any]


class Lesser:
    """The mock, declaring less than it can."""

    def __init__(self, kind: str, name: str) -> None:
        self._mock = small_mock(vocab_size=259)
        declared: Capabilities = self._mock.capabilities
        assert name in getattr(declared, kind)
        self.capabilities = attrs.evolve(declared, **{kind: getattr(declared, kind) - {name}})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mock, name)


def _loss(kind: type[losses.Loss], batch: Batch) -> losses.Loss:
    if kind is losses.Cotangents:
        return losses.Cotangents({"logprobs": batch.advantages}, version=0)
    return kind()


OPERATION_CALLS: dict[str, Call] = {
    "forward": lambda rl, batch: rl.training.forward(batch),
    "forward_backward": lambda rl, batch: rl.training.forward_backward(
        batch, losses.CrossEntropy()
    ),
    "optim_step": lambda rl, batch: rl.training.optim_step(AdamW(lr=0.1)),
    "zero_grad": lambda rl, batch: rl.training.zero_grad(),
    "snapshot": lambda rl, batch: rl.training.snapshot("a"),
    "restore_snapshot": lambda rl, batch: rl.training.restore_snapshot("a"),
    "drop_snapshot": lambda rl, batch: rl.training.drop_snapshot("a"),
    "set_reference": lambda rl, batch: rl.training.set_reference("base"),
    "save": lambda rl, batch: rl.training.save("a"),
    "load": lambda rl, batch: rl.training.load("a"),
    "export": lambda rl, batch: rl.training.export("a"),
    "sync": lambda rl, batch: rl.weights.sync(),
    "push_part": lambda rl, batch: rl.weights.push({"w": np.zeros(2)}, part_bytes=8),
    "push": lambda rl, batch: rl.weights.push({"w": np.zeros(1)}),
    "generate": lambda rl, batch: rl.sampling.generate([[1]], SamplingParams(max_tokens=1)),
    "finish_session": lambda rl, batch: rl.sampling.finish_session("s"),
    "pause": lambda rl, batch: rl.sampling.pause(),
    "resume": lambda rl, batch: rl.sampling.resume(),
    "reset_prefix_cache": lambda rl, batch: rl.sampling.reset_prefix_cache(),
    "reset": lambda rl, batch: rl.reset(),
    "sleep": lambda rl, batch: rl.sleep("training"),
    "wake": lambda rl, batch: rl.wake("sampling"),
    "tokenizer": lambda rl, batch: rl.tokenizer(),
}
OPTIONS: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 2,
    "min_p": 0.5,
    "min_tokens": 1,
    "stop": ("a",),
    "include_stop": True,
    "stop_token_ids": (3,),
    "seed": 1,
    "session_id": "s",
    "priority": 1,
    "cache_salt": "s",
}


def _cases() -> Iterator[tuple[str, str, Call]]:
    for name, call in OPERATION_CALLS.items():
        yield "operations", name, call
    for name in ("logprobs", "entropy"):
        yield "outputs", name, lambda rl, batch, name=name: rl.training.forward(batch, {name})
    yield (
        "outputs",
        "entropy",
        lambda rl, batch: rl.training.forward_backward(
            batch, losses.PPO(entropy=losses.Entropy(0.1))
        ),
    )
    yield (
        "outputs",
        "entropy",
        lambda rl, batch: rl.training.forward_backward(
            batch, losses.custom(print, {"entropy"}, framework=None)
        ),
    )
    for kind in LOSSES.values():
        yield (
            "losses",
            kind.__name__,
            lambda rl, batch, kind=kind: rl.training.forward_backward(batch, _loss(kind, batch)),
        )
    yield (
        "losses",
        "Cotangents",
        lambda rl, batch: rl.training.forward_backward(batch, losses.custom(print, framework=None)),
    )
    yield "optimizers", "AdamW", OPERATION_CALLS["optim_step"]
    for name, value in OPTIONS.items():
        params = SamplingParams(max_tokens=1, **{name: value})
        yield (
            "sampling_options",
            name,
            lambda rl, batch, params=params: rl.sampling.generate([[1]], params),
        )
    for name in ("logprobs", "drawn_logprobs"):
        params = SamplingParams(max_tokens=1, outputs={name})
        yield (
            "sampling_outputs",
            name,
            lambda rl, batch, params=params: rl.sampling.generate([[1]], params),
        )
    for name in ("keep", "wait", "abort"):
        yield "in_flight", name, lambda rl, batch, name=name: rl.weights.sync(name)
        yield (
            "in_flight",
            name,
            lambda rl, batch, name=name: rl.weights.push({"w": np.zeros(1)}, name),
        )
    for name, policy in (("reference", "reference"), ("snapshot", "a")):
        yield (
            "policies",
            name,
            lambda rl, batch, policy=policy: rl.training.forward(batch, policy=policy),
        )
    for name, source in (("reference", "base"), ("reference", "current"), ("snapshot", "a")):
        yield (
            "policies",
            name,
            lambda rl, batch, source=source: rl.training.set_reference(source),
        )
    for name, held in TENSOR_DTYPES.items():
        tensor = Tensor(data=np.zeros(1, held), dtype=name)
        yield (
            "push_dtypes",
            name,
            lambda rl, batch, tensor=tensor: rl.weights.push({"w": tensor}),
        )


CASES = list(_cases())
IDS = [f"{kind}-{name}" for kind, name, _ in CASES]


def test_every_capability_of_the_mock_has_a_case() -> None:
    declared = small_mock(vocab_size=259).capabilities
    for field in attrs.fields(Capabilities):
        covered = {name for kind, name, _ in CASES if kind == field.name}
        assert covered == set(getattr(declared, field.name)), field.name
    assert set(OPERATION_CALLS) == set(OPERATIONS) - ALWAYS_OFFERED


@pytest.mark.parametrize(("kind", "name", "call"), CASES, ids=IDS)
def test_what_is_not_declared_is_refused_before_anything_is_sent(
    kind: str,
    name: str,
    call: Call,
    session_factory: SessionFactory,
    batch: Batch,
    messages: list[Message],
) -> None:
    rl = session_factory(Lesser(kind, name))
    messages.clear()
    with pytest.raises(UnsupportedError) as caught:
        call(rl, batch)
    rl.info().result()
    sent = [message for message in messages if isinstance(message, Submit)]
    assert [message.operation for message in sent] == ["info"]  # nothing of the refused call
    assert repr(name) in str(caught.value)
    assert "backend 'mock' does not offer" in str(caught.value)
    assert caught.value.details.get("option", caught.value.details["operation"]) == name
    assert isinstance(caught.value, NotImplementedError)
    if kind != "operations":  # the same backend does what it does declare
        rl.training.zero_grad().result()
        assert rl._connection._numbers["training"] == 1  # the refused call took no number


@pytest.mark.parametrize(
    ("kind", "name"), [("losses", "PPO"), ("sampling_options", "top_p"), ("operations", "sync")]
)
def test_the_server_refuses_what_a_client_let_through(
    kind: str,
    name: str,
    session_factory: SessionFactory,
    batch: Batch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rl = session_factory(Lesser(kind, name))
    monkeypatch.setattr(Face, "_check", lambda *_: None)
    call = next(case for *which, case in CASES if which == [kind, name])
    with pytest.raises(UnsupportedError, match=f"does not offer.*{name!r}"):
        call(rl, batch).result()


def test_options_at_their_defaults_need_no_declaration(session_factory: SessionFactory) -> None:
    rl = session_factory(Lesser("sampling_options", "top_p"))
    params = SamplingParams(max_tokens=1, top_p=1.0)
    assert len(rl.sampling.generate([[1]], params).result()) == 1


def test_info_says_what_is_offered(session_factory: SessionFactory) -> None:
    rl = session_factory(Lesser("losses", "PPO"))
    offered = rl.info().result().capabilities
    assert "PPO" not in offered.losses
    assert "CrossEntropy" in offered.losses
    assert offered.operations == set(OPERATIONS)


# -- names that do not exist --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: SamplingParams(max_token=1), "did you mean 'max_tokens'?"),
        (lambda: AdamW(lr=0.1, weight_decai=0.1), "did you mean 'weight_decay'?"),
        (lambda: losses.PPO(clip_hi=0.1), "did you mean 'clip_high'?"),
        (lambda: losses.KL(0.1, estimater="k1"), "did you mean 'estimator'?"),
        (lambda: losses.KL(0.1, estimator="k33"), "did you mean 'k3'?"),
        (lambda: losses.PPO(aggregation="token_meen"), "did you mean 'token_mean'?"),
        (lambda: losses.PPO(ratio="sequences"), "did you mean 'sequence'?"),
        (lambda: SamplingParams(max_tokens=1, outputs={"logprob"}), "did you mean 'logprobs'?"),
        (lambda: Tensor(data=np.zeros(1), dtype="float46"), "did you mean 'float64'?"),
        (lambda: connect("mok"), "did you mean 'mock'?"),
        (lambda: connect("mock", vocab_sise=4), "did you mean 'vocab_size'?"),
    ],
)
def test_a_misspelt_name_gets_the_nearest(call: Callable[[], Any], hint: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        call()
    assert hint in str(caught.value)


def test_misspelt_values_of_calls_get_the_nearest(mocked: Session, batch: Batch) -> None:
    with pytest.raises(UnsupportedError, match=r"'logprob'.*it offers entropy, logprobs"):
        mocked.training.forward(batch, {"logprob"})
    with pytest.raises(InvalidRequestError, match="did you mean 'keep'"):
        mocked.weights.sync("kep")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="did you mean 'sampling'"):
        mocked.sleep("samplin")  # type: ignore[arg-type]
    mocked.training.snapshot("before").result()
    with pytest.raises(InvalidRequestError, match="did you mean 'before'"):
        mocked.training.restore_snapshot("befor").result()
    mocked.training.save("epoch-1").result()
    with pytest.raises(InvalidRequestError, match="did you mean 'epoch-1'"):
        mocked.training.load("epoch-2").result()
    outputs = mocked.training.forward(batch).result()
    with pytest.raises(UnknownNameError, match="no 'logprob'; did you mean 'logprobs'"):
        outputs.logprob


def _arguments(batch: Batch) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Face and arguments of every public operation that acts on a model."""
    named = ("snapshot", "restore_snapshot", "drop_snapshot", "save", "load", "delete", "export")
    return {
        **dict.fromkeys(named, ("training", ("a",))),
        "forward": ("training", (batch,)),
        "forward_backward": ("training", (batch, losses.CrossEntropy())),
        "optim_step": ("training", (AdamW(lr=0.1),)),
        "zero_grad": ("training", ()),
        "set_reference": ("training", ("base",)),
        "checkpoints": ("training", ()),
        "generate": ("sampling", ([[1]], SamplingParams(max_tokens=1))),
        "finish_session": ("sampling", ("s",)),
        "abort": ("sampling", ()),
        "pause": ("sampling", ()),
        "resume": ("sampling", ()),
        "reset_prefix_cache": ("sampling", ()),
        "sync": ("weights", ()),
        "push": ("weights", ({"w": np.zeros(1)},)),
        "version": ("weights", ()),
    }


def test_every_operation_on_a_model_takes_its_name_and_refuses_another(
    mocked: Session, batch: Batch, messages: list[Message]
) -> None:
    calls = _arguments(batch)
    with_model = {
        row.name for row in OPERATIONS.values() if "model" in attrs.fields_dict(row.request)
    }
    assert set(calls) == with_model - {"abandon", "push_part"}  # which no user submits
    for name, (face, arguments) in calls.items():
        method = getattr(getattr(mocked, face), name)
        with pytest.raises(InvalidRequestError, match="model='critic' is reserved: a run holds"):
            method(*arguments, model="critic")
    with pytest.raises(InvalidRequestError, match="model='critic' is reserved: a run holds"):
        mocked.training.forward_backward(
            batch, losses.custom(print, framework=None), model="critic"
        )
    assert messages == []
    mocked.training.forward(batch, model="policy").result()
