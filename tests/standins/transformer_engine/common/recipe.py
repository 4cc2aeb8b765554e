"""FP8 recipes; of these `Float8BlockScaling` alone computes here.

Page: https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/common.html. The others are names that
Megatron derives classes from or looks up.
"""

import enum
from typing import Any


class Format(enum.Enum):
    """Number formats: e4m3 throughout, or (hybrid) e5m2 of what comes back."""

    E4M3 = "e4m3"
    HYBRID = "hybrid"


class Recipe:
    """Base of all recipes."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"the stand-in of TransformerEngine has no {type(self).__name__}.")


class DelayedScaling(Recipe):
    """Scales of the steps before."""


class Float8CurrentScaling(Recipe):
    """One scale per tensor."""


class MXFP8BlockScaling(Recipe):
    """One scale per 32 numbers."""


class NVFP4BlockScaling(Recipe):
    """Four-bit numbers."""


class Float8BlockScaling(Recipe):
    """1 x 128 blocks of activations and gradients, 128 x 128 blocks of weights, scales that are powers of two."""

    def __init__(self, fp8_format: Format = Format.E4M3) -> None:
        self.fp8_format = fp8_format
