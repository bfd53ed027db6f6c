"""SamplingParams, Sample, Group and Generation: checks, freezing, pickling, reprs."""

import pickle

import attrs
import numpy as np
import pytest
from contract_strategies import sample, two_groups

from remote_rl.errors import InvalidRequestError, UnknownNameError
from remote_rl.types import FINISH_REASONS, Generation, Group, Ragged, Sample, SamplingParams

# -- SamplingParams -----------------------------------------------------------------------------


def test_defaults_are_plain_sampling_with_logprobs():
    params = SamplingParams(max_tokens=4)
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (
        1,
        1.0,
        1.0,
        None,
        0.0,
    )
    assert params.outputs == {"logprobs"}
    assert (params.stop, params.stop_token_ids, params.seed) == ((), (), None)
    assert (params.min_tokens, params.include_stop) == (0, False)
    assert not params.truncates


@pytest.mark.parametrize(
    "option", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"min_tokens": 1}]
)
def test_truncation_is_seen(option):
    assert SamplingParams(max_tokens=4, **option).truncates


def test_sequences_and_numpy_numbers_become_plain():
    params = SamplingParams(
        max_tokens=np.int64(4),
        temperature=np.float32(0.5),
        stop="END",
        stop_token_ids=np.array([1, 2]),
        outputs=["logprobs", "drawn_logprobs"],
        seed=np.uint64(2**63 - 1),
    )
    assert type(params.max_tokens) is int
    assert type(params.temperature) is float
    assert params.stop == ("END",)
    assert params.stop_token_ids == (1, 2)
    assert params.outputs == frozenset({"logprobs", "drawn_logprobs"})
    assert params.seed == 2**63 - 1
    assert {
        type(each)
        for each in SamplingParams(max_tokens=1, stop_token_ids=[np.int32(7)]).stop_token_ids
    } == {int}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 0}, "SamplingParams.n must be a whole number >= 1, not 0"),
        ({"n": True}, "SamplingParams.n must be a whole number"),
        ({"n": 1.5}, "SamplingParams.n must be a whole number"),
        ({"max_tokens": 0}, "SamplingParams.max_tokens must be"),
        ({"max_tokens": 2**31}, "SamplingParams.max_tokens must be"),
        ({"temperature": -0.1}, "SamplingParams.temperature must be 0 .greedy., or from 0.0001"),
        ({"temperature": 1e-50}, "SamplingParams.temperature must be"),
        ({"temperature": 1e39}, "SamplingParams.temperature must be"),
        ({"temperature": float("nan")}, "SamplingParams.temperature must be"),
        ({"temperature": "1"}, "SamplingParams.temperature must be"),
        ({"top_p": 0}, r"SamplingParams.top_p must be a finite number > 0 and <= 1"),
        ({"top_p": 1.01}, "SamplingParams.top_p must be"),
        ({"top_k": 0}, "SamplingParams.top_k must be"),
        ({"min_p": 1.1}, "SamplingParams.min_p must be"),
        ({"min_tokens": -1}, "SamplingParams.min_tokens must be a whole number >= 0, not -1"),
        ({"min_tokens": True}, "SamplingParams.min_tokens must be a whole number"),
        ({"min_tokens": 5}, "SamplingParams.min_tokens must be at most max_tokens=4, not 5"),
        ({"max_tokens": 0, "min_tokens": 1}, "SamplingParams.max_tokens must be"),
        ({"include_stop": 1}, "SamplingParams.include_stop must be True or False, not 1"),
        ({"stop": [""]}, "SamplingParams.stop must be a non-empty string"),
        ({"stop": 5}, "SamplingParams.stop must be a sequence of values, not 5"),
        ({"stop_token_ids": 5}, "SamplingParams.stop_token_ids must be a sequence of values"),
        ({"stop_token_ids": [-1]}, "SamplingParams.stop_token_ids must be a whole number >= 0"),
        ({"seed": -1}, "SamplingParams.seed must be"),
        ({"seed": 2**63}, "SamplingParams.seed must be"),
        ({"outputs": {"logprob"}}, "outputs can't be 'logprob'; did you mean 'logprobs'"),
        ({"outputs": None}, "SamplingParams.outputs must be a sequence of values, not None"),
        ({"session_id": ""}, "SamplingParams.session_id must be a non-empty string"),
        ({"priority": 0.5}, "SamplingParams.priority must be a whole number"),
        ({"cache_salt": 3}, "SamplingParams.cache_salt must be"),
    ],
)
def test_refusals_name_the_field_and_the_range(changes, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        SamplingParams(**{"max_tokens": 4, **changes})
    assert caught.value.details["field"] == next(iter(changes))


# -- Sample, Group ------------------------------------------------------------------------------


def test_sample_holds_arrays_of_the_promised_dtypes():
    one = sample([1, 2], [-0.5, -1.0], drawn_logprobs=[0, 0])
    assert one.tokens.dtype == np.int32
    assert one.logprobs.dtype == one.drawn_logprobs.dtype == np.float32
    assert len(one) == 2
    assert sample([]).logprobs is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": [0.0]}, "Sample.logprobs has 1 entries for 2 tokens"),
        ({"drawn_logprobs": [0.0]}, "Sample.drawn_logprobs has 1 entries for 2 tokens"),
        ({"finish_reason": "stopped"}, "finish_reason can't be 'stopped'; did you mean 'stop'"),
        ({"last_version": 2}, "last_version can't be below first_version"),
        ({"version": -1, "last_version": 0}, "Sample.first_version must be"),
        ({"prompt_index": -1}, "Sample.prompt_index must be"),
        ({"tokens": "text"}, "token ids must hold numbers"),
        ({"tokens": [1, 2**31]}, "entry 1 of token ids is 2147483648, outside int32"),
    ],
)
def test_sample_refusals(changes, message):
    with pytest.raises(InvalidRequestError, match=message):
        sample(**{"tokens": [1, 2], **changes})


