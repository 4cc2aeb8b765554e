"""What balances a training run whatever its framework is: plans of a pass, what it was told and did, which micro-batch.

Needs no framework, and torch only where tensors come in: everything named here loads without it, except
`plan_from_local`, whose collectives are torch's, and `SlotTables`, which remaps torch's routing maps.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moe_rl.balancing.clock import MicroBatchClock
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.loads import count_routes
from moe_rl.balancing.pass_metrics import PassMetrics
from moe_rl.balancing.pass_source import PassSource
from moe_rl.balancing.schedule import cluster_topology, plan_from_schedule
from moe_rl.balancing.sequence_rows import SequenceRows

if TYPE_CHECKING:
    from moe_rl.balancing.local import plan_from_local
    from moe_rl.balancing.slots import SlotTables

__all__ = [
    "BalancerConfig",
    "cluster_topology",
    "plan_from_schedule",
    "plan_from_local",
    "count_routes",
    "MicroBatchClock",
    "PassMetrics",
    "PassSource",
    "SequenceRows",
    "SlotTables",
]

_NEED_TORCH = {"plan_from_local": "local", "SlotTables": "slots"}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
