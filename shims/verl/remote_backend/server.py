"""Shim (loop side, above the client): what the seam's agent loops ask.

Imports verl's `TokenOutput` and remote_rl. A Ray actor in the place of one of vLLM's: it holds
no model, and generates on the run, as a member.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.utils.tokenizer import normalize_token_ids
from verl.workers.rollout.replica import TokenOutput

from remote_rl import errors

from ..generation import Generation
from .backend import SeamHandle


class SeamServer:
    """rollout: verl's rollout section. backend_handle: of `RemoteRun.reconnect_handle`."""

    def __init__(self, rollout: Any, backend_handle: Mapping[str, Any]) -> None:
        joined = SeamHandle.of(backend_handle)
        self._generation = Generation(
            rollout,
            handle=joined.run,
            end_token_ids=joined.end_token_ids,
            hints=joined.hints,
        )
        self._failures: list[str] = []

    async def generate(
        self,
        request_id: Any,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        **given: Any,
    ) -> TokenOutput:
        """One response to `prompt_ids`. Retried where the engine failed; a failure that stays is
        kept for `raise_failed`, since V1's agent loops swallow it."""
        prompt = normalize_token_ids(prompt_ids)
        try:
            return await self._generation.generate(request_id, prompt, sampling_params, **given)
        except errors.RemoteRLError as error:
            self._failures.append(errors.describe(error))
            raise

    async def raise_failed(self) -> None:
        """Raises `BackendError` where a generation failed for good."""
        if self._failures:
            raise errors.BackendError(
                f"{len(self._failures)} of the generations failed for good, the first with "
                f"{self._failures[0]!r}; verl may train on without them, so the training stops here"
            )
