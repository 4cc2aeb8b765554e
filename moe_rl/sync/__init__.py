"""Weight syncs, planned: any trainer layout to any engine map, every atom once into every engine node.

plan = plan_sync(SyncProblem(trainer=..., engines=(...), node_of=..., expert_bytes=...))

This package plans on `core` alone. What carries a plan out needs torch and is imported by name: `moe_rl.sync.executor`
(one rank's work), `moe_rl.sync.ranks` (over torch.distributed), `moe_rl.sync.expert_parts` (matrices as bytes).
"""

from moe_rl.sync.errors import SyncError
from moe_rl.sync.layouts import EngineLayout, SyncProblem, TrainerLayout, even_stages
from moe_rl.sync.plan import SyncPlan, plan_sync
from moe_rl.sync.versions import SlotVersions

__all__ = [
    "EngineLayout",
    "SlotVersions",
    "SyncError",
    "SyncPlan",
    "SyncProblem",
    "TrainerLayout",
    "even_stages",
    "plan_sync",
]
