"""Thousands of training operations under every fault at once end where a run without faults does,
bit for bit."""

from __future__ import annotations

from pathlib import Path

from faults_support import KINDS, everything, in_process, over_http, served, train

from remote_rl import Session

OPERATIONS = 10_000


def test_ten_thousand_training_operations_under_all_faults_change_no_bit(tmp_path: Path) -> None:
    """Every result, the weights, the optimizer, the version and the seeds' counters."""

    def program(rl: Session) -> list[object]:
        return train(rl, OPERATIONS)

    faults = everything(seed=7)
    with served(tmp_path) as url:
        faulty = over_http(tmp_path / "run", url, program, faults.wrap)
    assert min(faults.injected[kind] for kind in KINDS) >= 50, faults.injected
    assert len(faulty.bits) == OPERATIONS
    clean = in_process(tmp_path / "clean", program)
    assert faulty == clean
