"""Bytes that a step of verl sends through the shim, beside padded rows; verl_step.py prints them.

The shim's own functions send rows as verl 0.9.1 hands them over; the server counts what arrives.
Runs in verl's environment. Importing it makes what tests/verl starts trainings with importable.
"""

from __future__ import annotations

import re
import sys
import tempfile
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from report import table

from remote_rl import Batch, Operation, Ragged, Session, connect

# the tests' tiny training, and what starts it; no second copy of it here
TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "verl")]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # verl and what it imports warn freely as they load
    import hydra
    import torch
    from verl.utils import tensordict_utils
    from verl.utils.config import omega_conf_to_dataclass
    from verl_rows import jagged
    from verl_runs import serve_mock
    from verl_workload import VOCABULARY

    from shims.verl.metrics import Meter
    from shims.verl.optimizer import Optimizer
    from shims.verl.updates import forward, update

#: what a loss needs for each token: verl's name and the field of `Batch`
FLOATS = {
    "advantages": "advantages",
    "old_log_probs": "old_logprobs",
    "ref_log_prob": "ref_logprobs",
}


@attrs.frozen(kw_only=True)
class Shape:
    """Rows of a step. prompts, responses: (usual, longest) lengths in tokens, log-normal around the
    usual one. mini_batches: of an update."""

    title: str
    groups: int
    group: int
    prompts: tuple[int, int]
    responses: tuple[int, int]
    mini_batches: int = 2

    @property
    def rows(self) -> int:
        """Responses of a step."""
        return self.groups * self.group


TINY = Shape(title="The tests' training", groups=4, group=4, prompts=(2, 8), responses=(4, 6))
#: an eighth of the rows of examples/verl/bird_text_to_sql.sh
LONG = Shape(title="Long prompts", groups=16, group=8, prompts=(2000, 6144), responses=(500, 2048))


