"""The specialized loops in every form that a run gives them, beside the plain loop on the same operands.

forward     weights in one tensor, behind a table of addresses, and with a weighted bias
dgrad       bf16 alone: FP8 runs forward on transposed codes
wgrad       FP8 alone: written or added, into one tensor or behind a table
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from benchmarks.gpu.machine import Machine
    from benchmarks.kernels.cases import GemmOperands
    from moe_rl.kernels.gemm.tiling import GemmConfig

FORMS = (
    ("forward", "block", "one tensor"), ("forward", "block", "table"), ("forward", "block", "bias"),
    ("forward", "none", "one tensor"), ("forward", "none", "table"), ("forward", "none", "bias"),
    ("dgrad", "none", "one tensor"), ("dgrad", "none", "table"),
    ("wgrad", "block", "written"), ("wgrad", "block", "added"), ("wgrad", "block", "added behind a table"),
)  # fmt: skip
"""(operation, scaling of the operands, form)."""
STEPS = tuple(" ".join(form) for form in FORMS)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Rows of each group, columns N and summed axis K of the weights."""

    sizes: tuple[int, ...]
    n: int
    k: int

    @property
    def flops(self) -> float:
        """A multiply-add counts as two."""
        return 2.0 * sum(self.sizes) * self.n * self.k


@dataclass(frozen=True, kw_only=True)
class Product:
    """One loop in one form on fixed operands."""

    run: Callable[[GemmConfig], tuple[torch.Tensor, ...]]
    launch: Callable[[GemmConfig], object]
    """`run` without what only a check needs: a gradient is neither spoiled before nor copied after."""
    expected: Callable[[], tuple[torch.Tensor, ...]]
    """Of the reference in float64: to the bit where the sums are exact."""
    plain: GemmConfig
    special: GemmConfig
    flops: float
    codes: tuple[str, ...]
    """Digests of the machine code that is carried for the specialized tile in all its forms."""


def form_of(step: str) -> tuple[str, str, str]:
    """Return the form that a step names."""
    return FORMS[STEPS.index(step)]


def product(machine: Machine, step: str, shape: Shape, *, exact: bool) -> Product:
    """Return a product whose sums are exact in fp32 in any order, or one of random operands."""
    from moe_rl.kernels.carried import carried_for, tile_name
    from moe_rl.kernels.gemm.tiling import HOPPER, GemmProblem, candidates, config

    op, scaling, form = form_of(step)
    described: Any = GemmProblem(
        op=op, scaling=scaling, num_rows=max(1, sum(shape.sizes)), num_groups=len(shape.sizes), n=shape.n,  # type: ignore[arg-type]
        k=shape.k, capability=HOPPER,
    )  # fmt: skip
    special = [tile for tile in candidates(described) if tile.specialized]
    archive = carried_for(HOPPER)
    carried = archive.codes_of_tiles if archive is not None else {}
    if not special or not (carried or machine.is_recording):
        raise RuntimeError(f"no specialized tile of {op} {scaling} is carried for Hopper")
    made = _exact(machine, op, scaling, shape) if exact else _random(machine, op, scaling, shape)
    of_op = _wgrad(machine, form, made, exact=exact) if op == "wgrad" else _rows(machine, op, form, made)
    run, launch, expected = of_op
    return Product(
        run=_bent(run) if machine.is_bent else run, launch=launch, expected=expected, plain=config(described),
        special=special[0], flops=shape.flops, codes=tuple(sorted(carried.get(tile_name(op, scaling, special[0]), ()))),
    )  # fmt: skip


def _bent(run: Callable[[GemmConfig], tuple[torch.Tensor, ...]]) -> Callable[[GemmConfig], tuple[torch.Tensor, ...]]:
    """Return a run whose specialized results have one wrong bit: what a test must see as wrong."""

    def bent(tile: GemmConfig) -> tuple[torch.Tensor, ...]:
        results = run(tile)
        if tile.specialized and results[0].numel():
            import torch

            view = results[0].view(torch.int16 if results[0].element_size() == 2 else torch.int32)
            view[-1, -1] ^= 1
        return results

    return bent


def _exact(machine: Machine, op: str, scaling: str, shape: Shape) -> GemmOperands:
    from benchmarks.kernels.cases import GemmCase, exact_operands

    made = exact_operands(GemmCase(sizes=shape.sizes, n=shape.n, k=shape.k, extra_rows=9, scaling=scaling))  # type: ignore[arg-type]
    return _moved(made, machine.device)


