"""What users of other stacks reported, one test each (shared/facts/field.md names the issues)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_double import Double, Hold
from client_support import ServerFactory, SessionFactory, learn, logprobs, small_mock

from remote_rl import AdamW, Batch, Ragged, SamplingParams, Session, connect, losses
from remote_rl.errors import RunLostError, StalledError
from remote_rl.messages import ConnectionLost, Detach, Message, Submit, Wait
from remote_rl.transports.http import HttpTransport

LOSS = losses.CrossEntropy()


def every_token(temperature: float, vocabulary: int = 12) -> Batch:
    """One response for each token of the vocabulary, after one prompt."""
    return Batch(
        prompts=[[1, 2]],
        prompt_index=np.zeros(vocabulary, int),
        responses=[[token] for token in range(vocabulary)],
        temperature=temperature,
    )


# -- knobs that do nothing ------------------------------------------------------------------------


def test_weight_decay_is_accepted_and_ignored__skyrl_813(
    session_factory: SessionFactory, batch: Batch, tmp_path: Path
) -> None:
    """With a zero gradient, AdamW multiplies each weight by 1 - lr x weight_decay, exactly."""
    backend = small_mock()
    rl = session_factory(backend)
    before = dict(backend.training.policy.weights)
    nothing = batch.replace(mask=batch.mask.with_values(batch.mask.values * 0))
    rl.training.forward_backward(nothing, LOSS)
    rl.training.optim_step(AdamW(lr=0.1, weight_decay=0.5)).result()
    for name, weight in backend.training.policy.weights.items():
        np.testing.assert_array_equal(weight, before[name] * (1 - 0.1 * 0.5))


def test_a_weights_only_load_restores_the_optimizer__skyrl_1993(
    mocked: Session, batch: Batch
) -> None:
    """After it the first step is a fresh Adam's: of the size lr for every weight that has a
    gradient, which a warm one's is not."""
    learn(mocked, batch, steps=5, lr=0.5)
    mocked.training.save("warm").result()
    steps = []
    for optimizer in (True, False):
        mocked.training.load("warm", optimizer=optimizer).result()
        mocked.training.forward_backward(batch, LOSS)
        result = mocked.training.optim_step(AdamW(lr=0.5)).result()
        steps.append((result.metrics["optimizer_steps"], logprobs(mocked, batch)))
    assert [count for count, _ in steps] == [6, 1]
    assert steps[0][1] != steps[1][1]


def test_a_load_with_optimizer_restores_a_cold_adam__tinker_feedback_127(
    mocked: Session, batch: Batch
) -> None:
    """The next step must be the uninterrupted run's, not the weights-only load's."""
    learn(mocked, batch, steps=5, lr=0.5)
    mocked.training.save("warm").result()
    learn(mocked, batch)
    uninterrupted = logprobs(mocked, batch)
    continued = {}
    for optimizer in (True, False):
        mocked.training.load("warm", optimizer=optimizer).result()
        learn(mocked, batch)
        continued[optimizer] = logprobs(mocked, batch)
    assert continued[True] == uninterrupted
    assert continued[False] != uninterrupted


# -- logprobs -------------------------------------------------------------------------------------


def test_logprobs_are_wrong_at_temperature_other_than_1__trl_4159(mocked: Session) -> None:
    """p at temperature T is p(1) to the power 1/T, renormalised; of the trainer and the sampler."""
    at_one = np.array(logprobs(mocked, every_token(1.0)), np.float64)
    assert np.exp(at_one).sum() == pytest.approx(1, abs=1e-6)
    for temperature in (0.5, 2.0):
        expected = at_one / temperature
        expected -= np.log(np.exp(expected).sum())
        trained = logprobs(mocked, every_token(temperature))
        np.testing.assert_allclose(trained, expected, atol=1e-5)
        params = SamplingParams(n=8, max_tokens=1, temperature=temperature, seed=3)
        (group,) = mocked.sampling.generate([[1, 2]], params).result()
        for sample in group:
            assert sample.logprobs is not None
            assert sample.logprobs[0] == pytest.approx(expected[sample.tokens[0]], abs=1e-5)
        assert Batch.from_groups([group]).temperature.tolist() == [temperature] * 8


