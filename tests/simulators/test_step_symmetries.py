"""Names of experts and ranks mean nothing to a simulated step, and twice the micro-batches are twice the work."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from step_cases import StepCase, cases, lengths_for
from strategies import layout_for, seeds

from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.plan import Plan
from moe_rl.simulators.movement import STEP_PARTS


@pytest.mark.lengthy
@given(cases())
def test_doubling_the_micro_batches_doubles_the_time(case: StepCase) -> None:
    setting = replace(case.setting, pipeline_model_parallel_size=1, num_virtual_stages=1, overlap_all_to_all=False)
    once = case.simulate(setting=setting)
    doubled = StepCase(
        load=replace(
            case.load,
            pairs=np.concatenate([case.load.pairs] * 2, axis=1),
            tokens=np.concatenate([case.load.tokens] * 2, axis=1),
        ),
        layout=_twice(case.layout),
        lengths=np.concatenate([case.lengths] * 2),
        topology=case.topology,
        model=case.model,
        plans={name: _plan_twice(plan) for name, plan in case.plans.items()},
        setting=setting,
    ).simulate()
    for name, result in {**once.policies, **once.yardsticks()}.items():
        again = {**doubled.policies, **doubled.yardsticks()}[name]
        work, twice = (
            one.step_time_s - sum(one.prediction.breakdown_s[name] for name in (*STEP_PARTS, "reorder"))
            for one in (result, again)
        )
        assert twice == pytest.approx(2 * work, rel=1e-9), name
        assert again.prediction.imbalance == pytest.approx(result.prediction.imbalance)


@pytest.mark.lengthy
@given(cases(), seeds)
def test_renaming_experts_changes_nothing(case: StepCase, seed: int) -> None:
    """Expert e becomes name[l, e], in the loads and in the plan; Megatron's own placement is not compared."""
    rng = np.random.default_rng(seed)
    layers, experts = case.load.num_layers, case.load.num_experts
    name = rng.permuted(np.broadcast_to(np.arange(experts), (layers, experts)), axis=1)
    pairs = np.empty_like(case.load.pairs)
    np.put_along_axis(pairs, np.broadcast_to(name[:, None, :], pairs.shape), case.load.pairs, axis=4)
    plans = {policy: _renamed(plan, name) for policy, plan in case.plans.items()}
    before, after = case.times(), case.times(load=replace(case.load, pairs=pairs), plans=plans)
    for policy in (*plans, "forced_balance", "ideal"):
        assert after[policy] == pytest.approx(before[policy], rel=1e-9)


@pytest.mark.lengthy
@given(cases(), seeds)
def test_renaming_ranks_within_a_node_changes_nothing(case: StepCase, seed: int) -> None:
    rng = np.random.default_rng(seed)
    topology = replace(case.topology, slices_per_dp_rank=1)
    by_node = np.arange(topology.ep_size).reshape(topology.num_nodes, -1)
    new_rank = rng.permuted(by_node, axis=1).ravel()
    load = _with_renamed_sources(case.load, new_rank)
    plans = {name: _with_renamed_ranks(plan, new_rank) for name, plan in case.plans.items()}
    layout, moved = layout_for(case.load, topology), layout_for(load, topology)
    plans_before = {name: replace(plan, layout=layout) for name, plan in case.plans.items()}
    before = case.times(topology=topology, layout=layout, lengths=lengths_for(case.load, topology), plans=plans_before)
    after = case.times(
        topology=topology,
        layout=moved,
        lengths=lengths_for(load, topology),
        load=load,
        plans={name: replace(plan, layout=moved) for name, plan in plans.items()},
    )
    for name in (*plans, "forced_balance", "ideal"):
        assert after[name] == pytest.approx(before[name], rel=1e-9)


def _twice(layout: BatchLayout) -> BatchLayout:
    return replace(
        layout,
        micro_batch=np.concatenate([layout.micro_batch, layout.micro_batch + layout.num_micro_batches]),
        dp_rank=np.concatenate([layout.dp_rank] * 2),
        order=np.concatenate([layout.order] * 2),
        num_micro_batches=2 * layout.num_micro_batches,
    )


def _plan_twice(plan: Plan) -> Plan:
    old = plan.replicas
    groups = [
        range(g * old.num_micro_batches * old.num_layers, (g + 1) * old.num_micro_batches * old.num_layers)
        for g in range(old.num_ep_groups)
    ]
    cells = [cell for group in groups for cell in (*group, *group)]
    which = np.concatenate([np.arange(old.offsets[c], old.offsets[c + 1]) for c in cells]).astype(np.int64)
    counts = np.diff(old.offsets)[cells]
    replicas = replace(
        old,
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        expert=old.expert[which],
        physical_id=old.physical_id[which],
        source_quota=old.source_quota[which],
        source_pairs=old.source_pairs[which],
        resident=old.resident[which],
        num_micro_batches=2 * old.num_micro_batches,
    )
    return replace(plan, layout=_twice(plan.layout), replicas=replicas)


def _renamed(plan: Plan, name: np.ndarray) -> Plan:
    """The plan with expert e of layer l called name[l, e]."""
    layers = np.arange(len(name))[:, None]
    held = plan.placement.physical_to_logical_map
    home = np.empty_like(plan.placement.home_rank)
    np.put_along_axis(home, name, plan.placement.home_rank, axis=1)
    placement = replace(
        plan.placement,
        physical_to_logical_map=np.where(held >= 0, name[layers, np.maximum(held, 0)], -1).astype(np.int32),
        home_rank=home,
    )
    layer = plan.replicas.index_of_replica() % len(name)
    replicas = replace(plan.replicas, expert=name[layer, plan.replicas.expert].astype(np.int32))
    moves = plan.migration
    renamed_moves = replace(moves, expert=name[moves.layer, moves.expert].astype(np.int32), new_home_rank=home)
    return replace(plan, placement=placement, replicas=replicas, migration=renamed_moves)


def _with_renamed_sources(load: StepLoad, new_rank: np.ndarray) -> StepLoad:
    pairs, tokens = np.empty_like(load.pairs), np.empty_like(load.tokens)
    pairs[:, :, :, new_rank], tokens[:, :, new_rank] = load.pairs, load.tokens
    return replace(load, pairs=pairs, tokens=tokens)


def _with_renamed_ranks(plan: Plan, new_rank: np.ndarray) -> Plan:
    """The plan with everything of rank r on rank new_rank[r]."""
    placement, slots = plan.placement, plan.placement.slots_per_rank

    def slot(old: np.ndarray) -> np.ndarray:
        return (new_rank[old // slots] * slots + old % slots).astype(np.int32)

    held = np.empty_like(placement.physical_to_logical_map)
    held[:, slot(np.arange(held.shape[1]))] = placement.physical_to_logical_map
    home = new_rank[placement.home_rank].astype(np.int32)
    quota, planned = (np.empty_like(plan.replicas.source_quota) for _ in range(2))
    quota[:, new_rank], planned[:, new_rank] = plan.replicas.source_quota, plan.replicas.source_pairs
    moves = plan.migration
    return replace(
        plan,
        placement=replace(placement, physical_to_logical_map=held, home_rank=home),
        replicas=replace(
            plan.replicas, physical_id=slot(plan.replicas.physical_id), source_quota=quota, source_pairs=planned
        ),
        migration=replace(
            moves,
            source_slot=slot(moves.source_slot),
            destination_slot=slot(moves.destination_slot),
            new_home_rank=home,
        ),
    )
