"""Which rank computes which rows, in which pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backends.arctic.plan import Share, shares
from remote_rl import Batch
from remote_rl.types.flops import packed_tokens


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    prompts = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, len(prompts) - 1), st.integers(0, 60)),
            min_size=1,
            max_size=30,
        )
    )
    return Batch(
        prompts=[[1] * length for length in prompts],
        prompt_index=[prompt for prompt, _ in rows],
        responses=[[2] * length for _, length in rows],
        temperature=1.0,
    )


def loads(batch: Batch, dealt: list[Share]) -> list[int]:
    return [packed_tokens(batch, share.rows) for share in dealt]


@given(batches(), st.integers(1, 5), st.integers(1, 150))
def test_every_row_is_computed_once_and_ranks_meet_in_every_pass(
    batch: Batch, ranks: int, budget: int
) -> None:
    dealt = shares(batch, ranks, budget)
    assert len(dealt) == ranks
    assert sorted(row for share in dealt for row in share.rows) == list(range(len(batch)))
    assert len({len(share.pieces) for share in dealt}) == 1
    for share in dealt:
        assert sorted(place for piece in share.pieces for place in piece) == list(
            range(len(share.rows))
        )
        for piece in share.pieces:
            assert len(piece) <= 1 or packed_tokens(batch, share.rows[piece]) <= budget


def test_one_long_group_is_shared_by_all_ranks() -> None:
    batch = Batch(
        prompts=[[1] * 10],
        prompt_index=[0] * 8,
        responses=[[2] * 100] * 8,
        temperature=1.0,
    )
    dealt = shares(batch, 2, 10_000)
    assert [len(share.rows) for share in dealt] == [4, 4]
    assert loads(batch, dealt) == [406, 406]


def test_even_groups_stay_together() -> None:
    batch = Batch(
        prompts=[[1] * 10, [3] * 10],
        prompt_index=[0, 1] * 4,
        responses=[[2] * 100] * 8,
        temperature=1.0,
    )
    dealt = shares(batch, 2, 10_000)
    assert [{int(batch.prompt_index[row]) for row in share.rows} for share in dealt] == [{0}, {1}]


def test_ranks_without_a_row_get_empty_passes() -> None:
    batch = Batch(prompts=[[1]], prompt_index=[0, 0], responses=[[2] * 3, [3] * 3], temperature=1.0)
    dealt = shares(batch, 4, 1)
    assert sorted(len(share.rows) for share in dealt) == [0, 0, 1, 1]
    assert {len(share.pieces) for share in dealt} == {1}
