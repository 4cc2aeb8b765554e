"""DeepSeek's Expert Parallelism Load Balancer: redundant experts for a whole step, tokens split equally over copies.

Algorithm of deepseek-ai/EPLB:eplb.py, written afresh and vectorised over layers. L layers, E experts, P ranks.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.load import StepLoad
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan, ReplicaPlan
from moe_rl.planner.assemble import finish_plan, replica_plan
from moe_rl.planner.base import Levers, Planner, PlanProblem
from moe_rl.planner.split import equal_source_quotas


@dataclass(frozen=True, slots=True, kw_only=True)
class EplbPlanner(Planner):
    """EPLB on the loads of an earlier step: what a system without routing replay can do."""

    name: ClassVar[str] = "eplb"
    summary: ClassVar[str] = "DeepSeek's EPLB, planned from the previous step's loads"
    needs_history: ClassVar[bool] = True
    by_default: ClassVar[bool] = True
    fills_slots_for_a_step: ClassVar[bool] = True

    hierarchical: bool = False
    """Pack expert groups into nodes first and replicate inside them; needs a router with groups."""
    reorder_interval: int = 20
    """Steps from one choice of homes to the next, which share its moves: no trainer moves optimizer states for every
    step. Homes are taken to fit each of these steps as well as the one after the choice, which is in EPLB's favor."""

    def __post_init__(self) -> None:
        require(self.reorder_interval >= 1, f"reorder_interval must be at least 1, got {self.reorder_interval}.")

    def known(self, problem: PlanProblem) -> StepLoad:
        """Return the loads that the placement is made for; raise where they are not known."""
        if problem.history is None:
            raise InvalidInputError(
                f"policy {self.name!r} plans from the expert loads of an earlier step: pass them as the "
                "history, or use the policy 'eplb-oracle'."
            )
        return problem.history

    def make(self, problem: PlanProblem, may: Levers) -> Plan:
        """Return the plan: homes and copies for `known` loads, every expert's tokens dealt over them equally."""
        placement = eplb_placement(problem, self.known(problem), hierarchical=self.hierarchical)
        plan = finish_plan(problem, self, placement=placement, replicas=equally_split(problem, placement))
        return self.homes_kept(plan)

    def homes_kept(self, plan: Plan) -> Plan:
        """Return the plan whose moves are paid for by all steps of an interval."""
        return replace(plan, migration=replace(plan.migration, steps_served=self.reorder_interval))


@dataclass(frozen=True, slots=True, kw_only=True)
class EplbOraclePlanner(EplbPlanner):
    """EPLB on the loads of the step itself, which only routing replay knows."""

    name: ClassVar[str] = "eplb-oracle"
    summary: ClassVar[str] = "DeepSeek's EPLB, planned from this step's loads"
    needs_history: ClassVar[bool] = False

    reorder_interval: int = 1
    """Homes for the loads of this very step are worth nothing to the next."""

    def known(self, problem: PlanProblem) -> StepLoad:
        """Return the step's own loads."""
        return problem.load


def eplb_placement(problem: PlanProblem, known_load: StepLoad, *, hierarchical: bool) -> ExpertPlacement:
    """Return EPLB's placement for the step totals of `load`: E/P + R filled slots per rank, the C others empty.

    The instance with the lowest physical id is an expert's home.
    """
    load, topology = problem.load, problem.topology
    require(
        known_load.num_layers == load.num_layers and known_load.num_experts == load.num_experts,
        f"the history and the step do not match: the history has {known_load.num_layers} MoE layers with "
        f"{known_load.num_experts} experts each, but the step has {load.num_layers} MoE layers with "
        f"{load.num_experts} experts each.",
    )
    per_rank = topology.experts_per_rank(load.num_experts) + problem.replica_slots
    expert = rebalance_experts(
        known_load.per_expert().sum(axis=(0, 1)),
        num_physical_experts=per_rank * load.ep_size,
        num_groups=problem.model.num_expert_groups if hierarchical else 1,
        num_nodes=topology.num_nodes if hierarchical else 1,
        num_ranks=load.ep_size,
    )
    home = np.zeros((load.num_layers, load.num_experts), np.int32)
    layer = np.arange(load.num_layers)
    for slot in reversed(range(expert.shape[1])):
        home[layer, expert[:, slot]] = slot // per_rank
    slots = np.full((load.num_layers, load.ep_size, per_rank + problem.cross_node_slots), -1, np.int32)
    slots[:, :, :per_rank] = expert.reshape(load.num_layers, load.ep_size, per_rank)
    return ExpertPlacement(
        physical_to_logical_map=slots.reshape(load.num_layers, -1), home_rank=home, ep_size=load.ep_size
    )


