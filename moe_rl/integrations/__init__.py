"""moe_rl inside the frameworks that people run: one way to attach, one configuration, the framework's own metrics.

| framework | how |
|---|---|
| verl | `MOE_RL=ultraep` in the environment (an entry point of `verl.plugins`) |
| Transformers with expert parallelism, TRL | `transformers_ep.attach(model, config)` |
| DeepSpeed AutoEP | `deepspeed.attach(engine, config)` |
| slime, miles | `slime.init` and `slime.before_train_step` as `--custom-megatron-*-path` |
| any other Megatron loop | `forward_backward(get_forward_backward_func(), balancer, routes)` |

Each adapter imports its framework when it is used, never before, and names every symbol of it that it relies on
(`FRAMEWORK`): `moe_rl.integrations.contract`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_rl.balancing import BalancerConfig
    from moe_rl.integrations.megatron_loop import forward_backward
    from moe_rl.integrations.settings import Settings, balancer_config, settings_from_environment

__all__ = ["BalancerConfig", "Settings", "balancer_config", "forward_backward", "settings_from_environment"]

_MODULES = {
    "BalancerConfig": "balancing",
    "Settings": "integrations.settings",
    "balancer_config": "integrations.settings",
    "settings_from_environment": "integrations.settings",
    "forward_backward": "integrations.megatron_loop",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"moe_rl.{_MODULES[name]}"), name)
