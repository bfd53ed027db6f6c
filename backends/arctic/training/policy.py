"""Arctic backend: a Hugging Face causal language model that computes the outputs of packed response
tokens (imports torch, attention, head, packing, support).
"""

from __future__ import annotations

from typing import Any

import torch

from remote_rl.errors import UnsupportedError

from . import attention, support
from .head import DEFAULT_CHUNK, TokenHead
from .packing import Packed

#: what `forward` can give
OUTPUTS = frozenset({"logprobs", "entropy"})


class PolicyModule(torch.nn.Module):
    """What a rank trains: `model` (a transformers causal LM, or a peft model around one), and a
    forward that runs its body once over a packed piece and its head on response tokens only.

    model: kept as the submodule `model`, so a parameter's name is "model." before its own; its
    attention implementation becomes the packed one and its output layer a `TokenHead` with the
    same parameters. head_chunk: rows whose logits are held at once. gradient_checkpointing: keep
    only each layer's input for the backward and compute the rest again; reentrant says which of
    torch's two implementations does it.

    Raises `UnsupportedError`, naming it, for a model whose logits this can't reproduce.
    """

    def __init__(
        self,
        model: Any,
        *,
        head_chunk: int = DEFAULT_CHUNK,
        gradient_checkpointing: bool = False,
        reentrant: bool = False,
    ) -> None:
        super().__init__()
        support.refuse_adapters(model)
        causal_lm = support.causal_lm_of(model)
        support.refuse(causal_lm)
        linear = causal_lm.get_output_embeddings()
        causal_lm.set_output_embeddings(TokenHead.sharing(linear, head_chunk))
        attention.register()
        causal_lm.set_attn_implementation(attention.NAME)
        if gradient_checkpointing:
            support.checkpoint_layers(causal_lm, reentrant)
        self.model = model

    @property
    def causal_lm(self) -> Any:
        """The transformers model itself, also where peft has wrapped it."""
        return support.causal_lm_of(self.model)

    def forward(self, packed: Packed, outputs: frozenset[str]) -> dict[str, torch.Tensor]:
        """Name to [N] float32 (float64 for a float64 model), one a response token, row after row:
        `logprobs` of each token at its row's temperature, `entropy` of that distribution.

        All outputs depend on all parameters, for a piece without a response token too.
        """
        unknown = outputs - OUTPUTS
        if unknown:
            raise UnsupportedError(
                f"the trainer has no output {min(unknown)!r}; it has {', '.join(sorted(OUTPUTS))}"
            )
        if self.training and not torch.is_grad_enabled():
            with support.evaluating(self):  # else layers would save inputs that nothing needs
                return self._compute(packed, outputs)
        return self._compute(packed, outputs)

    def _compute(self, packed: Packed, outputs: frozenset[str]) -> dict[str, torch.Tensor]:
        causal_lm = self.causal_lm
        hidden = causal_lm.base_model(
            input_ids=packed.tokens,
            position_ids=packed.position_ids,
            use_cache=False,
            packed_layout=packed.layout,
        ).last_hidden_state
        selected = hidden[0].index_select(0, packed.predictors)
        results = causal_lm.get_output_embeddings()(
            selected, packed.targets, packed.temperature, "entropy" in outputs
        )
        named = dict(zip(("logprobs", "entropy"), results))
        return {name: named[name] for name in sorted(outputs)}

    def self_check(self, *, seed: int = 0, tolerance: float | None = None) -> float:
        """Compares the logprobs of a few random texts with those of the model's own logits, each
        text alone, under transformers' eager attention; the largest difference in nats.

        For the start of a training run: it finds what no list of refusals can, such as logits that
        are changed after the head. tolerance: largest difference accepted; None takes one by the
        parameters' dtype. Training state and gradients are left alone. Raises `UnsupportedError`
        with the difference where it is larger.
        """
        return support.self_check(self, seed, tolerance)
