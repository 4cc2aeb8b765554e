"""Sequences of a running pass dealt anew to the micro-batches of their rank: what stays, and what gets better."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from strategies import model_spec

from moe_rl.balancing import packing
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.packing import RankSequences, packed_micro_batches
from moe_rl.balancing.schedule import cluster_topology
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.native import native_core

pytestmark = pytest.mark.skipif(native_core() is None, reason="packing by routes needs the C++ core")
EP_SIZE, BUDGET = 4, 100
CONFIG = BalancerConfig(ranks_per_node=2, objective="imbalance")
MODEL: MoeModelSpec = model_spec(num_layers=2, num_experts=8, top_k=2)


def rank_of(
    tokens: list[int], loads: NDArray[np.int32], given_batches: list[list[int]], *, rank: int, stage: int = 0
) -> RankSequences:
    homes = np.tile(np.arange(8, dtype=np.int32) // 2, (loads.shape[1], 1))
    return RankSequences.of(
        loads,
        homes,
        tokens=tokens,
        topology=cluster_topology(CONFIG, ep_size=EP_SIZE),
        by_rank=False,
        dp_rank=rank,
        stage=stage,
        micro_batches=given_batches,
    )


def packed(everyone: list[RankSequences], budget: int = BUDGET) -> dict[int, NDArray[np.int32]] | None:
    return packed_micro_batches(
        everyone, config=CONFIG, model=MODEL, ep_size=EP_SIZE, num_ep_groups=1, token_budget=budget, setting=None
    )


def busiest(everyone: list[RankSequences], of: dict[int, NDArray[np.int32]]) -> int:
    """Sum over micro-batches and layers of the busiest node's rows."""
    count = 1 + max(int(each.max()) for each in of.values())
    rows = np.zeros((count, *everyone[0].bin_load.shape[1:]), np.int64)
    for one in everyone:
        np.add.at(rows, of[one.dp_rank], one.bin_load)
    return int(rows.max(axis=1).sum())


@st.composite
def runs(draw: st.DrawFn) -> list[RankSequences]:
    rng, count = np.random.default_rng(draw(st.integers(0, 10**6))), draw(st.integers(1, 4))
    everyone = []
    for rank in range(EP_SIZE):
        tokens = rng.integers(0, 30, draw(st.integers(count, 9))).tolist()
        batches = [list(range(index, len(tokens), count)) for index in range(count)]
        taste = rng.dirichlet(np.full(8, 0.2), (len(tokens), 2))
        loads = np.stack(
            [[rng.multinomial(2 * n, each) for each in of] for n, of in zip(tokens, taste, strict=True)]
        ).astype(np.int32)
        everyone.append(rank_of(tokens, loads, batches, rank=rank))
    return everyone


@given(runs())
@settings(deadline=None, max_examples=40)
def test_ranks_keep_their_sequences_micro_batches_their_limits_and_nothing_gets_dearer(
    everyone: list[RankSequences],
) -> None:
    found = packed(everyone)
    assert packed(everyone[::-1]) is None or found is not None
    if found is None:
        assert not any(one.bin_load.any() for one in everyone)
        return
    before = {one.dp_rank: one.micro_batch for one in everyone}
    for one in everyone:
        held, before_it = (np.bincount(of[one.dp_rank], weights=one.tokens) for of in (found, before))
        assert len(found[one.dp_rank]) == len(one.tokens)
        assert held.max() <= max(BUDGET, before_it.max())
        assert set(found[one.dp_rank]) == set(one.micro_batch), "none is left empty, none is added"
    assert busiest(everyone, found) <= busiest(everyone, before)
    for rank, other in (packed(everyone[::-1]) or {}).items():
        np.testing.assert_array_equal(other, found[rank], "every rank finds the same, in whatever order it hears")


def of_one_node(rank: int, order: list[int]) -> RankSequences:
    """Four sequences, of which those with an even number go to experts of the first node, the others to the second."""
    loads = np.zeros((4, 2, 8), np.int32)
    loads[::2, :, 0] = loads[1::2, :, 7] = 20
    return rank_of([10] * 4, loads, [order[:2], order[2:]], rank=rank)


def test_sequences_of_one_taste_are_spread_over_micro_batches() -> None:
    """All ranks run the first node's sequences first, then the second's; mixed, both nodes always work."""
    everyone = [of_one_node(rank, [0, 2, 1, 3]) for rank in range(EP_SIZE)]
    before = {one.dp_rank: one.micro_batch for one in everyone}
    found = packed(everyone)
    assert found is not None
    assert busiest(everyone, before) == 2 * busiest(everyone, found)


@pytest.mark.parametrize("uneven_stage", [0, 1])
def test_stages_decide_together(uneven_stage: int) -> None:
    """The even stage alone would see nothing to do: what is uneven is on the other, be it the first or the last."""
    uneven = [replace(of_one_node(rank, [0, 2, 1, 3]), stage=uneven_stage) for rank in range(EP_SIZE)]
    loads = np.full((4, 2, 8), 5, np.int32)
    even = [rank_of([10] * 4, loads, [[0, 2], [1, 3]], rank=rank, stage=1 - uneven_stage) for rank in range(EP_SIZE)]
    found, alone = packed(uneven + even), packed(even)
    assert found is not None
    assert alone is not None
    assert busiest(uneven, found) < busiest(uneven, alone)


def test_experts_cost_what_a_micro_batch_has_for_each_rank() -> None:
    """Four ranks with four sequences of 10 tokens in two micro-batches: 160 / 4 / 2 tokens a rank."""
    everyone = [of_one_node(rank, [0, 2, 1, 3]) for rank in range(EP_SIZE)]
    in_seconds = CONFIG.with_words(objective="time")
    with patch.object(packing, "cost_of_lengths", wraps=packing.cost_of_lengths) as cost:
        packed_micro_batches(
            everyone, config=in_seconds, model=MODEL, ep_size=4, num_ep_groups=1, token_budget=BUDGET, setting=None
        )
    assert cost.call_args.kwargs["tokens_per_rank"] == 20


def test_nothing_known_or_ranks_that_share_no_group_change_nothing() -> None:
    everyone = [of_one_node(rank, [0, 2, 1, 3]) for rank in range(EP_SIZE)]
    unknown = [replace(one, bin_load=np.zeros_like(one.bin_load)) for one in everyone]
    assert packed(unknown) is None
    assert packed(everyone[:3]) is None
