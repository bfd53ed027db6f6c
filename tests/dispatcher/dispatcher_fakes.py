"""A backend, a clock and a speaker of messages for the dispatcher's tests; time stands still."""

import asyncio
import contextlib
import functools

import numpy as np

from remote_rl import losses
from remote_rl.dispatcher import Dispatcher
from remote_rl.messages import Attach, Cancel, Detach, Grant, Renew, Submit, Wait
from remote_rl.ops import OPERATIONS
from remote_rl.protocol import PROTOCOL_VERSIONS, Capabilities, ModelInfo, TokenizerFiles
from remote_rl.requests import ForwardBackward, Generate, OptimStep
from remote_rl.types import (
    AdamW,
    Batch,
    ForwardBackwardResult,
    Generation,
    OptimStepResult,
    Outputs,
    Sample,
    SamplingParams,
    SyncReceipt,
)

BATCH = Batch(prompts=[[1]], prompt_index=[0], responses=[[2, 3]], temperature=1.0)
FORWARD_BACKWARD = ForwardBackward(batch=BATCH, loss=losses.CrossEntropy())
OPTIM_STEP = OptimStep(optimizer=AdamW(lr=0.1))
#: longer than any test takes: an answer comes as soon as its operation has ended
PATIENCE = 30.0


def generate(n=1, **params):
    return Generate(prompts=[[1, 2]], params=SamplingParams(max_tokens=3, n=n, **params))


def receipt(version, label=None):
    """Of a delivery of one tensor that took no time."""
    return SyncReceipt(
        version=version,
        label=label,
        tensors=1,
        bytes=4,
        seconds=0.0,
        source_fingerprint="f",
        sampler_fingerprint="f",
    )


class FakeClock:
    """Stands still until `advance` moves it."""

    def __init__(self):
        self._now = 1000.0
        self._sleepers = []

    def now(self):
        return self._now

    async def sleep(self, seconds):
        woken = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._now + seconds, woken))
        await woken

    def jump(self, seconds):
        """Moves on, and wakes nobody yet."""
        self._now += seconds

    async def advance(self, seconds):
        """Moves on by half seconds, so that the dispatcher's watch sees each of them."""
        end = self._now + seconds
        while self._now < end:
            self._now = min(end, self._now + 0.5)
            due = [each for each in self._sleepers if each[0] <= self._now]
            self._sleepers = [each for each in self._sleepers if each[0] > self._now]
            for _, woken in due:
                if not woken.done():
                    woken.set_result(None)
            await settle()


async def settle():
    """Lets everything run that can run without time passing."""
    for _ in range(20):
        await asyncio.sleep(0)


class Gate:
    """Holds a backend method after it has begun, until it is opened."""

    def __init__(self):
        self.begun = asyncio.Event()
        self._open = asyncio.Event()

    def open(self):
        self._open.set()

    async def wait(self):
        self.begun.set()
        await self._open.wait()


class FakeBackend:
    """Does nothing, and says what it was asked: `calls` names the operations in order.

    gates: operation to the `Gate` that holds it. failures: operation to what it raises, once.
    answers: operation to the result that it gives instead of its own.
    """

    def __init__(self):
        self.name = "fake"
        self.model = ModelInfo(name="tiny", vocab_size=1000)
        self.seed = 7
        self.capabilities = Capabilities(
            operations=OPERATIONS,
            outputs={"logprobs", "entropy"},
            losses={"CrossEntropy", "Cotangents"},
            optimizers={"AdamW"},
            sampling_options={"seed", "temperature"},
            sampling_outputs={"logprobs"},
            in_flight={"keep"},
            push_dtypes={"float32"},
            policies={"reference", "snapshot"},
        )
        self.calls = []
        self.seeds = []
        self.gates = {}
        self.failures = {}
        self.answers = {}
        self.contexts = {}
        self.sampler = (0, None)
        self.state = b"base"
        self.kills = self.closes = 0
        self.heeds_aborts = True

    @property
    def training(self):
        return self

    sampling = weights = training

    def hold(self, operation):
        gate = self.gates[operation] = Gate()
        return gate

    async def _do(self, name, context, result=None):
        self.calls.append(name)
        self.contexts[name] = context
        if name in self.gates:
            await self.gates[name].wait()
        if name in self.failures:
            raise self.failures.pop(name)
        return self.answers.get(name, result)

    async def start(self, context):
        context.progress(0, what="loading the model")
        await self._do("start", context)

    async def close(self):
        self.closes += 1

    def kill(self):
        self.kills += 1

    def sampler_version(self):
        return self.sampler

    async def tokenizer(self, request, context):
        return TokenizerFiles(kind="bytes")

    async def forward(self, request, context):
        responses = request.batch.responses
        zeros = responses.with_values(np.zeros(len(responses.values), np.float32))
        result = Outputs(values=dict.fromkeys(request.outputs, zeros), version=context.version)
        return await self._do("forward", context, result)

    async def forward_backward(self, request, context):
        result = ForwardBackwardResult(value=0.5, version=context.version)
        return await self._do("forward_backward", context, result)

    async def optim_step(self, request, context):
        result = OptimStepResult(grad_norm=1.0, skipped=False, version=context.next_version)
        return await self._do("optim_step", context, result)

    async def save(self, request, context):
        (context.directory / "weights").write_bytes(b"saved")
        return await self._do("save", context, False)

    async def load(self, request, context):
        self.state = (context.directory / "weights").read_bytes()
        return await self._do("load", context)

    async def export(self, request, context):
        (context.directory / "config.json").write_bytes(b"{}")
        return await self._do("export", context)

    async def sync(self, request, context):
        self.sampler = (context.version, request.label)
        return await self._do("sync", context, receipt(context.version, request.label))

    async def push(self, request, context):
        raise NotImplementedError

    async def reset(self, request, context):
        return await self._do("reset", context)

    async def generate(self, request, context):
        """Emits the first sample at once; an abort ends those that the gate still holds."""
        self.calls.append("generate")
        self.seeds.append(context.seed)
        self.contexts["generate"] = context
        if "generate" in self.failures:
            raise self.failures.pop("generate")
        count = len(request.prompts) * request.params.n
        finished = [self._sample(request, 0, "stop")]
        context.emit(finished[0])
        reason = "stop"
        if "generate" in self.gates:
            waits = [
                asyncio.ensure_future(self.gates["generate"].wait()),
            ]
            if self.heeds_aborts:
                waits.append(asyncio.ensure_future(context.abort_signal.wait()))
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in waits:
                    each.cancel()
            reason = "abort" if context.cancelled else "stop"
        finished += [self._sample(request, index, reason) for index in range(1, count)]
        return self.answers.get("generate", Generation.from_samples(finished))

    def _sample(self, request, index, reason):
        prompt, index = divmod(index, request.params.n)
        return Sample(
            tokens=np.array([5, index]),
            logprobs=np.zeros(2) if "logprobs" in request.params.outputs else None,
            finish_reason=reason,
            first_version=0,
            last_version=0,
            prompt_index=prompt,
            index=index,
        )


