"""Trainings of the end-to-end tests, started as users start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from skyrl_entry import METRICS
from skyrl_workload import overrides

Row = dict[str, Any]
#: how often a training's metrics are looked at
POLL_SECONDS = 0.2
#: after which a training has hung
LIMIT_SECONDS = 600


class Trainings:
    """Runs SkyRL's entry point, several times with the same folders.

    inputs: what `skyrl_workload.build_inputs` made. folder: of checkpoints, exports and metrics.
    """

    def __init__(self, inputs: dict[str, Path], folder: Path) -> None:
        self._inputs, self.folder = inputs, folder

    def __call__(
        self,
        target: str,
        *more: str,
        data: str = "gsm8k",
        entry: str = "skyrl_entry",
        after_a_step: Callable[[], None] | None = None,
    ) -> tuple[subprocess.CompletedProcess[str], list[Row]]:
        """One training against a target, with further `key=value` overrides: the process, and one
        row of metrics a logged step.

        entry: the module of `trainer.override_entrypoint`. after_a_step: called once the first
        step was logged.
        """
        metrics, log = self.folder / "metrics.jsonl", self.folder / "training.log"
        metrics.unlink(missing_ok=True)
        command = [sys.executable, "-m", "skyrl.train.entrypoints.main_base"]
        command += [f"trainer.override_entrypoint={entry}"]
        command += [*overrides(self._inputs, target, self.folder, data=data), *more]
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent),  # of the tests' own entry module
            METRICS: str(metrics),
            "HF_HUB_OFFLINE": "1",
        }
        with log.open("w") as out:
            process = subprocess.Popen(
                command, env=environment, cwd=self.folder, stdout=out, stderr=subprocess.STDOUT
            )
            try:
                self._follow(process, metrics, after_a_step)
            finally:
                process.kill()
                process.wait()
        done = subprocess.CompletedProcess(command, process.returncode, log.read_text())
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return done, [json.loads(line) for line in lines]

    def _follow(
        self,
        process: subprocess.Popen[bytes],
        metrics: Path,
        after_a_step: Callable[[], None] | None,
    ) -> None:
        while after_a_step is not None and process.poll() is None:
            if metrics.exists() and metrics.stat().st_size:
                after_a_step()
                break
            time.sleep(POLL_SECONDS)
        process.wait(timeout=LIMIT_SECONDS)
