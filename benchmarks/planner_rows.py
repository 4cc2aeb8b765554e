"""Quality and time of policies on planning problems: the rows behind `moe-rl bench planner`.

Loads are token-expert pairs. A plan is scored on the loads of its own layout, so that packing counts for what it does.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import imbalance, node_load, rank_load
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.planner.assemble import no_replicas
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.bounds import node_bound, placement_bound
from moe_rl.planner.migration import migration_time
from moe_rl.planner.predict import predicted_cost
from moe_rl.planner.registry import POLICIES, make_planner
from moe_rl.planner.relayout import load_of_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRow:
    """One policy on one problem."""

    case: str
    policy: str
    imbalance: float
    node_imbalance: float
    bound: float
    """Imbalance that no split of tokens over the plan's own instances can go below."""
    in_node_bound: float
    """Imbalance that no plan with these homes and replicas inside nodes alone can go below."""
    replicas_per_plan: float
    cross_node_replicas_per_plan: float
    most_nic_in: int
    """Most cross-node replicas that one NIC receives for a (group, micro-batch, layer)."""
    most_nic_out: int
    copied_bytes: int
    """Weights of all replicas, one way."""
    moved_bytes: int
    """Weights and optimizer state of the homes that move between steps."""
    predicted_s: float
    """MoE layers of the step by `core.cost`."""
    move_s: float
    fraction_of_forced_balance: float
    """Predicted time with uniform loads / predicted time and moves of this plan."""
    plan_time_s: float

    def as_json(self) -> dict[str, object]:
        """Return the row as plain values."""
        return asdict(self)


def measure_policies(problems: Mapping[str, PlanProblem], policies: Sequence[str] | None = None) -> Iterator[PolicyRow]:
    """Yield a row for every policy (those named, or all) on every problem, as they come."""
    for case, problem in problems.items():
        forced_s = forced_balance_cost(problem)
        for policy in POLICIES.names if policies is None else policies:
            plan = make_planner(policy).plan(problem)
            yield policy_row(case, problem, plan, forced_s=forced_s)


def policy_row(case: str, problem: PlanProblem, plan: Plan, *, forced_s: float) -> PolicyRow:
    """Return the figures of one plan."""
    load = load_of_plan(problem, plan.layout)
    under_plan = replace(problem, load=load, layout=plan.layout, sequence_load=None)
    rows = rank_load(plan, load)
    topology = problem.topology
    nic_in, nic_out = _most_per_nic(plan, problem)
    predicted_s = predicted_cost(plan, under_plan)
    start = problem.starting_placement().home_rank
    move_s = migration_time(start, plan.placement.home_rank, problem)
    return PolicyRow(
        case=case,
        policy=plan.policy,
        imbalance=imbalance(rows),
        node_imbalance=imbalance(node_load(rows, topology.ranks_per_domain)),
        bound=placement_bound(load, plan).imbalance,
        in_node_bound=node_bound(load, plan.placement.home_rank, topology.ranks_per_domain).imbalance,
        replicas_per_plan=plan.replicas_per_plan,
        cross_node_replicas_per_plan=plan.cross_node_replicas_per_plan(topology.node_of_rank),
        most_nic_in=nic_in,
        most_nic_out=nic_out,
        copied_bytes=plan.replicas.copies * problem.model.expert_bytes,
        moved_bytes=plan.migration.moved_bytes,
        predicted_s=predicted_s,
        move_s=move_s,
        fraction_of_forced_balance=forced_s / (predicted_s + move_s) if predicted_s > 0 else 1.0,
        plan_time_s=plan.solve_time_s,
    )


def forced_balance_cost(problem: PlanProblem) -> float:
    """Return the predicted seconds of uniform routing of as many pairs: the published "ideal"."""
    load = problem.load
    total = load.pairs.sum(axis=(3, 4), dtype=np.int64)
    even = np.broadcast_to((total // (load.ep_size * load.num_experts))[..., None, None], load.pairs.shape)
    uniform = StepLoad(pairs=even.astype(np.int32), tokens=load.tokens, top_k=load.top_k)
    contiguous = ExpertPlacement.contiguous(
        num_layers=load.num_layers, num_experts=load.num_experts, ep_size=load.ep_size, spare_slots=problem.spare_slots
    )
    static = make_planner("static").plan(replace(problem, current_placement=None))
    plan = replace(static, placement=contiguous, replicas=no_replicas(problem))
    return predicted_cost(plan, replace(problem, load=uniform))


def policy_table(rows: Iterable[PolicyRow]) -> str:
    """Return the rows as one table for people."""
    lines = [
        f"{'case':34} {'policy':12} {'imbalance':>9} {'bound':>7} {'in node':>7} {'copies':>6} {'cross':>5} {'NIC':>5} "
        f"{'predicted s':>11} {'moves s':>8} {'of forced':>9} {'plan s':>7}"
    ]
    lines += [
        f"{row.case:34} {row.policy:12} {row.imbalance:9.4f} {row.bound:7.4f} {row.in_node_bound:7.4f} "
        f"{row.replicas_per_plan:6.2f} {row.cross_node_replicas_per_plan:5.2f} "
        f"{row.most_nic_in}/{row.most_nic_out:<3} {row.predicted_s:11.4f} {row.move_s:8.4f} "
        f"{row.fraction_of_forced_balance:9.4f} {row.plan_time_s:7.3f}"
        for row in rows
    ]
    return "\n".join(lines)


def _most_per_nic(plan: Plan, problem: PlanProblem) -> tuple[int, int]:
    """Return the most cross-node replicas that one rank's NIC receives and sends in one cell."""
    replicas, node = plan.replicas, problem.topology.node_of_rank
    cell = replicas.index_of_replica()
    rank = replicas.physical_id // plan.placement.slots_per_rank
    home = plan.placement.home_rank[cell % max(1, replicas.num_layers), replicas.expert]
    crosses = (node[rank] != node[home]) & ~replicas.resident
    most = [
        int(np.unique(cell[crosses] * problem.load.ep_size + at[crosses], return_counts=True)[1].max(initial=0))
        for at in (rank, home)
    ]
    return most[0], most[1]
