"""A proxy that cuts, delays, swallows and replays bytes changes no bit either: below everything
that knows what a message is."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults_support import NIGHTLY, Ended, in_process, over_http, served, train
from lossy_proxy import LossyProxy, Requests, lossy

from remote_rl import Session

OPERATIONS = 3_000 if NIGHTLY else 300


def program(rl: Session) -> list[object]:
    return train(rl, OPERATIONS, at_once=100)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The run without faults."""
    return in_process(tmp_path_factory.mktemp("clean"), program)


@pytest.mark.parametrize(
    ("faults", "least"),
    [
        ({"most_bytes": 8_000}, {"cut": 10}),
        ({"most_bytes": None, "delay": 0.1}, {"delay": 20}),
        ({"most_bytes": 40_000, "black_hole": 0.3}, {"black_hole": 2, "cut": 2}),
        ({"most_bytes": None, "replay": 0.3}, {"replay": 40}),
        (
            {"most_bytes": 20_000, "delay": 0.05, "black_hole": 0.2, "replay": 0.1},
            {"cut": 3, "delay": 10, "black_hole": 1, "replay": 10},
        ),
    ],
    ids=["cuts", "delays", "black holes", "replays", "all of them"],
)
def test_a_bad_line_changes_no_bit(
    faults: dict[str, float], least: dict[str, int], clean: Ended, tmp_path: Path
) -> None:
    with served(tmp_path) as url, lossy(url, seed=3, **faults) as (bad_url, proxy):
        ended = over_http(tmp_path / "run", bad_url, program)
    assert {kind: proxy.done[kind] >= count for kind, count in least.items()} == dict.fromkeys(
        least, True
    ), proxy.done
    assert ended == clean


def test_the_proxy_finds_whole_requests_however_they_are_cut() -> None:
    first = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n\r\n\r\nz"
    second = b"GET /b HTTP/1.1\r\nHost: x\r\n\r\n"
    both = first + second
    for size in (1, 3, len(both)):
        requests = Requests()
        found = [
            whole
            for start in range(0, len(both), size)
            for whole in requests.add(both[start : start + size])
        ]
        assert found == [first, second]


def test_a_proxy_without_faults_only_relays(clean: Ended, tmp_path: Path) -> None:
    with served(tmp_path) as url, lossy(url, 0, None) as (relayed, proxy):
        assert isinstance(proxy, LossyProxy)
        assert over_http(tmp_path / "run", relayed, program) == clean
    assert not +proxy.done
