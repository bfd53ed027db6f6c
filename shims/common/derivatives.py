"""Shim (loop side, above the client): a framework's own loss and its derivatives.

Imports attrs, numpy, torch and remote_rl. The function runs here, on the outputs of a forward; its
derivatives are sent as cotangents. A whole mini-batch is one micro-batch to it, and its random
numbers are those of this process's torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import attrs
import numpy as np
import torch

from remote_rl import Outputs, Ragged, errors

#: from the leaves (output name to float32 [total], in the order of the responses' tokens) to the
#: loss and its metrics
Evaluate = Callable[[Mapping[str, torch.Tensor]], tuple[torch.Tensor, Mapping[str, float]]]


@attrs.frozen(kw_only=True)
class OwnLoss:
    """value: the framework's loss of the mini-batch. derivatives: output name to Ragged[n] float32.
    metrics: by the framework's names. version: of the weights whose outputs it was computed
    from."""

    value: float
    derivatives: Mapping[str, Ragged]
    metrics: Mapping[str, float]
    version: int

    @property
    def finite(self) -> bool:
        """Whether the derivatives are numbers, so that there is a gradient to send."""
        return all(bool(np.isfinite(rows.values).all()) for rows in self.derivatives.values())


def evaluate_own(
    evaluate: Evaluate, outputs: Outputs, names: Iterable[str], *, name: str
) -> OwnLoss:
    """A loss on the outputs `names` of a mini-batch, and its derivatives.

    name: the loss's, for the error. Raises `InvalidRequestError` where the loss depends on no
    output.
    """
    leaves = {
        each: torch.tensor(outputs[each].values, requires_grad=True) for each in sorted(names)
    }
    value, metrics = evaluate(leaves)
    if not value.requires_grad:
        raise errors.InvalidRequestError(
            f"the policy loss {name!r} depends on no output of the model, "
            "so it has no gradient; look for detach(), item() or no_grad() in it"
        )
    slopes = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return OwnLoss(
        value=float(value.detach()),
        derivatives={
            each: outputs[each].with_values(
                np.zeros(len(leaf), np.float32) if slope is None else slope.numpy()
            )
            for (each, leaf), slope in zip(leaves.items(), slopes, strict=True)
        },
        metrics=dict(metrics),
        version=outputs.version,
    )
