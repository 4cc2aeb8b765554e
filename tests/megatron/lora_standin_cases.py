"""Cases of test_lora.py with the stand-in of Apex, which Megatron needs for fused gradients."""

from typing import Any

import standins  # noqa: F401 - before Megatron
from lora_cases import compared


def fused_gradients() -> Any:
    """Adapters of plain matrices do not fuse; Megatron's own linears under them are frozen."""
    return compared(("linear_fc2",), gradient_accumulation_fusion=True)
