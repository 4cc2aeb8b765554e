"""moe-rl without replay: copies for what an earlier step showed to be hot, split by what really comes.

A forecast of single micro-batches is worth little: planned on the mean of the step before, replicas for one micro-batch
leave the busiest rank of 32 with more than twice the mean. What lasts from step to step is which experts are hot. So
homes and copies are EPLB's, for the whole step and on the earlier steps' loads alone; what is known only once routers
have chosen, every rank's counts, which dispatchers exchange before they send a token, decides nothing but how each
expert's tokens are split over the instances that are there: the best split that there is. No weights travel, and no
micro-batch is worse than under EPLB, whose equal split is one of those splits.
"""

from dataclasses import dataclass
from typing import ClassVar

from moe_rl.core.plan import Plan
from moe_rl.planner.assemble import finish_plan
from moe_rl.planner.base import Levers, PlanProblem
from moe_rl.planner.others.eplb import EplbPlanner, eplb_placement
from moe_rl.planner.others.lplb import exactly_split


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastPlanner(EplbPlanner):
    """What moe-rl does where routes are not known before the step."""

    name: ClassVar[str] = "moe-rl-forecast"
    summary: ClassVar[str] = "replicates for a step by earlier steps' loads; splits each micro-batch by its true counts"
    by_default: ClassVar[bool] = False

    def make(self, problem: PlanProblem, may: Levers) -> Plan:
        """Return the plan: placement from `problem.history`, splits from the step's own counts."""
        placement = eplb_placement(problem, self.known(problem), hierarchical=self.hierarchical)
        plan = finish_plan(problem, self, placement=placement, replicas=exactly_split(problem, placement))
        return self.homes_kept(plan)
