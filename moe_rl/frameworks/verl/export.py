"""What verl's `get_per_tensor_param` returns in a balanced run: all weights as before, or split for a planned sync.

verl hands it on to its checkpoint engine unread. Engines of verl's own walk it: then every expert is gathered on every
trainer, from where Megatron put it. The engine `moe_rl` asks for `split()` instead: everything but experts by verl's
own exporter, and the experts where they are.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moe_rl.core.errors import InvalidInputError, require

EXPERT = re.compile(r"\.mlp\.experts\.")
# mbridge's names of an expert's two weights, TEGroupedMLP's, whichever module the run has.
MCORE_NAMES = ("decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}",
               "decoder.layers.{layer}.mlp.experts.linear_fc2.weight{expert}")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SplitWeights:
    """A trainer's weights for a planned sync."""

    dense: Iterator[tuple[str, torch.Tensor]]
    """Everything but experts, as verl's exporter names it; all trainers walk it."""
    balancer: Any
    names: dict[int, list[str]]
    """MoE layer -> gate, up and down of an expert under the engines' names, with {expert} for its number."""


class ExportedWeights(Iterator[tuple[str, torch.Tensor]]):
    """All weights by name, as verl's exporter yields them; or `split`."""

    def __init__(self, weights: Iterator[tuple[str, torch.Tensor]], split: Callable[[], SplitWeights]) -> None:
        self._whole, self._split = weights, split

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._whole)

    def split(self) -> SplitWeights:
        """Return the weights for a planned sync; then the iterator must not be walked.

        Raises `InvalidInputError` where experts cannot be left out, or have adapters.
        """
        return self._split()


def split_weights(engine: Any, balancer: Any, exported: Iterator[tuple[str, torch.Tensor]]) -> SplitWeights:
    """Return the split weights of verl's `MegatronEngine`; `exported` is its exporter, not yet begun."""
    require(
        bool(getattr(engine, "vanilla_bridge", False)),
        "checkpoint_engine.backend=moe_rl needs vanilla_mbridge=True, because this backend sends experts separately "
        "from mbridge's export.",
    )
    require(engine.peft_cls is None, "checkpoint_engine.backend=moe_rl can neither send nor merge LoRA adapters.")
    require(not engine._qat_enabled, "checkpoint_engine.backend=moe_rl does not quantize weights (QAT).")
    dense = _without_experts(engine.module, exported)
    return SplitWeights(dense=dense, balancer=balancer, names=expert_names(engine.bridge, balancer.model))


def _without_experts(
    chunks: list[Any], exported: Iterator[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Walk an exporter of mbridge, which goes through the names of the model's parameters, with experts left out."""
    with contextlib.ExitStack() as stack:
        for chunk in chunks:
            stack.enter_context(_experts_hidden(_inner(chunk)))
        yield from exported


def _inner(module: Any) -> Any:
    while hasattr(module, "module"):
        module = module.module
    return module


@contextlib.contextmanager
def _experts_hidden(model: Any) -> Iterator[None]:
    """Let `named_parameters` and `state_dict` of this one model leave experts out: what mbridge's exporter goes
    through.

    The layers themselves give no state_dict while experts are away from home, so that it is put together here.
    """
    attributes, named = dict(vars(model)), model.named_parameters

    def dense(*args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for name, parameter in named(*args, **kwargs):
            if not EXPERT.search(f".{name}"):
                yield name, parameter

    def state(*_: Any, **__: Any) -> dict[str, torch.Tensor]:
        return {**dict(dense()), **dict(model.named_buffers())}

    hidden: dict[str, Any] = {"named_parameters": dense, "state_dict": state}
    vars(model).update(hidden)
    try:
        yield
    finally:
        for name in hidden:
            del vars(model)[name]
            if name in attributes:
                vars(model)[name] = attributes[name]


def expert_names(bridge: Any, model: Any) -> dict[int, list[str]]:
    """Return, for every MoE layer, the engines' names of an expert's gate, up and down, with {expert} for its number.

    Raises `InvalidInputError` where the bridge writes all experts of a layer into one tensor.
    """
    names: dict[int, list[str]] = {}
    for index, layer in enumerate(model.moe_layer_ids):
        per_expert = []
        for expert in (0, 1):
            mapped_names: list[str] = []
            for name in MCORE_NAMES:
                mapped_names += bridge._weight_name_mapping_mcore_to_hf(name.format(layer=layer, expert=expert))
            per_expert.append(mapped_names)
        templates = [re.sub(r"\.experts\.0\.", ".experts.{expert}.", name) for name in per_expert[0]]
        if len(templates) != 3 or [name.format(expert=1) for name in templates] != per_expert[1]:
            raise InvalidInputError(
                "checkpoint_engine.backend=moe_rl needs a separate name for each matrix (gate, up and down) of an "
                f"expert, but {type(bridge).__name__} gives the names {per_expert[0]}."
            )
        names[index] = templates
    return names
