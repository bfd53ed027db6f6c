"""Ragged, Batch and Tensor from torch tensors and back: what is shared, what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remote_rl.errors import InvalidRequestError
from remote_rl.types import Batch, Ragged, Tensor
from remote_rl.types.results import TENSOR_DTYPES

rows = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), min_size=1, max_size=5)


def jagged(lists, dtype=torch.int32):
    return torch.nested.nested_tensor(
        [torch.tensor(row, dtype=dtype) for row in lists], layout=torch.jagged
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_dense_tensor_and_mask(side):
    ragged = Ragged.from_rows([[1, 2, 3], [4], []])
    dense = torch.from_numpy(ragged.to_padded(side=side))
    mask = torch.from_numpy(ragged.padding_mask(side=side))
    assert Ragged.from_padded(dense, mask) == ragged
    assert Ragged.from_padded(dense, mask.long()) == ragged


def test_holes_in_a_mask():
    dense = torch.tensor([[1, 2, 3], [4, 5, 6]])
    mask = torch.tensor([[1, 0, 1], [0, 1, 0]])
    assert Ragged.from_padded(dense, mask).to_rows() == [[1, 3], [5]]


def test_dense_tensor_without_padding_shares_memory():
    dense = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    ragged = Ragged.of(dense, np.int32)
    assert ragged.to_rows() == [[0, 1, 2], [3, 4, 5]]
    assert ragged.values.ctypes.data == dense.data_ptr()


def test_list_of_tensors_and_a_transposed_tensor():
    assert Ragged.of([torch.tensor([1, 2]), torch.tensor([3])], np.int32).to_rows() == [[1, 2], [3]]
    assert Ragged.of(torch.tensor([[1, 2], [3, 4]]).T, np.int32).to_rows() == [[1, 3], [2, 4]]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(rows)
def test_jagged_tensors_both_ways(lists):
    ragged = Ragged.from_torch(jagged(lists))
    assert ragged.to_rows() == lists
    assert Ragged.of(jagged(lists), np.int32) == ragged
    assert Ragged.from_torch(ragged.to_torch()) == ragged


def test_jagged_tensors_share_memory_both_ways():
    nested = jagged([[1, 2], [3]])
    ragged = Ragged.from_torch(nested)
    assert ragged.values.ctypes.data == nested.values().data_ptr()
    assert ragged.offsets.ctypes.data == nested.offsets().data_ptr()
    back = ragged.to_torch()
    assert back.layout is torch.jagged
    assert back.values().data_ptr() == ragged.values.ctypes.data
    assert [row.tolist() for row in back.unbind()] == [[1, 2], [3]]


def test_jagged_tensor_with_holes():
    nested = torch.nested.nested_tensor_from_jagged(
        torch.arange(6), offsets=torch.tensor([0, 3, 6]), lengths=torch.tensor([2, 1])
    )
    assert Ragged.from_torch(nested).to_rows() == [[0, 1], [3]]


def test_read_only_values_leave_as_a_copy_that_may_be_written():
    values = np.arange(3, dtype=np.int32)
    values.flags.writeable = False
    back = Ragged(values, [0, 3]).to_torch()
    back.values().fill_(7)
    assert values.tolist() == [0, 1, 2]


def test_tensors_with_a_gradient_and_bfloat16_are_taken_by_value():
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    assert Ragged.of(logprobs, np.float32).to_rows() == [[-1.0, -2.0]]
    half = Ragged.of(torch.tensor([[-1.5]], dtype=torch.bfloat16), np.float32)
    assert half.to_rows() == [[-1.5]]
    assert half.dtype == np.float32


def test_refusals_name_the_place():
    with pytest.raises(InvalidRequestError, match="use from_padded"):
        Ragged.from_torch(torch.zeros(2, 2))
    with pytest.raises(
        InvalidRequestError, match=r"token 1 of row 0 of Batch.prompts is 2147483648"
    ):
        Ragged.of(torch.tensor([[1, 2**31]]), np.int32, "Batch.prompts")
    with pytest.raises(InvalidRequestError, match=r"row 0 of rows .*not a single one"):
        Ragged.of(torch.tensor([1, 2]))
    with pytest.raises(InvalidRequestError, match="rows must be rows of numbers"):
        Ragged.of(torch.tensor(1))


def test_a_batch_of_tensors():
    batch = Batch(
        prompts=torch.tensor([[1, 2]]),
        prompt_index=torch.tensor([0, 0]),
        responses=jagged([[3, 4], [5]]),
        temperature=torch.tensor(0.5),
        mask=jagged([[1, 0], [1]], torch.bool),
        policy_version=torch.tensor([1, 2]),
        extras={"reward": torch.tensor([0.5, 1.0], dtype=torch.bfloat16)},
    ).replace(advantages=torch.tensor([1.0, -1.0]), old_logprobs=jagged([[-1, -2], [-3]]))
    assert batch.mask.to_rows() == [[1, 0], [1]]
    assert batch.temperature.tolist() == [0.5, 0.5]
    assert batch.advantages.to_rows() == [[1.0, 1.0], [-1.0]]
    assert batch.old_logprobs.to_rows() == [[-1.0, -2.0], [-3.0]]
    assert batch.extras["reward"].tolist() == [0.5, 1.0]
    assert len(batch.select(torch.tensor([True, False]))) == 1
    scalars = batch.replace(advantages=[torch.tensor(2.0), torch.tensor(3.0)])
    assert scalars.advantages.to_rows() == [[2.0, 2.0], [3.0]]


@pytest.mark.parametrize("tag", TENSOR_DTYPES)
def test_tensor_of_every_dtype_keeps_the_bits(tag):
    bits = torch.arange(16, dtype=torch.uint8) % 2  # legal for bool too
    source = bits.view(getattr(torch, tag)).reshape(2, -1)
    tensor = Tensor.of(source)
    assert tensor.dtype == tag
    assert tensor.shape == tuple(source.shape)
    assert tensor.data.tobytes() == bytes(bits.tolist())
    assert tensor.data.ctypes.data == source.data_ptr()


def test_tensor_of_scalars_views_and_unknown_dtypes():
    assert Tensor.of(torch.tensor(1.0, dtype=torch.bfloat16)).shape == ()
    turned = torch.arange(4.0).reshape(2, 2).T
    assert Tensor.of(turned).data.tolist() == [[0.0, 2.0], [1.0, 3.0]]
    assert Tensor.of(torch.nn.Parameter(torch.ones(1))).dtype == "float32"
    with pytest.raises(InvalidRequestError, match=r"Tensor.dtype can't be 'complex64'"):
        Tensor.of(torch.zeros(1, dtype=torch.complex64))
