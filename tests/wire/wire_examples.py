"""Objects of every class that may cross the wire, and what makes two of them the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from remote_rl import errors, losses, messages, requests, run_info
from remote_rl.protocol import Capabilities, ModelInfo, TokenizerFiles
from remote_rl.types import (
    AdamW,
    Batch,
    Devices,
    Piece,
    Ragged,
    SamplingParams,
    Tensor,
    TensorForm,
    Work,
)
from remote_rl.types import results as kinds
from remote_rl.types.fields import KIND
from remote_rl.types.generation import Generation

PIECE = Piece(offset=0, data=np.zeros(1, np.uint8))
RESPONSES = Ragged.from_rows([[5, 6, 7], [], [8]], np.int32)
FLOATS = RESPONSES.with_values(np.array([0.5, -1.25, 3e-8, -0.0], np.float32))
BATCH = Batch(
    prompts=[[1, 2], [3]],
    prompt_index=[0, 1, 1],
    responses=RESPONSES,
    temperature=[1.0, 0.5, 2.0],
    mask=RESPONSES.with_values(np.array([1, 0, 1, 1], np.uint8)),
    importance_weights=FLOATS,
    advantages=FLOATS,
    old_logprobs=FLOATS,
    ref_logprobs=FLOATS,
)
LEASED = {"client_id": "c-1", "instance_id": "i-1", "acknowledged": [("training", 3)]}
VERSIONS = kinds.WeightsVersion(trainer=4, sampler=None, label="step 4")
CHECKPOINT = kinds.CheckpointInfo(
    name="first", version=4, optimizer=True, metadata={"step": 4, "seen": [1, 2]}, bytes=10
)
GENERATION = Generation(
    tokens=RESPONSES,
    logprobs=FLOATS,
    finish_reason=np.array([0, 2, 1], np.uint8),
    first_version=np.array([1, 1, 2]),
    last_version=np.array([1, 2, 2]),
    first_labels=(None, 1, "b"),
    labels=(None, "a", 7),
    prompt_index=np.array([0, 0, 1], np.int32),
    index=np.array([0, 1, 0], np.int32),
)
INFO = run_info.RunInfo(
    instance_id="i-1",
    backend="mock",
    model=ModelInfo(name="tiny", vocab_size=256, eos_token_ids=(0,), parameters=10),
    capabilities=Capabilities(operations={"forward", "save"}, outputs={"logprobs"}),
    protocol_versions=(1,),
    software="remote_rl 0",
    versions=VERSIONS,
    pristine=False,
    checkpoint_dir=True,
    driver=True,
    devices=Devices(kind="cpu", count=2, dtype="float32", peak_flops=None, reason="it is a CPU"),
)
DISTRIBUTION = run_info.Distribution(bounds=(0.5, 2), counts=(1, 0, 3), total=40.25)
OPERATION = run_info.OperationStatus(
    name="generate",
    queued=1,
    running=2,
    succeeded=3,
    failed={"BackendError": 4},
    queue_seconds=DISTRIBUTION,
    run_seconds=DISTRIBUTION,
    received_bytes=5,
    sent_bytes=6,
)
STATUS = run_info.RunStatus(
    instance_id="i-1",
    backend="mock",
    model="tiny",
    software="remote_rl 0",
    uptime=12.5,
    versions=VERSIONS,
    driver=True,
    clients=2,
    paused=False,
    operations=[OPERATION],
    generated_samples=7,
    generated_tokens=8,
    staleness=DISTRIBUTION,
    recent_mean=0.5,
    recent_max=3,
    last_failure=run_info.FailureStatus(
        operation="generate", error="BackendError", seconds_ago=1.5
    ),
)
AGGREGATION = losses.sequence_mean_token_sum_norm(width=8, denominator=3)
_KL = losses.KL(0.1, estimator="k1+", aggregation="sum")
_ENTROPY = losses.Entropy(0.01)
FAILURE = errors.DirtyGradientsError("spoilt", first_failure="forward_backward", row=3)
FAILURE.__cause__ = errors.BackendError("out of memory", worker=1, free=float("nan"))

EXAMPLES: tuple[Any, ...] = (
    RESPONSES,
    Ragged.from_rows([], np.int32),
    BATCH,
    SamplingParams(n=2, max_tokens=9, stop=("a", "\x00ü"), seed=2**63 - 1, top_k=3),
    SamplingParams(max_tokens=9, min_tokens=2, stop=("a",), include_stop=True),
    AdamW(lr=1e-5, max_grad_norm=1.0),
    Tensor(data=np.arange(6, dtype=np.uint16).reshape(2, 3), dtype="bfloat16"),
    Tensor(data=np.float64(3.5), dtype="float64"),
    Tensor(data=np.zeros((0, 4), np.float16), dtype="float16"),
    TensorForm(shape=(), dtype="float8_e5m2"),
    Piece(offset=2**40, data=np.arange(5, dtype=np.uint8)),
    CHECKPOINT,
    VERSIONS,
    INFO.capabilities,
    INFO.model,
    INFO,
    INFO.devices,
    Devices(kind="NVIDIA H200", count=8, total=16, dtype="bfloat16", peak_flops=989e12),
    Work(tokens=3, flops=1e15, seconds=0.25),
    Work(tokens=0, flops=None, seconds=0.0, reason="its experts"),
    DISTRIBUTION,
    OPERATION,
    STATUS.last_failure,
    STATUS,
    # messages
    messages.Describe(),
    messages.Observe(),
    messages.Attach(client_id="c-1", protocol_versions=(1, 2), start="base", epoch=2),
    messages.Grant(
        client_id="c-1", instance_id="i-1", epoch=1, role="driver", lease_seconds=60, info=INFO
    ),
    messages.Occupied(remaining=3.5, renewals=2),
    messages.Renew(**LEASED),
    messages.Renewed(lease_seconds=60),
    messages.Submit(
        **LEASED,
        operation="forward_backward",
        number=2**53,
        request=requests.ForwardBackward(batch=BATCH, loss=losses.PPO()),
        digest="ab",
        deadline=3.0,
        linger=0.05,
    ),
    messages.Busy(kept=5 << 30, budget=4 << 30, retry_after=5.0),
    messages.Outcome(stream="training", number=1, done=True, result=kinds.Done(version=3)),
    messages.Outcome(stream="training", number=1, done=True, error=FAILURE),
    messages.ProgressReport(stream="training", number=1, done=3, total=None, what="loading"),
    messages.PartialSamples(number=1, start=0, samples=GENERATION),
    messages.Wait(**LEASED, timeout=20.0, cursors={"3": 4}),
    messages.Waited(
        outcomes=[messages.Outcome(stream="sampling", number=1, done=True, result=GENERATION)],
        partials=[messages.PartialSamples(number=2, start=1, samples=GENERATION)],
    ),
    messages.Cancel(**LEASED, stream="training", number=4, operation="forward"),
    messages.Cancelled(cancelled=True),
    messages.Detach(**LEASED),
    messages.Detached(),
    # losses
    AGGREGATION,
    _KL,
    _ENTROPY,
    losses.PPO(aggregation=AGGREGATION, kl=_KL, entropy=_ENTROPY, log_ratio_clamp=(None, 10.0)),
    losses.CISPO(clip_low=None),
    losses.ImportanceSampling(ratio="sequence", log_ratio_clamp=None),
    losses.Reinforce(scale=0.25),
    losses.CrossEntropy(aggregation="sum"),
    losses.Cotangents({"logprobs": FLOATS}, version=3),
    # requests
    requests.Forward(batch=BATCH, outputs={"logprobs", "entropy"}, policy="reference"),
    requests.ForwardBackward(batch=BATCH, loss=losses.CrossEntropy()),
    requests.OptimStep(optimizer=AdamW(lr=0.1)),
    requests.ZeroGrad(),
    requests.Snapshot(name="a"),
    requests.RestoreSnapshot(name="a"),
    requests.DropSnapshot(name="a"),
    requests.SetReference(source="current"),
    requests.Save(name="a", metadata={"nested": {"list": [1, "b", None, True]}, "#": 1, "@": 2}),
    requests.Load(name="a", optimizer=False),
    requests.Checkpoints(),
    requests.Delete(name="a"),
    requests.Export(name="a"),
    requests.Abandon(reason="ValueError: no"),
    requests.Generate(prompts=[[1, 2], [3]], params=SamplingParams(max_tokens=4)),
    requests.FinishSession(session_id="s"),
    requests.Abort(request_ids=["c-1:sampling:3"]),
    requests.Abort(),
    requests.Pause(),
    requests.Resume(),
    requests.ResetPrefixCache(),
    requests.Sync(in_flight="abort", label=3),
    requests.Push(tensors={"w": np.ones((2, 2), np.float32), "#": np.zeros(1, np.int8)}),
    requests.Push(transfer="t", label="a"),
    requests.PushPart(transfer="t", forms={"w": TensorForm(shape=(2, 0), dtype="bfloat16")}),
    requests.PushPart(
        transfer="t", pieces={"w": Piece(offset=8, data=np.arange(4, dtype=np.uint8)), "#": PIECE}
    ),
    requests.Version(),
    requests.Info(),
    requests.Tokenizer(),
    requests.Reset(),
    requests.Sleep(half="training"),
    requests.Wake(half="sampling"),
    requests.ListFiles(kind="export", name="a"),
    requests.ReadFile(kind="checkpoint", name="a", path="model/x.bin", offset=0, length=9),
    requests.ReadFile(kind="export", name="a", path="x", offset=1, length=9, identity="x"),
    # responses
    GENERATION,
    Generation.from_samples([]),
    TokenizerFiles(kind="huggingface", files={"tokenizer.json": np.arange(3, dtype=np.uint8)}),
    kinds.Done(version=1),
    kinds.ExportReceipt(name="a", path="/x/a", files=("b",), bytes=3, version=1),
    kinds.ForwardBackwardResult(value=0.1 + 0.2, metrics={"tokens": 4.0}, version=1),
    kinds.LoadResult(
        name="a", metadata={"x": [1, [2]]}, version=2, saved_version=1, optimizer=True
    ),
    kinds.OptimStepResult(grad_norm=float("inf"), skipped=True, version=1),
    kinds.OptimStepResult(grad_norm=float("nan"), skipped=True, version=1),
    kinds.Outputs(values={"logprobs": FLOATS, "entropy": FLOATS}, version=1, metrics={"n": 1.0}),
    kinds.SyncReceipt(
        version=1,
        label="a",
        tensors=2,
        bytes=3,
        seconds=0.5,
        source_fingerprint="f",
        sampler_fingerprint="f",
    ),
    run_info.CheckpointList(checkpoints=[CHECKPOINT]),
    run_info.FileChunk(data=b"\x00\xff", size=2),
    run_info.FileList(paths=("a/b",), sizes=(3,), identity="x"),
)


def assert_same(left: Any, right: Any, place: str = "") -> None:
    """Equal in class, dtype, shape and every bit, field by field, except what is never sent."""
    assert type(left) is type(right), place
    if isinstance(left, np.ndarray):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), place
        assert left.tobytes() == right.tobytes(), place
    elif isinstance(left, errors.RemoteRLError):
        assert str(left.to_wire()) == str(right.to_wire()), place
    elif attrs.has(type(left)):
        for field in attrs.fields(type(left)):
            if field.init and field.metadata.get(KIND) != "local":
                one, other = getattr(left, field.name), getattr(right, field.name)
                assert_same(one, other, f"{place}.{field.name}")
    elif isinstance(left, Mapping):
        assert left.keys() == right.keys(), place
        for key in left:
            assert_same(left[key], right[key], f"{place}[{key!r}]")
    elif isinstance(left, (tuple, list)):
        assert len(left) == len(right), place
        for index, (one, other) in enumerate(zip(left, right)):
            assert_same(one, other, f"{place}[{index}]")
    elif isinstance(left, float):
        assert repr(left) == repr(right), place  # nan is nan, and -0.0 is not 0.0
    else:
        assert left == right, place
