"""What the distribution promises: light, one-way imports, exact exports, one wheel."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import remote_rl

SOURCE = Path(remote_rl.__file__).parent.parent
HEAVY = ("torch", "ray", "vllm", "deepspeed", "verl", "skyrl", "transformers", "jax", "tensorflow")


def modules_of(package: str) -> list[Path]:
    found = sorted((SOURCE / package).rglob("*.py"))
    assert found, f"no modules of {package} in {SOURCE}"
    return found


def imported_names(path: Path, *, at_import_time: bool) -> set[str]:
    """Top-level packages that a module imports, absolute ones only (relative ones stay inside)."""
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        deferred = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        typing_only = (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
        )
        if typing_only or (at_import_time and deferred):
            skipped.update(ast.walk(node))
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").split(".")[0])
    return names


def test_tests_run_against_the_installed_wheel() -> None:
    files = importlib.metadata.files("remote-rl")
    assert files is not None
    assert "site-packages" in remote_rl.__file__, "run the tests through nox"
    names = {str(file) for file in files}
    assert {"remote_rl/py.typed", "backends/mock/__init__.py", "shims/__init__.py"} <= names


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("remote_rl", {"backends", "shims"}),
        ("backends", {"shims"}),
        ("shims", {"backends"}),
    ],
)
def test_imports_point_one_way(package: str, forbidden: set[str]) -> None:
    for path in modules_of(package):
        crossing = imported_names(path, at_import_time=False) & forbidden
        assert not crossing, f"{path.relative_to(SOURCE)} imports {crossing}"


@pytest.mark.parametrize("package", ["remote_rl", "backends/mock"])
def test_no_module_imports_a_heavy_package_when_it_is_imported(package: str) -> None:
    for path in modules_of(package):
        heavy = imported_names(path, at_import_time=True) & set(HEAVY)
        assert not heavy, f"{path.relative_to(SOURCE)} imports {heavy} at import time"


STATIONS = {
    # station: what of remote_rl it may import (relative imports, by first name)
    "types": {"errors"},
    "losses": {"errors", "types"},
    "wire": {"errors", "types", "losses", "messages", "ops", "protocol", "run_info", "requests"},
    "dispatcher": {
        *("errors", "types", "losses", "messages", "ops", "protocol", "run_info", "requests"),
        "__about__",
    },
    "client": {
        *("errors", "types", "losses", "messages", "ops", "protocol", "run_info", "requests"),
        *("byte_tokenizer", "progress_line", "registry", "transports", "dispatcher"),
    },
    "transports": {"errors", "messages", "requests", "wire", "dispatcher"},
    "server": {
        *("errors", "messages", "requests", "transports", "wire", "dispatcher", "registry"),
        "progress_line",
    },
    "commands": {"errors", "run_info", "messages", "transports", "server", "__about__"},
}


@pytest.mark.parametrize("station", sorted(STATIONS))
def test_a_station_imports_only_what_lies_below_it(station: str) -> None:
    for path in modules_of(f"remote_rl/{station}"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or node.level < 2:
                continue
            names = (
                {alias.name for alias in node.names}
                if node.module is None
                else {node.module.split(".")[0]}
            )
            assert names <= STATIONS[station], f"{path.relative_to(SOURCE)} imports {names}"


def test_importing_the_package_loads_nothing_heavy() -> None:
    script = (
        "import sys, remote_rl, backends.mock\n"
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "slow = [name for name in ('aiohttp', 'matplotlib') if name in sys.modules]\n"
        "print(loaded + slow)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"


def test_exported_names_are_exactly_all() -> None:
    assert sorted(remote_rl.__all__) == list(remote_rl.__all__)
    assert dir(remote_rl) == remote_rl.__all__
    assert all(hasattr(remote_rl, name) for name in remote_rl.__all__)
    submodules = {path.stem for path in (SOURCE / "remote_rl").iterdir()}
    public = {
        name for name in vars(remote_rl) if not name.startswith("_") and name not in submodules
    }
    helpers = {"logging", "Any", "TYPE_CHECKING"}
    assert public - helpers == set(remote_rl.__all__) - {"errors", "losses", "__version__"}


def test_public_classes_show_their_public_name() -> None:
    for name in remote_rl.__all__:
        value = getattr(remote_rl, name)
        if isinstance(value, type):
            assert value.__module__ == "remote_rl", name


def test_modules_stay_small_enough_to_read() -> None:
    for package in ("remote_rl", "backends", "shims"):
        for path in modules_of(package):
            lines = len(path.read_text().splitlines())
            assert lines <= 330, f"{path.relative_to(SOURCE)} has {lines} lines; split it"


def test_every_module_says_what_it_is() -> None:
    for package in ("remote_rl", "backends", "shims"):
        for path in modules_of(package):
            docstring = ast.get_docstring(ast.parse(path.read_text()))
            assert docstring, f"{path.relative_to(SOURCE)} has no docstring"


def test_few_packages_are_required() -> None:
    """At most 16 packages in an empty environment, this one included."""
    needed: set[str] = set()
    waiting = ["remote-rl"]
    while waiting:
        name = waiting.pop()
        if name in needed:
            continue
        needed.add(name)
        for requirement in importlib.metadata.requires(name) or []:
            specification, _, marker = requirement.partition(";")
            if "extra" in marker or not _applies(marker):
                continue
            waiting.append(_name(specification))
    assert len(needed) <= 16, sorted(needed)
    assert not needed & set(HEAVY)


def _name(specification: str) -> str:
    for index, character in enumerate(specification):
        if not (character.isalnum() or character in "._-"):
            specification = specification[:index]
            break
    return specification.strip().lower().replace("_", "-")


def _applies(marker: str) -> bool:
    """Markers on Python's version only, as the few dependencies have them."""
    marker = marker.strip()
    if not marker.startswith("python_version"):
        return True
    operator, version = marker.removeprefix("python_version").strip().split(" ", 1)
    wanted = tuple(int(part) for part in version.strip("\"' ").split("."))
    current = sys.version_info[: len(wanted)]
    return {
        "<": current < wanted,
        ">=": current >= wanted,
        "<=": current <= wanted,
        ">": current > wanted,
        "==": current == wanted,
    }[operator]
