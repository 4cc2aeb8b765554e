"""SkyRL's own policy worker for Megatron trains the same with the wrapped schedule.

`FRAMEWORK_SOURCES` names a folder with a checkout of it, which is on no registry; without one the test says so.
"""

from typing import Any

import pytest
from checkouts import needs_checkout
from curves import FP32_LIMIT, relative_difference

UPDATES = 3


@needs_checkout("skyrl")
@pytest.mark.framework
@pytest.mark.multi_rank(world_size=2, case="skyrl_cases.policy_worker", launch="skyrl")
def test_its_policy_worker_is_balanced_by_the_wrapped_schedule(outcome: list[Any]) -> None:
    for rank in outcome:
        plain, balanced = rank["plain"], rank["balanced"]
        assert relative_difference(plain["curve"], balanced["curve"]) <= FP32_LIMIT
        assert len(plain["curve"]["loss"]) == UPDATES
        assert balanced["log_probs"] == pytest.approx(plain["log_probs"], rel=FP32_LIMIT)
        # An update adds up the gradients of two calls; each had a log-prob pass before it.
        assert len(rank["metrics"]) == UPDATES * 2 * 2
        for metrics in rank["metrics"]:
            assert metrics["moe_rl/misplaced_share"] == 0, "routes lie where SkyRL packs the tokens"
            assert metrics["moe_rl/imbalance"] == metrics["moe_rl/predicted_imbalance"]
            assert metrics["moe_rl/static_imbalance"] > 1.2
            assert metrics["moe_rl/imbalance"] <= 1.02
