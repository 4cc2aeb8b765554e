"""UltraEP: homes stay, and every micro-batch gets its own replicas inside the node (arXiv 2606.04101)."""

from dataclasses import dataclass
from typing import ClassVar

from moe_rl.core.errors import require
from moe_rl.core.plan import Plan
from moe_rl.planner.assemble import finish_plan, no_replicas
from moe_rl.planner.base import Levers, Planner, PlanProblem
from moe_rl.planner.quota_greedy import replicate_in_node


def check_replication(policy: str, tolerance: float, min_tokens: int) -> None:
    """Raise unless the parameters of in-node replication make sense."""
    require(0.0 <= tolerance < 1.0, f"{policy}: tolerance must lie in [0, 1), got {tolerance}.")
    require(min_tokens >= 0, f"{policy}: min_tokens must be at least 0, got {min_tokens}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class UltraEpPlanner(Planner):
    """Quota replication per micro-batch, layer and node, with the homes where they are (contiguous at the start)."""

    name: ClassVar[str] = "ultraep"
    summary: ClassVar[str] = "keeps home ranks; changes replicas inside the node in every micro-batch"
    levers: ClassVar[Levers] = Levers(replicate=True)
    keeps_homes: ClassVar[bool] = True
    by_default: ClassVar[bool] = True
    is_engine: ClassVar[bool] = True

    tolerance: float = 0.01
    """Share of the mean rank load that the search may leave on the table."""
    min_tokens: int = 0
    """Fewest pairs of a replica; the published default is 1024."""

    def __post_init__(self) -> None:
        check_replication(self.name, self.tolerance, self.min_tokens)

    def make(self, problem: PlanProblem, may: Levers) -> Plan:
        """Return replicas for every micro-batch; no expert moves."""
        placement, replicas = problem.starting_placement(), no_replicas(problem)
        if may.replicate:
            replicas = replicate_in_node(problem, placement, tolerance=self.tolerance, min_tokens=self.min_tokens)
        return finish_plan(problem, self, may=may, placement=placement, replicas=replicas)
