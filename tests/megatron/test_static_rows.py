"""Experts on buffers that a plan's certificate sizes: dropless training to the bit, no wait, and overflow is an error.

On the CPU stand-in of HybridEP, and a recorder in place of CUDA graph capture; not yet run on a GPU.
"""

import logging
import re
from typing import Any

import pytest

NEWER = "HybridEP takes a budget of rows from megatron-core 0.18 on"


def static_case(case: str) -> Any:
    return pytest.mark.multi_rank(world_size=4, case=f"static_cases.{case}", launch="standins")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=static_case(c)) for c in ("alltoall", "recomputed", "hybridep")]
)
def test_losses_and_norms_are_those_of_the_dropless_run_to_the_bit(case: str, outcome: list[Any]) -> None:
    for rank in outcome:
        if not rank:
            pytest.skip(NEWER)
        assert rank["static"][0] == rank["dropless"][0]
        for dropless, static in zip(rank["dropless"][1], rank["static"][1], strict=True):
            assert static["moe_rl/imbalance"] == dropless["moe_rl/imbalance"], "rows were counted otherwise"
            assert static["moe_rl/replicas"] > 0


@static_case("growing_micro_batches")
def test_a_dispatch_buffer_is_made_for_the_largest_micro_batch_of_a_pass(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["reallocations"] == [0, 0]
        assert rank["static"] == rank["dropless"]


@static_case("a_recorded_layer")
def test_a_recorded_layer_never_waits_and_keeps_its_shapes(outcome: list[Any]) -> None:
    for rank in outcome:
        if not rank:
            pytest.skip(NEWER)
        assert rank["runs_per_step"] == 2 * 2 * 3, "preprocess and experts, 2 layers, 3 micro-batches"
        for runs in rank["steps"]:
            later = runs[4:]  # a layer's first run makes its tables of addresses: the warm-up of a graph
            assert all(run == later[index % 2] for index, run in enumerate(later))
            assert any("grouped_gemm" in name for name, _ in later[1]), "no kernel was recorded"
        assert rank["waits"] == []
        assert "tolist" in rank["dropless"], "the recorder hears no wait where there is one"


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=static_case(c)) for c in ("overflow_alltoall", "overflow_hybridep")]
)
def test_an_overflow_is_said_on_all_ranks_before_weights_change(case: str, outcome: list[Any]) -> None:
    for rank in outcome:
        if not rank:
            pytest.skip(NEWER)
        said, weights_are_as_before = rank
        assert "rank 0 of EP group 0 exceeds its capacity in micro-batch 1, MoE layer 0" in said
        assert weights_are_as_before == "True"


@static_case("unknown_routes")
def test_a_pass_with_unknown_routes_takes_rows_as_they_come(outcome: list[Any]) -> None:
    assert all(limits == ["None"] for limits in outcome)


@static_case("stated_risk")
def test_with_a_stated_risk_such_a_pass_has_the_certified_buffer(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["static"] == rank["dropless"]
        for limits, most in rank["limits"]:
            assert len(limits) == 1
            assert most <= limits[0]


@static_case("adversarial_rows")
def test_rows_without_a_route_never_pass_the_bound_unseen(outcome: list[Any]) -> None:
    for said in outcome:
        assert re.search("rank 0 of EP group 0 exceeds its capacity in micro-batch 0, MoE layer [01]", said)


@static_case("fixed_factor")
def test_a_fixed_factor_holds_for_plans_or_the_pass_does_not_begin(outcome: list[Any]) -> None:
    for rank in outcome:
        if not rank:
            pytest.skip(NEWER)
        assert rank["kept"] == rank["dropless"], "a pass without a bound drops nothing, whatever the factor"
        assert re.search(
            r"needs a moe_expert_rank_capacity_factor of at least [12]\.\d+ on .*, but it is set to 1.0", rank["said"]
        )
        for name, factor in (("dropless", None), ("kept", 4.0), ("exceeded", 1.0)):
            assert (rank[f"{name}_attached"], rank[f"{name}_detached"]) == (None, factor)


@static_case("captured_router")
def test_plans_hold_where_a_graph_has_the_router(outcome: list[Any]) -> None:
    """The same recorder in place of the router's graph; it hears no wait, and one sequence of shapes."""
    for rank in outcome:
        assert rank["balanced"] == rank["plain"]
        assert rank["balanced_gradients"] == pytest.approx(rank["plain_gradients"], rel=1e-5)
        assert rank["waits"] == []
        assert len(rank["runs"]) == 2 * 2 * 3 + 2, "plain and balanced, 2 layers, 3 micro-batches; 2 captures"
        assert all(run == rank["runs"][0] for run in rank["runs"])
        assert any("topk" in name for name, _ in rank["runs"][0]), "no router was recorded"
        balanced, static = rank["imbalance"]
        assert balanced < static
        assert rank["misplaced"] == 0


@static_case("forecasts")
def test_memory_is_forecast_before_an_update_and_a_rank_that_lacks_it_is_named(outcome: list[Any]) -> None:
    for rank, found in enumerate(outcome):
        first, second, lacking = found["said"]
        assert second == [], "the same is said once"
        assert [level for level, _ in first + lacking] == ([logging.INFO, logging.WARNING] if rank == 0 else [])
        fits, _, exceeds = found["metrics"]
        assert fits["moe_rl/forecast_peak_bytes"] == exceeds["moe_rl/forecast_peak_bytes"] > 0
        assert fits["moe_rl/largest_micro_batch_tokens"] > 32 > exceeds["moe_rl/largest_micro_batch_tokens"]
        assert found["fullest"][0] == found["fullest"][1]
        assert "moe_rl/forecast_peak_bytes" not in found["forward_only"]
    (_, said), (_, lacks) = outcome[0]["said"][0] + outcome[0]["said"][2]
    assert re.search(
        r"rank \d has the highest predicted peak memory, 0.0 GiB of 79.6 GiB\. Micro-batches of up to [\d,]+ tok", said
    )
    assert re.search(
        r"predicted out of memory: rank \d .* Any of these would fit: micro-batches with \d+% of the tokens", lacks
    )
