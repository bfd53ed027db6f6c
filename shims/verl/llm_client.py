"""Shim (loop side, above the client): what agent loops generate with.

Imports verl's `LLMServerClient` and remote_rl. It travels pickled to the agent-loop workers and
attaches there as a member at its first request.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig
from verl.utils import normalize_token_ids
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from remote_rl import errors

from . import failures
from .config import Options
from .generation import Generation


class RemoteLLMClient(LLMServerClient):
    """Generates on the server of the run.

    config: verl's whole configuration. end_token_ids: end-of-sequence ids of verl's tokenizer that
    the server's model doesn't know of. hints: the routing hints the server takes (session_id,
    priority). resumes: see `Generation`.
    """

    def __init__(
        self,
        config: DictConfig,
        load_balancer_handle: Any = None,
        *,
        end_token_ids: tuple[int, ...] = (),
        hints: frozenset[str] = frozenset(),
        resumes: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, load_balancer_handle, **kwargs)
        rollout = config.actor_rollout_ref.rollout
        self._generation = Generation(
            rollout,
            handle=Options.of(rollout).handle,
            end_token_ids=end_token_ids,
            hints=hints,
            resumes=resumes,
        )

    @rollout_trace_op
    async def generate(
        self,
        request_id: Any,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """One response to `prompt_ids`. Retried where the engine failed; a failure that stays
        stops the training, also where the agent loop swallows it."""
        media = {"image_data": image_data, "video_data": video_data, "audio_data": audio_data}
        try:
            return await self._generation.generate(
                request_id,
                normalize_token_ids(prompt_ids),
                sampling_params,
                **media,
                mm_processor_kwargs=mm_processor_kwargs,
                **kwargs,
            )
        except errors.RemoteRLError as error:
            await failures.report(error)
            raise
