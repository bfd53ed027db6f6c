"""Arctic backend: vLLM's engine core in this process (imports flight, seeds, settings, drawing,
transfer, the contract, and vllm)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import vllm
from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.executor import Executor

from remote_rl.errors import InvalidRequestError
from remote_rl.types import SamplingParams

from ..weights.manifest import Manifest
from ..weights.sources import Source
from .drawing import KEY
from .flight import Drawn, Flight
from .seeds import sample_key
from .settings import SampleRequest, SamplerSettings
from .transfer import BACKEND, update_info

#: arguments of vLLM that are ours to set
_RESERVED = frozenset(
    {
        "model",
        "dtype",
        "max_model_len",
        "skip_tokenizer_init",
        "worker_extension_cls",
        "weight_transfer_config",
        "async_scheduling",
        "speculative_config",
        "generation_config",
        "logprobs_mode",
        "logits_processors",
        "scheduling_policy",
    }
)


class VllmCore:
    """Takes requests, and gives a token of each at every step. Used from one thread, that which
    made it. serial: numbers the weights that it holds."""

    def __init__(self, settings: SamplerSettings) -> None:
        config = _configuration(settings)
        self._client = InprocClient(config, Executor.get_class(config), False)
        self._client.collective_rpc("remote_rl_install", args=(0,))
        self._try()

    def _try(self) -> None:
        """Draws a token, so that what vLLM can't compute is known at the start."""
        request = SampleRequest(
            request_id="",
            tokens=[0],
            params=SamplingParams(max_tokens=1),
            seed=0,
            prompt_index=0,
            index=0,
        )
        self.add(Flight("trial", request, frozenset(), lambda result: None), 0)
        while not self.step():
            pass
        self.drop_cache()

    def add(self, flight: Flight, serial: int) -> None:
        """Takes a flight in. serial: of the weights that are served."""
        self._client.add_request(_core_request(flight, serial))

    def drop(self, numbers: list[str]) -> None:
        """Forgets flights; those that have ended by themselves too."""
        self._client.abort_requests(numbers)

    def step(self) -> list[Drawn]:
        """Computes one step."""
        return [_drawn(output) for output in self._client.get_output().outputs]

    def drop_cache(self) -> None:
        """Forgets all KV; what runs computes its own anew."""
        self._client.reset_prefix_cache(reset_running_requests=True)

    def clear_cache(self) -> None:
        """Forgets all KV, and makes its memory zero."""
        self.drop_cache()
        self._client.collective_rpc("remote_rl_clear_cache")

    def update(self, manifest: Manifest, source: Source, serial: int) -> str:
        """Takes weights over; the fingerprint of what was loaded."""
        told = update_info(manifest, source)
        answers = self._client.collective_rpc("remote_rl_update", args=(told, serial))
        return manifest.fingerprint if answers[0] is None else str(answers[0])

    def connect(self, invitation: Mapping[str, Any]) -> None:
        """Joins the group of the trainer's rank 0."""
        given = {"init_info": dict(invitation)}
        self._client.collective_rpc("init_weight_transfer_engine", kwargs=given)

    def sleep(self) -> None:
        """UNVERIFIED on GPUs. Gives their memory up. vLLM's level 1 keeps the weights in host
        memory; level 2 would lose them, and nobody knows yet whether a delivery comes before the
        next generate. What runs computes its KV anew."""
        self.drop_cache()
        self._client.engine_core.model_executor.sleep(1)

    def wake(self, whole: bool) -> None:
        """UNVERIFIED on GPUs. Takes the weights' memory again or, whole, the cache's too."""
        executor = self._client.engine_core.model_executor
        tags = executor.sleeping_tags if whole else executor.sleeping_tags & {"weights"}
        if tags:
            executor.wake_up(sorted(tags))
        if whole:
            self.clear_cache()  # its memory is another, and holds whatever was there

    def close(self) -> None:
        """Ends vLLM's workers."""
        self._client.shutdown()


def _configuration(settings: SamplerSettings) -> Any:
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for name in settings.options:
        if name in _RESERVED or name not in known:
            raise InvalidRequestError(
                f"sampling option {name!r} "
                + ("is set by the backend" if name in _RESERVED else "is none of vLLM's"),
                field=name,
            )
    given: dict[str, Any] = {
        "max_num_seqs": settings.sequences,
        "max_num_batched_tokens": settings.batched_tokens,
        "kv_cache_memory_bytes": settings.cache_bytes,
        "gpu_memory_utilization": settings.memory_fraction,
        "tensor_parallel_size": settings.tensor_parallel,
        # in a Ray placement group vLLM would look for places of its own for the others
        "distributed_executor_backend": "mp" if settings.tensor_parallel > 1 else None,
        "enforce_eager": settings.eager,
        "enable_prefix_caching": settings.prefix_caching,
        "trust_remote_code": settings.trust_remote_code,
        "enable_sleep_mode": settings.device == "cuda",
        "disable_log_stats": True,
        "seed": 0,
        **settings.options,
    }
    arguments = EngineArgs(
        model=settings.model,
        dtype=settings.dtype,
        max_model_len=settings.context_length,
        skip_tokenizer_init=True,  # ids come in and go out; ends and stop strings are ours
        generation_config="vllm",  # no defaults of the model's for what the request leaves open
        scheduling_policy="priority",
        async_scheduling=False,  # one step at a time
        worker_extension_cls="backends.arctic.sampling.worker.SamplerWorker",
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        **{name: value for name, value in given.items() if value is not None},
    )
    return arguments.create_engine_config()


def _core_request(flight: Flight, serial: int) -> Any:
    request = flight.request
    params = request.params
    drawn = vllm.SamplingParams(
        temperature=min(params.temperature, 1.0),
        top_p=params.top_p,
        top_k=0 if params.top_k is None else params.top_k,
        min_p=params.min_p,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,  # leaves out the ids of stop_token_ids
        ignore_eos=True,
        stop_token_ids=sorted(flight.ends),
        logprobs=0,
        detokenize=False,
        extra_args={KEY: sample_key(request.seed, request.prompt_index, request.index)},
    )
    # vLLM raises temperatures below 0.01 to it, and refuses those above 2
    drawn.temperature = params.temperature
    salt = "" if params.cache_salt is None else params.cache_salt
    return EngineCoreRequest(
        request_id=flight.number,
        prompt_token_ids=request.tokens.tolist(),
        mm_features=None,
        sampling_params=drawn,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        # KV of other weights is never found, also where it can't be dropped yet
        cache_salt=f"{serial}:{salt}",
        data_parallel_rank=None,
        priority=-params.priority,  # vLLM's lower numbers come first
    )


def _drawn(output: EngineCoreOutput) -> Drawn:
    table, over = output.new_logprobs, output.finish_reason
    rows = [] if table is None else table.logprobs.tolist()
    return Drawn(output.request_id, output.new_token_ids, rows, None if over is None else str(over))
