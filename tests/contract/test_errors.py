"""The tree of errors: drawn as it is, picklable, the same on both sides of a wire."""

import json
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_rl import errors
from remote_rl.errors import (
    BackendError,
    InvalidRequestError,
    ProtocolError,
    RemoteRLError,
    as_remote_error,
    nearest,
)

CLASSES = [getattr(errors, name) for name in errors.__all__]
LEAVES = [each for each in CLASSES if each is not RemoteRLError]


class NeedsTwo(Exception):
    """As many libraries' errors: pickles, but does not unpickle."""

    def __init__(self, one, two):
        super().__init__(one)


def drawn_tree():
    """(name, parent, standard base or None) of each line of the docstring's tree."""
    lines = errors.__doc__.splitlines()
    start = lines.index("RemoteRLError")
    parents, found = ["RemoteRLError"], [("RemoteRLError", None, None)]
    for line in lines[start + 1 :]:
        match = re.match(r"([│├└─ ]+)(\w+)(?: +\((\w+)\))?", line)
        if match is None or not line.startswith(("├", "│", "└")):
            break
        depth = len(match[1]) // 4
        parents[depth:] = [match[2]]
        found.append((match[2], parents[depth - 1], match[3]))
    return found


def test_the_tree_is_drawn_as_it_is():
    drawn = drawn_tree()
    assert sorted(name for name, _, _ in drawn) == sorted(errors.__all__)
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    assert defined == set(errors.__all__)
    for name, parent, standard in drawn[1:]:
        bases = [base.__name__ for base in getattr(errors, name).__bases__]
        assert bases == [each for each in (parent, standard) if each is not None], name


def test_every_class_says_when_it_is_raised():
    assert [each.__name__ for each in CLASSES if not (each.__doc__ or "").strip()] == []


@pytest.mark.parametrize("error_class", CLASSES)
def test_pickles_with_details_and_cause(error_class):
    error = error_class("what, where, what to do", field="n", row=3, values=[1, None, "x"])
    error.__cause__ = BackendError("first", worker="rank 0")
    error.__cause__.__cause__ = ValueError("deepest")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is error_class
    assert str(back) == back.message == "what, where, what to do"
    assert back.details == error.details
    assert type(back.__cause__) is BackendError
    assert back.__cause__.details == {"worker": "rank 0"}
    assert repr(back.__cause__.__cause__) == "ValueError('deepest')"


def test_a_foreign_cause_that_would_not_unpickle_travels_as_its_traceback():
    error = BackendError("step failed")
    try:
        raise NeedsTwo("cuda", 700)
    except NeedsTwo as cause:
        error.__cause__ = cause
    back = pickle.loads(pickle.dumps(error))
    assert type(back.__cause__) is BackendError
    assert str(back.__cause__) == "NeedsTwo: cuda"
    assert "raise NeedsTwo" in back.__cause__.details["traceback"]


@pytest.mark.parametrize("error_class", LEAVES)
def test_wire_round_trip_keeps_class_message_details_and_cause(error_class):
    error = error_class("message", message_of="x", row=1, name=None)
    error.__cause__ = errors.DirtyGradientsError("cause", operation="save")
    wire = json.loads(json.dumps(error.to_wire()))
    back = RemoteRLError.from_wire(wire)
    assert type(back) is error_class
    assert (back.message, back.details) == (error.message, error.details)
    assert type(back.__cause__) is errors.DirtyGradientsError
    assert back.__cause__.details == {"operation": "save"}
    assert back.__cause__.__cause__ is None


def test_details_named_as_arguments_survive():
    error = InvalidRequestError("m", self=1, message=2)
    assert RemoteRLError.from_wire(error.to_wire()).details == {"self": 1, "message": 2}
    assert pickle.loads(pickle.dumps(error)).details == {"self": 1, "message": 2}
    assert error.copy().details == {"self": 1, "message": 2}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: (
            st.lists(inner)
            | st.tuples(inner)
            | st.dictionaries(st.text(), inner)
            | st.dictionaries(st.integers(), inner)
        ),
        max_leaves=8,
    )
)
def test_any_details_become_strict_json(value):
    wire = BackendError("m", value=value).to_wire()
    assert json.loads(json.dumps(wire, allow_nan=False)) == wire


def test_unknown_classes_and_foreign_causes_become_backend_errors():
    back = RemoteRLError.from_wire({"error": "NewError", "message": "m", "details": {}})
    assert type(back) is BackendError
    error = RemoteRLError("m")
    error.__cause__ = KeyError("lost")
    cause = RemoteRLError.from_wire(error.to_wire()).__cause__
    assert type(cause) is BackendError
    assert str(cause) == "KeyError: 'lost'"
    assert "KeyError" in cause.details["traceback"]


def test_a_chain_of_causes_ends():
    error = BackendError("0")
    for depth in range(1, 40):
        above = BackendError(str(depth))
        above.__cause__ = error
        error = above
    back, length = RemoteRLError.from_wire(error.to_wire()), 0
    while back.__cause__ is not None:
        back, length = back.__cause__, length + 1
    assert length == 16
    loop = BackendError("loop")
    loop.__cause__ = loop
    assert RemoteRLError.from_wire(loop.to_wire()).message == "loop"


def nested(depth):
    data = None
    for _ in range(depth):
        data = {"error": "BackendError", "message": "m", "details": {}, "cause": data}
    return data


@pytest.mark.parametrize(
    "hostile",
    [
        {},
        {"error": "BackendError"},
        {"error": 3, "message": "m"},
        {"error": None, "message": "m"},
        {"error": "BackendError", "message": ["m"]},
        {"error": "BackendError", "message": "m", "details": [1]},
        {"error": "BackendError", "message": "m", "details": None},
        {"error": "BackendError", "message": "m", "cause": "text"},
        {"error": "BackendError", "message": "m", "cause": {}},
        nested(40),
        "text",
        None,
        [1],
    ],
)
def test_hostile_wire_data_is_a_protocol_error(hostile):
    with pytest.raises(ProtocolError, match="error object"):
        RemoteRLError.from_wire(hostile)


def test_copy_is_a_fresh_instance_with_the_same_contents():
    error = errors.RunLostError("gone", last_checkpoint="a")
    error.__cause__ = ValueError("why")
    twin = error.copy()
    assert twin is not error
    assert (type(twin), twin.message, twin.details) == (type(error), "gone", error.details)
    assert twin.__cause__ is error.__cause__


def test_as_remote_error_keeps_its_own_and_wraps_others_with_their_traceback():
    own = InvalidRequestError("m")
    assert as_remote_error(own) is own
    try:
        raise OSError("disk full")
    except OSError as caught:
        wrapped = as_remote_error(caught)
    assert type(wrapped) is BackendError
    assert wrapped.message == "OSError: disk full"
    assert "test_errors.py" in wrapped.details["traceback"]


def test_nearest_gives_the_name_or_the_list():
    assert nearest("advantges", ["advantages", "mask"]) == "did you mean 'advantages'?"
    assert nearest("zzz", ["b", "a"]) == "valid names are 'a', 'b'"
    assert nearest("zzz", []) == "no name is valid here"
