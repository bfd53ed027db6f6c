"""Mock backend: the object that the dispatcher runs (imports its own modules and the contract)."""

from __future__ import annotations

import functools
from typing import Any

from remote_rl.byte_tokenizer import ByteTokenizer
from remote_rl.errors import UnsupportedError
from remote_rl.losses import LOSSES
from remote_rl.protocol import Capabilities, ModelInfo, OperationContext, TokenizerFiles
from remote_rl.requests import Reset, Sleep, Wake
from remote_rl.requests import Tokenizer as TokenizerRequest
from remote_rl.types import Devices
from remote_rl.types.results import TENSOR_DTYPES

from .config import BACKEND_OPERATIONS, MockConfig
from .journal import Call, Journal
from .model import initial_weights, parameter_count
from .sampler import Sampler
from .trainer import Trainer
from .weights import WeightPath, served_base

_SAMPLING_OPTIONS = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "min_tokens",
        "include_stop",
        "stop_token_ids",
        "seed",
        "session_id",
        "priority",
        "cache_salt",
    }
)


class MockBackend:
    """The reference implementation of `protocol.Backend`: a small policy in numpy that learns.

    `calls` is the log of operations that reached it.
    """

    name = "mock"

    def __init__(self, config: MockConfig) -> None:
        self.config = config
        self._journal = Journal(config)
        self._trainer = Trainer(config, self._journal)
        self._sampler = Sampler(config, self._journal)
        self._weights = WeightPath(self._trainer, self._sampler, self._journal)

    @property
    def calls(self) -> tuple[Call, ...]:
        """What happened so far, oldest first (the latest 100000 records)."""
        return self._journal.calls

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.config.seed

    @property
    def capabilities(self) -> Capabilities:
        """All operations, losses and dtypes; text only where the vocabulary holds the bytes."""
        text = self.config.has_text
        return Capabilities(
            operations=BACKEND_OPERATIONS if text else BACKEND_OPERATIONS - {"tokenizer"},
            outputs=frozenset({"logprobs", "entropy"}),
            losses=frozenset(each.__name__ for each in LOSSES.values()),
            optimizers=frozenset({"AdamW"}),
            sampling_options=_SAMPLING_OPTIONS | ({"stop"} if text else set()),
            sampling_outputs=frozenset({"logprobs", "drawn_logprobs"}),
            in_flight=frozenset({"keep", "wait", "abort"}),
            push_dtypes=frozenset(TENSOR_DTYPES),
            policies=frozenset({"reference", "snapshot"}),
        )

    @functools.cached_property
    def model(self) -> ModelInfo:
        """Name, vocabulary, context and size."""
        return ModelInfo(
            name=self.config.model,
            vocab_size=self.config.vocab_size,
            eos_token_ids=self.config.ends,
            context_length=self.config.context_length,
            parameters=parameter_count(**self.config.sizes),
        )

    @property
    def devices(self) -> Devices:
        """One CPU, with the peak that an option gives it."""
        peak = self.config.peak_flops
        unknown = "a CPU's peak is not known; the option peak_flops gives one"
        return Devices(
            kind="cpu",
            count=1,
            dtype="float64",
            peak_flops=peak,
            reason=unknown if peak is None else None,
        )

    @property
    def training(self) -> Trainer:
        """The trainer."""
        return self._trainer

    @property
    def sampling(self) -> Sampler:
        """The sampler."""
        return self._sampler

    @property
    def weights(self) -> WeightPath:
        """The path between them."""
        return self._weights

    async def start(self, context: OperationContext) -> None:
        """Draws the base weights."""
        async with self._journal.operation("start", None, context):
            context.progress(0, 1, "drawing the base weights")
            base = await context.thread(self._base_weights)
            self._trainer.begin(base, context.version)
            self._sampler.replace(served_base(base, context.version))
            context.progress(1, 1, "ready")

    async def close(self) -> None:
        """Ends what hangs; memory goes with the object."""
        self._journal.kill()

    def kill(self) -> None:
        """Ends what hangs, at once."""
        self._journal.kill()

    async def reset(self, request: Reset, context: OperationContext) -> None:
        """Back to the base weights on both halves, as `context.next_version`."""
        async with self._journal.operation("reset", request, context):
            self._weights.staging.drop()
            policy = self._trainer.reset(context.next_version)
            self._sampler.replace(served_base(policy.weights, policy.version))

    async def sleep(self, request: Sleep, context: OperationContext) -> None:
        """Gives nothing back, there is nothing to give; the call is in the log."""
        async with self._journal.operation("sleep", request, context):
            pass

    async def wake(self, request: Wake, context: OperationContext) -> None:
        """The call is in the log."""
        async with self._journal.operation("wake", request, context):
            pass

    async def tokenizer(
        self, request: TokenizerRequest, context: OperationContext
    ) -> TokenizerFiles:
        """The byte tokenizer, for this vocabulary."""
        async with self._journal.operation("tokenizer", request, context):
            if not self.config.has_text:
                raise UnsupportedError(
                    f"a vocabulary of {self.config.vocab_size} ids has no tokenizer; the byte "
                    f"tokenizer needs {len(ByteTokenizer())}, so work with ids"
                )
            return TokenizerFiles(kind="bytes", options={"vocab_size": self.config.vocab_size})

    def sampler_version(self) -> tuple[int | None, int | str | None]:
        """Version and label that the sampler serves; None before the start."""
        return self._sampler.version

    def _base_weights(self) -> dict[str, Any]:
        return initial_weights(
            **self.config.sizes, initial_scale=self.config.initial_scale, seed=self.config.seed
        )
