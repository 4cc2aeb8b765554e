"""slime's and miles' own schedule, replay lists, copies of weights and process groups drive a balanced training loop.

`FRAMEWORK_SOURCES` names a folder with checkouts of them, which are on no registry; without one its tests say so.
"""

from typing import Any

import pytest
from checkouts import needs_checkout
from curves import FP32_LIMIT, relative_difference

SHIFTED = ("slime_with_router_shift", "miles_with_router_shift")
CASES = (*SHIFTED, "slime_without_replay", "slime_with_replay", "miles_without_replay", "miles_with_replay")


@pytest.mark.framework
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            each,
            marks=[
                needs_checkout(package := each.partition("_")[0]),
                pytest.mark.multi_rank(world_size=2, case=f"own_cases.{each}", launch=package),
            ],
            id=each,
        )
        for each in CASES
    ],
)
def test_three_steps_with_groups_destroyed_in_between_train_the_same(case: str, outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["wrappers"] > 0, "groups are those that the framework destroys"
        assert relative_difference(rank["plain"], rank["balanced"]) <= FP32_LIMIT
        assert rank["apart"] <= 1e-3, "the copy that rollout engines get has every expert at its place"
        assert rank["sent_apart"] <= 1e-3, "so has what engines on other GPUs get from the model"
        assert rank["sent"][0] == rank["sent"][1] > 0
        # The balancer comes with the first update: it has heard no log-prob pass before.
        heard = rank["metrics"] if "with_replay" in case else rank["metrics"][2:]
        assert bool(rank["gamma"]) == (case in SHIFTED)
        for step, metrics in enumerate(rank["metrics"] if case in SHIFTED else ()):
            # A reference's pass came before the actor's, and lies elsewhere after the first rollout.
            gamma, rank["gamma"] = rank["gamma"][: metrics["micro_batches"]], rank["gamma"][metrics["micro_batches"] :]
            moved = step % 2 == 1
            assert min(least for least, _ in gamma) == 1.0 or moved, "the weights are those of the log-prob pass"
            assert max(most for _, most in gamma) <= 1.0
            assert metrics["router_corr/gamma_mean"] < 1.0 or not moved
        for metrics in heard:
            assert metrics["moe_rl/known_share"] == 1
            assert metrics["moe_rl/fallback"] == 0
            assert metrics["moe_rl/misplaced_share"] <= 0.01
            assert metrics["moe_rl/static_imbalance"] > 1.2
            assert metrics["moe_rl/imbalance"] <= metrics["moe_rl/static_imbalance"]
        figures = {name: [each[f"moe_rl/{name}"] for each in heard] for name in ("imbalance", "static_imbalance")}
        assert max(figures["imbalance"][-2:]) <= 1.05, "homes of the rollouts before, and copies beside them"
        assert sum(figures["imbalance"]) < 0.9 * sum(figures["static_imbalance"])
        assert rank["moved"] > 0


@pytest.mark.framework
@pytest.mark.parametrize(
    "package",
    [
        pytest.param(
            each,
            marks=[
                needs_checkout(each),
                pytest.mark.multi_rank(world_size=2, case=f"own_cases.{each}_packed", launch=each),
            ],
            id=each,
        )
        for each in ("slime", "miles")
    ],
)
def test_samples_change_their_micro_batch_in_the_frameworks_own_lists(package: str, outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["balanced"]) <= FP32_LIMIT
        assert rank["apart"] <= 1e-3
        assert all(each["kept"] for each in rank["metrics"]), "same samples per update, as many micro-batches, no limit"
        assert all(each["moe_rl/fallback"] == 0 for each in rank["metrics"])
    assert any(each["packed"] for rank in outcome for each in rank["metrics"])
