"""Hypothesis strategies for the contract tests: ragged rows, batches and groups."""

import numpy as np
from hypothesis import strategies as st

from remote_rl.types import Batch, Group, Sample

ids = st.integers(0, 2**31 - 1)
rows = st.lists(st.lists(ids, max_size=6), max_size=6)
floats = st.floats(-100, 100, width=32)


def picks(count):
    """Row indices below `count`, some from the end; none where there are no rows."""
    return st.lists(st.integers(-count, count - 1), max_size=6) if count else st.just([])


@st.composite
def batches(draw, min_rows=0):
    """A batch with every optional field there or not, sharing some prompts."""
    prompts = draw(st.lists(st.lists(ids, min_size=1, max_size=4), min_size=1, max_size=4))
    responses = draw(st.lists(st.lists(ids, max_size=5), min_size=min_rows, max_size=6))
    count = len(responses)

    def per_token(values):
        return [draw(st.lists(values, min_size=len(r), max_size=len(r))) for r in responses]

    fields = {}
    for name in ("importance_weights", "advantages", "old_logprobs", "sampling_logprobs"):
        if draw(st.booleans()):
            fields[name] = per_token(floats)
    if draw(st.booleans()):
        fields["mask"] = per_token(st.integers(0, 1))
    if draw(st.booleans()):
        fields["policy_version"] = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    if draw(st.booleans()):
        fields["extras"] = {
            "uid": np.array([f"u{index}" for index in range(count)], object),
            "reward": np.arange(count, dtype=np.float32),
        }
    return Batch(
        prompts=prompts,
        prompt_index=draw(
            st.lists(st.integers(0, len(prompts) - 1), min_size=count, max_size=count)
        ),
        responses=responses,
        temperature=draw(
            st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=count, max_size=count)
        ),
        **fields,
    )


def sample(tokens, logprobs=None, prompt_index=0, index=0, version=3, **fields):
    """A sample with the fields that a test does not care about filled in."""
    return Sample(
        tokens=tokens,
        logprobs=logprobs,
        finish_reason=fields.pop("finish_reason", "stop"),
        first_version=version,
        last_version=fields.pop("last_version", version),
        prompt_index=prompt_index,
        index=index,
        **fields,
    )


def two_groups(logprobs=True):
    """Prompts [1, 2] and [3] with two samples each, the last of them empty."""
    tokens = [[[10, 11, 12], [13]], [[14, 15], []]]
    return [
        Group(
            prompt=prompt,
            samples=[
                sample(
                    tokens[place][index],
                    [-0.5] * len(tokens[place][index]) if logprobs else None,
                    prompt_index=place,
                    index=index,
                    version=place + 1,
                )
                for index in range(2)
            ],
            temperature=temperature,
            prompt_index=place,
        )
        for place, (prompt, temperature) in enumerate([([1, 2], 0.7), ([3], 0.0)])
    ]
