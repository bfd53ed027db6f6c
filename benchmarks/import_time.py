"""What `import remote_rl` costs over `import numpy`, and what an installation brings.

    python benchmarks/import_time.py               import times, here
    python benchmarks/import_time.py --install     and packages and MB, in an empty environment

Each time is the median over fresh interpreters, of the import alone; the three kinds take turns, so
that a busy moment of the machine falls on all of them. The target is 100 ms over numpy.
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
    "remote_rl": "import remote_rl",
    "remote_rl and connect": "import remote_rl; remote_rl.connect",
}


def import_ms(statement: str) -> float:
    """One import in a fresh interpreter, measured inside it."""
    script = (
        f"import time; began = time.perf_counter(); {statement}; "
        "print((time.perf_counter() - began) * 1e3)"
    )
    # from another folder, so that what is installed is imported, and not the source tree
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        cwd=tempfile.gettempdir(),
    )
    return float(done.stdout)


def measure(runs: int) -> None:
    """Prints the median import times and the differences to numpy's."""
    times: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    for _ in range(runs):
        for name, statement in STATEMENTS.items():
            times[name].append(import_ms(statement))
    median = {name: statistics.median(several) for name, several in times.items()}
    for name, several in times.items():
        over = "" if name == "numpy" else f"  {median[name] - median['numpy']:+6.1f} over numpy"
        print(f"{name:<22} {median[name]:6.1f} ms  (fastest {min(several):.1f}){over}")
    print(f"target: at most {TARGET_MS:.0f} ms over numpy; median of {runs} fresh interpreters")


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
