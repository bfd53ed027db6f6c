"""Arctic backend: one vLLM engine, as whoever holds it uses it (imports core, flight, settings,
stops, weights and the contract; vllm once it starts)."""

from __future__ import annotations

import asyncio
import itertools
import os
import traceback
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from remote_rl.errors import BackendError, InvalidRequestError, RemoteRLError, describe
from remote_rl.requests import InFlight
from remote_rl.types import Label, Sample

from ..asking import is_of_the_group
from ..model_directory import end_ids
from ..weights.manifest import Form, Manifest, cast, check, not_finite
from ..weights.segment import Segment, is_here
from ..weights.sources import Meeting, Source
from .core import CoreThread
from .flight import Flight
from .settings import SampleRequest, SamplerSettings
from .stops import TokenBytes, token_bytes
from .tensors import expected_forms, vocabulary

T = TypeVar("T")

#: requests whose abort is remembered
_MOST_ABORTED = 1000


class SamplerEngine:
    """Draws samples and takes new weights. All methods are called on one event loop."""

    def __init__(self) -> None:
        self._thread: CoreThread | None = None
        self._numbers = itertools.count()
        self._updating = asyncio.Lock()
        self._serials = itertools.count(1)
        #: ids of requests, the newest last
        self._aborted: dict[str, None] = {}

    async def start(self, settings: SamplerSettings) -> None:
        """Loads the model; ten to thirty seconds. The environment that the settings name must be
        there before torch is imported in this process."""
        os.environ.update(settings.environment())
        directory = Path(settings.model)
        self._settings = settings
        self._forms = expected_forms(directory, settings.dtype)
        self._vocabulary = vocabulary(directory)
        # an end beyond the vocabulary is never drawn, and vLLM could not leave it out
        self._ends = frozenset(end for end in end_ids(directory) if end < self._vocabulary)
        self._table: TokenBytes | None = await asyncio.to_thread(
            token_bytes, directory, settings.trust_remote_code
        )
        thread = CoreThread(lambda: _create(settings))
        if settings.version is not None:
            thread.serial, thread.served = 0, {0: (settings.version, None)}
        await asyncio.wrap_future(thread.start())
        self._thread = thread

    async def stop(self) -> None:
        """Ends the engine; what flies fails."""
        if self._thread is not None:
            await asyncio.wrap_future(self._thread.stop())

    def manifest(self) -> dict[str, Form]:
        """Shape and dtype of every tensor that an update brings, by Hugging Face name."""
        return dict(self._forms)

    def offers_stop_strings(self) -> bool:
        """Whether the model has a tokenizer whose tokens are known as bytes."""
        return self._table is not None

    def serving(self) -> tuple[int | None, Label]:
        """Version and label of what it draws from; version None where that is unknown."""
        core = self._core
        serial = core.serial
        return (None, None) if serial is None else core.served[serial]

    @property
    def in_flight(self) -> int:
        """How many samples are being drawn or wait for it."""
        return len(self._core.flights) + len(self._core.waiting)

    def pulse(self) -> int:
        """Tokens drawn since the start; rises as long as the engine works."""
        return self._core.drawn

    # -- generates ----------------------------------------------------------------------------

    async def generate(self, requests: Sequence[SampleRequest]) -> AsyncIterator[Sample]:
        """Each request's sample as it ends. Leaving the iteration aborts the rest."""
        for request in requests:
            self._check(request)
        loop = asyncio.get_running_loop()
        done: asyncio.Queue[Sample | RemoteRLError] = asyncio.Queue()

        def sink(result: Sample | RemoteRLError) -> None:
            if not loop.is_closed():  # else nobody listens any more
                loop.call_soon_threadsafe(done.put_nowait, result)

        flights = [
            Flight.board(str(next(self._numbers)), request, self._ends, self._table, sink)
            for request in requests
        ]
        left = len(flights)
        try:
            await self._call(lambda: self._board(flights))
            while left:
                result = await done.get()
                left -= 1
                if isinstance(result, RemoteRLError):
                    raise result
                yield result
        finally:
            if left:
                ours = {flight.number for flight in flights}
                self._core.call(lambda: self._core.abort(lambda each: each.number in ours))

    def _board(self, flights: Sequence[Flight]) -> None:
        self._core.board(flights)
        late = {each.number for each in flights if each.request.request_id in self._aborted}
        if late:
            self._core.abort(lambda each: each.number in late)

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        """Ends the samples of these requests, or all, with finish_reason "abort" and the tokens
        they have; returns when they have ended. What comes later of a request that was named ends
        at once: Ray may start a generate after the abort that was sent behind it."""
        chosen = None if request_ids is None else set(request_ids)

        def matches(flight: Flight) -> bool:
            return chosen is None or flight.request.request_id in chosen

        def work() -> None:
            self._aborted |= dict.fromkeys(chosen or ())
            for oldest in list(self._aborted)[:-_MOST_ABORTED]:
                del self._aborted[oldest]
            self._core.abort(matches)

        await self._call(work)

    async def pause(self) -> None:
        """Draws nothing from now on; generates wait at their next token."""
        await self._call(lambda: setattr(self._core, "paused", True))

    async def resume(self) -> None:
        """Lets them go on."""
        await self._call(lambda: setattr(self._core, "paused", False))

    async def reset_prefix_cache(self) -> None:
        """Drops the KV of earlier prompts; what runs computes its own anew."""
        await self._call(lambda: self._core.core.drop_cache())

    async def sleep(self) -> None:
        """Gives a GPU's memory up, weights kept in host memory, KV dropped; generates are held at
        their next token. A CPU has none to give, and holds them alike. Raises `BackendError`, after
        which the engine is of no use."""
        await self._call(lambda: self._core.fall_asleep())

    async def wake(self, whole: bool) -> None:
        """Takes it back: whole, and generates go on, or the weights' only, so that new ones can be
        delivered. Raises as `sleep` does."""
        await self._call(lambda: self._core.wake_up(whole))

    def _check(self, request: SampleRequest) -> None:
        tokens, params, row = request.tokens, request.params, request.prompt_index
        if not len(tokens):
            raise InvalidRequestError(f"prompt {row} is empty; give it one token", row=row)
        outside = tokens[(tokens < 0) | (tokens >= self._vocabulary)]
        if len(outside):
            raise InvalidRequestError(
                f"prompt {row} holds token id {outside[0]}, and the model has {self._vocabulary} "
                "ids; was it encoded with another tokenizer?",
                row=row,
            )
        if len(tokens) + params.max_tokens > self._settings.context_length:
            raise InvalidRequestError(
                f"row {row}: prompt and max_tokens come to {len(tokens) + params.max_tokens} "
                f"tokens, more than the context of {self._settings.context_length}",
                row=row,
            )
        if params.stop and self._table is None:
            raise InvalidRequestError(
                f"{self._settings.model} has no tokenizer that stop strings could be found with; "
                "use stop_token_ids",
                field="stop",
            )

    # -- weights ------------------------------------------------------------------------------

    async def connect(self, meeting: Meeting, engine: int) -> None:
        """Joins the group of the trainer's rank 0 for broadcasts; returns when all of it are there.
        engine: this one's number among those that join. Raises `BackendError` where that takes
        longer than the meeting's patience; what is served is served on."""
        first = 1 + engine * self._settings.tensor_parallel
        invitation = {"meeting": meeting, "first": first}
        await self._call(lambda: self._core.core.connect(invitation))

    def reaches(self, segment: str) -> bool:
        """Whether this segment of shared memory is on this machine."""
        return is_here(segment)

    async def prepare(self, manifest: Manifest, in_flight: InFlight) -> None:
        """The first half of an `update` by broadcast, so that nobody broadcasts to an engine that
        lets long samples end: checks the manifest, and returns when nothing flies that in_flight
        ends. Who comes then waits until `go_on`. Raises `InvalidRequestError` as `update` does."""
        check(cast(manifest.forms, self._forms), self._forms)
        if in_flight != "keep":
            await self._empty(in_flight)

    async def go_on(self) -> None:
        """Lets in who waits since `prepare`."""
        await self._call(self._core.admit)

    async def update(
        self,
        manifest: Manifest,
        source: Source,
        in_flight: InFlight,
        version: int,
        label: Label = None,
    ) -> str:
        """Takes over the weights that the manifest describes; they are served as this version from
        the next token on. Returns the fingerprint of what was loaded. Floating tensors are cast to
        the served dtype.

        in_flight: "keep" lets running samples go on with them, "wait" and "abort" end them first,
        and whoever comes meanwhile waits for the new weights. Raises `InvalidRequestError` where
        the manifest is not the model's or a tensor holds NaN or infinity, and `BackendError` where
        its segment is gone or too small; what was served is served on. A failure after that leaves
        nothing to draw from: what flies and what comes fails with a `BackendError` until an update
        succeeds.
        """
        check(cast(manifest.forms, self._forms), self._forms)
        if isinstance(source, str):
            await asyncio.to_thread(_check_segment, source, manifest)
        async with self._updating:
            if in_flight == "keep":
                return await self._call(lambda: self._apply(manifest, source, version, label))
            try:
                await self._empty(in_flight)
                return await self._call(lambda: self._apply(manifest, source, version, label))
            finally:
                await self.go_on()

    async def _empty(self, in_flight: InFlight) -> None:
        """Lets nobody in, and returns when nothing flies."""
        await self._call(lambda: setattr(self._core, "closed_to_new", True))
        if in_flight == "abort":
            await self._call(lambda: self._core.abort(lambda _: True, waiting=False))
        await asyncio.wrap_future(await self._call(self._core.none_left))

    def _apply(self, manifest: Manifest, source: Source, version: int, label: Label) -> str:
        core = self._core
        serial = next(self._serials)
        core.renew_cache(self._settings.recompute_in_flight)
        try:
            held: str = core.core.update(manifest, source, serial)
        except Exception as error:
            core.serial = None
            core.fail_all(core.unknown())
            raise BackendError(
                f"the sampler's update to version {version} failed half-way ({describe(error)}); "
                "nothing is drawn until another one succeeds: sync again",
                worker="sampler",
                traceback="".join(traceback.format_exception(error)),
                **({"group": True} if is_of_the_group(error) else {}),
            ) from error
        core.served[serial] = (version, label)
        core.serial = serial
        return held

    # -- the thread ---------------------------------------------------------------------------

    @property
    def _core(self) -> CoreThread:
        if self._thread is None:
            raise BackendError("the sampling engine was not started", worker="sampler")
        return self._thread

    async def _call(self, function: Callable[[], T]) -> T:
        future: Future[T] = self._core.call(function)
        try:
            return await asyncio.wrap_future(future)
        finally:
            # its error's traceback holds this frame, and both would keep a failed update's tensors
            del future


def _check_segment(name: str, manifest: Manifest) -> None:
    segment = Segment.attach(name)
    segment.holds(manifest)
    wrong = segment.not_finite(manifest)
    if wrong is not None:
        raise not_finite(wrong)


def _create(settings: SamplerSettings) -> Any:
    from .vllm_core import VllmCore  # vLLM, on the thread that is to run it

    try:
        return VllmCore(settings)
    except RemoteRLError:
        raise
    except Exception as error:
        raise BackendError(
            f"vLLM did not start with {settings.model} ({describe(error)})",
            worker="sampler",
            traceback="".join(traceback.format_exception(error)),
        ) from error