@pytest.mark.parametrize("cut", [{"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.3}])
def test_raw_against_processed_logprobs__verl_6240(cut: dict[str, Any], mocked: Session) -> None:
    """`logprobs` are the full vocabulary's; those of the truncated distribution have a name of
    their own, and differ by the log of the mass that survived."""
    table = np.array(logprobs(mocked, every_token(0.7)), np.float64)
    params = SamplingParams(
        n=40, max_tokens=1, temperature=0.7, outputs={"logprobs", "drawn_logprobs"}, seed=1, **cut
    )
    (group,) = mocked.sampling.generate([[1, 2]], params).result()
    order = np.argsort(-table)
    if "top_p" in cut:
        kept = order[: int((np.cumsum(np.exp(table[order])) < cut["top_p"]).sum()) + 1]
    elif "top_k" in cut:
        kept = order[: cut["top_k"]]
    else:
        kept = np.flatnonzero(np.exp(table) >= cut["min_p"] * np.exp(table.max()))
    assert 0 < len(kept) < len(table)
    mass = np.log(np.exp(table[kept]).sum())
    assert {int(sample.tokens[0]) for sample in group} <= set(kept.tolist())
    for sample in group:
        assert sample.logprobs is not None
        assert sample.drawn_logprobs is not None
        assert sample.logprobs[0] == pytest.approx(table[sample.tokens[0]], abs=1e-5)
        assert sample.drawn_logprobs[0] == pytest.approx(table[sample.tokens[0]] - mass, abs=1e-5)


def test_processed_logprobs_leak_into_every_importance_ratio__trl_6789(mocked: Session) -> None:
    """On policy, the ratio of a batch from truncated samples is 1 at every token."""
    params = SamplingParams(n=6, max_tokens=5, top_p=0.6, temperature=0.8, seed=2)
    groups = mocked.sampling.generate([[1, 2], [3]], params).result()
    batch = Batch.from_groups(groups, advantages=[1.0] * 12)
    current = mocked.training.forward(batch).result().logprobs
    assert current == batch.old_logprobs
    loss = losses.ImportanceSampling(aggregation="sum")
    value = mocked.training.forward_backward(batch, loss).result().value
    assert value == pytest.approx(-len(batch.responses.values), rel=1e-6)


@pytest.mark.parametrize("token", range(4))
def test_off_by_one_the_last_token_is_never_trained__tinker_cloud_6(
    token: int, session_factory: SessionFactory
) -> None:
    """An advantage at token t alone raises the logprob of token t, for the first and the last one
    too, and the gradient of the others' logprobs is not what moved it."""
    batch = Batch(prompts=[[1, 2]], prompt_index=[0], responses=[[3, 4, 5, 6]], temperature=1.0)
    advantages = [[float(place == token) for place in range(4)]]
    rl = session_factory(small_mock())
    before = np.array(logprobs(rl, batch))
    rl.training.forward_backward(
        batch.replace(advantages=advantages), losses.Reinforce(aggregation="sum")
    )
    rl.training.optim_step(AdamW(lr=1e-3, weight_decay=0.0, eps=1.0)).result()
    change = np.array(logprobs(rl, batch)) - before
    assert change[token] > 0
    assert int(change.argmax()) == token


def test_an_abort_is_reported_as_length__skyrl_1669(mocked: Session) -> None:
    def reasons(operation: Any) -> set[str]:
        return {sample.finish_reason for group in operation.result(60) for sample in group}

    assert reasons(mocked.sampling.generate([[1]], SamplingParams(max_tokens=3))) == {"length"}
    every = tuple(range(12))
    stopped = SamplingParams(max_tokens=3, stop_token_ids=every)
    assert reasons(mocked.sampling.generate([[1]], stopped)) == {"stop"}
    mocked.sampling.pause().result()
    operation = mocked.sampling.generate([[1]], SamplingParams(max_tokens=3))
    mocked.sampling.abort([operation]).result(60)
    assert reasons(operation) == {"abort"}


def test_parse_and_render_do_not_round_trip__tinker_cookbook_938(
    session_factory: SessionFactory,
) -> None:
    """Ids go in and come out, also where they are no text: what is trained is what was drawn."""
    rl = session_factory(small_mock(vocab_size=259))
    prompts = [[195, 40], [255, 254, 0]]  # no UTF-8
    params = SamplingParams(n=2, max_tokens=20, seed=4)
    groups = rl.sampling.generate(prompts, params).result()
    batch = Batch.from_groups(groups, advantages=[1.0] * 4)
    assert batch.prompts == Ragged.from_rows(prompts, np.int32)
    drawn = [sample.tokens.tolist() for group in groups for sample in group]
    assert batch.responses.to_rows() == drawn
    tokenizer = rl.tokenizer().result()
    texts = [tokenizer.decode(tokens) for tokens in drawn]
    assert [tokenizer.encode(text) for text in texts] != drawn  # text would have lost it


# -- retries, time --------------------------------------------------------------------------------


@pytest.fixture
def lossy(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Over HTTP, the first answer to each message is lost after the server has acted on it; gives
    how often each training number was sent."""
    sent: dict[int, int] = {}
    seen: set[str] = set()
    original = HttpTransport.call

    async def call(self: Any, message: Message, timeout: float) -> Any:
        answer = await original(self, message, timeout)
        if isinstance(message, Submit):
            sent[message.number] = sent.get(message.number, 0) + 1
            key = f"{message.client_id}:{message.operation}:{message.number}"
            if key not in seen:
                seen.add(key)
                raise ConnectionLost("the answer was lost")
        return answer

    monkeypatch.setattr(HttpTransport, "call", call)
    return sent


def test_a_resent_step_is_taken_twice__skyrl_2035(
    servers: ServerFactory, batch: Batch, lossy: dict[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """Each forward_backward and optim_step is sent twice and counts once."""
    results = []
    for target in (servers(small_mock()).url, small_mock()):
        with connect(target) as rl:
            for _ in range(2):
                rl.training.forward_backward(batch, LOSS)
                rl.training.forward_backward(batch, LOSS)
                step = rl.training.optim_step(AdamW(lr=0.1)).result()
            results.append((step.grad_norm, step.version, logprobs(rl, batch)))
    assert results[0] == results[1]
    assert results[0][1] == 2
    assert set(lossy.values()) == {2}


def test_a_read_timeout_kills_long_healthy_generations__labs_molt_42(
    rl: Session, double: Double, messages: list[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many waits pass without news, the generation goes on and its result arrives."""
    monkeypatch.setattr("remote_rl.client.waiting._WAIT", 0.02)
    double.sample_holds = {0: Hold()}
    operation = rl.sampling.generate([[1]], SamplingParams(max_tokens=2))
    while sum(isinstance(message, Wait) for message in messages) < 10:
        with pytest.raises(TimeoutError):
            operation.result(0.02)
    double.sample_holds[0].open()
    assert operation.result(60)[0][0].finish_reason == "stop"
    assert double.names() == ["generate"]


def test_a_weight_sync_hangs_for_ever__trl_6797(batch: Batch, tmp_path: Path) -> None:
    """Silence of `stall_timeout` ends the run with what it was doing and where to go on."""
    backend = small_mock(faults={"operation": "sync", "error": "hang"})
    rl = connect(backend, stall_timeout=0.3, checkpoint_dir=tmp_path)
    rl.training.save("safe").result()
    with pytest.raises(RunLostError, match=r"sync reported nothing for 0\.3 s") as caught:
        rl.weights.sync().result(60)
    assert caught.value.details["last_checkpoint"] == "safe"
    assert isinstance(caught.value.__cause__, StalledError)
    rl.detach()


def test_a_closing_driver_leaves_its_lease__nobody_waits_60_s(
    servers: ServerFactory, messages: list[Message]
) -> None:
    server = servers(small_mock())
    connect(server.url).close()
    assert isinstance(messages[-1], Detach)
    connect(server.url).close()  # at once, with a lease of a minute
