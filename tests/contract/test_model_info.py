"""What a model can't take is refused before any work, naming the row."""

import numpy as np
import pytest

from remote_rl import losses
from remote_rl.errors import InvalidRequestError
from remote_rl.protocol import ModelInfo
from remote_rl.requests import Forward, ForwardBackward, Generate, Snapshot
from remote_rl.types import Batch, Ragged, SamplingParams

MODEL = ModelInfo(name="tiny", vocab_size=13, context_length=8)


def batch(prompts, responses):
    index = [0] * len(responses)
    return Batch(prompts=prompts, prompt_index=index, responses=responses, temperature=1.0)


@pytest.mark.parametrize(
    ("prompts", "responses", "message", "row"),
    [
        ([[1]], [[1, 2], [3, 13]], "response 1 holds token id 13, but model 'tiny' has 13 ids", 1),
        ([[20]], [[1], [2]], "prompt 0 holds token id 20, but model 'tiny' has 13 ids", 0),
        ([[1, 2, 3, 4]], [[1], [1] * 5], "row 1: prompt and response have 9 tokens, more than", 1),
    ],
)
@pytest.mark.parametrize(
    "request_of",
    [
        lambda batch: Forward(batch=batch),
        lambda batch: ForwardBackward(batch=batch, loss=losses.CrossEntropy()),
    ],
)
def test_a_batch_beyond_the_model(prompts, responses, message, row, request_of):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        MODEL.check(request_of(batch(prompts, responses)))
    assert caught.value.details == {"row": row}


def test_min_tokens_that_leave_nothing_to_draw():
    model = ModelInfo(name="tiny", vocab_size=4, eos_token_ids=(3,))

    def asking(**given):
        return Generate(prompts=[[1]], params=SamplingParams(max_tokens=2, **given))

    model.check(asking(stop_token_ids=(0, 1, 2)))
    model.check(asking(stop_token_ids=(0, 1, 3), min_tokens=2))
    message = "min_tokens=1 leaves nothing to draw: each of the 4 ids of model 'tiny' ends a resp"
    with pytest.raises(InvalidRequestError, match=message) as caught:
        model.check(asking(stop_token_ids=(0, 1, 2), min_tokens=1))
    assert caught.value.details == {"field": "min_tokens"}


@pytest.mark.parametrize(("field", "name"), [("prompts", "prompt"), ("responses", "response")])
@pytest.mark.parametrize("written", [13, -1])
def test_an_id_written_into_a_batch_after_it_was_made(field, name, written):
    ids = Ragged(np.array([1, 2, 12], np.int32), np.array([0, 1, 3]))
    other = Ragged(np.array([1, 2], np.int32), np.array([0, 1, 2]))
    made = batch(**{"prompts": other, "responses": other, field: ids})
    MODEL.check(Forward(batch=made), again=False)
    ids.values[1] = written
    MODEL.check(Forward(batch=made), again=False)  # by what was seen as it was made
    with pytest.raises(InvalidRequestError, match=f"{name} 1 holds token id {written},"):
        MODEL.check(Forward(batch=made))
    MODEL.check(Forward(batch=batch([[1]], [[1]])), again=False)
    if written < 0:
        with pytest.raises(InvalidRequestError, match=f"Batch.{field} is negative: -1"):
            batch(**{"prompts": other, "responses": other, field: ids})
        return
    again = batch(**{"prompts": other, "responses": other, field: ids})
    with pytest.raises(InvalidRequestError, match=f"{name} 1 holds token id 13,"):
        MODEL.check(Forward(batch=again), again=False)


@pytest.mark.parametrize(
    ("prompts", "params", "message", "details"),
    [
        ([[1], [1, 13]], {"max_tokens": 2}, "prompt 1 holds token id 13", {"row": 1}),
        (
            [[1], [1, 2, 3]],
            {"max_tokens": 6},
            "row 1: prompt and max_tokens come to 9 tokens",
            {"row": 1},
        ),
        (
            [[1]],
            {"max_tokens": 2, "stop_token_ids": (3, 99)},
            "stop_token_ids holds 99, but model 'tiny' has 13 ids",
            {"field": "stop_token_ids"},
        ),
    ],
)
def test_a_generate_beyond_the_model(prompts, params, message, details):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        MODEL.check(Generate(prompts=prompts, params=SamplingParams(**params)))
    assert caught.value.details == details


def test_what_just_fits_passes():
    MODEL.check(Forward(batch=batch([[1, 2, 12]], [[12] * 5, []])))
    fitting = SamplingParams(max_tokens=6, stop_token_ids=(0, 12))
    MODEL.check(Generate(prompts=[[1], [1, 2]], params=fitting))
    MODEL.check(Snapshot(name="a"))
    endless = ModelInfo(name="tiny", vocab_size=13)
    endless.check(Generate(prompts=[[1]], params=SamplingParams(max_tokens=2**31 - 1)))
