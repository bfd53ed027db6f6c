"""The shim is loaded by a call, by VERL_USE_EXTERNAL_MODULES or by an entry point, here and in the
workers of a Ray cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: prints the classes that verl's own lookups find
_SHOW = """
def show():
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.workers.rollout.replica import get_rollout_replica_class
    return [
        get_trainer_cls("remote_rl").__name__,
        get_trainer_cls("remote_rl_separate_async").__name__,
        get_rollout_replica_class("remote_rl").__name__,
    ]
"""
_FOUND = ["RemoteTrainer", "RemoteAsyncTrainer", "RemoteReplica"]

#: the driver calls register(); then the same lookups in worker processes of its own Ray cluster:
#: one as it comes, one where only the entry point is left, one where nothing is
_IN_RAY = (
    _SHOW
    + """
import sys
import shims.verl
shims.verl.register()
shims.verl.register()
print(*show())

import os, ray
ray.init(address="local", num_cpus=3, include_dashboard=False, _temp_dir=sys.argv[1])

def look():
    import os
    import verl
    try:
        return os.getpid(), show()
    except ValueError as error:
        return os.getpid(), [str(error).split(".")[0].replace(" ", "-")]

entry_point = {
    "VERL_USE_EXTERNAL_MODULES": "",
    "VERL_USE_EXTERNAL_PLUGINS": "remote_rl_probe",
    "PYTHONPATH": sys.argv[2],
}
nothing = {"VERL_USE_EXTERNAL_MODULES": ""}
workers = [
    ray.remote(look).options(runtime_env={"env_vars": variables}).remote()
    for variables in ({}, entry_point, nothing)
]
for process, found in ray.get(workers):
    assert process != os.getpid()
    print(*found)
"""
)


def run_python(
    code: str, *arguments: str, path: tuple[Path, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """`code` in a fresh process, where verl is imported for the first time."""
    variables = {
        **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "VERL_USE_EXTERNAL_MODULES": "",
        "VERL_USE_EXTERNAL_PLUGINS": "none",
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
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


def test_by_a_call_and_by_entry_point_also_in_workers_of_ray(
    entry_point: Path, ray_folder: Path
) -> None:
    done = run_python(_IN_RAY, str(ray_folder), str(entry_point))
    assert [line.split() for line in done.stdout.splitlines()] == [
        _FOUND,
        _FOUND,
        _FOUND,
        ["Unknown-trainer-'remote_rl'"],  # else the lines above would prove nothing
    ], done.stderr


def test_by_external_modules_also_where_the_user_imports_the_shim_first() -> None:
    code = "import shims.verl\nimport verl\n" + _SHOW + "print(*show())"
    done = run_python(code, VERL_USE_EXTERNAL_MODULES="json,shims.verl")  # it may name others
    assert done.stdout.split() == _FOUND, done.stderr


@pytest.mark.parametrize("by", ["entry point", "external modules"])
def test_a_failure_is_the_first_line_of_stderr(entry_point: Path, by: str) -> None:
    """verl itself would log that of an entry point at DEBUG."""
    code = "import sys; sys.modules['transfer_queue'] = None; import verl; print('imported')"
    if by == "entry point":
        done = run_python(code, path=(entry_point,), VERL_USE_EXTERNAL_PLUGINS="remote_rl_probe")
        assert done.stdout.split() == ["imported"]
    else:
        done = run_python(code, VERL_USE_EXTERNAL_MODULES="shims.verl")
        assert done.returncode != 0
    first = done.stderr.splitlines()[0]
    assert first.startswith("the verl shim of remote_rl could not register itself: ")
    assert "needs transfer_queue" in first
    assert first.endswith('pip install "remote-rl[verl]"')


@pytest.mark.parametrize("folder", [False, True])
def test_without_verl_the_import_says_what_to_install(tmp_path: Path, folder: bool) -> None:
    # -I -S: neither the current folder nor verl's environment is on the path; the installed shim
    # may lie beside verl, so it is taken from a place of its own
    (tmp_path / "shims").symlink_to(sys.modules["shims"].__path__[0])
    if folder:
        (tmp_path / "verl").mkdir()  # a folder of that name is not verl
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import shims.verl"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stderr.splitlines()[-1] == (
        "ImportError: shims.verl needs verl, which is not installed here; "
        'pip install "remote-rl[verl]"'
    )


def test_importing_the_package_imports_no_framework() -> None:
    done = run_python(
        "import shims.verl, sys; print(sorted({'verl', 'torch', 'ray'} & set(sys.modules)))"
    )
    assert done.stdout.strip() == "[]", done.stderr
