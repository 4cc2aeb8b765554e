"""What `core.cost` expects of a plan: the time of its MoE layers, for policies that do not weigh time themselves.

G EP groups, M micro-batches, L MoE layers.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import LayerRows, layer_time
from moe_rl.core.plan import Plan, ReplicaPlan
from moe_rl.core.plan_rows import rows_of_plan
from moe_rl.core.visits import count_rows, count_visits
from moe_rl.planner.base import PlanProblem


def predicted_cost(plan: Plan, problem: PlanProblem) -> float:
    """Predict the seconds that a step's MoE layers take under `problem.cost`, with replicas but without expert moves.

    Visits of ranks and nodes are counted where the load carries routes, and rows where the dispatcher sends one for
    every expert (`core.visits`). Counts alone do not say which experts meet in one token: then visits are those of
    independent choices (`core.plan_rows`). EP groups run side by side: the slowest counts.
    """
    return float(cell_seconds(plan, problem).sum(axis=2).sum(axis=1).max(initial=0.0))


def cell_seconds(plan: Plan, problem: PlanProblem) -> NDArray[np.float64]:
    """Return [G, M, L] seconds of every MoE layer of every micro-batch, 0 where a micro-batch has no tokens."""
    has_tokens = np.asarray(problem.load.tokens.any(axis=2))[..., None]
    return np.where(has_tokens, layer_time(problem.cost, cell_rows(plan, problem)).total_s, 0.0)


def cell_rows(plan: Plan, problem: PlanProblem) -> LayerRows:
    """Return where the rows of every cell [G, M, L, ...] go."""
    load, topology = problem.load, problem.topology
    rows = rows_of_plan(plan, load, topology, tile_rows=problem.cost.gemm_tile_rows)
    if not problem.cost.a2a_hierarchical:
        rows = count_rows(plan, load, topology).put_into(rows)
    elif load.routes is not None:
        rows = count_visits(plan, load, topology).put_into(rows)
    return rows


def break_even_tokens(plan: Plan, problem: PlanProblem) -> float | None:
    """Return the tokens per rank and micro-batch from which the plan's copies pay; None: they do not up to 1024 times
    the step's own.

    The step's shares under the plan and under contiguous homes without copies, priced at other sizes: rows, tokens and
    the time beside which copies travel grow together, the copies themselves do not. `problem` has the plan's layout.
    """
    load = problem.load
    static_plan = replace(
        plan,
        placement=replace(problem, current_placement=None).starting_placement(),
        replicas=ReplicaPlan.empty(*load.pairs.shape[:4]),
    )
    rows_of_both = [cell_rows(compared_plan, problem) for compared_plan in (static_plan, plan)]
    has_tokens = np.asarray(load.tokens.any(axis=2))[..., None]

    def gain(scale: float) -> float:
        cost = problem.cost
        cost = replace(
            cost, replica_hidden_s=cost.replica_hidden_s * scale, prefetch_hidden_s=cost.prefetch_hidden_s * scale
        )
        scaled_fields = ("rows", "padded_rows", "rank_visits", "nic_ingress", "nic_egress")
        static_s, plan_s = (
            layer_time(cost, replace(rows, **{name: getattr(rows, name) * scale for name in scaled_fields})).total_s
            for rows in rows_of_both
        )
        return float(((static_s - plan_s) * has_tokens).sum())

    lower_scale, upper_scale = 2.0**-10, 2.0**10
    if gain(upper_scale) <= 0:
        return None
    while upper_scale > 1.02 * lower_scale:
        middle_scale = (lower_scale * upper_scale) ** 0.5
        if gain(middle_scale) > 0:
            upper_scale = middle_scale
        else:
            lower_scale = middle_scale
    per_rank = load.tokens.sum() / max(1, int(has_tokens.sum())) / load.ep_size
    return upper_scale * float(per_rank)
