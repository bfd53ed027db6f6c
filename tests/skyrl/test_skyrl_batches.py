"""SkyRL's rows as a Batch, and outputs back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from skyrl.backends.skyrl_train.training_batch import TensorList, TrainingInputBatch
from skyrl_rows import skyrl_rows

from remote_rl import Ragged, errors
from shims.skyrl.batches import padded, per_row, placed, response_positions, to_batch

PROMPTS = [[5, 6], [7], [5, 6], [5, 6, 8]]
RESPONSES = [[10, 11, 12], [13], [], [14, 15]]
MASKS = [[1.0, 0.0, 1.0], [0.0], [], [1.0, 1.0]]


def rows(**columns: list[list[float]]) -> TrainingInputBatch:
    return skyrl_rows(PROMPTS, RESPONSES, MASKS, **columns)


def test_tokens_arrive_without_padding_and_equal_prompts_once() -> None:
    batch = to_batch(rows(), temperature=0.5, training=True)
    assert batch.prompts.to_rows() == [[5, 6], [7], [5, 6, 8]]
    assert batch.prompt_index.tolist() == [0, 1, 0, 2]
    assert batch.responses.to_rows() == RESPONSES
    assert batch.mask.to_rows() == [[1, 0, 1], [0], [], [1, 1]]
    assert batch.temperature.tolist() == [0.5] * 4


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("advantages", "advantages"),
        ("action_log_probs", "old_logprobs"),
        ("base_action_log_probs", "ref_logprobs"),
        ("rollout_logprobs", "sampling_logprobs"),
    ],
)
def test_per_token_fields_are_moved(theirs: str, ours: str) -> None:
    values = [[-1.0, -2.0, -3.0], [-4.0], [], [-5.0, -6.0]]
    data = rows(**{theirs: values})
    batch = to_batch(data, temperature=1.0, training=True)
    assert getattr(batch, ours).to_rows() == values
    assert getattr(to_batch(data, temperature=1.0), ours) is None
    data[theirs] = data[theirs].double()  # as a user's advantage estimator may return them
    assert getattr(to_batch(data, temperature=1.0, training=True), ours).to_rows() == values
    data[theirs] = None
    assert getattr(to_batch(data, temperature=1.0, training=True), ours) is None


def test_a_weight_in_the_loss_mask_counts() -> None:
    data = rows()
    data["loss_mask"] = data["loss_mask"] * 0.25
    batch = to_batch(data, temperature=1.0, training=True)
    assert batch.mask.to_rows() == [[1, 0, 1], [0], [], [1, 1]]


def test_outputs_return_right_aligned_over_the_batchs_width() -> None:
    data = rows()
    values = Ragged.from_rows([[1, 2, 3], [4], [], [5, 6]], np.float32)
    wanted = [[1, 2, 3], [0, 0, 4], [0, 0, 0], [0, 5, 6]]
    assert per_row(values, data) == wanted
    assert padded(values, 4).tolist() == [[0, *row] for row in wanted]
    assert padded(values, 4).dtype == torch.float32
    flat = torch.tensor(values.values, requires_grad=True)
    dense = placed(flat, data)
    assert dense.tolist() == wanted
    (dense * torch.arange(12).reshape(4, 3)).sum().backward()
    assert flat.grad is not None
    assert flat.grad.tolist() == [0, 1, 2, 5, 10, 11]


def test_rows_that_skyrl_sends_for_logprobs_without_a_response_mask() -> None:
    """Then the last columns are all response; the true response lies at their end."""
    data = rows().select(["sequences", "attention_mask"], ["response_length"])
    batch = to_batch(data, temperature=1.0)
    assert batch.responses.to_rows() == [[10, 11, 12], [13], [6], [8, 14, 15]]
    assert [batch.prompts[index].tolist() for index in batch.prompt_index] == [
        [5, 6],
        [7],
        [5],
        [5, 6],
    ]
    outputs = batch.responses.with_values(np.arange(8, dtype=np.float32))
    for row, found in enumerate(per_row(outputs, data)):
        length = len(RESPONSES[row])
        tail = outputs[row][len(outputs[row]) - length :]
        assert found[3 - length :] == tail.tolist()


def test_a_mini_batch_has_the_width_of_the_whole_batch() -> None:
    part = rows()[1:3]
    assert to_batch(part, temperature=1.0, training=True).responses.to_rows() == [[13], []]
    assert response_positions(part).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("rollout_expert_indices", "enable_return_routed_experts=false"),
        ("router_padding_mask", "enable_return_routed_experts=false"),
        ("rollout_sample_support", "enable_sample_support_replay=false"),
        ("pixel_values", "text alone"),
        ("image_grid_thw", "text alone"),
        ("sub_seq_lengths", "a row of its own"),
    ],
)
def test_what_a_batch_cannot_carry_is_refused_by_name(name: str, advice: str) -> None:
    data = rows()
    data[name] = None
    to_batch(data, temperature=1.0)
    data[name] = TensorList([torch.ones(1)] * 4)
    with pytest.raises(errors.UnsupportedError, match=f"{name}.*{advice}"):
        to_batch(data, temperature=1.0)


@pytest.mark.parametrize("positions", [[1, 0, 0], [1, 0, 1], [1, 1, 0]])
def test_a_response_that_does_not_end_the_row_is_refused(positions: list[int]) -> None:
    data = rows()
    data["response_mask"][3] = torch.tensor(positions)
    with pytest.raises(errors.InvalidRequestError, match="response_mask of row 3 is not one run"):
        to_batch(data, temperature=1.0)


def test_a_response_token_that_is_not_attended_is_refused() -> None:
    data = rows()
    data["response_mask"][1] = 1
    with pytest.raises(errors.InvalidRequestError, match="response_mask of row 1"):
        to_batch(data, temperature=1.0)


def test_a_counted_token_outside_of_the_response_is_refused() -> None:
    data = rows()
    data["loss_mask"][1, 0] = 1.0
    to_batch(data, temperature=1.0)
    with pytest.raises(errors.InvalidRequestError, match="loss_mask of row 1 counts a token"):
        to_batch(data, temperature=1.0, training=True)


def test_rows_to_train_on_without_a_loss_mask_are_refused() -> None:
    data = rows()
    data["loss_mask"] = None
    with pytest.raises(errors.InvalidRequestError, match="without loss_mask"):
        to_batch(data, temperature=1.0, training=True)


def test_a_field_of_another_width_is_refused() -> None:
    data = rows()
    data["advantages"] = torch.zeros(4, 5)
    with pytest.raises(errors.InvalidRequestError, match=r"advantages of shape \(4, 5\)"):
        to_batch(data, temperature=1.0, training=True)


def test_a_row_without_a_prompt_is_refused() -> None:
    data = skyrl_rows([[1], []], [[2], [3, 4]])
    with pytest.raises(errors.InvalidRequestError, match="prompt 1 is empty"):
        to_batch(data, temperature=1.0)