def equally_split(problem: PlanProblem, placement: ExpertPlacement) -> ReplicaPlan:
    """Return the quotas that deal every expert's pairs round-robin over its physical instances, source by source."""
    load = problem.load
    slots = placement.physical_to_logical_map
    layer, slot = np.nonzero(slots >= 0)
    expert = slots[layer, slot]
    # Instances of an expert take turns in the order of their physical ids; turn 0 is the home.
    order = np.lexsort((slot, expert, layer))
    layer, slot, expert = layer[order], slot[order], expert[order]
    key = layer * load.num_experts + expert
    turn = np.arange(len(key)) - np.searchsorted(key, key)
    count = placement.logical_replica_count().astype(np.int64)[layer, expert]
    layer, slot, expert, turn, count = (column[turn > 0] for column in (layer, slot, expert, turn, count))

    groups_and_batches = load.num_ep_groups * load.num_micro_batches
    pairs = load.pairs.reshape(groups_and_batches, *load.pairs.shape[2:])[:, layer, :, expert]
    # Advanced indices on both sides of a slice put the replica axis first.
    by_batch = pairs.swapaxes(0, 1).reshape(-1, load.ep_size).astype(np.int64)
    quota = equal_source_quotas(by_batch, np.tile(turn, groups_and_batches), np.tile(count, groups_and_batches))
    first_cell = np.repeat(np.arange(groups_and_batches) * load.num_layers, len(layer))
    return replica_plan(
        problem,
        cell=first_cell + np.tile(layer, groups_and_batches),
        expert=np.tile(expert, groups_and_batches),
        physical_id=np.tile(slot, groups_and_batches).astype(np.int32),
        source_quota=quota,
        resident=np.ones(len(quota), np.bool_),
    )


def rebalance_experts(
    expert_load: NDArray[np.number], *, num_physical_experts: int, num_groups: int, num_nodes: int, num_ranks: int
) -> NDArray[np.int32]:
    """Return [L, num_physical_experts], the expert in each slot: groups to nodes, copies in nodes, slots to ranks.

    `expert_load` is [L, E]. One group and one node is EPLB's global policy. Every node gets as many groups, and every
    rank as many slots, as every other. Raises `InvalidInputError` where the counts do not divide.
    """
    num_layers, num_experts = expert_load.shape
    _check_divisions(num_experts, num_physical_experts, num_groups, num_nodes, num_ranks)
    weight = expert_load.astype(np.float64)
    group_size = num_experts // num_groups

    node, position = _pack(weight.reshape(num_layers, num_groups, group_size).sum(axis=2), num_nodes)
    group_order = np.argsort(node * num_groups + position, axis=1)
    # expert_order [L, E]: experts as their groups stand in the nodes.
    expert_order = (group_order[:, :, None] * group_size + np.arange(group_size)).reshape(num_layers, num_experts)

    in_node = np.take_along_axis(weight, expert_order, axis=1).reshape(num_layers * num_nodes, -1)
    instance, count = _replicate(in_node, num_physical_experts // num_nodes)
    share = np.take_along_axis(in_node / count, instance, axis=1)
    rank, position = _pack(share, num_ranks // num_nodes)
    slot_order = np.argsort(rank * num_physical_experts + position, axis=1)

    local = np.take_along_axis(instance, slot_order, axis=1).reshape(num_layers, num_nodes, -1)
    local = local + np.arange(num_nodes)[None, :, None] * (num_experts // num_nodes)
    return np.take_along_axis(expert_order, local.reshape(num_layers, -1), axis=1).astype(np.int32)


def _check_divisions(num_experts: int, num_physical: int, num_groups: int, num_nodes: int, num_ranks: int) -> None:
    for dividend_name, number, divisor_name, divisor in (
        ("experts", num_experts, "expert groups", num_groups),
        ("expert groups", num_groups, "nodes", num_nodes),
        ("ranks", num_ranks, "nodes", num_nodes),
        ("physical experts", num_physical, "ranks", num_ranks),
    ):
        require(
            divisor >= 1 and number % divisor == 0,
            f"EPLB: {number} {dividend_name} cannot be split evenly across {divisor} {divisor_name}.",
        )
    require(
        num_physical >= num_experts,
        f"EPLB: {num_physical} slots (physical experts) are too few for {num_experts} experts.",
    )


def _pack(weight: NDArray[np.float64], num_packs: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pack n items [X, n] into packs of n / num_packs items each, heaviest first onto the lightest pack with room.

    Returns the pack of each item and its position in the pack, both [X, n].
    """
    rows, num_items = weight.shape
    per_pack = num_items // num_packs
    if per_pack == 1:
        return np.tile(np.arange(num_items), (rows, 1)), np.zeros((rows, num_items), np.int64)
    pack = np.zeros((rows, num_items), np.int64)
    position = np.zeros((rows, num_items), np.int64)
    items_in_pack = np.zeros((rows, num_packs), np.int64)
    total = np.zeros((rows, num_packs))
    row = np.arange(rows)
    for item in np.argsort(-weight, axis=1, kind="stable").T:
        lightest = np.where(items_in_pack < per_pack, total, np.inf).argmin(axis=1)
        pack[row, item] = lightest
        position[row, item] = items_in_pack[row, lightest]
        items_in_pack[row, lightest] += 1
        total[row, lightest] += weight[row, item]
    return pack, position


def _replicate(weight: NDArray[np.float64], num_physical: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Give one more instance to the expert with the most load per instance until there are `num_physical`.

    Returns the expert of each instance [X, num_physical] and the instances of each expert [X, E].
    """
    rows, num_experts = weight.shape
    expert = np.tile(np.arange(num_experts), (rows, 1))
    count = np.ones((rows, num_experts), np.int64)
    row = np.arange(rows)
    added = []
    for _ in range(num_physical - num_experts):
        heaviest = (weight / count).argmax(axis=1)
        count[row, heaviest] += 1
        added.append(heaviest[:, None])
    return np.concatenate([expert, *added], axis=1), count
