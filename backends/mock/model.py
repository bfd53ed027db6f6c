"""Mock backend: the policy's mathematics in float64 (imports numpy and remote_rl's types only).

The model sees a window of the last K tokens:

    x = [embed(token at lag 1), ..., embed(token at lag K)]       zero where there is no token
    h = tanh(x W^T + b)
    logits = h U^T + c,        logprobs = log softmax(logits / temperature)

Weights, all float64 (V vocabulary, D embedding, H hidden):

| name                      | shape     |
|---------------------------|-----------|
| model.embed_tokens.weight | [V, D]    |
| model.window.weight       | [H, K, D] |
| model.window.bias         | [H]       |
| lm_head.weight            | [V, H]    |
| lm_head.bias              | [V]       |

Products run over tiles of a constant shape, so a token's outputs have the same bits whatever else
is in the batch, on the trainer and on the sampler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from remote_rl.types import Batch, Ragged

Floats: TypeAlias = npt.NDArray[np.float64]
Ids: TypeAlias = npt.NDArray[np.int32]
Weights: TypeAlias = Mapping[str, Floats]

EMBEDDING = "model.embed_tokens.weight"
WINDOW = "model.window.weight"
WINDOW_BIAS = "model.window.bias"
HEAD = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"

#: what stands in a window where the text has not begun
NO_TOKEN = -1
#: products are cut into tiles of so many rows, of so many terms at most, and of so many columns
#: that a tile takes TILE_PRODUCTS multiplications: BLAS then treats every row alike, wherever it
#: lies, and starts no threads, which would cost more than they give and change the last bits
TILE_ROWS = 32
TILE_TERMS = 256
TILE_PRODUCTS = 1 << 18
COLUMN_MULTIPLE = 8
#: the hidden units' inputs at the start: large, so that different windows excite different units
#: and what is learnt after one hardly spills over to another
WINDOW_GAIN = 4.0
#: numbers of a piece's largest temporary array
PIECE_NUMBERS = 1 << 21


def initial_weights(
    *,
    vocab_size: int,
    window: int,
    embedding_size: int,
    hidden_size: int,
    initial_scale: float,
    seed: int,
) -> dict[str, Floats]:
    """Base weights by a seed. `initial_scale` is the standard deviation of the logits about zero,
    so a small one gives a distribution near uniform."""
    random = np.random.default_rng(seed)
    drawn = {
        EMBEDDING: random.standard_normal((vocab_size, embedding_size)),
        WINDOW: random.standard_normal((hidden_size, window, embedding_size))
        * (WINDOW_GAIN * (window * embedding_size) ** -0.5),
        WINDOW_BIAS: np.zeros(hidden_size),
        HEAD: random.standard_normal((vocab_size, hidden_size))
        * (initial_scale * hidden_size**-0.5),
        HEAD_BIAS: np.zeros(vocab_size),
    }
    return frozen(drawn)


def parameter_count(*, vocab_size: int, window: int, embedding_size: int, hidden_size: int) -> int:
    """How many numbers a model of these sizes has."""
    embedding = vocab_size * embedding_size
    layer = hidden_size * (window * embedding_size + 1)
    return embedding + layer + vocab_size * (hidden_size + 1)


def forward_flops(*, vocab_size: int, window: int, embedding_size: int, hidden_size: int) -> float:
    """Operations of a response token's forward, a multiplication and an addition being two: the two
    products of matrices. The backward has twice as many: by the input and by the weight of each."""
    return 2.0 * hidden_size * (window * embedding_size + vocab_size)


def frozen(arrays: Mapping[str, Floats]) -> dict[str, Floats]:
    """The same arrays, made read-only: holders share them and nobody writes to them."""
    for array in arrays.values():
        array.flags.writeable = False
    return dict(arrays)


def response_windows(prompts: Ragged, prompt_index: Ids, responses: Ragged, window: int) -> Ids:
    """[total response tokens, window] int32: the tokens before each, nearest first, NO_TOKEN where
    there is none."""
    rows = responses.row_numbers()
    position = np.arange(len(responses.values), dtype=np.int64) - responses.offsets[rows]
    prompt_start = prompts.offsets[prompt_index][rows]
    prompt_end = prompts.offsets[prompt_index + 1][rows]
    result = np.full((len(rows), window), NO_TOKEN, np.int32)
    for lag in range(1, window + 1):
        before = position - lag
        inside = before >= 0
        result[inside, lag - 1] = responses.values[np.flatnonzero(inside) - lag]
        source = prompt_end + before
        earlier = ~inside & (source >= prompt_start)
        result[earlier, lag - 1] = prompts.values[source[earlier]]
    return result


def batch_windows(batch: Batch, window: int) -> Ids:
    """`response_windows` of a batch."""
    return response_windows(batch.prompts, batch.prompt_index, batch.responses, window)


def prompt_windows(prompts: Ragged, window: int) -> Ids:
    """[prompts, window] int32: what the first response token of each sees."""
    ends, starts = prompts.offsets[1:, None], prompts.offsets[:-1, None]
    source = ends - np.arange(1, window + 1)
    inside = source >= starts
    found = prompts.values[np.where(inside, source, 0)]
    result: Ids = np.where(inside, found, NO_TOKEN).astype(np.int32)
    return result


def _product(left: Floats, right: Floats) -> Floats:
    """left [m, k] @ transposed right [n, k], tile by tile; [m, n]."""
    rows, columns, terms = len(left), len(right), left.shape[1]
    deep = min(terms, TILE_TERMS)
    across = TILE_PRODUCTS // (TILE_ROWS * deep)
    across = min(across, columns + -columns % COLUMN_MULTIPLE)
    left_tiles = _tiles(left, TILE_ROWS, deep)[:, None]
    right_tiles = _tiles(right, across, deep)[None].swapaxes(-1, -2)
    tiles: Floats = np.matmul(left_tiles, right_tiles)  # [m tiles, n tiles, k tiles, rows, across]
    summed = tiles[:, :, 0] if tiles.shape[2] == 1 else tiles.sum(axis=2)
    whole = summed.transpose(0, 2, 1, 3).reshape(len(summed) * TILE_ROWS, -1)
    return whole[:rows, :columns]


def _tiles(array: Floats, high: int, wide: int) -> Floats:
    """[row tiles, column tiles, high, wide], zeros beyond the edges."""
    rows, columns = array.shape
    padding = ((0, -rows % high), (0, -columns % wide))
    if any(after for _, after in padding):
        array = np.pad(array, padding)
    return array.reshape(-1, high, array.shape[1] // wide, wide).swapaxes(1, 2)


def _embed(weights: Weights, windows: Ids) -> Floats:
    embedded: Floats = weights[EMBEDDING][np.maximum(windows, 0)]
    embedded[windows == NO_TOKEN] = 0.0
    result: Floats = embedded.reshape(len(windows), -1)
    return result


def _hidden(weights: Weights, embedded: Floats) -> Floats:
    flat = weights[WINDOW].reshape(len(weights[WINDOW_BIAS]), -1)
    result: Floats = np.tanh(_product(embedded, flat) + weights[WINDOW_BIAS])
    return result


def _log_softmax(weights: Weights, hidden: Floats, temperature: Floats) -> Floats:
    scores = _product(hidden, weights[HEAD]) + weights[HEAD_BIAS]
    scores /= temperature[:, None]
    scores -= scores.max(axis=1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return scores


def log_probabilities(weights: Weights, windows: Ids, temperature: Floats) -> Floats:
    """[rows, V], the log distribution after each window [rows, K] at its temperature [rows] > 0.

    Holds all of it at once: for one position of many samples, not for whole batches."""
    return _log_softmax(weights, _hidden(weights, _embed(weights, windows)), temperature)


def pieces(weights: Weights, rows: int) -> Iterator[slice]:
    """Consecutive slices of `rows` that keep temporary arrays small."""
    widest = max(len(weights[HEAD_BIAS]), weights[WINDOW].size // len(weights[WINDOW_BIAS]))
    size = max(PIECE_NUMBERS // widest // TILE_ROWS, 1) * TILE_ROWS
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def token_outputs(
    weights: Weights, windows: Ids, tokens: Ids, temperature: Floats
) -> dict[str, Floats]:
    """`logprobs` of tokens [t] and `entropy` of their distributions, [t] each, given windows
    [t, K] and temperature [t] > 0."""
    logprobs, entropy = np.empty(len(tokens)), np.empty(len(tokens))
    for piece in pieces(weights, len(tokens)):
        table = log_probabilities(weights, windows[piece], temperature[piece])
        logprobs[piece] = table[np.arange(len(table)), tokens[piece]]
        entropy[piece] = -(np.exp(table) * table).sum(axis=1)
    return {"logprobs": logprobs, "entropy": entropy}


def gradients(
    weights: Weights,
    windows: Ids,
    tokens: Ids,
    temperature: Floats,
    cotangents: Mapping[str, Floats],
) -> dict[str, Floats]:
    """The derivative by each weight of the sum over tokens of cotangent x output.

    cotangents: "logprobs" and "entropy", [t] each; a missing one is zero."""
    totals = {name: np.zeros(array.shape) for name, array in weights.items()}
    nothing = np.zeros(len(tokens))
    by_logprob = cotangents.get("logprobs", nothing)
    by_entropy = cotangents.get("entropy", nothing)
    used = np.flatnonzero((by_logprob != 0) | (by_entropy != 0))
    window_weight = weights[WINDOW].reshape(len(weights[WINDOW_BIAS]), -1)
    for piece in pieces(weights, len(used)):
        chosen = used[piece]
        embedded = _embed(weights, windows[chosen])
        hidden = _hidden(weights, embedded)
        table = _log_softmax(weights, hidden, temperature[chosen])
        by_score = _score_gradient(
            table,
            tokens[chosen],
            by_logprob[chosen],
            by_entropy[chosen],
        )
        by_score /= temperature[chosen, None]
        totals[HEAD] += _product(by_score.T, hidden.T)
        totals[HEAD_BIAS] += by_score.sum(axis=0)
        by_input = _product(by_score, weights[HEAD].T) * (1.0 - hidden * hidden)
        totals[WINDOW] += _product(by_input.T, embedded.T).reshape(weights[WINDOW].shape)
        totals[WINDOW_BIAS] += by_input.sum(axis=0)
        _scatter(totals[EMBEDDING], windows[chosen], _product(by_input, window_weight.T))
    return totals


def _score_gradient(table: Floats, tokens: Ids, by_logprob: Floats, by_entropy: Floats) -> Floats:
    # d logprob_a / d score_b = [a = b] - p_b;   d entropy / d score_b = -p_b (log p_b + entropy)
    probabilities = np.exp(table)
    entropy = -(probabilities * table).sum(axis=1)
    result: Floats = table + entropy[:, None]
    result *= -by_entropy[:, None]
    result -= by_logprob[:, None]
    result *= probabilities
    result[np.arange(len(tokens)), tokens] += by_logprob
    return result


def _scatter(total: Floats, windows: Ids, values: Floats) -> None:
    """Adds values [rows, K x D] to the rows of total [V, D] that windows [rows, K] name."""
    ids = windows.reshape(-1)
    by_token = values.reshape(len(ids), -1)
    order = np.argsort(ids, kind="stable")
    order = order[np.searchsorted(ids[order], 0) :]
    if len(order) == 0:
        return
    ordered = ids[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    total[ordered[starts]] += np.add.reduceat(by_token[order], starts, axis=0)
