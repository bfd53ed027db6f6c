"""Training ranks as plain processes, for the tests of `backends.arctic.training`: no Ray, one
process a rank, all called in lockstep over pipes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

#: seconds after which a call that no rank answers counts as stuck
_STUCK = 300

ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class RankFailed(Exception):
    """A call raised in a rank; `error` is its own exception where it could be pickled."""

    def __init__(self, text: str, error: BaseException | None) -> None:
        super().__init__(text)
        self.error = error


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Ranks:
    """`world` started ranks. Their functions are called by name on the rank itself ("forward"),
    or given as functions `function(rank, *arguments)` of a module that they can import."""

    def __init__(self, world: int, settings: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.world = world
        self._port = free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            own, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, world, self._port, settings), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(own)
            self._processes.append(process)
        self.facts = self._answers()

    def call(self, what: Any, *arguments: Any) -> list[Any]:
        """The same call on every rank, and what each returned."""
        return self.call_each(what, [arguments] * self.world)

    def call_each(self, what: Any, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """A call with arguments of each rank's own."""
        for pipe, own in zip(self._pipes, arguments, strict=True):
            pipe.send((what, tuple(own)))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            if failures and not pipe.poll(5):
                continue  # it may wait for the one that failed
            if not pipe.poll(_STUCK):
                raise RankFailed(f"rank {rank} did not answer for {_STUCK} s", None)
            try:
                good, answer = pipe.recv()
            except EOFError:
                raise RankFailed(f"rank {rank} died", None) from None
            answers.append(answer)
            if not good:
                failures.append(f"rank {rank}: {answer[0]}")
        if failures:
            error = next(each[1] for each in answers if isinstance(each, tuple))
            raise RankFailed("\n".join(failures), error)
        return answers

    def close(self) -> None:
        """Ends the processes, and what DeepSpeed leaves of them."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()
        for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer*{self._port}*"):
            left.unlink(missing_ok=True)


def _serve(pipe: Connection, rank: int, world: int, port: int, settings: Any) -> None:
    os.environ.update(
        ENVIRONMENT,
        RANK=str(rank),
        LOCAL_RANK="0",
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch

    torch.set_num_threads(1)
    # what is never written is NaN then, where it can be anything, and usually is zero
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    from backends.arctic.training.rank import Rank

    held = Rank(settings, rank, world)
    _answer(pipe, held.start)
    while True:
        try:
            what, arguments = pipe.recv()
        except (EOFError, OSError):
            break
        if isinstance(what, str):
            _answer(pipe, getattr(held, what), *arguments)
        else:
            _answer(pipe, what, held, *arguments)
    held.close()


def _answer(pipe: Connection, function: Any, *arguments: Any) -> None:
    try:
        result = (True, function(*arguments))
    except Exception as error:  # noqa: BLE001 - the test sees it
        text = traceback.format_exc()
        result = (False, (text, error if _pickles(error) else None))
    pipe.send(result)


def _pickles(error: BaseException) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its own code does
        return False
    return True


# -- what tests ask of a rank itself ------------------------------------------------------------


def masters(rank: Any) -> dict[str, Any]:
    """On rank 0, name to the whole float32 weight; {} elsewhere."""
    return _whole(rank, rank._held.engine.masters)


def moments(rank: Any, name: str) -> dict[str, Any]:
    """On rank 0, name to a whole moment of AdamW; {} elsewhere."""
    return _whole(rank, [each[name] for each in rank._held.engine.moments()])


def _whole(rank: Any, parts: Any) -> dict[str, Any]:
    engine, found = rank._held.engine, {}
    for name, shape in engine.shapes().items():
        whole = engine.assembled(name, parts, 0)
        if whole is not None:
            found[name] = whole.reshape(shape).clone().numpy()
    return found


def lent(rank: Any, forms: Any) -> tuple[dict[str, tuple[str, Any]], bool]:
    """What a rank would lend handles of: name to dtype and float32 numbers; whether it holds it
    until it is taken back, and no longer."""
    from backends.arctic.training import delivering as module

    found: dict[str, tuple[str, Any]] = {}

    class Copies:
        def __init__(self, manifest: Any) -> None:
            self._entries = {entry.name: entry for entry in manifest}

        def write(self, name: str, tensor: Any) -> None:
            assert tuple(tensor.shape) == self._entries[name].shape
            found[name] = self._entries[name].dtype, tensor.detach().float().numpy().copy()

        def finish(self) -> None: ...

    own, module.IpcWriter = module.IpcWriter, Copies  # type: ignore[assignment,misc]
    try:
        rank.lend(forms)
    finally:
        module.IpcWriter = own  # type: ignore[misc]
    held = rank._deliveries._lent is not None
    rank.take_back()
    return found, held and rank._deliveries._lent is None


def calls_off(rank: Any, group: str) -> None:
    """Calls a broadcast off once it has begun, from another thread, as whoever watches does."""
    import threading

    own = rank._held.engine.pulse

    def work() -> None:
        while rank._held.engine.pulse == own:
            time.sleep(0.001)
        rank.call_off(group)

    threading.Thread(target=work, daemon=True).start()


def spoil(rank: Any, name: str) -> None:
    """Writes NaN at the end of a weight, wherever it lies."""
    engine = rank._held.engine
    size = engine.sizes()[name]
    for each in engine.fragments:
        if each.name == name and each.start + each.length == size:
            engine.masters[each.master].reshape(-1)[each.offset + each.length - 1] = float("nan")
    engine.refresh()


def memory(rank: Any) -> int:
    """Bytes of all tensors whose size follows the model's, but of what is mapped from its file, as
    a CPU has it."""
    storages = {}
    for each in _tensors(rank._started.engine.memory()):
        storage = each.untyped_storage()
        if storage.resizable():
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _tensors(held: Any) -> Any:
    if isinstance(held, dict):
        held = held.values()
    if hasattr(held, "untyped_storage"):
        yield held
    elif held is not None:
        for each in held:
            yield from _tensors(each)


def break_layer(rank: Any, where: str, calls: int) -> None:
    """Lets the middle of the model raise at the `calls`-th time from now that it is reached, in
    "forward" or "backward"."""
    module = rank._held.loaded.model.model.layers[0].mlp
    left = [calls]

    def fuse() -> None:
        left[0] -= 1
        if left[0] == 0:
            hook.remove()
            raise MemoryError(f"broken {where}")

    if where == "forward":
        hook = module.register_forward_hook(lambda *_: fuse())
    else:
        hook = module.register_forward_hook(
            lambda _module, _inputs, output: output.register_hook(lambda _slopes: fuse()) and None
        )
