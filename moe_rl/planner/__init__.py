"""Policies that decide where experts sit and which instance takes a token. Needs numpy only.

State a `PlanProblem`, take a policy by name, and get a `Plan`:

    plan = make_planner("moe-rl").plan(problem, PLACEMENT)

The second argument says which levers are free; what is not (homes, resident copies, layout) stays as the problem says.
`POLICIES` knows every policy and its facts; the bounds say what no plan can go below.
"""

from moe_rl.planner.base import ALL_LEVERS, COPIES, PLACEMENT, Levers, Planner, PlanProblem
from moe_rl.planner.bounds import node_bound, placement_bound
from moe_rl.planner.objective import OBJECTIVES, PlanObjective
from moe_rl.planner.predict import predicted_cost
from moe_rl.planner.registry import POLICIES, default_policies, make_planner, policy_parameters
from moe_rl.planner.relayout import load_of_plan

__all__ = [
    "ALL_LEVERS", "COPIES", "OBJECTIVES", "PLACEMENT", "POLICIES", "Levers", "PlanObjective", "PlanProblem", "Planner",
    "default_policies", "load_of_plan", "make_planner", "node_bound", "placement_bound", "policy_parameters",
    "predicted_cost",
]  # fmt: skip
