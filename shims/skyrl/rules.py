"""Shim (loop side, above the client): rules that SkyRL's keys share.

Imports the rules of all shims. `keys` says how the tables are read.
"""

from __future__ import annotations

from typing import Final

from ..common.rules import ByMode, Irrelevant, Rule

SYNC: Final = "sync"
FULLY_ASYNC: Final = "fully_async"


def by_mode(*, sync: Rule, fully_async: Rule) -> ByMode:
    """Another rule for each of SkyRL's trainers."""
    return ByMode({SYNC: sync, FULLY_ASYNC: fully_async})


LAYOUT = Irrelevant(
    "it changes the speed and memory of an engine inside SkyRL; the server's own configuration "
    "lays its engine out"
)
NO_CRITIC = Irrelevant("of a critic, and trainer.critic.model.path is refused")
NO_LORA = Irrelevant("it shapes a LoRA, and lora.rank is refused")
NO_PROFILER = Irrelevant("of torch_profiler_config.enable, which is refused")
NO_MEGATRON = Irrelevant("of trainer.strategy=megatron, which is refused")
LORA: Final = "LoRA is the server's own configuration; set it there and leave this key alone"
MODEL: Final = "the model is the server's; serve one whose own configuration says so"
QUANTIZED: Final = "quantization-aware training changes what is trained; a run has none"
PRECISION: Final = (
    "the precision is the server's own configuration; set it there and leave this key alone"
)
TEXT_ONLY: Final = "a Batch carries text alone; leave it out"
