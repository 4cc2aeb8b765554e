"""Recorded routing runs where the plan says: token counts of every rank, and the slowest rank's share, come true."""

from typing import Any

import numpy as np
import pytest
from curves import FP32_LIMIT


def slowest_share(rows: np.ndarray) -> float:
    """Rows of the slowest rank of each (micro-batch, layer), over all rows; 1/P at perfect balance."""
    return float(rows.max(axis=2).sum() / rows.sum())


@pytest.mark.multi_rank(world_size=4, case="routing_cases.recorded_routing")
def test_ranks_compute_the_rows_that_the_plan_promised_and_the_slowest_gets_less(outcome: list[Any]) -> None:
    for rank in outcome:
        for policy in ("ultraep", "moe-rl"):
            found = rank[policy]
            actual, predicted, contiguous = (np.array(found[name]) for name in ("actual", "predicted", "contiguous"))
            assert np.array_equal(actual, predicted)
            assert np.array_equal(actual.sum(axis=2), contiguous.sum(axis=2)), "rows were lost or made up"
            assert slowest_share(actual) == slowest_share(predicted) < slowest_share(contiguous)
            assert found["scalars"]["moe_rl/imbalance"] == pytest.approx(found["scalars"]["moe_rl/predicted_imbalance"])
            assert found["losses"][1] == pytest.approx(found["losses"][0], rel=FP32_LIMIT)
        assert sum(each["moe-rl"]["moved"] for each in outcome) > 0, "moe-rl reordered nothing"
