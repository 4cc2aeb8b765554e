"""Ahead-of-time variants of the kernels without dots: permute, gated activations, router log-probabilities, histogram.

Imports triton; use from a process without TRITON_INTERPRET.
"""

from typing import Any

from moe_rl.kernels.expert_bias import triton_kernel as bias_kernel
from moe_rl.kernels.glu import triton_kernel as swiglu_kernel
from moe_rl.kernels.histogram import triton_kernel as histogram_kernel
from moe_rl.kernels.permutation import triton_kernel as permute_kernel
from moe_rl.kernels.router_logprobs import triton_kernel as logprob_kernel
from moe_rl.kernels.router_logprobs.op import SCORE_FUNCTIONS
from moe_rl.kernels.tiles import triton_kernel as tile_map_kernel
from moe_rl.kernels.tiles.triton_kernel import SUM_WARPS, SUMMED_COLUMNS
from moe_rl.testing.kernels.aot import Variant

FP8, BF16, FP32, INT32 = "*fp8e4nv", "*bf16", "*fp32", "*i32"
FLOATS = frozenset({"alpha", "limit", "up_shift"})
ALIGNED = frozenset({"num_cols", "width", "stride_row", "stride_token", "stride_grad_out", "num_pairs"})
"""Sizes and strides that a launch on a real model finds divisible by 16."""


def row_variants() -> list[Variant]:
    """Return every configuration that the launchers use, on bf16 rows and fp32 logits."""
    return [*_permute_variants(), *_swiglu_variants(), *_bias_variants(), *_router_variants()]


def _permute_variants() -> list[Variant]:
    kernels = permute_kernel
    copy, combine, backward = kernels.COPY_TILE, {**kernels.COMBINE_TILE, "TOP_K": 8}, kernels.COMBINE_TILE
    rows = dict.fromkeys(("x_ptr", "rows_ptr", "out_ptr", "grad_out_ptr", "grad_rows_ptr"), BF16)
    values = {"values_ptr": FP32, "out_ptr": FP32}
    ranked = {"BLOCK": kernels.PAIRS_PER_BLOCK}
    return [
        _variant("permute-rank", kernels._rank_pairs_kernel, {}, ranked, kernels.RANK_WARPS),
        _variant("permute-place", kernels._place_pairs_kernel, {}, ranked, kernels.RANK_WARPS),
        _variant("permute-rows", kernels._gather_rows_kernel, rows, copy),
        _variant("permute-scatter", kernels._scatter_pairs_kernel, values, {"BLOCK": 1024}),
        _variant("permute-gather", kernels._gather_pairs_kernel, values, {"BLOCK": 1024}),
        _variant("unpermute", kernels._combine_kernel, rows, combine | {"HAS_PROBS": True}),
        _variant(
            "unpermute-plain",
            kernels._combine_kernel,
            rows,
            combine | {"HAS_PROBS": False, "probs_ptr": None},
        ),
        _variant("unpermute-backward", kernels._combine_backward_kernel, rows, backward),
    ]


def _swiglu_variants() -> list[Variant]:
    types = dict.fromkeys(("h_ptr", "bias_ptr", "out_ptr", "grad_out_ptr", "grad_h_ptr"), BF16)
    oai: dict[str, Any] = dict.fromkeys(("HAS_BIAS", "COUNTED", "CLAMP", "INTERLEAVED", "HAS_PROBS"), True)
    plain = oai | {"HAS_BIAS": False, "CLAMP": False, "INTERLEAVED": False, "bias_ptr": None, "tile_map_ptr": None}
    found = []
    for name, flags in (("swiglu", plain), ("swiglu_oai", oai)):
        forward = flags | swiglu_kernel.FORWARD
        direct = forward | {"QUANTIZE": False, "POW2": False, "scale_ptr": None}
        fused = forward | {"QUANTIZE": True, "POW2": False}
        kernel, warps = swiglu_kernel._swiglu_kernel, 4
        found.append(_variant(name, kernel, types, direct, warps))
        found.append(_variant(f"{name}-quantize", kernel, types | {"out_ptr": FP8}, fused, warps, quantizes=True))
        constants = flags | (swiglu_kernel.BACKWARD_WITH_BIAS if flags["HAS_BIAS"] else swiglu_kernel.BACKWARD)
        if not flags["HAS_BIAS"]:
            constants["partial_ptr"] = None
        found.append(_variant(f"{name}-backward", swiglu_kernel._swiglu_backward_kernel, types, constants, 8))
    return found


def _bias_variants() -> list[Variant]:
    tile = {"HAS_FACTOR": True, "ROWS": bias_kernel.BLOCK_ROWS, "COLS": bias_kernel.BLOCK_COLS}
    types = {"grad_ptr": BF16, "bias_ptr": BF16, "factor_ptr": FP32, "grad_factor_ptr": FP32}
    sums = tile_map_kernel._sum_tiles_kernel
    return [
        _variant("expert_bias-backward", bias_kernel._expert_bias_backward_kernel, types, tile),
        _variant("sum_tiles", sums, {"out_ptr": FP32}, {"COLS": SUMMED_COLUMNS}, SUM_WARPS),
    ]


def _router_variants() -> list[Variant]:
    found = []
    for num_experts in (32, 128, 256, 512):
        tile = {"TOP_K": 8, **logprob_kernel.tile_of(num_experts)}
        types = {"logits_ptr": FP32, "grad_out_ptr": FP32, "out_ptr": FP32, "grad_ptr": FP32}
        for score in SCORE_FUNCTIONS:
            constants = tile | {"SCORE": score}
            name = f"gather_logprobs-{score}-E{num_experts}"
            warps = logprob_kernel.NUM_WARPS
            found.append(_variant(name, logprob_kernel._gather_logprobs_kernel, types, constants, warps))
            found.append(
                _variant(f"{name}-backward", logprob_kernel._gather_logprobs_backward_kernel, types, constants, warps)
            )
    counted = {"HAS_VALID": True, "HAS_BINS": True, "BLOCK": permute_kernel.PAIRS_PER_BLOCK}
    types = {"valid_ptr": "*u8"}
    found.append(_variant("histogram", histogram_kernel._expert_histogram_kernel, types, counted))
    return found


def _variant(
    name: str,
    function: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    num_warps: int = 4,
    *,
    quantizes: bool = False,
) -> Variant:
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    names = [name for name in function.arg_names if name not in constants]
    used = {argument: types.get(argument, _type_of(argument)) for argument in names}
    return Variant(
        name=name,
        function=function,
        types=used,
        constants=constants,
        num_warps=num_warps,
        aligned=tuple(argument for argument in names if argument in ALIGNED),
        quantizes=quantizes,
    )


def _type_of(argument: str) -> str:
    if argument in FLOATS:
        return "fp32"
    if not argument.endswith("_ptr"):
        return "i32"
    return FP32 if argument.startswith(("probs", "row_probs", "dots", "grad_probs", "partial", "scale")) else INT32
