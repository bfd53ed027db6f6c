"""Shim (loop side, above the client): generations that failed for good, told to the trainer.

Imports TransferQueue. verl drops a failed rollout, fills the batch with padding and goes on; a
sampler that fails must stop the training instead, so the agent-loop worker leaves a note where the
trainer already looks.
"""

from __future__ import annotations

import uuid

import transfer_queue

from remote_rl import errors

_PARTITION = "remote_rl_failures"


async def report(error: Exception) -> None:
    """From an agent-loop worker, before the failure is raised there."""
    await transfer_queue.async_kv_put(
        key=uuid.uuid4().hex,
        partition_id=_PARTITION,
        tag={"error": errors.describe(error)},
    )


def forget() -> None:
    """Removes the notes that are there."""
    listed = transfer_queue.kv_list(partition_id=_PARTITION) or {}
    keys = list(listed.get(_PARTITION, {}))
    if keys:
        transfer_queue.kv_clear(keys=keys, partition_id=_PARTITION)


def raise_reported(cause: Exception | None = None) -> None:
    """In the trainer, before a batch is used: raises where a generation failed for good."""
    listed = transfer_queue.kv_list(partition_id=_PARTITION) or {}
    # a key can be there before its tag; verl hears of that failure only after `report` has ended
    failed = [tag["error"] for tag in listed.get(_PARTITION, {}).values() if "error" in tag]
    if failed:
        raise errors.BackendError(
            f"{len(failed)} of the generations failed for good, the first with {failed[0]!r}; "
            "verl would train on without them, so the training stops here"
        ) from cause
