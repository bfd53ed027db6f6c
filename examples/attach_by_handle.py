"""One process drives a run on a server, a second one joins it with a handle.

    driver:  connects to the server, trains, saves its handle to a file
    member:  connect("handle.json"); samples from the weights that the driver has synced

The example starts all three; by hand they are three terminals, or three machines.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from remote_rl import AdamW, Batch, SamplingParams, connect, losses


def serve() -> tuple[subprocess.Popen[str], str]:
    """`remote-rl serve mock` in a process of its own, and its address."""
    command = [str(Path(sys.executable).with_name("remote-rl")), "serve", "mock", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:  # it prints how to connect
        found = re.search(r"https?://[^\"'\s)]+", line)
        if found is not None:
            return server, found.group()
    raise SystemExit("the server ended before it said its address")


def drive(url: str, handle: Path) -> None:
    """Ten steps towards the answer 7, then the member's turn."""
    with connect(url, start="base") as rl:
        print(f"driver: {rl.role} of the run")
        tokenizer = rl.tokenizer().result()
        batch = Batch(
            prompts=[tokenizer.encode("3+4=")],
            prompt_index=[0],
            responses=[[*tokenizer.encode("7"), tokenizer.eos_token_id]],
            temperature=1.0,
        )
        for _ in range(10):
            rl.training.forward_backward(batch, losses.CrossEntropy())
            rl.training.optim_step(AdamW(lr=0.05))
        receipt = rl.weights.sync(label="ten steps").result()
        print(f"driver: synced version {receipt.version}")
        rl.handle().save(handle)  # address, run and epoch; no secret
        subprocess.run([sys.executable, __file__, str(handle)], check=True)


def join(handle: Path) -> None:
    """What the second process does."""
    with connect(handle) as rl:
        tokenizer = rl.tokenizer().result()
        greedy = SamplingParams(max_tokens=4, temperature=0.0)
        (group,) = rl.sampling.generate([tokenizer.encode("3+4=")], greedy).result()
        said = tokenizer.decode(group[0].tokens, skip_special_tokens=True)
        print(f"member: {rl.role}, says {said!r} at version {group[0].last_version},", end=" ")
        print(f"label {group[0].label!r}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        join(Path(sys.argv[1]))
    else:
        server, url = serve()
        with server, tempfile.TemporaryDirectory() as folder:
            try:
                drive(url, Path(folder) / "handle.json")
            finally:
                server.terminate()
