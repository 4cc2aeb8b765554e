"""Tile shapes of the grouped GEMMs: deterministic, from the problem alone.

The summed axis is always walked in the same steps (`block_k`: 128 for FP8, 64 for bf16), so that a row's sums do not
depend on how many other rows there are; only the number of rows per tile follows the batch.
"""

from dataclasses import dataclass
from typing import Literal

from moe_rl.kernels.carried import is_carried, tile_name
from moe_rl.kernels.devices import FP8_CAPABILITY, has_gluon, require_capability
from moe_rl.kernels.types import BLOCK, MX_BLOCK_SHAPE

Op = Literal["forward", "dgrad", "wgrad"]
Scaling = Literal["none", "block", "row", "mx"]
Kernel = Literal["pointer", "tma", "gluon"]

BF16_CAPABILITY = (8, 0)
HOPPER = (9, 0)
BLACKWELL = (10, 0)
WIDE_COLUMNS = 256

WEIGHT_BLOCK_SHAPE: dict[Scaling, tuple[int, int] | None] = {
    "none": None, "block": (BLOCK, BLOCK), "row": (1, -1), "mx": MX_BLOCK_SHAPE
}  # fmt: skip

# Rows, columns and stages of a tile: of two SMs on Hopper, of one on Blackwell (compute capability 10).
_GLUON: dict[tuple[int, Op, Scaling], tuple[int, int, int]] = {
    # Stages fill the 227 KB of shared memory of an SM. bf16: (128 + 256) rows x 128 B = 48 KB, times 4.
    (9, "forward", "none"): (256, WIDE_COLUMNS, 4), (9, "dgrad", "none"): (256, WIDE_COLUMNS, 4),
    # FP8: (256 + 128) x 128 B = 48 KB, times 4; wgrad: (128 + 128) x 128 B and 1 KB of scales, times 6.
    (9, "forward", "block"): (256, WIDE_COLUMNS, 4), (9, "wgrad", "block"): (128, 256, 6),
    # (128 + 256) x 128 B = 48 KB, times 4; in MXFP8 1.5 KB of scales beside each.
    (10, "forward", "mx"): (128, WIDE_COLUMNS, 4), (10, "forward", "block"): (128, WIDE_COLUMNS, 4),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmProblem:
    """What a tile shape may depend on; nothing here needs the sizes of the groups."""

    op: Op
    scaling: Scaling
    """none: bf16; block: 1 x 128 rows and 128 x 128 weights (wgrad: 128 x 1); row: one scale per row and column;
    mx: 1 x 32 of both (wgrad: 32 x 1), in E8M0."""
    num_rows: int
    num_groups: int
    n: int
    k: int
    capability: tuple[int, int]
    """CUDA compute capability; (0, 0) is the interpreter."""
    out_bytes: int = 2
    """Of an element of the result. Tiles of more than 128 columns have no shared memory and registers left for 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmConfig:
    """One way to launch a kernel."""

    kernel: Kernel
    block_m: int
    """Rows of the output tile: tokens, or for wgrad rows of dW (N)."""
    block_n: int
    """Columns of the output tile: N, K for dgrad and wgrad."""
    block_k: int
    """Step along the summed axis."""
    num_warps: int
    num_stages: int
    specialized: bool = False
    """Whether one warp loads and each warpgroup of 64 rows multiplies at its own pace, without barriers of all."""

    def __str__(self) -> str:
        name = f"{self.kernel} {self.block_m}x{self.block_n}x{self.block_k} w{self.num_warps} s{self.num_stages}"
        return f"{name} specialized" if self.specialized else name


def config(problem: GemmProblem) -> GemmConfig:
    """Return the tile of `problem`."""
    if problem.scaling == "mx":
        return _mx_configs(problem)[0]
    if problem.op == "wgrad":
        return _wgrad_config(problem)
    return _row_config(problem)


def candidates(problem: GemmProblem) -> tuple[GemmConfig, ...]:
    """Return the tiles worth timing for `problem`, the heuristic's first. All sum in the same order."""
    if problem.scaling == "mx":
        return _mx_configs(problem)
    step = _step(problem)
    # FP8 dgrad through pointers takes W apart byte by byte.
    kernels: tuple[Kernel, ...] = ("pointer",)
    if problem.capability >= HOPPER:
        has_pointer_loop = problem.op == "forward" or (problem.op == "dgrad" and problem.scaling == "none")
        kernels = ("tma", "pointer") if has_pointer_loop else ("tma",)
    rows = () if problem.op == "wgrad" else (64, 128)[: 1 if _is_crowded(problem) else 2]
    alternatives = tuple(
        GemmConfig(
            kernel=kernel, block_m=block_m, block_n=128, block_k=step, num_warps=block_m // 16,
            num_stages=4 if kernel == "tma" else 3,
        )
        for kernel in kernels for block_m in rows
    )  # fmt: skip
    return tuple(dict.fromkeys((config(problem), *alternatives, *_gluon_configs(problem))))


def _gluon_configs(problem: GemmProblem) -> tuple[GemmConfig, ...]:
    """Return the specialized loop, in Gluon, where its machine code is carried or Triton compiles it.

    No heuristic chooses it: it waits for a GPU to prove it (`benchmarks/first_call.py`), whose record `proven` reads.
    """
    shape = _GLUON.get((problem.capability[0], problem.op, problem.scaling))
    # In MXFP8 a step's scales of a row are read as one word.
    if shape is None or (problem.scaling == "mx" and problem.k % 128):
        return ()
    rows, columns, stages = shape
    tile = GemmConfig(
        kernel="gluon", block_m=rows, block_n=columns, block_k=_step(problem), num_warps=4, num_stages=stages,
        specialized=True,
    )  # fmt: skip
    is_here = has_gluon() or is_carried(problem.capability, tile_name(problem.op, problem.scaling, tile))
    return (tile,) if is_here else ()


def row_block(num_rows: int, num_groups: int) -> int:
    """Return the rows per tile: 64 where groups are small, so that two programs share an SM and less of it is empty.

    The same for both projections and for dgrad, so that they share one tile map.
    """
    return 64 if num_rows <= 64 * num_groups else 128


def _row_config(problem: GemmProblem) -> GemmConfig:
    """Return a tile of 64 or 128 tokens by 128 columns, for forward and dgrad; 256 columns for much bf16 on Hopper.

    A tile of 128 x 256 reads each byte from L2 for a third more products than one of 128 x 128: 683 instead of 512
    TFLOPS at 8 TB/s. It wants enough columns that the last tile is not mostly empty.
    """
    block_m = 64 if _is_crowded(problem) else row_block(problem.num_rows, problem.num_groups)
    tma = problem.capability >= HOPPER
    columns = problem.k if problem.op == "dgrad" else problem.n
    is_wide = (
        tma and problem.scaling == "none" and block_m == 128 and problem.out_bytes == 2
        and (columns % WIDE_COLUMNS == 0 or columns >= 8 * WIDE_COLUMNS)
    )  # fmt: skip
    return GemmConfig(
        kernel="tma" if tma else "pointer", block_m=block_m, block_n=WIDE_COLUMNS if is_wide else 128,
        block_k=_step(problem), num_warps=block_m // 16, num_stages=4 if tma and not is_wide else 3,
    )  # fmt: skip


def _is_crowded(problem: GemmProblem) -> bool:
    """Whether 128 rows spill on Blackwell: scales of rows and columns, a bias and fp32 results in one epilogue."""
    return problem.scaling == "row" and problem.out_bytes == 4


def _step(problem: GemmProblem) -> int:
    """Return the step along the summed axis: 128 bytes, the same for every tile."""
    return 64 if problem.scaling == "none" else 128


def _wgrad_config(problem: GemmProblem) -> GemmConfig:
    """Tiles of dW: one shape, whatever the groups, because the tokens are the summed axis.

    On Blackwell 128 columns beside scales of rows and columns take more registers than there are.
    """
    columns = 64 if problem.scaling == "block" and problem.capability >= BLACKWELL else 128
    return GemmConfig(
        kernel="tma" if problem.capability >= HOPPER else "pointer", block_m=128, block_n=columns,
        block_k=_step(problem), num_warps=8, num_stages=3,
    )  # fmt: skip


def _mx_configs(problem: GemmProblem) -> tuple[GemmConfig, ...]:
    """Return tiles of 128 rows, all that block-scaled products of an SM have; 256 columns spill beside fp32 results."""
    narrow, wide = (
        GemmConfig(kernel="tma", block_m=128, block_n=columns, block_k=128, num_warps=8, num_stages=3)
        for columns in (128, WIDE_COLUMNS)
    )
    if problem.op == "wgrad":
        return (narrow,)
    plain = (wide, narrow) if problem.n % WIDE_COLUMNS == 0 else (narrow, wide)
    return (*(plain if problem.out_bytes == 2 else (narrow,)), *_gluon_configs(problem))


def scaling_of(block_shape: tuple[int, int] | None) -> Scaling:
    """Return the name of the scaling of weights in blocks of `block_shape`."""
    return next(scaling for scaling, shape in WEIGHT_BLOCK_SHAPE.items() if shape == block_shape)


def require_supported(problem: GemmProblem) -> None:
    """Refuse GPUs whose tensor cores lack the type."""
    needed = needed_capability(problem.scaling)
    require_capability(f"grouped GEMM with scaling {problem.scaling!r}", problem.capability, needed)


def needed_capability(scaling: Scaling) -> tuple[int, int]:
    """Return the first GPUs whose tensor cores multiply operands of `scaling`."""
    return {"none": BF16_CAPABILITY, "mx": BLACKWELL}.get(scaling, FP8_CAPABILITY)
