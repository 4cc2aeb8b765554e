"""Measured work in the parts of the cost model, so that predicted and measured seconds mean the same.

Megatron permutes rows inside its dispatcher, the cost model prices permutation with the expert GEMM. So of a dispatch
or combine range the kernels that move data between ranks are the all-to-all, and the others belong to the experts.
"""

from collections import defaultdict
from collections.abc import Sequence

from moe_rl.profiling.attribution import AttributedWork, Call

EXPERT_GEMM, ALL_TO_ALL, OUTSIDE_EXPERTS = "expert_gemm", "all_to_all", "outside_experts"
_OWN_PARTS = ("replicate", "reorder", "optimizer", "attention")
_ALL_TO_ALLS = ("dispatch", "combine")

AllToAll = tuple[str, Call]
"""("dispatch" or "combine", call)."""


def cost_part(item: AttributedWork) -> str:
    """Return the part of the cost model that prices this work."""
    # Megatron permutes inside its dispatcher; the cost model prices permutation with the experts.
    if item.category in _ALL_TO_ALLS:
        return ALL_TO_ALL if item.is_communication else EXPERT_GEMM
    if item.category == "expert_gemm":
        return EXPERT_GEMM
    return item.category if item.category in _OWN_PARTS else OUTSIDE_EXPERTS


def seconds_by_part(attributed: Sequence[AttributedWork]) -> dict[str, float]:
    """Return summed work time per part, of the parts that occur."""
    seconds: dict[str, float] = defaultdict(float)
    for item in attributed:
        seconds[cost_part(item)] += item.seconds
    return dict(seconds)


def expert_seconds(attributed: Sequence[AttributedWork]) -> dict[Call, float]:
    """Return the time of the experts, permutation included, of every call that a range marks."""
    seconds: dict[Call, float] = defaultdict(float)
    for item in attributed:
        if item.call is not None and cost_part(item) == EXPERT_GEMM:
            seconds[item.call] += item.seconds
    return dict(seconds)


def all_to_all_seconds(attributed: Sequence[AttributedWork]) -> dict[AllToAll, float]:
    """Return the time of every dispatch and combine that a range marks, waiting included."""
    seconds: dict[AllToAll, float] = defaultdict(float)
    for item in attributed:
        if item.call is not None and cost_part(item) == ALL_TO_ALL:
            seconds[item.category, item.call] += item.seconds
    return dict(seconds)
