"""Dispatcher: the rules of a run that hold for every backend, pure state (imports the contract).

Versions, the accumulator, dirtiness, the snapshots' names and the seeds of unseeded generates are
decided here, so that a backend can't get them wrong.
"""

from __future__ import annotations

import hashlib

from ..errors import (
    REFUSALS,
    BackendError,
    ConflictError,
    DirtyGradientsError,
    InvalidRequestError,
    RemoteRLError,
    nearest,
)
from ..losses import Cotangents
from ..ops import Operation
from ..requests import (
    DropSnapshot,
    Forward,
    ForwardBackward,
    Push,
    Request,
    RestoreSnapshot,
    SetReference,
    Snapshot,
    Sync,
)


class Rules:
    """State of the run's trainer as far as order and refusal depend on it.

    version: of the trainer's weights. highest_version: ever given to any weights of the run.
    paused: generation is held. unknown: the failure that left the trainer's weights unknown, of
    unknown_operation. snapshots: names of those the trainer holds.
    accumulated: forward_backwards in the accumulator. dirty: the failure that spoilt it.
    """

    def __init__(self) -> None:
        self.version = 0
        self.highest_version = 0
        self.pushed_version = 0
        self.accumulated = 0
        self.dirty: RemoteRLError | None = None
        self.dirty_operation = ""
        self.pristine = True
        self.paused = False
        self.unknown: RemoteRLError | None = None
        self.unknown_operation = ""
        self.snapshots: set[str] = set()

    @property
    def next_version(self) -> int:
        """What the next change of any weights is numbered."""
        return self.highest_version + 1

    def admit(self, row: Operation, request: Request) -> None:
        """Raises where the state of accumulator, weights or snapshots refuses the operation."""
        self._check_snapshots(row, request)
        if self.unknown is not None and _reads_weights(row, request):
            unknown = ConflictError(
                f"{row.name} refused: the trainer's weights are unknown since "
                f"{self.unknown_operation}, which was to change them, failed ({self.unknown}); "
                "load, restore_snapshot or reset to go on"
            )
            unknown.__cause__ = self.unknown.copy()
            raise unknown
        if row.needs_clean and self.dirty is not None:
            error = DirtyGradientsError(
                f"{row.name} refused: {self.dirty_operation} failed earlier ({self.dirty}), so the "
                "accumulated gradient is incomplete; call zero_grad to discard it and go on",
                first_failure=self.dirty_operation,
            )
            error.__cause__ = self.dirty.copy()
            raise error
        if row.needs_gradient and not self.accumulated:
            raise ConflictError(
                f"{row.name} refused: nothing was accumulated since the last step; "
                "call forward_backward first"
            )
        if row.needs_no_gradient and self.accumulated:
            raise ConflictError(
                f"{row.name} refused: {self.accumulated} forward_backward(s) were not applied yet, "
                "and a checkpoint does not hold them; call optim_step or zero_grad first"
            )
        if isinstance(request, (Sync, Push)) and request.in_flight == "wait" and self.paused:
            raise ConflictError(
                f"{row.name} refused: in_flight='wait' waits for generates, and generation is "
                "paused; resume first, or use 'keep' or 'abort'"
            )
        if row.name == "sync" and self.pushed_version > self.version:
            raise ConflictError(
                f"sync refused: the sampler serves pushed weights of version "
                f"{self.pushed_version}, and the trainer's of version {self.version} are older; "
                "take an optimizer step, load or restore_snapshot first, so that versions only rise"
            )
        if isinstance(request, ForwardBackward) and isinstance(request.loss, Cotangents):
            self._check_cotangents(request.loss)
        self._touch(row)  # from here on the backend may have changed something, whatever comes

    def _check_snapshots(self, row: Operation, request: Request) -> None:
        if isinstance(request, Snapshot):
            if request.name in self.snapshots:
                raise ConflictError(
                    f"there is a snapshot {request.name!r} already; drop it first, or take "
                    "another name",
                    name=request.name,
                )
            return
        if isinstance(request, (RestoreSnapshot, DropSnapshot)):
            field, name = "name", request.name
        elif isinstance(request, Forward) and request.policy not in ("current", "reference"):
            field, name = "policy", request.policy
        elif isinstance(request, SetReference) and request.source not in ("base", "current"):
            field, name = "source", request.source
        else:
            return
        if name not in self.snapshots:
            raise InvalidRequestError(
                f"{row.name} refused: there is no snapshot {name!r}; "
                f"{nearest(name, self.snapshots)}",
                field=field,
            )

    def _check_cotangents(self, loss: Cotangents) -> None:
        if loss.version != self.version:
            raise ConflictError(
                f"the cotangents were taken at version {loss.version}, but the weights are at "
                f"version {self.version}; run the forward again",
                taken=loss.version,
                current=self.version,
            )

    def succeeded(self, row: Operation, request: Request, reported: int | None) -> None:
        """Takes in a success; `reported` is the version that the backend's result states."""
        if row.changes_weights == "always":
            self._advance(self.next_version, reported)
        elif row.name == "push":
            if reported != self.next_version:
                raise self._wrong_version(row, reported)
            self.highest_version = self.pushed_version = self.next_version
        elif row.changes_weights == "reported" and reported != self.version:
            if reported != self.next_version:
                raise self._wrong_version(row, reported)
            self._advance(self.next_version, reported)
        elif reported is not None and row.name != "forward" and reported != self.version:
            raise self._wrong_version(row, reported)
        if row.accumulates:
            self.accumulated += 1
        if row.clears:
            self.accumulated, self.dirty, self.dirty_operation = 0, None, ""
        if row.changes_weights == "always":
            self.unknown, self.unknown_operation = None, ""
        if row.name in ("pause", "resume"):
            self.paused = row.name == "pause"
        if isinstance(request, Snapshot):
            self.snapshots.add(request.name)
        elif isinstance(request, DropSnapshot):
            self.snapshots.discard(request.name)
        if row.name == "reset":
            self.pristine = True
            self.snapshots.clear()

    def _touch(self, row: Operation) -> None:
        if row.accumulates or row.changes_weights != "never" or row.name in _LEAVES_A_TRACE:
            self.pristine = False

    def failed(self, row: Operation, error: RemoteRLError, began: bool) -> None:
        """Takes in a failure of an operation that had been accepted; `began`: the backend had
        been called. What was to accumulate and didn't spoils the gradient either way; what was to
        change the trainer's weights leaves them unknown, unless the backend refused it."""
        if (row.accumulates or (row.dirties and began)) and self.dirty is None:
            self.dirty = error
            # an abandoned number was reserved by a forward_backward, the name its caller knows
            self.dirty_operation = "forward_backward" if row.accumulates else row.name
            self._touch(row)
        refused = isinstance(error, REFUSALS)
        of_trainer = row.changes_weights != "never" and row.face != "weights"
        if of_trainer and began and not refused:
            self.unknown, self.unknown_operation = error, row.name

    def loading(self, saved_version: int) -> None:
        """Before a load: its version becomes max(current, saved) + 1."""
        self.highest_version = max(self.highest_version, saved_version)

    def _advance(self, version: int, reported: int | None) -> None:
        if reported is not None and reported != version:
            raise BackendError(
                f"the backend numbered its weights {reported} where the run gave {version}"
            )
        self.version = self.highest_version = version

    def _wrong_version(self, row: Operation, reported: int | None) -> BackendError:
        return BackendError(
            f"the backend's {row.name} reports weights of version {reported}; the run is at "
            f"{self.version} and the next is {self.next_version}"
        )


