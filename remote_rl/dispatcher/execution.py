"""Dispatcher: calls the backend for one record and applies the rules around it (imports the
contract, rules, store, transfers, context)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from ..errors import BackendError, InvalidRequestError, OperationCancelled
from ..ops import Operation
from ..protocol import Backend
from ..requests import Abandon, Delete, Export, Load, ReadFile, Request, Reset, Save
from ..run_info import CheckpointList, FileChunk, FileList, RunInfo
from ..types.results import (
    CheckpointInfo,
    Done,
    ExportReceipt,
    LoadResult,
    WeightsVersion,
)
from .answers import answer_problem
from .budget import FILE_CHUNK
from .context import RunningContext
from .rules import Rules, SeedBook
from .store import Store
from .transfers import Transfers


class Execution:
    """Runs operations on a backend: one method a special case, one for all the others."""

    def __init__(
        self,
        backend: Backend,
        rules: Rules,
        seeds: SeedBook,
        store: Store,
        describe: Callable[[], RunInfo],
    ) -> None:
        self.backend = backend
        self.rules = rules
        self.seeds = seeds
        self.store = store
        self.transfers = Transfers()
        self._describe = describe

    async def run(self, row: Operation, request: Request, context: RunningContext) -> Any:
        """The operation's result. Raises what the backend or the rules raise."""
        part_of = self.transfers.check(context.record.client_id, row, request)
        self.rules.admit(row, request)
        self.transfers.begin(row)
        context.record.began = True
        method = getattr(self, f"_{row.name}", None) or self._method(row)
        result = await method(request, context)
        _refuse_late(row, context)
        if not (isinstance(result, row.response) or (result is None and row.response is Done)):
            raise BackendError(
                f"backend {self.backend.name!r} answered {row.name} with a "
                f"{type(result).__name__} instead of a {row.response.__name__}"
            )
        problem = answer_problem(request, result)
        if problem is not None:
            raise BackendError(f"backend {self.backend.name!r} answered {row.name} with {problem}")
        self.rules.succeeded(row, request, _reported(result))
        self.transfers.succeeded(part_of, request)
        return Done(version=self.rules.version) if result is None else result

    def _method(self, row: Operation) -> Any:
        face = self.backend if row.face == "backend" else getattr(self.backend, row.face)
        return getattr(face, row.name)

    # -- checkpoints and files ----------------------------------------------------------------

    async def _save(self, request: Save, context: RunningContext) -> CheckpointInfo:
        partial = self.store.begin("checkpoint", request.name)
        written = False
        try:
            context._directory = partial / "state"
            reference = await self.backend.training.save(request, context)
            _refuse_late(context.record.operation, context)
            info = CheckpointInfo(
                name=request.name,
                version=self.rules.version,
                optimizer=request.optimizer,
                reference=reference,
                metadata=request.metadata,
            )
            counters = context.counters or dict(self.seeds.counters)
            complete = await context.thread(self.store.finish_checkpoint, partial, info, counters)
            written = True
            return complete
        finally:
            if not written:
                self.store.abandon(partial)

    async def _load(self, request: Load, context: RunningContext) -> LoadResult:
        stored = self.store.checkpoint(request.name)
        if request.optimizer and not stored.info.optimizer:
            raise InvalidRequestError(
                f"checkpoint {request.name!r} holds no optimizer state; load it with "
                "optimizer=False for a fresh one (connect(start=...) can't: start='base' and load)"
            )
        self.rules.loading(stored.info.version)
        context.next_version = self.rules.next_version
        context._directory = stored.directory
        await self.backend.training.load(request, context)
        self.seeds.restore(dict(stored.counters))
        return LoadResult(
            name=request.name,
            metadata=stored.info.metadata,
            version=context.next_version,
            saved_version=stored.info.version,
            optimizer=request.optimizer,
        )

    async def _export(self, request: Export, context: RunningContext) -> ExportReceipt:
        partial = self.store.begin("export", request.name)
        placed: Path | None = None
        try:
            context._directory = partial / "state"
            await self.backend.training.export(request, context)
            placed = await context.thread(self.store.finish_export, partial, request.name)
        finally:
            if placed is None:
                self.store.abandon(partial)
        files = self.store.files("export", request.name)
        return ExportReceipt(
            name=request.name,
            path=str(placed),
            files=tuple(files),
            bytes=sum(files.values()),
            version=self.rules.version,
        )

    async def _checkpoints(self, request: Request, context: RunningContext) -> CheckpointList:
        return CheckpointList(checkpoints=await context.thread(self.store.checkpoints))

    async def _delete(self, request: Delete, context: RunningContext) -> None:
        await context.thread(self.store.delete, request.kind, request.name)

    async def _list_files(self, request: Any, context: RunningContext) -> FileList:
        files, identity = await context.thread(self.store.listing, request.kind, request.name)
        return FileList(paths=tuple(files), sizes=tuple(files.values()), identity=identity)

    async def _read_file(self, request: ReadFile, context: RunningContext) -> FileChunk:
        data, size = await context.thread(
            self.store.read,
            request.kind,
            request.name,
            request.path,
            request.offset,
            min(request.length, FILE_CHUNK),
            request.identity,
        )
        return FileChunk(data=data, size=size)

    # -- the rest -----------------------------------------------------------------------------

    async def _info(self, request: Request, context: RunningContext) -> RunInfo:
        return self._describe()

    async def _version(self, request: Request, context: RunningContext) -> WeightsVersion:
        return self.versions()

    def versions(self) -> WeightsVersion:
        """What trainer and sampler hold now."""
        sampler, label = self.backend.sampler_version()
        return WeightsVersion(trainer=self.rules.version, sampler=sampler, label=label)

    async def _reset(self, request: Reset, context: RunningContext) -> Any:
        result: Any = await self.backend.reset(request, context)  # type: ignore[func-returns-value]
        self.seeds.restore({})
        return result

    async def _abandon(self, request: Abandon, context: RunningContext) -> None:
        raise BackendError(f"the client's loss function failed: {request.reason}")


def _refuse_late(row: Operation, context: RunningContext) -> None:
    """Raises where a sequenced operation returns after its failure was told: its run has ended, and
    nothing that it did may count."""
    if context.record.done and row.sequenced:
        raise OperationCancelled(f"{row.name} returned after its run had ended")


def _reported(result: Any) -> int | None:
    if isinstance(result, (CheckpointInfo, ExportReceipt, WeightsVersion)) or result is None:
        return None
    version = getattr(result, "version", None) if attrs.has(type(result)) else None
    return version if isinstance(version, int) else None
