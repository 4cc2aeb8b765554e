"""Balance, replicate and reorder the experts of an unmodified Megatron-Core training run; start with `attach`.

Names are loaded on first use: plans and metrics do without Megatron (`moe_rl.balancing`), the slices of rows too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_rl.balancing import (
        BalancerConfig,
        PassMetrics,
        PassSource,
        cluster_topology,
        plan_from_local,
        plan_from_schedule,
    )
    from moe_rl.megatron.attach import attach
    from moe_rl.megatron.balancer import Balancer
    from moe_rl.megatron.checkpoint import restore_placement, save_placement
    from moe_rl.megatron.layer import ElasticMoELayer, elastic_spec
    from moe_rl.megatron.recorder import RoutingRecorder
    from moe_rl.megatron.routed_rows import RowSlice, packed_rows, padded_rows, padded_sequences
    from moe_rl.replay.merge import merge_recordings

__all__ = [
    "BalancerConfig", "Balancer", "ElasticMoELayer", "PassMetrics", "PassSource", "RoutingRecorder", "RowSlice",
    "attach", "cluster_topology", "elastic_spec", "merge_recordings", "packed_rows", "padded_rows", "padded_sequences",
    "plan_from_local", "plan_from_schedule", "restore_placement", "save_placement",
]  # fmt: skip

_MODULES = {
    "attach": "megatron.attach",
    "Balancer": "megatron.balancer",
    "BalancerConfig": "balancing",
    "ElasticMoELayer": "megatron.layer",
    "elastic_spec": "megatron.layer",
    "PassMetrics": "balancing",
    "PassSource": "balancing",
    "RoutingRecorder": "megatron.recorder",
    "RowSlice": "megatron.routed_rows",
    "cluster_topology": "balancing",
    "merge_recordings": "replay.merge",
    "packed_rows": "megatron.routed_rows",
    "padded_rows": "megatron.routed_rows",
    "padded_sequences": "megatron.routed_rows",
    "plan_from_local": "balancing",
    "plan_from_schedule": "balancing",
    "restore_placement": "megatron.checkpoint",
    "save_placement": "megatron.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"moe_rl.{_MODULES[name]}"), name)
    globals()[name] = value  # over the submodule of the same name, which the import has set
    return value
