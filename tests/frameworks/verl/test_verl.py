"""verl's own Megatron engine trains the same losses when its experts are replicated by plan."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from curves import DRAWS, FP32_LIMIT, relative_difference, times_the_yardstick

LIMIT, SIZES = 60, (9, 14, 7, 12, 5, 11)

pytestmark = pytest.mark.framework
UPDATES, LEARNING_RATE = 8, 1e-6
SHARE = 1 / 20
"""Of the distance between plain verl and plain verl with other micro-batches; and of static's imbalance above 1."""


def verl_case(case: str) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=2, case=f"verl_cases.{case}", launch="verl")


@verl_case("r3")
def test_losses_are_verls_and_the_imbalance_falls_as_planned(outcome: list[Any]) -> None:
    for rank in outcome:
        plain, balanced = rank["plain"]["curve"], rank["balanced"]["curve"]
        assert plain["loss"][0] == balanced["loss"][0], "no weight has changed yet"
        assert times_the_yardstick(plain, balanced, rank["yardstick"]["curve"]) <= DRAWS
        assert rank["plain"]["metrics"] == [{}] * 5
        for metrics in rank["balanced"]["metrics"]:
            assert metrics["moe_rl/static_imbalance"] > 1.6
            assert metrics["moe_rl/imbalance"] < 1.2
            # The last token of each of 4 sequences of 42 tokens takes the live router, and may miss its slot.
            assert metrics["moe_rl/misplaced_share"] <= 4 / 42
            assert metrics["moe_rl/fallback"] == 0


