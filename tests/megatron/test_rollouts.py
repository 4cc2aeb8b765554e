"""Without replay an update is planned from what routers chose for the same sequences in the log-prob pass."""

from typing import Any

import pytest
from curves import FP32_LIMIT, relative_difference


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=pytest.mark.multi_rank(world_size=4, case=f"rollout_cases.{name}"), id=name)
        for name in ("one_stage", "two_stages", "tensor_parallel")
    ],
)
def test_the_update_runs_as_foretold_and_trains_the_same(case: str, outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["balanced"]) <= FP32_LIMIT
        assert rank["sources"] == ["log-probs"] * 3
        assert any(rank["moved"])
        for metrics in rank["metrics"]:
            assert metrics["moe_rl/known_share"] == 1
            assert metrics["moe_rl/static_imbalance"] > 1.1
            # Under sequence parallelism a rank knows a sequence's whole, not its own part.
            exact = case != "tensor_parallel"
            assert metrics["moe_rl/misplaced_share"] <= (0.005 if exact else 0.05)
            assert metrics["moe_rl/imbalance"] <= (1.1 if exact else 1.2)
