"""With TransformerEngine's experts and DeepEP's dispatchers, on CPU stand-ins, training is Megatron's own.

Megatron's TEGroupedMLP and flex dispatcher run here, on tests/standins: not TransformerEngine, DeepEP or a GPU.
The whole matrix: `pytest -m "slow or not slow" tests/megatron/test_te.py`.
"""

import itertools
from typing import Any

import pytest
from curves import BF16_UNIT_ROUNDOFF, E4M3_UNIT_ROUNDOFF, E5M2_UNIT_ROUNDOFF, FP32_LIMIT, relative_difference

SETTINGS = (
    "own",
    "fused",
    "fused_permuted",
    "sequential_fused",
    "biased",
    "biased_fused",
    "act_recomputed",
    "allgather",
    "deepep",
    "deepep_permuted",
    "hybridep",
    "parameters_gathered_meanwhile",
    "mtp",
    "mtp_fused_deepep",
    "shared_overlapped",
    "latent",
)
LIMITS = {"fp32": FP32_LIMIT, "bf16": BF16_UNIT_ROUNDOFF, "bf16_gradients": BF16_UNIT_ROUNDOFF}
QUICK = {
    *(f"{setting}_in_fp32_stored" for setting in SETTINGS if setting not in ("biased", "fused", "deepep_permuted")),
    "fused_in_fp32_recomputed",
    "fused_in_bf16_gradients_stored",
    "deepep_permuted_in_bf16_recomputed",
}
"""Every setting in fp32, or within one that has more; every precision, and both ways to run backward."""

KEPT_QUICK = {"fused", "hybridep"}


def te_case(case: str, world_size: int = 2) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=world_size, case=f"te_cases.{case}", launch="standins")


def cases() -> list[Any]:
    found = []
    for setting, precision, backward in itertools.product(SETTINGS, LIMITS, ("stored", "recomputed")):
        if setting == "act_recomputed" and backward == "recomputed":
            continue  # one or the other
        name = f"{setting}_in_{precision}_{backward}"
        marks = [te_case(name)] if name in QUICK else [te_case(name), pytest.mark.slow]
        found.append(pytest.param(precision, marks=marks, id=name))
    return found


def check(rank: dict[str, Any], limit: float) -> None:
    assert relative_difference(rank["plain"], rank["balanced"]) <= limit
    for step in rank["metrics"]:
        assert step["moe_rl/replicas"] > 0
        assert step["moe_rl/misplaced_share"] == step["moe_rl/fallback"] == 0


@pytest.mark.parametrize("precision", cases())
def test_training_is_megatrons_with_replicas_and_a_reorder_before_every_step(
    precision: str, outcome: list[Any]
) -> None:
    for rank in outcome:
        check(rank, LIMITS[precision])


QUICK_COMBINATIONS = {"slime_qwen3_235b_bf16", "verl_deepseek_v3_fp32"}
"""All have precision-aware Adam; the first has it on the host too."""
COMBINATIONS = [
    pytest.param(
        name,
        precision,
        marks=[
            te_case(f"{name}_{precision}", 4),
            *([] if f"{name}_{precision}" in QUICK_COMBINATIONS else [pytest.mark.slow]),
        ],
        id=f"{name}-{precision}",
    )
    for name in ("slime_qwen3_235b", "nemo_rl_deepseek_v3", "verl_deepseek_v3")
    for precision in ("fp32", "bf16")
]


@pytest.mark.parametrize(("name", "precision"), COMBINATIONS)
def test_realistic_combinations_train_as_megatron_does(name: str, precision: str, outcome: list[Any]) -> None:
    for rank in outcome:
        check(rank, LIMITS[precision])
        assert rank["balanced"] == rank["again"], (
            "a repeat, without NaN in the replica buffers before backward, differs"
        )


