"""verl's Megatron engine: passes are planned from the routes that verl replays (R2 and R3), or from what routers chose
in the log-prob pass, with no user code.

MOE_RL=moe-rl python -m verl.trainer.main_ppo ...

Every `forward_backward_batch` is one pass: micro-batches, static, dynamic or of dynamic context parallelism, are
complete when verl hands them to Megatron's schedule, which is where they are looked at. Experts move at the begin of an
update's pass, when verl has set gradients to zero. Reference and value models run as they are.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from moe_rl.core.errors import require
from moe_rl.core.post_import import when_imported, wrap
from moe_rl.frameworks.run_settings import Settings
from moe_rl.frameworks.verl.contract import FRAMEWORK
from moe_rl.frameworks.verl.engine_runs import RUNS, EngineRun, run_of
from moe_rl.frameworks.verl.export import ExportedWeights, split_weights

ENGINE = "verl.workers.engine.megatron.transformer_impl"


def install_when_imported(settings: Settings) -> None:
    """Balance the engines of this process as soon as verl imports their module."""
    when_imported(ENGINE, lambda module: install(module, settings=settings))


def install(module: ModuleType, *, settings: Settings) -> Callable[[], None]:
    """Wrap the engine's methods and return what undoes it; `module` is verl's `transformer_impl`."""
    from verl.utils import tensordict_utils

    from moe_rl.frameworks.verl.ahead import iterated
    from moe_rl.frameworks.verl.micro_batches import packed_anew
    from moe_rl.frameworks.verl.passes import planned_schedules, reported, weighed

    engine, home = module.MegatronEngine, functools.partial(_at_home, module=module)
    undo = [
        wrap(module, "get_forward_backward_func", planned_schedules),
        wrap(module, "prepare_micro_batches", packed_anew),
        wrap(engine, "_build_optimizer", functools.partial(_built, settings=settings)),
        wrap(engine, "forward_backward_batch", reported),
        wrap(module.MegatronEngineWithLMHead, "postprocess_micro_batch_func", weighed),
        wrap(engine, "to", functools.partial(_moved, module=module)),
        wrap(engine, "get_per_tensor_param", _exported),
        wrap(engine, "get_per_tensor_param_shard", _exported),
        wrap(engine, "save_checkpoint", home),
        wrap(engine, "load_checkpoint", home),
        wrap(tensordict_utils, "make_iterator", iterated),
    ]

    def uninstall() -> None:
        for restore in undo:
            restore()

    return uninstall


def _built(original: Callable[..., Any], self: Any, *args: Any, settings: Settings, **kwargs: Any) -> Any:
    """Attach when the optimizer is built: the parameters are still where they will be trained, and not yet offloaded.

    Engines without optimizer (the reference) and value models stay plain.
    """
    from moe_rl.frameworks.megatron_run import MegatronRun, say_once
    from moe_rl.frameworks.router_shift import RouterShiftRun
    from moe_rl.frameworks.verl.ahead import LookAhead

    optimizer = original(self, *args, **kwargs)
    if optimizer is not None and not getattr(self, "is_value_model", False):
        packed = self.engine_config.use_remove_padding or not self.enable_routing_replay
        refusal = ""
        if not packed:
            refusal = (
                "use_remove_padding must be True: verl always packs the routes that it replays, but packs the tokens "
                "only with this setting."
            )
        run = MegatronRun.attach(FRAMEWORK, self.module, optimizer, settings, refusal=refusal, guarded=True)
        if run.balancer is not None and not self.engine_config.use_remove_padding:
            say_once(
                "verl pads the tokens (use_remove_padding=False). Updates are therefore planned from the previous "
                "pass (source history) instead of their own log-prob pass."
            )
        if settings.router_shift:
            FRAMEWORK.check()
            for name, wanted in {"use_remove_padding": True, "dynamic_context_parallel": False}.items():
                value = getattr(self.engine_config, name, wanted)
                require(value == wanted, f"MOE_RL_ROUTER_SHIFT needs {name}={wanted} in verl's engine.")
            run.router_shift = RouterShiftRun(self.module, floor=settings.router_shift)
        RUNS[self.module[0]] = EngineRun(engine=self, run=run, look_ahead=LookAhead())
    return optimizer


def _moved(
    original: Callable[..., Any], self: Any, device: str, model: bool = True, *args: Any, module: Any, **kwargs: Any
) -> Any:
    """Let the balancer's memory come and go with the parameters (`param_offload`)."""
    result = original(self, device, model, *args, **kwargs)
    run = run_of(self)
    if run is not None and model:
        run.move(to_host=device != module.get_device_name())
    return result


def _at_home(original: Callable[..., Any], self: Any, *args: Any, module: Any, **kwargs: Any) -> Any:
    """Run with every expert where Megatron put it: a checkpoint has Megatron's expert ids."""
    run = run_of(self)
    if run is None or run.balancer is None:
        return original(self, *args, **kwargs)
    with _on_device(self, module.get_device_name()), run.balancer.canonical():
        return original(self, *args, **kwargs)


@contextlib.contextmanager
def _on_device(engine: Any, device: str) -> Iterator[None]:
    """Keep on the device what verl has put away, and itself would put away before the experts are back."""
    offloads = {"model": engine.is_param_offload_enabled, "optimizer": engine.is_optimizer_offload_enabled}
    offloads["grad"] = offloads["model"]
    if not any(offloads.values()):
        yield
        return
    engine.to(device=device, **offloads)
    engine._is_offload_param = engine._is_offload_optimizer = False
    try:
        yield
    finally:
        engine._is_offload_param, engine._is_offload_optimizer = offloads["model"], offloads["optimizer"]
        engine.to(device="cpu", **offloads)


def _exported(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Hand out weights with every expert where Megatron put it, or split for a planned sync: nothing moves for it."""
    parameters, config = original(self, *args, **kwargs)
    run = run_of(self)
    if run is None or run.balancer is None:
        return parameters, config
    whole_weights = _inside(functools.partial(run.balancer.canonical, weights_only=True), parameters)
    return ExportedWeights(whole_weights, lambda: split_weights(self, run.balancer, parameters)), config


def _inside(context: Callable[[], AbstractContextManager[None]], items: Iterator[Any]) -> Iterator[Any]:
    with context():
        yield from items
