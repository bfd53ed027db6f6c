"""Arctic backend: which models the packed forward reproduces, refused by name where it does not
(imports torch, transformers, attention, head, packing, remote_rl).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from remote_rl.errors import UnsupportedError
from remote_rl.types import Batch, Ragged

from . import attention
from .packing import pack

if TYPE_CHECKING:
    from .policy import PolicyModule

#: settings that change logits after the head, with the value at which each does nothing
_AFTER_THE_HEAD = {
    "final_logit_softcapping": None,
    "logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
    "output_multiplier_scale": 1.0,
}
_LAYERS = frozenset({"full_attention", "sliding_attention"})
#: rotary embeddings whose frequencies follow the longest text of a forward pass
_ROPE_BY_LENGTH = frozenset({"dynamic", "longrope"})
#: largest difference of a logprob that rounding explains, in nats; eager attention takes its
#: softmax in float32, and a narrow head's own logits are rounded to 8 or 11 bits, ours are not
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}


def causal_lm_of(model: Any) -> Any:
    """The transformers model inside a peft model, or `model` itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def refuse(model: Any) -> None:
    """Raises `UnsupportedError` where the packed forward could not give the model's own logprobs,
    naming what stands in the way."""
    problem = _shape_problem(model) or _config_problem(model.config) or _dropout_problem(model)
    if problem:
        raise UnsupportedError(f"{type(model).__name__} can't be trained here: {problem}")


def refuse_adapters(model: Any) -> None:
    """Raises `UnsupportedError` for a peft model whose adapter is not inside the layers."""
    for name, adapter in getattr(model, "peft_config", {}).items():
        if adapter.is_prompt_learning:
            raise UnsupportedError(
                f"adapter {name!r} ({type(adapter).__name__}) puts something before the prompt, "
                "which packed sequences have no place for; use LoRA"
            )


def _shape_problem(model: Any) -> str | None:
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, and only decoders are"
    parts = [
        name for name in ("text_config", "vision_config", "audio_config") if _has(config, name)
    ]
    if parts:
        return f"it is multimodal (its configuration has {parts[0]}), and only text models are"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention does not go through transformers' attention registry"
    if model.base_model is model:
        return "it has no base model (base_model_prefix) that ends before the output layer"
    head = model.get_output_embeddings()
    # what peft or a quantiser puts there computes something else
    if head is None or not isinstance(head, torch.nn.Linear) or hasattr(head, "base_layer"):
        return (
            f"its output layer is {type(head).__name__}, not torch.nn.Linear; leave it out of "
            "adapters and quantisation"
        )
    return None


def _config_problem(config: Any) -> str | None:
    for name, neutral in _AFTER_THE_HEAD.items():
        value = getattr(config, name, neutral)
        if value is not None and value != neutral:
            return f"its logits are changed after the output layer ({name}={value})"
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if kinds:
        return f"it has layers of kind {min(kinds)!r}; {' and '.join(sorted(_LAYERS))} are known"
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind in _ROPE_BY_LENGTH:
        return (
            f"its rotary embedding ({kind}) depends on the longest text computed with it, so a "
            "token's logprob would depend on the batch"
        )
    return None


def _dropout_problem(model: Any) -> str | None:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            return f"{name} drops out with probability {module.p}; set it to 0 in the configuration"
    if getattr(model.config, "attention_dropout", 0.0):
        return f"attention_dropout is {model.config.attention_dropout}; set it to 0"
    return None


def _has(config: Any, name: str) -> bool:
    return getattr(config, name, None) is not None


def checkpoint_layers(model: Any, reentrant: bool) -> None:
    """Turns gradient checkpointing on; refused where the model has none. Gradients pass frozen
    embeddings too: transformers sees to it."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UnsupportedError(
            f"{type(model).__name__} has no gradient checkpointing; leave it out of the "
            "configuration"
        )
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def self_check(policy: PolicyModule, seed: int, tolerance: float | None) -> float:
    """See `PolicyModule.self_check`."""
    model = policy.causal_lm
    weight = next(policy.parameters())
    if tolerance is None:
        tolerance = _TOLERANCES.get(weight.dtype, max(_TOLERANCES.values()))
    batch = _random_batch(model.config.vocab_size, seed)
    with torch.no_grad(), evaluating(policy):
        ours = policy(pack(batch, weight.device), frozenset({"logprobs"}))["logprobs"]
        with _plain_attention(model):
            theirs = _plain_logprobs(model, batch, weight.device)
    difference = float((ours.double() - theirs).abs().max())
    if not difference <= tolerance:
        raise UnsupportedError(
            f"{type(model).__name__} can't be trained here: the packed forward's logprobs differ "
            f"from those of the model's own logits by {difference:.3g} nats, more than "
            f"{tolerance:.3g}",
            difference=difference,
        )
    return difference


def _random_batch(vocabulary: int, seed: int) -> Batch:
    random = np.random.default_rng(seed)

    def texts(*lengths: int) -> Ragged:
        return Ragged.from_rows(
            [random.integers(0, vocabulary, size) for size in lengths], np.int32
        )

    return Batch(
        prompts=texts(11, 1),
        prompt_index=[0, 1, 0, 0, 1],
        responses=texts(7, 12, 1, 3, 2),
        temperature=np.array([1.0, 0.7, 1.3, 1.0, 0.7], np.float32),
    )


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """`module` in evaluation mode for a while; its parts' own modes come back afterwards."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextmanager
def _plain_attention(model: Any) -> Iterator[None]:
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(attention.NAME)


def _plain_logprobs(model: Any, batch: Batch, device: torch.device) -> torch.Tensor:
    """[N] float64: each row's text alone, through the model's own forward."""
    results = []
    for row, response in enumerate(batch.responses):
        prompt = batch.prompts[int(batch.prompt_index[row])]
        text = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64)).to(device)
        logits = model(input_ids=text[None], use_cache=False).logits[0].double()
        logits = logits[len(prompt) - 1 : -1] / float(batch.temperature[row])
        results.append(logits.log_softmax(-1).gather(1, text[len(prompt) :, None])[:, 0])
    return torch.cat(results)
