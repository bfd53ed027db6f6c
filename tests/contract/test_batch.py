"""Batch: refusals by field and row, defaults, and the ways to build and cut one."""

import pickle

import attrs
import numpy as np
import pytest
from contract_strategies import batches, picks, two_groups
from hypothesis import given
from hypothesis import strategies as st

from remote_rl.errors import InvalidRequestError, UnknownNameError
from remote_rl.types import Batch, Ragged
from remote_rl.types.batch_fields import PER_TOKEN_FLOATS

TWO_ROWS = {
    "prompts": [[1, 2], [3]],
    "prompt_index": [0, 1],
    "responses": [[4, 5], [6]],
    "temperature": 1.0,
}


def batch_of(**changes):
    return Batch(**{**TWO_ROWS, **changes})


def prompt_rows(batch):
    return [batch.prompts[index].tolist() for index in batch.prompt_index]


def contents(batch):
    """All rows of all columns with each row's own prompt: equal up to the sharing of prompts."""
    columns = [prompt_rows(batch)]
    for name in ("responses", "mask", *PER_TOKEN_FLOATS):
        field = getattr(batch, name)
        columns.append(None if field is None else field.to_rows())
    for name in ("temperature", "policy_version"):
        column = getattr(batch, name)
        columns.append(None if column is None else column.tolist())
    return columns, {name: column.tolist() for name, column in batch.extras.items()}


# -- construction -------------------------------------------------------------------------------


def test_dtypes_and_defaults():
    batch = batch_of()
    assert batch.prompts.dtype == batch.responses.dtype == batch.prompt_index.dtype == np.int32
    assert batch.temperature.dtype == np.float32
    assert batch.temperature.tolist() == [1.0, 1.0]
    assert batch.mask.dtype == np.uint8
    assert batch.mask.to_rows() == [[1, 1], [1]]
    assert len(batch) == 2
    assert batch.tokens == 6
    assert all(getattr(batch, name) is None for name in PER_TOKEN_FLOATS)
    assert batch.policy_version is None
    assert batch.extras == {}


def test_per_token_fields_share_the_offsets_of_the_responses():
    batch = batch_of(advantages=[[1, 2], [3]], mask=[[1, 0], [1]])
    assert batch.advantages.offsets is batch.responses.offsets
    assert batch.mask.offsets is batch.responses.offsets


def test_arrays_of_the_right_dtype_are_not_copied():
    values = np.array([1, 2, 3], np.float32)
    batch = batch_of(advantages=Ragged(values, [0, 2, 3]))
    assert batch.advantages.values is values


def test_scalar_temperature_is_broadcast_and_zero_counts_as_one():
    assert batch_of(temperature=0.5).temperature.tolist() == [0.5, 0.5]
    assert batch_of(temperature=0).temperature.tolist() == [1.0, 1.0]
    assert batch_of(temperature=[0.0, 0.25]).temperature.tolist() == [1.0, 0.25]


def test_empty_responses_and_empty_batches_are_legal():
    batch = batch_of(responses=[[], [6]], advantages=[[], [2.0]])
    assert batch.mask.to_rows() == [[], [1]]
    assert batch.advantages.to_rows() == [[], [2.0]]
    nothing = Batch(prompts=[], prompt_index=[], responses=[], temperature=1.0)
    assert len(nothing) == 0
    assert nothing.temperature.shape == (0,)


