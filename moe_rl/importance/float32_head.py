"""ScaleRL's head in float32: logits, and so log-probabilities, that rounding does not move (arXiv 2510.13786)."""

from types import MethodType
from typing import Any

from torch import Tensor, nn

from moe_rl.core.errors import require

# Names of the last layer in Transformers and Megatron.
HEADS = ("lm_head", "output_layer", "embed_out")


def float32_head(model: nn.Module) -> None:
    """Let the head of a Transformers model or a Megatron stage compute its logits in float32 from now on.

    Weights stay as they are: each forward casts them, and their gradients come back in their own type. A stage of a
    pipeline without head stays as it is. Raises `InvalidInputError` for a model without head, and for a head that adds
    its gradient to a buffer of its own, past the cast (`gradient_accumulation_fusion`).
    """
    heads = [module for name, module in model.named_modules() if name.rpartition(".")[2] in HEADS]
    is_earlier_stage = any(getattr(module, "post_process", True) is False for module in model.modules())
    require(bool(heads) or is_earlier_stage, f"the model has no layer named {' or '.join(HEADS)}.")
    for head in heads:
        fused = getattr(head, "gradient_accumulation_fusion", False)
        require(not fused, "gradient_accumulation_fusion must be False for an output layer in float32.")
        # On the instance: hooks, tied weights, state dicts and the class of other heads stay as they are.
        head.forward = MethodType(_in_float32, head)


def _in_float32(head: Any, hidden: Tensor, weight: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """Megatron's head takes its weight as an argument, PyTorch's has its own."""
    weight = (head.weight if weight is None else weight).float()
    if isinstance(head, nn.Linear):
        return nn.functional.linear(hidden.float(), weight, None if head.bias is None else head.bias.float())
    return type(head).forward(head, hidden.float(), weight, *args, **kwargs)
