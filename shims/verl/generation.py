"""Shim (loop side, above the client): one response to token ids, for whichever caller verl has.

Imports verl's `TokenOutput` and remote_rl. Token ids in, token ids and logprobs out, nothing
decoded. It is plain data until its first request, so that it can travel to another process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from verl.workers.rollout.replica import TokenOutput

from remote_rl import errors

from ..common.drawing import draw
from . import sessions
from .options import Options
from .sampling import Limits, to_params, to_token_output


class Generation:
    """Generates on the server of the run, as a member.

    rollout: verl's rollout section (an OmegaConf node or its dataclass). handle: the driver's, as
    plain JSON values. end_token_ids: end-of-sequence ids of verl's tokenizer that the server's
    model doesn't know of. hints: the routing hints the server takes (session_id, priority).
    resumes: a response that the run ends early (a sync with in_flight "abort") is continued with
    the weights that are there then, and the caller sees one response.
    """

    def __init__(
        self,
        rollout: Any,
        *,
        handle: Mapping[str, Any] | None,
        end_token_ids: Iterable[int] = (),
        hints: Iterable[str] = (),
        resumes: bool = False,
    ) -> None:
        self._attempts = Options.of(rollout).generation_attempts
        self._handle = handle
        self._end_token_ids = tuple(end_token_ids)
        self._hints = frozenset(hints)
        self._resumes = resumes
        self._limits = Limits(
            prompt_length=rollout.prompt_length,
            response_length=rollout.response_length,
            max_model_len=rollout.max_model_len,
        )

    async def generate(
        self,
        request_id: Any,
        prompt: list[int],
        sampling_params: Mapping[str, Any],
        **given: Any,
    ) -> TokenOutput:
        """One response to `prompt`, retried where the engine failed.

        given: what else the agent loop passed; `priority` is a hint, all others must be empty.
        """
        priority = int(given.pop("priority", 0))
        _refuse_extra(given)
        params = to_params(
            sampling_params,
            prompt_tokens=len(prompt),
            limits=self._limits,
            end_token_ids=self._end_token_ids,
            session_id=str(request_id) if "session_id" in self._hints else None,
            priority=priority if "priority" in self._hints else 0,
        )
        session = await asyncio.to_thread(sessions.member, self._handle)
        sample = await draw(session, prompt, params, attempts=self._attempts, resumes=self._resumes)
        return to_token_output(sample, params)


def _refuse_extra(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if value:
            raise errors.UnsupportedError(
                f"the agent loop passed {name} to generate, which remote_rl can't carry; "
                "use text alone"
            )
