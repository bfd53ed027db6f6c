"""Shim (loop side, above the client): what SkyRL's trainer calls its workers through.

Imports SkyRL's output and batch types, remote_rl and what all shims share. Takes the place of
SkyRL's `WorkerDispatch`, whose signatures it keeps (a test compares them): every call becomes
operations of the run, in the order of the calls. Nothing lies on this side but the loss of a
framework's own and its outputs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, NoReturn

from skyrl.backends.skyrl_train.distributed.dispatch import WorkerOutput
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train.config import SkyRLTrainConfig

from remote_rl import Outputs, Session, errors
from remote_rl.losses import Cotangents
from remote_rl.types import Batch, ForwardBackwardResult

from ..common.derivatives import OwnLoss
from ..common.known_outputs import KnownOutputs
from .arguments import policy_only, policy_or_reference, refuse_arguments, refuse_profiler
from .batches import per_row, to_batch
from .checkpoints import Checkpoints
from .losses import build_loss, is_named
from .metrics import mini_batch_metrics
from .optimizer import Optimizer
from .options import Options
from .own_losses import evaluate_own_loss, needed_outputs

log = logging.getLogger("remote_rl.shims.skyrl")

#: at which SkyRL's reference worker takes its logprobs, whatever the sampling temperature is
_REFERENCE_TEMPERATURE = 1.0


class RemoteDispatch:
    """SkyRL's `WorkerDispatch` over a run.

    config: SkyRL's. session: the driver's. options: the shim's own. steps: optimizer steps of the
    whole training, for the schedule. global_step: the trainer's counter, which names checkpoints
    and travels onto samples as their label.
    """

    def __init__(
        self,
        config: SkyRLTrainConfig,
        session: Session,
        options: Options,
        *,
        steps: int | None,
        global_step: Callable[[], int],
    ) -> None:
        self._algorithm = config.trainer.algorithm
        self._session = session
        self._in_flight = options.in_flight
        self._global_step = global_step
        self._optimizer = Optimizer(config.trainer.policy.optimizer_config, steps)
        self._checkpoints = Checkpoints(session)
        self._known = KnownOutputs()
        self._without_gradient = False
        self._client: Any = None
        self._timings: dict[str, float] = {}

    # -- batches ------------------------------------------------------------------------------

    def get_lcm_dp_size(self) -> int:
        """1: the run shares a batch out itself, so SkyRL drops and pads nothing."""
        return 1

    def dp_size(self, model: str) -> int:
        """1, as `get_lcm_dp_size`."""
        policy_or_reference(model)
        return 1

    def stage_data(
        self,
        model: str,
        data: TrainingInputBatch,
        mini_batch_boundaries: list[tuple[int, int]],
    ) -> list[list[TrainingInputBatch]]:
        """The mini-batches, rows `start` to `end` each, one chunk a mini-batch."""
        policy_or_reference(model)
        return [[data[start:end]] for start, end in mini_batch_boundaries]

    # -- forward and backward -----------------------------------------------------------------

    def forward(
        self,
        model: str,
        data: TrainingInputBatch,
        loss_fn: str | None = None,
        loss_fn_config: dict[str, Any] | None = None,
        model_id: str | None = None,
        **worker_kwargs: Any,
    ) -> WorkerOutput:
        """Logprobs of every row, "logprobs" to a list of `response_length` floats, right-aligned
        as SkyRL's rows are; 0 where there is no response token.

        model: "policy", at the algorithm's temperature, or "ref", at 1.
        """
        refuse_arguments(loss_fn, loss_fn_config, model_id, worker_kwargs)
        if policy_or_reference(model) == "ref":
            batch = to_batch(data, temperature=_REFERENCE_TEMPERATURE)
            computed = self._session.training.forward(batch, policy="reference").result()
        else:
            batch = to_batch(data, temperature=self._algorithm.temperature)
            named = is_named(self._algorithm)
            names = frozenset({"logprobs"}) if named else needed_outputs(self._algorithm)
            computed = self._session.training.forward(batch, outputs=names).result()
            self._known.remember(batch, computed)
        rows = per_row(computed["logprobs"], data)
        return WorkerOutput(loss_fn_outputs=[{"logprobs": row} for row in rows], metrics={})

    def forward_from_staged(
        self,
        model: str,
        chunk_refs: list[TrainingInputBatch],
        loss_fn: str | None = None,
        loss_fn_config: dict[str, Any] | None = None,
        model_id: str | None = None,
        **worker_kwargs: Any,
    ) -> WorkerOutput:
        """`forward` of one mini-batch of `stage_data`."""
        (rows,) = chunk_refs
        return self.forward(model, rows, loss_fn, loss_fn_config, model_id, **worker_kwargs)

    def forward_backward(
        self,
        model: str,
        data: TrainingInputBatch,
        loss_fn: str | None = None,
        loss_fn_config: dict[str, Any] | None = None,
        model_id: str | None = None,
        **worker_kwargs: Any,
    ) -> WorkerOutput:
        """Adds the gradient of one mini-batch; the metrics are by the names of SkyRL's worker.

        `loss_fn_outputs` is empty: SkyRL's trainers of policies read none.
        """
        policy_only(model)
        refuse_arguments(loss_fn, loss_fn_config, model_id, worker_kwargs)
        batch = to_batch(data, temperature=self._algorithm.temperature, training=True)
        own = outputs = None
        if is_named(self._algorithm, data):
            gradient = self._named_gradient(batch, data)
            outputs = self._known.of(batch, frozenset({"logprobs"}), gradient.version)
        else:
            gradient, own = self._own_gradient(batch, data)
        lr = self._optimizer.lr
        metrics = mini_batch_metrics(gradient, data, self._algorithm, lr, own=own, outputs=outputs)
        return WorkerOutput(metrics=metrics)

    def forward_backward_from_staged(
        self,
        model: str,
        chunk_refs: list[TrainingInputBatch],
        loss_fn: str | None = None,
        loss_fn_config: dict[str, Any] | None = None,
        model_id: str | None = None,
        **worker_kwargs: Any,
    ) -> WorkerOutput:
        """`forward_backward` of one mini-batch of `stage_data`."""
        (rows,) = chunk_refs
        return self.forward_backward(
            model, rows, loss_fn, loss_fn_config, model_id, **worker_kwargs
        )

    def _named_gradient(self, batch: Batch, data: TrainingInputBatch) -> ForwardBackwardResult:
        loss, evaluated = build_loss(self._algorithm, data, batch)
        return self._session.training.forward_backward(evaluated, loss).result()

    def _own_gradient(
        self, batch: Batch, data: TrainingInputBatch
    ) -> tuple[ForwardBackwardResult, OwnLoss]:
        own = evaluate_own_loss(self._algorithm, data, self._outputs(batch))
        if not own.finite:  # SkyRL's strategy then skips the step, and so does `optim_step`
            self._without_gradient = True
            return ForwardBackwardResult(value=own.value, version=own.version), own
        loss = Cotangents(own.derivatives, version=own.version)
        return self._session.training.forward_backward(batch, loss).result(), own

    def _outputs(self, batch: Batch) -> Outputs:
        names = needed_outputs(self._algorithm)
        version = self._session.weights.version().result().trainer
        held = self._known.of(batch, names, version)
        if held is not None:
            return held
        return self._session.training.forward(batch, outputs=names).result()

    def optim_step(self, model: str, model_id: str | None = None) -> float | None:
        """One AdamW step; the gradient's norm before clipping. A norm that is not finite skips the
        step and leaves the schedule where it is, as SkyRL's strategies do."""
        policy_only(model)
        refuse_arguments(None, None, model_id, {})
        if self._without_gradient:
            self._session.training.zero_grad().result()
            self._without_gradient = False
            norm, skipped = math.nan, True
        else:
            step = self._session.training.optim_step(self._optimizer.adamw()).result()
            norm, skipped = step.grad_norm, step.skipped
        if skipped:
            log.warning("a mini-batch was skipped: its gradient's norm is %s", norm)
        else:
            self._optimizer.advance()
        return norm

    def set_lr(self, model: str, learning_rate: float, model_id: str | None = None) -> NoReturn:
        """Refused: SkyRL's trainers of policies follow the schedule of the configuration."""
        raise errors.UnsupportedError(
            "set_lr has no place beside the schedule of trainer.policy.optimizer_config; set lr, "
            "scheduler and num_warmup_steps there"
        )

    def set_algorithm_config(self, model: str, **kwargs: Any) -> NoReturn:
        """Refused: what was checked at start-up would no longer be what is trained."""
        raise errors.UnsupportedError(
            f"set_algorithm_config({', '.join(kwargs)}) would change what was checked at start-up; "
            "set trainer.algorithm before the training starts"
        )

    # -- checkpoints --------------------------------------------------------------------------

    def save_checkpoint(
        self, model: str, ckpt_dir: str, tokenizer: Any = None, model_id: str | None = None
    ) -> None:
        """Blocks until the server's checkpoint is complete; `ckpt_dir` then names it."""
        policy_only(model)
        refuse_arguments(None, None, model_id, {})
        self._checkpoints.save(ckpt_dir, self._global_step(), self._optimizer.state())

    def finalize_pending_saves(self, model: str) -> None:
        """Nothing is pending: `save_checkpoint` returns when all is written."""
        policy_only(model)

    def load_checkpoint(
        self,
        model: str,
        ckpt_dir: str,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        model_id: str | None = None,
    ) -> None:
        """Loads what `ckpt_dir` names into the trainer."""
        policy_only(model)
        refuse_arguments(None, None, model_id, {})
        schedule = self._checkpoints.load(
            ckpt_dir, optimizer=load_optimizer_states, schedule=load_lr_scheduler_states
        )
        if schedule is not None:
            self._optimizer.restore(schedule)

    def save_hf_model(self, model: str, export_dir: str, tokenizer: Any) -> None:
        """A Hugging Face directory of the current weights, with the tokenizer."""
        policy_only(model)
        self._checkpoints.export(export_dir, tokenizer)

    def clean(self, base: str, keep: int) -> None:
        """Removes old checkpoints by SkyRL's rule, here and on the server."""
        self._checkpoints.clean(base, keep)

    def init_model(
        self, model: str, model_path: str, num_training_steps: int | None = None
    ) -> None:
        """The reference becomes the current policy (`trainer.update_ref_every_epoch`), without
        the weights leaving the server; `model_path` is what SkyRL exported of it."""
        if policy_or_reference(model) != "ref":
            raise errors.UnsupportedError(
                f"the model {model!r} can't be made again from {model_path}; load a checkpoint"
            )
        self._session.training.set_reference("current").result()

    # -- weights ------------------------------------------------------------------------------

    def set_inference_engine_client(self, inference_engine_client: Any) -> None:
        """Whose weight version rises with a sync."""
        self._client = inference_engine_client

    init_weight_sync_state = set_inference_engine_client

    async def save_weights_for_sampler(self, model_id: str | None = None) -> None:
        """Trainer to sampler; generations that run meanwhile follow `trainer.remote.in_flight`."""
        refuse_arguments(None, None, model_id, {})
        receipt = await self._session.weights.sync(
            in_flight=self._in_flight, label=self._global_step()
        )
        self._timings = {"sync_weights_only_transfer": receipt.seconds}
        if self._client is not None:
            self._client.increment_weight_version()

    def get_timing_metrics(self) -> dict[str, float]:
        """Seconds of the last sync, by SkyRL's name of them; empty before the first."""
        return dict(self._timings)

    # -- what local workers would need --------------------------------------------------------

    def empty_cache(self, model: str | None = None) -> None:
        """Nothing is cached on this side."""

    def get_node_ids(self) -> list[str]:
        """None: no worker runs in SkyRL's cluster."""
        return []

    def mark_all_offloaded(self) -> None:
        """The run places its halves itself."""

    def start_profile(
        self, model: str, config: dict[str, Any] | None = None, raise_on_error: bool = False
    ) -> NoReturn:
        """Refused: the workers that it would trace are the server's."""
        refuse_profiler()

    def profile_step(self, model: str) -> NoReturn:
        """Refused, as `start_profile`."""
        refuse_profiler()

    def stop_profile(self, model: str, raise_on_error: bool = False) -> NoReturn:
        """Refused, as `start_profile`."""
        refuse_profiler()
