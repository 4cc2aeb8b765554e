"""A pass knows what ran in it: forwards beside it, other numbers of micro-batches, validation between updates."""

from typing import Any

import pytest
from curves import FP32_LIMIT, relative_difference


def what_ran(case: str, world_size: int = 2) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=world_size, case=f"what_ran_cases.{case}")


@pytest.mark.parametrize("case", [pytest.param(each, marks=what_ran(each)) for each in ("stored", "recomputed")])
def test_a_forward_without_gradients_is_no_micro_batch(case: str, outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["ours"]) <= FP32_LIMIT
        for metrics in rank["metrics"]:
            assert metrics["moe_rl/misplaced_share"] == 0
            assert metrics["moe_rl/imbalance"] == metrics["moe_rl/predicted_imbalance"] <= 1.02
            assert metrics["moe_rl/static_imbalance"] > 1.1


@what_ran("other_numbers")
def test_metrics_are_of_the_micro_batches_that_ran(outcome: list[Any]) -> None:
    pairs = 2 * 2 * 32 * 2  # of 2 layers, 2 ranks, 32 tokens, top-2
    for index, rank in enumerate(outcome):
        assert relative_difference(rank["plain"], rank["ours"]) <= FP32_LIMIT
        assert rank["rows"] == [[pairs] * 4, [pairs] * 2, [pairs] * 4, [pairs] * 3]
        assert rank["misplaced"] == [0, 0, 0, 0], "of those that were planned"
        assert rank["imbalance"][0] < 1.05
        assert rank["imbalance"][1] < 1.05
        assert rank["imbalance"][2] > 1.1, "two of four ran without copies"
        assert rank["mean"] == [32, 32, 32]
        said = (
            "a pass was planned for 4 micro-batches but ran 2, so replicas planned for the missing ones were not used"
        )
        assert len(rank["warnings"]) == (index == 0)
        assert all(said in sentence for sentence in rank["warnings"])


@what_ran("validation", world_size=4)
def test_validation_passes_change_neither_homes_nor_plans(outcome: list[Any]) -> None:
    for rank in outcome:
        for kind, source in (("updates", "history"), ("log-probs", "log-probs")):
            without, given = rank[f"{kind} without"], rank[f"{kind} with"]
            assert given["homes"] == without["homes"]
            assert given["imbalance"] == without["imbalance"]
            assert given["sources"] == without["sources"]
            assert set(given["sources"][1:]) == {source}
            assert len({str(homes) for homes in given["homes"]}) > 1, "experts never moved"
