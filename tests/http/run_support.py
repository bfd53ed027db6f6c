"""A whole run behind HTTP in the test's own event loop, and the numbers it publishes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import attrs
from http_support import listening
from prometheus_client.parser import text_string_to_metric_families

from backends.mock import create
from remote_rl import AdamW, Batch, SamplingParams, losses, requests
from remote_rl.dispatcher import Dispatcher
from remote_rl.messages import Attach, Outcome, Submit
from remote_rl.ops import OPERATIONS
from remote_rl.protocol import PROTOCOL_VERSIONS
from remote_rl.server.app import application

BATCH = Batch(prompts=[[1, 2], [3]], prompt_index=[0, 1], responses=[[4, 5], [6]], temperature=1.0)
REQUESTS: Mapping[str, requests.Request] = {
    "forward_backward": requests.ForwardBackward(batch=BATCH, loss=losses.CrossEntropy()),
    "optim_step": requests.OptimStep(optimizer=AdamW(lr=0.1)),
    "generate": requests.Generate(
        prompts=[[1, 2], [3]], params=SamplingParams(n=2, max_tokens=5, stop_token_ids=())
    ),
}


@attrs.define
class Run:
    """A dispatcher behind `url`, spoken to in messages on behalf of one driver."""

    dispatcher: Dispatcher
    url: str
    token: str | None = None

    async def attach(self) -> None:
        """As driver "c"."""
        await self.dispatcher.handle(Attach(client_id="c", protocol_versions=PROTOCOL_VERSIONS))

    async def ask(self, operation: str, number: int, request: Any = None) -> Outcome:
        """The outcome of one operation."""
        if request is None:
            request = REQUESTS.get(operation) or OPERATIONS[operation].request()
        outcome: Outcome = await self.dispatcher.handle(
            Submit(
                client_id="c",
                instance_id=self.dispatcher.instance_id,
                operation=operation,
                number=number,
                request=request,
                linger=30.0,
            )
        )
        return outcome

    async def get(self, path: str, **headers: str) -> tuple[int, bytes, Any]:
        """Status, body and headers of a GET."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with (
            aiohttp.ClientSession() as session,
            session.get(self.url + path, headers=sent) as answer,
        ):
            return answer.status, await answer.read(), answer.headers

    async def numbers(self) -> dict[str, float]:
        """Every sample of /metrics, by name and labels: `name{label="value"}`."""
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        status, body, _ = await self.get("/metrics", **headers)
        assert status == 200, body
        return {
            sample.name + "".join(f"{{{key}={value}}}" for key, value in sample.labels.items()): (
                sample.value
            )
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
        }


@contextlib.asynccontextmanager
async def served(
    *, token: str | None = None, checkpoint_dir: Any = None, **options: Any
) -> AsyncIterator[Run]:
    """A run of the mock with these options, closed at the end."""
    dispatcher = Dispatcher(create(**options), checkpoint_dir=checkpoint_dir)
    await dispatcher.start()
    try:
        async with listening(application(dispatcher, token=token)) as (url, _):
            yield Run(dispatcher, url, token)
    finally:
        await dispatcher.close()
