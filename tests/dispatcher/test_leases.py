"""Leases: who may use a run, as pure state."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_rl.dispatcher.leases import Lease, Leases
from remote_rl.errors import LeaseError
from remote_rl.messages import Occupied


@pytest.fixture
def leases():
    return Leases(60.0)


def ids(granted):
    return [lease.client_id for lease in granted]


def test_the_first_driver_opens_epoch_one(leases):
    lease = leases.attach_driver("a", 10.0, False)
    assert (lease.client_id, lease.role, lease.epoch, lease.expires) == ("a", "driver", 1, 70.0)
    assert leases.driver is lease
    assert leases.attach_driver("a", 20.0, False) is lease


def test_a_second_driver_hears_how_long_the_first_may_last(leases):
    leases.attach_driver("a", 0.0, False)
    assert leases.attach_driver("b", 45.0, False) == Occupied(remaining=15.0, renewals=0)
    leases.renew("a", 50.0)
    assert leases.attach_driver("b", 50.0, False) == Occupied(remaining=60.0, renewals=1)
    assert leases.driver.client_id == "a"


def test_remaining_is_never_negative(leases):
    leases.attach_driver("a", 0.0, False)
    assert leases.attach_driver("b", 100.0, False).remaining == 0.0


def test_a_lease_lasts_until_it_is_not_renewed(leases):
    leases.attach_driver("a", 0.0, False)
    assert leases.expire(59.9) == ()
    leases.renew("a", 59.9)
    assert leases.expire(119.8) == ()
    assert ids(leases.expire(119.9)) == ["a"]
    assert leases.driver is None
    with pytest.raises(LeaseError, match=r"client a holds no lease .* not renewed for 60 s"):
        leases.renew("a", 120.0)
    assert leases.attach_driver("b", 120.0, False).epoch == 2


def test_members_end_with_their_driver(leases):
    epoch = leases.attach_driver("a", 0.0, False).epoch
    members = [leases.attach_member(name, epoch, 0.0) for name in ("m", "n")]
    assert [(member.role, member.ordinal) for member in members] == [("member", 1), ("member", 2)]
    leases.renew("m", 50.0)
    assert ids(leases.expire(60.0)) == ["a", "m", "n"]
    assert leases.held() == ()
    with pytest.raises(LeaseError, match=r"its driver's lease ended \(not renewed for 60 s\)"):
        leases.renew("m", 61.0)


def test_a_member_ends_alone(leases):
    epoch = leases.attach_driver("a", 0.0, False).epoch
    leases.attach_member("m", epoch, 0.0)
    leases.renew("a", 30.0)
    assert ids(leases.expire(60.0)) == ["m"]
    assert ids(leases.held()) == ["a"]
    assert leases.attach_member("n", epoch, 61.0).ordinal == 2  # no ordinal is given twice


def test_takeover_revokes_the_driver_and_its_members(leases):
    epoch = leases.attach_driver("a", 0.0, False).epoch
    leases.attach_member("m", epoch, 0.0)
    lease = leases.attach_driver("b", 1.0, True)
    assert (lease.epoch, ids(leases.held())) == (2, ["b"])
    with pytest.raises(LeaseError, match="another client took the run over"):
        leases.renew("a", 2.0)
    with pytest.raises(LeaseError, match="handle is of epoch 1, whose driver no longer holds"):
        leases.attach_member("n", epoch, 2.0)
    assert leases.attach_member("n", 2, 2.0).ordinal == 1


def test_a_member_needs_a_driver(leases):
    with pytest.raises(LeaseError, match="handle is of epoch 1"):
        leases.attach_member("m", 1, 0.0)
    leases.attach_driver("a", 0.0, False)
    leases.end("a", "it detached")
    with pytest.raises(LeaseError, match="handle is of epoch 1"):
        leases.attach_member("m", 1, 0.0)


def test_an_ended_id_never_comes_back(leases):
    leases.attach_driver("a", 0.0, False)
    assert ids(leases.end("a", "it detached")) == ["a"]
    assert leases.end("a", "again") == ()
    for attach in (
        lambda: leases.attach_driver("a", 1.0, False),
        lambda: leases.attach_driver("a", 1.0, True),
        lambda: leases.attach_member("a", 1, 1.0),
    ):
        with pytest.raises(LeaseError, match="held a lease that ended: it detached") as caught:
            attach()
        assert caught.value.details == {"client_id": "a"}


def test_whoever_never_attached_has_no_lease(leases):
    with pytest.raises(LeaseError, match="it never attached"):
        leases.renew("a", 0.0)


steps = st.lists(
    st.tuples(
        st.sampled_from(["driver", "takeover", "member", "renew", "end", "pass"]),
        st.sampled_from("abcd"),
        st.floats(0, 40),
    ),
    max_size=30,
)


@given(steps)
def test_whatever_happens_there_is_one_driver_of_one_rising_epoch(script):
    leases, now, ended, epoch = Leases(60.0), 0.0, set(), 0
    for action, name, seconds in script:
        now += seconds
        before = set(ids(leases.held()))
        leases.expire(now)
        try:
            if action in ("driver", "takeover"):
                leases.attach_driver(name, now, action == "takeover")
            elif action == "member":
                leases.attach_member(name, leases.epoch, now)
            elif action == "renew":
                leases.renew(name, now)
            elif action == "end":
                leases.end(name, "asked")
        except LeaseError:
            pass
        held = leases.held()
        ended |= before - set(ids(held))
        assert not ended & set(ids(held))
        assert sum(lease.role == "driver" for lease in held) == bool(held)
        assert {lease.epoch for lease in held} <= {leases.epoch}
        assert len({lease.ordinal for lease in held}) == len(held)
        assert all(isinstance(lease, Lease) and now < lease.expires <= now + 60 for lease in held)
        assert leases.epoch >= epoch
        epoch = leases.epoch