@te_case("own_router")
def test_with_the_fused_router_which_replays_nothing_results_are_megatrons(outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"], rank["balanced"]) <= FP32_LIMIT
        assert all(step["moe_rl/replicas"] > 0 for step in rank["metrics"])


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(
            name, marks=[te_case(f"{name}_kept"), *([] if name in KEPT_QUICK else [pytest.mark.slow])], id=name
        )
        for name in SETTINGS
    ],
)
def test_checkpoints_and_exports_hold_what_megatrons_do(setting: str, outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["keys"]
        assert rank["saved"] < 1e-4 < 0.1 < rank["moved"], "canonical() does not show Megatron's experts"
        assert rank["exported"] < 1e-4
        assert rank["losses"][0] == pytest.approx(rank["losses"][1], rel=FP32_LIMIT)


@te_case("fp8_blockwise")
def test_fp8_forward_does_not_depend_on_the_plan_and_the_rest_by_its_rounding_only(outcome: list[Any]) -> None:
    for rank in outcome:
        assert 0 < relative_difference(rank["wide"], rank["plain"]) <= E4M3_UNIT_ROUNDOFF
        # Homes have moved, so that rows are summed in another order in bf16; and which rows share a block changes.
        assert relative_difference(rank["plain"], rank["static"]) <= E4M3_UNIT_ROUNDOFF
        check(rank, E4M3_UNIT_ROUNDOFF)
        assert rank["balanced"] == rank["again"], "a repeat, with NaN in the replica buffers before backward, differs"
        assert relative_difference(rank["hybrid"], rank["hybrid_balanced"]) <= E5M2_UNIT_ROUNDOFF
        assert rank["hybrid_balanced"]["loss"][0] == rank["balanced"]["loss"][0]
        assert rank["hybrid_balanced"]["grad_norm"] != rank["balanced"]["grad_norm"]
        for other in ("fused", "permuted"):
            assert relative_difference(rank["plain"], rank[other]) <= E4M3_UNIT_ROUNDOFF
            assert rank[other]["loss"][0] == rank["balanced"]["loss"][0]
        assert rank["static"]["loss"][0] == rank["balanced"]["loss"][0], "a row's FP8 result depends on its slot"
        assert rank["codes_of_another_replica"]["loss"][0] != rank["balanced"]["loss"][0]


@te_case("faults")
def test_faults_are_visible_to_the_comparison(outcome: list[Any]) -> None:
    for rank in outcome:
        plain = rank.pop("plain")
        for name, curve in rank.items():
            assert relative_difference(plain, curve) > 1000 * FP32_LIMIT, name


@te_case("forward_alone")
def test_log_prob_passes_have_the_loss_of_megatron(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank.pop("reallocations") == 0, "HybridEP's buffer was too small for slots"
        assert rank.pop("experts_with_room") == 5
        for name, (before, loss, replicas) in rank.items():
            assert abs(before - loss) <= BF16_UNIT_ROUNDOFF * before, name
            assert replicas > 0


@te_case("choices_of_no_weight")
def test_deepep_sends_nothing_to_slots_of_no_weight(outcome: list[Any]) -> None:
    assert outcome == [[[2, 7], [-1, 3], [-1, -1]]] * 2


@te_case("refusals")
def test_what_does_not_work_is_refused_in_attach(outcome: list[Any]) -> None:
    expected = {
        "delayed": "fp8_recipe delayed is not supported",
        "tensorwise": "fp8_recipe tensorwise is experimental",
        "parameters": "fp8_param is not supported",
        "graphs": "cuda_graph_impl transformer_engine is experimental",
        "local_graphs": "cuda_graph_impl local is not supported",
        "try_whole_layers": "cuda_graph_scope captures the whole layer",
        "try_router": "cuda_graph_scope captures moe_router, so all micro-batches would use the routes",
        "try_preprocess": "cuda_graph_scope captures moe_preprocess",
        "grouped": "fp8 does not work with experts='grouped'",
    }
    for rank in outcome:
        assert rank.pop("not_in_fp8") == rank.pop("try_graphs") == ""
        assert rank.keys() == expected.keys()
        for name, part in expected.items():
            assert part in rank[name], name
