"""Client: the sampling face (imports the contract and faces)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import InvalidRequestError
from ..requests import Abort, FinishSession, Generate, Pause, ResetPrefixCache, Resume
from ..types.generation import Generation, Group
from ..types.ragged import RaggedLike
from ..types.results import Done
from ..types.sampling import SamplingParams
from .faces import Face
from .operation import GenerateOperation, Operation


class Sampling(Face):
    """The sampler. Generates run beside each other and beside training, in no order."""

    def generate(
        self,
        prompts: RaggedLike,
        params: SamplingParams,
        *,
        model: str = "policy",
        deadline: float | None = None,
    ) -> GenerateOperation:
        """Draws `params.n` responses to each prompt.

        prompts: token ids, Ragged[m] int32 or anything `Ragged.of` takes; text is refused.
        Returns an operation whose result is a tuple of m `Group`s, and which can be iterated for
        `Sample`s as they finish. deadline: seconds, after which it ends in
        `DeadlineExceededError`.
        """
        if isinstance(prompts, str) or (
            isinstance(prompts, (list, tuple)) and any(isinstance(each, str) for each in prompts)
        ):
            raise InvalidRequestError(
                "generate takes token ids, not text: encode prompts with Session.tokenizer()",
                field="prompts",
            )
        request = Generate(prompts=prompts, params=params, model=model)
        sent = request.prompts

        def convert(generation: Generation) -> tuple[Group, ...]:
            return generation.groups(sent, params.temperature)

        operation: GenerateOperation = self._submit(
            "generate", request, convert, deadline, GenerateOperation
        )
        return operation

    def finish_session(self, session_id: str, *, model: str = "policy") -> Operation[Done]:
        """Says that no more requests of this `session_id` come."""
        operation: Operation[Done] = self._submit(
            "finish_session", FinishSession(session_id=session_id, model=model)
        )
        return operation

    def abort(
        self,
        request_ids: Iterable[str | Operation[Any]] | Operation[Any] | str | None = None,
        *,
        model: str = "policy",
    ) -> Operation[Done]:
        """Ends generates early, their unfinished samples with finish_reason "abort".

        request_ids: `Operation.request_id`s or the operations, one or several; None means all that
        were called before it, and all that the run has accepted from others. The result comes when
        they have ended.
        """
        if isinstance(request_ids, Operation):
            request_ids = request_ids.request_id
        if request_ids is not None and not isinstance(request_ids, (str, Iterable)):
            raise InvalidRequestError(
                f"abort takes request ids or operations, not {request_ids!r}", field="request_ids"
            )
        if request_ids is not None and not isinstance(request_ids, str):
            request_ids = [
                each.request_id if isinstance(each, Operation) else each for each in request_ids
            ]
        operation: Operation[Done] = self._submit(
            "abort", Abort(request_ids=request_ids, model=model)
        )
        return operation

    def pause(self, *, model: str = "policy") -> Operation[Done]:
        """Holds generation at the next token, until `resume`."""
        operation: Operation[Done] = self._submit("pause", Pause(model=model))
        return operation

    def resume(self, *, model: str = "policy") -> Operation[Done]:
        """Lets generation go on."""
        operation: Operation[Done] = self._submit("resume", Resume(model=model))
        return operation

    def reset_prefix_cache(self, *, model: str = "policy") -> Operation[Done]:
        """Drops what the sampler cached of earlier prompts."""
        operation: Operation[Done] = self._submit(
            "reset_prefix_cache", ResetPrefixCache(model=model)
        )
        return operation
