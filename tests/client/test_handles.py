"""Members: whoever attaches by a driver's handle, from this process or another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from client_double import Double
from client_server import Server
from client_support import ServerFactory, learn, logprobs, small_mock

from remote_rl import Batch, SamplingParams, connect
from remote_rl.errors import InvalidRequestError, LeaseError

PARAMS = SamplingParams(n=2, max_tokens=4, seed=5)


@pytest.fixture
def server(servers: ServerFactory, tmp_path: Path) -> Server:
    return servers(small_mock(), checkpoint_dir=tmp_path / "run")


def python(script: str, *arguments: str) -> str:
    """What a script prints in a process of its own."""
    ended = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


MEMBER = """
import json, sys
from remote_rl import SamplingParams, connect
with connect(sys.argv[1]) as rl:
    groups = rl.sampling.generate([[1]], SamplingParams(n=2, max_tokens=4, seed=5)).result()
    print(json.dumps([rl.role, [sample.tokens.tolist() for sample in groups[0]],
                      rl.weights.version().result().trainer]))
"""


@pytest.mark.parametrize("form", ["file", "json"])
def test_a_member_in_another_process(
    form: str, server: Server, batch: Batch, tmp_path: Path
) -> None:
    with connect(server.url) as driver:
        learn(driver, batch, steps=2)
        driver.weights.sync().result()
        path = tmp_path / "handle.json"
        driver.handle().save(path)
        given = str(path) if form == "file" else driver.handle().to_json()
        role, tokens, version = json.loads(python(MEMBER, given))
        mine = driver.sampling.generate([[1]], PARAMS).result()
        assert (role, version) == ("member", 2)
        assert tokens == [sample.tokens.tolist() for sample in mine[0]]
        learn(driver, batch)  # the member's coming and going changed nothing for the driver


FORKED = """
import os, sys
from remote_rl import connect
rl = connect(sys.argv[1])
child = os.fork()
if child == 0:
    with connect(rl.handle()) as member:
        os._exit(0 if member.role == "member" and member.info().result() else 3)
_, status = os.waitpid(child, 0)
rl.info().result()
rl.close()
print(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_attaches_by_the_handle(server: Server) -> None:
    assert python(FORKED, server.url).strip() == "0"


def test_all_forms_of_a_handle(server: Server, tmp_path: Path) -> None:
    with connect(server.url) as driver:
        handle = driver.handle()
        path = tmp_path / "handle.json"
        handle.save(path)
        for form in (handle, handle.to_dict(), handle.to_json(), path, str(path)):
            with connect(form) as member:
                assert member.role == "member"
                assert member.handle() == handle


def test_a_handle_holds_no_secret(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMOTE_RL_TOKEN", "the-secret-token")
    with connect(server.url, token="another-secret") as driver:
        text = driver.handle().to_json()
        assert set(json.loads(text)) == {"url", "instance_id", "epoch"}
        assert "secret" not in text
        assert "secret" not in repr(driver.handle())
        assert "secret" not in repr(driver)


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": "http://h"},
        {"url": "http://h", "instance_id": "x", "epoch": 0},
        {"url": "http://h", "instance_id": "x", "epoch": 1, "token": "s"},
        "{not json",
        "[1]",
        "/nowhere/handle.json",
        Path("/nowhere"),
    ],
)
def test_what_is_no_handle(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError):
        connect(wrong)


def test_a_run_in_this_process_has_no_handle() -> None:
    with (
        connect(small_mock()) as rl,
        pytest.raises(InvalidRequestError, match="start `remote-rl serve`"),
    ):
        rl.handle()


def test_what_is_the_drivers_alone(server: Server) -> None:
    with connect(server.url) as driver:
        handle = driver.handle()
        with pytest.raises(InvalidRequestError, match="start= is the driver's"):
            connect(handle, start="base")
        with pytest.raises(InvalidRequestError, match="takeover= is the driver's"):
            connect(handle, takeover=True)
        with pytest.raises(InvalidRequestError, match="the run's model is 'mock', not 'qwen'"):
            connect(handle, model="qwen")
        connect(handle, model="mock").close()


