"""What the examples show of a run: a progress bar, a line a step, a curve at the end."""

from __future__ import annotations

from pathlib import Path

from tqdm import tqdm

from remote_rl.commands.curve import curve


class Report:
    """Keeps every step's numbers; the reward is printed with all its digits."""

    def __init__(self, steps: int) -> None:
        self.bar = tqdm(total=steps, unit="step")
        self.history: list[dict[str, float]] = []

    def step(self, **numbers: float) -> None:
        """One line, and the bar one step further."""
        self.history.append(numbers)
        line = "  ".join(f"{name} {_shown(name, value)}" for name, value in numbers.items())
        self.bar.write(line)
        self.bar.update()

    def curve(self, name: str, path: Path) -> None:
        """Draws one of the numbers over the steps, to a PNG and in the terminal."""
        self.bar.close()
        values = [numbers[name] for numbers in self.history]
        _draw_file(values, name, path)
        print(curve(values, f"{name} over steps"))
        last = values[-5:]
        print(f"{name}: {values[0]:.3f} in the first step, {sum(last) / len(last):.3f} in the last")
        print(f"curve: {path}")


def _shown(name: str, value: float) -> str:
    if isinstance(value, int):
        return f"{value:3d}"
    if name == "reward":
        return f"{value!r:<12}"
    return f"{value:.3f}" if name == "seconds" else f"{value:<12.6g}"


def _draw_file(values: list[float], name: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(values)
    axes.set(xlabel="step", ylabel=name, ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
