"""Shim (loop side, above the client): what agent loops generate with.

Imports verl's `LLMServerClient` and remote_rl. It travels pickled to the agent-loop workers and
attaches there as a member at its first request: token ids in, token ids and logprobs out, nothing
decoded.
"""

from __future__ import annotations

import asyncio
from typing import Any

from omegaconf import DictConfig
from verl.utils import normalize_token_ids
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from remote_rl import SamplingParams, errors
from remote_rl.types import Sample

from . import failures, sessions
from .config import Options
from .sampling import Limits, to_params, to_token_output

#: worth another try: the engine failed, not the request or the run
_TRANSIENT = (errors.BackendError, errors.StalledError)


class RemoteLLMClient(LLMServerClient):
    """Generates on the server of the run.

    config: verl's whole configuration. end_token_ids: end-of-sequence ids of verl's tokenizer that
    the server's model doesn't know of. hints: the routing hints the server takes (session_id,
    priority).
    """

    def __init__(
        self,
        config: DictConfig,
        load_balancer_handle: Any = None,
        *,
        end_token_ids: tuple[int, ...] = (),
        hints: frozenset[str] = frozenset(),
        **kwargs: Any,
    ) -> None:
        super().__init__(config, load_balancer_handle, **kwargs)
        rollout = config.actor_rollout_ref.rollout
        self._options = Options.of(rollout)
        self._end_token_ids = end_token_ids
        self._hints = hints
        self._limits = Limits(
            prompt_length=rollout.prompt_length,
            response_length=rollout.response_length,
            max_model_len=rollout.max_model_len,
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
        priority = int(kwargs.pop("priority", 0))
        _refuse_extra({**media, "mm_processor_kwargs": mm_processor_kwargs, **kwargs})
        prompt = normalize_token_ids(prompt_ids)
        params = to_params(
            sampling_params,
            prompt_tokens=len(prompt),
            limits=self._limits,
            end_token_ids=self._end_token_ids,
            session_id=str(request_id) if "session_id" in self._hints else None,
            priority=priority if "priority" in self._hints else 0,
        )
        try:
            sample = await self._sample(prompt, params)
            return to_token_output(sample, params)
        except errors.RemoteRLError as error:
            await failures.report(error)
            raise

    async def _sample(self, prompt: list[int], params: SamplingParams) -> Sample:
        session = await asyncio.to_thread(sessions.member, self._options.handle)
        for attempt in range(1, self._options.generation_attempts + 1):
            try:
                groups = await session.sampling.generate([prompt], params)
                return groups[0].samples[0]
            except _TRANSIENT as error:
                if attempt == self._options.generation_attempts:
                    error.add_note(f"after {attempt} attempts")
                    raise
        raise AssertionError("generation_attempts is at least 1")


def _refuse_extra(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value:
            raise errors.UnsupportedError(
                f"the agent loop passed {name} to generate, which remote_rl can't carry; "
                "use text alone"
            )
