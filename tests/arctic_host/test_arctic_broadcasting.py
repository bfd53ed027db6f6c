"""Syncs by broadcast: that neither side waits for one that does not come. Ranks and engines are
stood for by what waits as they do; between real ones it is in tests/arctic."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from backends.arctic import broadcasting
from backends.arctic.asking import asked, most_telling
from backends.arctic.broadcasting import Broadcasts
from backends.arctic.weight_path import WeightPath
from backends.arctic.weights.manifest import Form, Manifest
from backends.arctic.weights.sources import Broadcast
from remote_rl.errors import (
    BackendError,
    InvalidRequestError,
    RemoteRLError,
    UnsupportedError,
)
from remote_rl.requests import InFlight, Push, Sync
from remote_rl.types import SyncReceipt, Tensor

#: in the order of the sampler's files, which is not that of the trainer's parameters
SERVED: Mapping[str, Form] = {"b": ((3,), "bfloat16"), "a": ((2, 2), "bfloat16")}
HELD: Mapping[str, Form] = {"a": ((2, 2), "float32"), "b": ((3,), "float32")}
#: after which a test has failed, and what is to take long takes longer
SOON = 10.0
#: of those tests that are to see it pass
SHORT = 0.05
GONE = BackendError("the broadcast was broken off", group=True)


class Ranks:
    """Two. Rank 0 waits in `meeting` and in `sending` until these are set, or it is called off."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.forms, self.host = HELD, "here"
        self.processes: tuple[str, ...] = ("rank 0", "rank 1")
        self.failure: BackendError | None = None
        self.meeting, self.sending = asyncio.Event(), asyncio.Event()
        self.off: dict[str, asyncio.Event] = {}
        #: what each method raises, or rank 0 returns as its failure
        self.raises: dict[str, RemoteRLError] = {}
        self.returns: dict[str, RemoteRLError] = {}
        #: whether it pays heed when it is called off
        self.hears = True
        self._given_up = asyncio.Event()

    async def everywhere(self, method: str, *given: Any, context: Any) -> list[Any]:
        self.log.append(method)
        context.progress(0.0, None, method)
        if method in self.raises:
            raise self.raises[method]
        if method == "open_store":
            return [7, None]
        if method in ("join_group", "broadcast"):
            meeting = method == "join_group"
            name = given[0].name if meeting else given[0]
            waits = self.meeting if meeting else self.sending
            off = self.off.setdefault(name, asyncio.Event())
            await _any(waits, off, self._given_up)
            if self._given_up.is_set():
                assert self.failure is not None
                raise self.failure.copy()
            if not waits.is_set():
                return [GONE, None]
            return [self.returns.get(method), None]
        return [None, None]

    def call_off(self, name: str) -> None:
        self.log.append("call_off")
        if self.hears:
            self.off.setdefault(name, asyncio.Event()).set()

    def give_up(self, why: str) -> None:
        self.failure = BackendError(why, worker="ranks")
        self._given_up.set()


