"""No plan changes the order of collectives: small buckets, overlapped reduction, another plan in every EP group."""

from typing import Any

import pytest
from curves import BF16_UNIT_ROUNDOFF, FP32_LIMIT, relative_difference

EXPERTS = 8
"""Of the two layers of a rank."""
CASES = (
    "sequential",
    "sequential_allgather",
    "sequential_layers_recomputed",
    "sequential_moe_recomputed",
    "grouped",
    "grouped_moe_recomputed",
    "grouped_module",
    "te_grouped",
    "bf16",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.multi_rank(world_size=4, case=f"collective_cases.{n}"), id=n) for n in CASES],
)
def test_reductions_of_experts_start_in_one_order_whatever_is_replicated(name: str, outcome: list[Any]) -> None:
    limit = BF16_UNIT_ROUNDOFF if name == "bf16" else FP32_LIMIT
    replicas = {tuple(rank["replicas"]) for rank in outcome}
    assert len(replicas) == 2, "both EP groups had as many replicas: another seed is needed"
    first = outcome[0]["order"]["balanced"]
    for rank in outcome:
        assert rank["order"]["balanced"] == first
        for step in first:
            assert len(set(step)) == len(step) >= EXPERTS, "a bucket holds more than an expert"
        assert relative_difference(rank["plain"], rank["balanced"]) <= limit