def test_options_of_the_wrong_place(server: Server) -> None:
    """Nothing is accepted and ignored: neither a server's option here nor the other way round."""
    given: dict[str, Any] = {"vocab_size": 5, "checkpoint_dir": "x", "stall_timeout": 5.0}
    for name, value in given.items():
        with pytest.raises(InvalidRequestError, match=f"{name}= is for a run in this process"):
            connect(server.url, **{name: value})
    for name, value in {"token": "x", "ca_file": "x", "takeover": True}.items():
        with pytest.raises(InvalidRequestError, match=f"{name}= is for a server"):
            connect("mock", **{name: value})
    with pytest.raises(InvalidRequestError, match="options are for a backend given by its name"):
        connect(small_mock(), vocab_size=5)


def test_a_member_ends_with_its_drivers_epoch(server: Server) -> None:
    driver = connect(server.url)
    member = connect(driver.handle())
    handle = driver.handle()
    assert member.info().result().driver
    driver.close()
    with pytest.raises(LeaseError, match=r"its driver's lease ended \(it detached\)"):
        member.info().result()
    with pytest.raises(LeaseError, match="of epoch 1, whose driver no longer holds the run"):
        connect(handle)
    member.detach()
    with connect(server.url) as second:
        assert second.handle().epoch == 2
        with pytest.raises(LeaseError, match="of epoch 1"):
            connect(handle)
        with connect(second.handle()) as another:
            assert another.role == "member"


def test_a_members_end_leaves_the_driver(server: Server) -> None:
    with connect(server.url) as driver:
        with connect(driver.handle()) as member:
            member.info().result()
        assert driver.info().result().driver
        with connect(driver.handle()):
            pass


def test_each_attached_client_has_numbers_of_its_own(server: Server, batch: Batch) -> None:
    """The first operation of each is number 1, and neither is taken for the other's."""
    with connect(server.url) as driver, connect(driver.handle()) as member:
        assert driver._connection.client_id != member._connection.client_id
        mine = driver.training.snapshot("mine")
        theirs = member.training.snapshot("theirs")
        mine.result()
        theirs.result()
        assert [operation._call.number for operation in (mine, theirs)] == [1, 1]
        assert logprobs(driver, batch, "theirs") == logprobs(member, batch, "mine")


def test_members_draw_other_seeds_than_the_driver(server: Server) -> None:
    params = SamplingParams(n=2, max_tokens=6)
    with connect(server.url) as driver, connect(driver.handle()) as member:
        drawn = [
            [sample.tokens.tolist() for sample in rl.sampling.generate([[1]], params).result()[0]]
            for rl in (driver, member)
        ]
    assert drawn[0] != drawn[1]


def test_a_member_may_abort_what_the_driver_submitted(servers: ServerFactory) -> None:
    double = Double()
    from client_double import Hold

    double.sample_holds = {0: Hold()}
    server = servers(double)
    with connect(server.url) as driver, connect(driver.handle()) as member:
        operation = driver.sampling.generate([[1]], SamplingParams(max_tokens=2))
        assert double.sample_holds[0].reached.wait(60)
        member.sampling.abort([operation.request_id]).result(60)
        assert operation.result(60)[0][0].finish_reason == "abort"


# -- two processes, as users run them -------------------------------------------------------------


class Served:
    """`remote-rl serve mock` as a process."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        command = [sys.executable, "-m", "remote_rl", "serve", "mock", f"--port={port}"]
        command += [f"--checkpoint-dir={folder}", "--set", "vocab_size=12", "--lease", "5"]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.url = line.rpartition('connect("')[2].rstrip().removesuffix('")')
        assert self.url.startswith("http://127.0.0.1:"), line

    def end(self, how: str) -> None:
        getattr(self.process, how)()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_a_server_process_that_is_killed_and_started_again(tmp_path: Path, batch: Batch) -> None:
    from remote_rl.errors import RunLostError

    first = Served(tmp_path)
    ends = [first]
    try:
        rl = connect(first.url)
        learn(rl, batch)
        saved = logprobs(rl, batch)
        rl.training.save("safe").result()
        learn(rl, batch)
        first.end("kill")
        ends.append(Served(tmp_path, int(first.url.rpartition(":")[2])))
        with pytest.raises(RunLostError, match="'safe', its last checkpoint"):
            rl.training.forward(batch).result(60)
        rl.detach()
        with connect(ends[1].url, start="safe") as resumed:
            assert logprobs(resumed, batch) == saved
    finally:
        ends[-1].end("terminate")