#: besides what changes weights: what a fresh run has not
_LEAVES_A_TRACE = frozenset({"snapshot", "set_reference"})

#: what may not be done with weights that nobody knows
_READS_WEIGHTS = frozenset(
    {"forward", "forward_backward", "optim_step", "snapshot", "save", "export", "sync"}
)


def _reads_weights(row: Operation, request: Request) -> bool:
    if isinstance(request, Forward):
        return request.policy == "current"
    if isinstance(request, SetReference):
        return request.source == "current"
    return row.name in _READS_WEIGHTS


class SeedBook:
    """Seeds for generates that bring none: a function of the run's seed, who asks (0 is the
    driver, 1, 2, ... its members), and how many generates that asker had submitted. The counters
    go into checkpoints, so that a resumed run draws what the uninterrupted one would have."""

    def __init__(self, run_seed: int) -> None:
        self.run_seed = run_seed
        self.counters: dict[int, int] = {}

    def base(self, ordinal: int, submitted: int = 0) -> int:
        """What to add to a client's own count, so that it continues its ordinal's counter."""
        return self.counters.get(ordinal, 0) - submitted

    def seed(self, ordinal: int, count: int) -> int:
        """The seed of the `count`-th generate of this ordinal; [0, 2**63)."""
        self.counters[ordinal] = max(count, self.counters.get(ordinal, 0))
        text = f"remote_rl:{self.run_seed}:{ordinal}:{count}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1

    def restore(self, counters: dict[int, int]) -> None:
        """After a load (or a reset, with none)."""
        self.counters = dict(counters)