def _plain(name):
    async def method(self, request, context):
        return await self._do(name, context)

    return method


for _name in (
    "zero_grad",
    "snapshot",
    "restore_snapshot",
    "drop_snapshot",
    "set_reference",
    "pause",
    "resume",
    "reset_prefix_cache",
    "finish_session",
    "sleep",
    "wake",
    "push_part",
):
    setattr(FakeBackend, _name, _plain(_name))


class Talk:
    """One dispatcher with its fakes, spoken to in messages on behalf of any client."""

    def __init__(self, dispatcher, backend, clock):
        self.dispatcher = dispatcher
        self.backend = backend
        self.clock = clock
        self.instance_id = dispatcher.instance_id
        self._generates = {}

    async def attach(self, client_id="a", **fields):
        fields.setdefault("protocol_versions", PROTOCOL_VERSIONS)
        return await self.dispatcher.handle(Attach(client_id=client_id, **fields))

    async def grant(self, client_id="a", **fields):
        granted = await self.attach(client_id, **fields)
        assert isinstance(granted, Grant), granted
        return granted

    def _leased(self, client, acknowledged=()):
        return {
            "client_id": client,
            "instance_id": self.instance_id,
            "acknowledged": acknowledged,
        }

    async def submit(self, operation, number, request=None, *, client="a", linger=0.0, **fields):
        """The answer as it stands at once, or when the operation has ended (linger)."""
        acknowledged = fields.pop("acknowledged", ())
        if operation == "generate":
            self._generates[client] = max(number, self._generates.get(client, 0))
        if operation == "abort":  # called after all so far, unless the test says otherwise
            fields.setdefault("generates_before", self._generates.get(client, 0))
        return await self.dispatcher.handle(
            Submit(
                operation=operation,
                number=number,
                request=OPERATIONS[operation].request() if request is None else request,
                linger=linger,
                **fields,
                **self._leased(client, acknowledged),
            )
        )

    async def outcome(self, operation, number, request=None, **fields):
        """The final outcome."""
        outcome = await self.submit(operation, number, request, linger=PATIENCE, **fields)
        assert outcome.done
        return outcome

    async def result(self, operation, number, request=None, **fields):
        """The result; the error is raised."""
        outcome = await self.outcome(operation, number, request, **fields)
        if outcome.error is not None:
            raise outcome.error
        return outcome.result

    async def error(self, operation, number, request=None, **fields):
        """The error of an operation that must have failed."""
        outcome = await self.outcome(operation, number, request, **fields)
        assert outcome.error is not None, outcome
        return outcome.error

    async def wait(self, client="a", timeout=0.0, acknowledged=(), cursors=None):
        return await self.dispatcher.handle(
            Wait(timeout=timeout, cursors=cursors or {}, **self._leased(client, acknowledged))
        )

    async def cancel(self, operation, number, client="a"):
        answer = await self.dispatcher.handle(
            Cancel(
                stream=OPERATIONS[operation].stream.value,
                number=number,
                operation=operation,
                **self._leased(client),
            )
        )
        return answer.cancelled

    async def renew(self, client="a"):
        return await self.dispatcher.handle(Renew(**self._leased(client)))

    async def detach(self, client="a"):
        return await self.dispatcher.handle(Detach(**self._leased(client)))

    async def step(self, number):
        """A forward_backward and an optim_step under this number and the next."""
        await self.result("forward_backward", number, FORWARD_BACKWARD)
        return await self.result("optim_step", number + 1, OPTIM_STEP)


@contextlib.asynccontextmanager
async def running(client="a", backend=None, **options):
    """A started dispatcher with one driver attached, closed at the end."""
    backend, clock = backend or FakeBackend(), FakeClock()
    dispatcher = Dispatcher(backend, clock=clock, **options)
    await dispatcher.start()
    talk = Talk(dispatcher, backend, clock)
    try:
        if client is not None:
            await talk.grant(client)
        backend.calls.clear()
        yield talk
    finally:
        await dispatcher.close()


def in_loop(test):
    """Runs an async test to its end in an event loop of its own."""

    @functools.wraps(test)
    def wrapped(*arguments, **named):
        asyncio.run(test(*arguments, **named))

    return wrapped
