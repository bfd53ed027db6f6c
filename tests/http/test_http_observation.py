"""/healthz, /metrics and `Observe`: what an operator is told, and who else is not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from http_support import LONG, RENEW, Scripted, frame_bytes, in_loop, listening, post, speaking
from run_support import Run, served

from remote_rl.errors import AuthenticationError, RunLostError
from remote_rl.messages import Observe
from remote_rl.ops import OPERATIONS
from remote_rl.run_info import RunStatus
from remote_rl.server.app import application
from remote_rl.transports.bodies import ROUTES

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
LOSE = {"operation": "optim_step", "error": "RunLostError"}


async def trained(run: Run) -> None:
    await run.attach()
    await run.ask("forward_backward", 1)
    await run.ask("optim_step", 2)
    await run.ask("optim_step", 3)  # refused: nothing was accumulated
    await run.ask("generate", 1)


@in_loop
async def test_the_metrics_say_what_the_run_has_done() -> None:
    async with served() as run:
        await trained(run)
        numbers = await run.numbers()
        done = "remote_rl_operations_total{operation=%s}{outcome=%s}"
        assert numbers[done % ("forward_backward", "ok")] == 1
        assert numbers[done % ("optim_step", "ok")] == 1
        assert numbers[done % ("optim_step", "ConflictError")] == 1
        assert numbers["remote_rl_operation_seconds_count{operation=optim_step}"] == 2
        assert numbers["remote_rl_operation_queue_seconds_count{operation=generate}"] == 1
        assert numbers["remote_rl_operations_in_flight{operation=generate}"] == 0
        assert numbers["remote_rl_queue_length{operation=generate}"] == 0
        assert numbers["remote_rl_trainer_version"] == 1
        assert numbers["remote_rl_sampler_version"] == 0
        assert numbers["remote_rl_generated_samples_total"] == 4
        assert 4 <= numbers["remote_rl_generated_tokens_total"] <= 20
        assert numbers["remote_rl_sample_staleness_versions_bucket{le=0.0}"] == 0
        assert numbers["remote_rl_sample_staleness_versions_bucket{le=1.0}"] == 4
        assert numbers["remote_rl_sample_staleness_versions_sum"] == 4
        assert numbers["remote_rl_clients"] == numbers["remote_rl_driver"] == 1
        for flag in ("paused", "stopping", "run_lost", "busy_total"):
            assert numbers[f"remote_rl_{flag}"] == 0
        assert numbers["remote_rl_http_connections"] == 1
        assert numbers["process_resident_memory_bytes"] > 1e6


@in_loop
async def test_http_counts_its_own_bytes_and_requests_by_message_and_status() -> None:
    async with served() as run:
        await post(run.url, path="/v1/renew")
        await post(run.url, path="/v1/nonsense")
        await post(run.url, path="/v1/" + "x" * 50)
        numbers = await run.numbers()
        counted = "remote_rl_http_requests_total{message=%s}{status=%s}"
        assert numbers[counted % ("renew", "410")] == 1  # of another run
        assert numbers[counted % ("other", "404")] == 2
        assert numbers["remote_rl_received_bytes_total"] == len(frame_bytes(RENEW))
        assert numbers["remote_rl_sent_bytes_total"] > 100


@in_loop
async def test_labels_are_of_fixed_lists_whatever_clients_say() -> None:
    async with served() as run:
        await trained(run)
        for path in ("/v1/a", "/v1/b", "/v1/" + "y" * 99):
            await post(run.url, path=path)
        labels: dict[str, set[str]] = {}
        for name in await run.numbers():
            for label, value in re.findall(r"\{(\w+)=([^}]*)\}", name):
                labels.setdefault(label, set()).add(value)
        assert labels["operation"] <= set(OPERATIONS)
        assert labels["message"] <= {path.removeprefix("/v1/") for path in ROUTES} | {"other"}
        assert set(labels) == {
            *("operation", "outcome", "le", "message", "status"),
            *("instance_id", "backend", "model", "software"),
        }


@in_loop
async def test_the_page_for_operators_has_every_metric_and_no_other() -> None:
    async with served() as run:
        await trained(run)
        _, body, _ = await run.get("/metrics")
        published = set(re.findall(r"# TYPE (remote_rl_\w+) ", body.decode()))
        rows = re.findall(r"^\| `(remote_rl_\w+)(?:\{[^}]*\})?` \|", PAGE.read_text(), re.MULTILINE)
        assert sorted(rows) == sorted(published)


@in_loop
async def test_openmetrics_is_given_to_who_asks_for_it() -> None:
    async with served() as run:
        kind = "application/openmetrics-text; version=1.0.0"
        status, body, headers = await run.get("/metrics", Accept=kind)
        assert status == 200
        assert headers["Content-Type"].startswith("application/openmetrics-text")
        assert body.endswith(b"# EOF\n")


@in_loop
async def test_metrics_and_status_are_for_who_may_use_the_run() -> None:
    async with served(token="s3cret") as run:
        for authorization in ("", "Bearer wrong"):
            status, body, headers = await run.get("/metrics", Authorization=authorization)
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
            assert b"remote_rl_" not in body
        assert (await run.numbers())["remote_rl_clients"] == 0
        async with speaking(run.url, token="wrong") as transport:
            with pytest.raises(AuthenticationError):
                await transport.call(Observe(), LONG)
        async with speaking(run.url, token="s3cret") as transport:
            assert isinstance(await transport.call(Observe(), LONG), RunStatus)
    async with served() as run:
        status, body, _ = await run.get("/metrics", Host="evil.example")
        assert status == 403
        assert b"remote_rl_" not in body


@in_loop
async def test_health_needs_no_token_and_says_nothing_of_the_run() -> None:
    async with served(token="s3cret") as run:
        for host in ("evil.example", "10.0.0.1:7700", "localhost"):
            status, body, _ = await run.get("/healthz", Host=host)
            assert (status, json.loads(body)) == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("token", "headers", "told"),
    [
        (None, {}, True),
        (None, {"Host": "evil.example"}, False),
        ("s3cret", {}, False),
        ("s3cret", {"Authorization": "Bearer wrong"}, False),
        ("s3cret", {"Authorization": "Bearer s3cret"}, True),
    ],
)
@in_loop
async def test_a_lost_run_is_not_healthy_and_says_why_to_who_may_know(
    token: str | None, headers: dict[str, str], told: bool
) -> None:
    async with served(token=token, faults=[LOSE]) as run:
        await run.attach()
        await run.ask("forward_backward", 1)
        assert isinstance((await run.ask("optim_step", 2)).error, RunLostError)
        status, body, _ = await run.get("/healthz", **headers)
        answer = json.loads(body)
        assert (status, answer["status"]) == (503, "lost")
        assert set(answer) == ({"status", "reason"} if told else {"status"})
        assert (await run.numbers())["remote_rl_run_lost"] == 1


@in_loop
async def test_a_server_that_stops_is_not_healthy() -> None:
    async with served() as run:
        await run.dispatcher.drain(0.0)
        status, body, _ = await run.get("/healthz")
        assert (status, json.loads(body)) == (503, {"status": "stopping"})
        assert (await run.numbers())["remote_rl_stopping"] == 1


@in_loop
async def test_a_handler_that_fails_is_counted_and_the_connection_lives() -> None:
    async def fail(message: Any) -> Any:
        raise KeyError("a bug")

    async with listening(application(Scripted(fail))) as (url, _):
        assert (await post(url))[0] == 500
        assert (await post(url))[0] == 500