def test_samples_compare_by_contents():
    one = sample([1, 2], [0.0, -1.0])
    assert one == sample([1, 2], [0.0, -1.0])
    assert one != sample([1, 3], [0.0, -1.0])
    assert one != sample([1, 2])
    assert one != sample([1, 2], [0.0, -1.0], label="other")
    assert one != "sample"


def test_group_is_a_sequence_of_its_samples():
    group = two_groups()[1]
    assert len(group) == 2
    assert list(group) == [group[0], group[1]] == list(group.samples)
    assert [(each.prompt_index, each.index) for each in group] == [(1, 0), (1, 1)]
    assert group == two_groups()[1]
    assert group != two_groups()[0]
    assert group != attrs.evolve(group, temperature=0.25)


def test_group_refuses_what_is_no_sample():
    with pytest.raises(InvalidRequestError, match=r"Group.samples must be a Sample"):
        Group(prompt=[1], samples=[[1, 2]], temperature=1.0, prompt_index=0)


# -- Generation ---------------------------------------------------------------------------------


def generation_of(groups):
    return Generation.from_samples([each for group in groups for each in group])


@pytest.mark.parametrize("logprobs", [True, False])
def test_generation_gives_back_the_groups_it_was_made_of(logprobs):
    groups = two_groups(logprobs)
    generation = generation_of(groups)
    assert len(generation) == 4
    prompts = Ragged.from_rows(group.prompt for group in groups)
    back = generation.groups(prompts, 0.7)
    assert [group.samples for group in back] == [group.samples for group in groups]
    assert [group.prompt.tolist() for group in back] == [[1, 2], [3]]
    assert np.shares_memory(back[0][0].tokens, generation.tokens.values)


def test_generation_keeps_labels_reasons_and_versions():
    samples = [
        sample([1], finish_reason=reason, first_label="a", label=7, index=index, last_version=9)
        for index, reason in enumerate(FINISH_REASONS)
    ]
    assert list(Generation.from_samples(samples).samples()) == samples
    assert list(Generation.from_samples([]).samples()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"finish_reason": [3, 0, 0, 0]}, "Generation.finish_reason holds 3, which stands for"),
        ({"finish_reason": [0]}, "Generation.finish_reason has 1 entries for 4 samples"),
        ({"first_version": [0.5, 0, 0, 0]}, "versions is 0.5, not a whole number"),
        ({"last_version": []}, "Generation.last_version has 0 entries"),
        ({"labels": (None,)}, "Generation.labels has 1 entries"),
        ({"first_labels": ()}, "Generation.first_labels has 0 entries"),
        ({"prompt_index": [0]}, "Generation.prompt_index has 1 entries"),
        ({"index": [0]}, "Generation.index has 1 entries"),
        ({"tokens": [[1]]}, "Generation.tokens must be a Ragged"),
        ({"logprobs": Ragged.from_rows([[0.0]])}, "Generation.logprobs and .* rows' lengths"),
        ({"drawn_logprobs": [0.0]}, "Generation.drawn_logprobs must be a Ragged"),
    ],
)
def test_columns_that_disagree_are_refused(changes, message):
    with pytest.raises(InvalidRequestError, match=message):
        attrs.evolve(generation_of(two_groups()), **changes)


# -- all of them --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "field", "shown"),
    [
        (SamplingParams(max_tokens=3, n=2), "n", "SamplingParams(n=2, max_tokens=3,"),
        (sample([1, 2]), "tokens", "Sample(prompt 0, sample 0: 2 tokens, stop, version 3)"),
        (
            sample([1], last_version=5, finish_reason="abort"),
            "tokens",
            "Sample(prompt 0, sample 0: 1 tokens, abort, versions 3..5)",
        ),
        (two_groups()[0], "samples", "Group(prompt 0 of 2 tokens, 2 samples at temperature 0.7)"),
    ],
)
def test_frozen_picklable_and_readable(value, field, shown):
    assert pickle.loads(pickle.dumps(value)) == value
    assert repr(value).startswith(shown)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(value, field, None)


@pytest.mark.parametrize(
    ("cls", "wrong", "right"),
    [
        (SamplingParams, "max_token", "max_tokens"),
        (Sample, "token", "tokens"),
        (Group, "sample", "samples"),
        (Generation, "finish_reasons", "finish_reason"),
    ],
)
def test_unknown_and_missing_keywords_get_the_right_name(cls, wrong, right):
    with pytest.raises(
        UnknownNameError, match=f"{cls.__name__} has no field '{wrong}'; did you mean '{right}'"
    ):
        cls(**{wrong: None})
    first = next(field.name for field in attrs.fields(cls) if field.default is attrs.NOTHING)
    with pytest.raises(InvalidRequestError, match=f"{cls.__name__} needs '{first}'; pass {first}="):
        cls()


@pytest.mark.parametrize("off", [0, -1, np.int64(-1)])
def test_what_engines_call_no_top_k_hints_to_none(off):
    with pytest.raises(InvalidRequestError, match=r"top_k must be .* >= 1, not .*; None leaves no"):
        SamplingParams(max_tokens=1, top_k=off)
    for other in (-2, 0.5, True, "all"):
        with pytest.raises(InvalidRequestError, match=r"SamplingParams.top_k must be"):
            SamplingParams(max_tokens=1, top_k=other)
    assert not SamplingParams(max_tokens=1, top_k=None).truncates
