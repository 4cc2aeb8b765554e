"""What `core.cost` expects of a plan: the time of its MoE layers, for policies that do not weigh time themselves.

G EP groups, M micro-batches, L MoE layers.
"""

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import layer_time
from moe_rl.core.plan import Plan
from moe_rl.core.plan_rows import rows_of_plan
from moe_rl.core.visits import count_rows, count_visits
from moe_rl.planner.base import PlanProblem


def predicted_cost(plan: Plan, problem: PlanProblem) -> float:
    """Return seconds of the step's MoE layers under `problem.cost`, replicas charged, moves between steps not.

    Visits of ranks and nodes are counted where the load carries routes, and rows where the dispatcher sends one for
    every expert (`core.visits`). Counts alone do not say which experts meet in one token: then visits are those of
    independent choices (`core.plan_rows`). EP groups run side by side: the slowest counts.
    """
    return float(cell_seconds(plan, problem).sum(axis=2).sum(axis=1).max(initial=0.0))


def cell_seconds(plan: Plan, problem: PlanProblem) -> NDArray[np.float64]:
    """Return [G, M, L] seconds of every MoE layer of every micro-batch, 0 where a micro-batch has no tokens."""
    load, topology = problem.load, problem.topology
    rows = rows_of_plan(plan, load, topology, tile_rows=problem.cost.gemm_tile_rows)
    if not problem.cost.a2a_hierarchical:
        rows = count_rows(plan, load, topology).put_into(rows)
    elif load.routes is not None:
        rows = count_visits(plan, load, topology).put_into(rows)
    running = np.asarray(load.tokens.any(axis=2))[..., None]
    return np.where(running, layer_time(problem.cost, rows).total_s, 0.0)