async def _any(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(each.wait()) for each in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waits:
            each.cancel()


class Worker:
    """An engine. answers: by method, what it does instead of answering at once."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = self.process = name
        self.log = log
        self.ready = self.synced = True
        self.updating = False
        self.failure: BackendError | None = None
        self.answers: dict[str, Callable[[], Awaitable[Any]]] = {}
        self.told: list[tuple[Any, ...]] = []
        self._ended = asyncio.Event()

    async def ask(self, method: str, *given: Any) -> Any:
        if method != "pulse":
            self.log.append(f"{method} {self.name}")
            self.told.append((method, *given))
        updates = method == "update"
        self.updating = self.updating or updates
        answer = asyncio.ensure_future(self.answers.get(method, _nothing)())
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({answer, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                assert self.failure is not None
                raise self.failure.copy()
            return answer.result()
        finally:
            answer.cancel()
            ended.cancel()
            self.updating = self.updating and not updates

    def give_up(self, why: str) -> None:
        self.failure = BackendError(f"{self.name} {why}", worker=self.name, died=True)
        self.ready = self.synced = False
        self._ended.set()

    def die(self) -> None:
        self.give_up("died")


async def _nothing() -> None: ...


async def no() -> bool:
    return False


async def never() -> None:
    await asyncio.Event().wait()


def fails(error: RemoteRLError) -> Callable[[], Awaitable[Any]]:
    async def failing() -> None:
        raise error

    return failing


@attrs.define
class Pool:
    """Those that live are asked, as the real one does."""

    workers: list[Worker]
    forms: Mapping[str, Form] = SERVED
    serves: bool = True

    @property
    def living(self) -> tuple[Worker, ...]:
        return tuple(each for each in self.workers if each.ready)

    @property
    def ready(self) -> bool:
        return bool(self.living)

    async def available(self, context: Any) -> None: ...

    async def update(
        self,
        manifest: Manifest,
        source: Any,
        in_flight: InFlight,
        version: int,
        label: Any,
        context: Any,
        among: Any,
        failed: Callable[[], None],
    ) -> list[str]:
        chosen: list[Any] = [each for each in self.living if among is None or each.process in among]
        answers = await asked(chosen, "update", manifest, source, in_flight, failed=failed)
        failures = [each for each in answers if isinstance(each, BaseException)]
        if failures:
            raise most_telling(failures)
        return [manifest.fingerprint for _ in answers]


class Reports:
    def serving(self, version: int | None, label: Any) -> None: ...


class Context:
    version, next_version, request_id = 3, 4, "c:training:1"

    def __init__(self) -> None:
        self.told: list[str] = []

    def progress(self, done: float, total: float | None = None, what: str = "") -> None:
        self.told.append(what)

    async def thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.to_thread(function, *arguments)


class Run:
    """Ranks, two engines, and their syncs."""

    def __init__(self, patience: float) -> None:
        self.log: list[str] = []
        self.ranks = Ranks(self.log)
        self.one, self.two = Worker("one", self.log), Worker("two", self.log)
        self.pool = Pool([self.one, self.two])
        self.context = Context()
        ranks: Any = self.ranks
        pool: Any = self.pool
        reports: Any = Reports()
        broadcasts = Broadcasts(ranks, pool, "gloo", 2, patience)
        self._path = WeightPath(ranks, pool, reports, broadcasts)
        self.ranks.meeting.set()
        self.ranks.sending.set()

    async def sync(self, in_flight: InFlight = "keep") -> SyncReceipt:
        context: Any = self.context
        async with asyncio.timeout(SOON):
            return await self._path.sync(Sync(label="l", in_flight=in_flight), context)

    async def push(self) -> SyncReceipt:
        context: Any = self.context
        tensors = {
            name: Tensor(data=np.ones(shape, np.float32), dtype="float32")
            for name, (shape, _) in HELD.items()
        }
        return await self._path.push(Push(tensors=tensors), context)

    async def fails(self, message: str, kind: type[RemoteRLError] = BackendError) -> RemoteRLError:
        with pytest.raises(kind, match=message) as caught:
            await self.sync()
        return caught.value


def run(script: Callable[[Run], Awaitable[None]], patience: float = 10 * SOON) -> None:
    async def whole() -> None:
        await script(Run(patience))

    asyncio.run(whole())


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcasting, "LOOK_SECONDS", SHORT / 10)
    monkeypatch.setattr(broadcasting, "GRACE_SECONDS", SHORT)


# -- deliveries ---------------------------------------------------------------------------------


def test_engines_are_ready_before_a_rank_begins() -> None:
    async def script(run: Run) -> None:
        receipt = await run.sync("wait")
        assert receipt.source_fingerprint == receipt.sampler_fingerprint
        assert (receipt.version, receipt.label, receipt.tensors, receipt.bytes) == (3, "l", 2, 14)
        assert run.log[:2] == ["check_weights", "open_store"]
        assert sorted(run.log[2:5]) == ["connect one", "connect two", "join_group"]
        assert sorted(run.log[5:7]) == ["prepare one", "prepare two"]
        assert sorted(run.log[7:10]) == ["broadcast", "update one", "update two"]
        assert sorted(run.log[10:]) == ["go_on one", "go_on two"]
        meetings = [told[1:] for told in (run.one.told[0], run.two.told[0])]
        assert [number for _, number in meetings] == [0, 1]
        (meeting, other) = (each for each, _ in meetings)
        assert meeting == other
        assert (meeting.address, meeting.port, meeting.size) == ("here", 7, 5)
        (manifest, source, in_flight) = next(each[1:] for each in run.one.told if "update" in each)
        assert manifest.forms == SERVED
        assert [entry.name for entry in manifest] == ["a", "b"]  # as the ranks send them
        assert (source, in_flight) == (Broadcast(meeting.name), "keep")

    run(script)


def test_a_group_lasts_as_long_as_all_of_it_do() -> None:
    async def script(run: Run) -> None:
        for _ in range(3):
            await run.sync()
        assert run.log.count("join_group") == 1
        run.one.process = "one again"
        await run.sync()
        assert run.log.count("join_group") == 2
        run.ranks.processes = ("rank 0 again", "rank 1 again")
        await run.sync()
        assert run.log.count("join_group") == 3
        run.ranks.returns["broadcast"] = BackendError("it was not well")
        run.one.answers["update"] = fails(GONE)
        await run.fails("not well")
        run.ranks.returns.clear()
        run.one.answers.clear()
        await run.sync()
        assert run.log.count("join_group") == 4

    run(script)


def test_a_group_that_was_called_off_is_not_met_again() -> None:
    """Also where the ranks had sent all when an engine failed: they have left it since."""

    async def script(run: Run) -> None:
        run.one.answers["update"] = fails(BackendError("half-way"))
        await run.fails("half-way")
        assert "call_off" in run.log
        run.one.answers.clear()
        await run.sync()
        assert run.log.count("join_group") == 2

    run(script)


def test_what_the_ranks_refuse_touches_no_engine() -> None:
    async def script(run: Run) -> None:
        run.ranks.raises["check_weights"] = InvalidRequestError("NaN", field="a")
        await run.fails("NaN", InvalidRequestError)
        assert run.log == ["check_weights"]

    run(script)


def test_what_an_engine_refuses_beforehand_is_not_begun() -> None:
    async def script(run: Run) -> None:
        run.two.answers["prepare"] = fails(InvalidRequestError("not mine", field="a"))
        with pytest.raises(InvalidRequestError, match="not mine"):
            await run.sync("abort")
        assert "broadcast" not in run.log
        assert sorted(run.log[-2:]) == ["go_on one", "go_on two"]

    run(script)


def test_an_engine_that_dies_while_others_let_samples_end_is_left_out() -> None:
    async def script(run: Run) -> None:
        async def dies() -> None:
            run.two.die()

        run.two.answers["prepare"] = dies
        await run.sync("wait")
        assert run.log.count("join_group") == 2
        assert "update two" not in run.log

    run(script)


def test_a_long_wait_for_samples_shows_that_they_go_on() -> None:
    async def script(run: Run) -> None:
        drawn, enough = 0, asyncio.Event()

        async def pulse() -> int:
            nonlocal drawn
            drawn += 1
            if drawn == 5:
                enough.set()
            return drawn

        async def waits() -> None:
            await enough.wait()

        run.one.answers.update(pulse=pulse, prepare=waits)
        await run.sync("wait")
        assert run.context.told.count("delivering weights") >= 4

    run(script)


def test_a_push_is_refused_whole_where_an_engine_is_on_another_machine() -> None:
    """It goes through the machine's shared memory, also where a sync is broadcast."""

    async def script(run: Run) -> None:
        for worker in (run.one, run.two):

            async def reaches(worker: Worker = worker) -> bool:
                return Path("/dev/shm", worker.told[-1][1]).exists()

            worker.answers["reaches"] = reaches
        assert (await run.push()).version == 4
        assert "update two" in run.log
        run.log.clear()
        run.two.answers["reaches"] = no
        with pytest.raises(UnsupportedError, match="two is not on the server's machine"):
            await run.push()
        assert sorted(run.log) == ["reaches one", "reaches two"]

    run(script)


# -- a side that fails --------------------------------------------------------------------------


@pytest.mark.parametrize("error", [BackendError("half-way"), InvalidRequestError("no", field="a")])
def test_ranks_do_not_wait_for_an_engine_that_fails(error: RemoteRLError) -> None:
    """They are called off as soon as it does, since the others wait for the ranks."""

    async def script(run: Run) -> None:
        run.ranks.sending.clear()
        run.one.answers["update"] = fails(error)

        async def until_called_off() -> None:
            while "call_off" not in run.log:
                await asyncio.sleep(0)
            raise GONE

        run.two.answers["update"] = until_called_off
        await run.fails(str(error), type(error))
        assert run.ranks.failure is None

    run(script)


def test_an_engine_that_dies_leaves_a_new_group_to_the_others() -> None:
    async def script(run: Run) -> None:
        run.ranks.sending.clear()

        async def dies() -> None:
            run.one.die()
            run.two.answers.clear()
            await never()

        async def half_way() -> None:
            while not run.ranks.off:
                await asyncio.sleep(0)
            raise BackendError("half-way", worker="two")

        run.one.answers["update"], run.two.answers["update"] = dies, half_way
        syncing = asyncio.ensure_future(run.sync())
        while run.log.count("broadcast") < 2:
            await asyncio.sleep(0)
        run.ranks.sending.set()
        assert (await syncing).version == 3
        assert run.log.count("join_group") == 2
        assert run.log.count("update two") == 2

    run(script)


def test_engines_that_die_one_after_the_other_end_it() -> None:
    async def script(run: Run) -> None:
        async def one_dies() -> None:
            run.one.die()
            await never()

        async def two_dies_alone() -> None:
            if run.log.count("update two") == 1:
                raise GONE
            run.two.die()
            await never()

        run.one.answers["update"], run.two.answers["update"] = one_dies, two_dies_alone
        run.ranks.sending.clear()
        error = await run.fails("two died")
        assert error.details["died"] is True
        assert run.log.count("broadcast") == 2
        await run.fails("every sampling engine has died")

    run(script, patience=SHORT)


@pytest.mark.parametrize(
    ("failure", "told"),
    [(BackendError("rank 0 has no room"), "rank 0 has no room"), (GONE, "half-way")],
)
def test_what_rank_0_found_by_itself_is_told(failure: BackendError, told: str) -> None:
    async def script(run: Run) -> None:
        run.ranks.returns["broadcast"] = failure
        run.one.answers["update"] = fails(BackendError("half-way"))
        await run.fails(told)

    run(script)


def test_ranks_that_die_are_told_and_the_engines_with_them() -> None:
    async def script(run: Run) -> None:
        run.ranks.raises["broadcast"] = BackendError("rank 1 died", worker="rank 1")
        run.one.answers["update"] = fails(BackendError("half-way"))
        run.two.answers["update"] = never  # as NCCL lets it
        await run.fails("rank 1 died")
        assert run.two.failure is not None
        assert "did not end its update" in str(run.two.failure)

    run(script)


def test_ranks_that_fail_after_the_last_piece_do_not_undo_it() -> None:
    async def script(run: Run) -> None:
        run.ranks.raises["broadcast"] = BackendError("rank 1 died", worker="rank 1")
        assert (await run.sync()).version == 3
        del run.ranks.raises["broadcast"]
        await run.sync()
        assert run.log.count("join_group") == 2

    run(script)


# -- a meeting that fails -----------------------------------------------------------------------


def test_a_meeting_ends_where_an_engine_can_not_come() -> None:
    async def script(run: Run) -> None:
        run.ranks.meeting.clear()
        run.two.answers["connect"] = fails(BackendError("no way there", worker="two"))
        await run.fails("no way there")
        assert "prepare one" not in run.log

    run(script)


def test_a_meeting_ends_where_rank_0_can_not_come() -> None:
    async def script(run: Run) -> None:
        run.ranks.returns["join_group"] = BackendError("no port", worker="rank 0")
        run.one.answers["connect"] = fails(GONE)
        await run.fails("no port")

    run(script)


def test_an_engine_that_never_comes_to_a_meeting_is_ended() -> None:
    async def script(run: Run) -> None:
        run.two.answers["connect"] = never
        assert (await run.sync()).version == 3  # of the others
        assert run.two.failure is not None
        assert "two did not answer connect within" in str(run.two.failure)
        assert "update two" not in run.log

    run(script, patience=SHORT)


# -- a side that hangs --------------------------------------------------------------------------


def test_ranks_that_do_nothing_are_called_off_and_then_ended() -> None:
    async def script(run: Run) -> None:
        run.ranks.sending.clear()
        run.ranks.hears = False
        run.one.answers["update"] = run.two.answers["update"] = never
        await run.fails("the ranks did nothing for")
        assert "call_off" in run.log

    run(script, patience=SHORT)


def test_an_engine_that_does_not_answer_is_ended_and_the_others_are_delivered_to() -> None:
    async def script(run: Run) -> None:
        run.two.answers.update(pulse=never, prepare=never)
        assert (await run.sync("wait")).version == 3
        assert run.two.failure is not None
        assert "two did not answer pulse within" in str(run.two.failure)
        assert "update two" not in run.log

    run(script, patience=SHORT)


def test_an_engine_that_has_all_and_does_not_end_is_ended() -> None:
    async def script(run: Run) -> None:
        run.one.answers["update"] = never
        run.two.answers["update"] = never
        await run.fails("did not end its update within")

    run(script, patience=SHORT)


@pytest.mark.parametrize("during", ["join_group", "broadcast"])
def test_a_sync_that_is_cancelled_leaves_nobody_waiting(during: str) -> None:
    async def script(run: Run) -> None:
        waits = run.ranks.sending if during == "broadcast" else run.ranks.meeting
        waits.clear()
        for each in (run.one, run.two):
            each.answers.update(update=never, **({"connect": never} if "join" in during else {}))
        syncing = asyncio.ensure_future(run.sync())
        while during not in run.log:
            await asyncio.sleep(0)
        syncing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await syncing
        assert "call_off" in run.log
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait({asyncio.ensure_future(asyncio.sleep(0)), *others}, timeout=SOON)
        assert all(each.done() for each in others)

    run(script)


def test_the_meeting_of_a_run_is_like_no_other() -> None:
    async def script(run: Run) -> None:
        for process in ("first", "second", "third"):
            run.one.process = process
            await run.sync()
        names = {each[1].name for each in run.one.told if each[0] == "connect"}
        assert len(names) == 3

    run(script)
