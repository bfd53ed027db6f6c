"""The server process of the benchmarks: remote_rl's own application, and what it is compared with.

    python benchmarks/served.py          prints its addresses as JSON, and ends with its input

On one aiohttp server stand the messages of remote_rl, answered by a dispatcher whose backend does
nothing, and reference handlers that take a body as it comes. Beside it, a plain socket.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import struct
import sys
import threading
import time
from typing import Any

import numpy as np
from aiohttp import web
from safetensors.numpy import load as load_safetensors

from remote_rl.dispatcher import Dispatcher
from remote_rl.messages import Message, Submit
from remote_rl.protocol import Capabilities, ModelInfo
from remote_rl.server.app import application, runner
from remote_rl.transports.bodies import receive
from remote_rl.types import ForwardBackwardResult, Generation, Sample

LENGTH = struct.Struct("<Q")
#: of `now`
MOMENT = struct.Struct("<d")


def now() -> float:
    """Seconds, by the clock that all processes of a Linux machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class Idle:
    """A trainer and a sampler that answer at once; what is left is the way there and back. held:
    when the last submit was in the server's hands."""

    held = 0.0

    async def forward_backward(self, request: Any, context: Any) -> ForwardBackwardResult:
        """The number of tokens that have arrived, as the value, and when the server had them."""
        tokens = float(request.batch.tokens)
        return ForwardBackwardResult(
            value=tokens, metrics={"held": self.held}, version=context.version
        )

    async def zero_grad(self, request: Any, context: Any) -> None:
        """Nothing."""

    async def generate(self, request: Any, context: Any) -> Generation:
        """One token for each prompt."""
        return Generation.from_samples(
            [
                Sample(
                    tokens=np.zeros(1, np.int32),
                    logprobs=np.zeros(1, np.float32),
                    finish_reason="stop",
                    first_version=0,
                    last_version=0,
                    prompt_index=index,
                    index=0,
                )
                for index in range(len(request.prompts))
            ]
        )


class IdleBackend:
    """The protocol's least, around `Idle`."""

    name = "idle"
    seed = 0
    model = ModelInfo(name="idle", vocab_size=1 << 17)
    capabilities = Capabilities(
        operations={"forward_backward", "zero_grad", "generate"},
        outputs={"logprobs"},
        losses={"PPO"},
        sampling_outputs={"logprobs"},
    )

    def __init__(self) -> None:
        self.training = self.sampling = self.weights = Idle()

    def sampler_version(self) -> tuple[int, None]:
        """It never changes."""
        return 0, None

    async def start(self, context: Any) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to close."""

    def kill(self) -> None:
        """Nothing to kill."""


class Noting:
    """A dispatcher, and the moment at which a submit came to it: read whole and validated, and
    nothing done with it yet."""

    def __init__(self, dispatcher: Dispatcher, idle: Idle) -> None:
        self._dispatcher = dispatcher
        self._idle = idle

    async def handle(self, message: Message) -> Any:
        """The dispatcher's reply."""
        if isinstance(message, Submit):
            self._idle.held = now()
        return await self._dispatcher.handle(message)


def held(what: object) -> web.Response:
    """The answer to what is here whole, as it is wanted: when it was."""
    moment = now()
    del what
    return web.json_response({"held": moment})


async def opaque(request: web.Request) -> web.Response:
    """Takes the body as remote_rl's server does, and knows nothing of what is in it."""
    return held(await receive(request.content))


async def plain(request: web.Request) -> web.Response:
    """Takes the body as most aiohttp servers do."""
    return held(await request.content.read())


async def safetensors_body(request: web.Request) -> web.Response:
    """Tensors of a safetensors body."""
    return held(load_safetensors(await request.content.read()))


async def pickled(request: web.Request) -> web.Response:
    """Arrays of a pickle; never do this with what a stranger sends."""
    body = await receive(request.content)
    return held(pickle.loads(body))  # noqa: S301 - the benchmark's own


async def echo(request: web.Request) -> web.Response:
    """A small body and back."""
    return web.Response(body=await request.read())


def raw_socket() -> int:
    """A socket that takes a length and that many bytes and answers with the moment; its port."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            connection, _ = listening.accept()
            with connection:
                memory = memoryview(bytearray(1 << 26))
                while head := connection.recv(LENGTH.size, socket.MSG_WAITALL):
                    (left,) = LENGTH.unpack(head)
                    while left:
                        left -= connection.recv_into(memory[:left])
                    connection.sendall(MOMENT.pack(now()))

    threading.Thread(target=serve, daemon=True).start()
    return int(listening.getsockname()[1])


async def main() -> None:
    """Serves until the input ends."""
    backend = IdleBackend()
    dispatcher = Dispatcher(backend)  # type: ignore[arg-type] - its faces have what it declares
    await dispatcher.start()
    app = application(Noting(dispatcher, backend.training))
    for handler in (opaque, plain, safetensors_body, pickled, echo):
        app.router.add_post(f"/reference/{handler.__name__}", handler)
    app_runner = runner(app)
    await app_runner.setup()
    await web.TCPSite(app_runner, "127.0.0.1", 0).start()
    port = app_runner.addresses[0][1]
    print(json.dumps({"url": f"http://127.0.0.1:{port}", "socket": raw_socket()}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await app_runner.cleanup()
    await dispatcher.close()


if __name__ == "__main__":
    asyncio.run(main())
