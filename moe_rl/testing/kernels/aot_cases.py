"""The variants that are compiled ahead of time: every configuration a heuristic can choose, and known-bad ones.

Imports triton; use from a process without TRITON_INTERPRET.
"""

from typing import Any

import triton.language as tl

from moe_rl.kernels.gemm import triton_kernel, triton_wgrad
from moe_rl.kernels.gemm.tiling import GemmConfig, GemmProblem, Op, Scaling, config, shipped_configs
from moe_rl.kernels.quantization import triton_kernel as quantize_kernel
from moe_rl.kernels.tiles import triton_kernel as tile_map_kernel
from moe_rl.kernels.types import BLOCK
from moe_rl.testing.kernels.aot import Variant
from moe_rl.testing.kernels.aot_row_cases import row_variants

GROUPS = 128
FP8, BF16, FP32, TABLE = "*fp8e4nv", "*bf16", "*fp32", "*i64"

KNOWN_BAD: tuple[tuple[Op, Scaling, GemmConfig], ...] = (
    ("forward", "block", GemmConfig(
        kernel="pointer", block_m=128, block_n=128, block_k=128, num_warps=4, num_stages=3)),
    ("forward", "row", GemmConfig(
        kernel="tma", block_m=128, block_n=256, block_k=128, num_warps=8, num_stages=3)),
    ("forward", "row", GemmConfig(
        kernel="tma", block_m=64, block_n=256, block_k=128, num_warps=4, num_stages=3)),
)  # fmt: skip
"""Spill on sm_90a: four warps hold a 128 x 128 tile and its promotion badly, and promotion every 128 elements needs a
second accumulator, for which 256 columns leave no registers. Kept so that a compiler that copes is noticed."""


