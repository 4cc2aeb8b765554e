"""What replication, reordering and the layer need to know of the experts module of one layer.

H hidden size, T rows that arrived on this rank, slot by slot: first the home slots, then the replica slots.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch

from moe_rl.core.errors import InvalidInputError

# The parameters of one expert in the order of their names.
Weights = Sequence[torch.Tensor]
# fp32 tensors of the same shapes; None for a parameter that is frozen.
Gradients = Sequence[torch.Tensor | None]


class ExpertParameters(Protocol):
    """The parameters of one layer's experts, expert by expert."""

    num_local_experts: int

    def parameters_of(self, slot: int) -> list[torch.nn.Parameter]:
        """Return the parameters of the expert in home slot `slot`, in the order of their names."""


class ExpertView(ABC):
    """The parameters of one kind of Megatron's expert modules by slot, and the facts about that kind.

    Entries of `expert_views.registry.EXPERT_VIEWS`. What computes with them is an `Experts`.
    """

    name: ClassVar[str]
    module_class: ClassVar[str]
    """Qualified name of the class, and no subclass of it, that is viewed."""
    computes: ClassVar[bool]
    """Whether the module itself can run replicas; if not, experts='grouped' must."""
    never_run: ClassVar[str] = ""
    """Why only experimental=True allows it: it was never run with what it is for. Empty where it was."""
    num_local_experts: int

    @abstractmethod
    def __init__(self, module: Any) -> None:
        """Raise `InvalidInputError` for a module whose settings are not supported."""

    @abstractmethod
    def parameters_of(self, slot: int) -> list[torch.nn.Parameter]:
        """Return the parameters of the expert in home slot `slot`, in the order of their names."""

    @classmethod
    def own_compute(cls, module: Any, *, spare_slots: int) -> "Experts":
        """Return the experts as the module itself computes them, with `spare_slots` for copies.

        Raises `InvalidInputError` where it cannot run replicas.
        """
        raise InvalidInputError(f"experts of type {type(module).__name__} need experts='grouped'.")


class Experts(ExpertParameters, Protocol):
    """The experts module of one layer: its parameters, and what it computes."""

    def begin(self, fixed_during: object | None) -> None:
        """Start a run of the layer: weights keep their values as long as `fixed_during` is the same object.

        None promises nothing. What a view derives from weights, such as FP8 codes, must not outlive this.
        """

    def release(self) -> None:
        """Give back what was derived from weights and kept; it is made anew where it is needed."""

    def forward_homes(self, rows: torch.Tensor, rows_per_slot: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Return [T, H]: what the layer computes without a plan, on the dispatcher's own arguments."""

    def forward(
        self,
        rows: torch.Tensor,
        rows_per_slot: Sequence[int],
        probs: torch.Tensor,
        weights: Sequence[Weights | None],
        gradients: Sequence[Gradients | None],
    ) -> torch.Tensor:
        """Return [T, H]: every slot's rows through its expert.

        `rows` [T, H] and `probs` [T] stand slot by slot, `rows_per_slot` [slots] of them each. `weights[slot]` replaces
        the module's own parameters; None keeps them in home slots and marks an empty slot after those. A copy's
        weight gradients are added to `gradients[slot]`, or go to autograd, which then hands over None or a gradient.
        """


class ComputingView(ExpertView):
    """A view that computes with Megatron's module itself, so that nothing is derived from the weights."""

    computes = True
    _module: Any

    def begin(self, fixed_during: object | None) -> None:
        """Where an engine keeps codes of weights, it learns from Megatron when they have changed."""

    def release(self) -> None:
        """Nothing is kept here."""

    def forward_homes(self, rows: torch.Tensor, rows_per_slot: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Return [T, H] as Megatron's module computes it."""
        output: torch.Tensor = self._module(rows, rows_per_slot, probs)[0]
        return output


def home_parameters(experts: ExpertParameters) -> list[list[torch.nn.Parameter]]:
    """Return the parameters of every expert that lives here, slot by slot."""
    return [experts.parameters_of(slot) for slot in range(experts.num_local_experts)]


def filled_slots(rows_per_slot: Sequence[int], weights: Sequence[Weights | None], num_local_experts: int) -> list[int]:
    """Return home slots and filled replica slots, ascending; raise where tokens arrived in an empty one."""
    slots = []
    for slot, (rows, weight) in enumerate(zip(rows_per_slot, weights, strict=True)):
        if slot < num_local_experts or weight is not None:
            slots.append(slot)
        elif rows:
            raise RuntimeError(f"{rows} token-expert pairs arrived in slot {slot}, which has no replica.")
    return slots
