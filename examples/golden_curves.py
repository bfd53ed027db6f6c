"""Draws what golden_arithmetic.py wrote: every `seed_*.jsonl` of a folder, in one picture."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot  # after the choice of what draws

#: training rewards are of few prompts, so their mean over so many steps is drawn over them
WINDOW = 5


def draw(folder: Path, picture: Path | None = None) -> Path:
    """Training reward and held-out evaluations over the steps, a colour a seed; the picture."""
    figure, (rewards, evaluations) = pyplot.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    for number, path in enumerate(sorted(folder.glob("seed_*.jsonl"))):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        steps = [row for row in rows if "reward" in row]
        reward = np.array([row["reward"] for row in steps])
        colour, name = f"C{number}", path.stem.replace("_", " ")
        rewards.plot(reward, color=colour, alpha=0.25, linewidth=0.8)
        rewards.plot(_smoothed(reward), color=colour, label=name)
        for key, style in (("held_out_greedy", "o-"), ("held_out_sampled", "o:")):
            found = [row for row in rows if key in row]
            scores = [row[key] for row in found]
            evaluations.plot([row["step"] for row in found], scores, style, color=colour, ms=4)
    rewards.set(title="training: mean score of a step's samples", xlabel="step", ylim=(0, 1.02))
    evaluations.set(title="held-out problems: greedy —, sampled ···", xlabel="step")
    rewards.legend(loc="lower right")
    for axes in (rewards, evaluations):
        axes.grid(alpha=0.3)
    picture = folder / "golden_arithmetic.png" if picture is None else picture
    figure.savefig(picture, dpi=100, bbox_inches="tight")
    pyplot.close(figure)
    return picture


def _smoothed(values: Any) -> list[float]:
    """Each value's mean with those before it, at most WINDOW."""
    return [float(values[max(0, end - WINDOW) : end].mean()) for end in range(1, len(values) + 1)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print(draw(parser.parse_args().folder))
