"""The layer cost model: hand-computed values, bounds, and what may only go one way."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import HARDWARE, model_spec, seeds

from moe_rl.core.cost import (
    LayerRows,
    all_to_all_time,
    exposed_time,
    flat_shares,
    gemm_time,
    independent_visits,
    layer_cost_params,
    layer_time,
    padded_rows,
    prefetch_time,
    reorder_time,
    replica_transfers,
    replicate_time,
    resident_time,
)
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.topology import ClusterTopology

MODEL = model_spec(num_experts=8, num_layers=2, top_k=2)
TOPOLOGY = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)
PARAMS = layer_cost_params(MODEL, TOPOLOGY)
WEIGHT = 6 * 2048 * 768


def rows_of(rng: np.random.Generator, *, ranks: int = 4, nodes: int = 2, layers: int = 3) -> LayerRows:
    rows = rng.integers(0, 5000, (layers, ranks)).astype(float)
    return LayerRows(
        rows=rows,
        padded_rows=padded_rows(rows, 128.0),
        active_experts=rng.integers(0, 5, (layers, ranks)).astype(float),
        rank_visits=rows * rng.random((layers, ranks)),
        nic_ingress=rng.random((layers, nodes)) * 3000,
        nic_egress=rng.random((layers, nodes)) * 3000,
        replicas=rng.integers(0, 3, layers).astype(float),
        cross_node_replicas=rng.integers(0, 3, layers).astype(float),
    )


def test_a_gemm_is_bound_by_its_flops_or_by_reading_its_weights() -> None:
    rows = np.array([[128.0, 51200.0]])
    at = replace(
        rows_of(np.random.default_rng(0), ranks=2, layers=1),
        rows=rows,
        padded_rows=rows,
        active_experts=np.array([[4.0, 4.0]]),
    )
    read, flops = 4 * WEIGHT / 2680e9, 51200 * WEIGHT / 800e12
    moved = rows * (8 * 2048 + 10 * 768) / 2680e9
    assert gemm_time(PARAMS, at) == pytest.approx(np.array([[read, flops]]) + moved + 40e-6)
    backward = 2 * np.array([[read, flops]]) + 1.7 * moved + 80e-6
    assert gemm_time(PARAMS, at, backward=True) == pytest.approx(backward)


def test_unfused_gelu_moves_more_than_a_fused_gate() -> None:
    gelu = layer_cost_params(replace(MODEL, activation="gelu"), TOPOLOGY)
    assert gelu.activation_bytes_per_row - PARAMS.activation_bytes_per_row == 8 * 768
    assert gelu.gemm_flops_per_row == PARAMS.gemm_flops_per_row * 2 / 3


def test_a_hierarchical_all_to_all_is_its_slower_stage_and_a_quarter_of_the_other() -> None:
    at = rows_of(np.random.default_rng(1), layers=1)
    local = at.rank_visits.max() * 4096 / 320e9
    remote = max(at.nic_ingress.max(), at.nic_egress.max()) * 4096 / 43e9
    expected = max(local, remote) + 0.25 * min(local, remote) + 60e-6
    assert all_to_all_time(PARAMS, at) == pytest.approx(expected)
    single = ClusterTopology(hardware=HARDWARE, ep_size=2, ranks_per_node=2)
    assert layer_cost_params(MODEL, single).a2a_latency_s == pytest.approx(25e-6)


def test_a_flat_all_to_all_is_its_slower_stage_and_the_copies_of_a_mean_rank() -> None:
    flat = layer_cost_params(MODEL, TOPOLOGY, hierarchical=False)
    at = rows_of(np.random.default_rng(2), layers=1)
    link, nic = at.rank_visits.max() / 320e9, max(at.nic_ingress.max(), at.nic_egress.max()) / 43e9
    expected = 4096 * (max(link, nic) + 4 * at.rows.mean() / 2680e9) + 60e-6
    assert all_to_all_time(flat, at) == pytest.approx(expected)


def test_pooled_nics_carry_the_mean_of_their_node() -> None:
    """Rows 900, 100, 300 and 300 on four ranks in nodes of two: 900 over a NIC of its own, 500 over pooled ones."""
    at = replace(
        rows_of(np.random.default_rng(3), layers=1, nodes=4),
        rank_visits=np.zeros((1, 4)),
        nic_ingress=np.array([[900.0, 100.0, 300.0, 300.0]]),
        nic_egress=np.array([[400.0, 400.0, 400.0, 400.0]]),
    )
    for pooled_nics, busiest in ((0, 900.0), (1, 500.0)):
        topology = replace(TOPOLOGY, hardware=replace(HARDWARE, pooled_nics=pooled_nics))
        flat = layer_cost_params(MODEL, topology, hierarchical=False)
        copied = 4096 * 4 * at.rows.mean() / 2680e9
        assert all_to_all_time(flat, at) == pytest.approx(4096 * busiest / 43e9 + copied + 60e-6)
        # A hierarchical kernel's figures are a node's already.
        deduplicated = layer_cost_params(MODEL, topology)
        assert all_to_all_time(deduplicated, at) == pytest.approx(4096 * 900.0 / 43e9 + 60e-6)


def test_alike_ranks_exchange_all_rows_but_their_own() -> None:
    near, far = flat_shares(8, 4)
    assert (near, far) == (3 / 8, 4 / 8)
    assert flat_shares(4, 4) == (3 / 4, 0.0)
    assert flat_shares(1, 1) == (0.0, 0.0)


def test_one_rank_has_no_all_to_all() -> None:
    alone = ClusterTopology(hardware=HARDWARE, ep_size=1, ranks_per_node=1)
    for hierarchical in (True, False):
        params = layer_cost_params(MODEL, alone, hierarchical=hierarchical)
        at = rows_of(np.random.default_rng(3), ranks=1, nodes=1)
        assert (all_to_all_time(params, at) == 0.0).all()


def test_replicas_move_four_weights_in_an_update_and_one_in_a_forward_pass() -> None:
    forward = layer_cost_params(MODEL, TOPOLOGY, forward_only=True)
    assert (replica_transfers(PARAMS), replica_transfers(forward)) == (4.0, 1.0)
    once = replicate_time(PARAMS, np.array([0.0, 1.0, 2.0]))
    assert once == pytest.approx([0.0, 0.3 * 4 * WEIGHT / 300e9 + 10e-6, 0.3 * 8 * WEIGHT / 300e9 + 10e-6])


def test_cross_node_replicas_cost_what_the_layer_does_not_hide_and_never_nothing() -> None:
    busy = 4 * WEIGHT / 43e9
    hidden = replace(PARAMS, prefetch_hidden_s=1.5 * busy)
    times = prefetch_time(hidden, np.array([0.0, 1.0, 2.0, 10.0]))
    assert times == pytest.approx([0.0, 0.3 * busy, (0.5 + 0.45) * busy, (8.5 + 0.45) * busy])


def test_replicas_hide_under_attention_as_far_as_it_lasts() -> None:
    """Seven copies of one home where attention leaves room for two: five are waited for, two cost their contention."""
    one = 4 * WEIGHT / 300e9
    narrow = replace(PARAMS, replica_hidden_s=2 * one)
    seven = float(replicate_time(narrow, np.array(7.0)))
    assert seven == pytest.approx((5 + 2 * 0.3) * one + narrow.replica_fixed_s)
    assert seven > float(replicate_time(PARAMS, np.array(7.0)))


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 1))
def test_what_is_exposed_lies_between_contention_and_all_of_it(transfer: float, window: float, share: float) -> None:
    exposed = float(exposed_time(np.array(transfer), window, share))
    assert share * transfer <= exposed * (1 + 1e-12) <= transfer * (1 + 1e-9) + 1e-300
    assert exposed >= float(exposed_time(np.array(transfer), 2 * window, share)) * (1 - 1e-12)


def test_a_migration_lasts_as_long_as_its_busiest_sender() -> None:
    assert reorder_time(np.array([0, 43_000_000_000, 1]), 43e9) == 1.0
    assert reorder_time(np.zeros(0, np.int64), 43e9) == 0.0


@given(seeds, st.booleans(), st.booleans(), st.booleans())
def test_a_layer_is_the_sum_of_its_phases(seed: int, hierarchical: bool, recompute: bool, forward_only: bool) -> None:
    params = layer_cost_params(
        MODEL, TOPOLOGY, hierarchical=hierarchical, recompute_moe=recompute, forward_only=forward_only
    )
    at = rows_of(np.random.default_rng(seed))
    time = layer_time(params, at)
    forwards = 2 if recompute and not forward_only else 1
    gemm = forwards * gemm_time(params, at).max(axis=-1)
    gemm = gemm + (not forward_only) * gemm_time(params, at, backward=True).max(axis=-1)
    assert time.expert_gemm_s == pytest.approx(gemm)
    passes = 2 * (forwards + (not forward_only))
    assert time.all_to_all_s == pytest.approx(passes * all_to_all_time(params, at))
    parts = time.expert_gemm_s + time.all_to_all_s + time.replicate_s + time.prefetch_s
    assert time.total_s == pytest.approx(parts)


@given(seeds, st.sampled_from([field.name for field in fields(LayerRows)]))
def test_more_of_anything_never_costs_less(seed: int, quantity: str) -> None:
    rng = np.random.default_rng(seed)
    at = rows_of(rng)
    more = replace(at, **{quantity: getattr(at, quantity) + rng.random(getattr(at, quantity).shape) * 1000})
    assert (layer_time(PARAMS, more).total_s >= layer_time(PARAMS, at).total_s).all()


@given(seeds)
def test_visits_lie_between_one_place_and_the_number_of_choices(seed: int) -> None:
    """Shares sum to K; every visit is a token's, and a token makes at most K of them."""
    rng = np.random.default_rng(seed)
    drawn = rng.random((3, 4, 8)) ** 4
    shares = np.minimum(2 * drawn / drawn.sum(axis=(1, 2), keepdims=True), 1.0)
    chosen = shares.sum(axis=(1, 2))
    tokens = rng.random(3) * 1000
    visits, ingress, egress = independent_visits(shares, tokens, 2)
    assert (visits <= tokens[:, None] * 4 * shares.sum(axis=2) + 1e-9).all()
    assert (visits.sum(axis=1) >= tokens * 4 * -np.expm1(-chosen) - 1e-9).all()
    assert (visits.sum(axis=1) <= tokens * 4 * chosen + 1e-9).all()
    # Every copy that leaves a node enters another.
    assert ingress.sum(axis=1) == pytest.approx(egress.sum(axis=1))