@pytest.mark.parametrize(
    ("changes", "message", "field", "row"),
    [
        ({"prompt_index": [0]}, "Batch.prompt_index has 1 entries for 2", "prompt_index", None),
        ({"prompt_index": [0, 2]}, r"prompt_index\[1\] is 2, but there are 2", "prompt_index", 1),
        ({"prompt_index": [-1, 0]}, r"prompt_index\[0\] is -1", "prompt_index", 0),
        (
            {"prompt_index": [0, 0.5]},
            "entry 1 of Batch.prompt_index is 0.5, not a whole number",
            "prompt_index",
            1,
        ),
        ({"temperature": [1.0, 1.0, 1.0]}, "temperature has 3 entries", "temperature", None),
        ({"temperature": [1.0, np.nan]}, r"temperature\[1\] is nan", "temperature", 1),
        ({"temperature": [-1.0, 1.0]}, r"temperature\[0\] is -1", "temperature", 0),
        ({"temperature": np.inf}, r"temperature\[0\] is inf", "temperature", 0),
        ({"temperature": None}, "Batch.temperature must hold numbers", "temperature", None),
        ({"temperature": [[1], [1, 2]]}, "Batch.temperature must be an array", "temperature", None),
        ({"policy_version": [1]}, "policy_version has 1 entries", "policy_version", None),
        ({"prompts": [[1], []]}, "prompt 1 is empty", "prompts", 1),
        ({"prompts": [[1], [2, -3]]}, "token 1 of row 1 of Batch.prompts is neg", "prompts", 1),
        ({"prompts": "text"}, "Batch.prompts must be token ids, not text", "prompts", None),
        ({"prompts": [[1], [2**31]]}, "token 0 of row 1 of Batch.prompts is", "prompts", 1),
        ({"responses": [[4, -5], [6]]}, "token 1 of row 0 of Batch.responses", "responses", 0),
        ({"responses": [[4, 5], "text"]}, "row 1 of Batch.responses is text", "responses", 1),
        ({"mask": [[1, 1]]}, "Batch.mask has 1 rows for 2 responses", "mask", None),
        ({"mask": [[1, 1], [1, 1]]}, "row 1 of Batch.mask has 2 entries for a", "mask", 1),
        ({"mask": [[1, 2], [1]]}, "token 1 of row 0 of Batch.mask is neither 0 nor 1", "mask", 0),
        ({"mask": [[1, 1], [-1]]}, "token 0 of row 1 of Batch.mask is -1, outside", "mask", 1),
        ({"mask": [[1, 1], [0.5]]}, "token 0 of row 1 of Batch.mask is 0.5, not", "mask", 1),
        ({"extras": {"uid": [1]}}, r"Batch.extras\['uid'\] must have one entry", "extras", None),
        ({"extras": {"uid": 1}}, r"Batch.extras\['uid'\] must have one entry", "extras", None),
        ({"extras": {"uid": [[1], [1, 2]]}}, r"extras\['uid'\] has entries of", "extras", None),
        ({"extras": [1, 2]}, "Batch.extras must map names", "extras", None),
        ({"prompt_parent": [0]}, r"Batch.prompt_parent=\[0\] is reserved", "prompt_parent", None),
        ({"attachments": np.ones(2)}, "Batch.attachments=.* is reserved", "attachments", None),
    ],
)
def test_every_refusal_names_field_and_row(changes, message, field, row):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        batch_of(**changes)
    assert caught.value.details["field"] == field
    assert caught.value.details.get("row") == row


@pytest.mark.parametrize("name", PER_TOKEN_FLOATS)
@pytest.mark.parametrize(
    ("value", "message", "row"),
    [
        ([[1.0, 2.0]], "has 1 rows for 2 responses", None),
        ([[1.0], [2.0]], "row 0 of Batch.{name} has 1 entries for a response of 2 tokens", 0),
        ([[1.0, 2.0], [np.nan]], "token 0 of row 1 of Batch.{name} is not finite: nan", 1),
        ([[1.0, -np.inf], [1.0]], "token 1 of row 0 of Batch.{name} is not finite: -inf", 0),
        ([[np.inf, -np.inf], [1.0]], "token 0 of row 0 of Batch.{name} is not finite: inf", 0),
        ([[1.0, 1e300], [1.0]], r"token 1 of row 0 of Batch.{name} is 1e\+300, outside", 0),
        ([["a", "b"], ["c"]], "row 0 of Batch.{name} must be a flat sequence of numbers", 0),
    ],
)
def test_every_per_token_field_is_checked_alike(name, value, message, row):
    with pytest.raises(InvalidRequestError, match=message.format(name=name)) as caught:
        batch_of(**{name: value})
    assert caught.value.details["field"] == name
    assert caught.value.details.get("row") == row


