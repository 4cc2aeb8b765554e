"""Packing under a framework's rule: as many sequences on every data-parallel rank, kept by the search itself."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import HARDWARE, model_spec, seeds

from moe_rl.balancing.driver_packing import PADDING_TOKENS, DriverPacking, filled_up, packed_shares
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.layout import BatchLayout
from moe_rl.core.native import native_core
from moe_rl.core.schedules import PACKINGS, framework_layout, with_rule
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.packing import BY_GROUPS, best_start, layouts_of_lengths, with_equal_counts
from moe_rl.simulators.balanced import cost_of_lengths
from moe_rl.simulators.setting import StepSetting, TrainingRun

needs_core = pytest.mark.skipif(native_core() is None, reason="packing needs the C++ core")
MODEL = model_spec(num_experts=16, num_layers=4, top_k=2)
BUDGET = 4096


def topology_of(ranks: int, *, ep_size: int, slices: int = 1) -> ClusterTopology:
    return ClusterTopology(
        hardware=HARDWARE, ep_size=ep_size, num_ep_groups=ranks * slices // ep_size, slices_per_dp_rank=slices
    )


def packing_of(*, token_budget: int) -> DriverPacking:
    """Four data-parallel ranks, one EP group."""
    topology, setting = topology_of(4, ep_size=4), StepSetting()
    return DriverPacking(
        framework="verl", model=MODEL, topology=topology, setting=setting, token_budget=token_budget
    )  # fmt: skip


def lengths_of(seed: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.clip(np.exp(rng.normal(6.0, 1.3, count)), 16, BUDGET).astype(np.int64)


@needs_core
@settings(max_examples=25)
@given(seed=seeds, shape=st.sampled_from([(4, 4, 1), (8, 4, 1), (4, 8, 2), (2, 2, 1)]), each=st.integers(2, 7))
def test_every_start_keeps_counts_budget_and_cells(seed: int, shape: tuple[int, int, int], each: int) -> None:
    ranks, ep_size, slices = shape
    topology, lengths = topology_of(ranks, ep_size=ep_size, slices=slices), lengths_of(seed, ranks * each)
    given_layout = with_rule(framework_layout("verl", lengths, num_dp_ranks=ranks, token_budget=BUDGET), "verl")
    cost = cost_of_lengths(
        TrainingRun(model=MODEL, topology=topology, setting=StepSetting()), lengths, tokens_per_rank=2e3
    )
    starts = layouts_of_lengths(given_layout, cost, lengths, topology, native_core())
    assert starts
    for layout in starts.values():
        assert (np.bincount(layout.dp_rank, minlength=ranks) == each).all()
        held = layout.rank_tokens(lengths)
        assert held.max() <= BUDGET
        assert held.min() > 0
    best = best_start(given_layout, cost, lengths, topology, native_core())
    assert cost.balanced_s(best, topology) <= cost.balanced_s(given_layout, topology)


@needs_core
def test_a_search_by_lengths_beats_verls_order_under_verls_rule() -> None:
    """And without the rule it is no worse than with it: the search may then do all that it did."""
    gains = []
    for seed in range(4):
        lengths, topology = lengths_of(seed, 64), topology_of(8, ep_size=4)
        own = with_rule(framework_layout("verl", lengths, num_dp_ranks=8, token_budget=BUDGET), "verl")
        run = TrainingRun(model=MODEL, topology=topology, setting=StepSetting())
        cost = cost_of_lengths(run, lengths, tokens_per_rank=2e3)
        equal = best_start(own, cost, lengths, topology, native_core())
        free = best_start(replace(own, most_sequences=None), cost, lengths, topology, native_core())
        own_s, equal_s, free_s = (cost.balanced_s(one, topology) for one in (own, equal, free))
        assert free_s <= 1.01 * equal_s
        gains.append(own_s / equal_s)
    assert np.mean(gains) > 1.01


@needs_core
@pytest.mark.parametrize("most", [None, 8])
def test_the_longest_sequences_of_a_group_meet_its_shortest(most: int | None) -> None:
    """Two EP groups of four ranks, two micro-batches: 4 longest, 4 long ones, 4 of middle length, and short ones.

    By the step's price the longest belong with the short, the long with the middle ones; work grows with length.
    """
    longest, long, middle, short = (np.full(4, length) for length in (4000, 3000, 2000, 500))
    lengths = np.concatenate([longest, long, middle, short]).astype(np.int64)
    topology = topology_of(8, ep_size=4)
    given_layout = BatchLayout.in_order(lengths, num_dp_ranks=8, token_budget=BUDGET)
    given_layout = replace(with_rule(given_layout, "verl"), most_sequences=most)
    run = TrainingRun(model=MODEL, topology=topology, setting=StepSetting())
    cost = cost_of_lengths(run, lengths, tokens_per_rank=2e3)
    starts = layouts_of_lengths(given_layout, cost, lengths, topology, native_core(), searched=False)
    layout = starts[f"{BY_GROUPS}, 2 micro-batches"]
    of_group = [sorted(set(lengths[layout.dp_rank // 4 == group].tolist())) for group in range(2)]
    assert sorted(of_group) == [[500, 4000], [2000, 3000]]
    assert cost.balanced_s(layout, topology) == min(cost.balanced_s(one, topology) for one in starts.values())


@given(seed=seeds, ranks=st.integers(1, 5), count=st.integers(1, 3))
def test_counts_are_repaired_without_leaving_a_cell_empty(seed: int, ranks: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    cells = ranks * count
    place = np.concatenate([np.arange(cells), rng.integers(0, cells, 3 * cells)]).astype(np.int32)
    tokens = rng.integers(1, 50, len(place))
    layout = BatchLayout(
        micro_batch=place // ranks, dp_rank=place % ranks, order=np.arange(len(place), dtype=np.int32),
        num_micro_batches=count, num_dp_ranks=ranks, token_budget=10_000, most_sequences=4 * count,
    )  # fmt: skip
    repaired = with_equal_counts(layout, place, tokens.astype(np.int64), tokens)
    assert repaired is not None
    assert (np.bincount(repaired % ranks, minlength=ranks) == 4 * count).all()
    assert np.bincount(repaired, minlength=cells).min() > 0
    full = replace(layout, token_budget=int(np.bincount(place, weights=tokens).max()))
    tight = with_equal_counts(full, place, tokens.astype(np.int64), tokens)
    assert tight is None or np.bincount(tight, weights=tokens).max() <= full.token_budget


@needs_core
@pytest.mark.parametrize("mini_batches", [1, 3])
def test_a_driver_packs_inside_every_mini_batch(mini_batches: int) -> None:
    ranks, each = 4, 6
    packing = DriverPacking(
        framework="verl",
        model=MODEL,
        topology=topology_of(ranks, ep_size=4),
        setting=StepSetting(),
        token_budget=BUDGET,
    )
    lengths = lengths_of(1, ranks * each * mini_batches)
    shares = packed_shares(packing, lengths, mini_batches=mini_batches)
    assert shares is not None
    assert sorted(shares.order) == list(range(len(lengths)))
    before = np.arange(len(lengths)).reshape(ranks, mini_batches, each)
    after = shares.order.reshape(before.shape)
    micro_batch = shares.micro_batch.reshape(before.shape)
    for number in range(mini_batches):
        assert set(after[:, number].ravel()) == set(before[:, number].ravel())
        counts = {int(rank.max()) + 1 for rank in micro_batch[:, number]}
        assert len(counts) == 1  # all ranks meet in every micro-batch
        for rank in range(ranks):
            tokens = np.bincount(micro_batch[rank, number], weights=lengths[after[rank, number]])
            assert 0 < tokens.min() <= tokens.max() <= BUDGET
    assert (after != before).any()


@pytest.mark.parametrize("count", [0, 3, 4, 9])
def test_batches_that_nobody_can_share_out_are_left_alone(count: int) -> None:
    packing = packing_of(token_budget=BUDGET)
    assert packed_shares(packing, lengths_of(0, count), mini_batches=1) is None


def test_a_sequence_over_the_budget_is_left_to_the_framework() -> None:
    packing = packing_of(token_budget=100)
    assert packed_shares(packing, np.full(16, 101), mini_batches=1) is None


def test_what_a_run_may_pack_is_its_frameworks_rule() -> None:
    layout = framework_layout("verl", lengths_of(0, 17), num_dp_ranks=4, token_budget=BUDGET)
    assert with_rule(layout, "verl").most_sequences == 5
    slime = with_rule(layout, "slime")
    assert (slime.fixed, slime.most_sequences, slime.lengths_alone) == (False, None, True)
    assert with_rule(layout, "megatron").fixed
    free = with_rule(layout, "verl", "free")
    assert (free.fixed, free.most_sequences) == (False, None)
    assert with_rule(layout, "verl", "none").fixed
    assert PACKINGS[0] == "run"
    with pytest.raises(InvalidInputError, match="--packing 'all' is unknown"):
        with_rule(layout, "verl", "all")


@needs_core
@settings(max_examples=10)
@given(seed=seeds, paddings=st.integers(1, 4), mini_batches=st.integers(1, 2))
def test_padding_samples_fill_ranks_up_to_one_size(seed: int, paddings: int, mini_batches: int) -> None:
    """Every sequence once, in its mini-batch; ranks alike in every mini-batch; the budget holds with the padding."""
    ranks, count = 4, 24 * mini_batches
    packing, lengths = replace(packing_of(token_budget=BUDGET), padding_samples=paddings), lengths_of(seed, count)
    shares = packed_shares(packing, lengths, mini_batches=mini_batches)
    assert shares is not None
    assert sorted(shares.order) == list(range(count + shares.padding_samples))
    order, micro_batch = (column.reshape(ranks, mini_batches, -1) for column in (shares.order, shares.micro_batch))
    assert order.shape[2] <= count // (ranks * mini_batches) + paddings
    before = np.arange(count).reshape(ranks, mini_batches, -1)
    tokens = np.append(lengths, np.full(shares.padding_samples, PADDING_TOKENS))
    for number in range(mini_batches):
        own = order[:, number]
        assert set(own[own < count].ravel()) == set(before[:, number].ravel())
        assert len({int(of_rank.max()) for of_rank in micro_batch[:, number]}) == 1
        for rank in range(ranks):
            held = np.bincount(micro_batch[rank, number], weights=tokens[order[rank, number]])
            assert 0 < held.min() <= held.max() <= BUDGET


@needs_core
def test_padding_samples_never_cost_and_pay_where_lengths_are_uneven() -> None:
    gains = []
    for seed in range(4):
        lengths, topology = lengths_of(seed, 64), topology_of(8, ep_size=4)
        own = framework_layout("verl", lengths, num_dp_ranks=8, token_budget=BUDGET)
        cost = cost_of_lengths(
            TrainingRun(model=MODEL, topology=topology, setting=StepSetting()), lengths, tokens_per_rank=2e3
        )
        rules = [with_rule(own, "verl"), with_rule(own, "verl", padding_samples=4)]
        equal, padded = (best_start(rule, cost, lengths, topology, native_core()) for rule in rules)
        assert np.bincount(padded.dp_rank, minlength=8).max() <= 8 + 4
        gains.append(cost.balanced_s(equal, topology) / cost.balanced_s(padded, topology))
    assert min(gains) >= 1.0
    assert max(gains) > 1.002


def test_a_rank_without_room_is_not_filled_up() -> None:
    """Two ranks, one of them full to its budget with a single sequence while the other has two."""
    layout = BatchLayout(
        micro_batch=np.zeros(3, np.int32), dp_rank=np.array([0, 1, 1], np.int32), order=np.arange(3, dtype=np.int32),
        num_micro_batches=1, num_dp_ranks=2, token_budget=100,
    )  # fmt: skip
    lengths = np.array([100, 40, 40])
    assert filled_up(layout, lengths, 2) is None
    filled = filled_up(layout, lengths - PADDING_TOKENS, 2)
    assert filled is not None
    assert filled.dp_rank.tolist() == [0, 1, 1, 0]
    assert filled_up(replace(layout, token_budget=None), lengths, 2) is not None
