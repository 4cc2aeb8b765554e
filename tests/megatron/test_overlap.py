"""overlap_moe_expert_parallel_comm: what a balanced run computes is what it computes without it, to the bit.

Megatron's own combined 1F1B schedule runs here, its streams and TransformerEngine's layers being stand-ins.
"""

from typing import Any

import pytest
from curves import BF16_UNIT_ROUNDOFF, relative_difference

from moe_rl.megatron.refusals import refused

CASES = ("replicas", "shared_expert_and_deepep", "hybridep", "residents", "static_rows")


def overlap_case(case: str, world_size: int = 2) -> Any:
    return pytest.mark.multi_rank(
        world_size=world_size, case=f"overlap_cases.{case}", launch="standins", backend="late"
    )


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=overlap_case(case)) for case in CASES),
        pytest.param("virtual_stages", marks=overlap_case("virtual_stages", 4)),
    ],
)
def test_two_micro_batches_at_a_time_compute_what_one_does(case: str, outcome: list[Any]) -> None:
    for rank in outcome:
        (curve, metrics), (alone, metrics_alone) = rank["overlapped"], rank["one_by_one"]
        assert curve == alone
        assert relative_difference(rank["megatron"], curve) <= BF16_UNIT_ROUNDOFF
        for step, step_alone in zip(metrics, metrics_alone, strict=True):
            assert step["moe_rl/imbalance"] == step_alone["moe_rl/imbalance"], "rows were counted otherwise"
            assert step["moe_rl/pushed_bytes"] + step["moe_rl/returned_bytes"] > 0


@overlap_case("refused")
def test_copies_that_are_pushed_a_layer_ahead_are_refused(outcome: list[str]) -> None:
    assert all("cross_node_slots does not work with overlap_moe_expert_parallel_comm" in said for said in outcome)


@overlap_case("delayed_wgrad")
def test_weight_gradients_may_wait_where_experts_move_and_have_no_copies(outcome: list[Any]) -> None:
    for rank in outcome:
        curve, metrics = rank["delayed"]
        assert curve == rank["at_once"][0]
        assert relative_difference(rank["megatron"], curve) <= BF16_UNIT_ROUNDOFF
        assert all(step["moe_rl/imbalance"] >= 1 for step in metrics)


@overlap_case("delayed_with_replicas")
def test_with_copies_they_may_not_wait_and_the_doctor_says_the_same(outcome: list[str]) -> None:
    ((option, sentence),) = refused({"delay_wgrad_compute": True}.get)
    assert option == "delay_wgrad_compute"
    assert outcome == [sentence] * 2
