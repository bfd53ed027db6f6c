"""What the distribution promises: light, one-way imports, exact exports, one wheel."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
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


@pytest.mark.parametrize(
    ("shim", "others"),
    [
        ("common", {"verl", "skyrl", "transfer_queue", "tensordict", "ray"}),
        ("skyrl", {"verl", "transfer_queue", "tensordict"}),
        ("verl", {"skyrl", "skyrl_gym"}),
    ],
)
def test_a_shim_imports_its_own_framework_alone(shim: str, others: set[str]) -> None:
    for path in modules_of("shims"):
        if path.is_relative_to(SOURCE / "shims" / shim):
            crossing = imported_names(path, at_import_time=False) & others
            assert not crossing, f"{path.relative_to(SOURCE)} imports {crossing}"


@pytest.mark.parametrize("package", ["remote_rl", "backends/mock"])
def test_no_module_imports_a_heavy_package_when_it_is_imported(package: str) -> None:
    for path in modules_of(package):
        heavy = imported_names(path, at_import_time=True) & set(HEAVY)
        assert not heavy, f"{path.relative_to(SOURCE)} imports {heavy} at import time"


CONTRACT = (
    *("errors", "types", "losses", "requests", "protocol", "run_info", "ops", "messages"),
    "submits",
)
#: every module and folder of remote_rl, and what of the others it may import, in this order
STATIONS: dict[str, set[str]] = {
    "__about__": set(),
    "errors": set(),
    "progress_line": set(),
    "types": {"errors"},
    "losses": {"errors", "types"},
    "requests": {"errors", "types", "losses"},
    "byte_tokenizer": {"errors", "types"},
    "protocol": {"errors", "types", "requests"},
    "run_info": {"types", "protocol"},
    "ops": {"types", "requests", "protocol", "run_info"},
    "messages": {"errors", "types", "requests", "run_info"},
    "submits": {"requests", "messages"},
    "registry": {"errors", "protocol"},
    "wire": set(CONTRACT),
    "dispatcher": {*CONTRACT, "__about__"},
    "transports": {"errors", "requests", "messages", "wire", "dispatcher"},
    "server": {"errors", "run_info", "messages", "wire", "dispatcher", "transports", "registry"}
    | {"progress_line"},
    "client": {*CONTRACT, "byte_tokenizer", "progress_line", "registry", "dispatcher"}
    | {"transports"},
    "testing": {*CONTRACT, "byte_tokenizer", "registry", "wire", "dispatcher", "transports"}
    | {"server", "client"},
    "commands": {"errors", "types", "losses", "run_info", "messages", "transports", "server"}
    | {"progress_line", "registry", "client", "testing"},
    "cli": {"__about__", "errors", "commands"},
    "__main__": {"cli"},
    "__init__": {
        *("__about__", "errors", "types", "losses", "byte_tokenizer", "protocol", "run_info"),
        *("messages", "client"),
    },
}


def stations_imported(path: Path) -> set[str]:
    """What of remote_rl outside its own station a module imports, anywhere in it."""
    depth = len(path.relative_to(SOURCE / "remote_rl").parts)
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level >= depth:
            top = [node.module] if node.module else [alias.name for alias in node.names]
            names.update(name.split(".")[0] for name in top)
    return names


@pytest.mark.parametrize("station", STATIONS)
def test_a_station_imports_only_what_lies_below_it(station: str) -> None:
    folder = SOURCE / "remote_rl" / station
    paths = modules_of(f"remote_rl/{station}") if folder.is_dir() else [folder.with_suffix(".py")]
    for path in paths:
        crossing = stations_imported(path) - STATIONS[station]
        assert not crossing, f"{path.relative_to(SOURCE)} imports {crossing}"
        named = imported_names(path, at_import_time=False)
        assert "remote_rl" not in named, f"{path.relative_to(SOURCE)}: write relative imports"


def test_every_module_has_its_station_and_the_stations_have_one_order() -> None:
    found = {path.relative_to(SOURCE / "remote_rl").parts[0] for path in modules_of("remote_rl")}
    assert {name.removesuffix(".py") for name in found} == set(STATIONS)
    below: set[str] = set()
    for station, allowed in STATIONS.items():
        assert allowed <= below, f"{station} may import {allowed - below}, which come after it"
        below.add(station)


def test_the_page_for_contributors_names_the_stations_in_that_order() -> None:
    page = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, _, table = page.partition("| station | what it holds |\n|---|---|\n")
    rows = table.partition("\n\n")[0].splitlines()
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert named == [name for name in STATIONS if not name.startswith("__")]


@pytest.mark.parametrize(
    ("imported", "forbidden"),
    [
        ("remote_rl, backends.mock", (*HEAVY, "aiohttp", "matplotlib")),
        ("remote_rl.testing.conformance, remote_rl.testing.faults", HEAVY),
        ("remote_rl.cli, remote_rl.server.serve, backends.mock.backend", HEAVY),
    ],
)
def test_a_client_that_pulls_in_gpu_packages__art_194(
    imported: str, forbidden: tuple[str, ...]
) -> None:
    script = (
        f"import sys, remote_rl, {imported}\n"
        "for name in remote_rl.__all__: getattr(remote_rl, name)\n"  # each is imported when used
        f"print([name for name in {forbidden!r} if name in sys.modules])"
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
    public = {name for name in vars(remote_rl) if name[0] not in "_@" and name not in submodules}
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


#: how the docstring of a module begins, by the longest folder or module that holds it
FIRST_WORDS = {
    "remote_rl": "Contract",
    "remote_rl/__init__": "Package",
    "remote_rl/__main__": "Command line",
    "remote_rl/cli": "Command line",
    "remote_rl/client": "Client",
    "remote_rl/commands": "Command line",
    "remote_rl/dispatcher": "Dispatcher",
    "remote_rl/losses": "Losses",
    "remote_rl/progress_line": "Terminal",
    "remote_rl/registry": "Registry",
    "remote_rl/server": "Server",
    "remote_rl/testing": "Testing",
    "remote_rl/transports": "Transport",
    "remote_rl/wire": "Wire",
    "backends": "Package",
    "backends/arctic": "Arctic backend",
    "backends/mock": "Mock backend",
    "shims": "Package",
    "shims/common": r"Shim \(loop side, above the client\)",
    "shims/skyrl": r"Shim \(loop side, above the client\)",
    "shims/verl": r"Shim \(loop side, above the client\)",
}


def test_every_module_says_what_it_is_and_what_it_imports() -> None:
    for package in ("remote_rl", "backends", "shims"):
        for path in modules_of(package):
            place = path.relative_to(SOURCE).with_suffix("").as_posix()
            holders = [name for name in FIRST_WORDS if f"{place}/".startswith(f"{name}/")]
            words = FIRST_WORDS[max(holders, key=len)]
            docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
            assert re.match(rf"{words}: \S", docstring), f"{place} does not begin {words!r}: ..."
            assert "import" in docstring.lower(), f"{place} does not say what it imports"


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
