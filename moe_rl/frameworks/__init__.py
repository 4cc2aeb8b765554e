"""moe_rl inside the frameworks that people run: a folder each, one way to attach, one configuration.

| framework | how |
|---|---|
| verl | `MOE_RL=moe-rl` in the environment (an entry point of `verl.plugins`) |
| Transformers with expert parallelism, TRL | `frameworks.transformers.attach.attach(model, config)` |
| DeepSpeed AutoEP | `frameworks.deepspeed.attach.attach(engine, config)` |
| slime, miles | `slime.attach.init` and `slime.attach.before_train_step` as `--custom-megatron-*-path` |
| any other Megatron loop | `forward_backward(get_forward_backward_func(), balancer, routes)` |

What an adapter of another package needs is named here and in `moe_rl.megatron` (docs/extending.md).
`moe_rl.core.frameworks` lists the folders and says what a folder holds. An adapter imports its framework when it is
used, never before, and names every symbol of it that it relies on (`contract.yaml`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moe_rl.core.registry import Registry
from moe_rl.frameworks.contract import Framework

if TYPE_CHECKING:
    from moe_rl.balancing import BalancerConfig, PassSource, SequenceRows
    from moe_rl.balancing.exchange import agreed
    from moe_rl.core.model import MoeModelSpec
    from moe_rl.frameworks.contract import Symbol
    from moe_rl.frameworks.megatron.attach import forward_backward
    from moe_rl.frameworks.megatron.settings import KEYS as MEGATRON_KEYS
    from moe_rl.frameworks.megatron_run import MegatronRun
    from moe_rl.frameworks.routes import of_moe_layers, with_missing_last_rows
    from moe_rl.frameworks.run_settings import Settings, balancer_config, settings_from_environment
    from moe_rl.launch.keys import Reader

__all__ = [
    "FRAMEWORKS",
    "MEGATRON_KEYS",
    "BalancerConfig",
    "Framework",
    "MegatronRun",
    "MoeModelSpec",
    "PassSource",
    "Reader",
    "SequenceRows",
    "Settings",
    "Symbol",
    "agreed",
    "balancer_config",
    "forward_backward",
    "of_moe_layers",
    "settings_from_environment",
    "with_missing_last_rows",
]

FRAMEWORKS: Registry[Framework] = Registry("adapter", part="contract:FRAMEWORK")
_MODULES = {
    "BalancerConfig": "balancing",
    "MEGATRON_KEYS": "frameworks.megatron.settings:KEYS",
    "MegatronRun": "frameworks.megatron_run",
    "MoeModelSpec": "core.model",
    "PassSource": "balancing",
    "Reader": "launch.keys",
    "SequenceRows": "balancing",
    "Settings": "frameworks.run_settings",
    "Symbol": "frameworks.contract",
    "agreed": "balancing.exchange",
    "balancer_config": "frameworks.run_settings",
    "forward_backward": "frameworks.megatron.attach",
    "of_moe_layers": "frameworks.routes",
    "settings_from_environment": "frameworks.run_settings",
    "with_missing_last_rows": "frameworks.routes",
}
"""Name -> module, and what it is called there if that differs: loaded on first use, since some need torch."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, name_there = _MODULES[name].partition(":")
    return getattr(import_module(f"moe_rl.{module}"), name_there or name)
