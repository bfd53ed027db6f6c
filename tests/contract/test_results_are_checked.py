"""Every field of every result, receipt and report refuses, by name, what it can't hold."""

import attrs
import numpy as np
import pytest

from remote_rl.errors import InvalidRequestError
from remote_rl.ops import OPERATIONS
from remote_rl.protocol import Capabilities, ModelInfo, TokenizerFiles
from remote_rl.run_info import CheckpointList, FileChunk, FileList, RunInfo
from remote_rl.types import (
    CheckpointInfo,
    Devices,
    Done,
    ExportReceipt,
    ForwardBackwardResult,
    Generation,
    Group,
    LoadResult,
    OptimStepResult,
    Outputs,
    Ragged,
    Sample,
    SyncReceipt,
    WeightsVersion,
    Work,
)
from remote_rl.types.fields import KIND, LOCAL

ROWS = Ragged.from_rows([[-1.0], []], np.float32)
SAMPLE = Sample(
    tokens=[1, 2],
    logprobs=[-1.0, -2.0],
    drawn_logprobs=[-1.0, -2.0],
    finish_reason="stop",
    first_version=0,
    last_version=1,
    first_label="a",
    label=2,
    prompt_index=0,
    index=0,
)
CHECKPOINT = CheckpointInfo(name="a", version=1, optimizer=True, metadata={"step": [1, None]})
MODEL = ModelInfo(name="tiny", vocab_size=3, eos_token_ids=[0], context_length=8, parameters=2)
WORK = Work(tokens=3, flops=6.0, seconds=0.5)
DEVICES = Devices(kind="cpu", count=2, total=4, dtype="float32", peak_flops=1e12)
VALID = [
    Outputs(values={"logprobs": ROWS}, version=0, metrics={"n": 1}, work=WORK),
    ForwardBackwardResult(value=1.0, metrics={"n": 1}, version=0, work=WORK),
    OptimStepResult(grad_norm=1.0, skipped=False, version=0, metrics={"n": 1}, work=WORK),
    Done(version=0),
    CHECKPOINT,
    LoadResult(name="a", version=2, saved_version=1, optimizer=False, metadata={"a": 1}),
    ExportReceipt(name="e", path="/tmp/e", files=["config.json"], bytes=10, version=1),
    SyncReceipt(
        version=1,
        label="a",
        tensors=2,
        bytes=8,
        seconds=0.5,
        source_fingerprint="f",
        sampler_fingerprint="f",
    ),
    WeightsVersion(trainer=2, sampler=1, label="step"),
    SAMPLE,
    Group(prompt=[1], samples=[SAMPLE], temperature=1.0, prompt_index=0),
    Generation.from_samples([SAMPLE]),
    MODEL,
    TokenizerFiles(kind="bytes"),
    Capabilities(operations={"save"}),
    CheckpointList(checkpoints=[CHECKPOINT]),
    FileList(paths=["a"], sizes=[1], identity="x"),
    FileChunk(data=b"a", size=1),
    RunInfo(
        instance_id="i",
        backend="b",
        model=MODEL,
        capabilities=Capabilities(),
        protocol_versions=[1],
        software="remote_rl",
        versions=WeightsVersion(trainer=0),
        pristine=True,
        checkpoint_dir=False,
        driver=False,
        lost="yes",
        devices=DEVICES,
    ),
    WORK,
    DEVICES,
]
FIELDS = [
    (value, field.name)
    for value in VALID
    for field in attrs.fields(type(value))
    if field.metadata.get(KIND) != LOCAL[KIND]
]
IDS = [f"{type(value).__name__}.{name}" for value, name in FIELDS]


def given(value):
    return {field.name: getattr(value, field.name) for field in attrs.fields(type(value))}


def test_there_is_an_example_of_every_result():
    assert {row.response for row in OPERATIONS.values()} <= {type(value) for value in VALID}


