"""Our `GroupedExperts` in place of a module's own expert compute: one grouped GEMM over home and replica slots.

Nothing is gathered. Kernels read every expert through a table of addresses: home slots where Megatron's parameters lie,
replicas in their buffers. Weight gradients are added where they belong through another table: Megatron's fp32
`main_grad` of home slots, as its own fused kernels do, and the replicas' fp32 buffers. Biases, a few numbers per
expert, are stacked, and get their gradients from autograd. FP8 codes are made from home
weights once per pass; those of replicas, shared by all layers, whenever weights have arrived, in backward once more.
They take one byte per weight and stay between passes.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from moe_rl.core.errors import require
from moe_rl.kernels import (
    ExpertGradients,
    ExpertMatrix,
    ExpertWeights,
    GroupedExperts,
    QuantizedTensor,
    WeightCodes,
    pointer_table,
)
from moe_rl.kernels.gemm.weights import ALIGNMENT
from moe_rl.megatron.exchange import call_in_backward
from moe_rl.megatron.expert_views.grouped_compute import GroupedCompute, glu_spec
from moe_rl.megatron.expert_views.main_grad import hand_over, marked_as_added
from moe_rl.megatron.experts import ExpertParameters, Experts, Gradients, Weights, filled_slots, home_parameters

# fc1 [2 F, H] and fc2 [H, F], in the order of their names.
MATRICES = 2
# Biases have one.
MATRIX_AXES = 2
KEPT_TABLES = 32


class GroupedSlots:
    """The experts of one layer, computed by `GroupedExperts`; `homes` says whose parameters they are."""

    def __init__(self, homes: ExpertParameters, config: TransformerConfig, compute: GroupedCompute) -> None:
        weights_of_home = homes.parameters_of(0)
        require(
            len(_matrices(weights_of_home)) == MATRICES
            and len({parameter.requires_grad for parameter in weights_of_home}) == 1,
            "experts='grouped' needs fc1 and fc2 to be both trained or both frozen, but in this model they have "
            "adapters (LoRA), or only some of their weights are frozen. Use experts='megatron'.",
        )
        odd = [size for matrix in _matrices(weights_of_home) for size in matrix.shape if size % ALIGNMENT]
        require(
            not odd,
            f"experts='grouped' needs weight matrices whose dimensions are multiples of {ALIGNMENT}, but one dimension "
            f"on this rank is {odd[0] if odd else 0} (with expert tensor parallelism, a rank has only a part of each "
            "expert).",
        )
        self._homes, self._compute = homes, compute
        self.num_local_experts = homes.num_local_experts
        self._experts = GroupedExperts(recipe=compute.recipe, spec=glu_spec(config), backend=compute.backend)
        self._home_codes: list[WeightCodes] = []
        """fc1 of all home slots, then fc2."""
        self._codes_are_current = False
        self._fixed_during: object | None = None
        self._tables: dict[tuple[int, ...], torch.Tensor] = {}
        self.replica_codes: dict[tuple[int, int], WeightCodes] = {}
        """(slot among the replicas, matrix) -> codes; one dict for all layers, see `share_replica_codes`."""

    def parameters_of(self, slot: int) -> list[torch.nn.Parameter]:
        """Return the parameters of the expert in home slot `slot`, in the order of their names."""
        return self._homes.parameters_of(slot)

    def begin(self, fixed_during: object | None) -> None:
        """See `Experts.begin`: decides whether FP8 codes of home weights are still right."""
        if fixed_during is None or fixed_during is not self._fixed_during:
            self._codes_are_current = False
        self._fixed_during = fixed_during

    def release(self) -> None:
        """See `Experts.release`: FP8 codes, and tables of addresses."""
        self._home_codes, self._codes_are_current = [], False
        self._tables.clear()
        self.replica_codes.clear()

    def forward_homes(self, rows: torch.Tensor, rows_per_slot: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Return [T, H] for home slots alone."""
        no_replicas = [None] * self.num_local_experts
        return self.forward(rows, rows_per_slot.tolist(), probs, no_replicas, no_replicas)

    def forward(
        self,
        rows: torch.Tensor,
        rows_per_slot: Sequence[int] | torch.Tensor,
        probs: torch.Tensor,
        weights: Sequence[Weights | None],
        gradients: Sequence[Gradients | None],
    ) -> torch.Tensor:
        """Return [T, H]: every slot's rows through its expert; see `Experts.forward`.

        Counts that are a tensor stay on their device; rows behind the last slot's are nobody's then.
        """
        host_counts = None if isinstance(rows_per_slot, torch.Tensor) else rows_per_slot
        filled_slot_ids = filled_slots(host_counts or [0] * len(weights), weights, self.num_local_experts)
        operands = [weights[slot] or self.parameters_of(slot) for slot in filled_slot_ids]
        run = _Run(view=self)
        for slot, operand in zip(filled_slot_ids, operands, strict=True):
            if slot >= self.num_local_experts:
                index = slot - self.num_local_experts
                run.replicas.append(_Replica.of(index, weights=operand, gradients=gradients[slot] or ()))
        main_grads = None
        if torch.is_grad_enabled() and self.parameters_of(0)[0].requires_grad:
            run.home_gradients = [self._gradient_targets(slot) for slot in range(self.num_local_experts)]
            main_grads = self._gradient_tables(run)
            home_weights = [w for operand in operands[: self.num_local_experts] for w in _matrices(operand)]
            rows = hand_over(run.handed_over, rows, home_weights)
        if isinstance(rows_per_slot, torch.Tensor):
            counts = rows_per_slot.to(rows.device, torch.int32, non_blocking=True)
            if len(filled_slot_ids) < len(weights):
                counts = counts.index_select(0, _sent(filled_slot_ids, rows.device))
            offsets = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        else:
            offsets = _sent(
                list(itertools.accumulate((rows_per_slot[slot] for slot in filled_slot_ids), initial=0)), rows.device
            )
        fc1, fc2 = self._tables_of(operands, run.replicas)
        fc1_bias, fc2_bias = _stacked_biases(operands)
        output = self._experts(
            rows,
            probs.float(),
            fc1,
            fc2,
            offsets,
            main_grads=main_grads,
            fc1_bias=fc1_bias,
            fc2_bias=fc2_bias,
        )
        if run.replicas:
            return call_in_backward(run.refill, output)
        return output

    def _tables_of(self, operands: Sequence[Weights], replicas: "Sequence[_Replica]") -> list[ExpertMatrix]:
        """Return fc1 and fc2 of all filled slots as tables."""
        if not self.is_fp8:
            by_matrix = zip(*map(_matrices, operands), strict=True)
            return [ExpertMatrix(weights=self._wide(parts), transposed=None) for parts in by_matrix]
        self._quantize_homes()
        self.quantize_replicas(replicas)
        homes = self.num_local_experts
        tables = []
        for index in range(MATRICES):
            codes = self._home_codes[index * homes : (index + 1) * homes]
            codes += [self.replica_codes[replica.slot, index] for replica in replicas]
            plain_codes, transposed_codes = [], []
            for codes_of_slot in codes:
                plain_codes.append(codes_of_slot.plain)
                if codes_of_slot.transposed is not None:
                    transposed_codes.append(codes_of_slot.transposed)
            transposed_table = self._codes(transposed_codes) if transposed_codes else None
            tables.append(ExpertMatrix(weights=self._codes(plain_codes), transposed=transposed_table))
        return tables

    def _wide(self, weights: Sequence[torch.Tensor]) -> ExpertWeights:
        parts = [weight.detach() for weight in weights]
        table = self._table(parts, "expert weights")
        return ExpertWeights(data=table, shape=_matrix_shape(parts[0]), dtype=parts[0].dtype)

    def _codes(self, parts: list[QuantizedTensor]) -> ExpertWeights:
        codes, scales = [part.data for part in parts], [part.scale for part in parts]
        return ExpertWeights(
            data=self._table(codes, "codes of expert weights"),
            shape=_matrix_shape(codes[0]),
            dtype=codes[0].dtype,
            scale=self._table(scales, "scales of expert weights", alignment=scales[0].element_size()),
            block_shape=parts[0].block_shape,
        )

    def _gradient_tables(self, run: "_Run") -> tuple[ExpertGradients, ExpertGradients]:
        # Asked for only where weights train, and then every replica has gradients.
        of_replicas = [replica.gradients for replica in run.replicas]
        fc1, fc2 = zip(*run.home_gradients, *of_replicas, strict=True)
        return self._gradient_table(fc1), self._gradient_table(fc2)

    def _gradient_table(self, parts: Sequence[torch.Tensor]) -> ExpertGradients:
        # `owners` keeps scratch gradients alive until backward; main gradients and buffers live longer anyway.
        table = self._table(parts, "weight gradients")
        return ExpertGradients(data=table, shape=_matrix_shape(parts[0]), dtype=torch.float32, owners=tuple(parts))

    def _table(self, parts: Sequence[torch.Tensor], content: str, **alignment: int) -> torch.Tensor:
        """Return int64 addresses of `parts`; kept, because a copy to the device costs more than a look."""
        key = tuple(part.data_ptr() for part in parts)
        if key not in self._tables:
            while len(self._tables) >= KEPT_TABLES:
                del self._tables[next(iter(self._tables))]
            self._tables[key] = pointer_table(parts, content, **alignment)
        return self._tables[key]

    def _gradient_targets(self, slot: int) -> list[torch.Tensor]:
        """Return where the gradients of a home go: `main_grad`, or scratch memory where there is no Megatron DDP."""
        targets = []
        for parameter in _matrices(self.parameters_of(slot)):
            main_grad = _main_grad(parameter)
            if main_grad is None:
                main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            targets.append(main_grad)
        return targets

    def require_float32_gradients(self) -> None:
        """Raise `InvalidInputError` where the gradient buffers of Megatron's DDP are not those that we add to."""
        for slot in range(self.num_local_experts):
            for parameter in _matrices(self.parameters_of(slot)):
                _main_grad(parameter)

    def _quantize_homes(self) -> None:
        if self._codes_are_current:
            return
        of_slots = [_matrices(parameters) for parameters in home_parameters(self)]
        weights = [matrix.detach() for of_matrix in zip(*of_slots, strict=True) for matrix in of_matrix]
        self._home_codes = self._home_codes or self._compute.room_for(weights)
        self._compute.quantize(weights, self._home_codes)
        self._codes_are_current = True

    def quantize_replicas(self, replicas: "Sequence[_Replica]") -> None:
        """Make the codes of replicas from the weights that lie in the buffers now."""
        weights = {
            (replica.slot, index): weight for replica in replicas for index, weight in enumerate(replica.weights)
        }
        new_keys = [key for key in weights if key not in self.replica_codes]
        self.replica_codes.update(
            zip(new_keys, self._compute.room_for([weights[key] for key in new_keys]), strict=True)
        )
        self._compute.quantize(list(weights.values()), [self.replica_codes[key] for key in weights])

    @property
    def is_fp8(self) -> bool:
        """Whether weights are multiplied as codes."""
        return self._compute.recipe.is_fp8


