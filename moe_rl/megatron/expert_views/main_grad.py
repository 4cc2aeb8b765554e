"""Weight gradients that kernels add to Megatron's `main_grad`, past autograd, and how its hooks still learn of them.

Under `gradient_accumulation_fusion` Megatron's and TransformerEngine's linears add a weight's gradient to its
`main_grad`, mark the parameter (`grad_added_to_main_grad`), and give autograd a gradient that nobody is to read. With
these DDP may reduce at once, before the gradients of copies are home. In a layer with copies the linears therefore get
leaves in place of the parameters, with their `main_grad` and nothing to mark: of such a weight they tell autograd
nothing. The parameters are told when the experts' backward is over, by the way that their gradients always go.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from moe_rl.megatron.experts import ExpertParameters, Gradients, Weights

# Biases have one axis; their gradients are never fused.
MATRIX_AXES = 2


def fuses(config: Any, weights: Weights) -> bool:
    """Return whether linears built with this `TransformerConfig` add these weights' gradients to `main_grad`."""
    return bool(
        config.gradient_accumulation_fusion
        and torch.is_grad_enabled()
        and any(weight.requires_grad for weight in weights)
    )


def fused_operands(
    experts: ExpertParameters,
    rows: torch.Tensor,
    weights: Sequence[Weights | None],
    gradients: Sequence[Gradients | None],
) -> tuple[torch.Tensor, list[Weights | None]]:
    """Return the rows, whose backward tells the homes' parameters, and what stands for the weights of every slot.

    `weights` are those of all home slots and of the filled ones behind them; None marks an empty slot, and stays.
    """
    fused_parameters: list[torch.nn.Parameter] = []
    passed_on: list[torch.Tensor] = []
    operands: list[Weights | None] = []
    for slot, parts in enumerate(weights):
        if parts is None:
            operands.append(None)
            continue
        at_home = slot < experts.num_local_experts
        targets: Sequence[Any] = experts.parameters_of(slot) if at_home else gradients[slot] or ()
        operand: list[torch.Tensor] = []
        for part, target in zip(parts, targets, strict=True):
            if part.dim() != MATRIX_AXES or not part.requires_grad:
                operand.append(part)
            elif at_home:
                operand.append(_leaf(part, target.main_grad))
                fused_parameters.append(target)
                passed_on.append(part)
            else:
                operand.append(_leaf(part, target))
        operands.append(operand)

    def tell() -> Iterator[torch.Tensor]:
        return (marked_as_added(parameter) for parameter in fused_parameters)

    return hand_over(tell, rows, passed_on), operands


def _leaf(weight: torch.Tensor, main_grad: torch.Tensor) -> torch.Tensor:
    """Return the weight as a leaf without the mark of a parameter, whose gradient is added to `main_grad`.

    A module that does not fuse, such as an adapter of plain matrices, hands its gradient to autograd: it is added here.
    """

    def add(leaf: torch.Tensor) -> None:
        if leaf.grad is not None:  # torch comes by where a fused module had nothing to hand over, too
            main_grad.add_(leaf.grad)
            leaf.grad = None

    leaf = weight.detach().requires_grad_()
    leaf.main_grad = main_grad  # type: ignore[attr-defined]  # Megatron's, not torch's
    leaf.register_post_accumulate_grad_hook(add)
    return leaf


def hand_over(
    gradients: Callable[[], Iterable[torch.Tensor]], rows: torch.Tensor, weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the rows; when their gradient arrives, so after the experts' backward, `gradients()` go to the weights."""
    passed: torch.Tensor = _HandOver.apply(gradients, rows, *weights)
    return passed


def marked_as_added(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a parameter whose `main_grad` is complete: its hook is to run, and to add nothing.

    That is Megatron's own agreement for fused weight gradients. The numbers are not defined, and take no memory: the
    gradients of all homes wait for the end of their layer.
    """
    parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # Megatron's, not torch's
    return parameter.new_empty(()).expand_as(parameter)


class _HandOver(torch.autograd.Function):
    """Identity on the rows; backward comes after the experts' own and tells the parameters that it is done."""

    @staticmethod
    def forward(
        ctx: Any, gradients: Callable[[], Iterable[torch.Tensor]], rows: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.gradients = gradients
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, gradient, *ctx.gradients()