@pytest.mark.parametrize(("value", "name"), FIELDS, ids=IDS)
@pytest.mark.parametrize("wrong", [object(), 0.5j, [[object()]], {1: "a"}], ids=repr)
def test_what_no_field_holds_is_refused(value, name, wrong):
    with pytest.raises(InvalidRequestError) as caught:
        type(value)(**{**given(value), name: wrong})
    assert caught.value.details or name in str(caught.value)


@pytest.mark.parametrize(("value", "name"), FIELDS, ids=IDS)
def test_text_for_a_number_and_a_number_for_text_are_refused(value, name):
    held = getattr(value, name)
    holds_text = isinstance(held, str) or (isinstance(held, tuple) and isinstance(held[0], str))
    if name in ("first_label", "label", "first_labels", "labels"):
        wrong = 0.5 if isinstance(held, (str, int, type(None))) else [0.5]
    elif holds_text:
        wrong = 3
    else:
        wrong = "m" if not isinstance(held, frozenset) else 3
    with pytest.raises(InvalidRequestError):
        type(value)(**{**given(value), name: wrong})


@pytest.mark.parametrize(
    ("value", "changes", "message"),
    [
        (VALID[0], {"metrics": 3}, "Outputs.metrics must be a mapping of names to numbers, not 3"),
        (VALID[0], {"metrics": {"n": "1"}}, "Outputs.metrics must be a mapping of names to num"),
        (VALID[0], {"values": {"logprobs": "nonsense"}}, r"Outputs.values\['logprobs'\]"),
        (VALID[0], {"values": {"logprobs": 3}}, r"Outputs.values\['logprobs'\] must be rows"),
        (VALID[1], {"value": True}, "ForwardBackwardResult.value must be a number, not True"),
        (VALID[2], {"grad_norm": None}, "OptimStepResult.grad_norm must be a number, not None"),
        (VALID[7], {"seconds": -1}, "SyncReceipt.seconds must be a finite number >= 0"),
        (VALID[7], {"label": [1]}, "SyncReceipt.label must be a whole number, a string or None"),
        (SAMPLE, {"label": [1, 2]}, "Sample.label must be a whole number, a string or None, not"),
        (MODEL, {"parameters": "many"}, "ModelInfo.parameters must be a whole number >= 1"),
        (WORK, {"tokens": -1}, "Work.tokens must be a whole number >= 0, not -1"),
        (WORK, {"seconds": -0.5}, "Work.seconds must be a finite number >= 0, not -0.5"),
        (WORK, {"flops": float("nan")}, "Work.flops must be a finite number >= 0, not nan"),
        (WORK, {"flops": None}, "Work needs flops, or the reason why it is unknown, and not both"),
        (WORK, {"reason": "no"}, "Work needs flops, or the reason why it is unknown, and not both"),
        (DEVICES, {"peak_flops": None}, "Devices needs peak_flops, or the reason why"),
        (DEVICES, {"peak_flops": 0}, "Devices.peak_flops must be a finite number > 0, not 0"),
        (DEVICES, {"total": 1}, "Devices.total is 1, less than the 2 that train"),
        (MODEL, {"eos_token_ids": ("a",)}, "ModelInfo.eos_token_ids must be a whole number >= 0"),
    ],
)
def test_the_refusal_says_what_was_wanted(value, changes, message):
    with pytest.raises(InvalidRequestError, match=message):
        attrs.evolve(value, **changes)


def test_numbers_of_any_library_become_plain_ones():
    values = {"logprobs": [np.array([-1.0, 2.0]), []]}
    outputs = Outputs(values=values, version=np.int32(1), metrics={"n": np.float32(2)})
    assert outputs.logprobs.dtype == np.float32
    assert type(outputs.metrics["n"]) is float
    result = ForwardBackwardResult(value=np.array(0.5), metrics={"nan": np.nan}, version=0)
    assert (type(result.value), result.value) == (float, 0.5)
    assert np.isnan(result.metrics["nan"])  # what an engine computed is told as it is
    assert np.isinf(OptimStepResult(grad_norm=np.inf, skipped=True, version=0).grad_norm)
    assert type(attrs.evolve(SAMPLE, label=np.int64(3)).label) is int
