"""`moe-rl` in two parts, so that nobody takes packing for balancing: packing alone, and everything else alone.

Sequences are often free to move between micro-batches, and moving them costs nothing; then a part of what `moe-rl`
gains needs no expert to move or to be copied, and any policy could have it.
"""

from dataclasses import dataclass
from typing import ClassVar

from moe_rl.planner.base import PLACEMENT, Levers
from moe_rl.planner.moe_rl_policy import MoeRlPlanner


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticPackPlanner(MoeRlPlanner):
    """Experts where they are and no copies, sequences packed: what packing brings by itself."""

    name: ClassVar[str] = "static+pack"
    summary: ClassVar[str] = "keeps home ranks without replicas; packs sequences whose loads complement each other"
    levers: ClassVar[Levers] = Levers(pack=True)
    variant_of: ClassVar[str | None] = "moe-rl"
    by_default: ClassVar[bool] = False

    pack: bool = True
    reorder: bool = False
    replicate: bool = False
    cross_node: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeRlUnpackedPlanner(MoeRlPlanner):
    """`moe-rl` with the sequences where the layout has them: what moving and copying experts brings by itself."""

    name: ClassVar[str] = "moe-rl-unpacked"
    summary: ClassVar[str] = "moe-rl without packing sequences"
    levers: ClassVar[Levers] = PLACEMENT
    variant_of: ClassVar[str | None] = "moe-rl"
    by_default: ClassVar[bool] = False

    pack: bool = False
