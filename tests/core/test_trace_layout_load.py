"""Traces, layouts and scaled loads: what they refuse and what they keep."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.trace import RoutingTrace, SequenceCounts, route_dtype

EXPERTS = 8


def routes(rng: np.random.Generator, num_tokens: int, num_layers: int = 2, top_k: int = 2) -> np.ndarray:
    """Distinct expert ids per row, so that every layer sees some expert other than 0."""
    return np.argsort(rng.random((num_tokens, num_layers, EXPERTS)), axis=2)[:, :, :top_k]


def trace_of(rng: np.random.Generator, lengths: list[int]) -> RoutingTrace:
    return RoutingTrace.from_sequences([routes(rng, n) for n in lengths], num_experts=EXPERTS)


def test_sequences_come_back_as_given(rng: np.random.Generator) -> None:
    given_ids = [routes(rng, n) for n in (3, 0, 5)]
    trace = RoutingTrace.from_sequences(given_ids, num_experts=EXPERTS, group_id=np.array([7, 7, 9]))
    for index, ids in enumerate(given_ids):
        start, stop = trace.cu_seqlens[index : index + 2]
        assert (trace.routed_experts[start:stop] == ids).all()
    assert trace.group_id.tolist() == [7, 7, 9]
    assert (trace.num_tokens, trace.num_sequences, trace.num_layers, trace.top_k) == (8, 3, 2, 2)


def test_selected_sequences_keep_their_rows(rng: np.random.Generator) -> None:
    trace = trace_of(rng, [4, 1, 6, 2])
    picked = trace.select(np.array([2, 0, 2]))
    assert picked.sequence_lengths.tolist() == [6, 4, 6]
    assert (picked.routed_experts[:6] == trace.routed_experts[5:11]).all()
    assert (picked.routed_experts[6:10] == trace.routed_experts[:4]).all()
    assert picked.sample_id.tolist() == [2, 0, 2]


def test_ids_use_one_byte_up_to_256_experts() -> None:
    assert route_dtype(256) is np.uint8
    assert route_dtype(257) is np.uint16
    with pytest.raises(InvalidInputError, match="num_experts must be 1 to 65536"):
        route_dtype(65_537)


def test_ids_out_of_range_are_refused(rng: np.random.Generator) -> None:
    ids = routes(rng, 4)
    ids[2, 1, 0] = EXPERTS
    with pytest.raises(InvalidInputError, match=r"sequence 0 has expert id 8, but expert ids must be 0 to 7"):
        RoutingTrace.from_sequences([ids], num_experts=EXPERTS)
    ids[2, 1, 0] = -1
    with pytest.raises(InvalidInputError, match="expert id -1"):
        RoutingTrace.from_sequences([ids], num_experts=EXPERTS)


def test_a_row_that_names_an_expert_twice_is_refused(rng: np.random.Generator) -> None:
    ids = routes(rng, 4)
    ids[3, 1] = 5
    with pytest.raises(
        InvalidInputError, match=r"is routed to one expert twice in MoE layer 1: its expert ids are \[5, 5\]"
    ):
        RoutingTrace.from_sequences([ids], num_experts=EXPERTS)


def test_a_wrong_row_is_named_by_sample_and_position(rng: np.random.Generator) -> None:
    """Rows without a route count as rows, so that the number is the one in the user's file."""
    ids = [routes(rng, 4), routes(rng, 4)]
    valid = np.array([True, False, True, True])
    good = RoutingTrace.from_sequences(ids, num_experts=EXPERTS, valid=[valid, valid], sample_id=np.array([7, 9]))
    for wrong, said in ((5, "is routed to one expert twice"), (EXPERTS, "has expert id 8 in MoE layer 1")):
        damaged = good.routed_experts.copy()
        damaged[4 + 2, 1] = wrong
        with pytest.raises(InvalidInputError, match=f"token 2 of sample 9 {said}"):
            replace(good, routed_experts=damaged).check_ids()


def test_ids_of_rows_without_a_route_may_be_anything(rng: np.random.Generator) -> None:
    ids = routes(rng, 4).astype(np.int64)
    ids[3] = -1
    valid = np.array([True, True, True, False])
    trace = RoutingTrace.from_sequences([ids], num_experts=EXPERTS, valid=[valid])
    assert not trace.routed_experts[3].any()
    with pytest.raises(InvalidInputError, match="one entry for each token"):
        RoutingTrace.from_sequences([ids], num_experts=EXPERTS, valid=[valid[:3]])


