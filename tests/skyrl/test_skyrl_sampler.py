"""RemoteSampler over the mock: what generators draw, around a sync, and what a failure becomes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import attrs
import numpy as np
import pytest

from remote_rl import AdamW, Batch, Ragged, SamplingParams, Session, errors, losses
from remote_rl.byte_tokenizer import ByteTokenizer
from remote_rl.testing import fault
from shims.skyrl.sampler import RemoteSampler

T = TypeVar("T")

TOKENIZER = ByteTokenizer()
MODEL = "the-policy"
PROMPTS = [[1, 2], [3], [1, 2]]
#: as SkyRL asks, but no id ends a response
GIVEN = {
    "max_tokens": 5,
    "min_tokens": 1,
    "temperature": 0.7,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 1,
    "stop": None,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
}
#: no generate of it ends by itself
SLOW = {"latency": {"token": 3600.0}}

Make = Callable[..., RemoteSampler]


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """In a loop of its own, which nothing may outlive."""

    async def alone() -> T:
        result = await asyncio.wait_for(coroutine, 60)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    return asyncio.run(alone())


def batch(prompts: list[list[int]] = PROMPTS, **fields: Any) -> dict[str, Any]:
    return {"prompt_token_ids": prompts, "sampling_params": dict(GIVEN), **fields}


def sampler(session: Session, **options: Any) -> RemoteSampler:
    info = options.pop("info", None) or session.info().result()
    return RemoteSampler(session, TOKENIZER, model_name=MODEL, info=info, **options)


@pytest.fixture(params=["inprocess", "http"])
def connected(request: pytest.FixtureRequest, remote_rl_connect: Any) -> Callable[..., Session]:
    """A session on a mock of 16 ids, over each transport."""

    def connect(**options: Any) -> Session:
        session: Session = remote_rl_connect(
            over=request.param, **{"vocab_size": 16, "eos_token_ids": (), **options}
        )
        return session

    return connect


async def started(session: Session, calls: Any, generates: int) -> None:
    """Returns when the engine has begun so many generates."""
    while calls.count("generate", event="started") < generates:
        await session.info()


def train(session: Session) -> None:
    """One optimizer step, not yet synced."""
    rows = Batch(prompts=[[1]], prompt_index=[0], responses=[[2, 3]], temperature=1.0)
    session.training.forward_backward(rows, losses.CrossEntropy()).result()
    session.training.optim_step(AdamW(lr=0.5)).result()


# -- what is drawn --------------------------------------------------------------------------------


def test_a_response_a_prompt_each_a_request_of_its_own(
    connected: Callable[..., Session], remote_rl_calls: Any
) -> None:
    output = run(sampler(connected()).generate(batch(), model=MODEL))
    assert [len(ids) for ids in output["response_ids"]] == [5, 5, 5]
    assert output["responses"] == [TOKENIZER.decode(ids) for ids in output["response_ids"]]
    assert output["stop_reasons"] == ["length"] * 3
    asked = remote_rl_calls.requests("generate")
    assert sorted(tuple(each.prompts[0].tolist()) for each in asked) == [(1, 2), (1, 2), (3,)]
    assert {(each.params.n, each.params.temperature) for each in asked} == {(1, 0.7)}


def test_logprobs_are_those_of_the_distribution_drawn_from(
    connected: Callable[..., Session],
) -> None:
    """At the sampling temperature; the first token is drawn without the ids that end a response
    (SkyRL's min_tokens=1), and so are its logprobs."""
    session = connected(eos_token_ids=(0, 1, 2))
    output = run(sampler(session).generate(batch()))
    rows = Batch(
        prompts=PROMPTS,
        prompt_index=[0, 1, 2],
        responses=output["response_ids"],
        temperature=0.7,
    )
    whole = session.training.forward(rows).result()["logprobs"]
    ends = Batch(
        prompts=PROMPTS,
        prompt_index=np.repeat([0, 1, 2], 3),
        responses=[[0], [1], [2]] * 3,
        temperature=0.7,
    )
    ending = Ragged.of(session.training.forward(ends).result()["logprobs"]).values.reshape(3, 3)
    for row, drawn in enumerate(output["response_logprobs"]):
        expected = np.array(whole[row], np.float64)
        expected[0] -= np.log1p(-np.exp(ending[row].astype(np.float64)).sum())
        np.testing.assert_allclose(drawn, expected, rtol=1e-4, atol=1e-5)


def test_stop_ids_of_skyrls_tokenizer_end_a_response(connected: Callable[..., Session]) -> None:
    ends = tuple(range(0, 16, 2))
    given = {**GIVEN, "max_tokens": 200}
    output = run(sampler(connected(), end_token_ids=ends).generate(batch(sampling_params=given)))
    assert output["stop_reasons"] == ["stop"] * 3
    for ids in output["response_ids"]:
        assert len(ids) > 1
        assert [token in ends for token in ids] == [False] * (len(ids) - 1) + [True]


def test_no_prompts_no_responses(connected: Callable[..., Session]) -> None:
    output = run(sampler(connected()).generate(batch([])))
    assert (output["responses"], output["response_logprobs"]) == ([], [])


def test_session_ids_and_cache_salt_are_hints(
    connected: Callable[..., Session], remote_rl_calls: Any
) -> None:
    session = connected()
    info = session.info().result()
    deaf = attrs.evolve(
        info,
        capabilities=attrs.evolve(
            info.capabilities,
            sampling_options=info.capabilities.sampling_options - {"session_id", "cache_salt"},
            operations=info.capabilities.operations - {"finish_session"},
        ),
    )
    hinted = batch([[1], [2]], session_ids=["one", 2], cache_salt="7")

    async def both() -> None:
        for each in (sampler(session), sampler(session, info=deaf)):
            await each.generate(hinted)
            await each.finish_session("one")

    run(both())
    asked = [each.params for each in remote_rl_calls.requests("generate")]
    assert {each.session_id for each in asked[:2]} == {"one", "2"}
    assert {each.cache_salt for each in asked[:2]} == {"7"}
    assert {(each.session_id, each.cache_salt) for each in asked[2:]} == {(None, None)}
    assert [each.session_id for each in remote_rl_calls.requests("finish_session")] == ["one"]


@pytest.mark.parametrize(
    ("fields", "model", "error", "told"),
    [
        ({}, "an-adapter", errors.UnsupportedError, "'an-adapter'"),
        ({"prompt_token_ids": None, "prompts": ["Hi"]}, None, ValueError, "prompt_token_ids"),
        ({"mm_features": [{}]}, None, errors.UnsupportedError, "mm_features"),
        ({"return_sample_support": True}, None, errors.UnsupportedError, "return_sample_support"),
        ({"session_ids": ["one"]}, None, errors.InvalidRequestError, "1 session_ids for 3"),
        ({"sampling_params": None}, None, errors.InvalidRequestError, "max_generate_length"),
    ],
)
def test_what_a_run_cannot_carry_is_refused_before_any_work(
    remote_rl_mock: Session,
    remote_rl_calls: Any,
    fields: dict[str, Any],
    model: str | None,
    error: type[Exception],
    told: str,
) -> None:
    with pytest.raises(error, match=told):
        run(sampler(remote_rl_mock).generate({**batch(), **fields}, model=model))
    assert remote_rl_calls.count("generate", event="started") == 0


# -- failures -------------------------------------------------------------------------------------


def test_an_engines_failure_is_drawn_again(
    connected: Callable[..., Session], remote_rl_calls: Any
) -> None:
    session = connected(faults=[fault("generate", call=1), fault("generate", call=3)])
    output = run(sampler(session, attempts=3).generate(batch()))
    assert [len(ids) for ids in output["response_ids"]] == [5, 5, 5]
    assert remote_rl_calls.failed == ["generate"] * 2
    assert remote_rl_calls.count("generate") == 3


def test_a_failure_that_stays_is_raised(
    connected: Callable[..., Session], remote_rl_calls: Any
) -> None:
    session = connected(faults=[fault("generate", call=each) for each in (1, 2)])
    with pytest.raises(errors.BackendError) as raised:
        run(sampler(session, attempts=2).generate(batch([[1]])))
    assert raised.value.__notes__[-1] == "after 2 attempts"
    assert remote_rl_calls.count("generate", event="started") == 2


def test_a_failure_ends_the_other_requests(
    connected: Callable[..., Session], remote_rl_calls: Any
) -> None:
    session = connected(**SLOW, faults=[fault("generate", call=3)])

    async def fails() -> None:
        with pytest.raises(errors.BackendError):
            await sampler(session, attempts=1).generate(batch())
        while remote_rl_calls.count("generate") < 2:  # else they would go on for hours
            await session.info()

    run(fails())


def test_a_cancelled_caller_ends_its_requests(
    connected: Callable[..., Session], remote_rl_calls: Any
) -> None:
    session = connected(**SLOW)

    async def cancels() -> None:
        task = asyncio.create_task(sampler(session).generate(batch()))
        await started(session, remote_rl_calls, 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while remote_rl_calls.count("generate") < 3:
            await session.info()

    run(cancels())


def test_a_session_that_cannot_be_ended_is_logged(
    connected: Callable[..., Session], caplog: pytest.LogCaptureFixture
) -> None:
    session = connected(faults=[fault("finish_session")])
    with caplog.at_level(logging.WARNING, "remote_rl.shims.skyrl"):
        run(sampler(session).finish_session("one"))
    assert "session one" in caplog.text


# -- around a sync --------------------------------------------------------------------------------


def test_paused_responses_are_frozen_and_go_on_with_the_new_weights(
    connected: Callable[..., Session], remote_rl_calls: Any
) -> None:
    session = connected()
    engine = sampler(session)

    async def sync() -> Any:
        await engine.pause_generation()
        task = asyncio.create_task(engine.generate(batch()))
        await started(session, remote_rl_calls, 3)
        await session.weights.sync(in_flight="keep")
        for _ in range(20):  # time enough for five tokens
            await session.info()
        assert not task.done()
        await engine.resume_generation()
        return await task

    train(session)
    output = run(sync())
    assert output["stop_reasons"] == ["length"] * 3
    assert output["policy_versions"] == [(1, 1)] * 3


def test_a_response_that_a_sync_ends_is_continued(
    connected: Callable[..., Session], remote_rl_calls: Any
) -> None:
    session = connected()
    engine = sampler(session, resumes=True)

    async def sync() -> Any:
        await engine.pause_generation()
        task = asyncio.create_task(engine.generate(batch()))
        await started(session, remote_rl_calls, 3)
        await session.weights.sync(in_flight="abort")
        await engine.resume_generation()
        return await task

    train(session)
    output = run(sync())
    assert output["stop_reasons"] == ["length"] * 3
    assert [len(logprobs) for logprobs in output["response_logprobs"]] == [5, 5, 5]
    assert output["policy_versions"] == [(1, 1)] * 3
    assert remote_rl_calls.count("generate") == 6


def test_one_that_is_not_continued_says_so(
    connected: Callable[..., Session], remote_rl_calls: Any
) -> None:
    session = connected(**SLOW)

    async def abort() -> Any:
        task = asyncio.create_task(sampler(session).generate(batch()))
        await started(session, remote_rl_calls, 3)
        await session.sampling.abort()
        return await task

    output = run(abort())
    assert output["stop_reasons"] == ["abort"] * 3
    assert output["response_ids"] == [[], [], []]
    assert output["response_logprobs"] == [[], [], []]


def test_the_versions_that_drew_the_responses(connected: Callable[..., Session]) -> None:
    session = connected()
    engine = sampler(session)
    assert engine.rollout_metrics() == {}
    run(engine.generate(batch()))
    train(session)
    session.weights.sync().result()
    run(engine.generate(batch()))
    assert engine.rollout_metrics() == {
        "generate/policy_version_min": 0.0,
        "generate/policy_version_max": 1.0,
        "generate/policy_versions_mixed": 0.0,
    }
    assert engine.rollout_metrics() == {}


def test_the_weight_version_begins_at_the_samplers_and_rises_with_each_sync(
    remote_rl_mock: Session,
) -> None:
    for _ in range(3):
        train(remote_rl_mock)
    remote_rl_mock.weights.sync().result()
    engine = sampler(remote_rl_mock)
    assert engine.weight_version == 3
    engine.increment_weight_version()
    assert engine.weight_version == 4


# -- life cycle -----------------------------------------------------------------------------------


def test_sleep_wake_and_what_else_wakes(connected: Callable[..., Session]) -> None:
    engine = sampler(connected())

    async def nap() -> list[bool]:
        seen = [await engine.is_sleeping()]
        for wake in (
            lambda: engine.wake_up(tags=["weights"]),
            lambda: engine.generate(batch()),
        ):
            await engine.sleep(level=1)
            seen.append(await engine.is_sleeping())
            await wake()
            seen.append(await engine.is_sleeping())
        await engine.sleep()
        engine.increment_weight_version()
        return [*seen, await engine.is_sleeping()]

    assert run(nap()) == [False, True, False, True, False, False]


def test_a_server_that_does_not_sleep_stays_awake(
    remote_rl_mock: Session, remote_rl_calls: Any
) -> None:
    info = remote_rl_mock.info().result()
    operations = info.capabilities.operations - {"sleep", "wake"}
    info = attrs.evolve(info, capabilities=attrs.evolve(info.capabilities, operations=operations))
    engine = sampler(remote_rl_mock, info=info)

    async def nap() -> bool:
        await engine.sleep()
        slept = await engine.is_sleeping()
        await engine.wake_up()
        return slept

    assert run(nap()) is False
    assert remote_rl_calls.names("sleep", "wake") == []


def test_reset_prefix_cache(remote_rl_mock: Session, remote_rl_calls: Any) -> None:
    engine = sampler(remote_rl_mock)
    run(engine.reset_prefix_cache())
    assert remote_rl_calls.count("reset_prefix_cache") == 1
    with pytest.raises(errors.UnsupportedError, match=r"trainer\.remote\.in_flight"):
        run(engine.reset_prefix_cache(reset_running_requests=True))


def test_it_stands_for_one_server_and_leaves_the_session_open(remote_rl_mock: Session) -> None:
    engine = sampler(remote_rl_mock)
    assert engine.model_name == MODEL
    assert run(engine.get_world_size()) == (1, 1)
    run(engine.teardown())
    params = SamplingParams(max_tokens=1)
    assert len(remote_rl_mock.sampling.generate([[1]], params).result()) == 1


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("chat_completion", ({},)),
        ("completion", ({},)),
        ("render_chat_completion", ({},)),
        ("get_endpoint_url", ()),
        ("load_lora_adapter", ("adapter", "path")),
        ("update_named_weights", ({},)),
    ],
)
def test_what_a_run_has_no_counterpart_for_is_refused_by_name(
    remote_rl_mock: Session, method: str, arguments: tuple[Any, ...]
) -> None:
    engine = sampler(remote_rl_mock)

    async def call() -> None:
        answer = getattr(engine, method)(*arguments)
        if asyncio.iscoroutine(answer):
            await answer

    with pytest.raises(errors.UnsupportedError, match=f"^{method} is not supported"):
        run(call())
