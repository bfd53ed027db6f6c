"""What was computed: the counts against hand computations and PaLM's formula, totals, utilisation,
and the table of devices."""

import numpy as np
import pytest
from contract_strategies import batches
from hypothesis import given
from hypothesis import strategies as st

from remote_rl import Batch, Devices, Work, mfu
from remote_rl.types import peaks
from remote_rl.types.flops import DecoderShape, packed_tokens, seen_pairs

# a prompt of three tokens and its responses of two and three: its own three positions, one of the
# first response and two of the second
SHARED = Batch(
    prompts=[[1, 2, 3]], prompt_index=[0, 0], responses=[[4, 5], [6, 7, 8]], temperature=1
)


# -- the formula ---------------------------------------------------------------------------------


def test_a_whole_decoder_by_hand():
    # hidden 8, two layers: q 8 x 8, k and v 8 x 4, o 8 x 8, three matrices 8 x 16; vocabulary 10
    layer = 64 + 32 + 32 + 64 + 3 * 128
    shape = DecoderShape(trained=2 * layer, head=80, attention_width=8, windows=(None, None))
    positions, predicted = 3 + 1 + 2, 5
    # the prompt sees 1, 2, 3; the first response 4; the second one 4 and 5
    pairs = 1 + 2 + 3 + 4 + 4 + 5
    forward = 2 * (2 * layer) * positions + 2 * 80 * predicted + 2 * (4 * 8 * pairs)
    assert forward == 15840
    assert shape.forward(SHARED) == forward
    assert shape.backward(SHARED) == 2 * forward


def test_adapters_on_a_frozen_decoder_with_a_window_by_hand():
    shape = DecoderShape(
        trained=10, frozen=100, head=20, head_trained=False, attention_width=4, windows=(None, 2)
    )
    # in the second layer the prompt's positions see 1, 2, 2, and the responses' 2 each
    attention = 4 * 4 * ((1 + 2 + 3 + 4 + 4 + 5) + (1 + 2 + 2 + 2 + 2 + 2))
    assert shape.forward(SHARED) == 2 * 110 * 6 + 2 * 20 * 5 + attention == 2000
    # what is frozen has no gradient by its weight, only by its input
    assert shape.backward(SHARED) == 2 * (2 * 10 + 100) * 6 + 2 * 20 * 5 + 2 * attention == 2600


def test_one_long_text_is_palms_formula_with_the_pairs_that_are_seen():
    # the layers of Qwen3-1.7B: hidden 2048, 28 layers, 16 heads and 8 of keys of 128, 6144 inside
    layers, hidden, heads, size, inner, vocabulary = 28, 2048, 16, 128, 6144, 151936
    layer = 2 * hidden * heads * size + 2 * hidden * 8 * size + 3 * hidden * inner
    assert layers * layer == 1_409_286_144  # the "1.4B without embedding" of its model card
    shape = DecoderShape(
        trained=layers * layer,
        head=hidden * vocabulary,
        attention_width=heads * size,
        windows=(None,) * layers,
    )
    length = 4096
    text = Batch(
        prompts=[[0]], prompt_index=[0], responses=[np.zeros(length, np.int32)], temperature=1
    )
    weights = layers * layer + hidden * vocabulary
    palm = (6 * weights + 12 * layers * heads * size * length) * length
    unseen = 12 * layers * heads * size * length * (length - 1) / 2
    assert shape.forward(text) + shape.backward(text) == palm - unseen


@given(batch=batches(), window=st.one_of(st.none(), st.integers(1, 6)))
def test_tokens_and_pairs_are_those_of_a_plain_count(batch, window):
    used = {int(batch.prompt_index[row]) for row in range(len(batch)) if len(batch.responses[row])}
    texts = [(0, len(batch.prompts[number])) for number in used]
    for row in range(len(batch)):
        start = len(batch.prompts[int(batch.prompt_index[row])])
        texts.append((start, start + max(len(batch.responses[row]) - 1, 0)))
    positions = [place for start, stop in texts for place in range(start, stop)]
    assert packed_tokens(batch) == len(positions)
    assert seen_pairs(batch, window) == sum(
        place + 1 if window is None else min(place + 1, window) for place in positions
    )


