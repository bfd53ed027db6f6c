"""Ragged: what it takes, refuses, shares and gives back."""

import pickle

import numpy as np
import pytest
from contract_strategies import floats, picks, rows
from hypothesis import given
from hypothesis import strategies as st

from remote_rl.errors import InvalidRequestError
from remote_rl.types import Ragged


def ragged_of(lists, dtype=np.int32):
    return Ragged.from_rows(lists, dtype)


# -- building -----------------------------------------------------------------------------------


def test_whole_python_numbers_become_int32_and_others_float32():
    assert Ragged.from_rows([[1, 2], [3]]).dtype == np.int32
    assert Ragged.from_rows([[0.5], [1]]).dtype == np.float32
    assert Ragged.from_rows([]).dtype == np.int32


def test_python_numbers_beyond_int32_stay_whole():
    assert Ragged.from_rows([[2**40]]).to_rows() == [[2**40]]


def test_arrays_among_the_rows_keep_their_dtype():
    wide = [np.array([0.1], np.float64), np.array([], np.float64)]
    assert Ragged.from_rows(wide).dtype == np.float64
    assert Ragged.from_rows(wide).values[0] == 0.1


def test_a_wanted_float64_is_not_rounded_on_the_way():
    assert Ragged.from_rows([[0.1]], np.float64).values[0] == 0.1


@given(rows)
def test_rows_of_any_form_give_the_same(lists):
    expected = ragged_of(lists)
    assert expected.to_rows() == lists
    assert Ragged.of(lists, np.int32) == expected
    assert Ragged.of([np.array(row, np.int64) for row in lists], np.int32) == expected
    assert Ragged.of((tuple(row) for row in lists), np.int32) == expected
    assert Ragged.of(expected, np.int32) is expected


def test_object_array_of_lists_is_rows():
    array = np.empty(2, object)
    array[0], array[1] = [1, 2, 3], [4]
    assert Ragged.of(array, np.int32).to_rows() == [[1, 2, 3], [4]]


def test_dense_array_is_rows_of_its_width():
    assert Ragged.of(np.arange(6).reshape(2, 3)).to_rows() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([[1, 1, 0], [1, 0, 0]], [[1, 2], [4]]),
        ([[0, 1, 1], [0, 0, 1]], [[2, 3], [6]]),
        ([[1, 0, 1], [0, 0, 0]], [[1, 3], []]),
        ([[1, 1, 1], [1, 1, 1]], [[1, 2, 3], [4, 5, 6]]),
    ],
    ids=["right", "left", "holes", "none"],
)
def test_from_padded_keeps_what_the_mask_counts(mask, expected):
    dense = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    assert Ragged.from_padded(dense, np.array(mask)).to_rows() == expected
    assert Ragged.from_padded(dense, np.array(mask, bool)).to_rows() == expected


@given(rows, st.sampled_from(["left", "right"]), st.integers(0, 3))
def test_padding_round_trips_on_both_sides(lists, side, extra):
    ragged = ragged_of(lists)
    width = max(map(len, lists), default=0) + extra
    dense = ragged.to_padded(fill=-1, width=width, side=side)
    mask = ragged.padding_mask(width, side)
    assert dense.shape == (len(lists), width)
    assert (dense[~mask] == -1).all()
    assert Ragged.from_padded(dense, mask) == ragged
    for row, values in enumerate(lists):
        padding = [-1] * (width - len(values))
        assert dense[row].tolist() == (padding + values if side == "left" else values + padding)


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message", "details"),
    [
        ("text", "Batch.x must be token ids, not text; tokenise", {"field": "x"}),
        (["text"], "row 0 of Batch.x is text", {"field": "x", "row": 0}),
        ([[1], b"ab"], "row 1 of Batch.x is text", {"field": "x", "row": 1}),
        ([["a"]], "row 0 of Batch.x must be a flat sequence", {"field": "x", "row": 0}),
        ([[1], 2], "row 1 of Batch.x must be a flat sequence", {"field": "x", "row": 1}),
        ([[[1]], [2]], "row 0 of Batch.x must be a flat", {"field": "x", "row": 0}),
        ([[1], [[1], [2, 3]]], "row 1 of Batch.x is not a flat", {"field": "x", "row": 1}),
        (np.zeros((1, 2, 3)), "row 0 of Batch.x must be a flat", {"field": "x", "row": 0}),
        (5, "Batch.x must be rows of numbers, not int", {"field": "x"}),
        (None, "Batch.x must be rows of numbers, not NoneType", {"field": "x"}),
        (np.float32(1), "Batch.x must be rows of numbers", {"field": "x"}),
        (
            [[1], [2, 0.5]],
            "token 1 of row 1 of Batch.x is 0.5, not a whole number",
            {"field": "x", "row": 1, "token": 1},
        ),
        (
            np.array([[0.0, np.nan]]),
            "token 1 of row 0 of Batch.x is nan, not a whole number",
            {"field": "x", "row": 0, "token": 1},
        ),
        (
            [[], [1, 2**31]],
            "token 1 of row 1 of Batch.x is 2147483648, outside int32",
            {"field": "x", "row": 1, "token": 1},
        ),
        (
            [np.array([2.0**31], np.float32)],
            "token 0 of row 0 of Batch.x is 2147483648.0, outside int32",
            {"field": "x", "row": 0, "token": 0},
        ),
        (
            Ragged([1, -(2**40)], [0, 0, 2]),
            f"token 1 of row 1 of Batch.x is {-(2**40)}, outside int32",
            {"field": "x", "row": 1, "token": 1},
        ),
    ],
)
def test_what_token_ids_can_not_be_is_refused_by_place(data, message, details):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        Ragged.of(data, np.int32, "Batch.x")
    assert caught.value.details == details


