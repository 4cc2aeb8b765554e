"""Figures of a pass, checked on small tables of rows by hand."""

import numpy as np
import pytest

from moe_rl.balancing.pass_metrics import PassMetrics


def metrics(rows: list[list[list[int]]], **more: object) -> dict[str, float]:
    """`rows` [M][L][P]."""
    values = {
        "policy": "ultraep",
        "misfit": None,
        "notes": (),
        "actual_rows": np.array(rows, np.int64),
        "predicted_rows": None,
        "static_rows": None,
        "replicas": 0,
        "pushed_bytes": 0,
        "returned_bytes": 0,
        "plan_time_s": 0.0,
        "plan_wait_s": 0.0,
    }
    return PassMetrics(**values | more).as_dict()  # type: ignore[arg-type]


def test_overload_factors_are_megatrons() -> None:
    # Megatron-LM's own test: 10, 14 and 6 rows of the most loaded rank where 8 are balanced.
    found = metrics([[[10, 6], [10, 6]], [[14, 2], [8, 8]]])
    assert found["moe/avg_overload_factor"] == pytest.approx((1.25 + 1.25 + 1.75 + 1.0) / 4)
    assert found["moe/max_overload_factor"] == pytest.approx(1.75)
    assert found["moe_rl/max_vio"] == pytest.approx(0.75)
    assert "moe/max_cum_overload_factor" not in found


@pytest.mark.parametrize(("in_flight", "expected"), [(1, 16 / 10), (2, 18 / 14), (3, 28 / 22), (9, 28 / 22)])
def test_the_cumulative_factor_counts_what_waits_for_backward(in_flight: int, expected: float) -> None:
    # Rows per rank and micro-batch: (10, 6), (2, 6), (16, 4); balanced 8, 4 and 10.
    rows = [[[4, 2], [6, 4]], [[1, 3], [1, 3]], [[8, 0], [8, 4]]]
    found = metrics(rows, micro_batches_in_flight=in_flight)
    assert found["moe/max_cum_overload_factor"] == pytest.approx(expected)


def test_rows_in_other_places_than_predicted_are_counted_once() -> None:
    found = metrics([[[6, 2]]], predicted_rows=np.array([[[4, 4]]]), static_rows=np.array([[[8, 0]]]))
    assert found["moe_rl/misplaced_share"] == pytest.approx(2 / 8)
    assert found["moe_rl/predicted_imbalance"] == 1.0
    assert found["moe_rl/static_imbalance"] == 2.0
    assert found["moe_rl/imbalance"] == 1.5


def test_a_pass_without_rows_is_balanced() -> None:
    found = metrics([[[0, 0]]], micro_batches_in_flight=1)
    assert found["moe/max_overload_factor"] == found["moe_rl/imbalance"] == 1.0
    assert found["moe_rl/max_vio"] == 0.0
    assert "moe/max_cum_overload_factor" not in found