def _moved(made: GemmOperands, device: str) -> GemmOperands:
    """Return operands on a device."""
    from moe_rl.kernels import ExpertWeights, QuantizedTensor

    def moved(value: Any) -> Any:
        if isinstance(value, QuantizedTensor):
            return replace(value, data=value.data.to(device), scale=value.scale.to(device))
        return value.to(device)

    weights = made.weights
    whole = weights.data if weights.scale is None else QuantizedTensor(
        data=weights.data, scale=weights.scale, block_shape=weights.block_shape or (0, 0)
    )  # fmt: skip
    return replace(
        made, m_offsets=moved(made.m_offsets), wide_x=moved(made.wide_x), wide_dy=moved(made.wide_dy), x=moved(made.x),
        dy=moved(made.dy), weights=ExpertWeights.of(moved(whole)),
        weight_parts=tuple(moved(part) for part in made.weight_parts),
    )  # fmt: skip


def _random(machine: Machine, op: str, scaling: str, shape: Shape) -> GemmOperands:
    """Return random operands; only those that the operation reads, for they may be large."""
    from benchmarks.kernels.cases import GemmOperands
    from moe_rl.kernels import BLOCK, ExpertWeights, quantize

    num_rows, groups = sum(shape.sizes), len(shape.sizes)
    nothing = machine.random(0, 16)
    reads_x, reads_dy = op in ("forward", "wgrad"), op in ("dgrad", "wgrad")
    x = machine.random(num_rows, shape.k) if reads_x else nothing
    dy = machine.random(num_rows, shape.n, seed=1) if reads_dy else nothing
    w: Any = machine.random(groups, *(shape.n, shape.k) if op != "wgrad" else (16, 16), seed=2)
    rows: Any = x
    if scaling == "block" and op == "forward":
        rows, w = quantize(x, (1, BLOCK)), quantize(w, (BLOCK, BLOCK))
    weights = ExpertWeights.of(w)
    parts: Any = () if op == "wgrad" else tuple(weights.part(g) for g in range(groups))
    if parts and weights.scale is not None:
        from moe_rl.kernels import QuantizedTensor

        parts = tuple(
            QuantizedTensor(data=weights.part(g), scale=weights.part_scale(g), block_shape=(BLOCK, BLOCK))
            for g in range(groups)
        )
    return GemmOperands(
        m_offsets=machine.offsets(shape.sizes), wide_x=x, wide_dy=dy, x=rows, dy=dy, weights=weights, weight_parts=parts
    )


def _rows(machine: Machine, op: str, form: str, made: GemmOperands) -> tuple[Any, Any, Any]:
    import torch

    from benchmarks.kernels.cases import rows_gemm
    from moe_rl.kernels import ExpertWeights
    from moe_rl.kernels.gemm import reference, triton_kernel

    rows = made.x if op == "forward" else made.dy
    weights = ExpertWeights.of_parts(made.weight_parts) if form == "table" else made.weights
    settings: dict[str, Any] = {}
    if form == "bias":
        groups, n = weights.num_groups, weights.shape[0]
        signs = machine.random(len(rows.data), 1, dtype=torch.float32, seed=4).sign()
        settings = {"bias": machine.random(groups, n, seed=3).round(), "bias_factor": signs[:, 0]}
    gemm = rows_gemm(rows, weights, made.m_offsets, out_dtype=torch.bfloat16, **settings)
    launch, exact = getattr(triton_kernel, op), getattr(reference, op)

    def run(tile: GemmConfig) -> tuple[torch.Tensor, ...]:
        return (launch(gemm, chosen=tile),)

    return run, run, lambda: (exact(gemm),)


def _wgrad(machine: Machine, form: str, made: GemmOperands, *, exact: bool) -> tuple[Any, Any, Any]:
    import torch

    from benchmarks.kernels.cases import exact_columns, wgrad_gemm
    from moe_rl.kernels.gemm import reference, triton_wgrad
    from moe_rl.kernels.gemm.weights import ExpertGradients

    groups = made.m_offsets.numel() - 1
    shape = groups, made.wide_dy.shape[1], made.wide_x.shape[1]
    # Without zeros that are negative: an empty group leaves those alone, where the reference adds a zero.
    before = machine.random(*shape, dtype=torch.float32, seed=5).round() + 0.0
    accumulate = form != "written"
    gemm = wgrad_gemm(made, "block", ExpertGradients.of(before), accumulate=accumulate)
    gemm = exact_columns(gemm) if exact else gemm
    out = torch.empty_like(before)
    parts = list(out.unbind())
    into = ExpertGradients.of_parts(parts) if form.endswith("table") else ExpertGradients.of(out)

    def launch(tile: GemmConfig) -> None:
        triton_wgrad.wgrad(replace(gemm, out=into), chosen=tile)

    def run(tile: GemmConfig) -> tuple[torch.Tensor, ...]:
        out.copy_(before if accumulate else torch.full_like(before, float("nan")))
        launch(tile)
        return (out.clone(),)

    def expected() -> tuple[torch.Tensor, ...]:
        wanted = before.clone()
        reference.wgrad(replace(gemm, out=ExpertGradients.of(wanted)))
        return (wanted,)

    return run, launch, expected
