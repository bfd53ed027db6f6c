"""Shim (loop side, above the client): generations that failed for good, told to the trainer.

Imports TransferQueue and remote_rl. verl drops a failed rollout, fills the batch with padding and
goes on; a sampler that fails must stop the training instead, so the agent-loop worker leaves a note
where the trainer already looks.
"""

from __future__ import annotations

import uuid

import transfer_queue

from remote_rl import errors

from .lost import LOST, what_happened

_PARTITION = "remote_rl_failures"


async def report(error: Exception) -> None:
    """From an agent-loop worker, before the failure is raised there."""
    await transfer_queue.async_kv_put(
        key=uuid.uuid4().hex,
        partition_id=_PARTITION,
        tag={
            "error": errors.describe(error),
            "lost": what_happened(error) if isinstance(error, LOST) else None,
        },
    )


def forget() -> None:
    """Removes the notes that are there."""
    listed = transfer_queue.kv_list(partition_id=_PARTITION) or {}
    keys = list(listed.get(_PARTITION, {}))
    if keys:
        transfer_queue.kv_clear(keys=keys, partition_id=_PARTITION)


def raise_reported(cause: Exception | None = None) -> None:
    """In the trainer, before a batch is used: raises where a generation failed for good,
    `RunLostError` where that was the run's end."""
    listed = transfer_queue.kv_list(partition_id=_PARTITION) or {}
    # a key can be there before its tag; verl hears of that failure only after `report` has ended
    notes = [tag for tag in listed.get(_PARTITION, {}).values() if "error" in tag]
    lost = next((tag["lost"] for tag in notes if tag.get("lost")), None)
    if lost is not None:
        raise errors.RunLostError(lost) from cause
    failed = [tag["error"] for tag in notes]
    if failed:
        raise errors.BackendError(
            f"{len(failed)} of the generations failed for good, the first with {failed[0]!r}; "
            "verl would train on without them, so the training stops here"
        ) from cause
