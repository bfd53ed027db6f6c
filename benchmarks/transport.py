"""A training batch from the client to the server: remote_rl beside the same bytes without it.

    python benchmarks/transport.py             tables on the terminal
    python benchmarks/transport.py --write     and in docs/benchmarks.md

Server and client are two processes on this machine. Two times are taken of each way. "Held": from
the client's Batch to the moment at which the server holds it validated, in the dispatcher's hands,
by the clock that both processes share; of the other ways, to the moment at which the server holds
the bytes, or the tensors. "There and back": to the answer, which for remote_rl is the result of a
forward_backward whose backend does nothing.
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
from reference import Bare, RawSocket, alternating, in_pieces, paired_ratio, serving
from report import publish, table
from safetensors.numpy import save as save_safetensors
from served import now

from remote_rl import Batch, Ragged, Session, connect, losses
from remote_rl.wire import encode

ROWS, LONGEST, GROUP, VOCABULARY = 512, 4096, 8, 100_000
SENT = ("mask", "advantages", "old_logprobs")


def ragged_batch(random: np.random.Generator) -> Batch:
    """512 responses to 64 prompts: lengths log-normal around 1,000 tokens, cut off at 4,096."""
    lengths = np.minimum(random.lognormal(np.log(1000), 0.8, ROWS).astype(int) + 1, LONGEST)
    prompts = np.minimum(random.lognormal(np.log(200), 0.5, ROWS // GROUP).astype(int) + 1, 1024)
    return batch_of(random, lengths, prompts, GROUP)


def uniform_batch(random: np.random.Generator) -> Batch:
    """The worst case: every response 4,096 tokens long, every prompt 256 tokens and used once."""
    return batch_of(random, np.full(ROWS, LONGEST), np.full(ROWS, 256), 1)


def batch_of(random: np.random.Generator, lengths: Any, prompts: Any, group: int) -> Batch:
    """A batch with what PPO needs."""
    ids, floats = random.integers, random.normal
    total = int(lengths.sum())
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    prompt_offsets = np.concatenate([[0], np.cumsum(prompts)])

    def rows(values: Any) -> Ragged:
        return Ragged(values, offsets)

    return Batch(
        prompts=Ragged(ids(0, VOCABULARY, int(prompts.sum()), np.int32), prompt_offsets),
        prompt_index=np.repeat(np.arange(len(prompts), dtype=np.int32), group),
        responses=rows(ids(0, VOCABULARY, total, np.int32)),
        temperature=1.0,
        mask=rows(ids(0, 2, total, np.uint8)),
        advantages=rows(floats(size=total).astype(np.float32)),
        old_logprobs=rows(floats(size=total).astype(np.float32)),
    )


def fresh(batch: Batch) -> Batch:
    """The same batch in other memory, so that nothing of an earlier round can be of use."""
    fields = {field.name: getattr(batch, field.name) for field in attrs.fields(Batch) if field.init}
    offsets = batch.responses.offsets.copy()
    for name in ("responses", *SENT):
        fields[name] = Ragged(fields[name].values.copy(), offsets)
    return Batch(**fields)


def padded(batch: Batch) -> dict[str, Any]:
    """The same arrays as rectangles of int64 and float32, one row a response. How long each row is
    comes as one number; the attention masks of most frameworks are larger."""
    prompts = batch.prompts.to_padded(side="left").astype(np.int64)
    return {
        "prompts": prompts[batch.prompt_index],
        "prompt_lengths": batch.prompts.lengths[batch.prompt_index],
        "responses": batch.responses.to_padded().astype(np.int64),
        "response_lengths": batch.responses.lengths,
        "mask": batch.mask.to_padded().astype(np.int64),
        "advantages": batch.advantages.to_padded(),  # type: ignore[union-attr]
        "old_logprobs": batch.old_logprobs.to_padded(),  # type: ignore[union-attr]
        "temperature": np.ascontiguousarray(batch.temperature),
    }


#: takes a way to the server; the moment at which the server held what was sent
Way = Callable[[], float]


class Comparison:
    """All ways of one batch to the server, each with a connection of its own."""

    def __init__(self, batch: Batch, session: Session, url: str, port: int) -> None:
        self.batch, self.session = batch, session
        self.bare = {name: Bare(url) for name in ("opaque", "plain", "safetensors_body", "pickled")}
        self.raw = RawSocket(port)
        self.nbytes = encode(batch.only(SENT)).nbytes
        self.blob = bytearray(np.random.default_rng(1).bytes(self.nbytes))
        self.tensors = padded(batch)
        self.padded_nbytes = sum(tensor.nbytes for tensor in self.tensors.values())

    def remote_rl(self) -> Way:
        """From a Batch to the answer to it."""
        batch, loss = fresh(self.batch), losses.PPO()

        def measured() -> float:
            result = self.session.training.forward_backward(batch, loss).result()
            assert result.value == batch.tokens
            return result.metrics["held"]

        return measured

    def opaque(self) -> Way:
        """As many bytes, by the same client and server, in the same pieces."""
        blob = bytes(self.blob)
        return lambda: self._post("opaque", in_pieces(blob), blob)

    def plain(self) -> Way:
        """As many bytes as one object, read whole: what aiohttp does when told nothing."""
        blob = bytes(self.blob)
        return lambda: self._post("plain", blob, blob)

    def raw_socket(self) -> Way:
        """As many bytes through a socket into memory that is there already."""
        blob = bytes(self.blob)
        return lambda: self.raw.send(blob)

    def safetensors(self) -> Way:
        """From padded arrays to padded arrays, without a check of what they hold."""
        tensors = self._tensors()

        def measured() -> float:
            body = save_safetensors(tensors)
            return self._post("safetensors_body", in_pieces(body), body)

        return measured

    def pickle(self) -> Way:
        """From padded arrays to padded arrays, protocol 5, without a check."""
        tensors = self._tensors()

        def measured() -> float:
            body = pickle.dumps(tensors, protocol=5)
            return self._post("pickled", in_pieces(body), body)

        return measured

    def _tensors(self) -> dict[str, Any]:
        return {name: tensor.copy() for name, tensor in self.tensors.items()}

    def _post(self, name: str, data: Any, body: bytes) -> float:
        answer = self.bare[name].post(f"/reference/{name}", data, len(body))
        return float(json.loads(answer)["held"])

    def close(self) -> None:
        """Ends all connections."""
        for bare in self.bare.values():
            bare.close()
        self.raw.close()


def both_times(
    candidates: Mapping[str, Callable[[], Way]], rounds: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Of each candidate, the seconds until the server held what was sent, and there and back."""
    held: dict[str, list[float]] = {name: [] for name in candidates}

    def noting(name: str, prepare: Callable[[], Way]) -> Callable[[], Callable[[], None]]:
        def prepared() -> Callable[[], None]:
            way = prepare()

            def measured() -> None:
                began = now()
                held[name].append(way() - began)

            return measured

        return prepared

    back = alternating({name: noting(name, each) for name, each in candidates.items()}, rounds)
    return {name: (held[name][-rounds:], seconds) for name, seconds in back.items()}


