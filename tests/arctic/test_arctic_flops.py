"""The count of floating-point operations: against torch's own counter on real models, and which
models have none.

torch counts the products that run. Those differ from what a model needs in three known ways, which
the tests take off exactly, so that no tolerance is left:

* eager attention computes all T x T pairs, half of which the causal mask hides;
* blocks of packed attention that are causal count as whole squares;
* the output layer's scores are computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from arctic_models import VOCABULARY, tiny_model
from peft import LoraConfig, inject_adapter_in_model
from torch.utils.flop_counter import FlopCounterMode

from backends.arctic.config import ArcticConfig
from backends.arctic.devices import devices_of
from backends.arctic.training.blocks import blocks_of
from backends.arctic.training.packing import pack
from backends.arctic.training.policy import PolicyModule
from backends.arctic.training.shape import shape_of
from remote_rl.errors import UnsupportedError
from remote_rl.types import Batch
from remote_rl.types.flops import packed_tokens

CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
LAYERS, WIDTH, HIDDEN = 2, 4 * 32, 128


def _attention(query: Any, key: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """4 operations a pair and number of a head; [groups, heads, positions, size]."""
    return 4 * query[0] * query[1] * query[2] * key[2] * query[3]


def _added(total: Any, left: Any, right: Any, *_: Any, **__: Any) -> int:
    return int(2 * left[0] * left[1] * right[1])


def counted(run: Callable[[], Any]) -> tuple[int, int]:
    """Operations of torch's products of matrices while `run` runs, and of the packed attention."""
    added = {torch.ops.aten.addmm_: _added, CPU_ATTENTION: _attention}
    with FlopCounterMode(display=False, custom_mapping=added) as counter:
        run()
    by_operator = dict(counter.get_flop_counts()["Global"])
    packed = by_operator.pop(CPU_ATTENTION, 0)
    return sum(by_operator.values()), packed


def batch_of(prompts: list[int], responses: list[tuple[int, int]]) -> Batch:
    random = np.random.default_rng(0)
    return Batch(
        prompts=[random.integers(3, VOCABULARY, length) for length in prompts],
        prompt_index=[prompt for prompt, _ in responses],
        responses=[random.integers(3, VOCABULARY, length) for _, length in responses],
        temperature=1.0,
    )


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_a_text_alone_costs_what_torch_counts(architecture: str) -> None:
    model = tiny_model(architecture)
    model.set_attn_implementation("eager")
    shape, length = shape_of(model), 37
    # a prompt of one token, so that each position predicts a response token, as in a plain forward
    text = batch_of([1], [(0, length)])
    ids = torch.from_numpy(np.concatenate([text.prompts[0], text.responses[0][:-1]]))[None].long()
    hidden_pairs = LAYERS * (length * length - length * (length + 1) // 2)
    with torch.no_grad():
        forward, _ = counted(lambda: model(ids, use_cache=False))
    assert forward - shape.forward(text) == 4 * WIDTH * hidden_pairs
    both, _ = counted(lambda: model(ids, use_cache=False).logits.sum().backward())
    assert both - shape.forward(text) - shape.backward(text) == 3 * 4 * WIDTH * hidden_pairs


@pytest.mark.parametrize("settings", [{}, {"sliding_window": 6}], ids=["whole", "window"])
def test_a_packed_batch_costs_what_torch_counts(settings: dict[str, int]) -> None:
    architecture = "mistral" if settings else "llama"
    policy = PolicyModule(tiny_model(architecture, **settings), head_chunk=8)
    shape = shape_of(policy.causal_lm)
    batch = batch_of([9, 4, 5], [(0, 7), (0, 1), (1, 12), (0, 3), (2, 0)])
    packed = pack(batch, "cpu")
    head, predicted = HIDDEN * VOCABULARY, len(batch.responses.values)
    pairs = (
        4
        * WIDTH
        * sum(
            (block.queries[1] - block.queries[0]) * sum(stop - start for start, stop in block.keys)
            for block in blocks_of(packed.layout, settings.get("sliding_window"))
        )
    )
    with torch.no_grad():
        linear, attention = counted(lambda: policy(packed, frozenset({"logprobs"})))
    assert attention == LAYERS * pairs  # each block in whole; nobody computes more than is counted
    needed = shape.forward(batch)
    assert linear == needed - shape._attention(batch)
    assert attention >= shape._attention(batch)
    both, _ = counted(lambda: policy(packed, frozenset({"logprobs"}))["logprobs"].sum().backward())
    again = 2 * head * predicted
    assert (
        both - again
        == 3 * linear
        == 3 * 2 * (shape.trained * packed_tokens(batch) + head * predicted)
    )


def test_adapters_leave_out_the_gradient_of_what_is_frozen() -> None:
    model = tiny_model("qwen3")
    whole = shape_of(model)
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), model, "default")
    for name, each in model.named_parameters():
        each.requires_grad_("lora_" in name)
    shape = shape_of(model)
    # q to 4 heads of 32, v to 2; A and B of each layer
    adapters = LAYERS * (4 * (HIDDEN + 128) + 4 * (HIDDEN + 64))
    assert (shape.trained, shape.frozen) == (adapters, whole.trained)
    assert (whole.frozen, whole.head_trained, shape.head_trained) == (0, True, False)
    batch = batch_of([5], [(0, 6), (0, 8)])
    assert shape.backward(batch) < 0.6 * whole.backward(batch)


