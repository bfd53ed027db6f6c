"""Shim (loop side, above the client): torch's random numbers in a checkpoint's metadata.

Imports torch. A framework's own loss that runs here may draw from them.
"""

from __future__ import annotations

import base64

import torch


def random_state() -> str:
    """The state of this process's torch, as text."""
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode("ascii")


def restore_random_state(state: str) -> None:
    """Goes on from what `random_state` returned."""
    torch.set_rng_state(torch.tensor(list(base64.b64decode(state)), dtype=torch.uint8))
