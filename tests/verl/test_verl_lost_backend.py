"""Stock verl's trainer, started as users start it, where its server dies in mid-run, and where
another driver wants the same server: a plain one, and with REMOTE_RL_NIGHTLY=1 a second training
too, which takes half a minute more."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from verl_runs import POLL_SECONDS, MockProcess, Trainings, connect_and_read
from verl_workload import VOCABULARY

from remote_rl import connect, errors
from shims.common.checkpoints import MANIFEST

#: that an end must come in, on the slowest machine; a client gives up a server that has ended
#: within 10 s
END_SECONDS = 1200.0
LEASE_SECONDS = 60.0
NIGHTLY = os.environ.get("REMOTE_RL_NIGHTLY") == "1"


def test_a_second_driver_is_refused_and_a_training_outlives_its_server(
    train: Trainings, inputs: dict[str, Path], tmp_path: Path
) -> None:
    second = Trainings(inputs, tmp_path / "second")
    # a step takes a second or two, most of it for rollouts
    server = MockProcess(
        tmp_path / "server",
        lease=LEASE_SECONDS,
        vocab_size=len(VOCABULARY),
        latency="{token = 0.2}",
    )
    refused_after = []

    def disturb(_: int) -> None:
        before = len(train.rows())
        check_second_connect(server.url)
        if NIGHTLY:
            check_second_training(second, server.url)
        refused_after.append(before)
        wait_for_rows(train, len(train.rows()) + 2)  # it goes on
        server.kill()

    try:
        done, rows = train(server.url, steps=1000, after_a_step=disturb, timeout=END_SECONDS)
        assert refused_after
        # verl says where to go on, and so does its own file
        assert done.returncode != 0
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        assert len(rows) >= refused_after[0] + 2
        folder = tmp_path / "checkpoints"
        saved = int((folder / "latest_checkpointed_iteration.txt").read_text())
        check_error(done.stdout, server, folder / f"global_step_{saved}")

        server.start()
        done, resumed = train(server.url, steps=saved + 2, timeout=END_SECONDS)
        assert done.returncode == 0, done.stdout[-8000:]
        assert [row["step"] for row in resumed] == [saved + 1, saved + 2]
        for row in resumed:
            assert row["data"]["training/rollout_probs_diff_max"] <= 1e-6
            assert row["data"]["actor/kl_loss"] > 0  # not the base's weights
        versions = connect_and_read(server.url)
        assert versions.label == saved + 2
        assert versions.trainer == versions.sampler
    finally:
        server.stop()
        second.close()


def check_second_training(second: Trainings, url: str) -> None:
    """Another training on the same server ends before it has changed anything."""
    done, rows = second(url, steps=5, timeout=END_SECONDS)
    assert done.returncode != 0
    assert rows == []
    assert f"another driver holds {url} and is alive" in done.stdout


def check_second_connect(url: str) -> None:
    """It is refused as soon as the first one's lease is renewed, not when it would have ended."""
    began = time.monotonic()
    with pytest.raises(errors.LeaseError, match="is alive"):
        connect(url, start="base")
    assert time.monotonic() - began < LEASE_SECONDS


def check_error(said: str, server: MockProcess, folder: Path) -> None:
    """The error that the training ends with names verl's last checkpoint, also as the server
    does."""
    said = " ".join(said.split())
    lost = re.search(r"RunLostError: the training has lost its run \((.*?)\); once a server", said)
    assert lost, said[-8000:]
    assert f"nothing listens at {server.url} any more" in lost.group(1)
    assert f"answers at {server.url}, start it again with trainer.resume_mode=auto" in said
    named = re.search(rf"it goes on from {folder}, which is '(\S+)' on the server", said)
    assert named
    assert (server.checkpoints / "checkpoints" / named.group(1)).is_dir()
    assert json.loads((folder / "actor" / MANIFEST).read_text())["checkpoint"] == named.group(1)


def wait_for_rows(training: Trainings, count: int) -> None:
    """Until the training has logged so many steps."""
    end = time.monotonic() + END_SECONDS
    while len(training.rows()) < count:
        assert time.monotonic() < end, "the first training stands still"
        time.sleep(POLL_SECONDS)
