"""Dispatcher: whether a backend's answer is the one that was asked for (imports the contract)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import nearest
from ..requests import Forward, Generate, Request
from ..types.generation import Generation
from ..types.ragged import Ragged
from ..types.results import Outputs, SyncReceipt


def answer_problem(request: Request, result: Any) -> str | None:
    """What is wrong with a result of the right class, to follow "answered with"; None where it
    fits the request."""
    if isinstance(request, Generate) and isinstance(result, Generation):
        return _generation(request, result)
    if isinstance(request, Forward) and isinstance(result, Outputs):
        return _outputs(request, result)
    if isinstance(result, SyncReceipt):
        return _delivery(result)
    return None


def _generation(request: Generate, result: Generation) -> str | None:
    prompts, params = len(request.prompts), request.params
    if len(result) != prompts * params.n:
        return f"{len(result)} samples instead of {prompts * params.n}"
    wanted = (
        np.repeat(np.arange(prompts), params.n),
        np.tile(np.arange(params.n), prompts),
    )
    wrong = (result.prompt_index != wanted[0]) | (result.index != wanted[1])
    if wrong.any():
        row = int(np.argmax(wrong))
        return (
            f"sample {result.index[row]} of prompt {result.prompt_index[row]} in place {row}, "
            f"where sample {wanted[1][row]} of prompt {wanted[0][row]} belongs: each comes once, "
            "in the order of the prompts"
        )
    for name in sorted(params.outputs):
        if len(result) and getattr(result, name) is None:
            return f"samples without the {name} that were asked for"
    long = result.tokens.lengths > params.max_tokens
    if long.any():
        row = int(np.argmax(long))
        return (
            f"{result.tokens.lengths[row]} tokens in sample {row}, more than max_tokens="
            f"{params.max_tokens}"
        )
    return None


def _outputs(request: Forward, result: Outputs) -> str | None:
    for name in sorted(request.outputs - result.values.keys()):
        hint = nearest(name, result.values) if result.values else "there are none"
        return f"outputs without the {name!r} that was asked for; {hint}"
    for name in sorted(result.values.keys() - request.outputs):
        return f"the output {name!r}, which was not asked for"
    responses = request.batch.responses
    for name in sorted(result.values):
        problem = _other_rows(result.values[name], responses)
        if problem is not None:
            return f"{name} of {problem}"
    return None


def _other_rows(rows: Ragged, responses: Ragged) -> str | None:
    if len(rows) != len(responses):
        return f"{len(rows)} rows for {len(responses)} responses"
    differing = rows.lengths != responses.lengths
    if not differing.any():
        return None
    row = int(np.argmax(differing))
    return f"{rows.lengths[row]} entries in row {row} for {responses.lengths[row]} response tokens"


def _delivery(receipt: SyncReceipt) -> str | None:
    if receipt.source_fingerprint == receipt.sampler_fingerprint:
        return None
    return (
        "a receipt of other tensors than were sent: names, shapes or dtypes differ "
        f"({receipt.source_fingerprint} sent, {receipt.sampler_fingerprint} held); don't trust the "
        "sampler until a sync succeeds"
    )
