"""Shim (loop side, above the client): what SkyRL's generators draw responses from.

Imports SkyRL's `InferenceEngineInterface`, remote_rl and what all shims share. It takes the place
of SkyRL's own client of inference engines: token ids in, token ids and logprobs out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from skyrl.backends.skyrl_train.inference_servers.base import (
    InferenceEngineInput,
    InferenceEngineInterface,
    InferenceEngineOutput,
)

from remote_rl import RunInfo, SamplingParams, Session, errors
from remote_rl.types import Sample

from ..common.drawing import draw
from .sampling import to_output, to_params

log = logging.getLogger("remote_rl.shims.skyrl")

T = TypeVar("T")

#: what a batch may hold
_TAKEN = frozenset({"prompt_token_ids", "sampling_params", "session_ids", "cache_salt"})
_TOKENS_ONLY = (
    "the run takes and gives token ids; use SkyRLGymGenerator, or another generator that calls "
    "generate() with prompt_token_ids"
)
_SYNCED = (
    "the run's trainer and sampler exchange weights themselves; let the trainer's "
    "save_weights_for_sampler do it"
)


class RemoteSampler(InferenceEngineInterface):
    """SkyRL's inference engine over a run.

    session: of the run; whoever opened it closes it. tokenizer: decodes responses to text, which
    environments read. model_name: what generators may name as `model`. info: of the run.
    attempts: tries of one response before its failure is raised. resumes: a response that the run
    ends early (a sync with in_flight "abort") is continued with the weights that are there then,
    and the caller sees one response. end_token_ids: end-of-sequence ids of SkyRL's tokenizer that
    the server's model does not end a response at by itself.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Any,
        *,
        model_name: str,
        info: RunInfo,
        attempts: int = 3,
        resumes: bool = False,
        end_token_ids: tuple[int, ...] = (),
    ) -> None:
        self._session = session
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._operations = info.capabilities.operations
        self._hints = info.capabilities.sampling_options & {"session_id", "cache_salt"}
        self._world_size = 1 if info.devices is None else info.devices.total
        self._attempts = attempts
        self._resumes = resumes
        self._end_token_ids = end_token_ids
        versions = info.versions
        self._weight_version = versions.trainer if versions.sampler is None else versions.sampler
        self._sleeping = False
        self._versions: list[tuple[int, int]] = []

    # -- drawing ------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """The model's name in SkyRL's configuration."""
        return self._model_name

    async def generate(
        self, input_batch: InferenceEngineInput, model: str | None = None
    ) -> InferenceEngineOutput:
        """One response to each of `prompt_token_ids`, each a request of its own, all in flight at
        once.

        sampling_params: in vLLM's shape. session_ids, cache_salt: hints, passed on where the server
        takes them. Every other field must be empty.
        Logprobs are those of the distribution drawn from, at the sampling temperature. A response
        whose engine fails is drawn again, `attempts` times at most; a failure that stays is raised,
        and ends the other requests.
        Raises `UnsupportedError` and `InvalidRequestError` for what can't be honoured.
        """
        self._refuse_batch(input_batch, model)
        prompts = input_batch["prompt_token_ids"]
        given = input_batch.get("sampling_params") or {}
        requests = [
            self._params(given, session_id, input_batch.get("cache_salt"))
            for session_id in _session_ids(input_batch, len(prompts))
        ]
        self._sleeping = False  # a request wakes the sampler
        samples = await _together(
            self._draw(prompt, params) for prompt, params in zip(prompts, requests, strict=True)
        )
        self._versions += [(sample.first_version, sample.last_version) for sample in samples]
        return to_output(samples, self._params(given), self._tokenizer, given)

    def _params(
        self, given: Mapping[str, Any], session_id: Any = None, cache_salt: str | None = None
    ) -> SamplingParams:
        if session_id is not None:
            session_id = str(session_id)
        return to_params(
            given,
            end_token_ids=self._end_token_ids,
            session_id=session_id if "session_id" in self._hints else None,
            cache_salt=cache_salt if "cache_salt" in self._hints else None,
        )

    async def _draw(self, prompt: Iterable[int], params: SamplingParams) -> Sample:
        return await draw(
            self._session, list(prompt), params, attempts=self._attempts, resumes=self._resumes
        )

    def _refuse_batch(self, batch: Mapping[str, Any], model: str | None) -> None:
        if model is not None and model != self._model_name:
            raise errors.UnsupportedError(
                f"generate was asked for the model {model!r}; the run samples one model, "
                f"{self._model_name!r}, so leave `model` out or name that one"
            )
        if batch.get("prompt_token_ids") is None:
            raise errors.InvalidRequestError(
                "generate takes prompt_token_ids, and the batch holds none; apply the chat "
                "template with tokenize=True, and pass no text as `prompts`",
                field="prompt_token_ids",
            )
        for name, value in batch.items():
            if name not in _TAKEN and value:
                raise errors.UnsupportedError(
                    f"generate was given {name}, which the run can't carry; leave it out, and "
                    "switch off the setting that asks for it"
                )

    async def finish_session(self, session_id: str) -> None:
        """Says that no more requests of a session come, where the server wants to know.

        A failure is logged, not raised: SkyRL's generators call this where a trajectory ends,
        whatever its end is, and a hint's failure must not take the place of it.
        """
        if "finish_session" not in self._operations or not session_id:
            return
        try:
            await self._session.sampling.finish_session(str(session_id))
        except errors.RemoteRLError as error:
            log.warning("the server was not told that session %s has ended: %s", session_id, error)

    # -- around a sync ------------------------------------------------------------------------

    async def pause_generation(self) -> None:
        """Holds every response at its next token, until `resume_generation`; none ends early."""
        await self._session.sampling.pause()

    async def resume_generation(self) -> None:
        """Lets them go on, with the weights that are there now."""
        await self._session.sampling.resume()

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Drops what the sampler cached of earlier prompts."""
        if reset_running_requests:
            raise errors.UnsupportedError(
                "reset_prefix_cache(reset_running_requests=True) is not supported: what running "
                "requests keep over a sync is for trainer.remote.in_flight to say; call it without"
            )
        await self._session.sampling.reset_prefix_cache()

    @property
    def weight_version(self) -> int:
        """The sampler's version at the start plus one for every sync since; SkyRL's generators
        salt their prompts with it."""
        return self._weight_version

    def increment_weight_version(self) -> None:
        """To be called once after every sync; a sync has also woken the sampler."""
        self._weight_version += 1
        self._sleeping = False

    def rollout_metrics(self) -> dict[str, float]:
        """Which versions of the weights drew the responses since the last call: the first and the
        last one, and the share of responses that more than one drew. Empty without responses."""
        versions, self._versions = self._versions, []
        if not versions:
            return {}
        return {
            "generate/policy_version_min": float(min(first for first, _ in versions)),
            "generate/policy_version_max": float(max(last for _, last in versions)),
            "generate/policy_versions_mixed": (
                sum(first != last for first, last in versions) / len(versions)
            ),
        }

    # -- life cycle ---------------------------------------------------------------------------

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        """Lets the sampler give its memory back where it can; the next weights or generation wake
        it. vLLM's level and tags say how, and that is the server's matter."""
        if "sleep" in self._operations:
            await self._session.sleep("sampling")
            self._sleeping = True

    async def wake_up(self, *args: Any, **kwargs: Any) -> None:
        """Wakes the sampler ahead of time, all of it whatever the tags are."""
        if "wake" in self._operations:
            await self._session.wake("sampling")
        self._sleeping = False

    async def is_sleeping(self) -> bool:
        """Whether `sleep` was called here, and nothing that wakes the sampler since."""
        return self._sleeping

    async def get_world_size(self) -> tuple[int, int]:
        """(devices of the run, the same number): it stands for one server."""
        return self._world_size, self._world_size

    async def teardown(self) -> None:
        """Nothing: the session ends where it was opened."""

    # -- what a run has no counterpart for ----------------------------------------------------

    def get_endpoint_url(self) -> str:
        """Refused: there is no OpenAI-compatible endpoint."""
        _refuse("get_endpoint_url", _TOKENS_ONLY)

    async def chat_completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        """Refused: text in, text out."""
        _refuse("chat_completion", _TOKENS_ONLY)

    async def completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        """Refused: text in, text out."""
        _refuse("completion", _TOKENS_ONLY)

    async def render_chat_completion(self, request_payload: dict[str, Any]) -> dict[str, Any]:
        """Refused: the server applies no chat template."""
        _refuse("render_chat_completion", _TOKENS_ONLY)

    async def update_named_weights(self, request: Any) -> NoReturn:
        """Refused: no weights pass through here."""
        _refuse("update_named_weights", _SYNCED)

    async def load_lora_adapter(self, lora_name: str, lora_path: str) -> dict[str, Any]:
        """Refused: the server holds the policy, adapters of its own included."""
        _refuse("load_lora_adapter", f"a run samples one model; {_SYNCED}")


def _refuse(method: str, because: str) -> NoReturn:
    raise errors.UnsupportedError(f"{method} is not supported with remote_rl: {because}")


def _session_ids(batch: Mapping[str, Any], prompts: int) -> list[Any]:
    given = batch.get("session_ids")
    if given is None:
        return [None] * prompts
    if len(given) != prompts:
        raise errors.InvalidRequestError(
            f"generate was given {len(given)} session_ids for {prompts} prompts; give one a "
            "prompt, or none at all",
            field="session_ids",
        )
    return list(given)


async def _together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; with the first failure the others are cancelled and have ended before
    it is raised."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
