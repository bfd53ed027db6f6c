"""Packed sequences: every text is there once, in whatever order, and found again."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.arctic.training.packing import DUMMY_TOKEN, PromptGroup, pack
from remote_rl.errors import InvalidRequestError
from remote_rl.types import Batch, Ragged
from remote_rl.types.flops import packed_tokens


@st.composite
def batches(draw):
    """Random texts; some prompts unused, some responses empty."""
    prompts = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    responses = draw(st.lists(st.integers(0, 6), max_size=7))
    index = [draw(st.integers(0, len(prompts) - 1)) for _ in responses]
    random = np.random.default_rng(draw(st.integers(0, 1000)))

    def texts(lengths):
        return Ragged.from_rows([random.integers(0, 99, length) for length in lengths], np.int32)

    return Batch(
        prompts=texts(prompts),
        prompt_index=np.array(index, np.int32),
        responses=texts(responses),
        temperature=random.choice(np.array([0, 0.5, 1.5], np.float32), len(index)),
    )


@given(batches())
def test_each_token_is_predicted_where_its_text_so_far_ends(batch):
    packed = pack(batch, "cpu")
    tokens, positions = packed.tokens[0].numpy(), packed.position_ids[0].numpy()
    assert packed.targets.tolist() == batch.responses.values.tolist()
    for row, response in enumerate(batch.responses):
        prompt = batch.prompts[batch.prompt_index[row]]
        own = packed.predictors.numpy()[batch.responses.offsets[row] :][: len(response)]
        for step, predictor in enumerate(own):
            text = [*prompt, *response[:step]]
            assert tokens[predictor] == text[-1]
            assert positions[predictor] == len(text) - 1


@given(batches())
def test_a_prompt_is_there_once_and_the_layout_covers_all(batch):
    packed = pack(batch, "cpu")
    used = {
        int(index) for index, response in zip(batch.prompt_index, batch.responses) if len(response)
    }
    inputs = sum(max(len(response) - 1, 0) for response in batch.responses)
    prompts = sum(len(batch.prompts[index]) for index in used)
    length = packed.tokens.shape[1]
    assert length == packed.layout.length == (prompts + inputs if used else 1)
    assert packed_tokens(batch) == prompts + inputs
    spans = [span for group in packed.layout.groups for span in (group.prompt, *group.responses)]
    covered = [index for start, stop in spans for index in range(start, stop)]
    assert covered == list(range(length))
    assert all(start < stop for start, stop in spans)
    assert len(packed.layout.groups) == max(len(used), 1)


@given(batches(), st.data())
def test_rows_are_counted_as_their_selection_is_packed(batch, data):
    rows = data.draw(st.lists(st.integers(0, len(batch) - 1), unique=True)) if len(batch) else []
    piece = batch.select(np.array(rows, np.int64))
    counted = packed_tokens(batch, np.array(rows, np.int64))
    assert counted == packed_tokens(piece)
    assert pack(piece, "cpu").layout.length == max(counted, 1)


def test_rows_of_one_prompt_lie_together_and_results_keep_the_batchs_order():
    batch = Batch(
        prompts=[[10, 11], [20]],
        prompt_index=[1, 0, 1],
        responses=[[1, 2, 3], [4, 5], [6]],
        temperature=[0.5, 0, 2],
    )
    packed = pack(batch, "cpu")
    assert packed.tokens.tolist() == [[20, 1, 2, 10, 11, 4]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert packed.predictors.tolist() == [0, 1, 2, 4, 5, 0]
    assert packed.temperature.tolist() == [0.5, 0.5, 0.5, 1, 1, 2]
    assert packed.layout.groups == (
        PromptGroup((0, 1), ((1, 3),)),
        PromptGroup((3, 5), ((5, 6),)),
    )
    group, response = packed.layout.owners()
    assert group.tolist() == [0, 0, 0, 1, 1, 1]
    assert response.tolist() == [-1, 0, 0, -1, -1, 1]


@pytest.mark.parametrize(
    "batch",
    [
        None,
        Batch(prompts=[[5]], prompt_index=[], responses=[], temperature=[]),
        Batch(prompts=[[5, 6]], prompt_index=[0, 0], responses=[[], []], temperature=1.0),
    ],
)
def test_a_piece_without_a_response_token_is_one_dummy_token(batch):
    packed = pack(batch, "cpu")
    assert packed.tokens.tolist() == [[DUMMY_TOKEN]]
    assert packed.position_ids.tolist() == [[0]]
    assert [len(each) for each in (packed.predictors, packed.targets, packed.temperature)] == [
        0
    ] * 3
    assert packed.predictors.dtype == packed.targets.dtype == torch.int64


def test_an_empty_prompt_never_gets_here():
    with pytest.raises(InvalidRequestError, match="prompt 1 is empty"):
        Batch(prompts=[[5], []], prompt_index=[0], responses=[[1]], temperature=1.0)


def test_read_only_arrays_are_copied():
    values = np.array([1, 2, 3], np.int32)
    values.flags.writeable = False
    rows = Ragged(values, np.array([0, 1, 3]))
    batch = Batch(prompts=rows, prompt_index=[0, 1], responses=rows, temperature=1.0)
    packed = pack(batch, "cpu")
    packed.targets.zero_()
    assert values.tolist() == [1, 2, 3]
