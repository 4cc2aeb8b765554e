"""`moe-rl` in two parts, so that nobody takes packing for balancing: packing alone, and everything else alone.

Sequences are often free to move between micro-batches, and moving them costs nothing; then a part of what `moe-rl`
gains needs no expert to move or to be copied, and any policy could have it.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from moe_rl.core.plan import Plan
from moe_rl.planner.base import Parameters, PlanProblem
from moe_rl.planner.moe_rl_policy import MoeRlPlanner


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticPackPlanner(MoeRlPlanner):
    """Experts where they are and no copies, sequences packed: what packing brings by itself."""

    name: ClassVar[str] = "static+pack"
    summary: ClassVar[str] = "homes stay, no copies, sequences packed so that their loads complement each other"
    in_place: ClassVar[Parameters | None] = {}
    fills_resident_slots: ClassVar[bool] = False
    variant_of: ClassVar[str | None] = "moe-rl"

    pack: bool = True
    reorder: bool = False
    replicate: bool = False
    cross_node: bool = False

    def plan(self, problem: PlanProblem) -> Plan:
        """Return the plan; its slots for copies stay empty."""
        return MoeRlPlanner.plan(self, replace(problem, resident_slots=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeRlUnpackedPlanner(MoeRlPlanner):
    """`moe-rl` with the sequences where the layout has them: what moving and copying experts brings by itself."""

    name: ClassVar[str] = "moe-rl-unpacked"
    summary: ClassVar[str] = "moe-rl, sequences as given"
    needs_sequences: ClassVar[bool] = False
    variant_of: ClassVar[str | None] = "moe-rl"

    pack: bool = False
