"""A user's own entry point, as `trainer.override_entrypoint=skyrl_entry`: an environment of two
turns, datasets that start no further interpreters, and metrics in a file.

Imports SkyRL, skyrl_gym and the shim.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import skyrl_gym
from skyrl.train.dataset import PromptDataset
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.gsm8k.utils import compute_score

from shims.skyrl.entrypoint import RemoteExperiment, parse

#: file that every logged row is appended to, as JSON
METRICS = "SKYRL_TEST_METRICS"


class LookingEnv(BaseTextEnv):
    """First turn: the answer is looked at and a hint comes back; second turn: it is scored, by
    gsm8k's rule and by how often the wanted number is said, so that samples rarely score alike."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__()
        assert extras is not None
        self._wanted = extras["reward_spec"]["ground_truth"]
        self.max_turns = 2

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        done = self.turns == 2
        seen = [] if done else [{"role": "user", "content": f"seen {self._wanted}"}]
        reward = 0.0
        if done:
            said = action.split()
            reward = said.count(self._wanted) / max(len(said), 1)
            reward = (reward + compute_score(action, self._wanted)) / 2
        return BaseTextEnvStepOutput(observations=seen, reward=reward, done=done, metadata={})


class FileTracker:
    """SkyRL's tracker, into a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._row: dict[str, Any] = {}

    def log(self, data: dict[str, Any], step: int, commit: bool = False) -> None:
        self._row |= {
            name: value for name, value in data.items() if isinstance(value, (int, float))
        }
        if commit:
            with self._path.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"step": step, "data": self._row}) + "\n")
            self._row = {}

    def log_exception(self, error: BaseException, step: int) -> None:
        pass

    def finish(self) -> None:
        pass


class Experiment(RemoteExperiment):
    """As the shim's, with the tests' datasets and tracker."""

    def get_train_dataset(self) -> PromptDataset:
        return self._dataset(self.cfg.data.train_data)

    def get_eval_dataset(self) -> PromptDataset | None:
        return self._dataset(self.cfg.data.val_data) if self.cfg.trainer.eval_interval > 0 else None

    def _dataset(self, files: list[str]) -> PromptDataset:
        return PromptDataset(
            files, self.tokenizer, self.cfg.trainer.max_prompt_length, num_workers=0
        )

    def get_tracker(self) -> Any:
        return FileTracker(Path(os.environ[METRICS]))


def main() -> None:
    skyrl_gym.register(id="looking", entry_point="skyrl_entry:LookingEnv")
    Experiment(parse(sys.argv[1:])).run()