def test_a_layer_that_was_not_captured_is_refused() -> None:
    ids = np.zeros((4, 2, 1), np.int64)
    ids[:, 0, 0] = [1, 2, 3, 0]
    with pytest.raises(InvalidInputError, match="in MoE layer 1, every token is routed to expert 0 only"):
        RoutingTrace.from_sequences([ids], num_experts=EXPERTS)


def test_filler_rows_are_not_checked(rng: np.random.Generator) -> None:
    """Filler is masked by position: zeros in an invalid row are no duplicate."""
    ids = routes(rng, 4)
    ids[3] = 0
    valid = np.array([True, True, True, False])
    trace = RoutingTrace.from_sequences([ids], num_experts=EXPERTS, valid=[valid])
    assert trace.valid.tolist() == valid.tolist()


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_an_empty_trace_is_refused(rng: np.random.Generator, lengths: list[int]) -> None:
    with pytest.raises(InvalidInputError, match="the trace is empty"):
        trace_of(rng, lengths)


def test_counts_must_add_up_to_top_k_per_token() -> None:
    columns = {
        name: np.zeros(1, dtype)
        for name, dtype in (
            ("sample_id", np.int64),
            ("group_id", np.int64),
            ("step", np.int32),
            ("micro_batch", np.int32),
            ("dp_rank", np.int32),
        )
    }
    with pytest.raises(InvalidInputError, match="add up to 3, but must add up to 2 tokens x top-2"):
        SequenceCounts(
            tokens_per_expert=np.array([[[1, 2]]], np.uint32),
            num_tokens=np.array([2]),
            num_valid_tokens=np.array([2]),
            top_k=2,
            moe_layer_ids=(0,),
            **columns,
        )


lengths_lists = st.lists(st.integers(0, 40), min_size=1, max_size=30).map(lambda n: np.array(n, np.int64))


@given(lengths=lengths_lists, num_dp_ranks=st.integers(1, 5), budget=st.integers(40, 100))
def test_the_given_order_layout_keeps_budget_and_order(lengths: np.ndarray, num_dp_ranks: int, budget: int) -> None:
    layout = BatchLayout.in_order(lengths, num_dp_ranks=num_dp_ranks, token_budget=budget)
    layout.check(lengths)
    cells = layout.rank_tokens(lengths)
    assert cells.sum() == lengths.sum()
    assert cells.max() <= budget
    for rank in range(num_dp_ranks):
        mine = layout.micro_batch[layout.dp_rank == rank]
        assert (np.diff(mine) >= 0).all()


@given(lengths=lengths_lists, budget=st.integers(40, 100), seed=st.integers(0, 3))
def test_the_comparison_protocol_closes_before_the_budget(lengths: np.ndarray, budget: int, seed: int) -> None:
    """Written a second time from its text: permuted order, close before exceeding."""
    layout = BatchLayout.ep_group(lengths, token_budget=budget, seed=seed)
    expected, used, current = {}, 0, 0
    for sequence in np.random.default_rng(seed).permutation(len(lengths)).tolist():
        if used + lengths[sequence] > budget:
            used, current = 0, current + 1
        used += lengths[sequence]
        expected[sequence] = current
    assert layout.micro_batch.tolist() == [expected[s] for s in range(len(lengths))]


@given(lengths=lengths_lists, num_dp_ranks=st.integers(1, 3))
def test_token_starts_pack_every_cell_without_gaps(lengths: np.ndarray, num_dp_ranks: int) -> None:
    layout = BatchLayout.in_order(lengths, num_dp_ranks=num_dp_ranks, token_budget=60)
    start = layout.token_start(lengths)
    for micro_batch in range(layout.num_micro_batches):
        for dp_rank in range(num_dp_ranks):
            cell = np.flatnonzero((layout.micro_batch == micro_batch) & (layout.dp_rank == dp_rank))
            cell = cell[np.argsort(layout.order[cell])]
            assert start[cell].tolist() == (np.cumsum(lengths[cell]) - lengths[cell]).tolist()


def test_a_sequence_longer_than_its_cell_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"sequence 1 has 9 tokens, .* the token budget of a micro-batch .8."):
        BatchLayout.in_order(np.array([3, 9]), num_dp_ranks=1, token_budget=8)


def test_a_recorded_layout_needs_a_cell_for_every_sequence() -> None:
    with pytest.raises(InvalidInputError, match="1 of 2 sequences have no recorded micro-batch"):
        BatchLayout.recorded(np.array([0, -1], np.int32), np.array([0, 0], np.int32), num_dp_ranks=1)


def test_a_sequence_in_a_cell_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        InvalidInputError, match=r"the values of dp_rank in a batch layout must be 0 to 1, but they range from 0 to 2"
    ):
        BatchLayout.recorded(np.array([0, 0], np.int32), np.array([0, 2], np.int32), num_dp_ranks=2)


