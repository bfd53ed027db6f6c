"""The mock as a backend: options, capabilities, call log, latency, faults, tokenizer, and a whole
loop through a session."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from mock_workload import SMALL, FakeContext, Run, example_batch, running, until

from backends.mock import create
from remote_rl import AdamW, Batch, SamplingParams, connect, losses, requests
from remote_rl.byte_tokenizer import ByteTokenizer
from remote_rl.errors import (
    BackendError,
    ConflictError,
    InvalidRequestError,
    RunLostError,
    UnknownNameError,
    UnsupportedError,
)
from remote_rl.ops import OPERATIONS
from remote_rl.types.fields import KIND, SCHEDULING


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabsize": 3}, "no field 'vocabsize'; did you mean 'vocab_size'"),
        ({"vocab_size": 0}, "vocab_size must be a whole number >= 1"),
        ({"window": 2.5}, "window must be a whole number"),
        ({"latency": {"forwad": 1}}, "no key 'forwad'; did you mean 'forward'"),
        ({"latency": -1}, "latency must be a finite number >= 0"),
        ({"eos_token_ids": (300,)}, "eos_token_ids holds 300"),
        ({"faults": [{"operation": "forwad"}]}, "did you mean 'forward'"),
        ({"faults": [{"operation": "forward", "error": "BackendEror"}]}, "mean 'BackendError'"),
        ({"faults": [{"operation": "forward", "nth": 1}]}, "no field 'nth'"),
        ({"faults": ["forward"]}, "faults must be Fault objects"),
    ],
)
def test_options_are_checked_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        create(**options)


def test_an_unknown_option_has_its_own_class() -> None:
    with pytest.raises(UnknownNameError):
        create(sead=1)


def test_every_declared_operation_is_a_method_and_everything_is_declared() -> None:
    backend = create()
    declared = backend.capabilities.operations
    assert declared == {row.name for row in OPERATIONS.values() if row.face != "dispatcher"}
    for name in declared:
        face = OPERATIONS[name].face
        owner = backend if face == "backend" else getattr(backend, face)
        assert asyncio.iscoroutinefunction(getattr(owner, name)), name
    options = {field.name for field in attrs.fields(SamplingParams)}
    assert backend.capabilities.sampling_options == options - {"n", "max_tokens", "outputs"}
    assert backend.capabilities.losses == {each.__name__ for each in losses.LOSSES.values()}


def test_a_vocabulary_without_bytes_has_neither_text_nor_stop_strings() -> None:
    capabilities = create(**SMALL).capabilities
    assert "tokenizer" not in capabilities.operations
    request = requests.Generate(prompts=[[1]], params=SamplingParams(max_tokens=1, stop="a"))
    with pytest.raises(UnsupportedError, match="'stop'"):
        capabilities.check("generate", request, "mock")
    with pytest.raises(UnsupportedError, match="vocabulary of 13 ids"):
        asyncio.run(create(**SMALL).tokenizer(requests.Tokenizer(), FakeContext()))


@running
async def test_the_parameter_count_is_that_of_the_weights() -> None:
    run = await Run().start()
    weights = run.backend.training.policy.weights
    assert run.backend.model.parameters == sum(array.size for array in weights.values())


@running
async def test_seeds_give_base_weights() -> None:
    batch = example_batch()
    outputs = [
        (await (await Run(seed=seed).start()).do("forward", batch=batch)).logprobs
        for seed in (1, 1, 2)
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0] != outputs[2]


@running
async def test_the_default_base_is_near_uniform() -> None:
    run = await Run(
        **dict.fromkeys((), attrs.NOTHING), vocab_size=259, initial_scale=0.1, eos_token_ids=None
    ).start()
    outputs = await run.do(
        "forward", batch=example_batch(vocab_size=259, temperature=1.0), outputs={"entropy"}
    )
    assert outputs.entropy.values.min() > np.log(259) - 0.05


# -- the call log ---------------------------------------------------------------------------------


@running
async def test_the_log_tells_order_ends_and_every_scheduling_field() -> None:
    run = await Run(faults=[{"operation": "sync"}]).start()
    await run.generate([[1]], max_tokens=1, session_id="s", priority=4, cache_salt="c")
    await run.do("finish_session", session_id="s")
    await run.do("sleep", half="sampling")
    await run.do("wake", half="training")
    with pytest.raises(BackendError):
        await run.do("sync")
    calls = run.backend.calls
    assert [(call.operation, call.event) for call in calls[2:]] == [
        ("generate", "started"),
        ("generate", "ended"),
        ("finish_session", "started"),
        ("finish_session", "ended"),
        ("sleep", "started"),
        ("sleep", "ended"),
        ("wake", "started"),
        ("wake", "ended"),
        ("sync", "started"),
        ("sync", "failed"),
    ]
    assert calls[2].request_id == "client:any:1"
    assert calls[2].scheduling == {"session_id": "s", "priority": 4, "cache_salt": "c"}
    assert calls[4].scheduling == {"session_id": "s"}
    assert [call.scheduling["half"] for call in calls[6:10]] == ["sampling"] * 2 + ["training"] * 2
    seen = {name for call in calls for name in call.scheduling}
    declared = {
        field.name
        for each in (SamplingParams, *(row.request for row in OPERATIONS.values()))
        for field in attrs.fields(each)
        if field.metadata.get(KIND) == SCHEDULING[KIND]
    }
    assert seen == declared


@running
async def test_flights_overlap_in_the_log() -> None:
    run = await Run(latency={"token": 0.002}).start()
    tasks = [run.begin([[1]], max_tokens=5)[0] for _ in range(2)]
    await asyncio.gather(*tasks)
    assert [call.event for call in run.backend.calls[2:]] == ["started"] * 2 + ["ended"] * 2


# -- latency and faults ---------------------------------------------------------------------------


@running
async def test_latency_is_spent_on_the_dispatchers_clock() -> None:
    run = await Run(latency=0.001).start()
    context = run.context()
    await run.do("forward", context=context, batch=example_batch())
    assert context.slept == [0.001]
    run = await Run(latency={"sync": 0.002, "token": 0.003}, eos_token_ids=()).start()
    context = run.context()
    await run.do("sync", context=context)
    assert context.slept == [0.002]
    context = run.context()
    await run.generate([[1]], context, max_tokens=4)
    assert context.slept == [0.003] * 4


@running
async def test_faults_hit_the_call_they_name_before_or_after_its_work() -> None:
    class Own(RuntimeError):
        pass

    run = await Run(
        faults=[
            {"operation": "forward", "call": 2, "error": "ConflictError"},
            {"operation": "optim_step", "error": Own("mine"), "when": "after"},
            {"operation": "forward_backward", "call": 2, "error": Own},
        ]
    ).start()
    batch, loss = example_batch(), losses.CrossEntropy()
    await run.do("forward", batch=batch)
    with pytest.raises(ConflictError, match="a fault that the options"):
        await run.do("forward", batch=batch)
    first = await run.do("forward", batch=batch)
    await run.do("forward_backward", batch=batch, loss=loss)
    with pytest.raises(Own):
        await run.do("forward_backward", batch=batch, loss=loss)
    with pytest.raises(Own, match="mine"):
        await run.do("optim_step", optimizer=AdamW(lr=0.1))
    assert (await run.do("forward", batch=batch)).logprobs != first.logprobs


@running
async def test_what_hangs_says_nothing_until_it_is_killed() -> None:
    run = await Run(faults=[{"operation": "sync", "error": "hang"}]).start()
    context = run.context()
    task = asyncio.create_task(run.do("sync", context=context))
    await asyncio.sleep(0.02)
    assert not task.done()
    assert not context.signs
    run.backend.kill()
    with pytest.raises(RunLostError, match="killed while its sync hung"):
        await task


@running
async def test_a_start_can_fail_and_closing_is_harmless() -> None:
    backend = create(faults=[{"operation": "start"}])
    with pytest.raises(BackendError):
        await backend.start(FakeContext())
    await backend.close()
    assert backend.sampler_version() == (None, None)
    with pytest.raises(BackendError, match="not started"):
        await backend.training.forward(requests.Forward(batch=example_batch()), FakeContext())


# -- the tokenizer --------------------------------------------------------------------------------


def test_the_byte_tokenizer() -> None:
    files = asyncio.run(create(vocab_size=400).tokenizer(requests.Tokenizer(), FakeContext()))
    assert files.kind == "bytes"
    tokenizer = ByteTokenizer(**files.options)
    assert len(tokenizer) == tokenizer.vocab_size == 400
    for text in ("", "3+4=7", "naïve 火 🙂\x00"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        with_start = tokenizer.encode(text, add_special_tokens=True)
        assert with_start[0] == tokenizer.bos_token_id
        assert tokenizer.decode(with_start, skip_special_tokens=True) == text
        assert tokenizer.decode(with_start) == "<bos>" + text
    cut = tokenizer.encode("火")[:2]
    assert tokenizer.decode(cut) == "\ufffd"
    assert tokenizer.decode(np.array([104, 105, 399], np.int32)) == "hi"
    with pytest.raises(InvalidRequestError, match="token id 400 lies outside"):
        tokenizer.decode([400])
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        tokenizer.encode("a\ud800")
    with pytest.raises(InvalidRequestError, match="vocab_size must be a whole number >= 259"):
        ByteTokenizer(vocab_size=100)


# -- through a session ----------------------------------------------------------------------------


def test_a_session_runs_the_loop_of_the_design(tmp_path: Path) -> None:
    backend = create(**SMALL)
    with connect(backend, checkpoint_dir=tmp_path) as rl:
        for _ in range(3):
            params = SamplingParams(n=4, max_tokens=5)
            groups = rl.sampling.generate([[1, 2], [3]], params).result()
            advantages = np.linspace(-1, 1, 8).astype(np.float32)
            batch = Batch.from_groups(groups, advantages=advantages)
            value = rl.training.forward_backward(batch, losses.PPO())
            step = rl.training.optim_step(AdamW(lr=0.01)).result()
            assert value.result().metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
            assert rl.weights.sync().result().version == step.version
        rl.training.save("last").result()
        rl.training.load("last").result()
        assert rl.training.export("final").result().files
        rl.reset().result()
    started = [call.operation for call in backend.calls if call.event == "started"]
    assert started[:5] == ["start", "generate", "forward_backward", "optim_step", "sync"]


def test_an_aborted_session_generate_returns_what_it_has() -> None:
    backend = create(**SMALL | {"eos_token_ids": (), "latency": {"token": 0.002}})
    with connect(backend) as rl:
        operation = rl.sampling.generate([[1]], SamplingParams(max_tokens=100_000))
        asyncio.run(until(lambda: len(backend.calls) >= 3))
        rl.sampling.abort().result()
        ((sample,),) = operation.result()
    assert sample.finish_reason == "abort"


def test_a_call_log_may_be_given() -> None:
    log: list[Any] = []
    with connect("mock", call_log=log) as rl:
        rl.sampling.generate([[1]], SamplingParams(max_tokens=1, priority=5)).result()
    generates = [call for call in log if call.operation == "generate"]
    assert [call.event for call in generates] == ["started", "ended"]
    assert generates[0].scheduling["priority"] == 5
    with pytest.raises(InvalidRequestError, match="call_log"):
        create(call_log="log")