def test_visits_of_certain_choices_are_certain() -> None:
    shares = np.zeros((4, 8))
    shares[0, 0] = shares[3, 7] = 1.0
    visits, ingress, egress = independent_visits(shares, np.array(10.0), 2)
    assert visits == pytest.approx([40, 0, 0, 40])
    assert ingress == pytest.approx([10, 10])
    assert egress == pytest.approx([10, 10])


def test_rows_are_padded_to_whole_tiles() -> None:
    assert padded_rows(np.array([0, 1, 128, 129]), 128.0).tolist() == [0.0, 128.0, 128.0, 256.0]


def test_a_constant_that_is_no_rate_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="hbm_bytes_per_s must be positive, got 0"):
        replace(PARAMS, hbm_bytes_per_s=0.0)
    with pytest.raises(InvalidInputError, match="a2a_latency_s must be finite and >= 0, got nan"):
        replace(PARAMS, a2a_latency_s=math.nan)


def test_resident_copies_are_bound_by_the_busiest_link_of_either_end() -> None:
    """One push of W and one return of 2 W per copy; a home that feeds seven copies is as busy as seven copies."""
    update = PARAMS
    each = update.expert_bytes / update.prefetch_bytes_per_s
    none, one = np.zeros((2, 8), np.int64), np.zeros((2, 8), np.int64)
    one[0, 0] = one[1, 1] = 1
    spread, from_one = np.ones((2, 8), np.int64), np.zeros((2, 8), np.int64)
    from_one[0, 0], from_one[1, 1:] = 7, 1
    assert resident_time(update, none, none) == 0.0
    assert resident_time(update, one, none) == pytest.approx(3 * each)
    assert resident_time(update, spread, none) == resident_time(update, one, none)
    assert resident_time(update, from_one, none) == pytest.approx(7 * 3 * each)
    inside = resident_time(update, none, one)
    assert inside == pytest.approx(3 * update.expert_bytes / update.replica_p2p_bytes_per_s)
    log_prob = replace(update, backward_passes=0.0)
    assert resident_time(log_prob, one, none) == pytest.approx(each)