@dataclass(slots=True, kw_only=True)
class _Replica:
    """A filled replica slot of one run: views of the buffers."""

    slot: int
    weights: list[torch.Tensor]
    gradients: list[torch.Tensor]

    @classmethod
    def of(cls, slot: int, *, weights: Weights, gradients: Gradients) -> "_Replica":
        """Return the matrices of a slot; a frozen one has no gradient."""
        targets = [gradient for gradient in gradients if gradient is not None]
        matrices = [weight.detach() for weight in _matrices(weights)]
        return cls(slot=slot, weights=matrices, gradients=_matrices(targets))


@dataclass(slots=True, kw_only=True)
class _Run:
    """What a run of the experts leaves for its backward."""

    view: GroupedSlots
    replicas: list[_Replica] = field(default_factory=list)
    home_gradients: list[list[torch.Tensor]] = field(default_factory=list)
    """Per home slot the fp32 tensors to which backward adds; empty where experts are frozen."""

    def refill(self) -> None:
        """Make ready what backward needs of the replicas, whose weights have arrived again."""
        if self.view.is_fp8:
            self.view.quantize_replicas(self.replicas)

    def handed_over(self) -> Iterator[torch.Tensor]:
        """Yield what autograd is to give the homes' parameters, whose gradients are in place by now."""
        for slot, targets in enumerate(self.home_gradients):
            for parameter, target in zip(_matrices(self.view.parameters_of(slot)), targets, strict=True):
                if getattr(parameter, "main_grad", None) is None:
                    yield target.to(parameter.dtype)
                else:
                    yield marked_as_added(parameter)


