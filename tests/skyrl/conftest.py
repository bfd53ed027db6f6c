"""Tests of the SkyRL shim need SkyRL's environment; without skyrl installed none is collected."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import warnings
from pathlib import Path

# servers for trainings, which the other shim's tests start too
sys.path.append(str(Path(__file__).parents[1] / "verl"))

try:
    # not find_spec: this folder's own name could pass for a namespace package
    importlib.metadata.version("skyrl")
except importlib.metadata.PackageNotFoundError:
    collect_ignore_glob = ["test_skyrl_*.py"]
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SkyRL and what it imports warn freely as they load
        importlib.import_module("skyrl.train.trainer")
