"""The shim is loaded by a call, by VERL_USE_EXTERNAL_MODULES or by an entry point."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SHOW = """
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.workers.rollout.replica import get_rollout_replica_class
print(get_trainer_cls("remote_rl").__name__, get_rollout_replica_class("remote_rl").__name__)
"""


def run_python(
    code: str, *, path: tuple[Path, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """`code` in a fresh process, where verl is imported for the first time."""
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "VERL_USE_EXTERNAL_MODULES": "",
        "VERL_USE_EXTERNAL_PLUGINS": "none",
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False
    )


@pytest.fixture
def entry_point(tmp_path: Path) -> Path:
    """A folder that offers the entry point, as an installed package does."""
    metadata = tmp_path / "remote_rl_probe-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: remote-rl-probe\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        "[verl.plugins]\nremote_rl_probe = shims.verl.plugin\n"
    )
    return tmp_path


def test_by_a_call() -> None:
    done = run_python("import shims.verl; shims.verl.register(); shims.verl.register()" + _SHOW)
    assert done.stdout.split() == ["RemoteTrainer", "RemoteReplica"], done.stderr


def test_by_external_modules() -> None:
    done = run_python("import verl" + _SHOW, VERL_USE_EXTERNAL_MODULES="shims.verl.plugin")
    assert done.stdout.split() == ["RemoteTrainer", "RemoteReplica"], done.stderr


def test_by_entry_point(entry_point: Path) -> None:
    done = run_python(
        "import verl" + _SHOW, path=(entry_point,), VERL_USE_EXTERNAL_PLUGINS="remote_rl_probe"
    )
    assert done.stdout.split() == ["RemoteTrainer", "RemoteReplica"], done.stderr


def test_a_failing_plug_in_says_so_although_verl_is_silent(entry_point: Path) -> None:
    done = run_python(
        "import sys; sys.modules['transfer_queue'] = None; import verl; print('imported')",
        path=(entry_point,),
        VERL_USE_EXTERNAL_PLUGINS="remote_rl_probe",
    )
    assert done.stdout.split() == ["imported"]
    assert "the verl shim of remote_rl could not register itself" in done.stderr
    assert 'pip install "TransferQueue>=0.1.10"' in done.stderr


def test_importing_the_package_imports_no_framework() -> None:
    done = run_python(
        "import shims.verl, sys; print(sorted({'verl', 'torch', 'ray'} & set(sys.modules)))"
    )
    assert done.stdout.strip() == "[]", done.stderr
