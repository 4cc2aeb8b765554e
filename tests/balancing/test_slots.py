"""The torch slot table sends every token where `core.plan.slot_map` sends it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import loads, problem_of, topologies

from moe_rl.balancing.slots import SlotTable, SlotTables
from moe_rl.core.plan import slot_map
from moe_rl.planner.registry import make_planner


def dense(ids: np.ndarray, num_experts: int) -> torch.Tensor:
    """[N, E] bool map of [N, K] ids; -1 is no choice."""
    routing_map = torch.zeros((len(ids), num_experts), dtype=torch.bool)
    row, choice = np.nonzero(ids >= 0)
    routing_map[row, ids[row, choice]] = True
    return routing_map


def random_ids(rng: np.random.Generator, num_tokens: int, num_experts: int, top_k: int) -> np.ndarray:
    """[N, K] distinct ids, low ones more often, so that quotas overflow."""
    scores = rng.random((num_tokens, num_experts)) + np.linspace(0.6, 0.0, num_experts)
    ids = np.argsort(-scores, axis=1)[:, :top_k].copy()
    ids[rng.random(ids.shape) < 0.05] = -1
    return ids


@settings(max_examples=40)
@given(data=st.data())
def test_the_table_agrees_with_the_slot_map_of_core(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    load = data.draw(loads(topology))
    policy = data.draw(st.sampled_from(["static", "ultraep", "relibra", "moe-rl"]))
    problem = problem_of(load, topology, objective="imbalance", replica_slots=data.draw(st.integers(0, 2)))
    plan = make_planner(policy).plan(problem)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    cell = {
        "group": int(rng.integers(load.num_ep_groups)),
        "micro_batch": int(rng.integers(load.num_micro_batches)),
        "layer": int(rng.integers(load.num_layers)),
        "source_rank": int(rng.integers(load.ep_size)),
    }
    ids = random_ids(rng, int(rng.integers(0, 40)), load.num_experts, min(load.top_k, load.num_experts))
    routing_map = dense(ids, load.num_experts)
    probs = torch.rand(routing_map.shape) * routing_map
    tables = SlotTables.of_plan(plan, group=cell["group"], source_rank=cell["source_rank"])
    table = tables.table(cell["micro_batch"], cell["layer"])
    expected = slot_map(plan, **cell, routed_experts=ids)
    if table is None:
        assert set(expected.ravel().tolist()) <= {-1, *plan.placement.home_slot()[cell["layer"]].tolist()}
        return
    slot_probs, slot_routing_map = table.to_slots(probs, routing_map)
    assert torch.equal(slot_routing_map, dense(expected, slot_routing_map.shape[1]))
    assert torch.equal(slot_routing_map.sum(1), routing_map.sum(1))
    row, choice = np.nonzero(ids >= 0)
    assert torch.equal(slot_probs[row, expected[row, choice]], probs[row, ids[row, choice]])
    assert slot_probs.sum() == pytest.approx(float(probs.sum()))  # nothing beside the pairs themselves


@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_homes_alone_are_a_column_permutation(num_tokens: int) -> None:
    order = np.array([3, 0, 2, 1])
    routing_map = torch.eye(4, dtype=torch.bool)[torch.arange(num_tokens) % 4]
    probs = routing_map * 0.5
    slot_probs, slot_routing_map = SlotTable.of_homes(order).to_slots(probs, routing_map)
    assert torch.equal(slot_routing_map, routing_map[:, order])
    assert torch.equal(slot_probs, probs[:, order])


def test_the_gradient_of_probs_reaches_each_experts_column_once() -> None:
    """Of the three pairs of expert 0 a replica takes two; of expert 1's it takes none."""
    quota_and_share = [[2, 0, 0, 0], [3, 2, 2, 0]]
    table = SlotTable(
        expert=torch.tensor([0, 1, 0, 1]),
        split=torch.tensor([*quota_and_share, *quota_and_share, [3, 2, 3, 2], [3, 2, 3, 2]]),
    )
    routing_map = torch.tensor([[True, True], [True, False], [True, False]])
    probs = torch.rand(3, 2, requires_grad=True)
    slot_probs, slot_routing_map = table.to_slots(probs, routing_map)
    expected = [[False, True, True, False], [False, False, True, False], [True, False, False, False]]
    assert slot_routing_map.tolist() == expected
    slot_probs.sum().backward()
    assert probs.grad is not None
    assert torch.equal(probs.grad, routing_map.float())
