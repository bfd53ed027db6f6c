"""Arctic backend: one training rank, a plain object (imports the engine, shards, files, loading,
delivering, packing, and remote_rl's losses and types).

All ranks of a trainer get the same calls in the same order, each with its own rows. None of them
waits for a clock: where one is gone, whoever started them ends the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import torch

from remote_rl.errors import BackendError, RemoteRLError, UnsupportedError
from remote_rl.losses import Loss, LossBatch, Metric, evaluate, merge_metrics
from remote_rl.types import AdamW, Batch
from remote_rl.types.flops import DecoderShape, packed_tokens

from ..weights.manifest import Entry, Form
from ..weights.sources import IpcHandles, Meeting
from . import files, joining, loading, publishing
from .answers import RankFacts, RankLoss, RankSettings, StepResult
from .delivering import Deliveries
from .offload import Offloaded
from .packing import pack
from .shape import shape_of
from .shards import BASE, CURRENT, Shards
from .zero import Zero

Positions: TypeAlias = npt.NDArray[np.int64]
Columns: TypeAlias = dict[str, npt.NDArray[np.float32]]


class Rank:
    """One process of data parallelism. MASTER_ADDR and MASTER_PORT are set in its environment."""

    def __init__(self, settings: RankSettings, rank: int, world: int) -> None:
        self.settings = settings
        self.rank = rank
        self.world = world
        self.device = torch.device(settings.device)
        self._started: _Started | None = None
        self._offloaded: Offloaded | None = None
        self._deliveries = Deliveries(rank, self.device)

    @property
    def _held(self) -> _Started:
        if self._started is None:
            raise BackendError(f"training rank {self.rank} was not started")
        if self._offloaded is not None:
            raise BackendError(f"training rank {self.rank} is asleep; wake it first")
        return self._started

    @property
    def pulse(self) -> int:
        """Rises with each pass and each tensor that is dealt with: a sign of life."""
        if self._started is None:
            return 0
        return self._started.engine.pulse + self._deliveries.pulse

    def start(self) -> RankFacts:
        """Meets the other ranks and loads the model. Raises `UnsupportedError`, naming what stands
        in the way, for a model whose own logits the packed forward does not give."""
        settings = self.settings
        told = joining.configuration(
            settings.zero_stage,
            self.world,
            getattr(torch, settings.dtype),
            settings.bucket_elements,
        )
        joining.join(self.device, self.rank, self.world)
        loaded = loading.load(settings, told)
        engine = Zero(loaded.policy, loaded.names, told)
        loaded.policy.self_check(seed=settings.seed % 2**32)
        self._started = _Started(engine, loaded, Shards(engine))
        forms = publishing.forms(loaded)
        shape, uncounted = _counted(loaded)
        return RankFacts(
            forms=forms,
            parameters=sum(int(np.prod(shape)) for shape, _ in forms.values()),
            trained=sum(engine.sizes().values()),
            vocab_size=loaded.model.get_output_embeddings().out_features,
            masters=sum(each.nbytes for each in engine.masters),
            device=self._device_name(),
            shape=shape,
            uncounted=uncounted,
        )

    def _device_name(self) -> str:
        cuda = self.device.type == "cuda"
        return str(torch.cuda.get_device_name(self.device) if cuda else self.device.type)

    def settle(self) -> None:
        """Waits for what the device still has to do, so that whoever measures time sees all."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # -- forward and backward -----------------------------------------------------------------

    def forward(
        self,
        batch: Batch | None,
        pieces: Sequence[Positions],
        outputs: frozenset[str],
        policy: str = CURRENT,
    ) -> Columns:
        """Name to [response tokens of the batch] float32, row after row. pieces: positions into
        the batch, each row once; on every rank the same number of them."""
        total = 0 if batch is None else len(batch.responses.values)
        columns: Columns = {name: np.zeros(total, np.float32) for name in outputs}
        with self._showing(policy), torch.no_grad(), self._evaluating():
            for piece in pieces:
                part = _selected(batch, piece)
                values = self._held.engine(pack(part, self.device), outputs)
                if batch is not None and part is not None:
                    places = _token_places(batch, piece)
                    for name, column in columns.items():
                        column[places] = values[name].float().cpu().numpy()
        return columns

    def forward_backward(
        self, batch: Batch | None, pieces: Sequence[Positions], loss: Loss
    ) -> RankLoss:
        """Adds the gradient of the loss, summed over ranks, to the accumulator. loss: already
        resolved on the whole batch and selected for these rows. What raises half-way leaves a part
        of the gradient there, until `zero_grad`."""
        value, tokens = 0.0, 0
        metrics: list[Mapping[str, Metric]] = []
        for piece in pieces:
            part = _selected(batch, piece)
            outputs = self._held.engine(pack(part, self.device), loss.required_outputs)
            if part is None:
                objective = sum(each.sum() for each in outputs.values()) * 0.0
            else:
                fields = LossBatch.from_batch(part, self._to_device)
                detached = {name: each.detach() for name, each in outputs.items()}
                found = evaluate(loss.select(piece), fields, detached)
                objective = sum(
                    (slopes * outputs[name]).sum() for name, slopes in found.derivatives.items()
                )
                value += found.value
                metrics.append(found.metrics)
                tokens += packed_tokens(part)
            self._held.engine.backward(objective)
        return RankLoss(value, merge_metrics(metrics), tokens)

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.as_tensor(array, device=self.device)

    @contextlib.contextmanager
    def _showing(self, policy: str) -> Iterator[None]:
        held = self._held
        if held.loaded.adapter is not None and held.shards.is_base(policy):
            with held.loaded.adapter.off():
                yield
        else:
            with held.shards.showing(policy):
                yield

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        module = self._held.loaded.policy
        mode = module.training
        module.eval()
        try:
            yield
        finally:
            module.train(mode)

    # -- the optimizer ------------------------------------------------------------------------

    def optim_step(self, options: AdamW) -> StepResult:
        """One step with the accumulated gradient, which is gone afterwards; skipped, with weights,
        moments and the count of steps as they were, where it or the result is not finite."""
        held = self._held
        held.shards.before_change()
        held.engine.optimizer.arm(options)
        return held.engine.step()

    def zero_grad(self) -> None:
        """Discards the accumulated gradient, and whatever a failed call left."""
        self._held.engine.discard()

    # -- other weights ------------------------------------------------------------------------

    def snapshot(self, name: str) -> None:
        """Keeps the current weights."""
        self._held.shards.keep(name)

    def restore_snapshot(self, name: str) -> None:
        """Makes a snapshot's weights current and clears the accumulator; the optimizer stays."""
        self._held.engine.discard()
        self._held.shards.restore_named(name)

    def drop_snapshot(self, name: str) -> None:
        """Forgets a snapshot."""
        self._held.shards.drop(name)

    def set_reference(self, source: str) -> None:
        """Sets the reference to "base", "current" or a snapshot's weights."""
        self._held.shards.set_reference(source)

    def reset(self) -> None:
        """As after `start`."""
        held = self._held
        held.engine.discard()
        held.shards.clear()
        held.shards.restore_named(BASE)
        held.engine.optimizer.forget()

    # -- files and the sampler ----------------------------------------------------------------

    def save(self, directory: str | Path, optimizer: bool) -> bool:
        """Writes a checkpoint into an empty directory that all ranks see; True where a reference
        other than the base is inside."""
        held = self._held
        return files.save(Path(directory), held.engine, held.shards, optimizer)

    def load(self, directory: str | Path, optimizer: bool) -> bool:
        """Restores a checkpoint, of any number of ranks and any ZeRO stage, all of it or, when it
        fails, nothing; with optimizer=False the optimizer is a new run's. True where a reference
        other than the base was inside."""
        held = self._held
        return files.load(Path(directory), held.engine, held.shards, optimizer)

    def export(self, directory: str | Path) -> None:
        """Writes a Hugging Face directory of the current weights; with LoRA the merged ones, and
        the adapter in its subdirectory `adapter`."""
        held = self._held
        publishing.export(Path(directory), Path(self.settings.path), held.loaded, held.engine)

    def publish(self, segment: str, forms: Mapping[str, Form] | None = None) -> list[Entry]:
        """Writes all weights under their Hugging Face names into a new segment of shared memory,
        which the caller unlinks. forms: what the sampler expects, in dtypes of its own, None is
        what there is. Rank 0 writes, and returns the entries; the others return none.

        Raises `InvalidRequestError` before anything is written where the names or shapes differ,
        and `BackendError` where there is no room."""
        held = self._held
        return self._deliveries.publish(held.loaded, held.engine, segment, forms)

    def lend(self, forms: Mapping[str, Form] | None = None) -> IpcHandles:
        """UNVERIFIED. Handles of all weights, as `publish` would write them, on this rank's GPU:
        each whole there until `take_back`, a copy where it is partitioned, merged or cast."""
        held = self._held
        return self._deliveries.lend(held.loaded, held.engine, forms)

    def take_back(self) -> None:
        """UNVERIFIED. Forgets what was lent; nobody reads it any more."""
        self._deliveries.take_back()

    def check_weights(self, forms: Mapping[str, Form]) -> None:
        """Raises `InvalidRequestError`, on all ranks, where the sampler expects other tensors, or
        one of the weights holds NaN or infinity; no weight is moved for it."""
        self._deliveries.check_weights(self._held.loaded, forms)

    def open_store(self, patience: float) -> int | RemoteRLError | None:
        """Leaves the group of earlier broadcasts. Rank 0 opens a port where a new one meets, and
        returns it, or why it could not."""
        return self._deliveries.open_store(patience)

    def join_group(self, meeting: Meeting) -> RemoteRLError | None:
        """Rank 0 joins the group; it returns why it could not."""
        return self._deliveries.join_group(meeting)

    def broadcast(self, group: str, forms: Mapping[str, Form]) -> RemoteRLError | None:
        """Rank 0 broadcasts all weights, as `publish` would write them, in the group that it has
        met; it returns what ended that too early, and the ranks are as they were."""
        held = self._held
        return self._deliveries.broadcast(held.loaded, held.engine, group, forms)

    def call_off(self, group: str) -> None:
        """From another thread: what waits in this group ends, now and whenever it comes."""
        self._deliveries.call_off(group)

    def sleep(self) -> int:
        """Gives the device's memory back, the contents kept in host memory: weights, gradient,
        masters and moments. How many bytes."""
        if self._offloaded is None:
            self._offloaded = Offloaded(self._held.engine.memory())
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        return self._offloaded.nbytes

    def wake(self) -> None:
        """All is as before `sleep`. Where that fails, it can be tried again."""
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None

    def close(self) -> None:
        """Lets go of the model and of the other ranks."""
        if self._started is not None:
            self._started.engine.close()
            self._started = None
        self._deliveries.leave()
        joining.leave()


@attrs.frozen(eq=False)
class _Started:
    engine: Zero
    loaded: loading.Loaded
    shards: Shards


def _counted(loaded: loading.Loaded) -> tuple[DecoderShape | None, str | None]:
    try:
        return shape_of(loaded.model), None
    except UnsupportedError as error:
        return None, error.message


def _selected(batch: Batch | None, piece: Positions) -> Batch | None:
    return None if batch is None or len(piece) == 0 else batch.select(piece)


def _token_places(batch: Batch, piece: Positions) -> Positions:
    """Where the response tokens of a piece's rows lie among the batch's."""
    offsets = batch.responses.offsets
    spans = [np.arange(offsets[row], offsets[row + 1]) for row in piece.tolist()]
    return np.concatenate(spans).astype(np.int64) if spans else np.empty(0, np.int64)