def test_a_float_beyond_float32_is_refused_and_infinity_is_not_made():
    with pytest.raises(InvalidRequestError, match=r"token 0 of row 1 .* outside float32"):
        Ragged.of([[1.0], [1e300]], np.float32)
    assert np.isinf(Ragged.of([[np.inf]], np.float32).values).all()


@pytest.mark.parametrize(
    ("values", "offsets", "message"),
    [
        ([[1, 2]], [0, 2], "one-dimensional"),
        ([1, 2], [[0, 2]], "one-dimensional"),
        (["a"], [0, 1], "must hold numbers"),
        ([1, 2], [0, 2, 1, 2], "falls at row 1"),
        ([1, 2], [0, 1], "run from 0 to the number of values"),
        ([1, 2], [1, 2], "run from 0"),
        ([1, 2], [], "run from 0"),
        ([1, 2], [0, 0.5, 2], "entry 1 of Ragged.offsets is 0.5, not a whole number"),
        ([[1], [2, 3]], [0, 1], "rows of what was given differ in length"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(values, offsets, message):
    with pytest.raises(InvalidRequestError, match=message):
        Ragged(values, offsets)


def test_other_refusals_say_what_to_do():
    ragged = ragged_of([[1, 2, 3]])
    with pytest.raises(InvalidRequestError, match="width 2 is less than the longest row, 3"):
        ragged.to_padded(width=2)
    with pytest.raises(InvalidRequestError, match="side must be 'left' or 'right'"):
        ragged.to_padded(side="up")
    with pytest.raises(InvalidRequestError, match="one shape"):
        Ragged.from_padded(np.zeros((1, 2)), np.zeros((1, 3)))
    with pytest.raises(InvalidRequestError, match="use from_padded"):
        Ragged.from_torch(np.zeros((1, 2)))
    with pytest.raises(InvalidRequestError, match="at least one part"):
        Ragged.concat([])
    with pytest.raises(InvalidRequestError, match=r"must lie in 0\.\.0"):
        ragged.select([1])
    with pytest.raises(InvalidRequestError, match="mask of rows"):
        ragged.select([True, False])
    with pytest.raises(IndexError, match="row 1 of a Ragged with 1 rows"):
        ragged[1]


# -- sharing ------------------------------------------------------------------------------------


def test_nothing_is_copied_where_the_layout_allows():
    values, offsets = np.arange(6, dtype=np.int32), np.array([0, 2, 6])
    ragged = Ragged(values, offsets)
    assert ragged.values is values
    assert ragged.offsets is offsets
    assert Ragged.of(ragged, np.int32) is ragged
    dense = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert np.shares_memory(Ragged.of(dense, np.int32).values, dense)
    assert np.shares_memory(Ragged.from_padded(dense, np.ones((2, 3))).values, dense)
    assert np.shares_memory(ragged[1], values)
    assert np.shares_memory(ragged[1:2].values, values)
    assert np.shares_memory(ragged[0:1].offsets, offsets)
    assert ragged.with_values(values.astype(np.float32)).offsets is offsets
    assert Ragged.concat([ragged]) is ragged


# -- against lists ------------------------------------------------------------------------------

bounds = st.none() | st.integers(-8, 8)


@given(rows, bounds, bounds, st.none() | st.integers(-3, 3).filter(bool))
def test_slices_are_those_of_a_list(lists, start, stop, step):
    assert ragged_of(lists)[start:stop:step].to_rows() == lists[start:stop:step]


@given(rows, st.data())
def test_select_is_a_list_of_picked_rows(lists, data):
    ragged = ragged_of(lists)
    picked = data.draw(picks(len(lists)))
    assert ragged.select(picked).to_rows() == [lists[each] for each in picked]
    mask = data.draw(st.lists(st.booleans(), min_size=len(lists), max_size=len(lists)))
    kept = [row for row, keep in zip(lists, mask, strict=True) if keep]
    assert ragged.select(np.array(mask, bool)).to_rows() == kept


@given(st.lists(rows, min_size=1, max_size=4))
def test_concat_is_list_addition(parts):
    joined = Ragged.concat(ragged_of(part) for part in parts)
    assert joined.to_rows() == [row for part in parts for row in part]


@given(rows)
def test_reading_is_that_of_a_list(lists):
    ragged = ragged_of(lists)
    assert len(ragged) == len(lists)
    assert ragged.lengths.tolist() == [len(row) for row in lists]
    assert [row.tolist() for row in ragged] == lists
    assert ragged.row_numbers().tolist() == [
        number for number, row in enumerate(lists) for _ in row
    ]
    for index in range(-len(lists), len(lists)):
        assert ragged[index].tolist() == lists[index]
    assert ragged.nbytes == ragged.values.nbytes + ragged.offsets.nbytes


@given(rows, rows)
def test_equality_and_pickling(left, right):
    one, other = ragged_of(left), ragged_of(right)
    assert (one == other) == (left == right)
    assert pickle.loads(pickle.dumps(one)) == one
    assert one != left


@given(st.lists(st.lists(floats, max_size=4), max_size=4))
def test_float_rows_come_back_bit_for_bit(lists):
    assert Ragged.of(lists, np.float32).to_rows() == lists


def test_repr_is_short_and_hashing_is_refused():
    ragged = ragged_of([[1, 2], [3]])
    assert repr(ragged) == "Ragged(2 rows, 3 int32, [2, 1])"
    assert len(repr(ragged_of([[1]] * 1000))) < 80
    with pytest.raises(TypeError, match="unhashable"):
        hash(ragged)
