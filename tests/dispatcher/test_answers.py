"""An answer that is not the one that was asked for is the backend's fault, and says how."""

import attrs
import numpy as np
import pytest
from dispatcher_fakes import BATCH, FORWARD_BACKWARD, OPTIM_STEP, generate, in_loop, running
from hypothesis import given
from hypothesis import strategies as st

from remote_rl.dispatcher.answers import answer_problem
from remote_rl.errors import BackendError, ConflictError
from remote_rl.ops import ALWAYS_OFFERED, OPERATIONS
from remote_rl.requests import Forward, Generate, Sync
from remote_rl.types import (
    Batch,
    Done,
    ForwardBackwardResult,
    Generation,
    Outputs,
    Ragged,
    Sample,
    SamplingParams,
    SyncReceipt,
    TensorForm,
)


def sample(prompt, index, **changes):
    return Sample(
        **{
            "tokens": [1, 2],
            "logprobs": [-1.0, -1.0],
            "finish_reason": "stop",
            "first_version": 0,
            "last_version": 0,
            "prompt_index": prompt,
            "index": index,
            **changes,
        }
    )


def asked(prompts=2, n=2, **params):
    return Generate(
        prompts=[[1, 2]] * prompts, params=SamplingParams(**{"max_tokens": 3, "n": n, **params})
    )


def problem(places, request, **changes):
    samples = [sample(prompt, index, **changes) for prompt, index in places]
    return answer_problem(request, Generation.from_samples(samples))


PRODUCT = [(0, 0), (0, 1), (1, 0), (1, 1)]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=6))
def test_only_the_cross_product_is_the_answer_to_a_generate(places):
    assert (problem(places, asked()) is None) == (places == PRODUCT)


@given(st.integers(1, 4), st.integers(1, 4))
def test_any_cross_product_is(prompts, n):
    places = [(prompt, index) for prompt in range(prompts) for index in range(n)]
    assert problem(places, asked(prompts, n)) is None


@pytest.mark.parametrize(
    ("places", "words"),
    [
        (PRODUCT[:3], "3 samples instead of 4"),
        ([*PRODUCT, (2, 0)], "5 samples instead of 4"),
        ([(0, 0), (0, 1), (0, 2), (0, 3)], "sample 2 of prompt 0 in place 2, where sample 0 of"),
        ([(0, 0), (0, 0), (1, 0), (1, 1)], "sample 0 of prompt 0 in place 1, where sample 1 of"),
        ([(0, 0), (1, 0), (0, 1), (1, 1)], "sample 0 of prompt 1 in place 1, where sample 1 of"),
        ([(0, 0), (0, 1), (1, 0), (9, 1)], "sample 1 of prompt 9 in place 3"),
    ],
)
def test_the_refusal_names_the_first_wrong_sample(places, words):
    assert words in problem(places, asked())


def test_samples_bring_what_was_asked_for_and_no_more_than_max_tokens():
    assert "without the logprobs" in problem(PRODUCT, asked(), logprobs=None)
    assert problem(PRODUCT, asked(outputs=()), logprobs=None) is None
    both = asked(outputs={"logprobs", "drawn_logprobs"})
    assert "without the drawn_logprobs" in problem(PRODUCT, both)
    assert "2 tokens in sample 0, more than max_tokens=1" in problem(PRODUCT, asked(max_tokens=1))
    empty = {"tokens": [], "logprobs": [], "finish_reason": "abort"}
    assert problem(PRODUCT, asked(), **empty) is None


