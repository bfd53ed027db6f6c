"""Mock backend: what it refuses before any work (imports config and the contract)."""

from __future__ import annotations

from remote_rl.errors import InvalidRequestError
from remote_rl.requests import Generate
from remote_rl.types import Batch, Ragged

from .config import MockConfig


def refuse_unknown_ids(ids: Ragged, vocab_size: int, what: str) -> None:
    """Raises where an id lies at or above the vocabulary, naming row and token."""
    if ids.values.size == 0 or int(ids.values.max()) < vocab_size:
        return
    position = int((ids.values >= vocab_size).argmax())
    row = int(ids.row_numbers()[position])
    token = position - int(ids.offsets[row])
    raise InvalidRequestError(
        f"token {token} of row {row} of {what} is {ids.values[position]}, but the model's "
        f"vocabulary has {vocab_size} ids",
        field=what,
        row=row,
        token=token,
    )


def check_batch(batch: Batch, config: MockConfig) -> None:
    """Raises where an id or a length of the batch is beyond the model."""
    refuse_unknown_ids(batch.prompts, config.vocab_size, "Batch.prompts")
    refuse_unknown_ids(batch.responses, config.vocab_size, "Batch.responses")
    if config.context_length is None or len(batch) == 0:
        return
    lengths = batch.prompts.lengths[batch.prompt_index] + batch.responses.lengths
    if int(lengths.max()) > config.context_length:
        row = int((lengths > config.context_length).argmax())
        raise InvalidRequestError(
            f"prompt and response of row {row} have {lengths[row]} tokens together, but the "
            f"model's context holds {config.context_length}",
            field="Batch.responses",
            row=row,
        )


def check_generate(request: Generate, config: MockConfig) -> None:
    """Raises where an id or a length of the request is beyond the model."""
    params = request.params
    refuse_unknown_ids(request.prompts, config.vocab_size, "prompts")
    for token in params.stop_token_ids:
        if token >= config.vocab_size:
            raise InvalidRequestError(
                f"stop_token_ids holds {token}, but the model's vocabulary has "
                f"{config.vocab_size} ids",
                field="stop_token_ids",
            )
    if config.context_length is None:
        return
    lengths = request.prompts.lengths + params.max_tokens
    if int(lengths.max()) > config.context_length:
        row = int((lengths > config.context_length).argmax())
        raise InvalidRequestError(
            f"prompt {row} has {request.prompts.lengths[row]} tokens, which with max_tokens="
            f"{params.max_tokens} is more than the {config.context_length} of the model's context",
            field="prompts",
            row=row,
        )
