"""Group-limited routers visit fewer nodes: priced from counts, checked against drawing the router."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_cases import SPARE_SLOTS, case_of
from strategies import HARDWARE, layout_for, load_of, loads, seeds

from moe_rl.config import load_model
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.plan_rows import GroupLimit, rows_of_plan
from moe_rl.core.topology import ClusterTopology
from moe_rl.simulators.balanced import uniform_load
from moe_rl.simulators.rows import fewest_rows, uniform_rows

DEEPSEEK = load_model("deepseek-v3").spec


def drawn_node_visits(rng: np.random.Generator, tokens: int, nodes: int) -> float:
    """Nodes that a token of a uniform DeepSeek-V3 router visits: 4 of 8 groups, then 8 of their 128 experts."""
    groups = np.argsort(rng.random((tokens, 8)), axis=1)[:, :4]
    eligible = (groups[:, :, None] * 32 + np.arange(32)).reshape(tokens, -1)
    chosen = np.take_along_axis(eligible, np.argsort(rng.random(eligible.shape), axis=1)[:, :8], axis=1)
    node = chosen // (256 // nodes)
    return float(np.mean([len(np.unique(row)) for row in node]))


@pytest.mark.parametrize("nodes", [4, 8])
def test_uniform_visits_are_those_of_the_router(nodes: int) -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=8 * nodes)
    model = replace(DEEPSEEK, num_layers=4, moe_layer_ids=(3,))
    load = uniform_load(model, topology, tokens_per_rank=1024)
    limited, free = (
        uniform_rows(load, topology, tile_rows=128.0, limit=limit) for limit in (GroupLimit.of(model), None)
    )
    # A NIC of every node receives its node's visits by the tokens of the other nodes' ranks of its index.
    visits = limited.nic_ingress.sum() / 1024 / (nodes - 1)
    expected = drawn_node_visits(np.random.default_rng(0), 4000, nodes)
    assert visits == pytest.approx(expected, rel=0.1)
    assert limited.nic_ingress.sum() < 0.85 * free.nic_ingress.sum()
    assert limited.rows.sum() == free.rows.sum()


def test_a_router_without_groups_has_no_limit() -> None:
    assert GroupLimit.of(load_model("qwen3-30b-a3b").spec) is None
    assert GroupLimit.of(replace(DEEPSEEK, expert_group_top_k=8)) is None
    assert GroupLimit.of(replace(DEEPSEEK, expert_group_top_k=0)) is None


def test_a_limit_that_leaves_too_few_experts_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"expert_group_top_k \(9\) leaves .* or to at most 8 so that"):
        replace(DEEPSEEK, expert_group_top_k=9)
    with pytest.raises(InvalidInputError, match=r"leaves each token .* leaves at least 40 experts"):
        replace(DEEPSEEK, top_k=40, expert_group_top_k=1)


@settings(max_examples=30)
@given(st.data(), seeds)
def test_the_bound_holds_and_groups_only_save_visits(data: st.DataObject, seed: int) -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)
    load = data.draw(loads(topology, experts_per_rank=2))
    case = case_of(load, topology, np.random.default_rng(seed))
    limit = GroupLimit(num_groups=4, top_k=2)
    least = fewest_rows(load, topology, slots_per_rank=2 + SPARE_SLOTS, limit=limit)
    for plan in case.plans.values():
        free = rows_of_plan(plan, load, topology, tile_rows=128.0)
        limited = rows_of_plan(plan, load, topology, tile_rows=128.0, limit=limit)
        assert (limited.rank_visits <= free.rank_visits * (1 + 1e-9) + 1e-9).all()
        assert (limited.nic_ingress <= free.nic_ingress * (1 + 1e-9) + 1e-9).all()
        assert (limited.rows == free.rows).all()
        for name in ("rank_visits", "nic_ingress", "nic_egress"):
            bound = getattr(least, name)[..., 0]
            assert (getattr(limited, name).max(axis=-1) * (1 + 1e-9) + 1e-9 >= bound).all(), name


def test_a_model_with_groups_is_simulated_with_them() -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)
    load = load_of(np.full((1, 1, 2, 4, 8), 500, np.int32), 2)
    case = case_of(load, topology, np.random.default_rng(0))
    grouped = replace(case.model, num_expert_groups=4, expert_group_top_k=2)
    assert layout_for(load, topology).num_micro_batches == 1
    free, limited = case.times(), case.times(model=grouped)
    for name in ("homes", "replicas", "resident", "forced_balance"):
        assert limited[name] < free[name]
    assert limited["ideal"] <= min(limited.values())
