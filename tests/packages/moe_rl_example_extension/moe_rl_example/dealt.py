"""A policy: experts dealt to the ranks like cards, the most loaded first."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.planner.assemble import finish_plan, no_replicas
from moe_rl.planner.base import Levers, Planner, PlanProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtPlanner(Planner):
    """Experts by their load of the step, dealt to ranks 0 .. P-1 and back, without replicas."""

    name: ClassVar[str] = "dealt"
    summary: ClassVar[str] = "experts dealt to ranks by load, back and forth"
    never_worse_than_static: ClassVar[bool] = False

    def make(self, problem: PlanProblem, may: Levers) -> Plan:
        """Return the plan; in every layer each rank is home of E/P experts."""
        load = problem.load
        heaviest_first = np.argsort(-load.per_expert().sum(axis=(0, 1)), axis=1, kind="stable")  # [L, E]
        turn = np.arange(load.num_experts) % (2 * load.ep_size)
        rank = np.minimum(turn, 2 * load.ep_size - 1 - turn)  # 0, 1, .. P-1, P-1, .. 1, 0, 0, 1, ..
        home = np.empty_like(heaviest_first)
        np.put_along_axis(home, heaviest_first, np.broadcast_to(rank, home.shape), axis=1)
        placement = ExpertPlacement.from_home_rank(home, ep_size=load.ep_size, spare_slots=problem.spare_slots)
        return finish_plan(problem, self, placement=placement, replicas=no_replicas(problem))
