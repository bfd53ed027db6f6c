"""One engine of ranks and vLLM engines, its processes, and what they may not leave behind."""

from __future__ import annotations

import logging
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from remote_rl import AdamW, Batch, SamplingParams, Session, connect, losses

NIGHTLY = os.environ.get("REMOTE_RL_NIGHTLY") == "1"
PATIENCE = 120.0
LOOK = 0.02
SHARED_MEMORY = Path("/dev/shm")


def until(what: str, condition: Callable[[], Any], patience: float = PATIENCE) -> None:
    """Looks until it is so."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < patience, f"not within {patience:g} s: {what}"
        time.sleep(LOOK)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """What is promised to take no longer."""
    begin = time.monotonic()
    yield
    spent = time.monotonic() - begin
    assert spent < seconds, f"{spent:.1f} s instead of {seconds:g} s at most"


def some_batch(seed: int = 0, rows: int = 4, length: int = 6) -> Batch:
    """Responses to two prompts, random ones."""
    draw = np.random.default_rng(seed)
    count = 2 * rows
    return Batch(
        prompts=[[5, 6, 7], [8, 9]],
        prompt_index=[0] * rows + [1] * rows,
        responses=[draw.integers(3, 300, length).tolist() for _ in range(count)],
        temperature=1.0,
        advantages=[[float(value)] * length for value in draw.normal(size=count)],
        old_logprobs=[[-5.0] * length] * count,
    )


#: takes seconds, so that a fault can come in the middle
LARGE = some_batch(3, rows=64, length=300)
LONG = SamplingParams(n=8, max_tokens=900, temperature=1.0, seed=3)
PROMPTS = [[5, 6, 7], [8, 9]]


def train(session: Session, seed: int) -> None:
    """One step."""
    session.training.forward_backward(some_batch(seed), losses.PPO())
    session.training.optim_step(AdamW(lr=1e-2)).result()


def state(session: Session) -> bytes:
    """What the weights make of a batch, to the bit."""
    return session.training.forward(some_batch(9)).result().logprobs.values.tobytes()


def drawn(session: Session) -> list[list[int]]:
    """The tokens of some samples."""
    groups = session.sampling.generate(PROMPTS, LONG).result(PATIENCE)
    return [sample.tokens.tolist() for group in groups for sample in group]


class Processes:
    """Those of the engine that a process has started, as they are found on the machine."""

    def __init__(self, owner: int | None = None) -> None:
        self._owner = psutil.Process(owner)

    @property
    def host(self) -> psutil.Process:
        """The one that holds the engine."""
        (found,) = (
            each
            for each in self._owner.children()
            if each.status() != psutil.STATUS_ZOMBIE and "backends.arctic.host" in each.cmdline()
        )
        return found

    def named(self, name: str) -> list[psutil.Process]:
        """Living ones of the engine's whose name or title begins so."""
        found = []
        for each in self.host.children(recursive=True):
            try:
                title = each.cmdline()[0] if each.cmdline() else each.name()
                if each.status() != psutil.STATUS_ZOMBIE and name in (each.name(), *_base(title)):
                    found.append(each)
            except psutil.NoSuchProcess:
                continue  # it has ended meanwhile
        return found

    @property
    def ranks(self) -> list[psutil.Process]:
        """Training ranks, in the order of their numbers as processes."""
        return self.named("ray::RankActor")

    @property
    def samplers(self) -> list[psutil.Process]:
        """vLLM engines."""
        return self.named("ray::SamplerActor")

    def traces(self) -> Traces:
        """What is to be gone when this engine is."""
        return Traces(self.host.pid, Path(self.host.cmdline()[-1]), self._listening())

    def _listening(self) -> set[int]:
        found = set()
        for each in self.host.children(recursive=True):
            try:
                connections = each.net_connections("tcp")
            except psutil.NoSuchProcess:
                continue
            found |= {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
        return found


def _base(title: str) -> list[str]:
    """A title of Ray's without the method that runs: "ray::RankActor.run"."""
    return [title.strip().partition(".")[0]] if title.startswith("ray::") else []


class Traces:
    """Of one life of an engine's process."""

    def __init__(self, host: int, directory: Path, ports: set[int]) -> None:
        self._host = host
        self._directory = directory
        self._ports = ports
        self._seen = time.time()

    def left(self) -> list[str]:
        """All that is still there: processes, ports, files."""
        found = []
        for each in psutil.process_iter():
            try:
                if each.status() != psutil.STATUS_ZOMBIE and os.getsid(each.pid) == self._host:
                    found.append(f"process {each.pid} {each.name()}")
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        found += [f"port {port}" for port in self._ports & self._listening()]
        found += [str(path) for path in self.segments()]
        found += [str(path) for path in SHARED_MEMORY.glob("deepspeed_*")]
        if self._directory.exists():
            found.append(str(self._directory))
        return found

    def _listening(self) -> set[int]:
        """Ports of whoever was there before; the machine gives free ones to others."""
        found = set()
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN:
                try:
                    newer = one.pid is not None and (
                        psutil.Process(one.pid).create_time() > self._seen
                    )
                except psutil.NoSuchProcess:
                    continue  # it has ended meanwhile
                if not newer:
                    found.add(one.laddr.port)
        return found

    def are_gone(self, patience: float) -> None:
        """Waits until nothing is left; says what is, if something stays."""
        begin = time.monotonic()
        while left := self.left():
            assert time.monotonic() - begin < patience, f"left after {patience:g} s: {left}"
            time.sleep(LOOK)

    def segments(self) -> list[Path]:
        """Of weights."""
        return list(SHARED_MEMORY.glob(f"remote_rl-{self._host}-*"))


@contextmanager
def limited(process: psutil.Process, kind: int, soft: int) -> Iterator[None]:
    """A process with less of something (prlimit); as before afterwards, where it still lives."""
    before = resource.prlimit(process.pid, kind)
    resource.prlimit(process.pid, kind, (soft, before[1]))
    try:
        yield
    finally:
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            resource.prlimit(process.pid, kind, before)


class Missing(logging.Handler):
    """Which sampling engines have died and are not there again, as the backend's log says."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        logger = logging.getLogger("remote_rl.arctic")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("sampling engine"):
            name = text[: len("sampling engine 0")]
            (self.names.discard if "is there again" in text else self.names.add)(name)
        elif "process is gone" in text:
            self.names.clear()  # the next one begins with all of them


class Trained:
    """A session with a checkpoint "one", and what the weights are a step after it."""

    def __init__(self, session: Session, folder: Path) -> None:
        self.session = session
        self._folder = folder
        self.processes = Processes()
        self._missing = Missing()
        train(session, 0)
        train(session, 1)
        session.training.save("one").result()
        train(session, 2)
        self.expected = state(session)
        session.weights.sync().result()
        self.samples = drawn(session)

    def unfinished(self) -> list[Path]:
        """Files of a checkpoint that is being written."""
        files = self._folder.rglob("weights-*.safetensors")
        return [path for path in files if "one" not in path.parts]

    def files_of(self, name: str) -> list[Path]:
        """Of a checkpoint."""
        return [path for path in self._folder.rglob("*") if name in path.parts]

    def all_serve(self) -> None:
        """Waits for engines that are being started again, and delivers to all."""
        until("all sampling engines are there", lambda: not self._missing.names)
        self.session.weights.sync().result(PATIENCE)

    def goes_on(self) -> None:
        """One call starts again from the checkpoint, and all is as without an interruption."""
        loaded = self.session.training.load("one").result(PATIENCE)
        assert loaded.version > loaded.saved_version
        train(self.session, 2)
        assert state(self.session) == self.expected
        self.session.weights.sync().result(PATIENCE)
        assert drawn(self.session) == self.samples


def start(model: Path, checkpoints: Path, *, ranks: int = 2, engines: int = 2) -> Session:
    """A session in this process."""
    return connect(
        "arctic",
        model=str(model),
        training={"ranks": ranks, "zero_stage": 2},
        sampling={"engines": engines},
        placement={"device": "cpu"},
        checkpoint_dir=checkpoints,
    )
