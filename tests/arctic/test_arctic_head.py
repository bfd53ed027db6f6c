"""Logprobs and entropies in chunks against whole logits, log_softmax and autograd."""

import pytest
import torch
from arctic_memory import largest_tensor, peak_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.arctic.training import head as head_module
from backends.arctic.training.head import TokenHead, token_outputs

torch.set_num_threads(1)


def case(rows, vocabulary, *, width=6, bias=True, dtype=torch.float64, seed=0):
    """hidden, weight, bias, targets, temperature; the first three want gradients."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    hidden, weight = drawn(rows, width).requires_grad_(), drawn(vocabulary, width).requires_grad_()
    offsets = drawn(vocabulary).requires_grad_() if bias else None
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    temperature = torch.tensor([0.7, 1.0, 1.3])[torch.arange(rows) % 3]
    return hidden, weight, offsets, targets, temperature


def whole(hidden, weight, bias, targets, temperature):
    """The same by whole float64 logits."""
    wide = None if bias is None else bias.double()
    logits = torch.nn.functional.linear(hidden.double(), weight.double(), wide)
    table = (logits / temperature[:, None]).log_softmax(-1)
    return table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)


def gradients(outputs, leaves, seed=1):
    generator = torch.Generator().manual_seed(seed)
    slopes = [
        torch.randn(len(each), generator=generator, dtype=torch.float64).to(each.dtype)
        for each in outputs
    ]
    return torch.autograd.grad(outputs, [leaf for leaf in leaves if leaf is not None], slopes)


@settings(max_examples=40)
@given(
    rows=st.integers(0, 17),
    vocabulary=st.integers(1, 30),
    chunk=st.integers(1, 20),
    bias=st.booleans(),
    entropy=st.booleans(),
)
def test_chunks_give_what_whole_logits_give(rows, vocabulary, chunk, bias, entropy):
    given_case = case(rows, vocabulary, bias=bias)
    ours = token_outputs(*given_case, chunk=chunk, entropy=entropy)
    theirs = whole(*given_case)[: len(ours)]
    assert len(ours) == 1 + entropy
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-12, atol=1e-12)
    for our, their in zip(
        gradients(ours, given_case[:3]), gradients(theirs, given_case[:3]), strict=True
    ):
        torch.testing.assert_close(our, their, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_float32_whatever_the_weights_are(dtype, monkeypatch):
    monkeypatch.setattr(head_module, "VOCABULARY_TILE", 100)  # several tiles, the last one short
    given_case = case(40, 333, width=64, dtype=dtype)
    ours = token_outputs(*given_case, chunk=16, entropy=True)
    wide = [None if each is None else each.detach().double() for each in given_case[:3]]
    leaves = [each.requires_grad_() for each in wide]
    theirs = whole(*leaves, *given_case[3:])
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == torch.float32
        # rounding of the logits to `dtype` would be off by 0.03 here in bfloat16
        torch.testing.assert_close(our.double(), their, rtol=2e-5, atol=2e-5)
    # one rounding to the parameters' dtype at the end
    allowed = max(2 * torch.finfo(dtype).eps, 1e-5)
    for our, their in zip(gradients(ours, given_case[:3]), gradients(theirs, leaves), strict=True):
        assert our.dtype == dtype
        assert float((our.double() - their).abs().max() / their.abs().max()) < allowed


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    targets, temperature = torch.tensor([0, 0]), torch.tensor([0.5, 0.5])
    logprobs, entropies = token_outputs(hidden, weight, None, targets, temperature, entropy=True)
    assert logprobs.tolist() == [0.0, -1200.0]
    assert entropies.tolist() == [0.0, 0.0]
    (logprobs + entropies).sum().backward()
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


def test_only_what_wants_a_gradient_gets_one():
    hidden, weight, bias, targets, temperature = case(5, 9)
    for frozen in ("hidden", "weight", "bias"):
        leaves = {"hidden": hidden, "weight": weight, "bias": bias}
        leaves[frozen] = leaves[frozen].detach()
        (logprobs,) = token_outputs(*leaves.values(), targets, temperature)
        logprobs.sum().backward()
        assert leaves[frozen].grad is None
        assert all(leaf.grad is not None for name, leaf in leaves.items() if name != frozen)
        hidden.grad = weight.grad = bias.grad = None


def test_a_weight_whose_memory_is_freed_between_forward_and_backward():
    # what ZeRO-3 does to a parameter: the same object, its data swapped
    hidden, weight, _, targets, temperature = case(7, 11, bias=False)
    weight = torch.nn.Parameter(weight.detach())
    expected = gradients(whole(hidden, weight, None, targets, temperature)[:1], [hidden, weight])
    outputs = token_outputs(hidden, weight, None, targets, temperature, chunk=3)
    full, weight.data = weight.data, torch.empty(0, dtype=weight.dtype)
    moved = full.clone()
    full.fill_(torch.nan)  # who kept it would notice
    weight.data = moved
    for our, their in zip(gradients(outputs, [hidden, weight]), expected, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-12, atol=1e-12)


def run(rows, vocabulary, chunk, entropy=True):
    given_case = case(rows, vocabulary, width=4, dtype=torch.float32)

    def forward_and_backward():
        outputs = token_outputs(*given_case, chunk=chunk, entropy=entropy)
        gradients(outputs, given_case[:3])

    return forward_and_backward


@pytest.mark.parametrize("chunk", [16, 64])
def test_no_tensor_is_larger_than_a_chunk_of_logits(chunk):
    rows, vocabulary = 512, 2000
    assert largest_tensor(run(rows, vocabulary, chunk)) == chunk * vocabulary


def test_peak_memory_follows_the_chunk_and_not_the_rows():
    rows, vocabulary = 512, 2000
    logits = rows * vocabulary * 4
    peaks = {chunk: peak_bytes(run(rows, vocabulary, chunk)) for chunk in (16, 32, 128)}
    doubled = peak_bytes(run(2 * rows, vocabulary, 32))
    chunk_bytes = {chunk: chunk * vocabulary * 4 for chunk in peaks}
    for chunk, peak in peaks.items():
        # three chunks of logits, and the weight's gradient with a few small arrays beside it
        assert chunk_bytes[chunk] < peak < 3 * chunk_bytes[chunk] + 150_000
    assert peaks[16] < 0.15 * logits
    assert doubled - peaks[32] < 50_000


def test_the_head_shares_a_layers_parameters_and_still_gives_its_logits():
    linear = torch.nn.Linear(6, 9)
    head = TokenHead.sharing(linear, chunk=2)
    assert head.weight is linear.weight
    assert head.bias is linear.bias
    assert isinstance(head, torch.nn.Linear)
    hidden = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head(hidden), linear(hidden))
    targets, temperature = torch.zeros(5, dtype=torch.int64), torch.ones(5)
    (logprobs,) = head(hidden[0], targets, temperature)
    torch.testing.assert_close(logprobs, linear(hidden[0]).log_softmax(-1)[:, 0])
