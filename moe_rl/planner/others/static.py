"""Megatron's own placement, without replicas: what every other policy is compared with."""

from dataclasses import dataclass
from typing import ClassVar

from moe_rl.core.plan import Plan
from moe_rl.planner.assemble import finish_plan, no_replicas
from moe_rl.planner.base import Levers, Planner, PlanProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticPlanner(Planner):
    """Rank r is home of experts r * E/P .. (r + 1) * E/P - 1, unless another placement is in force: that one stays."""

    name: ClassVar[str] = "static"
    summary: ClassVar[str] = "keeps Megatron's contiguous placement and all micro-batches"
    levers: ClassVar[Levers] = Levers()
    keeps_homes: ClassVar[bool] = True
    by_default: ClassVar[bool] = True

    def make(self, problem: PlanProblem, may: Levers) -> Plan:
        """Return the homes in force, contiguous at the start, and nothing else."""
        placement, replicas = problem.starting_placement(), no_replicas(problem)
        return finish_plan(problem, self, may=may, placement=placement, replicas=replicas)