def _sent(values: list[int], device: torch.device) -> torch.Tensor:
    """Return int32 values on a device; from pinned memory, so that the host does not wait for the copy."""
    tensor = torch.tensor(values, dtype=torch.int32)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def share_replica_codes(layers: Sequence[Experts]) -> None:
    """Let the layers make the FP8 codes of replicas in the same memory, as they share the buffers of the weights."""
    codes: dict[tuple[int, int], WeightCodes] = {}
    for experts in layers:
        if isinstance(experts, GroupedSlots):
            experts.replica_codes = codes


def _main_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return where Megatron's DDP wants the gradient, None without one; raise where it is not float32."""
    main_grad: torch.Tensor | None = getattr(parameter, "main_grad", None)
    require(
        main_grad is None or main_grad.dtype == torch.float32,
        "experts='grouped' adds weight gradients in float32, but the dtype of the gradient buffers is "
        f"{None if main_grad is None else main_grad.dtype}: set grad_reduce_in_fp32=True.",
    )
    return main_grad


def _matrices(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return fc1 [2 F, H] and fc2 [H, F] of an expert, or their gradients."""
    return [parameter for parameter in parameters if parameter.dim() == MATRIX_AXES]


def _stacked_biases(operands: Sequence[Weights]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the biases [slots, 2 F] and [slots, H]; None where there are none."""
    by_slot = [[part for part in operand if part.dim() != MATRIX_AXES] for operand in operands]
    stacked = [torch.stack(parts) for parts in zip(*by_slot, strict=True)]
    if stacked:
        return (stacked[0], stacked[1])
    return (None, None)


def _matrix_shape(part: torch.Tensor) -> tuple[int, int]:
    return part.shape[0], part.shape[1]
