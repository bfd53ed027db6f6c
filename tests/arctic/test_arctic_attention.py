"""The packed attention against dense softmax attention with a mask that texts spell out."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from arctic_memory import largest_tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.arctic.training import blocks, flex
from backends.arctic.training.attention import NAME, attention
from backends.arctic.training.packing import pack
from remote_rl.errors import BackendError, UnsupportedError
from remote_rl.types import Batch, Ragged

torch.set_num_threads(1)


def batch_of(prompts, members, seed=0):
    """A batch with prompts of these lengths and responses of `members` (prompt, length)."""
    random = np.random.default_rng(seed)

    def texts(lengths):
        return Ragged.from_rows([random.integers(0, 99, length) for length in lengths], np.int32)

    return Batch(
        prompts=texts(prompts),
        prompt_index=np.array([prompt for prompt, _ in members], np.int32),
        responses=texts([length for _, length in members]),
        temperature=1.0,
    )


def visible(batch, window=None):
    """[T, T]: row by row of the batch, which position of the sequence sees which."""
    packed = pack(batch, "cpu")
    length = packed.layout.length
    sees = torch.zeros(length, length, dtype=torch.bool)
    for row, response in enumerate(batch.responses):
        if len(response) == 0:
            continue
        prompt = len(batch.prompts[batch.prompt_index[row]])
        own = packed.predictors[batch.responses.offsets[row] :][: len(response)].tolist()
        text = [*range(own[0] - prompt + 1, own[0] + 1), *own[1:]]
        for place, query in enumerate(text):
            first = 0 if window is None else max(0, place - window + 1)
            sees[query, text[first : place + 1]] = True
    return packed.layout, sees


def dense(query, key, value, sees, scaling):
    key, value = (
        each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value)
    )
    scores = (query @ key.transpose(2, 3)) * scaling
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2)


def operands(length, heads=(4, 2), width=8, dtype=torch.float64, seed=0):
    """Query, key, value as a model has them: transposed views."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, length, number, width, dtype=dtype, generator=generator)
        .requires_grad_()
        .transpose(1, 2)
        for number in (heads[0], heads[1], heads[1])
    ]


def compare(batch, window, *, heads=(4, 2), scaling=0.4, tolerance=1e-11):
    layout, sees = visible(batch, window)
    given_operands = operands(layout.length, heads)
    ours = blocks.attend(*given_operands, layout, window, scaling)
    theirs = dense(*given_operands, sees, scaling)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
    slope = torch.randn(ours.shape, dtype=ours.dtype, generator=torch.Generator().manual_seed(1))
    for our, their in zip(
        torch.autograd.grad(ours, given_operands, slope),
        torch.autograd.grad(theirs, given_operands, slope),
        strict=True,
    ):
        torch.testing.assert_close(our, their, rtol=0, atol=10 * tolerance)


@st.composite
def layouts(draw):
    prompts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    member = st.tuples(st.integers(0, len(prompts) - 1), st.integers(0, 9))
    return batch_of(prompts, draw(st.lists(member, max_size=6)) or [(0, 2)])


@settings(max_examples=60)
@given(
    layouts().filter(lambda batch: len(batch.responses.values) > 0),
    st.sampled_from([None, 1, 2, 5, 9, 100]),
    st.sampled_from([(4, 2), (2, 2), (3, 1)]),
)
def test_blocks_are_dense_attention_forward_and_backward(batch, window, heads):
    compare(batch, window, heads=heads)


def test_texts_longer_than_a_chunk_of_a_window():
    size = blocks.WINDOW_CHUNK
    compare(batch_of([size + 70], [(0, size + 30), (0, 3)]), 40)
    compare(batch_of([20], [(0, size + 30), (0, 3)]), size + 7)


def test_narrow_operands_are_merged_wide():
    batch = batch_of([40, 7], [(0, 30), (0, 9), (1, 25)])
    layout, sees = visible(batch)
    given_operands = operands(layout.length, dtype=torch.bfloat16)
    ours = blocks.attend(*given_operands, layout, None, 0.4)
    assert ours.dtype == torch.bfloat16
    wide = [each.detach().double().requires_grad_() for each in given_operands]
    theirs = dense(*wide, sees, 0.4)
    torch.testing.assert_close(ours.double(), theirs, rtol=2**-7, atol=2**-7)
    slope = torch.ones_like(theirs)
    for our, their in zip(
        torch.autograd.grad(ours, given_operands, slope.bfloat16()),
        torch.autograd.grad(theirs, wide, slope),
        strict=True,
    ):
        assert our.dtype == torch.bfloat16
        assert float((our.double() - their).abs().max() / their.abs().max()) < 2**-5


