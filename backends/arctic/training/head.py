"""Arctic backend: logprobs and entropy of tokens without the logits of a batch (imports torch).

With x = (h W^T + b) / T for hidden state h, and p = softmax(x),

    logprob_a = x_a - logsumexp(x)                d logprob_a / d x_j = [a = j] - p_j
    entropy   = -sum_j p_j log p_j                d entropy / d x_j   = -p_j (log p_j + entropy)

Both directions run over chunks of rows; the backward computes each chunk's logits again. Logits
and sums are float32 (float64 for float64 weights), whatever the weights' dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch

#: rows whose logits are held at once
DEFAULT_CHUNK = 256
#: weights narrower than float32 are widened, and their gradient added up, so many rows at a time
VOCABULARY_TILE = 8192


class TokenHead(torch.nn.Linear):
    """A model's output layer that also gives the outputs of given tokens.

    It is a module that owns the weight, so that whatever gathers parameters when a module is
    entered (ZeRO-3) does so for both ways of calling it.
    """

    chunk: int

    @classmethod
    def sharing(cls, linear: torch.nn.Linear, chunk: int = DEFAULT_CHUNK) -> Self:
        """A head with the very parameters of `linear`, tied ones included. chunk: rows at once."""
        head = cls.__new__(cls)
        torch.nn.Module.__init__(head)
        head.in_features, head.out_features = linear.in_features, linear.out_features
        head.weight, head.bias = linear.weight, linear.bias
        head.chunk = chunk
        head.train(linear.training)
        return head

    def forward(
        self,
        input: torch.Tensor,
        targets: torch.Tensor | None = None,
        temperature: torch.Tensor | None = None,
        entropy: bool = False,
    ) -> Any:
        """The logits of `input` [..., H]; with `targets` and `temperature`, `token_outputs`."""
        if targets is None or temperature is None:
            return super().forward(input)
        return token_outputs(
            input, self.weight, self.bias, targets, temperature, self.chunk, entropy
        )


def token_outputs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    chunk: int = DEFAULT_CHUNK,
    entropy: bool = False,
) -> tuple[torch.Tensor, ...]:
    """(logprobs [N],), and with `entropy` (logprobs [N], entropies [N]), all differentiable.

    hidden [N, H], weight [V, H], bias [V] or None, of one dtype; targets [N] int64; temperature
    [N] above 0. Results are float32, or float64 where hidden is. `weight` may be a parameter
    whose memory is freed between forward and backward and there again for each.
    """
    results: tuple[torch.Tensor, ...] = _TokenOutputs.apply(
        hidden, weight, bias, targets, temperature, chunk, entropy
    )
    return results


class _TokenOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: torch.Tensor,
        chunk: int,
        entropy: bool,
    ) -> tuple[torch.Tensor, ...]:
        wide = _wide(hidden.dtype)
        logprobs = hidden.new_empty(len(hidden), dtype=wide)
        normalisers = torch.empty_like(logprobs)
        entropies = torch.empty_like(logprobs) if entropy else None
        for rows in _chunks(len(hidden), chunk):
            scores = _scores(hidden[rows], weight, bias, temperature[rows])
            normalisers[rows] = torch.logsumexp(scores, dim=1)
            chosen = scores.gather(1, targets[rows, None])[:, 0]
            logprobs[rows] = chosen - normalisers[rows]
            if entropies is not None:
                # -sum p log p, with p log p as 0 where p is
                scores -= normalisers[rows, None]
                probabilities = scores.exp()
                entropies[rows] = -probabilities.mul_(scores).sum(dim=1)
        context.save_for_backward(
            hidden, weight, bias, targets, temperature, normalisers, entropies
        )
        context.chunk = chunk
        return (logprobs,) if entropies is None else (logprobs, entropies)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, temperature, normalisers, entropies = context.saved_tensors
        wide = normalisers.dtype
        wants_hidden, wants_weight, wants_bias = context.needs_input_grad[:3]
        by_hidden = torch.empty_like(hidden) if wants_hidden else None
        by_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        by_bias = torch.zeros_like(bias, dtype=wide) if wants_bias else None
        for rows in _chunks(len(hidden), context.chunk):
            scores = _scores(hidden[rows], weight, bias, temperature[rows])
            scores -= normalisers[rows, None]
            by_scores = _score_gradient(
                scores,
                targets[rows],
                slopes[0][rows],
                None if entropies is None else (slopes[1][rows], entropies[rows]),
            )
            by_scores /= temperature[rows, None]
            if by_bias is not None:
                by_bias += by_scores.sum(dim=0)
            _add_products(by_scores, hidden[rows], weight, by_weight, by_hidden, rows)
        return (
            by_hidden,
            None if by_weight is None else by_weight.to(weight.dtype),
            None if by_bias is None else by_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def _score_gradient(
    logprobs: torch.Tensor,
    targets: torch.Tensor,
    by_logprob: torch.Tensor,
    entropy: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """[rows, V], in the memory of `logprobs` [rows, V]; entropy: its cotangents and values."""
    if entropy is None:
        result = logprobs.exp_().mul_(-by_logprob[:, None])
    else:
        by_entropy, value = entropy
        probabilities = logprobs.exp()
        result = logprobs.add_(value[:, None]).mul_(-by_entropy[:, None])
        result.sub_(by_logprob[:, None]).mul_(probabilities)
    return result.scatter_add_(1, targets[:, None], by_logprob[:, None])


def _add_products(
    by_scores: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    by_weight: torch.Tensor | None,
    by_hidden: torch.Tensor | None,
    rows: slice,
) -> None:
    """Writes the chunk's rows of by_hidden, and adds to by_weight."""
    total = None
    for tile in _tiles(weight):
        part = by_scores[:, tile]
        if by_weight is not None:
            _add_product(by_weight[tile], part.T, hidden)
        if by_hidden is not None:
            product = _product(part, weight[tile])
            total = product if total is None else total.add_(product)
    if by_hidden is not None and total is not None:
        by_hidden[rows] = total


def _scores(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, heat: torch.Tensor
) -> torch.Tensor:
    """[rows, V]: logits over temperature."""
    scores = hidden.new_empty(len(hidden), len(weight), dtype=_wide(hidden.dtype))
    for tile in _tiles(weight):
        if scores.dtype == weight.dtype:
            torch.mm(hidden, weight[tile].T, out=scores[:, tile])
        else:
            scores[:, tile] = _product(hidden, weight[tile].T)
    if bias is not None:
        scores += bias
    scores /= heat[:, None]
    return scores


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right, added up and returned in the wide dtype.

    On a GPU narrow operands stay narrow, as in any mixed-precision layer: its matrix units add
    their products up in float32. (Not run on a GPU yet.)"""
    wide = _wide(left.dtype)
    if left.dtype == right.dtype == wide:
        return left @ right
    if left.is_cuda:
        narrow = right.dtype if left.dtype == wide else left.dtype
        return torch.mm(left.to(narrow), right.to(narrow), out_dtype=wide)
    return left.to(wide) @ right.to(wide)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, in total's dtype."""
    if left.dtype == right.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += _product(left, right)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunks(rows: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk))


def _tiles(weight: torch.Tensor) -> Iterator[slice]:
    """Slices of the vocabulary: one where nothing has to be widened."""
    step = len(weight) if weight.dtype == _wide(weight.dtype) else VOCABULARY_TILE
    return (slice(start, min(start + step, len(weight))) for start in range(0, len(weight), step))
