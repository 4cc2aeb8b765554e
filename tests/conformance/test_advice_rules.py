"""The advisor on made-up runs, one per rule, and on the Countdown study's figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runner import moe_rl

from moe_rl.core.errors import InvalidInputError
from moe_rl.doctor.advisor import RULES, AdviceRule, advise, not_judged, read_metrics, verdict

REGISTRY = RULES
STUDIES = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu"
LOGGED = {  # the study's names of what the recipe logs
    "mismatch_k3_kl": "mismatch/k3_kl",
    "route_agreement": "mismatch/router_agreement",
    "router_shift_ratio": "router_corr/gamma_mean",
    "clip_fraction": "actor/pg_clipfrac",
}


def said(*records: dict[str, float]) -> set[str]:
    return {each.rule for each in advise(records)}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_speaks_beyond_its_bound_only(rule: AdviceRule) -> None:
    step = max(abs(rule.bound) * 0.01, 1e-9)
    beyond, within = (rule.bound + sign * (step if rule.above else -step) for sign in (1, -1))
    early = dict.fromkeys(rule.metrics, 1.0)  # what relative rules compare with
    for metric in rule.metrics:
        assert rule.name in said(early, {metric: beyond})
        assert rule.name not in said(early, {metric: within})
        if rule.magnitude:
            assert rule.name in said(early, {metric: -beyond})
    (only,) = [each for each in advise([early, {rule.metrics[0]: beyond}]) if each.rule == rule.name]
    assert rule.source in str(only)
    assert rule.metrics[0] in str(only)


def test_the_last_half_is_read_and_what_is_not_a_number_passed_over() -> None:
    early, late = {"mismatch/k3_kl": 1.0}, {"mismatch/k3_kl": 1e-5, "note": "x"}
    assert said(early, early, late, late) == set()
    assert said({"mismatch/k3_kl": float("nan"), "staleness/max": 0.0}) == set()
    assert said({"staleness/max": 0.0}, {"staleness/max": 3.0}, {"staleness/max": 0.0}) == {"stale-rollouts"}


FRAMEWORKS = {
    "verl": {"actor/ppo_kl": 0.5, "actor/pg_clipfrac": 0.5, "actor/grad_norm": 99.0, "actor/entropy": 0.01},
    "slime": {"train/ppo_kl": 0.5, "train/pg_clipfrac": 0.5, "train/grad_norm": 99.0, "train/entropy_loss": 0.01},
    "NeMo-RL": {"train/gen_kl_error": 0.5, "train/grad_norm": 99.0, "train/approx_entropy": 0.01},
    "prime-rl": {"mismatch_kl/all/mean": 0.5, "optim/grad_norm": 99.0, "entropy/all/mean": 0.01},
    "AReaL": {"ppo_actor/approx_kl/avg": 0.5, "ppo_actor/clip_ratio/avg": 0.5},
    "SkyRL": {
        "policy/loss_metrics/clip_ratio": 0.5,
        "policy/policy_entropy": 0.01,
        "policy/rollout_train_logprobs_abs_diff_mean": 0.5,
    },
    "TRL": {"clip_ratio/region_mean": 0.5, "grad_norm": 99.0, "entropy": 0.01},
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_name_that_a_framework_logs_is_read(framework: str) -> None:
    late = FRAMEWORKS[framework]
    assert len(said(dict.fromkeys(late, 1.0), late)) == len(late)


def test_two_signs_of_different_kinds_are_a_danger_and_one_is_not() -> None:
    moved, drifted = {"actor/ppo_kl": 0.5, "actor/pg_clipfrac": 0.5}, {"router/agreement": 0.5, "mismatch/k3_kl": 0.5}
    calm = {"actor/ppo_kl": 0.0, "router/agreement": 1.0}
    for late in (calm, calm | moved, calm | drifted):
        assert verdict([calm, late]).in_danger is False
    found = verdict([calm, moved | drifted])
    assert found.in_danger is True
    assert found.reason == "signs in policy and router metrics agree."


def test_the_first_step_is_no_danger_by_itself_nor_in_longer_logs() -> None:
    calm, wild = {"actor/ppo_kl": 0.0, "router/agreement": 1.0}, {"actor/ppo_kl": 0.5, "router/agreement": 0.5}
    assert verdict([wild]).in_danger is None
    assert "needs at least 2 steps, but the log has 1" in verdict([wild]).reason
    for calm_steps in range(1, 5):
        assert verdict([wild] + [calm] * calm_steps).in_danger is False
    assert verdict([wild, wild]).in_danger is True


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"actor/ppo_kl": 0.0, "actor/pg_clipfrac": 0.0}, "the log contains metrics of only one kind (policy)"),
        ({"actor/ppo_kl": 9.0, "actor/pg_clipfrac": 0.9}, "the log contains metrics of only one kind (policy)"),
        ({"staleness/max": 0.0}, "the log contains metrics of none of them"),
        ({"actor/ppo_kl": 0.0, "router/agreement": float("nan")}, "the log contains metrics of only one kind (policy)"),
    ],
)
def test_a_run_whose_log_has_names_of_one_kind_is_not_called_healthy(record: dict[str, float], sentence: str) -> None:
    found = verdict([record] * 4)
    assert found.in_danger is None
    assert sentence in found.reason


def test_what_could_not_be_judged_is_said_with_its_reason() -> None:
    reasons = not_judged([{"actor/grad_norm": 1.0}])
    assert (
        reasons["gradient-jumps"]
        == "actor/grad_norm is not logged in earlier steps, so it cannot be compared with them"
    )
    assert reasons["policy-moved"].startswith("none of the metrics actor/ppo_kl")
    assert set(not_judged([{"staleness/max": 0.0}])) == set(RULES.names) - {"stale-rollouts"}


def test_the_advisor_needs_no_torch() -> None:
    code = (
        "import sys, moe_rl.doctor.advisor as a; a.advise([{'actor/ppo_kl': 1.0}]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_layer_that_drifts_alone_is_named() -> None:
    shifts = {f"router_corr/layer_{layer}/shift": 0.01 for layer in range(8)}
    assert said(shifts | {"staleness/max": 0.0}) == set()
    (only,) = advise([shifts | {"router_corr/layer_5/shift": 0.1}])
    assert (only.rule, only.metric) == ("one-layer-drifts", "router_corr/layer_5/shift")


@pytest.mark.parametrize("arm", ["grpo", "grpo + router shift", "gspo", "grpo, R2"])
def test_the_countdown_study_in_float32_needs_no_rollout_correction(arm: str) -> None:
    study = json.loads((STUDIES / "countdown_objectives.json").read_text())
    runs = [run["means"] for run in study["runs"] if run["arm"] == arm]
    assert runs
    for means in runs:
        record = {LOGGED[name]: value for name, value in means.items() if name in LOGGED}
        found = said(record)
        assert "no-correction-needed" in found
        assert "correct-rollouts" not in found


def test_the_command_says_it_and_refuses_what_is_no_log(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"mismatch/k3_kl": 0.002}\n\n{"mismatch/k3_kl": 0.004}\n')
    assert [record["mismatch/k3_kl"] for record in read_metrics(log)] == [0.002, 0.004]
    result = moe_rl("advise", str(log))
    assert result.code == 0
    assert "correct-rollouts: The rollout engine's log-probabilities differ" in result.out
    told = json.loads(moe_rl("advise", str(log), "--json", "-").out)
    assert [each["value"] for each in told["advice"]] == [0.004]
    assert told["in_danger"] is None, "two steps of one name"
    assert "Cannot judge whether the run is in danger: signs of two kinds must agree" in result.out
    assert "actor/ppo_kl" in told["not_judged"]["policy-moved"]
    assert "not judged: policy-moved: none of the metrics actor/ppo_kl, train/ppo_kl" in result.out
    log.write_text('{"loss": 1.0}\n')
    with pytest.raises(InvalidInputError, match=r"none of the metrics that the advice depends on: mismatch/k3_kl"):
        advise(read_metrics(log))
    log.write_text("loss 1.0\n")
    result = moe_rl("advise", str(log))
    assert result.code == 2
    assert "line 1, is not JSON" in result.err
    with pytest.raises(InvalidInputError, match=r"the log contains no metrics"):
        advise([])
