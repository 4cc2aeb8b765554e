"""Where a transformer layer with an MoE layer in it begins: a replica's weights can travel while attention runs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from moe_rl.megatron.layer import ElasticMoELayer


def hook_entry(chunk: torch.nn.Module, layer: ElasticMoELayer) -> RemovableHandle | None:
    """Let the layer begin when the transformer layer around it does; None where there is none around it.

    A transformer layer is a module of the chunk that holds the MoE layer as `mlp` and takes `hidden_states` first.
    """
    for module in chunk.modules():
        if getattr(module, "mlp", None) is layer:
            return module.register_forward_pre_hook(_enter, with_kwargs=True)
    return None


def _enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    layer: Any = module.mlp
    if args:
        return (layer.enter(args[0]), *args[1:]), dict(kwargs)
    return args, {**kwargs, "hidden_states": layer.enter(kwargs["hidden_states"])}
