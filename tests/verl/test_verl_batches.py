"""verl's jagged tensor dicts to Batch, and per-token outputs back into verl's layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.utils.padding import response_from_nested

from remote_rl import Ragged, errors
from shims.verl.batches import counted_tokens, to_batch, to_sequences

PROMPTS = [[2, 3], [2, 3], [4, 5, 6]]
RESPONSES = [[7, 8, 1], [9], [7, 1]]
MASK = [[1, 0, 1], [1], [0, 0]]


def jagged(rows: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def rows_of(**changes: Any) -> TensorDict:
    """What verl sends with compute_log_prob, three rows."""
    tensors = {
        "prompts": jagged(PROMPTS),
        "responses": jagged(RESPONSES),
        "response_mask": jagged(MASK),
        "loss_mask": jagged([[1, 1, 1], [1], [0, 0]]),
        "input_ids": jagged([p + r for p, r in zip(PROMPTS, RESPONSES)]),
        **changes,
    }
    data = tensordict_utils.get_tensordict(tensors, {"temperature": 0.7})
    return data


def test_tokens_mask_and_temperature_are_verls_own() -> None:
    batch = to_batch(rows_of())
    assert [batch.prompts[index].tolist() for index in batch.prompt_index] == PROMPTS
    assert batch.responses.to_rows() == RESPONSES
    assert batch.mask.to_rows() == MASK
    assert batch.temperature.tolist() == np.float32([0.7] * 3).tolist()
    assert batch.advantages is None


def test_equal_prompts_are_sent_once() -> None:
    batch = to_batch(rows_of())
    assert len(batch.prompts) == 2
    assert batch.prompt_index.tolist() == [0, 0, 1]


def test_training_fields() -> None:
    per_token = [[0.5, 0.25, 0.125], [1.0], [2.0, 3.0]]
    fields = {
        "advantages": "advantages",
        "old_log_probs": "old_logprobs",
        "ref_log_prob": "ref_logprobs",
        "rollout_is_weights": "importance_weights",
    }
    data = rows_of(**{name: jagged(per_token, torch.float32) for name in fields})
    batch = to_batch(data, training=True)
    for ours in fields.values():
        assert getattr(batch, ours).to_rows() == per_token
    plain = to_batch(data)
    assert all(getattr(plain, ours) is None for ours in fields.values())


def test_a_temperature_for_each_row() -> None:
    data = rows_of()
    data["temperature"] = torch.tensor([0.5, 1.0, 2.0])
    assert to_batch(data).temperature.tolist() == [0.5, 1.0, 2.0]


def test_a_call_without_temperature_is_refused() -> None:
    data = rows_of()
    del data["temperature"]
    with pytest.raises(errors.InvalidRequestError, match="no temperature"):
        to_batch(data)


def test_rows_of_one_length_may_come_dense() -> None:
    data = tensordict_utils.get_tensordict(
        {
            "prompts": torch.tensor([[2, 3], [4, 5]]),
            "responses": torch.tensor([[7, 1], [8, 1]]),
            "response_mask": torch.ones(2, 2, dtype=torch.int64),
        },
        {"temperature": 1.0},
    )
    batch = to_batch(data)
    assert batch.responses.to_rows() == [[7, 1], [8, 1]]


def test_denominators_count_loss_mask_not_the_rejected_tokens() -> None:
    assert counted_tokens(rows_of()) == 4


def test_images_are_refused() -> None:
    data = rows_of()
    tensordict_utils.assign_non_tensor_stack(
        data, "multi_modal_inputs", [{}, {"pixel_values": 1}, {}]
    )
    with pytest.raises(errors.UnsupportedError, match="multi_modal_inputs"):
        to_batch(data)


def test_outputs_come_back_where_verl_reads_them() -> None:
    values = Ragged.from_rows([[-1.0, -2.0, -3.0], [-4.0], [-5.0, -6.0]], np.float32)
    sequences = to_sequences(values, Ragged.of(jagged(PROMPTS)))
    assert sequences.dtype == torch.float32
    assert sequences.offsets().tolist() == [0, 5, 8, 13]
    # slot i scores token i + 1: the last prompt token scores the first response token
    assert sequences[0].tolist() == [0.0, -1.0, -2.0, -3.0, 0.0]
    read = response_from_nested(sequences, jagged(MASK))
    assert [row.tolist() for row in read.unbind()] == values.to_rows()


def test_an_empty_response_keeps_its_row() -> None:
    values = Ragged.from_rows([[-1.0], [], [-2.0]], np.float32)
    sequences = to_sequences(values, Ragged.of(jagged(PROMPTS)))
    assert [row.tolist() for row in sequences.unbind()] == [
        [0.0, -1.0, 0.0],
        [0.0, 0.0],
        [0.0, 0.0, -2.0, 0.0],
    ]
