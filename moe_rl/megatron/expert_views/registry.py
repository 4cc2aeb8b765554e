"""Which expert modules there is a view of."""

from collections.abc import Callable

import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from moe_rl.core.errors import InvalidInputError
from moe_rl.megatron.expert_views.sequential import SequentialExperts
from moe_rl.megatron.experts import Experts

KINDS: dict[type[torch.nn.Module], Callable[..., Experts]] = {
    SequentialMLP: SequentialExperts,
}


def experts_of(module: torch.nn.Module) -> Experts:
    """Return the view of a layer's experts module; raise `InvalidInputError` for a module that is not supported."""
    if type(module) in KINDS:
        return KINDS[type(module)](module)
    raise InvalidInputError(f"experts of type {type(module).__name__} are not supported.")
