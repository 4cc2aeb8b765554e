"""How `GroupedExperts` is to compute the experts of a Megatron model, and what of that it cannot."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer import TransformerConfig

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.kernels import (
    BACKENDS,
    BLOCK,
    RECIPES,
    GluSpec,
    Recipe,
    WeightCodes,
    empty_weight_codes,
    operators,
    quantize_weights,
)


class GroupedCompute:
    """Recipe, backend and copies of weights of the experts of all layers of one run."""

    def __init__(self, *, recipe: str = "bf16", backend: str = "auto", transposed_codes: bool = False) -> None:
        self.recipe: Recipe = RECIPES[recipe]
        require(
            self.recipe.weight_block_shape in (None, (BLOCK, BLOCK)),
            f"recipe {recipe} is not supported inside Megatron, because its backward pass needs a second, "
            "transposed copy of every weight. Use bf16, fp8-block or fp8-block-pow2.",
        )
        require(
            backend == "auto" or BACKENDS[backend].reads_tables,
            f"backend {backend!r} is not supported inside Megatron, because it needs the weights of all experts in "
            "one tensor. Use one of: "
            f"{', '.join(('auto', *(entry.name for entry in BACKENDS if entry.reads_tables)))}.",
        )
        self.backend = backend
        self._transpose = transposed_codes

    def require_device(self, device: torch.device) -> None:
        """Raise with the reason where the backend cannot run on `device`."""
        for operator in operators():
            if self.backend == "auto" or not operator.name.startswith("grouped_gemm"):
                continue
            if reason := operator.why_not(self.backend, device.type):
                raise InvalidInputError(reason)

    def room_for(self, weights: Sequence[torch.Tensor]) -> list[WeightCodes]:
        """Return memory for the codes of `weights`."""
        return empty_weight_codes(weights, transpose=self._transpose)

    def quantize(self, weights: Sequence[torch.Tensor], into: Sequence[WeightCodes]) -> None:
        """Write the codes of `weights`, in one launch, where they were: tables keep pointing there."""
        quantize_weights(weights, into, rounding=self.recipe.rounding, backend=self.backend)


def glu_spec(config: TransformerConfig) -> GluSpec:
    """Return the gated activation of the experts; raise where `GroupedExperts` computes another MLP."""
    alphas = {F.silu: 1.0, quick_gelu: 1.702}
    require(
        bool(config.gated_linear_unit) and config.activation_func in alphas,
        "experts='grouped' needs gated experts (gated_linear_unit=True) with silu or quick_gelu as the activation.",
    )
    refusals = {
        "moe_apply_probs_on_input": "GroupedExperts applies probabilities inside the activation",
        "use_te_activation_func": "moe_rl computes the activation itself",
        "activation_func_fp8_input_store": "GroupedExperts saves the input of the activation unchanged",
        "moe_mlp_glu_interleave_size": "GroupedExperts expects the rows of the gate matrix first",
    }
    for option, reason in refusals.items():
        require(not getattr(config, option, False), f"experts='grouped' does not support {option}: {reason}.")
    clamp = config.activation_func_clamp_value
    return GluSpec(
        alpha=alphas[config.activation_func],
        limit=math.inf if clamp is None else clamp,
        up_shift=config.glu_linear_offset,
    )
