"""Tile shape of the router log-probability kernels: from the number of experts alone."""

from dataclasses import dataclass

ELEMENTS, NUM_WARPS = 512, 8
"""Logits per program: 2 per thread. With 4 or 8 the gradient spills on sm_100a, for numbers of experts that differ
between releases of Triton."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobConfig:
    """Tokens and padded experts per program, and warps."""

    block_tokens: int
    block_experts: int
    num_warps: int


def config_for(num_experts: int) -> LogprobConfig:
    """Return a tile that holds whole rows of logits, so that a token's bits depend on nothing else."""
    padded = max(16, 1 << (num_experts - 1).bit_length())
    return LogprobConfig(block_tokens=max(1, ELEMENTS // padded), block_experts=padded, num_warps=NUM_WARPS)
