"""Megatron's own placement, without replicas: what every other policy is compared with."""

import time
from dataclasses import dataclass
from typing import ClassVar

from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.planner.assemble import finish_plan, no_replicas
from moe_rl.planner.base import Parameters, Planner, PlanProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticPlanner(Planner):
    """Rank r is home of experts r * E/P .. (r + 1) * E/P - 1; sequences stay where the layout has them."""

    name: ClassVar[str] = "static"
    summary: ClassVar[str] = "Megatron's contiguous placement, sequences as given"
    in_place: ClassVar[Parameters | None] = {}
    by_default: ClassVar[bool] = True

    def plan(self, problem: PlanProblem) -> Plan:
        """Return the contiguous placement; when another one is in force, the moves lead back to it."""
        started = time.perf_counter()
        placement = ExpertPlacement.contiguous(
            num_layers=problem.load.num_layers,
            num_experts=problem.load.num_experts,
            ep_size=problem.load.ep_size,
            spare_slots=problem.spare_slots,
        )
        return finish_plan(problem, self, placement=placement, replicas=no_replicas(problem), started=started)
