"""moe_rl inside the frameworks that people run: a folder each, one way to attach, one configuration.

| framework | how |
|---|---|
| verl | `MOE_RL=moe-rl` in the environment (an entry point of `verl.plugins`) |
| Transformers with expert parallelism, TRL | `frameworks.transformers.attach.attach(model, config)` |
| DeepSpeed AutoEP | `frameworks.deepspeed.attach.attach(engine, config)` |
| slime, miles | `slime.attach.init` and `slime.attach.before_train_step` as `--custom-megatron-*-path` |
| any other Megatron loop | `forward_backward(get_forward_backward_func(), balancer, routes)` |

`moe_rl.core.frameworks` lists the folders and says what a folder holds. An adapter imports its framework when it is
used, never before, and names every symbol of it that it relies on (`contract.yaml`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moe_rl.core.registry import Registry
from moe_rl.frameworks.contract import Framework

if TYPE_CHECKING:
    from moe_rl.balancing import BalancerConfig
    from moe_rl.frameworks.megatron.attach import forward_backward
    from moe_rl.frameworks.run_settings import Settings, balancer_config, settings_from_environment

__all__ = [
    "FRAMEWORKS",
    "BalancerConfig",
    "Settings",
    "balancer_config",
    "forward_backward",
    "settings_from_environment",
]

FRAMEWORKS: Registry[Framework] = Registry("adapter", part="contract:FRAMEWORK")
_MODULES = {
    "BalancerConfig": "balancing",
    "Settings": "frameworks.run_settings",
    "balancer_config": "frameworks.run_settings",
    "settings_from_environment": "frameworks.run_settings",
    "forward_backward": "frameworks.megatron.attach",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"moe_rl.{_MODULES[name]}"), name)
