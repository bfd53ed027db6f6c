"""Everything that is checked, as nox sessions; plain `nox` runs the light ones on this Python.

nox                 core, torch, lint, types, docs
nox -s core-3.13    the core tests on Python 3.13
nox -s verl         builds verl's environment (Python 3.11) and runs its tests
nox -s nightly      what takes longer
"""

from __future__ import annotations

import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["core", "torch", "lint", "types", "docs"]

CURRENT = f"{sys.version_info.major}.{sys.version_info.minor}"
TEST_TOOLS = ("pytest>=8", "hypothesis>=6.100")
TORCH = "torch==2.13.0" if sys.version_info[:2] == (3, 11) else "torch>=2.4"
VERL = (
    "torch==2.13.0",
    "verl==0.9.1",
    "TransferQueue>=0.1.10",
    "msgspec",
    "pyzmq",
    "fastapi",
    "uvicorn",
    "cachetools",
    "nvtx",
)


def build_wheel(session: nox.Session) -> Path:
    """The wheel that users would install; tests never import the source tree."""
    out = Path(session.create_tmp()).resolve() / "wheel"
    for old in out.glob("*.whl"):
        old.unlink()
    session.run("python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), ".", silent=True)
    (wheel,) = out.glob("*.whl")
    return wheel


def install_wheel(session: nox.Session, extra: str = "", python: str = "python") -> None:
    """Installs the wheel anew, also where the environment is an old one."""
    wheel = build_wheel(session)
    suffix = f"[{extra}]" if extra else ""
    pip = (python, "-m", "pip", "install", "-q")
    session.run(*pip, f"remote-rl{suffix} @ {wheel.as_uri()}", external=True)
    session.run(
        *pip, "--force-reinstall", "--no-deps", f"remote-rl @ {wheel.as_uri()}", external=True
    )


def run_tests(session: nox.Session, *paths: str) -> None:
    """pytest on these folders, from a folder where the source tree can't be imported."""
    root = Path.cwd()
    with session.chdir(session.create_tmp()):
        session.run(
            "python",
            "-m",
            "pytest",
            "-c",
            str(root / "pyproject.toml"),
            f"--rootdir={root}",
            "-p",
            "no:cacheprovider",
            *(str(root / path) for path in paths),
            *session.posargs,
        )


@nox.session(python=CURRENT)
def core(session: nox.Session) -> None:
    """The SDK, the mock and HTTP, without torch: numpy and a light client only."""
    session.install(*TEST_TOOLS, "safetensors")
    install_wheel(session, "demo")
    run_tests(
        session,
        "tests/contract",
        "tests/losses",
        "tests/wire",
        "tests/dispatcher",
        "tests/mock",
        "tests/client",
        "tests/http",
        "tests/package",
        "tests/examples",
    )


@nox.session(name="core-3.13", python="3.13")
def core_313(session: nox.Session) -> None:
    """The core tests on Python 3.13."""
    core(session)


@nox.session(python=CURRENT)
def torch(session: nox.Session) -> None:
    """What is compared with torch: losses against autograd, tensors in and out."""
    session.install(TORCH, *TEST_TOOLS)
    install_wheel(session)
    run_tests(session, "tests/torch")


@nox.session(python=CURRENT)
def lint(session: nox.Session) -> None:
    """Style, and code that is likely wrong."""
    session.install("ruff==0.17.*")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(python=CURRENT)
def types(session: nox.Session) -> None:
    """mypy strict on the packages; mypy and pyright strict on the typed-API file."""
    session.install("mypy==2.*", "pyright==1.1.*", "pytest>=8", "hypothesis>=6.100")
    install_wheel(session)
    session.run("mypy")
    session.run("mypy", "--strict", "tests/typing/typed_api.py")
    session.run("pyright", "--warnings")


@nox.session(python=CURRENT)
def docs(session: nox.Session) -> None:
    """Runs every code block of README, CONTRIBUTING and docs, and README's first command."""
    session.install(TORCH, *TEST_TOOLS)
    install_wheel(session)
    run_tests(session, "tests/docs")


@nox.session(python="3.11")
def verl(session: nox.Session) -> None:
    """Stock verl from PyPI, its backend served from an environment of its own."""
    session.install(*VERL, *TEST_TOOLS)
    install_wheel(session)
    server = Path(session.create_tmp()).resolve() / "server"
    if not (server / "bin" / "python").exists():
        session.run("python", "-m", "venv", str(server))
    install_wheel(session, python=str(server / "bin" / "python"))
    session.env["REMOTE_RL_SERVER_PYTHON"] = str(server / "bin" / "python")
    run_tests(session, "tests/verl")


@nox.session(python=CURRENT)
def benchmarks(session: nox.Session) -> None:
    """Measures; never part of the tests."""
    install_wheel(session)
    session.run("python", "benchmarks/import_time.py")


@nox.session(python=CURRENT)
def nightly(session: nox.Session) -> None:
    """What is too long for every commit: every property on thousands of other examples."""
    session.install(*TEST_TOOLS)
    install_wheel(session)
    session.env["REMOTE_RL_NIGHTLY"] = "1"
    run_tests(session, "tests/contract", "tests/losses", "tests/wire", "tests/dispatcher")
