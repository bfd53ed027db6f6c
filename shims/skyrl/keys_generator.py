"""Shim (loop side, above the client): SkyRL's keys of data, generator, engine and environment.

Imports the rules. `keys` says how the tables are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from ..common.rules import Irrelevant, Mapped, Only, Rule, Theirs, joined, under
from .rules import LAYOUT, MODEL, PRECISION, TEXT_ONLY

_ENGINE: Final = "generator.inference_engine"

_ELSEWHERE: Final = "the engine is the server's; trainer.remote.target says where it is"

_ENGINE_KEYS = under(
    _ENGINE,
    (Only(("bfloat16",), PRECISION), "model_dtype"),
    (Only((None,), PRECISION), "fp8_weight_sync_mode"),
    (Mapped("it names the shape of the sampling parameters, vLLM's"), "backend"),
    (
        LAYOUT,
        "run_engines_locally num_engines weight_sync_backend weight_transfer_threshold_cuda_ipc_GB "
        "delta_weight_sync delta_weight_sync.* tensor_parallel_size pipeline_parallel_size "
        "expert_parallel_size data_parallel_size vllm_v1_disable_multiproc "
        "enable_prefix_caching enable_chunked_prefill max_num_batched_tokens enforce_eager "
        "fully_sharded_loras gpu_memory_utilization "
        "offload_kv_for_weight_sync use_expandable_segments max_num_seqs "
        "distributed_executor_backend num_prefill prefill_init_kwargs decode_init_kwargs "
        "router_init_kwargs",
    ),
    (
        Only((False,), "the server returns no routed experts, and a Batch carries none"),
        "enable_return_routed_experts",
    ),
    (
        Only((False,), "logprobs are those of the full vocabulary; no support is returned"),
        "enable_return_sample_support_set",
    ),
    (
        Irrelevant("it scrapes vLLM's metrics from SkyRL's own cluster; the server has /metrics"),
        "enable_ray_prometheus_stats",
    ),
    (Only((None,), "requests go to the run's one model"), "served_model_name"),
    (Irrelevant("a run's model reads text alone"), "language_model_only"),
    (Only(({},), MODEL), "engine_init_kwargs"),
    (
        Only((None,), "how the engine speculates is the server's own configuration"),
        "speculative_config",
    ),
    (Only((None,), _ELSEWHERE), "external_proxy_url external_server_urls"),
    (Only((False,), _ELSEWHERE), "enable_pd"),
)


def _sampling(section: str) -> Iterable[tuple[str, Rule]]:
    return under(
        section,
        (Mapped("max_tokens of SamplingParams"), "max_generate_length"),
        (
            Only((1.0,), "remote_rl's samplers draw from the model's own distribution"),
            "repetition_penalty",
        ),
        (Mapped("a field of SamplingParams"), "temperature top_p min_p stop"),
        (Mapped("a field of SamplingParams; -1 is off"), "top_k"),
        (Mapped("whether the logprobs of what was drawn are asked for"), "logprobs"),
        (
            Mapped("vLLM's names that SamplingParams has; others are refused by name"),
            "additional_kwargs",
        ),
    )


TABLE: Mapping[str, Rule] = joined(
    under("data", (Theirs(), "train_data val_data dataloader.*")),
    _ENGINE_KEYS,
    _sampling("generator.sampling_params"),
    _sampling("generator.eval_sampling_params"),
    under(
        "generator",
        (
            Theirs(),
            "n_samples_per_prompt batched max_turns max_input_length chat_template.* "
            "chat_template_kwargs use_conversation_multi_turn "
            "append_eos_token_after_stop_str_in_multi_turn eval_n_samples_per_prompt "
            "zero_reward_on_non_stop apply_overlong_filtering step_wise_trajectories "
            "merge_stepwise_output",
        ),
        (
            Mapped("cache_salt of the requests, where the server takes that hint"),
            "use_cache_salt",
        ),
        (Only((False,), TEXT_ONLY), "vision_language_generator"),
    ),
    under("environment", (Theirs(), "*")),
)