def test_scaled_loads_that_no_int32_holds_are_refused() -> None:
    """An entry may be the whole load of its cell, so the limit is P x K x tokens."""
    load = StepLoad(pairs=np.ones((1, 1, 1, 2, 4), np.int32), tokens=np.full((1, 1, 2), 2), top_k=2)
    most = (2**31 - 1) // 4
    assert int(load.scaled_to(most).pairs.sum()) == 4 * most
    with pytest.raises(InvalidInputError, match=f"at most {most}"):
        load.scaled_to(most + 1)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="seed must be at least 0"):
        BatchLayout.ep_group(np.array([3, 4]), token_budget=8, seed=-1)


@given(seed=st.integers(0, 1000), tokens_per_rank=st.integers(1, 5000))
def test_scaled_loads_keep_totals_and_shares(seed: int, tokens_per_rank: int) -> None:
    """Totals are exact; every entry is within one pair of its share, since the running sum is rounded."""
    rng = np.random.default_rng(seed)
    sources, experts, top_k = 4, 8, 2
    tokens = rng.integers(0, 20, (1, 3, sources))
    tokens[0, 1] = 0
    pairs = np.zeros((1, 3, 2, sources, experts), np.int32)
    for micro_batch in range(3):
        for source in range(sources):
            for _ in range(tokens[0, micro_batch, source]):
                for layer in range(2):
                    chosen = rng.choice(experts, top_k, replace=False)
                    pairs[0, micro_batch, layer, source, chosen] += 1
    load = StepLoad(pairs=pairs, tokens=tokens, top_k=top_k)
    scaled = load.scaled_to(tokens_per_rank)
    assert scaled.scaled
    for micro_batch in range(3):
        total = tokens[0, micro_batch].sum()
        want = tokens_per_rank * sources * top_k if total else 0
        assert (scaled.pairs[0, micro_batch].sum(axis=(1, 2)) == want).all()
        if total:
            exact = pairs[0, micro_batch] * (want / (total * top_k))
            assert np.abs(scaled.pairs[0, micro_batch] - exact).max() <= 1.0 + 1e-6


def test_a_negative_load_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="negative count"):
        StepLoad(pairs=np.full((1, 1, 1, 1, 1), -1, np.int32), tokens=np.ones((1, 1, 1), np.int64), top_k=1)


@given(seed=st.integers(0, 1000), share=st.sampled_from([0.0, 0.1, 1.0]))
def test_rerouted_loads_keep_what_every_rank_sends(seed: int, share: float) -> None:
    """Expert 0 is chosen by every token, so that it cannot gain; a micro-batch without tokens stays empty."""
    pairs = np.random.default_rng(seed).integers(0, 30, (2, 3, 2, 4, 6)).astype(np.int32)
    pairs[..., 0] = 40
    pairs[:, 1] = 0
    load = StepLoad(pairs=pairs, tokens=np.where(pairs[:, :, 0, :, 0] > 0, 40, 0), top_k=4)
    moved = load.rerouted(share, seed=seed)
    assert (moved.pairs.sum(axis=4) == pairs.sum(axis=4)).all()
    assert (moved.pairs <= load.tokens[:, :, None, :, None]).all()
    assert (moved.pairs >= 0).all()
    assert np.array_equal(moved.pairs, pairs) == (share == 0.0)
    assert np.array_equal(moved.pairs, load.rerouted(share, seed=seed).pairs)


def test_a_pair_moves_as_often_as_asked_and_by_popularity() -> None:
    """Two experts with 3 and 1 of 4 pairs: a pair leaves the first with 0.2 x 1/4, the other with 0.2 x 3/4.

    Both numbers are binomial; over 1000 sources mean and variance lie within five standard errors.
    """
    pairs = np.tile(np.array([300, 100], np.int32), (1, 1, 1, 1000, 1))
    load = StepLoad(pairs=pairs, tokens=np.full((1, 1, 1000), 400), top_k=1)
    moved = load.rerouted(0.2, seed=0).pairs[0, 0, 0]
    variance = 300 * 0.05 * 0.95 + 100 * 0.15 * 0.85
    assert abs(moved[:, 0].mean() - 300) <= 5 * np.sqrt(variance / 1000)
    assert moved[:, 0].var() == pytest.approx(variance, rel=5 * np.sqrt(2 / 1000))
    with pytest.raises(InvalidInputError, match="the share of re-routed token-expert pairs must be between 0 and 1"):
        load.rerouted(1.5, seed=0)