ROWS = Batch(prompts=[[1]], prompt_index=[0, 0, 0], responses=[[2, 3], [], [4]], temperature=1.0)
RIGHT = [[-1.0, -2.0], [], [-3.0]]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"logprobs": RIGHT, "entropy": RIGHT}, None),
        ({"logprobs": RIGHT}, "without the 'entropy' that was asked for"),
        ({}, "without the 'entropy' that was asked for; there are none"),
        ({"logprobs": RIGHT, "entropi": RIGHT}, "did you mean 'entropi'"),
        ({"logprobs": RIGHT, "entropy": RIGHT, "values": RIGHT}, "'values', which was not asked"),
        ({"logprobs": RIGHT[:2], "entropy": RIGHT}, "logprobs of 2 rows for 3 responses"),
        (
            {"logprobs": RIGHT, "entropy": [[-1.0], [-2.0], [-3.0]]},
            "entropy of 1 entries in row 0 for 2 response tokens",
        ),
        (
            {"logprobs": RIGHT, "entropy": [[-1.0, 2.0], [-3.0], []]},
            "entropy of 1 entries in row 1 for 0 response tokens",
        ),
    ],
)
def test_a_forward_gives_what_was_asked_for_of_the_batchs_tokens(values, words):
    request = Forward(batch=ROWS, outputs={"logprobs", "entropy"})
    rows = {name: Ragged.from_rows(each, np.float32) for name, each in values.items()}
    found = answer_problem(request, Outputs(values=rows, version=0))
    assert found is None if words is None else words in found


def test_a_delivery_holds_what_was_sent():
    receipt = SyncReceipt(
        version=0,
        tensors=1,
        bytes=4,
        seconds=0,
        source_fingerprint="a",
        sampler_fingerprint="a",
    )
    assert answer_problem(Sync(), receipt) is None
    other = attrs.evolve(receipt, sampler_fingerprint="b")
    assert "names, shapes or dtypes differ (a sent, b held)" in answer_problem(Sync(), other)


# -- through the dispatcher -----------------------------------------------------------------------


@in_loop
async def test_a_wrong_answer_is_an_error_of_the_backend():
    async with running() as talk:
        wrong = [sample(0, 0), sample(0, 0)]
        talk.backend.answers["generate"] = Generation.from_samples(wrong)
        error = await talk.error("generate", 1, generate(n=2))
        assert type(error) is BackendError
        assert error.message.startswith("backend 'fake' answered generate with sample 0 of prompt")
        talk.backend.answers["forward"] = Outputs(values={}, version=0)
        error = await talk.error("forward", 1, Forward(batch=BATCH))
        assert "answered forward with outputs without the 'logprobs'" in error.message


@pytest.mark.parametrize(
    "operation",
    sorted(
        {name for name, row in OPERATIONS.items() if row.response is Done}
        - ALWAYS_OFFERED
        - {"restore_snapshot", "drop_snapshot"}  # which need a snapshot first
    ),
)
@in_loop
async def test_what_has_no_answer_gets_none(operation):
    row = OPERATIONS[operation]
    given = {
        "snapshot": {"name": "a"},
        "set_reference": {"source": "base"},
        "finish_session": {"session_id": "s"},
        "push_part": {"transfer": "t", "forms": {"w": TensorForm(shape=(1,), dtype="float32")}},
        "sleep": {"half": "training"},
        "wake": {"half": "training"},
    }.get(operation, {})
    async with running() as talk:
        talk.backend.answers[operation] = True
        error = await talk.error(operation, 1, row.request(**given))
        assert error.message == f"backend 'fake' answered {operation} with a bool instead of a Done"


@in_loop
async def test_a_step_with_a_wrong_answer_is_a_failed_one():
    async with running() as talk:
        await talk.step(1)
        talk.backend.answers["optim_step"] = ForwardBackwardResult(value=0.0, version=2)
        await talk.result("forward_backward", 3, FORWARD_BACKWARD)
        error = await talk.error("optim_step", 4, OPTIM_STEP)
        assert "with a ForwardBackwardResult instead of a OptimStepResult" in error.message
        await talk.result("zero_grad", 5)
        error = await talk.error("forward", 6, Forward(batch=BATCH))
        assert type(error) is ConflictError  # nobody knows whether it stepped
        assert talk.dispatcher.rules.version == 1
