"""Triton kernels for the expert MLP of an MoE RL step. Imported as `moe_rl.kernels`; needs torch, and triton to run.

    fc1, fc2 = prepare(w1, FP8_BLOCK), prepare(w2, FP8_BLOCK)              # once per optimizer step
    rows = build_row_map(slot_map, num_slots)                              # slot_map int32 [T, K]
    x_rows, row_probs = permute(x, probs, rows)                            # [T, H] -> rows in slot order
    experts = GroupedExperts(recipe=FP8_BLOCK)
    y_rows = experts(x_rows, row_probs, fc1, fc2, rows.m_offsets, masters=(w1, w2))  # backward fills w1.grad, w2.grad
    y = unpermute(y_rows, None, rows)                                      # a plain sum: y_rows include row_probs

One folder per operator: `op` (contract, checks, registration with torch), `reference` (plain torch), `triton_kernel`.
A backend of one or several operators is an entry of `BACKENDS`, from here or from another package (see `registry`).
"""

from moe_rl.kernels.expert_bias.op import expert_bias_backward
from moe_rl.kernels.gemm.op import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad, grouped_gemm_wgrad_into
from moe_rl.kernels.gemm.weights import ExpertGradients, ExpertWeights, pointer_table
from moe_rl.kernels.glu.op import (
    QuantizedGradients,
    swiglu,
    swiglu_backward,
    swiglu_backward_quantize,
    swiglu_oai,
    swiglu_quantize,
)
from moe_rl.kernels.glu.spec import SWIGLU, GluSpec, oai_spec
from moe_rl.kernels.grouped_experts import GroupedExperts
from moe_rl.kernels.permutation.op import RowMap, build_row_map, permute, unpermute
from moe_rl.kernels.quantization.op import (
    WeightCodes,
    empty_weight_codes,
    quantize,
    quantize_both,
    quantize_columns,
    quantize_weights,
)
from moe_rl.kernels.recipes import (
    BF16,
    FP8_BLOCK,
    FP8_BLOCK_POW2,
    FP8_ROWWISE,
    MXFP8,
    RECIPES,
    ExpertMatrix,
    Recipe,
    compare_rollout_weights,
    prepare,
)
from moe_rl.kernels.registry import BACKENDS, BackendUnavailableError, KernelBackend, Operator, operators
from moe_rl.kernels.router_logprobs.op import gather_logprobs
from moe_rl.kernels.tiles.op import TileMap, tile_map
from moe_rl.kernels.types import BLOCK, FP8_DTYPE, ROUNDINGS, QuantizedTensor, Rounding

__all__ = [
    # the whole expert MLP, and how it computes
    "GroupedExperts", "Recipe", "RECIPES", "BF16", "FP8_BLOCK", "FP8_BLOCK_POW2", "FP8_ROWWISE", "MXFP8",
    "ExpertMatrix", "prepare", "compare_rollout_weights",
    # operators
    "build_row_map", "permute", "unpermute", "RowMap",
    "quantize", "quantize_columns", "quantize_both", "quantize_weights", "empty_weight_codes", "WeightCodes",
    "QuantizedTensor", "BLOCK", "FP8_DTYPE",
    "Rounding", "ROUNDINGS",
    "grouped_gemm", "grouped_gemm_dgrad", "grouped_gemm_wgrad", "grouped_gemm_wgrad_into",
    "ExpertWeights", "ExpertGradients", "pointer_table", "tile_map", "TileMap",
    "swiglu", "swiglu_oai", "swiglu_quantize", "swiglu_backward", "swiglu_backward_quantize",
    "QuantizedGradients", "GluSpec", "SWIGLU", "oai_spec",
    "expert_bias_backward", "gather_logprobs",
    # who implements them
    "BACKENDS", "KernelBackend", "Operator", "operators", "BackendUnavailableError",
]  # fmt: skip
