"""Trains through the seam in a process of its own; prints one JSON line.

python run_seam.py FOLDER URL STEPS {v0,v1} [KEY=VALUE ...]: FOLDER holds what
`verl_workload.build_inputs` made. VERL_USE_EXTERNAL_MODULES names `verl_with_seam` and the shim.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import hydra
import ray
from omegaconf import OmegaConf
from verl.remote_backend.trainer import RemoteBackendTrainer, with_seam_keys
from verl_workload import VOCABULARY, overrides, written_inputs

PROMPTS = [[VOCABULARY.index(first), VOCABULARY.index(wanted)] for first, wanted in ("ab", "ca")]


def score(prompt: list[int], response: list[int]) -> float:
    """The share of the response that is the prompt's second letter."""
    return sum(token == prompt[1] for token in response) / len(response)


def main(folder: str, url: str, steps: str, trainer: str, *more: str) -> dict[str, Any]:
    """The metrics of each step."""
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer")
    OmegaConf.set_struct(config, False)
    given = overrides(written_inputs(Path(folder)), url, steps=int(steps))
    of_v1 = ("trainer.v1.", "transfer_queue.", "ray_kwargs.")
    keys = [each.lstrip("+") for each in given if not each.lstrip("+").startswith(of_v1)]
    config = with_seam_keys(OmegaConf.merge(config, OmegaConf.from_dotlist([*keys, *more])))
    with tempfile.TemporaryDirectory(prefix="rl", dir="/tmp") as sockets:
        ray.init(address="local", num_cpus=8, include_dashboard=False, _temp_dir=sockets)
        try:
            driver = RemoteBackendTrainer(config, v1=trainer == "v1")
            try:
                driver.init_workers()
                rows = driver.fit(PROMPTS, score, int(steps))
            finally:
                driver.destroy()
        finally:
            ray.shutdown()
    return {"rows": rows, "modules": sorted(name for name in sys.modules if "shims" in name)}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
