"""The whole conformance suite on real engines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from arctic_models import write_model
from arctic_sessions import SETUPS, TRANSPORTS, Setup, opened
from sampler_tokenizers import byte_level

from remote_rl.testing.conformance.runner import Target, run

#: every set-up and every transport; all pairs at night
PAIRS = (
    tuple((setup, transport) for setup in SETUPS for transport in TRANSPORTS)
    if os.environ.get("REMOTE_RL_NIGHTLY")
    else tuple(zip(SETUPS, ("http", "inprocess", "ray", "inprocess", "http")))
)
TOLERANCE = 1e-4


@pytest.mark.parametrize(("setup", "transport"), PAIRS, ids=str)
def test_the_suite_passes_whole(setup: Setup, transport: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", setup.architecture)
    byte_level().save_pretrained(model)
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    with opened(transport, setup.options(model), checkpoints) as session:
        reports = run(Target(session=session, tolerance=TOLERANCE, learning_rate=1e-2))
    failed = {each.name: each.reason for each in reports if each.verdict == "failed"}
    assert failed == {}
    skipped = [each.name for each in reports if each.verdict == "skipped"]
    assert all("undeclared" in each.reason for each in reports if each.name in skipped), skipped
    assert len(reports) - len(skipped) > 130
