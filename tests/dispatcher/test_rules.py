"""Accumulator, dirtiness, versions, pristineness and seeds, as pure state."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_rl import losses
from remote_rl.dispatcher.rules import Rules, SeedBook
from remote_rl.errors import (
    BackendError,
    ConflictError,
    DirtyGradientsError,
    InvalidRequestError,
    OperationCancelled,
    UnsupportedError,
)
from remote_rl.ops import OPERATIONS
from remote_rl.requests import (
    DropSnapshot,
    Forward,
    ForwardBackward,
    Request,
    RestoreSnapshot,
    SetReference,
    Snapshot,
    Sync,
)
from remote_rl.types import Batch, Ragged

BATCH = Batch(prompts=[[1]], prompt_index=[0], responses=[[2]], temperature=1.0)
ALWAYS = [name for name, row in OPERATIONS.items() if row.changes_weights == "always"]


def do(rules, operation, reported=None, request=None):
    """One operation that succeeds."""
    row, request = OPERATIONS[operation], request or Request()
    rules.admit(row, request)
    rules.succeeded(row, request, reported)


def fail(rules, operation, error=None, began=True):
    row = OPERATIONS[operation]
    if began:
        rules.admit(row, Request())
    rules.failed(row, error or BackendError("first failure"), began)


# -- the accumulator ----------------------------------------------------------------------------


def test_an_empty_accumulator_refuses_a_step_and_a_full_one_a_save():
    rules = Rules()
    with pytest.raises(ConflictError, match="optim_step refused: nothing was accumulated"):
        do(rules, "optim_step", 1)
    do(rules, "forward_backward", 0)
    do(rules, "forward_backward", 0)
    with pytest.raises(ConflictError, match=r"save refused: 2 forward_backward\(s\) were not"):
        do(rules, "save")
    do(rules, "optim_step", 1)
    do(rules, "save")
    with pytest.raises(ConflictError, match="nothing was accumulated"):
        do(rules, "optim_step", 2)


@pytest.mark.parametrize("operation", ["zero_grad", "restore_snapshot", "load", "reset"])
def test_what_clears_leaves_an_empty_clean_accumulator(operation):
    rules = Rules()
    do(rules, "forward_backward", 0)
    fail(rules, "forward_backward")
    assert rules.dirty is not None
    do(rules, operation)
    assert (rules.accumulated, rules.dirty) == (0, None)
    do(rules, "save")


# -- dirtiness ----------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["forward_backward", "optim_step", "save", "sync"])
def test_a_failed_forward_backward_fails_what_builds_on_it_with_itself_as_cause(operation):
    rules = Rules()
    do(rules, "forward_backward", 0)
    fail(rules, "forward_backward", BackendError("out of memory"))
    fail(rules, "forward_backward", BackendError("a later one"), began=False)
    with pytest.raises(DirtyGradientsError, match="forward_backward failed earlier") as caught:
        do(rules, operation)
    assert caught.value.__cause__.message == "out of memory"
    assert caught.value.details == {"first_failure": "forward_backward"}


@pytest.mark.parametrize("operation", ["forward", "snapshot", "checkpoints", "version", "push"])
def test_what_does_not_use_the_gradient_goes_on(operation):
    rules = Rules()
    fail(rules, "forward_backward")
    do(rules, operation, 1 if operation == "push" else None)
    assert rules.dirty is not None


def test_a_cancelled_forward_backward_counts_as_failed():
    rules = Rules()
    fail(rules, "forward_backward", OperationCancelled("cancelled"), began=False)
    with pytest.raises(DirtyGradientsError, match="cancelled"):
        do(rules, "optim_step")


def test_a_step_that_failed_midway_dirties_and_one_that_never_began_does_not():
    rules = Rules()
    do(rules, "forward_backward", 0)
    fail(rules, "optim_step", began=False)
    assert rules.dirty is None
    fail(rules, "optim_step")
    assert rules.dirty_operation == "optim_step"


@pytest.mark.parametrize("operation", ["forward", "save", "sync", "generate", "zero_grad"])
def test_other_failures_dirty_nothing(operation):
    rules = Rules()
    fail(rules, operation, began=False)
    assert rules.dirty is None


# -- versions -----------------------------------------------------------------------------------


def test_a_step_raises_the_version_and_a_skipped_one_does_not():
    rules = Rules()
    do(rules, "forward_backward", 0)
    do(rules, "optim_step", 1)
    assert rules.version == 1
    do(rules, "forward_backward", 1)
    do(rules, "optim_step", 1)  # not finite: skipped
    assert rules.version == 1


@pytest.mark.parametrize(("saved", "expected"), [(0, 4), (3, 4), (10, 11)])
def test_a_load_gives_the_greater_of_current_and_saved_plus_one(saved, expected):
    rules = Rules()
    for version in (1, 2, 3):
        do(rules, "forward_backward", version - 1)
        do(rules, "optim_step", version)
    rules.loading(saved)
    do(rules, "load", expected)
    assert rules.version == expected


def test_a_push_takes_a_version_but_leaves_the_trainer_alone():
    rules = Rules()
    do(rules, "push", 1)
    assert (rules.version, rules.next_version) == (0, 2)
    with pytest.raises(ConflictError, match="pushed weights of version 1"):
        do(rules, "sync", 0)  # the sampler's version would fall
    do(rules, "forward_backward", 0)
    do(rules, "optim_step", 2)
    do(rules, "sync", 2)
    assert rules.version == 2


def test_a_sync_of_weights_older_than_the_pushed_ones_is_refused():
    rules = Rules()
    do(rules, "push", 1)
    with pytest.raises(ConflictError, match="serves pushed weights of version 1, and the trainer"):
        do(rules, "sync", 0)
    do(rules, "forward_backward", 0)
    do(rules, "optim_step", 2)
    do(rules, "sync", 2)
    assert rules.version == 2


#: what changes the trainer's weights
CHANGING = [*ALWAYS, "optim_step"]
#: what uses them
USING = {
    **dict.fromkeys(
        ("forward_backward", "optim_step", "save", "sync", "snapshot", "export"), Request()
    ),
    "forward": Forward(batch=BATCH),
    "set_reference": SetReference(source="current"),
}


def test_the_table_says_what_changes_the_trainers_weights():
    reported = [name for name, row in OPERATIONS.items() if row.changes_weights == "reported"]
    assert sorted(reported) == ["optim_step", "push"]  # push: the sampler's


@pytest.mark.parametrize("operation", CHANGING)
@pytest.mark.parametrize("recovery", ALWAYS)
def test_weights_that_a_failure_left_unknown_are_not_used(operation, recovery):
    rules, row = Rules(), OPERATIONS[operation]
    for refusal in (InvalidRequestError, ConflictError, UnsupportedError):  # nothing changed
        rules.failed(row, refusal("another shape"), began=True)
    rules.failed(row, OperationCancelled("before it began"), began=False)
    do(rules, "zero_grad", 0)
    do(rules, "forward_backward", 0)
    rules.failed(row, BackendError("disk gone"), began=True)
    do(rules, "zero_grad", 0)  # which mends the gradient, and not the weights
    for name, request in USING.items():
        with pytest.raises(
            ConflictError, match=f"{name} refused: .* unknown since {operation}"
        ) as caught:
            do(rules, name, 0, request)
        assert caught.value.__cause__.message == "disk gone"
    for name, request in (
        ("forward", Forward(batch=BATCH, policy="reference")),  # other weights
        ("set_reference", SetReference(source="base")),
        ("version", None),
        ("checkpoints", None),
    ):
        do(rules, name, None, request)
    do(rules, recovery, 1)
    do(rules, "forward_backward", 1)
    do(rules, "optim_step", 2)


def test_a_step_that_reports_another_version_leaves_the_weights_unknown():
    rules, row = Rules(), OPERATIONS["optim_step"]
    do(rules, "forward_backward", 0)
    rules.admit(row, Request())
    with pytest.raises(BackendError, match="reports weights of version 7") as caught:
        rules.succeeded(row, Request(), 7)
    rules.failed(row, caught.value, began=True)
    with pytest.raises(ConflictError, match="weights are unknown"):
        do(rules, "save")


# -- snapshots ----------------------------------------------------------------------------------

NAMING = [
    ("restore_snapshot", lambda name: RestoreSnapshot(name=name), "name"),
    ("drop_snapshot", lambda name: DropSnapshot(name=name), "name"),
    ("set_reference", lambda name: SetReference(source=name), "source"),
    ("forward", lambda name: Forward(batch=BATCH, policy=name), "policy"),
]


@pytest.mark.parametrize(("operation", "request_of", "field"), NAMING)
def test_a_snapshot_is_known_by_its_name_from_its_taking_to_its_dropping(
    operation, request_of, field
):
    rules = Rules()
    with pytest.raises(InvalidRequestError, match="no snapshot 'before'; no name is valid here"):
        do(rules, operation, None, request_of("before"))
    do(rules, "snapshot", None, Snapshot(name="before"))
    with pytest.raises(InvalidRequestError, match="'befor'; did you mean 'before'") as caught:
        do(rules, operation, None, request_of("befor"))
    assert caught.value.details == {"field": field}
    do(rules, "load")  # which keeps them
    do(rules, operation, None, request_of("before"))
    if operation != "drop_snapshot":
        do(rules, "drop_snapshot", None, DropSnapshot(name="before"))
    with pytest.raises(InvalidRequestError, match="no snapshot 'before'"):
        do(rules, operation, None, request_of("before"))


@pytest.mark.parametrize(("operation", "request_of", "field"), NAMING)
def test_a_reset_forgets_all_snapshots(operation, request_of, field):
    rules = Rules()
    do(rules, "snapshot", None, Snapshot(name="before"))
    do(rules, "reset")
    with pytest.raises(InvalidRequestError, match="no snapshot 'before'"):
        do(rules, operation, None, request_of("before"))
    do(rules, "snapshot", None, Snapshot(name="before"))


def test_a_taken_name_is_a_conflict_and_a_failed_snapshot_takes_none():
    rules, row, request = Rules(), OPERATIONS["snapshot"], Snapshot(name="before")
    rules.admit(row, request)
    rules.failed(row, BackendError("out of memory"), began=True)
    do(rules, "snapshot", None, request)
    with pytest.raises(ConflictError, match="a snapshot 'before' already; drop it first"):
        do(rules, "snapshot", None, request)
    do(rules, "drop_snapshot", None, DropSnapshot(name="before"))
    do(rules, "snapshot", None, request)


def test_the_names_that_are_not_snapshots_need_none():
    rules = Rules()
    for policy in ("current", "reference"):
        do(rules, "forward", None, Forward(batch=BATCH, policy=policy))
    for source in ("base", "current"):
        do(rules, "set_reference", None, SetReference(source=source))


@pytest.mark.parametrize("in_flight", ["keep", "wait", "abort"])
def test_a_sync_that_waits_for_paused_generates_is_refused(in_flight):
    rules = Rules()
    do(rules, "pause", None)
    request = Sync(in_flight=in_flight)
    if in_flight == "wait":
        with pytest.raises(ConflictError, match="generation is paused"):
            rules.admit(OPERATIONS["sync"], request)
    else:
        rules.admit(OPERATIONS["sync"], request)
    do(rules, "resume", None)
    rules.admit(OPERATIONS["sync"], request)


@pytest.mark.parametrize(
    ("operation", "reported"),
    [
        ("push", 0),
        ("push", 2),
        ("sync", 1),
        ("forward_backward", 1),
        ("restore_snapshot", 5),
        ("load", 0),
    ],
)
def test_a_backend_that_numbers_its_weights_itself_is_told(operation, reported):
    with pytest.raises(BackendError, match="backend"):
        do(Rules(), operation, reported)


def test_a_forward_may_report_the_version_of_a_snapshot():
    rules = Rules()
    do(rules, "restore_snapshot")
    do(rules, "forward", 0)
    assert rules.version == 1


changes = st.lists(
    st.tuples(st.sampled_from(["optim_step", "push", "load", *ALWAYS]), st.integers(0, 30)),
    max_size=20,
)


@given(changes)
def test_versions_rise_and_never_repeat(script):
    rules, given_out = Rules(), {0}
    for operation, saved in script:
        if operation == "optim_step":
            do(rules, "forward_backward", rules.version)
        if operation == "load":
            rules.loading(saved)
        version = rules.next_version
        assert version not in given_out
        assert version > max(given_out)
        do(rules, operation, version)
        given_out.add(version)
        if operation != "push":
            assert rules.version == version


# -- pristine -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "operation", ["forward", "sync", "save", "checkpoints", "version", "zero_grad", "drop_snapshot"]
)
def test_what_leaves_no_trace_keeps_a_run_pristine(operation):
    rules = Rules()
    do(rules, operation)
    assert rules.pristine


@pytest.mark.parametrize(
    "operation",
    ["forward_backward", "load", "restore_snapshot", "push", "snapshot", "set_reference"],
)
def test_what_changes_anything_ends_it_even_if_it_fails(operation):
    rules = Rules()
    do(rules, operation, 1 if operation == "push" else None)
    assert not rules.pristine
    rules = Rules()
    fail(rules, operation)
    assert not rules.pristine


def test_a_cancelled_forward_backward_leaves_a_dirty_run_that_is_not_pristine():
    rules = Rules()
    fail(rules, "forward_backward", began=False)
    assert not rules.pristine


def test_a_reset_restores_it_and_a_failed_one_does_not():
    rules = Rules()
    do(rules, "snapshot")
    fail(rules, "reset")
    assert not rules.pristine
    do(rules, "reset")
    assert rules.pristine


# -- cotangents ---------------------------------------------------------------------------------


def test_cotangents_of_another_version_are_a_conflict():
    rules = Rules()
    do(rules, "restore_snapshot")
    values = {"logprobs": Ragged.from_rows([[0.5]], np.float32)}
    stale, fresh = (
        ForwardBackward(batch=BATCH, loss=losses.Cotangents(values=values, version=version))
        for version in (0, 1)
    )
    with pytest.raises(ConflictError, match=r"taken at version 0, .* at version 1") as caught:
        do(rules, "forward_backward", 1, stale)
    assert caught.value.details == {"taken": 0, "current": 1}
    do(rules, "forward_backward", 1, fresh)
    assert rules.accumulated == 1


# -- seeds --------------------------------------------------------------------------------------


def test_seeds_are_distinct_in_range_and_the_same_again():
    book = SeedBook(7)
    seeds = [book.seed(ordinal, count) for ordinal in range(3) for count in range(1, 101)]
    assert len(set(seeds)) == 300
    assert all(0 <= seed < 2**63 for seed in seeds)
    again, other = SeedBook(7), SeedBook(8)
    assert again.seed(2, 100) == seeds[-1]
    assert other.seed(2, 100) not in seeds


@given(st.permutations(range(1, 8)))
def test_a_seed_depends_on_its_number_not_on_when_it_is_asked_for(order):
    book = SeedBook(7)
    assert {count: book.seed(0, count) for count in order} == {
        count: SeedBook(7).seed(0, count) for count in order
    }
    assert book.counters == {0: 7}


def test_a_restored_book_draws_what_the_uninterrupted_one_would():
    book = SeedBook(7)
    for count in range(1, 6):
        book.seed(0, book.base(0) + 1)
        assert book.counters == {0: count}
    saved = dict(book.counters)
    expected = [book.seed(0, 6), book.seed(0, 7)]
    resumed = SeedBook(7)
    resumed.restore(saved)
    assert [resumed.seed(0, resumed.base(0) + 1) for _ in range(2)] == expected
    # in the same process, the client's own numbers go on from 8
    book.restore(saved)
    base = book.base(0, submitted=7)
    assert [book.seed(0, base + number) for number in (8, 9)] == expected
    book.restore({})
    assert book.seed(0, book.base(0, submitted=9) + 10) == SeedBook(7).seed(0, 1)
