"""Contract: the table of operations, their only definition (imports types, requests, protocol and
run_info)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import attrs

from . import requests
from .protocol import TokenizerFiles
from .requests import Request
from .run_info import CheckpointList, FileChunk, FileList, RunInfo
from .types import results
from .types.generation import Generation


class Stream(enum.Enum):
    """How an operation is ordered against the others of its client."""

    TRAINING = "training"  # one after the other, by number, exactly once
    SAMPLING = "sampling"  # generates: by request id, deduplicated, in any order
    QUERY = "query"  # reads of the run, deduplicated like generates
    CONTROL = "control"  # at once; one older than the last of its kind is answered and ignored


Face = Literal["training", "sampling", "weights", "backend", "dispatcher"]


@attrs.frozen(kw_only=True)
class Operation:
    """One row of the table.

    name: of the operation, its backend method and its route. face: who executes it.
    request, response: the classes that travel. stream: its order, `stream_name` on the wire;
    sequenced: one after the other.
    accumulates: adds to the gradient.
    needs_clean: refused while the gradient is dirty.
    needs_gradient, needs_no_gradient: refused with an empty, a non-empty accumulator.
    dirties: once it has begun, a failure leaves the gradient in an unknown state.
    clears: leaves accumulator and dirtiness empty when it succeeds.
    changes_weights: "always" when it succeeds, "reported" where the result's version says so.
    """

    name: str
    face: Face
    request: type[Request]
    response: type
    stream: Stream = Stream.TRAINING
    accumulates: bool = False
    dirties: bool = False
    needs_clean: bool = False
    needs_gradient: bool = False
    needs_no_gradient: bool = False
    clears: bool = False
    changes_weights: Literal["never", "always", "reported"] = "never"
    # kept, since an enumeration's own look at a member or its value is slow, and each operation
    # would take several
    stream_name: str = attrs.field(init=False)
    sequenced: bool = attrs.field(init=False)

    @stream_name.default
    def _name_of_stream(self) -> str:
        return str(self.stream.value)

    @sequenced.default
    def _is_sequenced(self) -> bool:
        return self.stream is Stream.TRAINING


_TABLE = (
    Operation(name="forward", face="training", request=requests.Forward, response=results.Outputs),
    Operation(
        name="forward_backward",
        face="training",
        request=requests.ForwardBackward,
        response=results.ForwardBackwardResult,
        accumulates=True,
        dirties=True,
        needs_clean=True,
    ),
    Operation(
        name="abandon",
        face="dispatcher",
        request=requests.Abandon,
        response=results.Done,
        accumulates=True,
        dirties=True,
    ),
    Operation(
        name="optim_step",
        face="training",
        request=requests.OptimStep,
        response=results.OptimStepResult,
        dirties=True,
        needs_clean=True,
        needs_gradient=True,
        clears=True,
        changes_weights="reported",
    ),
    Operation(
        name="zero_grad",
        face="training",
        request=requests.ZeroGrad,
        response=results.Done,
        clears=True,
    ),
    Operation(name="snapshot", face="training", request=requests.Snapshot, response=results.Done),
    Operation(
        name="restore_snapshot",
        face="training",
        request=requests.RestoreSnapshot,
        response=results.Done,
        clears=True,
        changes_weights="always",
    ),
    Operation(
        name="drop_snapshot",
        face="training",
        request=requests.DropSnapshot,
        response=results.Done,
    ),
    Operation(
        name="set_reference",
        face="training",
        request=requests.SetReference,
        response=results.Done,
    ),
    Operation(
        name="save",
        face="training",
        request=requests.Save,
        response=results.CheckpointInfo,
        needs_clean=True,
        needs_no_gradient=True,
    ),
    Operation(
        name="load",
        face="training",
        request=requests.Load,
        response=results.LoadResult,
        clears=True,
        changes_weights="always",
    ),
    Operation(
        name="checkpoints",
        face="dispatcher",
        request=requests.Checkpoints,
        response=CheckpointList,
    ),
    Operation(name="delete", face="dispatcher", request=requests.Delete, response=results.Done),
    Operation(
        name="export", face="training", request=requests.Export, response=results.ExportReceipt
    ),
    Operation(
        name="sync",
        face="weights",
        request=requests.Sync,
        response=results.SyncReceipt,
        needs_clean=True,
    ),
    Operation(name="push_part", face="weights", request=requests.PushPart, response=results.Done),
    Operation(
        name="push",
        face="weights",
        request=requests.Push,
        response=results.SyncReceipt,
        changes_weights="reported",
    ),
    Operation(
        name="version",
        face="dispatcher",
        request=requests.Version,
        response=results.WeightsVersion,
    ),
    Operation(
        name="generate",
        face="sampling",
        request=requests.Generate,
        response=Generation,
        stream=Stream.SAMPLING,
    ),
    Operation(
        name="finish_session",
        face="sampling",
        request=requests.FinishSession,
        response=results.Done,
        stream=Stream.QUERY,
    ),
    Operation(
        name="abort",
        face="dispatcher",
        request=requests.Abort,
        response=results.Done,
        stream=Stream.CONTROL,
    ),
    Operation(
        name="pause",
        face="sampling",
        request=requests.Pause,
        response=results.Done,
        stream=Stream.CONTROL,
    ),
    Operation(
        name="resume",
        face="sampling",
        request=requests.Resume,
        response=results.Done,
        stream=Stream.CONTROL,
    ),
    Operation(
        name="reset_prefix_cache",
        face="sampling",
        request=requests.ResetPrefixCache,
        response=results.Done,
        stream=Stream.CONTROL,
    ),
    Operation(
        name="reset",
        face="backend",
        request=requests.Reset,
        response=results.Done,
        clears=True,
        changes_weights="always",
    ),
    Operation(name="sleep", face="backend", request=requests.Sleep, response=results.Done),
    Operation(name="wake", face="backend", request=requests.Wake, response=results.Done),
    Operation(
        name="info",
        face="dispatcher",
        request=requests.Info,
        response=RunInfo,
        stream=Stream.QUERY,
    ),
    Operation(
        name="tokenizer",
        face="backend",
        request=requests.Tokenizer,
        response=TokenizerFiles,
        stream=Stream.QUERY,
    ),
    Operation(
        name="list_files",
        face="dispatcher",
        request=requests.ListFiles,
        response=FileList,
        stream=Stream.QUERY,
    ),
    Operation(
        name="read_file",
        face="dispatcher",
        request=requests.ReadFile,
        response=FileChunk,
        stream=Stream.QUERY,
    ),
)

OPERATIONS: Mapping[str, Operation] = MappingProxyType({row.name: row for row in _TABLE})

#: what the dispatcher does itself, whatever the backend
ALWAYS_OFFERED = frozenset(row.name for row in _TABLE if row.face == "dispatcher")
