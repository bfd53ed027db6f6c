"""Each semantic field of generates, aborts, syncs and pushes changes what the mock samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_proofs import Lab, Proof, check, outcome, until_started
from client_support import SessionFactory, learn

from remote_rl import Batch, SamplingParams, Tensor
from remote_rl.requests import Push, PushPart
from remote_rl.testing.conformance.messages import Messages
from remote_rl.types import Piece, TensorForm

PROMPTS = [[1], [2, 3]]
FIXED: dict[str, Any] = {"n": 4, "max_tokens": 8, "seed": 5}
SLOW = {"latency": {"token": 3600.0}}
TEXT = {"vocab_size": 259}
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")


def samples(lab: Lab, params: SamplingParams, prompts: Any = PROMPTS) -> Any:
    groups = lab.rl.sampling.generate(prompts, params).result(60)
    return [
        (
            sample.tokens.tolist(),
            None if sample.logprobs is None else sample.logprobs.tolist(),
            None if sample.drawn_logprobs is None else sample.drawn_logprobs.tolist(),
            sample.finish_reason,
            sample.label,
        )
        for group in groups
        for sample in group
    ]


def of_params(field: str, one: Any, other: Any, **options: Any) -> Proof:
    both = [SamplingParams(**{**FIXED, field: value}) for value in (one, other)]
    return Proof(samples, *both, options)


def aborted(lab: Lab, chosen: int) -> Any:
    """Which of two is done after an abort of one."""
    operations = [lab.rl.sampling.generate([[1]], SamplingParams(max_tokens=9)) for _ in range(2)]
    lab.rl.sampling.abort([operations[chosen].request_id]).result(60)
    operations[chosen].result(60)
    return [operation.done() for operation in operations]


def tensors(lab: Lab, value: float) -> dict[str, Any]:
    """Every tensor of the model, made of `value`."""
    return {
        name: np.sin(value * np.arange(weight.size)).reshape(weight.shape)
        for name, weight in lab.backend.training.policy.weights.items()
    }


def carry(lab: Lab, how: str, **fields: Any) -> Any:
    """A sync or a push, and which version an earlier generate ended with."""
    lab.rl.sampling.pause().result()
    operation = lab.rl.sampling.generate([[1]], SamplingParams(max_tokens=9))
    until_started(lab, "generate")
    learn(lab.rl, Batch(prompts=[[1]], prompt_index=[0], responses=[[2]], temperature=1.0))
    if how == "sync":
        lab.rl.weights.sync(**fields).result(60)
    else:
        lab.rl.weights.push(tensors(lab, 0.5), **fields).result(60)
    lab.rl.sampling.abort().result(60)
    return operation.result(60)[0][0].last_version


def labelled(lab: Lab, how: str, label: Any) -> Any:
    if how == "sync":
        receipt = lab.rl.weights.sync(label=label).result()
    else:
        receipt = lab.rl.weights.push(tensors(lab, 0.5), label=label).result()
    return receipt.label, samples(lab, SamplingParams(**FIXED))


def pushed(lab: Lab, value: float) -> Any:
    lab.rl.weights.push(tensors(lab, value)).result()
    return samples(lab, SamplingParams(**FIXED))


def raw(lab: Lab, tensor: Tensor) -> Any:
    """A push where each tensor repeats the one given."""
    every = {
        name: Tensor(data=np.resize(tensor.data, weight.shape), dtype=tensor.dtype)
        for name, weight in lab.backend.training.policy.weights.items()
    }
    receipt = outcome(lab.rl.weights.push(every))
    return receipt.source_fingerprint, samples(lab, SamplingParams(**FIXED))


def in_parts(lab: Lab, **changes: Any) -> Any:
    """A push in parts by hand, one of whose fields is changed: what became of it."""
    dtype, unit = changes.get("dtype", "uint8"), changes.get("unit", 3)
    shapes = {name: each.shape for name, each in lab.backend.training.policy.weights.items()}
    shapes["lm_head.bias"] = changes.get("shape", shapes["lm_head.bias"])
    forms = {name: TensorForm(shape=shape, dtype=dtype) for name, shape in shapes.items()}
    pieces = {
        name: Piece(offset=0, data=(unit * np.arange(form.nbytes) % 61).astype(np.uint8))
        for name, form in forms.items()
    }
    last = Piece(offset=changes.get("offset", 4), data=pieces["lm_head.bias"].data[4:])
    pieces["lm_head.bias"] = Piece(offset=0, data=pieces["lm_head.bias"].data[:4])
    send, named = Messages(lab.rl).unchecked, changes.get("transfer", "t")
    operations = [
        send("push_part", PushPart(transfer="t", forms=forms)),
        send("push_part", PushPart(transfer=named, pieces=pieces)),
        send("push_part", PushPart(transfer="t", pieces={"lm_head.bias": last})),
        send("push", Push(transfer=changes.get("commits", "t"))),
    ]
    ends = [outcome(operation) for operation in operations]
    failed = [end for end in ends if isinstance(end, tuple)]
    return failed, samples(lab, SamplingParams(**FIXED))


def of_parts(field: str, one: Any, other: Any) -> Proof:
    return Proof(lambda lab, value: in_parts(lab, **{field: value}), one, other)


def bits(values: list[int], dtype: str) -> Tensor:
    return Tensor(data=np.array(values, np.uint8), dtype=dtype)


PROOFS: dict[str, Proof] = {
    "SamplingParams.n": of_params("n", 4, 5),
    "SamplingParams.max_tokens": of_params("max_tokens", 8, 9),
    "SamplingParams.temperature": of_params("temperature", 1.0, 0.5),
    "SamplingParams.top_p": of_params("top_p", 1.0, 0.5),
    "SamplingParams.top_k": of_params("top_k", None, 2),
    "SamplingParams.min_p": of_params("min_p", 0.0, 0.5),
    "SamplingParams.stop": of_params("stop", (), LETTERS, **TEXT),
    "SamplingParams.min_tokens": of_params("min_tokens", 0, 8, eos_token_ids=(3,)),
    "SamplingParams.include_stop": Proof(
        lambda lab, include: samples(
            lab, SamplingParams(**FIXED, stop=LETTERS, include_stop=include)
        ),
        False,
        True,
        TEXT,
    ),
    "SamplingParams.stop_token_ids": of_params("stop_token_ids", (), (3, 4)),
    "SamplingParams.seed": of_params("seed", 5, 6),
    "SamplingParams.outputs": of_params("outputs", {"logprobs"}, {"logprobs", "drawn_logprobs"}),
    "Generate.prompts": Proof(
        lambda lab, prompts: samples(lab, SamplingParams(**FIXED), prompts), PROMPTS, [[1], [2, 4]]
    ),
    "Generate.params": of_params("seed", 7, 8),
    "Abort.request_ids": Proof(aborted, 0, 1, SLOW),
    "Sync.in_flight": Proof(lambda lab, how: carry(lab, "sync", in_flight=how), "keep", "abort"),
    "Sync.label": Proof(lambda lab, label: labelled(lab, "sync", label), 1, "two"),
    "Push.in_flight": Proof(lambda lab, how: carry(lab, "push", in_flight=how), "keep", "abort"),
    "Push.label": Proof(lambda lab, label: labelled(lab, "push", label), 1, "two"),
    "Push.tensors": Proof(pushed, 0.25, 0.5),
    "Push.transfer": of_parts("commits", "t", "u"),
    "PushPart.transfer": of_parts("transfer", "t", "u"),
    "PushPart.forms": of_parts("dtype", "uint8", "float16"),
    "PushPart.pieces": of_parts("unit", 3, 5),
    "TensorForm.shape": of_parts("shape", (12,), (3, 4)),
    "TensorForm.dtype": of_parts("dtype", "uint8", "float8_e5m2"),
    "Piece.offset": of_parts("offset", 4, 8),
    "Piece.data": of_parts("unit", 3, 7),
    "Tensor.data": Proof(raw, bits([0x38, 0x30], "float8_e5m2"), bits([0x30, 0x38], "float8_e5m2")),
    "Tensor.dtype": Proof(raw, bits([0x38, 0x30], "float8_e5m2"), bits([0x38, 0x30], "uint8")),
}


@pytest.mark.parametrize("field", PROOFS)
def test_the_field_changes_what_is_sampled(
    field: str, session_factory: SessionFactory, tmp_path: Path
) -> None:
    check(PROOFS[field], session_factory, tmp_path)
