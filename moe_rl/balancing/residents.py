"""Which tokens go to the copies that stay with a rank for a whole step.

A copy stays where it saves a way over the network, so an expert's tokens go to the instance nearest to them: on their
own rank, else in their own node, else at home. Four ranks in two nodes, expert 3 at home on rank 0 and resident on
rank 2: the tokens of ranks 0 and 1 go home, those of ranks 2 and 3 to the copy. Replicas of single micro-batches are
planned for the tokens that go home.

G EP groups, M micro-batches, L MoE layers, P EP ranks, E experts, S resident slots.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.load import StepLoad
from moe_rl.core.placement import ExpertMigration, ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.planner.assemble import replica_plan
from moe_rl.planner.base import PlanProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentShare:
    """What the N resident copies of a placement take of a load."""

    layer: NDArray[np.int64]
    """[N]"""
    expert: NDArray[np.int64]
    """[N]"""
    physical_id: NDArray[np.int64]
    """[N]"""
    pairs: NDArray[np.int32]
    """[G, M, N, P] from every source rank."""

    @classmethod
    def of(cls, load: StepLoad, placement: ExpertPlacement, node_of_rank: NDArray[np.int64]) -> Self:
        """Return the share of all copies; several at one distance split by source ranks."""
        residents, ranks = placement.resident_experts, np.arange(placement.ep_size)
        layer, host, slot = np.nonzero(residents >= 0)
        expert = residents[layer, host, slot].astype(np.int64)
        first = placement.num_experts // placement.ep_size
        home = placement.home_rank[layer, expert]
        own_rank = host[:, None] == ranks
        own_node = node_of_rank[host][:, None] == node_of_rank[ranks]
        own_node &= node_of_rank[home][:, None] != node_of_rank[ranks]  # the home is as near
        turn = (host[:, None] + ranks) % placement.ep_size  # of several copies in a node each serves other ranks first
        score = np.where(own_rank, placement.ep_size + 1, np.where(own_node, turn + 1, 0))
        best = np.zeros((*placement.home_rank.shape, placement.ep_size), np.int64)
        np.maximum.at(best, (layer, expert), score)
        takes = (score > 0) & (score == best[layer, expert])
        pairs = load.pairs[:, :, layer, :, expert].transpose(1, 2, 0, 3) * takes
        return cls(
            layer=layer,
            expert=expert,
            physical_id=host * placement.slots_per_rank + first + slot,
            pairs=pairs.astype(np.int32),
        )

    def rest_of(self, load: StepLoad) -> StepLoad:
        """Return what is left for the homes."""
        pairs = load.pairs.copy()
        for index, (layer, expert) in enumerate(zip(self.layer, self.expert, strict=True)):
            pairs[:, :, layer, :, expert] -= self.pairs[:, :, index]
        return replace(load, pairs=pairs, routes=None)

    def added_to(self, plan: Plan, problem: PlanProblem) -> Plan:
        """Return `plan`, which was made for `rest_of` the problem's load, with these quotas."""
        replicas, load = plan.replicas, problem.load
        group, micro_batch, copy = np.nonzero(self.pairs.any(axis=3))
        cell = (group * load.num_micro_batches + micro_batch) * load.num_layers + self.layer[copy]
        together = replica_plan(
            problem,
            cell=np.concatenate([replicas.cell_of_replica(), cell]),
            expert=np.concatenate([replicas.expert, self.expert[copy]]),
            physical_id=np.concatenate([replicas.physical_id, self.physical_id[copy]]),
            source_quota=np.concatenate([replicas.source_quota, self.pairs[group, micro_batch, copy]]),
            resident=np.concatenate([replicas.resident, np.ones(len(copy), np.bool_)]),
        )
        return replace(plan, replicas=together)


def with_resident_slots(plan: Plan, *, current: ExpertPlacement, resident_experts: NDArray[np.integer]) -> Plan:
    """Return a plan that knows no resident slots with these, [L, P, S], between its homes and its spare slots.

    `current` is the placement in force, which has S of them.
    """
    before, added = plan.placement, resident_experts.shape[2]
    rank, slot = np.divmod(plan.replicas.physical_id, before.slots_per_rank)
    behind = slot >= before.num_experts // before.ep_size
    physical_id = rank * (before.slots_per_rank + added) + slot + added * behind
    placement = ExpertPlacement.from_home_rank(
        before.home_rank,
        ep_size=before.ep_size,
        spare_slots=before.spare_slots,
        resident_experts=resident_experts,
    )
    return replace(
        plan,
        placement=placement,
        replicas=replace(plan.replicas, physical_id=physical_id.astype(np.int32)),
        migration=ExpertMigration.between(current, placement, expert_bytes=plan.migration.expert_bytes),
    )
