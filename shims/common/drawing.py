"""Shim (loop side, above the client): one response, drawn again where the engine failed.

Imports attrs, numpy and remote_rl.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from remote_rl import SamplingParams, Session, errors
from remote_rl.types import Sample

#: worth another try: the engine failed, not the request or the run
_TRANSIENT = (errors.BackendError, errors.StalledError)


async def draw(
    session: Session,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    attempts: int,
    resumes: bool = False,
) -> Sample:
    """One response to token ids.

    attempts: tries before a failure is raised. resumes: a response that the run ends early (a sync
    with in_flight "abort") is continued with the weights that are there then, and the caller sees
    one response. Cancelling the caller's task ends the request too.
    """
    sample = await _drawn(session, prompt, params, attempts)
    while resumes and sample.finish_reason == "abort":
        left = params.max_tokens - len(sample)
        if left < 1:
            return attrs.evolve(sample, finish_reason="length")
        fewest = max(params.min_tokens - len(sample), 0)
        further = attrs.evolve(params, max_tokens=left, min_tokens=fewest)
        rest = await _drawn(session, [*prompt, *sample.tokens.tolist()], further, attempts)
        sample = continued(sample, rest)
    return sample


async def _drawn(
    session: Session, prompt: Sequence[int], params: SamplingParams, attempts: int
) -> Sample:
    for attempt in range(1, attempts + 1):
        operation = session.sampling.generate([prompt], params)
        try:
            groups = await operation
            return groups[0].samples[0]
        except asyncio.CancelledError:
            operation.cancel()  # else the server goes on for nobody
            raise
        except _TRANSIENT as error:
            if attempt == attempts:
                error.add_note(f"after {attempt} attempts")
                raise
    raise AssertionError("at least one attempt")


def continued(sample: Sample, rest: Sample) -> Sample:
    """A response that ended early and what was drawn after it, as one; its first and last version
    and label are those of the first and the last token."""
    if not len(rest):
        return attrs.evolve(sample, finish_reason=rest.finish_reason)
    first = sample if len(sample) else rest
    return attrs.evolve(
        rest,
        tokens=np.concatenate([sample.tokens, rest.tokens]),
        logprobs=_joined(sample.logprobs, rest.logprobs),
        drawn_logprobs=_joined(sample.drawn_logprobs, rest.drawn_logprobs),
        first_version=first.first_version,
        first_label=first.first_label,
    )


def _joined(before: Any, after: Any) -> Any:
    return None if before is None or after is None else np.concatenate([before, after])


def logprobs_output(params: SamplingParams) -> str:
    """Which output holds the logprobs of the distribution that was drawn from, as the frameworks
    want them (vLLM's `logprobs_mode=processed_logprobs`)."""
    return "drawn_logprobs" if params.truncates else "logprobs"


def drawn_logprobs(sample: Sample, params: SamplingParams, *, remedy: str) -> list[float]:
    """Those logprobs, one a token. remedy: what to do where the server returned none."""
    logprobs = getattr(sample, logprobs_output(params))
    if logprobs is None:
        raise errors.BackendError(
            f"the server returned no {logprobs_output(params)} for a sample, though it "
            f"declares them; {remedy}"
        )
    found: list[float] = logprobs.tolist()
    return found
