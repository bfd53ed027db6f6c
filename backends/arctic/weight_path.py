"""Arctic backend: the path of weights to the sampler, from the trainer or a client (imports
broadcasting, weights and the contract)."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Literal

from remote_rl.errors import BackendError, UnsupportedError
from remote_rl.protocol import OperationContext
from remote_rl.requests import InFlight, Push, PushPart, Sync
from remote_rl.types import Label, SyncReceipt, Tensor

from .asking import asked, is_death
from .broadcasting import Broadcasts, Sent
from .weights.manifest import Form, Manifest, cast, check, lay_out
from .weights.segment import SegmentWriter, new_name, unlink
from .weights.sources import IpcHandles
from .weights.staging import Staging

if TYPE_CHECKING:
    from .host import Reports
    from .samplers import SamplerPool
    from .trainers import TrainerGroup

log = logging.getLogger("remote_rl.arctic")


class WeightPath:
    """Implements `protocol.WeightSync`. A push goes through shared memory, and so does a sync
    unless `way` says otherwise: whoever has tensors writes them into a segment, every engine copies
    them from there, and the segment goes. broadcasts: where a sync goes by broadcast.

    staging: the segment of a push that comes in parts. Any other delivery removes it, since the
    dispatcher has ended its transfer then, and there may be no room for two."""

    def __init__(
        self,
        trainers: TrainerGroup,
        pool: SamplerPool,
        reports: Reports,
        way: Literal["shared_memory", "cuda_ipc"] | Broadcasts = "shared_memory",
    ) -> None:
        self._broadcast = isinstance(way, Broadcasts)
        self._anywhere = way != "shared_memory"
        self._sent = (
            way.sent
            if isinstance(way, Broadcasts)
            else {"shared_memory": self._written, "cuda_ipc": self._lent}[way]
        )
        self._trainers = trainers
        self._pool = pool
        self._reports = reports
        self.staging = Staging()

    async def sync(self, request: Sync, context: OperationContext) -> SyncReceipt:
        """Carries the trainer's weights over; the sampler then serves `context.version`."""
        return await self.deliver(request.in_flight, context.version, request.label, context)

    async def deliver(
        self, in_flight: InFlight, version: int, label: Label, context: OperationContext
    ) -> SyncReceipt:
        """The trainer's weights, as `version`."""
        begin = time.monotonic()
        self.staging.drop()
        await self._pool.available(context)
        expected = self._pool.forms
        check(cast(self._trainers.forms, expected), expected, "the sampler")
        # an engine that dies in a broadcast takes it from the others, who then get another
        for _ in range(len(self._pool.living) - 1 if self._broadcast else 0):
            try:
                return await self._delivered(expected, in_flight, version, label, begin, context)
            except BackendError as error:
                if not (is_death(error) and self._pool.ready):
                    raise
                log.warning("%s; the others are delivered to again", error)
        return await self._delivered(expected, in_flight, version, label, begin, context)

    async def _delivered(
        self,
        expected: Mapping[str, Form],
        in_flight: InFlight,
        version: int,
        label: Label,
        begin: float,
        context: OperationContext,
    ) -> SyncReceipt:
        async with self._sent(expected, in_flight, context) as sent:
            log.info(
                "%s: version %d, %d tensors sent, %d expected",
                context.request_id,
                version,
                len(sent.manifest),
                len(expected),
            )
            return await self._carry(sent, version, label, begin, context)

    @contextlib.asynccontextmanager
    async def _written(
        self, expected: Mapping[str, Form], in_flight: InFlight, context: OperationContext
    ) -> AsyncIterator[Sent]:
        segment = new_name()
        try:
            written = await self._trainers.everywhere("publish", segment, expected, context=context)
            yield Sent(Manifest(written[0]), segment, in_flight)
        finally:
            unlink(segment)

    @contextlib.asynccontextmanager
    async def _lent(
        self, expected: Mapping[str, Form], in_flight: InFlight, context: OperationContext
    ) -> AsyncIterator[Sent]:
        """UNVERIFIED. Each engine reads from the rank on its own GPU."""
        try:
            lent = await self._trainers.everywhere("lend", expected, context=context)
            manifest = lay_out({name: expected[name] for name in self._trainers.forms})
            yield Sent(manifest, IpcHandles.merged(lent), in_flight)
        finally:
            if self._trainers.failure is None:  # else it went with the ranks
                await self._trainers.everywhere("take_back", context=context)

    async def push_part(self, request: PushPart, context: OperationContext) -> None:
        """Writes pieces to where the engines will read them; before that, the forms, which come
        first, must be those of the model. No engine is needed for it."""
        try:
            if request.forms:
                self.staging.drop()
                forms = {name: (form.shape, form.dtype) for name, form in request.forms.items()}
                self._check(forms)
                await context.thread(self.staging.begin, request.transfer, forms)
            else:
                await context.thread(self.staging.write, request.transfer, request.pieces)
        except BaseException:
            self.staging.drop()  # a part that fails ends its transfer
            raise

    async def push(self, request: Push, context: OperationContext) -> SyncReceipt:
        """Takes a client's tensors, or those that its parts have brought; the sampler then serves
        `context.next_version`."""
        version, label, in_flight = context.next_version, request.label, request.in_flight
        if request.tensors is None:
            assert request.transfer is not None
            staged = self.staging.take(request.transfer)
            try:
                await self._pool.available(context)
                sent = Sent(Manifest(staged.writer.finish()), staged.segment, in_flight)
                return await self._carry(sent, version, label, staged.began, context)
            finally:
                unlink(staged.segment)
        begin = time.monotonic()
        self.staging.drop()
        given = {name: (tuple(each.shape), each.dtype) for name, each in request.tensors.items()}
        await self._pool.available(context)
        self._check(given)
        segment = new_name()
        try:
            manifest = await context.thread(_write, segment, request.tensors, given)
            sent = Sent(manifest, segment, in_flight)
            return await self._carry(sent, version, label, begin, context)
        finally:
            unlink(segment)

    async def _all_reach(self, segment: str) -> None:
        """Engines that no sync reaches by shared memory may be anywhere, and none is to take a push
        alone."""
        living = self._pool.living
        for worker, answer in zip(living, await asked(living, "reaches", segment), strict=True):
            if answer is False:
                raise UnsupportedError(
                    f"{worker.name} is not on the server's machine, whose shared memory a push "
                    "goes through; sync instead, or set weights.path 'shared_memory', which "
                    "places all engines there",
                    worker=worker.name,
                )

    def _check(self, given: Mapping[str, Form]) -> None:
        expected = self._pool.forms
        # a client may send another float than the engine holds; it is cast there
        check(cast(given, expected), expected)

    async def _carry(
        self,
        sent: Sent,
        version: int,
        label: Label,
        begin: float,
        context: OperationContext,
    ) -> SyncReceipt:
        manifest, told = sent.manifest, (sent.manifest, sent.source, sent.in_flight)
        if self._anywhere and isinstance(sent.source, str):
            await self._all_reach(sent.source)
        try:
            held = await self._pool.update(*told, version, label, context, sent.among, sent.failed)
        except Exception:
            if not self._pool.serves:
                self._reports.serving(None, None)
            raise
        if any(each != held[0] for each in held):
            raise BackendError("the sampling engines hold tensors of different names or shapes")
        self._reports.serving(version, label)
        return SyncReceipt(
            version=version,
            label=label,
            tensors=len(manifest),
            bytes=manifest.nbytes,
            seconds=time.monotonic() - begin,
            source_fingerprint=manifest.fingerprint,
            sampler_fingerprint=held[0],
        )


def _write(segment: str, tensors: Mapping[str, Tensor], forms: Mapping[str, Form]) -> Manifest:
    manifest = lay_out(forms)
    writer = SegmentWriter(segment, manifest)
    for name, tensor in tensors.items():
        writer.write(name, tensor.data)
    return Manifest(writer.finish())