@given(batch=batches(), order=st.randoms())
def test_counts_do_not_depend_on_the_order_and_add_up_over_prompts(batch, order):
    shape = DecoderShape(
        trained=7, frozen=3, head=5, head_trained=False, attention_width=2, windows=(None, 3)
    )
    rows = list(range(len(batch)))
    order.shuffle(rows)
    for count in (shape.forward, shape.backward, packed_tokens, seen_pairs):
        assert count(batch.select(rows)) == count(batch)
        parts = [
            batch.select(np.flatnonzero(batch.prompt_index == number))
            for number in range(len(batch.prompts))
        ]
        assert sum(map(count, parts)) == count(batch)


def test_rows_of_a_batch_are_counted_without_the_others():
    assert packed_tokens(SHARED, np.array([1])) == 3 + 2
    assert packed_tokens(SHARED, np.array([], np.int64)) == 0


# -- work ----------------------------------------------------------------------------------------

WORKS = [Work(tokens=3, flops=8.0, seconds=0.5), Work(tokens=0, flops=0, seconds=0.25)]
UNKNOWN = Work(tokens=2, flops=None, seconds=1.0, reason="its experts are not counted")


def test_works_add_up():
    total = Work.total(WORKS)
    assert (total.tokens, total.flops, total.seconds, total.reason) == (3, 8.0, 0.75, None)
    partly = Work.total([*WORKS, UNKNOWN])
    assert (partly.tokens, partly.flops, partly.seconds) == (5, None, 1.75)
    assert partly.reason == "its experts are not counted"
    assert Work.total([*WORKS, None]) is None
    assert Work.total([]) is None


def test_measured_time_makes_no_two_works_differ():
    assert Work(tokens=1, flops=2.0, seconds=0.1) == Work(tokens=1, flops=2.0, seconds=0.2)
    assert Work(tokens=1, flops=2.0, seconds=0.1) != Work(tokens=2, flops=2.0, seconds=0.1)


# -- utilisation ---------------------------------------------------------------------------------

FOUR = Devices(kind="x", count=4, total=6, dtype="bfloat16", peak_flops=8.0)
NO_PEAK = Devices(kind="x", count=1, dtype="bfloat16", peak_flops=None, reason="a new kind")


def test_utilisation_is_of_the_devices_that_train():
    # 8 operations in 0.75 s, of 4 x 8 in a second
    assert mfu(Work.total(WORKS), FOUR) == (8 / (0.75 * 32), None)


@pytest.mark.parametrize(
    ("work", "devices", "reason"),
    [
        (None, FOUR, "does not count what it computes"),
        (UNKNOWN, FOUR, "its experts are not counted"),
        (WORKS[0], None, "does not say which devices"),
        (WORKS[0], NO_PEAK, "a new kind"),
        (Work(tokens=1, flops=1.0, seconds=0), FOUR, "no time was measured"),
    ],
)
def test_an_unknown_utilisation_has_a_reason(work, devices, reason):
    value, why = mfu(work, devices)
    assert value is None
    assert reason in why


@pytest.mark.parametrize(
    ("kind", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA A10", "bfloat16", 125e12),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA H100 NVL", "float16", 835e12),
        ("NVIDIA H200", "bfloat16", 989e12),
        ("NVIDIA H200", "float32", 67e12),
        ("NVIDIA B200", "bfloat16", 2250e12),
        ("NVIDIA GB200", "bfloat16", 2500e12),
        ("AMD Instinct MI300X", "bfloat16", 1307e12),
    ],
)
def test_known_devices_have_their_makers_peak(kind, dtype, peak):
    known = peaks.devices(kind, 8, dtype)
    assert (known.peak_flops, known.reason, known.count, known.total) == (peak, None, 8, 8)


@pytest.mark.parametrize(
    ("kind", "dtype", "reason"),
    [
        ("cpu", "float32", "computes on CPUs"),
        ("NVIDIA GeForce RTX 4090", "bfloat16", "'NVIDIA GeForce RTX 4090' is not known"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", "is a slice of a GPU"),
        ("NVIDIA H200", "float8_e4m3fn", "for float8_e4m3fn is not known"),
    ],
)
def test_other_devices_have_a_reason(kind, dtype, reason):
    unknown = peaks.devices(kind, 1, dtype, total=3)
    assert unknown.peak_flops is None
    assert reason in unknown.reason
    assert unknown.total == 3
