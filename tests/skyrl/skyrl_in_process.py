"""SkyRL's own trainer and generator as the shim sets them up, on a mock in this process, to be
called step by step.

Imports SkyRL, the mock and the shim.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from skyrl.backends.skyrl_train.inference_servers.engine_utils import (
    get_sampling_params_for_backend,
)
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train.generators.base import GeneratorOutput
from skyrl.train.generators.utils import prepare_generator_input
from skyrl_entry import Experiment
from skyrl_rows import VOCABULARY
from skyrl_workload import END, overrides
from skyrl_workload import VOCABULARY as WORDS

from backends.mock import create
from remote_rl import Ragged, Session, connect
from remote_rl.testing.call_log import CallLog
from shims.skyrl.attaching import Attached
from shims.skyrl.entrypoint import parse
from shims.skyrl.sampler import RemoteSampler
from shims.skyrl.trainer import RemoteTraining


class Rows:
    """SkyRL's tracker, in memory: the data of each logged step."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []

    def log(self, data: dict[str, Any], step: int, commit: bool = False) -> None:
        if commit:
            self.logged.append((step, dict(data)))

    def log_exception(self, error: BaseException, step: int) -> None:
        pass

    def finish(self) -> None:
        pass


class _Experiment(Experiment):
    """Attached already, and logs into memory."""

    def __init__(self, config: Any, session: Session, rows: Rows) -> None:
        super().__init__(config)
        self._rows = rows
        self._attached = Attached(session=session, info=session.info().result(), end_token_ids=())

    def get_tracker(self) -> Rows:
        return self._rows


class Training:
    """trainer: SkyRL's, models built. calls: what reached the mock. rows: what was logged.

    The mock has more ids than the tokenizer has words: what is drawn often has no text.
    """

    def __init__(self, session: Session, backend: Any, calls: CallLog, config: Any) -> None:
        self.session, self._backend, self.calls = session, backend, calls
        self.rows = Rows()
        experiment = _Experiment(config, session, self.rows)
        self.trainer: RemoteTraining = experiment._setup_trainer()
        self.trainer.init_weight_sync_state()
        self.trainer.global_step = 1

    @property
    def policy(self) -> dict[str, np.ndarray]:
        """The trainer's weights."""
        return dict(self._backend.training.policy.weights)

    @property
    def sampler(self) -> RemoteSampler:
        """The inference engine that SkyRL's generator draws from."""
        client: RemoteSampler = self.trainer.inference_engine_client
        return client

    async def draw(self) -> tuple[GeneratorOutput, list[str]]:
        """Rollouts of a step's prompts, and the id of each one's prompt."""
        config = self.trainer.cfg
        # a fully asynchronous trainer's loader gives one prompt at a time
        prompts = chain.from_iterable(self.trainer.train_dataloader)
        given, uids = prepare_generator_input(
            list(islice(prompts, config.trainer.train_batch_size)),
            config.generator.n_samples_per_prompt,
            get_sampling_params_for_backend("vllm", config.generator.sampling_params),
            config.environment.env_class,
            "train",
            1,
        )
        return await self.trainer.generate(given), uids

    def rows_of(self, output: GeneratorOutput, uids: list[str]) -> TrainingInputBatch:
        """SkyRL's batch of rollouts, before any logprobs."""
        return self.trainer.convert_to_training_input(
            *self.trainer.postprocess_generator_output(output, uids)
        )

    def rollouts(self) -> TrainingInputBatch:
        """A step's rows, drawn with the trainer's weights, `scored`."""
        asyncio.run(self.trainer.dispatch.save_weights_for_sampler())
        return self.scored(self.rows_of(*asyncio.run(self.draw())))

    def scored(self, rows: TrainingInputBatch) -> TrainingInputBatch:
        """With logprobs, as SkyRL's trainer adds them, and advantages of 1 and -1 in turn, whatever
        the rewards were: every update moves the policy."""
        rows = self.trainer.fwd_logprobs_values_reward(rows)
        signs = torch.tensor([1.0, -1.0]).repeat(len(rows) // 2)[:, None]
        rows["advantages"] = signs * rows["response_mask"]
        return rows

    def update(self, rows: TrainingInputBatch) -> dict[str, float]:
        """SkyRL's whole update with the rows, which stay as they are; its metrics."""
        return self.trainer.train_critic_and_policy(copied(rows))

    def sent(self) -> list[Any]:
        """The mini-batches that reached the mock, losses included."""
        return self.calls.requests("forward_backward")


def copied(rows: TrainingInputBatch) -> TrainingInputBatch:
    """Rows that SkyRL may change."""
    made = TrainingInputBatch({name: value for name, value in rows.items() if value is not None})
    made.metadata = dict(rows.metadata)
    return made


def tokens_of(rows: TrainingInputBatch, name: str) -> list[list[Any]]:
    """A field [B, A] at the response's tokens, a list a row."""
    mask = rows["response_mask"].bool()
    return [row[kept].tolist() for row, kept in zip(rows[name], mask, strict=True)]


def rows_of_requests(requests: list[Any], name: str) -> list[list[Any]]:
    """A per-token field of the requests' batches, a list a row, over all of them."""
    found = [getattr(request.batch, name) for request in requests]
    return [row for each in found for row in Ragged.of(each).to_rows()]


def by_hand(prompts: list[list[int]], responses: list[list[int]]) -> GeneratorOutput:
    """Rollouts of one sample a prompt, as a generator returns them; every second is rewarded."""
    drawn = torch.Generator().manual_seed(0)
    return {
        "prompt_token_ids": prompts,
        "response_ids": responses,
        "rewards": [float(row % 2) for row in range(len(prompts))],
        "loss_masks": [[1] * len(each) for each in responses],
        "stop_reasons": ["stop"] * len(prompts),
        "rollout_metrics": None,
        "rollout_logprobs": [
            (-torch.rand(len(each), generator=drawn)).tolist() for each in responses
        ],
    }


@contextmanager
def training(
    inputs: Mapping[str, Path], folder: Path, *more: str, data: str = "gsm8k", **options: Any
) -> Iterator[Training]:
    """By the tests' arguments and further `key=value` overrides. options: of the mock."""
    config = parse([*overrides(dict(inputs), "mock", folder, data=data), *more])
    calls = CallLog()
    settings = {"vocab_size": VOCABULARY, "initial_scale": 1.0, "eos_token_ids": _ENDS, **options}
    backend = create(call_log=calls.records, **settings)
    with connect(backend, checkpoint_dir=folder / "server") as session:
        yield Training(session, backend, calls, config)


_ENDS = (WORDS.index(END),)
