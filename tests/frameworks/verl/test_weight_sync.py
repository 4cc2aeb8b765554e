"""Planned weight syncs inside verl: its real Megatron engine, its registry and worker, homes moved, two syncs."""

from typing import Any

import pytest

pytestmark = pytest.mark.framework


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=pytest.mark.multi_rank(world_size=4, case=f"sync_cases.{name}"), id=name)
        for name in ("homes_that_moved", "expert_tensor_parallel")
    ],
)
def test_engines_hold_what_verls_own_engine_brings(case: str, outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["wrong"] == [0, 0]
        assert rank["missing"] == [0, 0]
        assert min(rank["moved"]) > 0
        assert rank["moved_for_it"] == [0, 0]
        assert rank["other_maps"] == [False, False]
        # SGLang pairs batches by position: ranks of an engine hand over as many.
        assert rank["batches"] == outcome[0]["batches"]
        for flags in rank["batches"]:
            assert flags == [False] * (len(flags) - 1) + [True] * (case == "expert_tensor_parallel")
    for rank in outcome[:2]:
        assert rank["logits"] == [True, True]
    # Experts leave their trainers evenly: twins share, and relays do the rest.
    for step in (0, 1):
        sent = [rank["metrics"][step]["moe_rl_sync/expert_bytes_sent"] for rank in outcome]
        assert max(sent) <= 1.05 * sum(sent) / len(sent)
