"""A push of more bytes than a server takes in one message."""

from __future__ import annotations

import re

import numpy as np
import pytest
from command_support import address, running

from remote_rl import SamplingParams, Session, connect
from remote_rl.errors import InvalidRequestError

SHAPES = {
    "model.embed_tokens.weight": (13, 4),
    "model.window.weight": (1024, 2, 4),
    "model.window.bias": (1024,),
    "lm_head.weight": (13, 1024),
    "lm_head.bias": (13,),
}
OPTIONS = {"vocab_size": 13, "window": 2, "embedding_size": 4, "hidden_size": 1024}


def sampled(rl: Session) -> list[list[int]]:
    params = SamplingParams(max_tokens=20, temperature=0.0)
    return [sample.tokens.tolist() for sample in rl.sampling.generate([[1]], params).result()[0]]


def test_a_push_larger_than_max_body_goes_in_parts() -> None:
    rng = np.random.default_rng(3)
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    assert sum(tensor.nbytes for tensor in tensors.values()) > 5 * (16 << 10)
    settings = [f"--set={name}={value}" for name, value in OPTIONS.items()]
    command = ("serve", "mock", "--port", "0", *settings)
    with running(*command) as large, running(*command, "--max-body", "16K") as small:
        with connect(address(large)) as rl:
            whole = rl.weights.push(tensors).result()
            wanted = sampled(rl)
        with connect(address(small)) as rl:
            before = sampled(rl)
            with pytest.raises(InvalidRequestError, match=re.escape("--max-body")):
                rl.weights.push(tensors).result()
            # a part of the size of --max-body is too large with its header; the push fails by it
            with pytest.raises(InvalidRequestError, match=re.escape("--max-body")):
                rl.weights.push(tensors, part_bytes=16 << 10).result()
            assert sampled(rl) == before != wanted
            receipt = rl.weights.push(tensors, part_bytes=12 << 10).result()
            assert sampled(rl) == wanted
    assert (receipt.bytes, receipt.tensors) == (whole.bytes, whole.tensors)
    assert receipt.source_fingerprint == whole.source_fingerprint
