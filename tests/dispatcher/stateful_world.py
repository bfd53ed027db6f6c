"""The real side of the model-based tests: an event loop without threads and without real time, a
backend that does what a script says, and a dispatcher that is spoken to in messages."""

import asyncio

import attrs
import numpy as np
from dispatcher_fakes import (
    BATCH,
    FORWARD_BACKWARD,
    OPTIM_STEP,
    FakeBackend,
    FakeClock,
    generate,
    receipt,
)
from stateful_model import FINISH, HELD, SKIP, STUBBORN, TRAINING

from remote_rl import errors
from remote_rl.dispatcher import Dispatcher
from remote_rl.errors import RemoteRLError
from remote_rl.ops import OPERATIONS
from remote_rl.requests import (
    Abandon,
    Delete,
    DropSnapshot,
    Forward,
    Load,
    Push,
    RestoreSnapshot,
    Save,
    Snapshot,
    Sync,
)
from remote_rl.types import Generation, OptimStepResult

#: more turns of the event loop than anything takes that waits for nothing
PATIENCE = 2000


class StillLoop(asyncio.SelectorEventLoop):
    """Its time is the fake clock's, its threads are none, and it counts what is scheduled."""

    def __init__(self, clock):
        self.clock = clock
        self.scheduled = 0
        super().__init__()

    def time(self):
        return self.clock.now()

    def call_soon(self, callback, *arguments, context=None):
        self.scheduled += 1
        return super().call_soon(callback, *arguments, context=context)

    def run_in_executor(self, executor, function, *arguments):
        ended = self.create_future()
        try:
            ended.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 - as an executor does, it is the caller's
            ended.set_exception(error)
        return ended

    async def idle(self):
        """Until nothing is left to run that needs no time."""
        quiet = turns = 0
        while quiet < 2:
            before = self.scheduled
            await asyncio.sleep(0)
            quiet = quiet + 1 if self.scheduled == before + 1 else 0
            turns += 1
            assert turns < PATIENCE, "the dispatcher never comes to rest"


class ScriptedBackend(FakeBackend):
    """Ends each method as the script of its request id says: at once, or when released.

    begun: (operation, request id) of every call, in order. overlaps: calls of the training stream
    that began while another one ran.
    """

    def __init__(self):
        super().__init__()
        self.capabilities = attrs.evolve(self.capabilities, in_flight={"keep", "wait"})
        self.scripts = {}
        self.begun = []
        self.held = {}
        self.contexts_by_id = {}
        self.in_training = 0
        self.overlaps = 0

    def release(self, request_id, how):
        self.held[request_id].set_result(how)

    async def _do(self, name, context, result=None):
        if name == "start":
            return None
        if OPERATIONS[name].stream.value != TRAINING:
            return await self._scripted(name, context, result)
        self.overlaps += self.in_training
        self.in_training += 1
        try:
            return await self._scripted(name, context, result)
        finally:
            self.in_training -= 1

    async def _scripted(self, name, context, result):
        how = self._begin(name, context)
        if how == HELD:
            how = await self._released(context)
        if how == SKIP and isinstance(result, OptimStepResult):
            return attrs.evolve(result, skipped=True, version=context.version)
        if how not in (FINISH, SKIP):
            raise getattr(errors, how)("as the script says")
        return result

    def _begin(self, name, context):
        self.begun.append((name, context.request_id))
        self.contexts_by_id[context.request_id] = context
        return self.scripts.get(context.request_id, FINISH)

    async def _released(self, context):
        self.held[context.request_id] = asyncio.get_running_loop().create_future()
        try:
            return await self.held[context.request_id]
        finally:
            del self.held[context.request_id]

    async def push(self, request, context):
        return await self._do("push", context, receipt(context.next_version))

    async def generate(self, request, context):
        how, reason = self._begin("generate", context), "stop"
        if how in (HELD, STUBBORN):
            released = asyncio.ensure_future(self._released(context))
            aborted = asyncio.ensure_future(context.abort_signal.wait())
            waited_for = [released] if how == STUBBORN else [released, aborted]
            try:
                await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
                how, reason = (released.result(), "stop") if released.done() else (FINISH, "abort")
            finally:
                released.cancel()
                aborted.cancel()
        if how not in (FINISH, SKIP):
            raise getattr(errors, how)("as the script says")
        return Generation.from_samples([self._sample(request, 0, reason)])


def request_of(name, argument):
    """The request of an operation; argument: what tells it from others of its kind."""
    if argument == "unsupported":
        return generate(top_p=0.5)
    named = {
        "save": Save,
        "load": Load,
        "delete": Delete,
        "snapshot": Snapshot,
        "restore_snapshot": RestoreSnapshot,
        "drop_snapshot": DropSnapshot,
    }
    if name in named:
        return named[name](name=argument)
    if name == "sync":
        return Sync(in_flight=argument)
    special = {
        "forward": Forward(batch=BATCH),
        "forward_backward": FORWARD_BACKWARD,
        "optim_step": OPTIM_STEP,
        "abandon": Abandon(reason="ValueError"),
        "push": Push(tensors={"w": np.zeros(1, np.float32)}),
        "generate": generate(),
    }
    return special.get(name) or OPERATIONS[name].request()


class World:
    """A loop, a clock and one dispatcher after the other."""

    def __init__(self, folder, lease, stall):
        self.options = {"checkpoint_dir": folder, "lease_seconds": lease, "stall_timeout": stall}
        self.clock = FakeClock()
        self.loop = StillLoop(self.clock)
        self.start()

    def start(self):
        self.backend = ScriptedBackend()
        self.dispatcher = Dispatcher(self.backend, clock=self.clock, **self.options)
        self.run(self.dispatcher.start())
        self.services = self.tasks()

    def run(self, coroutine):
        """The coroutine's result, which may wait for nothing but turns of the loop."""
        return self.loop.run_until_complete(self._bounded(coroutine))

    async def _bounded(self, coroutine):
        task = asyncio.create_task(coroutine)
        for _ in range(PATIENCE):
            if task.done():
                return task.result()
            await asyncio.sleep(0)
        task.cancel()
        raise AssertionError("a message was never answered")

    def settle(self):
        self.loop.run_until_complete(self.loop.idle())

    def tick(self, seconds):
        self.run(self.clock.advance(seconds))
        self.settle()

    def tell(self, messages):
        """The answers, errors among them, to messages that arrive in the same instant; a message
        may also be a function that is called in its place."""
        return self.run(self._tell(messages))

    async def _tell(self, messages):
        return [
            message() if callable(message) else await self._answer(message) for message in messages
        ]

    async def _answer(self, message):
        try:
            return await self.dispatcher.handle(message)
        except RemoteRLError as error:
            return error

    def begin(self, message):
        """A message whose answer may take time."""
        return self.loop.create_task(self._answer(message))

    def tasks(self):
        return len(asyncio.all_tasks(self.loop))

    def stop(self):
        """Closes the dispatcher; nothing of it is left."""
        self.run(self.dispatcher.close())
        self.settle()

    def close(self):
        """Whatever the dispatcher has become."""
        for _ in range(10):  # one that takes its cancellation for another's is cancelled again
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.settle()
        self.loop.close()