def test_full_attention_computes_nothing_that_is_not_seen():
    batch = batch_of([50, 3], [(0, 9), (1, 4), (0, 30), (0, 2)])
    layout, sees = visible(batch)
    made = blocks.blocks_of(layout, None)
    assert all(block.window is None for block in made)  # no masks

    def pairs(block):
        queries = block.queries[1] - block.queries[0]
        keys = sum(stop - start for start, stop in block.keys)
        return queries * (queries + 1) // 2 if block.causal else queries * keys

    assert sum(map(pairs, made)) == int(sees.sum())


@pytest.mark.parametrize("window", [None, 300])
def test_no_temporary_grows_with_the_square_of_the_sequence(window):
    batch = batch_of([500, 500], [(0, 300), (0, 200), (1, 400), (1, 300)])
    layout, _ = visible(batch)
    given_operands = operands(layout.length, (2, 1), dtype=torch.float32)

    def run():
        blocks.attend(*given_operands, layout, window, 0.4).sum().backward()

    masks = 0 if window is None else blocks.WINDOW_CHUNK * (blocks.WINDOW_CHUNK + window)
    assert largest_tensor(run) <= max(layout.length * 2 * 8, masks) < layout.length**2


@settings(max_examples=40)
@given(
    layouts().filter(lambda batch: len(batch.responses.values) > 0),
    st.sampled_from([None, 1, 3, 100]),
)
def test_the_flex_mask_is_what_texts_see(batch, window):
    layout, sees = visible(batch, window)
    mask = flex.mask_function(layout, window, torch.device("cpu"))
    index = torch.arange(layout.length)
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(mask(zero, zero, index[:, None], index[None]), sees)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 6])
def test_flex_forward_is_the_blocks_forward(window):
    batch = batch_of([40, 1, 90], [(2, 60), (0, 30), (1, 5), (2, 70), (0, 1)])
    layout, _ = visible(batch)
    # no smaller heads: flex refuses them
    made = operands(layout.length, (4, 2), width=16, dtype=torch.float32)
    given_operands = [each.detach() for each in made]  # nor any that want a gradient
    with torch.no_grad():
        ours = flex.attend(*given_operands, layout, window, 0.4)
        theirs = blocks.attend(*given_operands, layout, window, 0.4)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


# -- what transformers calls ------------------------------------------------------------------


def call(layer=None, **given):
    layout, _ = visible(batch_of([4], [(0, 3)]))
    with torch.no_grad():
        tensors = operands(layout.length)
        module = layer or SimpleNamespace()
        return attention(
            module, *tensors, given.pop("mask", None), **{"packed_layout": layout, **given}
        )


def test_what_layers_pass_on_without_meaning_is_accepted():
    plain, weights = call()
    assert weights is None
    named, _ = call(
        scaling=8**-0.5,
        position_ids=torch.zeros(1, 6),
        use_cache=False,
        softcap=None,
        is_causal=True,
    )
    assert torch.equal(plain, named)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"is_causal": False}, "is_causal=False"),
        ({"mask": torch.ones(1, 1, 6, 6)}, "attention_mask"),
        ({"never_heard_of": 1}, "never_heard_of"),
    ],
)
def test_what_it_would_have_to_ignore_is_refused_by_name(given, named):
    with pytest.raises(UnsupportedError, match=named):
        call(**given)


def test_a_window_that_a_layer_keeps_to_itself_is_refused():
    config = SimpleNamespace(layer_types=["full_attention", "sliding_attention"])
    full, sliding = (SimpleNamespace(config=config, layer_idx=layer) for layer in (0, 1))
    call(full)
    call(sliding, sliding_window=3)
    with pytest.raises(UnsupportedError, match="layer 1 of SimpleNamespace has a sliding window"):
        call(sliding)
    with pytest.raises(UnsupportedError, match="sliding window"):
        call(SimpleNamespace(config=SimpleNamespace(sliding_window=3), layer_idx=0))


def test_keys_of_another_length_or_size_are_refused():
    layout, _ = visible(batch_of([4], [(0, 3)]))
    query, key, value = operands(layout.length)
    longer = torch.cat([key, key], dim=2)
    with pytest.raises(UnsupportedError, match="not to the 6 positions"):
        attention(SimpleNamespace(), query, longer, longer, None, packed_layout=layout)
    with pytest.raises(UnsupportedError, match="keys of 8 and values of 4 numbers"):
        attention(SimpleNamespace(), query, key, value[..., :4], None, packed_layout=layout)


def test_a_call_without_a_layout_says_who_should_call():
    with pytest.raises(BackendError, match=f"{NAME}.*without a packed layout.*PolicyModule"):
        call(packed_layout=None)
