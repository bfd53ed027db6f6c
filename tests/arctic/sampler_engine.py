"""Sampling engines on tiny models, for the tests: each is started once in a process, since that
takes ten seconds and more, and lives on a loop of its own."""

from __future__ import annotations

import sampler_environment  # isort: skip  # noqa: F401 - before torch

import asyncio
import atexit
import functools
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from arctic_models import VOCABULARY, tiny_model
from sampler_tokenizers import byte_level, save
from transformers import AutoModelForCausalLM

from backends.arctic.sampling.engine import SamplerEngine
from backends.arctic.sampling.settings import SampleRequest, SamplerSettings
from backends.arctic.weights.manifest import Form, Manifest, lay_out
from backends.arctic.weights.segment import SegmentWriter, new_name, unlink
from remote_rl import SamplingParams
from remote_rl.requests import InFlight
from remote_rl.types import Label, Sample

T = TypeVar("T")
Weights = Mapping[str, torch.Tensor]

CONTEXT = 320
_SIZES: dict[str, Any] = {"head_dim": 32}  # vLLM has no smaller ones on a CPU
END = 2
PATIENCE = 120.0
BOTH = frozenset({"logprobs", "drawn_logprobs"})
PROMPT = (5, 6, 7, 8)


class Running:
    """An engine and the model that it serves at first. tied: whether the head is the embedding.
    directory: of a model that is there, None makes one."""

    def __init__(
        self,
        architecture: str,
        *,
        tied: bool,
        tokenizer: bool = False,
        directory: Path | None = None,
        **settings: Any,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rrl-sampler-")
        self.directory = directory or Path(self._folder.name)
        if directory is None:
            self.model = tiny_model(architecture, tied=tied, **_SIZES).eval()
            self.model.save_pretrained(self.directory)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        if tokenizer:
            save(byte_level(VOCABULARY), self.directory)
        self._architecture, self._tied = architecture, tied
        self.settings = SamplerSettings(
            model=str(self.directory),
            dtype="float32",
            context_length=CONTEXT,
            cache_bytes=4
            << 20,  # 32 blocks of 128 tokens, so that long samples displace each other
            sequences=24,
            batched_tokens=64,  # so that a long prompt is computed in pieces
            **settings,
        )
        self.version = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()
        self.engine = SamplerEngine()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what vLLM's imports have to say
            self.run(self.engine.start(self.settings))
        atexit.register(self.end)

    def end(self) -> None:
        """Stops it; at the latest when the process exits."""
        atexit.unregister(self.end)
        self.run(self.engine.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()
        self._folder.cleanup()

    # -- asking -------------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on the engine's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """A coroutine on the engine's loop, not waited for."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def serving(self) -> tuple[int | None, Label]:
        """What the engine says that it serves."""
        return self.engine.serving()

    def begin(self, prompt: Sequence[int] = PROMPT, name: str = "one", **given: Any) -> Any:
        """A generate as a future of its samples. Sample i of `count` has index i."""
        count, seed = given.pop("count", 1), given.pop("seed", 11)
        place = given.pop("prompt_index", 0)
        params = SamplingParams(**{"max_tokens": 12, "outputs": BOTH, **given})
        requests = [
            SampleRequest(
                request_id=name,
                tokens=prompt,
                params=params,
                seed=seed,
                prompt_index=place,
                index=index,
            )
            for index in range(count)
        ]
        return asyncio.run_coroutine_threadsafe(self._samples(requests), self._loop)

    async def _samples(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        samples = [sample async for sample in self.engine.generate(requests)]
        return sorted(samples, key=lambda sample: sample.index)

    def draw(self, prompt: Sequence[int] = PROMPT, **given: Any) -> list[Sample]:
        """Samples of a generate."""
        samples: list[Sample] = self.begin(prompt, **given).result(PATIENCE)
        return samples

    def until(self, condition: Callable[[], bool]) -> None:
        """Returns once it holds."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, "it never came to hold"
            time.sleep(0.001)

    def held(self, **given: Any) -> Any:
        """A generate that was begun, has drawn some tokens, and is paused there."""
        drawn = self.engine.pulse()
        future = self.begin(**{"count": 3, "max_tokens": 200, **given})
        self.until(lambda: self.engine.pulse() > drawn + 15 or future.done())
        self.run(self.engine.pause())
        assert self.engine.in_flight, "it ended before the pause"
        return future

    # -- weights ------------------------------------------------------------------------------

    def other_model(self, seed: int) -> Any:
        """One of the same shapes with other weights."""
        return tiny_model(self._architecture, tied=self._tied, seed=seed, **_SIZES).eval()

    async def deliver_by(
        self,
        weights: Weights,
        in_flight: InFlight,
        version: int,
        label: Label,
        forms: Mapping[str, Form] | None = None,
    ) -> tuple[Manifest, str]:
        """Writes a segment, updates from it, and removes it; what was sent, and the fingerprint of
        what the engine took."""
        manifest = lay_out(forms or self.engine.manifest())
        name = new_name()
        writer = SegmentWriter(name, manifest)
        try:
            for entry in manifest:
                writer.write(entry.name, weights[entry.name])
            return manifest, await self.engine.update(manifest, name, in_flight, version, label)
        finally:
            unlink(name)

    def deliver(
        self,
        model: Any,
        in_flight: InFlight = "keep",
        label: Label = None,
        forms: Mapping[str, Form] | None = None,
    ) -> int:
        """The model's weights as the next version, which it returns."""
        self.version += 1
        weights = dict(model.named_parameters())
        manifest, held = self.run(self.deliver_by(weights, in_flight, self.version, label, forms))
        assert held == manifest.fingerprint
        return self.version

    def serves(self, model: Any, version: int, label: Label = None) -> None:
        """Asserts that what is drawn comes from this model, under this version."""
        assert self.run(self.serving()) == (version, label)
        for sample in self.draw(count=3):
            assert (sample.first_version, sample.last_version) == (version, version)
            assert (sample.first_label, sample.label) == (label, label)
            assert sample.logprobs is not None
            np.testing.assert_allclose(sample.logprobs, logprobs(model, PROMPT, sample), atol=1e-4)


def table(model: Any, prompt: Sequence[int], sample: Sample, temperature: float = 1.0) -> Any:
    """[t, V] float64: log probabilities of each position of the sample, by transformers."""
    ids = torch.tensor([[*prompt, *sample.tokens.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].double()
    return (logits / np.float32(temperature)).log_softmax(-1).numpy()


def logprobs(model: Any, prompt: Sequence[int], sample: Sample, temperature: float = 1.0) -> Any:
    """[t]: of the sample's own tokens."""
    rows = table(model, prompt, sample, temperature)
    return rows[np.arange(len(rows)), sample.tokens]


@functools.cache
def tied_qwen3() -> Running:
    """With a tokenizer."""
    return Running("qwen3", tied=True, tokenizer=True)


@functools.cache
def untied_llama() -> Running:
    """Ids only; whose first weights stand for no version."""
    return Running("llama", tied=False, tokenizer=False, version=None)
