"""`TEGroupedMLP`: TransformerEngine's grouped linears over home and replica slots.

Home slots run through the model's own module, so that its FP8 state, its recipe and the codes of weights that it keeps
from one micro-batch to the next stay what they are, checkpoints included: state is per GEMM, and a module of more GEMMs
would have another. Replica slots run through a second module of the same class with one GEMM per slot. It owns no
memory: its parameters lie on the meta device, and every call gets the rows of the replica buffers in their place. An
adapter around a grouped linear (LoRA), one for all experts, is the same module around both. Codes
of replicas are made in every call, since the next micro-batch brings other experts; in FP8 TransformerEngine keeps
these codes for backward, and not the buffers. A rank without rows in replica slots calls the first module alone.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.func import functional_call

from moe_rl.core.errors import require
from moe_rl.core.mappings import attributes
from moe_rl.megatron.expert_views.main_grad import MATRIX_AXES, fused_operands, fuses
from moe_rl.megatron.experts import ComputingView, Experts, Gradients, Weights, filled_slots


class TEGroupedExperts(ComputingView):
    """Parameters `linear_fc1.weight{i}`, `linear_fc2.weight{i}`, with biases where there are some."""

    name = "te-grouped"
    module_class = "megatron.core.transformer.moe.experts.TEGroupedMLP"

    def __init__(self, module: Any) -> None:
        self._module = module
        self._copies: Any = None
        self.num_local_experts = int(module.num_local_experts)
        kinds = ("bias", "weight") if module.config.add_bias_linear else ("weight",)
        self._names = [
            f"{name}.{_path(getattr(module, name), name)}{kind}"
            for name in ("linear_fc1", "linear_fc2")
            for kind in kinds
        ]

    @classmethod
    def own_compute(cls, module: Any, *, spare_slots: int) -> Experts:
        """Return the view, which computes with the module and one like it for `spare_slots` copies."""
        view = cls(module)
        if spare_slots:
            view._copies = _without_memory(module, spare_slots)
        return view

    def parameters_of(self, slot: int) -> list[torch.nn.Parameter]:
        """Return the parameters of the expert in home slot `slot`, in the order of their names."""
        return [self._module.get_parameter(f"{name}{slot}") for name in self._names]

    def forward(
        self,
        rows: torch.Tensor,
        rows_per_slot: Sequence[int],
        probs: torch.Tensor,
        weights: Sequence[Weights | None],
        gradients: Sequence[Gradients | None],
    ) -> torch.Tensor:
        """Return [T, H]: every slot's rows through its expert; see `Experts.forward`."""
        num_homes = self.num_local_experts
        filled_slot_ids = filled_slots(rows_per_slot, weights, num_homes)
        operands = [
            weights[slot] or (self.parameters_of(slot) if slot < num_homes else None) for slot in range(len(weights))
        ]
        if fuses(self._module.config, operands[0] or ()):
            rows, operands = fused_operands(self, rows, operands, gradients)
        at_home = sum(rows_per_slot[:num_homes])
        if at_home == len(rows):
            return self._run(self._module, rows, rows_per_slot[:num_homes], probs, operands[:num_homes])
        sizes = [at_home, len(rows) - at_home]
        (home_rows, copy_rows), (home_probs, copy_probs) = torch.split(rows, sizes), torch.split(probs, sizes)
        homes = self._run(self._module, home_rows, rows_per_slot[:num_homes], home_probs, operands[:num_homes])
        spare = [
            operands[slot] or operands[filled_slot_ids[-1]] for slot in range(num_homes, len(weights))
        ]  # no rows: any weights
        return torch.cat([homes, self._run(self._copies, copy_rows, rows_per_slot[num_homes:], copy_probs, spare)])

    def _run(
        self, module: Any, rows: torch.Tensor, rows_per_slot: Sequence[int], probs: torch.Tensor, weights: Sequence[Any]
    ) -> torch.Tensor:
        """Return the output of `module` with these weights, one expert's per GEMM, in place of its own."""
        parameters_by_name = {
            f"{name}{slot}": part
            for slot, parts in enumerate(weights)
            for name, part in zip(self._names, parts, strict=True)
        }
        output: torch.Tensor = functional_call(module, parameters_by_name, (rows, torch.tensor(rows_per_slot), probs))[
            0
        ]
        return output


def _without_memory(module: Any, num_gemms: int) -> Any:
    """Return a module like this one for `num_gemms` experts, whose parameters every call must be given."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.mlp import MLPSubmodules

    config = copy.copy(module.config)
    config.use_cpu_initialization, config.init_model_with_meta_device = False, True
    config.disable_parameter_transpose_cache = True  # Megatron's name for: no codes of an earlier micro-batch
    groups = ProcessGroupCollection()
    groups.ep, groups.expt_tp = module.ep_group, module.tp_group
    activation = module.activation_func
    wrappers = attributes(module, ("linear_fc1", "linear_fc2"))
    paths = {name: _path(wrapper, name).rstrip(".") for name, wrapper in wrappers.items()}
    submodules = MLPSubmodules(
        **{name: type(wrapper.get_submodule(paths[name])) for name, wrapper in wrappers.items()},
        activation_func=type(activation) if isinstance(activation, torch.nn.Module) else None,
    )
    copies = type(module)(num_gemms, config, submodules, pg_collection=groups)
    require(
        all(parameter.is_meta for parameter in copies.parameters()),
        f"{submodules.linear_fc1.__name__} ignores init_model_with_meta_device, so replicas would need twice the "
        "memory.",
    )
    for name, path in paths.items():
        if path:  # the same adapter around other weights
            wrapper_copy = copy.copy(wrappers[name])
            wrapper_copy._modules = {**wrapper_copy._modules, path: getattr(copies, name)}
            setattr(copies, name, wrapper_copy)
    return copies


def _path(linear: Any, name: str) -> str:
    """Return where the grouped linear is in what may be an adapter around it: "", or its name there and a dot."""
    paths = [
        f"{path}." if path else ""
        for path, module_at_path in linear.named_modules()
        if hasattr(module_at_path, "weight0")
    ]
    matrices = all(parameter.dim() <= MATRIX_AXES for parameter in linear.parameters())
    require(
        len(paths) == 1 and paths[0].count(".") <= 1 and matrices,
        f"{name} of TEGroupedMLP is a {type(linear).__name__}: moe_rl supports only LoRA with one adapter shared by "
        "all experts. For one adapter per expert, turn moe_grouped_gemm off.",
    )
    return paths[0]
