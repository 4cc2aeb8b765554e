"""A case of test_verl.py: verl's engine with the options of verl's own recipe for router replay, on the stand-ins."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "megatron"))
import standins  # noqa: F401, I001 - before Megatron

import verl_cases
import verl_on_cpu

OPTIONS = {
    "moe_token_dispatcher_type": "flex",
    "moe_enable_deepep": True,
    "moe_router_dtype": "fp32",
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
    "gradient_accumulation_fusion": True,
    "bias_activation_fusion": True,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def replayed() -> dict[str, Any]:
    """Parameters and optimizer away between phases; a node has two ranks."""
    with verl_on_cpu.host_beside_device():
        return verl_cases.rollouts(
            told=verl_cases.MOVES_ARE_FREE,
            yardstick=verl_cases.ROLLOUTS,
            mode="R3",
            transformer=OPTIONS,
            param_offload=True,
            optimizer_offload=True,
        )
