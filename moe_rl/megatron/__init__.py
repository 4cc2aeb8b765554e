"""Balance, replicate and reorder the experts of an unmodified Megatron-Core training run; start with `attach`.

Names are loaded on first use: the launcher and the slot map do without Megatron.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_rl.megatron.attach import attach
    from moe_rl.megatron.balancer import Balancer
    from moe_rl.megatron.checkpoint import restore_placement, save_placement
    from moe_rl.megatron.config import BalancerConfig
    from moe_rl.megatron.feed import plan_from_local
    from moe_rl.megatron.layer import ElasticMoELayer, elastic_spec
    from moe_rl.megatron.pass_metrics import PassMetrics
    from moe_rl.megatron.recorder import RoutingRecorder, merge_recordings
    from moe_rl.megatron.routed_rows import RowSlice, packed_rows, padded_rows
    from moe_rl.megatron.schedule import cluster_topology, plan_from_schedule

__all__ = [
    "BalancerConfig",
    "Balancer",
    "ElasticMoELayer",
    "PassMetrics",
    "RoutingRecorder",
    "RowSlice",
    "attach",
    "cluster_topology",
    "elastic_spec",
    "merge_recordings",
    "packed_rows",
    "padded_rows",
    "plan_from_local",
    "plan_from_schedule",
    "restore_placement",
    "save_placement",
]

_MODULES = {
    "attach": "attach",
    "Balancer": "balancer",
    "BalancerConfig": "config",
    "ElasticMoELayer": "layer",
    "elastic_spec": "layer",
    "PassMetrics": "pass_metrics",
    "RoutingRecorder": "recorder",
    "RowSlice": "routed_rows",
    "cluster_topology": "schedule",
    "merge_recordings": "recorder",
    "packed_rows": "routed_rows",
    "padded_rows": "routed_rows",
    "plan_from_local": "feed",
    "plan_from_schedule": "schedule",
    "restore_placement": "checkpoint",
    "save_placement": "checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # over the submodule of the same name, which the import has set
    return value