def rows_of(shape: Shape, random: np.random.Generator) -> Any:
    """What verl 0.9.1 hands to the worker with update_actor, without padding."""

    def lengths(usual: int, longest: int, count: int) -> Any:
        drawn = random.lognormal(np.log(usual), 0.6, count)
        return np.clip(drawn.astype(np.int64), 1, longest)

    sizes = lengths(*shape.responses, shape.rows)
    prompts = [
        random.integers(2, len(VOCABULARY), size) for size in lengths(*shape.prompts, shape.groups)
    ]
    # only a group's own prompts are equal, however short they are
    for number, prompt in enumerate(prompts):
        prompt[0] = 2 + number % 26
    ones = [np.ones(size) for size in sizes]
    tensors = {
        "prompts": jagged([prompts[row // shape.group] for row in range(shape.rows)]),
        "responses": jagged([random.integers(2, len(VOCABULARY), size) for size in sizes]),
        "response_mask": jagged(ones),
        "loss_mask": jagged(ones),
    }
    for name in FLOATS:
        tensors[name] = jagged([random.normal(-2, 0.1, size) for size in sizes], torch.float32)
    mini_batch = shape.rows // shape.mini_batches
    call = {
        "temperature": 1.0,
        "calculate_entropy": True,
        "mini_batch_size": mini_batch,
        "global_batch_size": mini_batch,
        "epochs": 1,
        "seed": 42,
        "dataloader_kwargs": {"shuffle": False},
    }
    return tensordict_utils.get_tensordict(tensors, call)


def unshared(batch: Batch) -> Batch:
    """Every response with a prompt of its own."""
    index = np.arange(len(batch), dtype=np.int32)
    return batch.replace(prompts=batch.prompts.select(batch.prompt_index), prompt_index=index)


def padded(shape: Shape) -> Callable[[Batch], Batch]:
    """Rectangles as wide as the longest that is allowed, through remote_rl's own wire."""

    def rectangles(batch: Batch) -> Batch:
        batch = unshared(batch)
        width = shape.responses[1]
        fields = {
            name: Ragged.of(held.to_padded(width=width))
            for name in ("responses", "mask", *FLOATS.values())
            if (held := getattr(batch, name)) is not None
        }
        prompts = batch.prompts.to_padded(width=shape.prompts[1], side="left")
        return batch.replace(prompts=Ragged.of(prompts), **fields)

    return rectangles


class Recording:
    """A session whose training operations are noted, so that they can be sent again with others."""

    def __init__(self, session: Session) -> None:
        self.training = self
        self.batches: list[Batch] = []
        self._sent: list[Callable[[Callable[[Batch], Batch]], Operation[Any]]] = []
        self._own = session.training

    def forward(self, batch: Batch, **options: Any) -> Any:
        """As the session's."""
        self.batches.append(batch)
        self._sent.append(lambda change: self._own.forward(change(batch), **options))
        return self._own.forward(batch, **options)

    def forward_backward(self, batch: Batch, loss: Any) -> Any:
        """As the session's."""
        self.batches.append(batch)
        self._sent.append(lambda change: self._own.forward_backward(change(batch), loss))
        return self._own.forward_backward(batch, loss)

    def optim_step(self, adamw: Any) -> Any:
        """As the session's."""
        self._sent.append(lambda _: self._own.optim_step(adamw))
        return self._own.optim_step(adamw)

    def again(self, change: Callable[[Batch], Batch]) -> None:
        """The same operations with changed batches, to the last result."""
        for submit in self._sent:
            submit(change).result()


class Worker:
    """The shim's part of one step, as its worker calls it, for these rows."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        keys = ("use_kl_loss=true", "use_dynamic_bsz=true", "optim.total_training_steps=100")
        with hydra.initialize_config_module("verl.trainer.config", version_base=None):
            stock = hydra.compose(
                "ppo_trainer", [f"actor_rollout_ref.actor.{each}" for each in keys]
            )
        self.actor = omega_conf_to_dataclass(stock.actor_rollout_ref.actor)
        self.optimizer = Optimizer(self.actor.optim)
        self.meter = Meter()

    def old(self, session: Any) -> None:
        """Old logprobs and entropies."""
        forward(session, self.rows, {"logprobs", "entropy"}, "current", meter=self.meter)

    def reference(self, session: Any) -> None:
        """Logprobs of the reference."""
        forward(session, self.rows, {"logprobs"}, "reference", meter=self.meter)

    def update(self, session: Any) -> None:
        """All mini-batches."""
        update(session, self.actor, self.optimizer, self.rows, meter=self.meter)


@contextmanager
def mock_session() -> Iterator[tuple[str, Session]]:
    """A server of the mock, which answers at once, and its driver."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serve_mock(Path(folder), vocab_size=len(VOCABULARY)) as url,
        connect(url) as session,
    ):
        yield url, session


def received(url: str) -> int:
    """Bytes of bodies that the server has received so far."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.search(r"^remote_rl_received_bytes_total (\S+)$", text, re.MULTILINE)
    assert found, text
    return int(float(found.group(1)))


def bytes_table(shape: Shape) -> str:
    """What reaches the server in the forwards and the update of one step."""
    worker = Worker(rows_of(shape, np.random.default_rng(0)))
    changes: dict[str, Callable[[Batch], Batch]] = {
        "the shim: each prompt once for its group": lambda batch: batch,
        "the same, a prompt for each response": unshared,
        "and padded, through the same wire": padded(shape),
    }
    measured = {}
    with mock_session() as (url, session):
        recording = Recording(session)
        worker.old(recording)
        worker.reference(recording)
        worker.update(recording)
        for name, change in changes.items():
            before = received(url)
            recording.again(change)
            measured[name] = received(url) - before
    batches = recording.batches
    measured["verl's padded rows, arrays alone"] = sum(rectangles(shape, each) for each in batches)
    own = next(iter(measured.values()))
    rows = [(name, f"{size / 1e3:,.1f}", f"{size / own:.2f}") for name, size in measured.items()]
    said = (
        f"**{shape.title}**: {shape.groups} prompts of up to {shape.prompts[1]:,} tokens "
        f"({len(batches[0].prompts.values):,} in all), {shape.group} responses of up to "
        f"{shape.responses[1]:,} tokens to each ({batches[0].tokens:,} in all), "
        f"{shape.mini_batches} mini-batches."
    )
    return f"{said}\n\n{table(('to the server in a step', 'kB', 'by the shim'), rows)}"


def rectangles(shape: Shape, batch: Batch) -> int:
    """Bytes of one call's rows as verl before V1 held them, at their least: ids and attention mask
    of prompt and response, and the response's mask, int64; what the loss needs, float32."""
    prompt, response = shape.prompts[1], shape.responses[1]
    floats = sum(getattr(batch, name) is not None for name in FLOATS.values())
    return len(batch) * (2 * 8 * (prompt + response) + 8 * response + 4 * response * floats)
