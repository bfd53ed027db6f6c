"""What importing remote_rl costs over `import numpy`, and what an installation brings.

    python benchmarks/import_time.py               import times, here
    python benchmarks/import_time.py --install     and packages and MB, in an empty environment

Each time is the median over fresh interpreters, of the import alone; the three kinds take turns, so
that a busy moment of the machine falls on all of them. CPU time says what the machine's other work
hid. The target is 100 ms over numpy.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGET_MS = 100.0
STATEMENTS = {
    "numpy": "import numpy",
    "remote_rl": "from remote_rl import Batch, losses",  # a bare import brings nothing in
    "remote_rl and connect": "from remote_rl import Batch, losses, connect",
}


def import_ms(statement: str) -> tuple[float, float]:
    """Wall and CPU time of one import in a fresh interpreter, measured inside it."""
    script = (
        "import time; wall, cpu = time.perf_counter(), time.process_time(); "
        f"{statement}; "
        "print((time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3)"
    )
    # from another folder, so that what is installed is imported, and not the source tree
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        cwd=tempfile.gettempdir(),
    )
    wall, cpu = map(float, done.stdout.split())
    return wall, cpu


def measure(runs: int) -> None:
    """Prints the median import times and the differences to numpy's."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in STATEMENTS}
    for _ in range(runs):
        for name, statement in STATEMENTS.items():
            times[name].append(import_ms(statement))
    print(f"{'':<22} {'wall ms':>8} {'over numpy':>11} {'CPU ms':>8} {'over numpy':>11}")
    base: tuple[float, float] | None = None
    for name, several in times.items():
        walls, cpus = zip(*several, strict=True)
        wall, cpu = statistics.median(walls), statistics.median(cpus)
        base = base or (wall, cpu)
        print(f"{name:<22} {wall:8.1f} {wall - base[0]:11.1f} {cpu:8.1f} {cpu - base[1]:11.1f}")
    print(f"medians of {runs} fresh interpreters; the target is {TARGET_MS:.0f} ms over numpy")


def measure_install() -> None:
    """Installs into an empty environment and prints what came."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-compile", ROOT], check=True)
        script = (
            "import importlib.metadata as m\n"
            "for d in sorted(m.distributions(), key=lambda d: d.name.lower()):\n"
            "    size = sum(f.locate().stat().st_size for f in d.files or () "
            "if f.locate().is_file())\n"
            "    print(d.name, d.version, size)\n"
        )
        listed = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True)
    total = 0.0
    rows = [line.split() for line in listed.stdout.splitlines()]
    rows = [row for row in rows if row[0] not in ("pip", "setuptools")]
    for name, version, size in rows:
        total += int(size) / 1e6
        print(f"{name:<22} {version:<10} {int(size) / 1e6:6.1f} MB")
    print(f"{len(rows)} packages, {total:.1f} MB, remote-rl included")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--install", action="store_true", help="also list what is installed")
    options = parser.parse_args()
    measure(options.runs)
    if options.install:
        measure_install()
