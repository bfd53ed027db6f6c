"""examples/custom_loss_torch.py, as its users run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_loss_torch.py"


def test_dpo_prefers_the_right_answers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "15"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    margins = [float(text) for text in re.findall(r"margin (\S+)", done.stdout)]
    preferred = [float(text) for text in re.findall(r"preferred (\S+)", done.stdout)]
    paid = re.findall(r"custom/forwards (\S+)", done.stdout)
    assert margins[0] == 0.0  # the policy is its own reference before the first step
    assert margins[-1] > 1.0
    assert preferred[-1] == 1.0
    assert set(paid) == {"1.0000"}
