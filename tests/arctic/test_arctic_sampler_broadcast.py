"""Weights that are broadcast to a sampling engine, over gloo: what it draws from afterwards, and
what becomes of both sides where one leaves. Tiny models with a tied and an untied head in a real
vLLM; a thread stands for the trainer's rank 0."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from sampler_engine import PATIENCE, Running

from backends.arctic.sampling import transfer
from backends.arctic.weights.broadcast import join, open_store
from backends.arctic.weights.device_paths import BroadcastWriter
from backends.arctic.weights.manifest import Form, lay_out
from backends.arctic.weights.sources import Broadcast, Meeting
from remote_rl.errors import BackendError, InvalidRequestError, RemoteRLError
from remote_rl.requests import InFlight


class Sender:
    """Rank 0 of a group with one engine."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._threads = ThreadPoolExecutor(2)
        store = open_store(PATIENCE)
        self.name = secrets.token_hex(4)
        meeting = Meeting("gloo", self.name, "localhost", store.port, 2, PATIENCE)
        connecting = running.submit(running.engine.connect(meeting, 0))
        self.group = join(meeting, 0, store)
        connecting.result(PATIENCE)

    def end(self) -> None:
        self.group.abort()
        self._threads.shutdown()

    def sends(self, model: Any, forms: Mapping[str, Form]) -> Future[RemoteRLError | None]:
        """All tensors, as a rank does; then it says what went wrong."""

        def work() -> RemoteRLError | None:
            writer = BroadcastWriter(self.group, lay_out(forms))
            weights = dict(model.named_parameters())
            for name in forms:
                writer.write(name, weights[name])
            return writer.finish()

        return self._threads.submit(work)

    def deliver(
        self,
        model: Any,
        in_flight: InFlight = "keep",
        forms: Mapping[str, Form] | None = None,
        sending: Future[RemoteRLError | None] | None = None,
    ) -> int:
        """The model's weights as the next version, which it returns; a failure of the sender is
        raised where the engine has none."""
        running, forms = self._running, forms or self._running.engine.manifest()
        manifest = lay_out(forms)
        running.version += 1
        running.run(running.engine.prepare(manifest, in_flight))
        try:
            sending = sending or self.sends(model, forms)
            source = Broadcast(self.name)
            held = running.run(running.engine.update(manifest, source, "keep", running.version))
        finally:
            running.run(running.engine.go_on())
        failure = sending.result(PATIENCE)
        assert (held, failure) == (manifest.fingerprint, None)
        return running.version


@pytest.fixture
def sender(running: Running) -> Iterator[Sender]:
    sender = Sender(running)
    yield sender
    sender.end()


def test_what_is_broadcast_is_what_is_drawn_from(running: Running, sender: Sender) -> None:
    for seed in (5, 6, 5):
        other = running.other_model(seed)
        running.serves(other, sender.deliver(other))
    rounded = running.other_model(7)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())
    forms: dict[str, Form] = {
        name: (shape, "bfloat16") for name, (shape, _) in running.engine.manifest().items()
    }
    running.serves(rounded, sender.deliver(rounded, forms=dict(reversed(forms.items()))))


@pytest.mark.parametrize("in_flight", ["wait", "abort"])
def test_nobody_is_let_in_from_the_preparation_on(
    running: Running, sender: Sender, in_flight: Any
) -> None:
    old, manifest = running.version, lay_out(running.engine.manifest())
    future = running.held(max_tokens=60)
    preparing = running.submit(running.engine.prepare(manifest, in_flight))
    running.until(lambda: running.engine._core.closed_to_new)
    newcomers = running.begin(name="newcomers", count=2)
    running.until(lambda: len(running.engine._core.waiting) == 2)
    running.run(running.engine.resume())
    preparing.result(PATIENCE)
    assert {sample.last_version for sample in future.result(PATIENCE)} == {old}
    assert not newcomers.done()
    new = sender.deliver(running.other_model(5))  # which lets them in
    assert {sample.first_version for sample in newcomers.result(PATIENCE)} == {new}


def test_another_manifest_is_refused_before_anything_is_ended(
    running: Running, sender: Sender
) -> None:
    forms = running.engine.manifest()
    del forms["model.norm.weight"]
    future = running.held(max_tokens=60)
    with pytest.raises(InvalidRequestError, match=r"'model.norm.weight' of the model is missing"):
        running.run(running.engine.prepare(lay_out(forms), "abort"))
    assert not future.done()
    running.run(running.engine.resume())
    assert all(sample.finish_reason != "abort" for sample in future.result(PATIENCE))
    running.serves(running.model, running.version)


@pytest.mark.parametrize("place", [0, 1, 7, 19])
def test_a_sender_that_leaves_half_way_is_mended_by_any_delivery(
    running: Running, sender: Sender, place: int
) -> None:
    other = running.other_model(5)
    forms = running.engine.manifest()

    def some() -> RemoteRLError | None:
        weights = dict(other.named_parameters())
        for name in list(forms)[:place]:
            sender.group.carry(weights[name].detach())
        sender.group.abort()
        return None

    with pytest.raises(BackendError, match=r"failed half-way .*broken off.*sync again"):
        sender.deliver(other, sending=sender._threads.submit(some))
    assert running.run(running.serving()) == (None, None)
    with pytest.raises(BackendError, match="sync again"):
        running.draw()
    with pytest.raises(BackendError, match="in no group"):  # it has left, too
        sender.deliver(other)
    running.serves(running.model, running.deliver(running.model))
    again = Sender(running)
    running.serves(other, again.deliver(other))
    again.end()


@pytest.mark.parametrize("place", [0, 4, 19])
def test_an_engine_that_fails_half_way_leaves_its_sender_alone(
    running: Running, sender: Sender, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = running.other_model(5)
    whole = transfer.WeightEngine._asked

    def broken(self: Any, tensors: Any) -> Iterator[Any]:
        for number, item in enumerate(whole(self, tensors)):
            if number == place:
                raise MemoryError("no room")
            yield item

    sending = sender.sends(other, running.engine.manifest())
    with monkeypatch.context() as patch:
        patch.setattr(transfer.WeightEngine, "_asked", broken)
        with pytest.raises(BackendError, match=r"failed half-way .*no room"):
            sender.deliver(other, sending=sending)
    failure = sending.result(5)
    assert failure is None or failure.details["group"]  # the last of them may have left it already
    again = Sender(running)
    running.serves(other, again.deliver(other))
    again.end()


def test_what_the_model_does_not_ask_for_is_told_and_keeps_nobody_waiting(
    running: Running, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, forms = running.other_model(5), running.engine.manifest()
    whole = transfer.WeightEngine._asked

    def first(self: Any, tensors: Any) -> Iterator[Any]:
        for number, item in enumerate(whole(self, tensors)):
            if number == 4:
                return
            yield item

    manifest = lay_out(forms)
    running.version += 1
    with monkeypatch.context() as patch:
        patch.setattr(transfer.WeightEngine, "_asked", first)
        sending = sender.sends(other, forms)
        source = Broadcast(sender.name)
        held = running.run(running.engine.update(manifest, source, "keep", running.version))
    assert sending.result(5) is None
    assert held != manifest.fingerprint
    running.serves(other, sender.deliver(other))


def test_a_meeting_to_which_rank_0_does_not_come_changes_nothing(running: Running) -> None:
    store = open_store(PATIENCE)
    meeting = Meeting("gloo", "never", "localhost", store.port, 2, 0.5)
    with pytest.raises(BackendError, match=r"did not come within 0.5 s, number 0"):
        running.run(running.engine.connect(meeting, 0))
    running.serves(running.model, running.version)
