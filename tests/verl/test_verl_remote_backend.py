"""The RemoteBackend seam's pieces: backend, worker, replica, server, and their registration."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import verl_with_seam
from omegaconf import OmegaConf
from verl.remote_backend import RemoteBackend, RemoteBackendRegistry
from verl.remote_backend.trainer import with_seam_keys
from verl.workers.rollout.replica import TokenOutput
from verl_rows import sample
from verl_runs import connect_and_read, serve_mock
from verl_workload import VOCABULARY

from remote_rl import errors
from shims.verl import sessions
from shims.verl.options import Options
from shims.verl.remote_backend.backend import RemoteRun
from shims.verl.remote_backend.replica import SeamReplica
from shims.verl.remote_backend.server import SeamServer
from shims.verl.remote_backend.worker import SeamWorker
from shims.verl.replica import RemoteReplica


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose run all tests of this file share."""
    with serve_mock(tmp_path_factory.mktemp("server"), vocab_size=len(VOCABULARY)) as address:
        yield address


@pytest.fixture
def seam_config(config: Callable[..., Any], url: str) -> Callable[..., Any]:
    """What the seam's trainer is started with."""

    def build(*more: str) -> Any:
        chosen = with_seam_keys(config("trainer.v1.trainer_mode=sync"))
        options = chosen.actor_rollout_ref.rollout.engine_kwargs.remote_rl
        options.url, options.start = url, "current"
        return OmegaConf.merge(chosen, OmegaConf.from_dotlist(list(more)))

    return build


@pytest.fixture
def backend(seam_config: Callable[..., Any]) -> Iterator[RemoteRun]:
    """The driver's."""
    held = RemoteRun.from_config(seam_config())
    yield held
    asyncio.run(held.destroy())


def test_the_driver_attaches_and_others_join_by_its_handle(
    backend: RemoteRun, seam_config: Callable[..., Any]
) -> None:
    handle = json.loads(json.dumps(backend.reconnect_handle()))
    joined = RemoteRun.from_config(seam_config(), handle=handle)
    assert isinstance(backend, RemoteBackend)
    assert (backend.session.role, joined.session.role) == ("driver", "member")
    assert joined.reconnect_handle() == handle
    assert backend.requires_single_forwarder()
    asyncio.run(joined.destroy())  # its session is its process's, and goes on
    assert joined.session.weights.version().result().trainer >= 0


def test_another_backends_handle_is_refused(seam_config: Callable[..., Any]) -> None:
    with pytest.raises(errors.InvalidRequestError, match=r"trainer\.remote_backend=remote_rl"):
        RemoteRun.from_config(seam_config(), handle={"actor": "of another backend"})


def test_destroy_leaves_the_run(seam_config: Callable[..., Any], url: str) -> None:
    driver = RemoteRun.from_config(seam_config())
    version = asyncio.run(driver.update_weights(7))["version"]
    for _ in range(2):
        asyncio.run(driver.destroy())
    # at once, without waiting for a lease, and with the weights that it had
    versions = connect_and_read(url)
    assert (versions.sampler, versions.label) == (version, 7)
    with pytest.raises(errors.RemoteRLError):
        driver.session.info().result()


def test_a_checkpoint_of_the_backend_loads_with_its_optimizer(backend: RemoteRun) -> None:
    name = asyncio.run(backend.save_checkpoint())["checkpoint"]
    loaded = backend.session.training.load(name, optimizer=True).result()
    assert loaded.metadata["framework"] == "verl"
    assert asyncio.run(backend.save_checkpoint())["checkpoint"] != name


@pytest.mark.parametrize(
    "override",
    [
        "trainer.use_legacy_worker_impl=auto",
        "actor_rollout_ref.actor.router_replay.mode=R3",
        "actor_rollout_ref.rollout.skip_rollout=true",
        "actor_rollout_ref.actor.entropy_cof=1",
        "actor_rollout_ref.rollout.engine_kwargs.remote_rl.poll_seconds=0.1",
    ],
)
def test_what_can_not_be_honoured_is_refused_by_its_key(
    seam_config: Callable[..., Any], override: str
) -> None:
    key = override.partition("=")[0]
    with pytest.raises(errors.UnsupportedError) as raised:
        RemoteRun.from_config(seam_config(override))
    assert raised.value.details["key"] == key


def test_keys_that_only_the_seams_verl_has_are_known(seam_config: Callable[..., Any]) -> None:
    known = [
        "actor_rollout_ref.actor.router_replay.mode=disabled",
        "actor_rollout_ref.actor.router_replay.record_file=null",
        "actor_rollout_ref.actor.sum_pi_squared_checkpointing=false",
        "actor_rollout_ref.rollout.skip_rollout=false",
        "actor_rollout_ref.rollout.multi_turn.interaction_config_path=null",
    ]
    asyncio.run(RemoteRun.from_config(seam_config(*known)).destroy())