def variants(arch: int) -> list[Variant]:
    """Return what to compile for compute capability `arch`, shipped variants first."""
    capability = (arch // 10, arch % 10)
    found = [
        gemm_variant(problem, tile, table=table)
        for problem, tile in shipped_configs(capability)
        for table in (False, True)
        # Behind a table, and for Blackwell, only what the heuristic chooses: compiling everything takes minutes.
        if tile == config(problem) or (arch == 90 and not table)
        if arch == 90 or (problem.op == "forward" and not table)
    ]
    # Biases are added where the sums are still in registers, which must not overflow for it.
    found += [
        gemm_variant(problem, tile, table=False, biased=True)
        for problem, tile in shipped_configs(capability)
        if problem.op == "forward" and tile == config(problem)
    ]
    found += [tile_map_variant(), *quantize_variants(), *row_variants()]
    if arch == 90:
        for op, scaling, tile in KNOWN_BAD:
            problem = GemmProblem(op=op, scaling=scaling, num_rows=1, num_groups=1, n=1, k=1, capability=capability)
            found.append(gemm_variant(problem, tile, table=False, prefix="bad-"))
    return found


def variant_name(problem: GemmProblem, tile: GemmConfig, *, table: bool, biased: bool) -> str:
    """Return for example "forward-block-tma-128x128x128-w8-s4-table"."""
    suffix = f"{'-table' if table else ''}{'-biased' if biased else ''}"
    return f"{problem.op}-{problem.scaling}-{str(tile).replace(' ', '-')}{suffix}"


def gemm_variant(
    problem: GemmProblem, tile: GemmConfig, *, table: bool, biased: bool = False, prefix: str = ""
) -> Variant:
    """Return the grouped GEMM with `tile` as a launch on large, aligned sizes would specialize it."""
    if problem.op == "wgrad":
        function, types, constants, aligned = _wgrad(problem, tile, table)
    else:
        function, types, constants, aligned = _rows(problem, tile, table, biased)
    return Variant(
        name=prefix + variant_name(problem, tile, table=table, biased=biased),
        function=function,
        types=types,
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=aligned,
        tensor_core="wide" if problem.scaling == "none" else "fp8",
        uses_tma=tile.kernel == "tma",
    )


Built = tuple[Any, dict[str, str], dict[str, Any], tuple[str, ...]]


def _rows(problem: GemmProblem, tile: GemmConfig, table: bool, biased: bool) -> Built:
    element = BF16 if problem.scaling == "none" else FP8
    scales = problem.scaling != "none"
    types = {
        "a_ptr": element, "a_scale_ptr": FP32, "w_ptr": TABLE if table else element,
        "w_scale_ptr": TABLE if table else FP32, "tile_map_ptr": "*i32", "num_tiles_ptr": "*i32", "out_ptr": BF16,
        "bias_ptr": BF16, "factor_ptr": FP32,
    }  # fmt: skip
    constants: dict[str, Any] = {
        "SCALING": problem.scaling, "TABLE": table, "BIAS": "weighted" if biased else "none",
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
    }  # fmt: skip
    if not scales:
        constants |= {"a_scale_ptr": None, "w_scale_ptr": None}
    if not biased:
        constants |= {"bias_ptr": None, "factor_ptr": None}
    # A launch turns strides of 1 into constants.
    is_dgrad = problem.op == "dgrad"
    constants["stride_ws_out" if is_dgrad or problem.scaling == "row" else "stride_ws_sum"] = 1
    constants["stride_as_row" if problem.scaling == "row" else "stride_as_block"] = 1
    if tile.kernel == "tma":
        constants["SUM_IS_DENSE"] = not is_dgrad
    else:
        constants["stride_w_out" if is_dgrad else "stride_w_sum"] = 1
    function = triton_kernel._tma_kernel if tile.kernel == "tma" else triton_kernel._pointer_kernel
    aligned = ("num_out", "num_sum", "stride_a", "stride_w_group", "stride_w_out", "stride_w_sum")
    return _complete(function, types, constants, aligned)


def _wgrad(problem: GemmProblem, tile: GemmConfig, table: bool) -> Built:
    """Into bf16 in one tensor, and accumulated into fp32 behind a table: the two that training uses."""
    types = {"m_offsets_ptr": "*i32", "out_ptr": TABLE if table else BF16}
    constants: dict[str, Any] = {
        "ELEMENT": tl.float32 if table else tl.bfloat16, "TABLE": table, "ACCUMULATE": table,
        "TMA": tile.kernel == "tma", "BLOCK_N": tile.block_m, "BLOCK_K": tile.block_n, "BLOCK_T": tile.block_k,
    }  # fmt: skip
    aligned = ("num_n", "num_k", "stride_dy", "stride_x", "stride_out_group", "num_tokens")
    if problem.scaling == "none":
        return _complete(triton_wgrad._wide_kernel, types | {"dy_ptr": BF16, "x_ptr": BF16}, constants, aligned)
    types |= {"dy_ptr": FP8, "x_ptr": FP8, "dy_scale_ptr": FP32, "x_scale_ptr": FP32}
    return _complete(triton_wgrad._fp8_kernel, types, constants | {"GROUPS": GROUPS}, aligned)


def tile_map_variant() -> Variant:
    """Return the kernel that finds the tiles of ragged groups."""
    types = dict.fromkeys(("m_offsets_ptr", "entries_ptr", "num_tiles_ptr"), "*i32")
    constants = {"BLOCK_M": 128, "GROUPS": 2 * GROUPS, "ENTRIES": tile_map_kernel.ENTRIES_PER_PROGRAM}
    function, types, constants, aligned = _complete(tile_map_kernel._tile_map_kernel, types, constants, ())
    return Variant(
        name="tile_map",
        function=function,
        types=types,
        constants=constants,
        num_warps=tile_map_kernel.NUM_WARPS,
        aligned=aligned,
    )


def quantize_variants() -> list[Variant]:
    """Return the quantization kernels as their launchers configure them, on bf16."""
    types = {"x_ptr": BF16, "out_ptr": FP8, "scale_ptr": FP32, "tile_map_ptr": "*i32"}
    aligned = ("num_columns", "stride_row", "stride_batch", "stride_out")
    listed = (
        ("1x128", quantize_kernel._quantize_1x128_kernel, 4,
         {"BLOCK_ROWS": quantize_kernel.MANY_ROWS, "BLOCK_COLS": BLOCK}),
        ("row", quantize_kernel._quantize_row_kernel, 4, quantize_kernel.FULL_ROW_TILE),
        ("128x128", quantize_kernel._quantize_128x128_kernel, 8, {"SIDE": BLOCK}),
        ("columns", quantize_kernel._quantize_columns_kernel, 8, quantize_kernel.COLUMNS_TILE),
    )  # fmt: skip
    found = []
    for name, kernel, num_warps, constants in listed:
        for pow2 in (False, True):
            function, used, complete, divisible = _complete(kernel, types, constants | {"POW2": pow2}, aligned)
            found.append(
                Variant(
                    name=f"quantize-{name}{'-pow2' if pow2 else ''}",
                    function=function,
                    types=used,
                    constants=complete,
                    num_warps=num_warps,
                    aligned=divisible,
                    quantizes=True,
                )
            )
    return found


def _complete(function: Any, types: dict[str, str], constants: dict[str, Any], aligned: tuple[str, ...]) -> Built:
    """Keep what the kernel has; the rest of its arguments are 32-bit integers."""
    names = set(function.arg_names)
    constants = {name: value for name, value in constants.items() if name in names}
    complete = {name: types.get(name, "i32") for name in function.arg_names if name not in constants}
    return function, complete, constants, tuple(name for name in aligned if name in complete)
