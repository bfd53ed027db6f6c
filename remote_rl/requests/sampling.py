"""Contract: requests of the sampling face (imports the contract's types and losses)."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from ..errors import InvalidRequestError
from ..types.fields import (
    SCHEDULING,
    SEMANTIC,
    as_tuple,
    each,
    instance_of,
    optional,
    strict,
    text,
)
from ..types.ragged import Ragged, RaggedLike
from ..types.sampling import SamplingParams
from .base import Request, Requirement, model_field


def _prompts(data: RaggedLike) -> Ragged:
    return Ragged.of(data, np.int32, "prompts")


@strict
@attrs.frozen(kw_only=True)
class Generate(Request):
    """Draws params.n responses to each prompt; prompts are token ids, Ragged[m] int32."""

    prompts: Ragged = attrs.field(metadata=SEMANTIC, converter=_prompts)
    params: SamplingParams = attrs.field(
        metadata=SEMANTIC, validator=instance_of(SamplingParams, wanted="a SamplingParams")
    )
    model: str = model_field()

    def __attrs_post_init__(self) -> None:
        if len(self.prompts) == 0:
            raise InvalidRequestError("generate needs at least one prompt", field="prompts")
        if not self.prompts.lengths.all():
            row = int(np.argmin(self.prompts.lengths))
            raise InvalidRequestError(f"prompt {row} is empty; give it one token", row=row)
        if self.prompts.values.min() < 0:
            row = int(self.prompts.row_numbers()[np.argmin(self.prompts.values)])
            raise InvalidRequestError(f"prompt {row} holds a negative token id", row=row)

    def requirements(self) -> Iterator[Requirement]:
        params, defaults = self.params, attrs.fields(SamplingParams)
        for field in defaults:
            if field.name not in ("n", "max_tokens", "outputs") and (
                getattr(params, field.name) != field.default
            ):
                yield ("sampling_option", field.name)
        for name in sorted(params.outputs):
            yield ("sampling_output", name)


@strict
@attrs.frozen(kw_only=True)
class FinishSession(Request):
    """Says that no more requests of this session_id come, so that its cache may go."""

    session_id: str = attrs.field(metadata=SCHEDULING, validator=text())
    model: str = model_field()


@strict
@attrs.frozen(kw_only=True)
class Abort(Request):
    """Ends generates early with finish_reason "abort": those with these request ids, or, with
    None, all that were accepted before."""

    request_ids: tuple[str, ...] | None = attrs.field(
        default=None,
        metadata=SEMANTIC,
        converter=attrs.converters.optional(as_tuple),
        validator=optional(each(text())),
    )
    model: str = model_field()


@strict
@attrs.frozen(kw_only=True)
class Pause(Request):
    """Holds generation at the next token; requests in flight wait for `Resume`."""

    model: str = model_field()


@strict
@attrs.frozen(kw_only=True)
class Resume(Request):
    """Lets generation go on."""

    model: str = model_field()


@strict
@attrs.frozen(kw_only=True)
class ResetPrefixCache(Request):
    """Drops what the sampler cached of earlier prompts."""

    model: str = model_field()
