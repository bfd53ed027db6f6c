"""Arctic backend: a Hugging Face directory as a module to train (imports transformers,
the policy, lora)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import transformers.utils.logging
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from remote_rl.errors import UnsupportedError

from ..model_directory import stored_tensors
from . import attention
from .answers import RankSettings
from .joining import Configuration
from .lora import Adapter
from .policy import PolicyModule


@attrs.frozen(eq=False)
class Loaded:
    """policy: what is trained. model: the causal language model inside it. adapter: None where all
    weights are trained. names: HF name of each parameter by id; tied ones once. keeps: what must
    live as long as they do."""

    policy: PolicyModule
    model: PreTrainedModel
    adapter: Adapter | None
    names: dict[int, str]
    keeps: Any


def load(settings: RankSettings, told: Configuration) -> Loaded:
    """The model of `settings.path`, at ZeRO 3 already partitioned as it is read.

    told: DeepSpeed's configuration.
    """
    transformers.utils.logging.disable_progress_bar()
    # transformers asks for it through a weak reference, as long as the model lives
    keeps = HfDeepSpeedConfig(told) if settings.zero_stage == 3 else None
    model = AutoModelForCausalLM.from_pretrained(
        settings.path,
        dtype=settings.dtype,
        attn_implementation=attention.NAME,
        trust_remote_code=settings.trust_remote_code,
        local_files_only=True,
    )
    model.config.use_cache = False
    names = {id(each): name for name, each in model.named_parameters()}
    _check_names(Path(settings.path), set(names.values()))
    adapter = None
    if settings.lora is not None:
        adapter = Adapter(model, settings.lora, settings.seed)
        names |= adapter.names()
    policy = PolicyModule(
        model,
        head_chunk=settings.head_chunk,
        gradient_checkpointing=settings.gradient_checkpointing,
    )
    policy.train(settings.gradient_checkpointing)  # transformers recomputes only in that mode
    return Loaded(policy, model, adapter, names, keeps)


def _check_names(directory: Path, held: set[str]) -> None:
    """Names go to the sampler, to checkpoints and into exports, where they are read as those of
    the model's files."""
    missing = sorted(held - stored_tensors(directory).keys())
    if missing:
        raise UnsupportedError(
            f"transformers holds the parameter {missing[0]!r}, which the files of {directory} "
            "don't name; models whose weights are renamed or merged on loading are not supported"
        )
