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
    "te_own",
    "te_fused",
    "te_fused_moe_recomputed",
    "te_deepep",
    "te_hybridep_fused",
    "sequential_deepep",
    "bf16",
    "gathered",
    "gathered_layers_recomputed",
    "gathered_grouped",
    "gathered_in_place",
    "gathered_grouped_in_place",
    "gathered_te_grouped",
    "gathered_te_fused",
    "gathered_across_nodes",
    "gathered_bf16",
)
SLOW = {
    "sequential_layers_recomputed",
    "grouped_moe_recomputed",
    "te_grouped",
    "te_fused_moe_recomputed",
    "te_hybridep_fused",
    "gathered_layers_recomputed",
    "gathered_grouped_in_place",
    "gathered_te_grouped",
    "gathered_bf16",
}
"""Two things at once of which `make test` sees each alone; slow tests."""


def collective_case(name: str) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=4, case=f"collective_cases.{name}", launch="standins")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[collective_case(name), *([pytest.mark.slow] if name in SLOW else [])], id=name)
        for name in CASES
    ],
)
def test_buckets_are_reduced_and_gathered_in_one_order_whatever_is_replicated(name: str, outcome: list[Any]) -> None:
    limit = BF16_UNIT_ROUNDOFF if "bf16" in name else FP32_LIMIT
    replicas = {tuple(rank["replicas"]) for rank in outcome}
    assert len(replicas) == 2, "both EP groups had as many replicas: another seed is needed"
    first = outcome[0]["order"]["balanced"]
    for rank in outcome:
        assert rank["order"]["balanced"] == first
        for step in first:
            assert len(set(step["grad"])) == len(step["grad"]) >= EXPERTS, "a bucket holds more than an expert"
            assert set(step["param"]) == (set(step["grad"]) if name.startswith("gathered") else set(step["param"]))
        assert relative_difference(rank["plain"], rank["balanced"]) <= limit


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=collective_case(name), id=name)
        for name in ("gathered_without_replicas", "gathered_and_moved")
    ],
)
def test_experts_wait_for_weights_that_are_still_gathered(name: str, outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["balanced"]) <= FP32_LIMIT


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=collective_case(name), id=name)
        for name in ("gathered_and_not_waited_for", "gathered_and_moved_in_part")
    ],
)
def test_weights_that_are_not_whole_are_seen(name: str, outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["balanced"]) > 1000 * FP32_LIMIT
