"""Who reads or writes experts under Megatron's names, and what stops it while experts are elsewhere.

Outside of `balancer.canonical()` a moved expert lies under another one's name. All that goes by names is refused then,
by one sentence on the rank that asks; inside of it the same calls give what they always give.

    door                                            who reads by it                                  guard
    state_dict, load_state_dict of the model        torch, mbridge, verl, Megatron-LM, slime's save  the MoE layer
    sharded_state_dict of the model                 Megatron's checkpoints, NeMo-RL, SkyRL, verl     the MoE layer
    the same of one layer's experts, or of one      scripts, adapters' own savers                    hooks on them
    save_parameter_state, sharded_state_dict,       Megatron-LM's and verl's checkpoints             the optimizer's own
      load_parameter_state, load_state_dict                                                            methods
    parameters by attribute: AutoBridge's export    Megatron-Bridge, and by it NeMo-RL, SkyRL,       `WALKERS`
      and import                                      miles, verl without vanilla_mbridge
    named_parameters and named_buffers              slime's and miles' weight updates                `WALKERS`

`named_parameters()` by itself stays open: Megatron walks it in every step, for gradients and for norms of the weights,
and these do not ask which expert is which.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from moe_rl.core.errors import require
from moe_rl.core.post_import import when_imported, wrap
from moe_rl.megatron.layer import ElasticMoELayer

HINT = "make this call inside `with balancer.canonical():`."


@dataclass(frozen=True, slots=True, kw_only=True)
class Walker:
    """A function of another package that goes through the parameters of model chunks, and asks no module for them."""

    module: str
    function: str
    """Its name in the module; of a method with its class."""
    model: int
    """Which positional argument the chunks are; `self` counts."""
    does: str = "exported"
    returns_iterator: bool = True
    """Whether it reads when the caller goes on to its items; the check waits until then, too."""


_BRIDGE = "megatron.bridge.models.conversion.auto_bridge"
WALKERS = (
    Walker(module=_BRIDGE, function="AutoBridge.export_hf_weights", model=1),
    Walker(module=_BRIDGE, function="AutoBridge.export_adapter_weights", model=1),
    Walker(module=_BRIDGE, function="AutoBridge.save_hf_weights", model=1, returns_iterator=False),
    Walker(module=_BRIDGE, function="AutoBridge.load_hf_weights", model=1, does="loaded", returns_iterator=False),
    *(
        Walker(
            module=f"{package}.backends.megatron_utils.update_weight.common",
            function="named_params_and_buffers",
            model=1,
        )
        for package in ("slime", "miles")
    ),
)
# What of Megatron's distributed optimizer reads or writes its state under the names of parameters.
OPTIMIZER_READS = ("save_parameter_state", "sharded_state_dict", "get_parameter_state_dp_zero")
OPTIMIZER_WRITES = ("load_parameter_state", "load_state_dict")


def require_home(chunks: Any, does: str) -> None:
    """Raise `InvalidInputError` if an expert of these model chunks is not where Megatron puts it."""
    for chunk in chunks if isinstance(chunks, Sequence) else [chunks]:
        for module in chunk.modules():
            if isinstance(module, ElasticMoELayer):
                module.require_home(does)


@functools.cache
def guard_walkers() -> None:
    """Guard the functions of `WALKERS` in this process, each as soon as its module is imported."""
    for walker in WALKERS:
        when_imported(walker.module, functools.partial(_guard_walker, walker))


def _guard_walker(walker: Walker, module: ModuleType) -> None:
    """Let a walker of an imported module ask for experts at home; a version without it has another door."""
    owner, _, name = walker.function.rpartition(".")
    holder: Any = getattr(module, owner, None) if owner else module
    if holder is None or not hasattr(holder, name):
        return

    def guarded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if len(args) > walker.model:
            chunks = args[walker.model]
        else:
            chunks = kwargs.get("model", kwargs.get("megatron_model"))
        if not walker.returns_iterator:
            require_home(chunks, walker.does)
            return function(*args, **kwargs)
        return _checked_at_first(lambda: require_home(chunks, walker.does), lambda: function(*args, **kwargs))

    original_function = getattr(holder, name)
    wrap(holder, name, guarded)
    # Those that have said `from ... import` before; None stands for a barred import.
    for importer in list(sys.modules.values()):
        if not owner and importer is not None and getattr(importer, "__dict__", {}).get(name) is original_function:
            setattr(importer, name, getattr(holder, name))


def _checked_at_first(check: Callable[[], None], items: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """Yield the items after the check, which waits for the first one to be asked for: a caller may go home by then."""
    check()
    yield from items()


class NameGuards:
    """The guards of one attached model: hooks on its experts, and the optimizer's own methods."""

    def __init__(self, layers: Sequence[Any], optimizer: Any, *, state_is_home: Callable[[], bool]) -> None:
        """`layers` are `ElasticMoELayer`s; `state_is_home` says where the optimizer's state of experts is."""
        guard_walkers()
        self._hooks = []
        for layer in layers:
            for module in layer.experts.modules():
                self._hooks += _hooks_of(layer, module)
        self._undo: list[Callable[[], None]] = []
        optimizers = [optimizer, *getattr(optimizer, "chained_optimizers", [])]
        for part in {id(candidate): candidate for candidate in optimizers if candidate is not None}.values():
            for does, names in {"saved": OPTIMIZER_READS, "loaded": OPTIMIZER_WRITES}.items():
                for name in names:
                    if hasattr(part, name):
                        self._undo.append(wrap(part, name, _asking(state_is_home, does)))

    def remove(self) -> None:
        """Take the guards off."""
        for hook in self._hooks:
            hook.remove()
        for undo in reversed(self._undo):
            undo()


def _hooks_of(layer: ElasticMoELayer, module: torch.nn.Module) -> list[Any]:
    """Return the hooks by which a module of a layer's experts gives and takes no weights while these are elsewhere."""
    return [
        module.register_state_dict_pre_hook(lambda *_: layer.require_home("saved")),
        module.register_load_state_dict_pre_hook(lambda *_: layer.require_home("loaded")),
    ]


def _asking(state_is_home: Callable[[], bool], does: str) -> Callable[..., Any]:
    def asking(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        require(
            state_is_home(),
            f"nothing can be {does} now, because the optimizer state of the experts is not on the ranks where "
            f"Megatron puts it: {HINT}",
        )
        return function(*args, **kwargs)

    return asking
