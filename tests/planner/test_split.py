"""Source quotas: whole pairs, exact sums, near their shares, local pairs first where asked."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import seeds

from moe_rl.core.errors import InvalidInputError
from moe_rl.planner.split import equal_source_quotas, proportional_source_quotas


@given(seed=seeds, sources=st.integers(1, 6), count=st.integers(1, 5))
def test_round_robin_gives_what_dealing_one_by_one_gives(seed: int, sources: int, count: int) -> None:
    pairs = np.random.default_rng(seed).integers(0, 9, sources)
    dealt = np.zeros((count, sources), int)
    turn = 0
    for source, number in enumerate(pairs):
        for _ in range(number):
            dealt[turn % count, source] += 1
            turn += 1
    found = equal_source_quotas(np.tile(pairs, (count, 1)), np.arange(count), np.full(count, count))
    assert found.tolist() == dealt.tolist()


def replicas_of(rng: np.random.Generator, ranks: int, experts: int, cells: int) -> dict[str, np.ndarray]:
    """Random replicas with quotas that their experts' loads allow: [C, P, E] pairs and the replica columns."""
    pairs = rng.integers(0, 12, (cells, ranks, experts)).astype(np.int32)
    pairs[:, :, rng.integers(0, experts)] = 0
    columns = []
    for cell in range(cells):
        for expert in range(experts):
            home = int(rng.integers(0, ranks))
            left = int(pairs[cell, :, expert].sum())
            for rank in rng.permutation([r for r in range(ranks) if r != home])[: rng.integers(0, ranks)]:
                quota = int(rng.integers(0, left + 1))
                left -= quota
                columns.append((cell, expert, int(rank), home, quota))
    table = np.array(rng.permutation(columns) if columns else np.zeros((0, 5)), np.int64)
    return {"pairs": pairs, **dict(zip(("cell", "expert", "rank", "home", "quota"), table.T, strict=True))}


@given(seed=seeds, ranks=st.integers(1, 5), experts=st.integers(1, 4), local_first=st.booleans())
def test_quotas_are_met_exactly_and_no_source_is_overdrawn(
    seed: int, ranks: int, experts: int, local_first: bool
) -> None:
    given_ = replicas_of(np.random.default_rng(seed), ranks, experts, cells=3)
    found = proportional_source_quotas(**given_, local_first=local_first)
    assert (found >= 0).all()
    assert (found.sum(axis=1) == given_["quota"]).all()
    left = given_["pairs"].astype(np.int64)
    for cell, expert, taken in zip(given_["cell"], given_["expert"], found, strict=True):
        left[cell, :, expert] -= taken
    assert (left >= 0).all()


@given(seed=seeds, ranks=st.integers(2, 5))
def test_the_first_replica_takes_every_source_by_its_share(seed: int, ranks: int) -> None:
    """Of one replica per expert, each source gives its share of the quota to within one pair."""
    rng = np.random.default_rng(seed)
    pairs = rng.integers(0, 50, (1, ranks, 1)).astype(np.int32)
    total = int(pairs.sum())
    quota = int(rng.integers(0, total + 1))
    one = {name: np.array([value]) for name, value in (("cell", 0), ("expert", 0), ("rank", 1), ("home", 0))}
    found = proportional_source_quotas(pairs, **one, quota=np.array([quota]), local_first=False)[0]
    assert (np.abs(found - quota * pairs[0, :, 0] / max(total, 1)) < 1).all()


def test_local_pairs_stay_on_their_rank() -> None:
    """Expert 0 is at home on rank 0 and copied to 2: each serves its own sources before rank 1's are shared."""
    pairs = np.array([[[4], [6], [5]]], np.int32)
    found = proportional_source_quotas(
        pairs,
        cell=np.array([0]),
        expert=np.array([0]),
        rank=np.array([2]),
        home=np.array([0]),
        quota=np.array([7]),
        local_first=True,
    )
    assert found.tolist() == [[0, 2, 5]]


def test_more_than_an_expert_has_cannot_be_taken() -> None:
    with pytest.raises(
        InvalidInputError, match="replicas of an expert take more token-expert pairs than the expert has"
    ):
        proportional_source_quotas(
            np.ones((1, 2, 1), np.int32),
            cell=np.array([0]),
            expert=np.array([0]),
            rank=np.array([1]),
            home=np.array([0]),
            quota=np.array([3]),
            local_first=False,
        )