@verl_case("dynamic")
def test_dynamic_micro_batches_and_log_prob_passes_are_planned(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["plain"]["infer"] == rank["balanced"]["infer"]
        assert rank["plain"]["curve"]["loss"] == rank["balanced"]["curve"]["loss"]
        for metrics in (rank["balanced"]["infer_metrics"], *rank["balanced"]["metrics"]):
            assert metrics["moe_rl/replicas"] > 0
            assert metrics["moe_rl/imbalance"] < metrics["moe_rl/static_imbalance"]
        assert rank["balanced"]["infer_metrics"]["moe_rl/returned_bytes"] == 0


@verl_case("micro_batches_that_fit")
def test_micro_batches_are_the_largest_that_fit_and_never_above_verls_limit(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["kept"] == [True] * 12, "verl's own setting is what it was"
        balanced, plain, yardstick = (rank[name]["curve"] for name in ("balanced", "plain", "yardstick"))
        assert times_the_yardstick(plain, balanced, yardstick) <= SHARE
        for room, metrics in zip(rank["rooms"], rank["balanced"]["metrics"], strict=True):
            limit = metrics["moe_rl/micro_batch_limit_tokens"]
            assert limit == LIMIT if room is None else max(SIZES) <= limit < sum(SIZES)
            assert room is None or metrics["moe_rl/forecast_peak_bytes"] <= room


@verl_case("every_row_replayed")
def test_what_r2_records_is_what_happens(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["plain"]["curve"]["loss"] == rank["balanced"]["curve"]["loss"]
        metrics = rank["balanced"]["metrics"][0]
        assert metrics["moe_rl/misplaced_share"] == 0
        assert metrics["moe_rl/imbalance"] == pytest.approx(metrics["moe_rl/predicted_imbalance"], abs=0.03)


def four_ranks(case: str, *values: Any) -> Any:
    marks = pytest.mark.multi_rank(world_size=4, case=f"verl_cases.{case}", launch="verl")
    return pytest.param(case, *values, marks=marks, id=case)


@pytest.mark.parametrize(
    ("case", "share", "source"),
    [
        four_ranks("without_replay", SHARE, "log-probs"),  # objective time
        four_ranks("reversed_rollouts", SHARE, "log-probs"),
        four_ranks("copies_that_stay", 2 * SHARE, "log-probs"),
        four_ranks("homes_that_move", SHARE, "log-probs"),
        four_ranks("without_log_probs", 6 * SHARE, "history"),
        four_ranks("with_r3", SHARE, "log-probs"),  # 1 to 2 % of the rows have no recorded route
        four_ranks("on_two_stages", SHARE, "log-probs"),
        four_ranks("asleep_between_phases", SHARE, "log-probs"),
        four_ranks("with_lora", SHARE, "log-probs"),
        four_ranks("expert_tensor_parallel", SHARE, "log-probs"),
    ],
)
def test_updates_are_balanced_by_one_variable(case: str, share: float, source: str, outcome: list[Any]) -> None:
    assert any(rank["plain"]["curve"]["grad_norm"] for rank in outcome)
    for rank in outcome:
        plain, balanced = rank["plain"], rank["balanced"]
        assert plain["log_probs"][:1] == balanced["log_probs"][:1], "no weight has changed yet"
        assert balanced["log_probs"] == pytest.approx(plain["log_probs"], rel=FP32_LIMIT)
        if plain["curve"]["grad_norm"]:  # of the last pipeline stage, and of the first rank of a tensor-parallel group
            assert times_the_yardstick(plain["curve"], balanced["curve"], rank["yardstick"]["curve"]) <= SHARE
        assert rank["same_names"]
        assert rank["apart"] <= 2 * UPDATES * LEARNING_RATE, "of an element whose gradient is 0 Adam may turn the sign"
        known = balanced["metrics"][1:] if source == "history" else balanced["metrics"]
        for metrics in known:
            assert metrics["moe_rl/static_imbalance"] > 1.5
            assert metrics["moe_rl/imbalance"] - 1 <= share * (metrics["moe_rl/static_imbalance"] - 1)
            assert metrics["moe_rl/known_share"] == (source != "history")
            assert (metrics["moe_rl/residents"] > 0) == (case == "copies_that_stay")
            if source != "history":
                assert metrics["moe_rl/imbalance"] == pytest.approx(metrics["moe_rl/predicted_imbalance"], abs=0.01)
        assert balanced["moved"] > 0
        # Before a run's first update nobody knows how verl cuts a rollout; without log-probs none is foretold.
        unknown = {"without_log_probs": [0, 4], "reversed_rollouts": [0, 4]}.get(case, [0])
        assert [index for index, known in enumerate(balanced["prepared"]) if not known] == unknown


@pytest.mark.multi_rank(world_size=4, case="verl_cases.homes_that_move", launch="verl")
def test_verl_that_is_observed_trains_what_it_trained_and_says_what_balancing_would_do(outcome: list[Any]) -> None:
    for rank in outcome:
        plain, balanced, observed = rank["plain"], rank["balanced"], rank["observed"]
        assert observed["log_probs"] == plain["log_probs"], "to the bit"
        assert observed["curve"] == plain["curve"], "to the bit"
        assert observed["moved"] > 0, "no homes were proposed: the test is blind"
        for would, did in zip(observed["metrics"], balanced["metrics"], strict=True):
            assert would["moe_rl/would_be_imbalance"] == pytest.approx(did["moe_rl/imbalance"], abs=0.02)
            assert would["moe_rl/imbalance"] == pytest.approx(did["moe_rl/static_imbalance"], abs=0.02)
            for name in ("replicas", "residents", "pushed_bytes", "returned_bytes", "reordered_bytes"):
                assert would[f"moe_rl/{name}"] == 0


@pytest.mark.multi_rank(world_size=4, case="recipe_cases.replayed", launch="recipe")
def test_verls_recipe_for_router_replay_is_balanced_on_the_stand_ins(outcome: list[Any]) -> None:
    for rank in outcome:
        plain, balanced = rank["plain"], rank["balanced"]
        assert balanced["log_probs"] == plain["log_probs"]
        # DeepEP adds the outputs of a rank's experts in bf16 before it sends them: where copies lie enters rounding.
        assert times_the_yardstick(plain["curve"], balanced["curve"], rank["yardstick"]["curve"]) <= DRAWS
        assert rank["same_names"]
        assert rank["apart"] <= 2 * UPDATES * LEARNING_RATE
        for metrics in balanced["metrics"]:
            assert metrics["moe_rl/static_imbalance"] > 2.0
            assert metrics["moe_rl/imbalance"] <= 1.02
            assert metrics["moe_rl/fallback"] == 0
        assert balanced["moved"] > 0


@pytest.mark.multi_rank(world_size=4, case="verl_cases.packed", launch="verl")
def test_sequences_change_their_micro_batch_and_nothing_else(outcome: list[Any]) -> None:
    for rank in outcome:
        assert relative_difference(rank["plain"]["curve"], rank["true"]["curve"]) <= FP32_LIMIT
        before, after = ([each["moe_rl/imbalance"] for each in rank[pack]["metrics"]] for pack in ("false", "true"))
        for imbalance, unpacked in zip(after, before, strict=True):
            assert imbalance <= unpacked, (before, after)
        assert sum(after) < sum(before), "packing found nothing in any update: the test is blind"


@pytest.mark.multi_rank(world_size=4, case="verl_cases.weights_that_change_fast", launch="verl")
def test_updates_stay_balanced_while_weights_change_fast(outcome: list[Any]) -> None:
    for rank in outcome:
        balanced = rank["balanced"]
        imbalance = [metrics["moe_rl/imbalance"] for metrics in balanced["metrics"]]
        assert 0.08 < balanced["flips"][3] < 0.16
        assert max(imbalance[0], imbalance[4]) <= 1.01, "no weight has changed since the log-prob pass"
        assert max(imbalance) <= 1.15, "static: 2.6 to 3.1"


@pytest.mark.multi_rank(world_size=4, case="verl_cases.as_simulated", launch="verl")
def test_a_run_does_what_is_simulated_of_the_routes_that_it_recorded(outcome: list[Any]) -> None:
    """Homes are chosen by the log-prob pass, which is packed otherwise than the update that is simulated."""
    for name, both in outcome[0].items():
        for ran, simulated in zip(both["run"], both["simulated"], strict=True):
            assert ran["static_imbalance"] == pytest.approx(simulated["static_imbalance"], abs=0.001)
            assert ran["imbalance"] == pytest.approx(simulated["imbalance"], abs=0.03)
            assert ran["copies"] == pytest.approx(simulated["copies"], abs=0.05 * simulated["static_copies"])
            assert (ran["residents"] > 0) == (simulated["residents"] > 0) == (name != "")


@verl_case("tensor_parallel")
def test_ranks_of_a_tensor_parallel_group_count_their_own_rows(outcome: list[Any]) -> None:
    check_parallel(outcome, pad_to=2)


@verl_case("context_parallel")
def test_ranks_of_a_context_parallel_group_count_their_own_rows(outcome: list[Any]) -> None:
    check_parallel(outcome, pad_to=4)


@pytest.mark.slow
@pytest.mark.multi_rank(world_size=4, case="verl_cases.pipeline_parallel", launch="verl")
def test_every_pipeline_stage_balances_its_layers(outcome: list[Any]) -> None:
    check_parallel(outcome, pad_to=1)


def check_parallel(outcome: list[Any], *, pad_to: int) -> None:
    """Every sequence's last token and its padding take the live router, and may miss their slots."""
    padded = sum(-(-size // pad_to) * pad_to for size in (9, 14, 7, 12))
    for rank in outcome:
        assert rank["plain"]["loss"] == rank["balanced"]["loss"]
        metrics = rank["balanced"]["metrics"]
        assert metrics["moe_rl/static_imbalance"] > 1.6
        assert metrics["moe_rl/imbalance"] < 1.2
        assert metrics["moe_rl/misplaced_share"] <= (padded - 42 + 4) / padded
        assert metrics["moe_rl/fallback"] == 0


@verl_case("reordered_export")
def test_moved_experts_are_exported_and_saved_at_home(outcome: list[Any]) -> None:
    seen = dict.fromkeys(["moved", "names", "export", "refused", "save", "back"], True)
    assert outcome == [seen, seen]


@verl_case("offloaded")
def test_memory_of_the_balancer_leaves_with_the_parameters(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["plain"]["curve"]["loss"][0] == rank["balanced"]["curve"]["loss"][0]
        assert rank["balanced"]["metrics"][0]["moe_rl/replicas"] > 0
        assert rank["away"] == [[0, 0]] * 5
        assert rank["there"] > 0
        assert rank["balanced"]["home"], "a checkpoint sees Megatron's experts though they were put away"
        assert rank["balanced"]["export"]
        assert rank["balanced"]["back"]


@verl_case("offered")
def test_losses_and_rollout_correction_are_offered_under_our_names(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["same"] == [True, True]
        assert rank["rejected"] > 0
        assert rank["metrics"] <= 1e-7, "of the larger of 1 and the value: verl adds 1e-8 to what it divides by"
        assert rank["num_metrics"][0] == rank["num_metrics"][1] > 20
        assert rank["binary_kl"] > 0
        assert rank["bypass"][""] == pytest.approx(rank["bypass"]["moe_rl_"], abs=1e-12)
        assert "names with and without the prefix moe_rl_ cannot be mixed. Add it to token." in rank["mixed"]
        assert rank["loss"].startswith("gspo")
        assert not rank["balanced"], "MOE_RL is not set"


@verl_case("recorded")
def test_recordings_hold_the_replayed_routes_and_open_in_the_simulator(outcome: list[Any]) -> None:
    for rank in outcome:
        assert rank["steps"] == [0, 1]
        assert all(rank["same"])
    assert "ultraep" in outcome[0]["simulated"]


@verl_case("refused")
def test_what_does_not_fit_is_a_warning_or_an_error(outcome: list[Any]) -> None:
    expected = {
        "ep_size": "with expert_model_parallel_size 1, every rank holds all experts.",
        "dense": "there is nothing to balance, because the model has no MoE layer.",
        "packing": "use_remove_padding must be True: verl always packs the routes that it replays",
        "versions": "verl: the version of moe_rl must be the same on all ranks, but rank 1 has 0.1 and rank 0 has 0.0.",
        "routes": "the routes come from another model: they have 5 layers and top-2, but this model has 3 MoE layers",
    }
    for index, rank in enumerate(outcome):
        assert rank["metrics"] == [{}]
        assert len(rank["warnings"]) == 1
        padded = [line for line in rank["padded"] if "source history" in line]
        assert len(padded) == (index == 0), "said once, on rank 0: tokens are padded, and no routes are replayed"
        assert expected["ep_size"] in rank["warnings"][0]
        for name, sentence in expected.items():
            assert sentence in rank["said"][name], name


@verl_case("contract")
def test_every_symbol_is_there_with_its_parameters(outcome: list[Any]) -> None:
    assert outcome == [{"problems": [], "tested": True}] * 2


ASK = """
import verl_on_cpu
print("balanced", hasattr(verl_on_cpu.impl.get_forward_backward_func, "__wrapped__"))
"""


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"MOE_RL": "ultraep"}, "balanced True"),
        (
            {"MOE_RL": "ultraep", "MOE_RL_REPLICA_SLOT": "1"},
            "moe_rl does not know the environment variable MOE_RL_REPLICA_SLOT.",
        ),
    ],
)
def test_verl_loads_the_plug_in_by_itself(variables: dict[str, str], said: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOE_RL")}
    ran = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**environment, **variables},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said in ran.stdout + ran.stderr, ran.stderr
    assert ran.returncode == (2 if "does not know" in said else 0)
