"""The torch slot table sends every token where `core.plan.slot_map` sends it."""

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import HARDWARE, loads, problem_of, topologies

from moe_rl.balancing.slots import SlotTable, SlotTables
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.load import StepLoad
from moe_rl.core.plan import ReplicaPlan, slot_map
from moe_rl.core.topology import ClusterTopology
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


@pytest.mark.lengthy
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


def test_a_replica_in_the_home_slot_of_another_expert_is_refused() -> None:
    """Four experts on two ranks of two home slots and a spare one: slots 0, 1, 3 and 4 are homes in both layers."""
    topology = ClusterTopology(hardware=HARDWARE, ep_size=2, ranks_per_node=2)
    load = StepLoad(pairs=np.ones((1, 2, 2, 2, 4), np.int32), tokens=np.full((1, 2, 2), 4), top_k=1)
    static = make_planner("static").plan(problem_of(load, topology, objective="imbalance", replica_slots=1))

    def replica_in(slot: int) -> SlotTables:
        one = np.ones((1, 2), np.int32)
        replicas = ReplicaPlan(
            offsets=np.array([0, 0, 0, 0, 1]),  # micro-batch 1, layer 1
            expert=np.array([0], np.int32),
            physical_id=np.array([slot], np.int32),
            source_quota=one,
            source_pairs=one,
            resident=np.array([False]),
            num_ep_groups=1,
            num_micro_batches=2,
            num_layers=2,
        )
        return SlotTables.of_plan(replace(static, replicas=replicas), group=0, source_rank=0)

    assert replica_in(5).row.tolist() == [[-1, -1], [-1, 0]]
    with pytest.raises(InvalidInputError, match="in micro-batch 1, layer 1, the plan puts a replica into the home"):
        replica_in(4)


def test_on_a_gpu_one_launch_gets_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """`probs` stands in for a tensor on a GPU, of which only its place is asked."""
    launched: list[tuple[object, ...]] = []
    monkeypatch.setattr(SlotTable, "to_slots_in_one_launch", lambda *arguments: launched.append(arguments))
    table = SlotTable(expert=torch.tensor([0]), split=torch.zeros(6, 1))
    on_gpu, routing_map = SimpleNamespace(is_cuda=True), torch.ones(1, 1, dtype=torch.bool)
    table.to_slots(on_gpu, routing_map)  # type: ignore[arg-type]
    assert launched == [(table, on_gpu, routing_map)]


@pytest.mark.triton
@pytest.mark.parametrize("num_tokens", [0, 1, 1023, 2500])
def test_one_launch_does_what_torch_does(num_tokens: int, rng: np.random.Generator) -> None:
    """Three experts on six slots of two ranks; more and fewer pairs occur than were planned."""
    before = rng.integers(0, num_tokens // 3 + 1, 6)
    split = np.stack([before, before + rng.integers(0, 300, 6), 2 * before, 2 * before + 500, before + 90, 9 * before])
    table = SlotTable(
        expert=torch.tensor([0, 1, 2, 0, 1, 0]), split=torch.from_numpy(split), source_rank=1, num_sources=2
    )
    routing_map = dense(random_ids(rng, num_tokens, 3, 2), 3)
    found = []
    for to_slots in (table.to_slots, table.to_slots_in_one_launch):
        probs = torch.rand(routing_map.shape, generator=torch.Generator().manual_seed(0), requires_grad=True)
        slot_probs, slot_routing_map = to_slots(probs, routing_map)
        (slot_probs * torch.arange(6.0)).sum().backward()
        found.append((slot_probs.detach(), slot_routing_map, probs.grad))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from moe_rl.balancing.triton_slots import BLOCK, _to_slots

names = "probs routing_map actual expert split slot_probs slot_map".split()
pointers = dict(zip(names, ["*bf16", "*u8", "*i64", "*i64", "*i64", "*bf16", "*u8"]))
numbers = dict.fromkeys(["num_rows", "num_experts", "num_slots", "source", "num_sources"], "i32")
source = ASTSource(_to_slots, {**pointers, **numbers, "BLOCK": "constexpr"}, {"BLOCK": BLOCK})
for arch in (90, 100):
    print(compile(source, target=GPUTarget("cuda", arch, 32)).metadata.num_warps)
"""


@pytest.mark.triton
def test_the_launch_compiles_for_hopper_and_blackwell() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["4", "4"], done.stderr
