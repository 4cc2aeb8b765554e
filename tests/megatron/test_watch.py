"""The watch on routers: what it says of right and wrong replay, and of the experts' loads."""

from typing import Any

import pytest


@pytest.mark.multi_rank(world_size=2, case="watch_cases.watched")
def test_replay_that_is_right_agrees_and_replay_that_is_wrong_alarms(outcome: list[dict[str, Any]]) -> None:
    for rank in outcome:
        for right in ("live", "replayed"):
            assert rank[right]["r3/agreement"] == 1.0
            assert rank[right]["r3/alarm"] == 0.0
        assert rank["shifted"]["r3/alarm"] == 1.0
        assert rank["shifted"]["r3/agreement"] < 0.9
        assert rank["zeros"]["r3/alarm"] == 1.0
        assert rank["closed"] == {}
        loads = rank["replayed"]
        assert loads["moe_rl/load_drift"] == 0.0
        assert loads["moe_rl/expert_load_p50"] <= loads["moe_rl/expert_load_p99"] <= loads["moe_rl/expert_load_max"]
        assert 0 < loads["moe_rl/nodes_per_token"] <= 1
        assert rank["zeros"]["moe_rl/load_drift"] > 0
        for name, value in rank["own loads"].items():
            assert rank["of one rank"][name] == value, "of the ranks that share the stage's layers, and of no others"
        assert rank["imbalance of one rank"] == rank["own imbalance"] > 1, "of the EP group, and of no others"
    assert outcome[0]["replayed"]["moe_rl/expert_load_max"] == outcome[1]["replayed"]["moe_rl/expert_load_max"]
    assert outcome[0]["own imbalance"] != outcome[1]["own imbalance"]
    assert outcome[0]["own loads"] != outcome[1]["own loads"], "the ranks have other tokens"


@pytest.mark.multi_rank(world_size=2, case="watch_cases.watched")
def test_a_router_that_returns_no_routing_map_is_refused(outcome: list[dict[str, Any]]) -> None:
    for rank in outcome:
        ids, other_experts, alone = rank["refused"]
        assert "torch.int64 [" in ids
        assert "bool routing map" in ids
        assert "torch.bool [" in other_experts
        assert "torch.float32 [" in alone