def test_windows_are_those_of_the_layers() -> None:
    kinds = ["sliding_attention", "full_attention"]
    mixed = tiny_model("qwen3", layer_types=kinds, sliding_window=8, use_sliding_window=True)
    assert shape_of(mixed).windows == (8, None)
    assert shape_of(tiny_model("qwen2", sliding_window=8)).windows == (None, None)
    assert shape_of(tiny_model("mistral", sliding_window=8)).windows == (8, 8)


def test_tied_heads_are_counted_as_heads() -> None:
    tied, own = shape_of(tiny_model("llama", tied=True)), shape_of(tiny_model("llama"))
    assert tied == own
    assert own.head == HIDDEN * VOCABULARY


def test_experts_are_not_counted() -> None:
    model = tiny_model("llama")
    model.config.num_experts = 8
    with pytest.raises(UnsupportedError, match=r"mixture of experts \(num_experts=8\)"):
        shape_of(model)


def test_what_the_formula_does_not_know_is_named() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.down_proj = torch.nn.Conv1d(160, 128, 3)
    with pytest.raises(
        UnsupportedError, match=r"layers.1.mlp.down_proj.weight, a tensor of Conv1d"
    ):
        shape_of(model)


def config(path: Path, **sections: Any) -> ArcticConfig:
    return ArcticConfig(model={"path": path, "dtype": "bfloat16"}, **sections)


def test_devices_of_a_run(tmp_path: Path) -> None:
    apart = config(
        tmp_path,
        training={"ranks": 2},
        sampling={"engines": 3, "tensor_parallel": 2},
        placement={"device": "cuda"},
    )
    found = devices_of(apart, ["NVIDIA H200"] * 2)
    assert (found.count, found.total, found.dtype, found.peak_flops) == (2, 8, "bfloat16", 989e12)
    shared = config(
        tmp_path, training={"ranks": 2}, placement={"device": "cuda", "colocated": True}
    )
    assert devices_of(shared, ["NVIDIA H200"] * 2).total == 2
    mixed = devices_of(apart, ["NVIDIA H200", "NVIDIA A100"])
    assert mixed.kind == "NVIDIA A100, NVIDIA H200"
    assert "several kinds" in str(mixed.reason)
    on_cpus = devices_of(config(tmp_path, placement={"device": "cpu"}), ["cpu"])
    assert (on_cpus.total, on_cpus.peak_flops) == (2, None)
