"""Shim (loop side, above the client): SkyRL's sampling parameters and outputs, translated.

Imports remote_rl, SkyRL's `InferenceEngineOutput` and what all shims share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineOutput

from remote_rl import SamplingParams, errors
from remote_rl.types import Sample

from ..common.drawing import drawn_logprobs
from ..common.rules import refuse
from ..common.vllm_params import build_params, to_fields

PATH: Final = "generator.sampling_params"
#: SkyRL's own keys, by the names that they have in vLLM's shape
_KEYS: Final = {
    name: name for name in ("temperature", "top_p", "top_k", "min_p", "logprobs", "stop")
} | {"max_tokens": "max_generate_length"}
#: whether special tokens are left out of the text
_SKIP: Final = "skip_special_tokens"


def to_params(
    given: Mapping[str, Any],
    *,
    path: str = PATH,
    end_token_ids: Sequence[int] = (),
    session_id: str | None = None,
    cache_salt: str | None = None,
) -> SamplingParams:
    """What SkyRL's `get_sampling_params_for_backend` gives, as `SamplingParams`.

    path: of the section it was made from, for errors. end_token_ids: end-of-sequence ids that
    SkyRL's tokenizer knows of and the server's model does not.
    Raises `UnsupportedError` for a key or value that has no counterpart, `InvalidRequestError` for
    a value out of range; either names SkyRL's key.
    """

    def key(name: str) -> str:
        return f"{path}.{_KEYS.get(name, f'additional_kwargs.{name}')}"

    fields = to_fields(given, path=key, others=(_SKIP,), end_token_ids=end_token_ids)
    if given.get("max_tokens") is None:
        raise errors.InvalidRequestError(
            f"{key('max_tokens')} is missing, and a response has to end somewhere; give "
            "max_tokens in the sampling parameters",
            field=key("max_tokens"),
        )
    logprobs = given.get("logprobs")
    if logprobs is not None and logprobs not in (0, 1):
        because = "only the drawn token's logprob comes back; set it to 1, or to null for none"
        refuse(key("logprobs"), logprobs, because)
    fields |= {
        "max_tokens": given["max_tokens"],
        "session_id": session_id,
        "cache_salt": cache_salt,
    }
    try:
        return build_params(fields, logprobs=logprobs is not None)
    except errors.InvalidRequestError as error:
        name = str(error.details["field"])
        raise errors.InvalidRequestError(
            f"{key(name)}{error.message.removeprefix(f'SamplingParams.{name}')}", field=key(name)
        ) from None


def to_output(
    samples: Sequence[Sample], params: SamplingParams, tokenizer: Any, given: Mapping[str, Any]
) -> InferenceEngineOutput:
    """Samples, one a prompt, as SkyRL's output; ids and logprobs are the sampler's own, the text is
    decoded from the ids.

    given: the parameters that `params` were made of. Besides SkyRL's keys it has
    "policy_versions", (first, last) a response: the versions of the weights that drew it.
    """
    logprobs = None
    if params.outputs:
        remedy = f"set {PATH}.logprobs=null"
        logprobs = [drawn_logprobs(sample, params, remedy=remedy) for sample in samples]
    skip = given.get(_SKIP)
    ids = [sample.tokens.tolist() for sample in samples]
    output = InferenceEngineOutput(
        responses=[
            tokenizer.decode(each, skip_special_tokens=True if skip is None else skip)
            for each in ids
        ],
        response_ids=ids,
        stop_reasons=[sample.finish_reason for sample in samples],
        response_logprobs=logprobs,
        prompt_logprobs=None,
        rollout_expert_indices=None,
        rollout_sample_support=None,
    )
    output["policy_versions"] = [(sample.first_version, sample.last_version) for sample in samples]
    return output