def test_unknown_and_missing_fields_are_named():
    with pytest.raises(UnknownNameError, match="did you mean 'advantages'"):
        batch_of(advantage=[[1, 2], [3]])
    with pytest.raises(InvalidRequestError, match="Batch needs 'temperature'; pass temperature="):
        Batch(prompts=[[1]], prompt_index=[0], responses=[[1]])


# -- from_groups --------------------------------------------------------------------------------


def test_from_groups_takes_everything_from_the_samples():
    batch = Batch.from_groups(two_groups(), advantages=[1, 2, 3, 4], extras={"uid": list("abcd")})
    assert batch.prompts.to_rows() == [[1, 2], [3]]
    assert batch.prompt_index.tolist() == [0, 0, 1, 1]
    assert batch.responses.to_rows() == [[10, 11, 12], [13], [14, 15], []]
    assert batch.mask.to_rows() == [[1, 1, 1], [1], [1, 1], []]
    assert batch.temperature.tolist() == pytest.approx([0.7, 0.7, 1.0, 1.0])
    assert batch.policy_version.tolist() == [1, 1, 2, 2]
    assert batch.advantages.to_rows() == [[1, 1, 1], [2], [3, 3], []]
    assert batch.old_logprobs.to_rows() == [[-0.5] * 3, [-0.5], [-0.5] * 2, []]
    assert batch.sampling_logprobs == batch.old_logprobs
    assert batch.extras["uid"].tolist() == list("abcd")


@pytest.mark.parametrize(
    "advantages",
    [
        [[1, 1, 1], [2], [3, 3], []],
        Ragged.from_rows([[1, 1, 1], [2], [3, 3], []], np.float32),
        np.array([1, 2, 3, 4]),
        (each for each in (1.0, 2.0, 3.0, 4.0)),
        [np.float64(1), 2, np.int64(3), np.array(4)],
    ],
    ids=["rows", "ragged", "array", "generator", "scalars"],
)
def test_advantages_come_one_a_response_or_one_a_token(advantages):
    batch = Batch.from_groups(two_groups(), advantages=advantages)
    assert batch.advantages.to_rows() == [[1, 1, 1], [2], [3, 3], []]
    assert batch.advantages.dtype == np.float32


def test_from_groups_without_advantages_or_logprobs_leaves_them_out():
    batch = Batch.from_groups(two_groups(logprobs=False))
    assert batch.advantages is batch.old_logprobs is batch.sampling_logprobs is None


