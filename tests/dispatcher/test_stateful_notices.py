"""The model-based test finds faults: each of these, put into the dispatcher, makes it fail.

They reach into the dispatcher's modules; a fault whose place has moved moves with it.
"""

import os

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from stateful_machine import DispatcherMachine

from remote_rl.dispatcher.clients import Client
from remote_rl.dispatcher.gate import Gate
from remote_rl.dispatcher.intake import Intake
from remote_rl.dispatcher.leases import Leases
from remote_rl.dispatcher.pauses import Pauses
from remote_rl.dispatcher.record import Record
from remote_rl.dispatcher.rules import Rules
from remote_rl.dispatcher.streams import ClientStream, NumberSet
from remote_rl.dispatcher.watch import Watch

NIGHTLY = os.environ.get("REMOTE_RL_NIGHTLY") == "1"
FAULTS = {}
#: found too, but often only after a hundred examples: in the nightly session
LATE = {
    "the_epoch_of_a_handle_is_not_compared",
    "everybody_takes_over",
    "a_loaded_version_may_be_an_old_one",
    "a_cancelled_generate_keeps_its_result",
    "a_late_pause_pauses",
    "a_pause_outlives_its_asker",
}


def fault(owner, name):
    """Registers a fault: a function of the real method that gives the faulty one."""

    def register(make):
        FAULTS[make.__name__] = (owner, name, make(getattr(owner, name)))
        return make

    return register


@fault(ClientStream, "find")
def the_digest_is_not_compared(real):
    def find(self, number, operation, digest):
        record = self.get(number)
        return real(self, number, operation, digest if record is None else record.digest)

    return find


@fault(NumberSet, "__contains__")
def acknowledged_numbers_are_forgotten(real):
    return lambda self, number: False


@fault(ClientStream, "find")
def a_duplicate_is_executed(real):
    def find(self, number, operation, digest):
        record = real(self, number, operation, digest)
        return None if record is not None and record.done else record

    return find


@fault(ClientStream, "acknowledge")
def results_are_kept_after_their_acknowledgement(real):
    return lambda self, number: None


@fault(Client, "collect")
def an_outcome_is_brought_only_once(real):
    def collect(self, cursors, with_progress):
        waited = real(self, cursors, with_progress)
        for outcome in waited.outcomes:
            self.streams[outcome.stream].get(outcome.number).delivered = True
        return waited

    return collect


@fault(ClientStream, "add")
def a_gap_holds_nothing(real):
    def add(self, record):
        real(self, record)
        return (record,)

    return add


@fault(Intake, "_bury")
def a_tombstone_is_not_kept(real):
    return lambda self, *arguments: None


@fault(Gate, "client")
def a_late_message_renews_a_lease_that_has_run_out(real):
    def client(self, message):
        self.expire = lambda now: None
        try:
            return real(self, message)
        finally:
            del self.expire

    return client


@fault(Leases, "renew")
def a_message_does_not_renew(real):
    def renew(self, client_id, now):
        before = {name: lease.expires for name, lease in self._held.items()}
        lease = real(self, client_id, now)
        lease.expires = before[client_id]
        return lease

    return renew


@fault(Leases, "_end_epoch")
def members_outlive_their_driver(real):
    def end_epoch(self, reason):
        members = {name: lease for name, lease in self._held.items() if lease.ordinal}
        ended = real(self, reason)
        for name in members:
            del self._ended[name]
        self._held.update(members)
        return tuple(lease for lease in ended if lease.client_id not in members)

    return end_epoch


@fault(Leases, "attach_member")
def the_epoch_of_a_handle_is_not_compared(real):
    return lambda self, client_id, epoch, now: real(self, client_id, self.epoch, now)


@fault(Leases, "attach_driver")
def everybody_takes_over(real):
    return lambda self, client_id, now, takeover: real(self, client_id, now, True)


@fault(Gate, "_drop")
def queued_work_outlives_its_client(real):
    return lambda self, client, error: None


@fault(Watch, "_stalled")
def a_stalled_training_operation_is_waited_for(real):
    return lambda self, record, sequenced: None if sequenced else real(self, record, sequenced)


@fault(Watch, "check")
def a_deadline_is_not_kept(real):
    def check(self, record, now):
        record.deadline = None
        real(self, record, now)

    return check


@fault(Rules, "failed")
def a_cancelled_forward_backward_spoils_nothing(real):
    return lambda self, row, error, began: real(self, row, error, began) if began else None


@fault(Rules, "loading")
def a_loaded_version_may_be_an_old_one(real):
    return lambda self, saved_version: None


@fault(Record, "end_early")
def a_cancelled_generate_keeps_its_result(real):
    return lambda self, reason: real(self, None)


@fault(Client, "is_late_control")
def a_late_pause_pauses(real):
    return lambda self, operation, number: False


@fault(Pauses, "client_ended")
def a_pause_outlives_its_asker(real):
    return lambda self, client_id: None


@pytest.mark.parametrize("name", [name for name in FAULTS if NIGHTLY or name not in LATE])
def test_the_model_notices_that(name, monkeypatch):
    owner, method, faulty = FAULTS[name]
    monkeypatch.setattr(owner, method, faulty)
    few = settings(
        max_examples=1000,
        stateful_step_count=30,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # that it fails is enough
        report_multiple_bugs=False,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(DispatcherMachine, settings=few)