def compare(title: str, comparison: Comparison, rounds: int) -> str:
    """One table: the same bytes first, then the padded ones, each beside remote_rl in its rounds
    (the padded ones take so long that the connections beside them fall asleep)."""
    bytes_of_own = {
        "remote_rl": comparison.remote_rl,
        "opaque bytes, same client and server": comparison.opaque,
        "opaque bytes, aiohttp as it comes": comparison.plain,
        "raw socket": comparison.raw_socket,
    }
    bytes_of_padded = {
        "remote_rl, beside the next two": comparison.remote_rl,
        "padded, safetensors": comparison.safetensors,
        "padded, pickle": comparison.pickle,
    }
    rows = []
    for candidates in (bytes_of_own, bytes_of_padded):
        taken = both_times(candidates, rounds)
        own_held, own_back = next(iter(taken.values()))
        for name, (held, back) in taken.items():
            nbytes = comparison.padded_nbytes if "padded" in name else comparison.nbytes
            median = statistics.median(held)
            rows.append(
                (
                    name,
                    f"{nbytes / 1e6:.1f}",
                    f"{median * 1e3:.2f}",
                    f"{min(held) * 1e3:.2f}",
                    f"{nbytes / median / 1e9:.2f}",
                    f"{paired_ratio(held, own_held):.2f}",
                    f"{statistics.median(back) * 1e3:.2f}",
                    f"{paired_ratio(back, own_back):.2f}",
                )
            )
    head = (
        "",
        "MB",
        "held: ms, median",
        "ms, least",
        "GB/s",
        "/ remote_rl's",
        "there and back: ms",
        "/ remote_rl's",
    )
    batch, ratio = comparison.batch, comparison.padded_nbytes / comparison.nbytes
    return (
        f"**{title}**: {len(batch)} responses over {len(batch.prompts)} prompts, "
        f"{batch.tokens:,} tokens; padded it is {ratio:.2f} times the bytes.\n\n"
        + table(head, rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--write", action="store_true", help="also into docs/benchmarks.md")
    options = parser.parse_args()
    random, sections = np.random.default_rng(0), []
    with serving() as (url, port), connect(url) as session:
        for title, make in (("Ragged", ragged_batch), ("Uniform", uniform_batch)):
            comparison = Comparison(make(random), session, url, port)
            sections.append(compare(title, comparison, options.rounds))
            comparison.close()
    publish("transport", "\n\n".join(sections), write=options.write)


if __name__ == "__main__":
    main()
