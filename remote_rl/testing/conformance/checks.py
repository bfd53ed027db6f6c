"""Testing: what several conformance tests ask of batches, samples and refusals (imports pytest,
numpy, the contract and probe)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from ... import losses
from ...errors import RemoteRLError, UnsupportedError
from ...types import Batch, Group, Outputs
from .probe import Probe


def unrolled(batch: Batch) -> Batch:
    """Each response token as a response of its own, what came before it moved into its prompt: the
    same tokens given the same text, in an order of rows where no shift can hide."""
    prompts, responses, temperature = [], [], []
    for row, response in enumerate(batch.responses):
        before = batch.prompts[int(batch.prompt_index[row])].tolist()
        for token in response.tolist():
            prompts.append(list(before))
            responses.append([token])
            temperature.append(batch.temperature[row])
            before.append(token)
    return Batch(
        prompts=prompts,
        prompt_index=np.arange(len(prompts)),
        responses=responses,
        temperature=np.array(temperature),
    )


def places(batch: Batch) -> list[int]:
    """The tokens that a test of a long batch looks at, by their place in `unrolled`: of each row
    the middle one and the last. What is cut off or left out is off from somewhere to the end."""
    found = set[int]()
    for start, length in zip(batch.responses.offsets, batch.responses.lengths):
        found |= {int(start + length // 2), int(start + length - 1)} if length else set()
    return sorted(found)


def cotangents_of(batch: Batch, loss: losses.FormulaLoss, outputs: Outputs) -> losses.Cotangents:
    """The loss's derivatives at these outputs, of their version."""
    fields = losses.LossBatch.from_batch(batch, lambda array: array, np.float64)
    flat = {name: rows.values.astype(np.float64) for name, rows in outputs.values.items()}
    derivatives = losses.evaluate(losses.resolve(loss, batch), fields, flat).derivatives
    values = {
        name: batch.responses.with_values(slopes.astype(np.float32))
        for name, slopes in derivatives.items()
    }
    return losses.Cotangents(values, version=outputs.version)


@contextlib.contextmanager
def refuses(error: type[RemoteRLError], *words: str) -> Iterator[None]:
    """Fails unless `error` is raised and its message names all of `words`."""
    try:
        yield
    except error as refusal:
        missing = [repr(word) for word in words if word not in str(refusal)]
        if missing:
            pytest.fail(f"{error.__name__} does not name {', '.join(missing)}: {refusal}")
    except RemoteRLError as other:
        pytest.fail(f"{type(other).__name__} instead of {error.__name__}: {other}")
    else:
        pytest.fail(f"nothing was refused, a {error.__name__} was to come")


@contextlib.contextmanager
def unsupported(name: str) -> Iterator[None]:
    """Fails unless what is inside is refused as not declared, by this name."""
    with refuses(UnsupportedError, repr(name)):
        yield


def tokens_of(groups: Iterable[Group]) -> list[list[int]]:
    """The tokens of all samples, in order."""
    return [sample.tokens.tolist() for group in groups for sample in group]


def check_ends(groups: tuple[Group, ...], ends: set[int], longest: int) -> None:
    """Fails where a sample does not end at its first end id or at its length, or says another."""
    for group in groups:
        for sample in group:
            tokens = sample.tokens.tolist()
            assert not ends & set(tokens[:-1]), f"{sample}: goes on after an end id"
            ended = bool(tokens) and tokens[-1] in ends
            wanted = "stop" if ended else "length"
            assert sample.finish_reason == wanted, f"{sample}: should say {wanted!r}"
            assert ended or len(sample) == longest, f"{sample}: short of max_tokens, without an end"


def with_and_without_a_seed(probe: Probe) -> list[dict[str, Any]]:
    """Parameters of generates that are to be tried; the last one's have a seed where there are."""
    return [{}, {"seed": 11}] if probe.offers("sampling_option", "seed") else [{}]


def tokenizer_of(probe: Probe) -> Any:
    """The run's tokenizer; skips where it can't be loaded here."""
    try:
        return probe.rl.tokenizer().result()
    except UnsupportedError as error:
        pytest.skip(str(error))