def test_weights_are_updated_with_and_without_a_mode(backend: RemoteRun) -> None:
    worker = object.__new__(SeamWorker)  # verl makes one in a Ray actor only
    worker._session, worker._options = backend.session, Options(url="http://unused")
    for number, mode in enumerate(({}, {"mode": "naive"}, {"mode": "remote_backend"})):
        worker.update_weights(global_steps=number, **mode)
        assert backend.session.weights.version().result().label == number
    with pytest.raises(errors.UnsupportedError, match="nccl"):
        worker.update_weights(global_steps=9, mode="nccl")


class Answers:
    """A session whose generate has the given outcomes, one a call."""

    def __init__(self, *outcomes: Any) -> None:
        self.sampling = self
        self._outcomes = iter(outcomes)

    async def generate(self, prompts: Any, params: Any) -> Any:
        outcome = next(self._outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return [type("Group", (), {"samples": [outcome]})()]


@pytest.fixture
def server(config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A server whose run answers with the given outcomes."""

    def build(*outcomes: Any) -> SeamServer:
        session = Answers(*outcomes)
        monkeypatch.setattr(sessions, "member", lambda handle: session)
        rollout = config("actor_rollout_ref.rollout.engine_kwargs.remote_rl.generation_attempts=2")
        handle = {"run": {}, "end_token_ids": [1], "hints": []}
        return SeamServer(rollout.actor_rollout_ref.rollout, handle)

    return build


async def ask(server: SeamServer, **more: Any) -> TokenOutput:
    params = {"temperature": 0.9, "top_p": 1.0, "top_k": -1, "logprobs": True}
    asked = {"prompt_ids": [2, 3], "sampling_params": params, "image_data": None, **more}
    return await server.generate("request", **asked)


def test_the_server_answers_as_verls_do(server: Callable[..., Any]) -> None:
    asked = server(errors.BackendError("once"), sample())
    output = asyncio.run(ask(asked, video_data=None))
    assert isinstance(output, TokenOutput)
    assert (output.token_ids, output.log_probs) == ([7, 1], [-0.5, -0.25])
    asyncio.run(asked.raise_failed())  # what was tried again did not fail


def test_a_generation_that_fails_for_good_is_told_to_the_trainer(
    server: Callable[..., Any],
) -> None:
    asked = server(errors.BackendError("first"), errors.BackendError("second"))
    with pytest.raises(errors.BackendError, match="second"):
        asyncio.run(ask(asked))
    with pytest.raises(errors.BackendError, match=r"1 of the generations failed .*second"):
        asyncio.run(asked.raise_failed())


def test_it_stops_where_verl_next_looks_at_the_replica(server: Callable[..., Any]) -> None:
    asked = server(errors.BackendError("first"), errors.BackendError("second"))
    with pytest.raises(errors.BackendError, match="second"):
        asyncio.run(ask(asked))
    replica = object.__new__(SeamReplica)  # verl makes one with Ray actors for servers
    replica.servers = [SimpleNamespace(raise_failed=SimpleNamespace(remote=asked.raise_failed))]
    for call in (replica.sleep, lambda: replica.set_global_steps(3)):
        with pytest.raises(errors.BackendError, match="1 of the generations failed for good"):
            asyncio.run(call())


def test_the_server_refuses_images(server: Callable[..., Any]) -> None:
    with pytest.raises(errors.UnsupportedError, match="image_data"):
        asyncio.run(ask(server(sample()), image_data=["picture"]))


def test_the_shims_own_trainers_get_a_replica_without_a_server(
    backend: RemoteRun, seam_config: Callable[..., Any]
) -> None:
    section = seam_config().actor_rollout_ref
    section.rollout.engine_kwargs.remote_rl.handle = backend.reconnect_handle()["run"]
    replica = SeamReplica(0, section.rollout, section.model, 1)
    asyncio.run(replica.launch_servers())
    assert isinstance(replica, RemoteReplica)
    assert replica.servers == []
    assert replica.server_handle is None
    asyncio.run(replica.sleep())


_REGISTERED = """
import sys, verl
from omegaconf import OmegaConf
from verl.remote_backend import RemoteBackendRegistry
from verl.workers.rollout.replica import get_rollout_replica_class
import shims.verl
shims.verl.register()
print(*RemoteBackendRegistry.list(), RemoteBackendRegistry.get_worker("remote_rl").__name__)
print(get_rollout_replica_class("remote_rl").__name__)
print("shims.verl.trainer" in sys.modules)
"""


@pytest.mark.parametrize(("without_v1", "trainer"), [(True, "False"), (False, "True")])
def test_registered_where_verl_has_the_seam(without_v1: bool, trainer: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _REGISTERED],
        env=verl_with_seam.environment(without_v1=without_v1),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    wanted = ["remote_rl", "SeamWorker", "SeamReplica", trainer]
    assert done.stdout.split() == wanted, done.stderr


def test_a_name_that_is_taken_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from shims.verl.remote_backend.registering import register_seam

    register_seam()
    register_seam()  # the same classes again
    monkeypatch.setitem(RemoteBackendRegistry._backends, "remote_rl", RemoteBackend)
    with pytest.raises(ValueError, match="remote_rl"):
        register_seam()
