"""Shim (loop side, above the client): verl's keys of the rollout.

Imports the rules. `keys` says how the tables are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..common.rules import Irrelevant, Mapped, Only, Rule, Theirs, joined, under
from . import NAME
from .rules import CALLED, LAYOUT, PRECISION, REMOTE_LAYOUT, UNREAD, by_mode

_ROLLOUT: Final = "actor_rollout_ref.rollout"

_SAMPLING = Mapped("a field of SamplingParams")
_LENGTHS = Mapped("the longest response, by the rule of verl's own vLLM server")
_ON_SERVER = Irrelevant("weights go from trainer to sampler on the server")
_ENGINES = "for an engine inside verl; the server's own configuration sets its engine up"
_SGLANG = Irrelevant("verl's sglang engine alone reads it")
_ONE_REPLICA = "to verl the server is one replica, wherever its own configuration lays it out"
_OFF = Irrelevant("read with the section's own switch only, which is refused")

_OWN_KEYS = under(
    _ROLLOUT,
    (CALLED, "_target_"),
    (_SAMPLING, "top_p"),
    (Mapped("a field of SamplingParams; -1 and 0 are off"), "top_k"),
    (Mapped("a field of SamplingParams and of the batch; must be positive"), "temperature"),
    (_LENGTHS, "prompt_length response_length max_model_len"),
    (Mapped("whether samples carry logprobs"), "calculate_log_probs"),
    (Mapped("processed_logprobs wherever logprobs are asked for"), "logprobs_mode"),
    (Mapped("sleep('sampling') between steps, where the server can"), "free_cache_engine"),
    (Mapped("how many responses a prompt gets, one request each, by verl's agent loop"), "n"),
    (Mapped("the options of the shim itself"), f"engine_kwargs.{NAME}"),
    (Only(({},), _ENGINES), "engine_kwargs.vllm engine_kwargs.sglang engine_kwargs.trtllm"),
    (Theirs(), "mode custom disable_log_stats"),
    (
        LAYOUT,
        "gpu_memory_utilization standalone_gpu_memory_utilization enforce_eager "
        "cudagraph_capture_sizes max_num_batched_tokens max_num_seqs enable_chunked_prefill "
        "enable_prefix_caching scheduling_policy load_format layered_summon layer_name_map "
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
        "log_prob_max_token_len_per_gpu multi_stage_wake_up skip_tokenizer_init "
        "enable_sleep_mode moe_tensor_parallel_size sglang_engine_mode",
    ),
    (Irrelevant("images are refused, row by row"), "limit_images"),
    (Irrelevant("profiling starts by global_profiler.steps, which is refused"), "profiler.*"),
    (Irrelevant("verl copies it from model.mtp, whose switch is refused"), "mtp.*"),
    (Irrelevant("verl copies it from the engine's qat, whose switch is refused"), "qat.*"),
    (
        _SGLANG,
        "server._target_ server.timeout server.max_attempts server.retry_delay "
        "server.max_connections server.max_start_wait_time",
    ),
    (Only((NAME,), f"trainer mode {NAME!r} samples from the server it trains on"), "name"),
    (
        Only((1,), REMOTE_LAYOUT),
        "tensor_model_parallel_size data_parallel_size expert_parallel_size "
        "pipeline_model_parallel_size",
    ),
    (Only(("bfloat16",), PRECISION), "dtype"),
    (Only((42,), "the server's run has its own seed; set that"), "seed"),
    (Only((False,), "the server's run has its own seed"), "full_determinism"),
    (
        Only((True,), "verl's V1 trainer reads it nowhere; it samples by rollout.temperature"),
        "do_sample",
    ),
    (Only((False,), "the server ends a response at its end-of-sequence ids"), "ignore_eos"),
    (
        Only((1.0,), "it changes the distribution; the shim does not carry it to the server"),
        "repetition_penalty",
    ),
    (Only((False,), "the server returns no routed experts"), "enable_rollout_routing_replay"),
    (Only((0,), "the server returns no routed experts"), "moe_load_balance_metrics_interval"),
    (Only((0,), "verl reads it in the sglang engine alone"), "over_sample_rate"),
    (
        Only((None,), "the server decides how it serves the weights"),
        "quantization quantization_config_file",
    ),
    (Only((None,), "agent loops talk to the server themselves"), "router_config_path"),
    (
        Only((None,), "weights go from trainer to sampler on the server"),
        "checkpoint_manager_class",
    ),
    (
        by_mode(
            sync=Only((0,), "standalone rollout nodes belong to the separate_async mode"),
            separate_async=Only((1,), _ONE_REPLICA),
        ),
        "nnodes",
    ),
    (
        by_mode(
            sync=Irrelevant("verl reads it for standalone rollout nodes only"),
            separate_async=Only((1,), _ONE_REPLICA),
        ),
        "n_gpus_per_node",
    ),
)

_NESTED_KEYS = under(
    _ROLLOUT,
    (
        CALLED,
        "val_kwargs._target_ multi_turn._target_ agent._target_ agent.custom_async_server._target_ "
        "trace._target_ checkpoint_engine._target_ prometheus._target_",
    ),
    (_SAMPLING, "val_kwargs.temperature val_kwargs.top_p val_kwargs.top_k"),
    (Mapped("how many responses a prompt of the validation gets"), "val_kwargs.n"),
    (
        Irrelevant("verl's V1 trainer samples by val_kwargs.temperature alone, and checks it only"),
        "val_kwargs.do_sample",
    ),
    (
        Theirs(),
        "multi_turn.max_assistant_turns multi_turn.tool_config_path multi_turn.function_tool_path "
        "multi_turn.max_user_turns multi_turn.max_parallel_calls "
        "multi_turn.max_tool_response_length multi_turn.tool_response_truncate_side "
        "multi_turn.format",
    ),
    (
        Irrelevant("V1 picks the agent loop by agent.default_agent_loop or the row's agent_name"),
        "multi_turn.enable",
    ),
    (
        UNREAD,
        "multi_turn.use_inference_chat_template multi_turn.tokenization_sanity_check_mode "
        "multi_turn.num_repeat_rollouts",
    ),
    (
        Theirs(),
        "agent.num_workers agent.default_agent_loop agent.agent_loop_config_path "
        "agent.agent_loop_manager_class",
    ),
    (
        Only((None,), "verl's V1 trainer reads it nowhere"),
        "agent.custom_async_server.path agent.custom_async_server.name",
    ),
    (
        Theirs(),
        "trace.project_name trace.experiment_name trace.backend trace.token2text "
        "trace.max_samples_per_step_per_worker",
    ),
    (
        by_mode(
            sync=Only(("naive",), "weights go from trainer to sampler on the server"),
            separate_async=Only((NAME,), "weights go from trainer to sampler on the server"),
        ),
        "checkpoint_engine.backend",
    ),
    (_ON_SERVER, "checkpoint_engine.update_weights_bucket_megabytes"),
    (
        Only(({},), "weights go from trainer to sampler on the server"),
        "checkpoint_engine.engine_kwargs",
    ),
    (
        Only((None,), "weights go from trainer to sampler on the server"),
        "checkpoint_engine.custom_backend_module",
    ),
    (Only((False,), "the server exports its own metrics, at /metrics"), "prometheus.enable"),
    (_OFF, "prometheus.port prometheus.file prometheus.served_model_name"),
    (Only((False,), REMOTE_LAYOUT), "disaggregation.enabled"),
    (
        _OFF,
        "disaggregation._target_ disaggregation.prefill_replicas disaggregation.decode_replicas "
        "disaggregation.decode_tensor_model_parallel_size disaggregation.transfer_backend "
        "disaggregation.bootstrap_port disaggregation.ib_device disaggregation.mooncake_protocol",
    ),
)

TABLE: Mapping[str, Rule] = joined(_OWN_KEYS, _NESTED_KEYS)