@pytest.mark.parametrize(
    ("advantages", "message"),
    [
        ([1, 2, 3], "Batch.advantages has 3 values for 4 responses"),
        ([np.nan, 2, 3, 4], "token 0 of row 0 of Batch.advantages is not finite"),
        ([[1, 1, 1], [2], [3], []], "row 2 of Batch.advantages has 1 entries"),
        (0.5, "Batch.advantages must be rows of numbers, not float"),
        (np.float32(0.5), "Batch.advantages must be rows of numbers"),
        ("abcd", "Batch.advantages must be"),
        ([1, [2], 3, 4], "row 0 of Batch.advantages"),
    ],
)
def test_wrong_advantages_are_refused_by_name(advantages, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        Batch.from_groups(two_groups(), advantages=advantages)
    assert caught.value.details["field"] == "advantages"


def test_from_no_groups_is_an_empty_batch():
    assert len(Batch.from_groups([])) == 0


# -- cutting and joining ------------------------------------------------------------------------


@given(batches(), st.data())
def test_select_picks_rows_of_every_column(batch, data):
    picked = data.draw(picks(len(batch)))
    columns, extras = contents(batch)
    expected = [None if column is None else [column[i] for i in picked] for column in columns]
    result = batch.select(picked)
    assert contents(result)[0] == expected
    assert contents(result)[1] == {n: [column[i] for i in picked] for n, column in extras.items()}
    assert len(result.prompts) == len(set(batch.prompt_index[picked].tolist() if picked else []))


@given(batches(min_rows=1), st.integers(1, 4))
def test_concat_undoes_split_up_to_prompt_sharing(batch, size):
    pieces = batch.split(size)
    assert [len(piece) for piece in pieces[:-1]] == [size] * (len(pieces) - 1)
    assert 1 <= len(pieces[-1]) <= size
    joined = Batch.concat(pieces)
    assert contents(joined) == contents(batch)
    needed = batch.select(np.arange(len(batch)))  # without the prompts that no row continues
    assert len(joined.share_prompts().prompts) == len(needed.share_prompts().prompts)


@given(st.lists(batches(), min_size=1, max_size=3))
def test_split_undoes_concat(parts):
    bare = [each.only(()) for each in parts]
    pieces = Batch.concat(bare).split([len(each) for each in bare])
    assert [contents(piece) for piece in pieces] == [contents(each) for each in bare]


def test_split_by_sizes_and_its_refusals():
    batch = batch_of()
    assert [len(piece) for piece in batch.split([0, 2])] == [0, 2]
    assert [len(piece) for piece in batch.split(np.int64(1))] == [1, 1]
    with pytest.raises(InvalidRequestError, match=r"sizes \[1\] do not add up to 2 rows"):
        batch.split([1])
    with pytest.raises(InvalidRequestError, match="do not add up"):
        batch.split([3, -1])
    with pytest.raises(InvalidRequestError, match="at least 1 row, not 0"):
        batch.split(0)


def test_pieces_keep_their_prompts_shared():
    batch = Batch.from_groups(two_groups())
    first, second = batch.split(2)
    assert first.prompts.to_rows() == [[1, 2]]
    assert first.prompt_index.tolist() == [0, 0]
    assert second.prompts.to_rows() == [[3]]


def test_sharing_equal_prompts_is_explicit():
    groups = two_groups()
    twice = Batch.concat([Batch.from_groups(groups), Batch.from_groups(groups)])
    assert len(twice.prompts) == 4
    shared = twice.share_prompts()
    assert shared.prompts.to_rows() == [[1, 2], [3]]
    assert shared.prompt_index.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert contents(shared) == contents(twice)


@given(batches())
def test_sharing_prompts_changes_nothing_else_and_once_is_enough(batch):
    shared = batch.share_prompts()
    assert contents(shared) == contents(batch)
    assert shared.share_prompts() == shared
    rows = shared.prompts.to_rows()
    assert len(rows) == len({tuple(row) for row in rows})


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        ({"advantages": [[1, 2], [3]]}, {}, "advantages in every batch or in none; batch 1"),
        ({}, {"policy_version": [1, 2]}, "policy_version in every batch or in none; batch 0"),
        ({"extras": {"a": [1, 2]}}, {}, r"extras\['a'\] in every batch"),
        ({}, {"extras": {"a": [1, 2]}}, r"extras\['a'\] in every batch; batch 1 has it"),
        (
            {"extras": {"a": np.ones((2, 1))}},
            {"extras": {"a": np.ones((2, 3))}},
            r"extras\['a'\] .* entries of one shape",
        ),
    ],
)
def test_batches_of_different_fields_are_not_joined(left, right, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        Batch.concat([batch_of(**left), batch_of(**right)])
    assert caught.value.details["field"] in ("advantages", "policy_version", "extras")


def test_concat_of_nothing_is_refused():
    with pytest.raises(InvalidRequestError, match="at least one batch"):
        Batch.concat([])


# -- changing -----------------------------------------------------------------------------------


def test_replace_takes_one_value_a_response():
    batch = batch_of().replace(advantages=[1, -1], temperature=0.5)
    assert batch.advantages.to_rows() == [[1, 1], [-1]]
    assert batch.temperature.tolist() == [0.5, 0.5]
    assert batch.replace(advantages=None).advantages is None


def test_replace_fits_values_to_the_new_responses():
    batch = batch_of().replace(responses=[[7], [8, 9]], mask=None, advantages=[1, 2])
    assert batch.advantages.to_rows() == [[1], [2, 2]]
    assert batch.mask.to_rows() == [[1], [1, 1]]


@pytest.mark.parametrize("name", ["advantages", "importance_weights"])
def test_one_value_a_response_is_spread_wherever_a_batch_is_made(name):
    tokens = {"prompts": [[1]], "prompt_index": [0, 0], "responses": [[4, 5], [6]]}
    batch = Batch(**tokens, temperature=1.0, **{name: [0.5, -2]})
    assert getattr(batch, name).to_rows() == [[0.5, 0.5], [-2]]
    assert getattr(batch.replace(**{name: np.array([3, 4])}), name).to_rows() == [[3, 3], [4]]
    assert getattr(batch.replace(**{name: [[1, 2], [3]]}), name).to_rows() == [[1, 2], [3]]


def test_staleness_counts_versions_and_needs_them():
    batch = batch_of().replace(policy_version=[3, 5])
    assert batch.staleness(6).tolist() == [3, 1]
    with pytest.raises(InvalidRequestError, match="no policy_version"):
        batch_of().replace(policy_version=None).staleness(6)


def test_replace_refuses_what_the_constructor_would():
    with pytest.raises(UnknownNameError, match="did you mean 'advantages'"):
        batch_of().replace(advantges=[1, 2])
    with pytest.raises(InvalidRequestError, match=r"Batch.advantages has 3 values for 2"):
        batch_of().replace(advantages=[1, 2, 3])
    with pytest.raises(InvalidRequestError, match=r"row 0 of Batch.old_logprobs must be a flat"):
        batch_of().replace(old_logprobs=[1, 2])  # one a response means nothing here
    with pytest.raises(InvalidRequestError, match=r"row 0 of Batch.mask has 2 entries"):
        batch_of().replace(responses=[[7], [8]])


@given(batches(), st.sets(st.sampled_from(PER_TOKEN_FLOATS)))
def test_only_keeps_the_tokens_and_the_named_fields(batch, names):
    sent = batch.only(names)
    assert (sent.prompts, sent.responses, sent.mask) == (
        batch.prompts,
        batch.responses,
        batch.mask,
    )
    assert sent.policy_version is None
    assert sent.extras == {}
    for name in PER_TOKEN_FLOATS:
        assert getattr(sent, name) == (getattr(batch, name) if name in names else None)


@given(batches())
def test_pickle_and_equality(batch):
    assert pickle.loads(pickle.dumps(batch)) == batch
    if len(batch):
        assert batch.replace(temperature=0.125) != batch
    assert batch != "batch"


def test_repr_says_what_is_inside_and_no_field_can_be_set():
    batch = batch_of(advantages=[[1, 2], [3]], extras={"uid": [1, 2]}, mask=[[0, 1], [1]])
    assert repr(batch) == (
        "Batch(2 responses over 2 prompts, 6 tokens, 2 counted, with advantages, extras uid)"
    )
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        batch.mask = None
    with pytest.raises(TypeError, match="unhashable"):
        hash(batch)


@pytest.mark.parametrize("size", [1e15, 1e30, 3e38, -3e38])
def test_floats_of_any_finite_size_are_taken_and_nothing_else_beside_them(size):
    rows = [[size, size], [-size]]
    fields = {
        "prompts": [[1]],
        "prompt_index": [0, 0],
        "responses": [[1, 2], [3]],
        "temperature": 1.0,
    }
    assert Batch(advantages=rows, **fields).advantages.values.max() == np.float32(abs(size))
    for wrong in (np.nan, np.inf, -np.inf):
        with pytest.raises(InvalidRequestError, match=r"token 0 of row 1 of Batch\.advantages"):
            Batch(advantages=[[size, size], [wrong]], **fields)


def test_what_is_sent_is_the_same_memory_and_not_looked_at_again():
    batch = Batch(
        prompts=[[1]],
        prompt_index=[0],
        responses=[[1, 2]],
        temperature=1.0,
        advantages=[[1.0, 2.0]],
        ref_logprobs=[[1.0, 2.0]],
        policy_version=[3],
        extras={"uid": ["a"]},
    )
    sent = batch.only({"advantages"})
    assert sent.responses is batch.responses
    assert sent.advantages is batch.advantages
    assert (sent.ref_logprobs, sent.policy_version, sent.extras) == (None, None, {})
    assert batch.ref_logprobs is not None
    assert list(batch.extras) == ["uid"]
