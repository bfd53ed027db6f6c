"""What large bodies took is kept for the next ones, and goes back once none come."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

#: 64 pieces at once, as of a large body, again and again; prints the faults of fresh pages in the
#: later rounds, and the resident pages before, afterwards and after the trimmer's turn
PIECES = """
import asyncio, resource
from remote_rl.server import memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1])

def take():
    return [b"1" * (256 << 10) for _ in range(64)]

async def main():
    trimmer = memory.Trimmer()
    before = resident()
    take()
    began = faults()
    for _ in range(10):
        take()
    taken, after = faults() - began, resident()
    memory.QUIET_SECONDS = 0.0
    trimmer.moved(memory.LARGE_BYTES)
    while resident() - before > 1000:
        await asyncio.sleep(0.001)
    print(taken, after - before, resident() - before)

asyncio.run(asyncio.wait_for(main(), 30))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="glibc's allocator"
)
def test_pieces_reuse_memory_until_a_quiet_moment() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PIECES], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    faults, kept, left = map(int, ended.stdout.split())
    # 16 MiB are 4096 pages, each of which would fault in each of the ten rounds
    assert faults < 4096
    assert kept > 3000
    assert left <= 1000
