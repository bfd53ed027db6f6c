"""Shim (loop side, above the client): what a framework is set to do against what a server offers.

Imports remote_rl.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from remote_rl import RunInfo, SamplingParams, errors

#: (field of Capabilities, name that has to be there, the framework's key that asks for it)
Need = tuple[str, str, str]


def check_offers(info: RunInfo, needs: Iterable[Need]) -> None:
    """Raises `UnsupportedError`, naming the framework's key, for the first thing that the server
    lacks."""
    for kind, name, key in needs:
        offered = getattr(info.capabilities, kind)
        if name not in offered:
            raise errors.UnsupportedError(
                f"{key} needs {name!r} among the {kind.replace('_', ' ')} of backend "
                f"{info.backend!r}, which offers {', '.join(sorted(offered))}",
                key=key,
            )


def check_vocabulary(info: RunInfo, tokens: int, *, key: str, path: str) -> None:
    """Refuses a tokenizer of `tokens` ids that belongs to another model than the served one.

    key: the framework's key of the tokenizer. path: its value.
    """
    if tokens > info.model.vocab_size:
        raise errors.UnsupportedError(
            f"the tokenizer of {key}={path} "
            f"has {tokens} tokens, the server's model {info.model.name!r} has "
            f"{info.model.vocab_size}; serve the model that this tokenizer belongs to",
            key=key,
        )


def missing_end_ids(info: RunInfo, *given: int | Iterable[int] | None) -> tuple[int, ...]:
    """The end-of-sequence ids among `given` that the server's model does not end a response at by
    itself."""
    ids = [
        each
        for value in given
        if value is not None
        for each in ([value] if isinstance(value, int) else value)
    ]
    known = info.model.eos_token_ids
    return tuple(dict.fromkeys(each for each in ids if each not in known))


def sampling_needs(params: SamplingParams, paths: dict[str, str], logprobs: str) -> Iterator[Need]:
    """What a request with `params` needs.

    paths: option of SamplingParams to the framework's key of it. logprobs: its key for logprobs.
    """
    neutral = SamplingParams(max_tokens=1)
    for name, key in paths.items():
        if getattr(params, name) != getattr(neutral, name):
            yield "sampling_options", name, key
    for name in params.outputs:
        yield "sampling_outputs", name, logprobs
