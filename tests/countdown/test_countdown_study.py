"""A study's figures are those of the runs: lifts, means over steps, and spreads over seeds; results outlive runs."""

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from examples.countdown.metrics import METRICS_FILE
from moe_rl.core.errors import InvalidInputError

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # as for a script there

from countdown_results import (
    PRECISIONS,
    CurveComparison,
    RunSummary,
    accuracy_picture,
    markdown_table,
    merged,
    mismatch_picture,
    reward_picture,
)

ROOT = Path(__file__).parents[2]


def summary(folder: Path, arm: str, seed: int, *, after: float, clipped: float | None = 0.1) -> RunSummary:
    """A run of two steps."""
    run = folder / f"{arm}{seed}"
    write_run(run, after=after, clipped=clipped)
    return RunSummary.read(run, arm=arm, seed=seed, machine={"commit": "abc"})


def write_run(run: Path, *, after: float, clipped: float | None = 0.1) -> None:
    run.mkdir(parents=True)
    step = {
        "reward/mean": after,
        "mismatch/k3_kl": 1e-4,
        "mismatch/router_agreement": 0.98,
        "export/max_token_k3": 1e-9,
        "time/step_s": 2.0,
    }
    if clipped is not None:
        step["actor/pg_clipfrac"] = clipped
    lines = [
        {"step": 0, "evaluation/accuracy": 0.2, "evaluation/greedy_accuracy": 0.3},
        {"step": 1, **step, "reward/mean": 0.5, "mismatch/k3_kl": 3e-4, "export/max_token_k3": 2e-9},
        {"step": 2, **step, "evaluation/accuracy": after, "evaluation/greedy_accuracy": 0.5},
    ]
    (run / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_is_summed_up(tmp_path: Path) -> None:
    run = summary(tmp_path, "grpo", 0, after=0.6)
    assert (run.num_steps, run.seconds) == (2, 4.0)
    assert run.lift == pytest.approx(0.4)
    assert run.greedy_lift == pytest.approx(0.2)
    assert run.means["mismatch_k3_kl"] == pytest.approx(2e-4)
    assert "router_agreement" not in run.means
    assert run.maxima == {"export_max_token_k3": 2e-9}
    assert run.mismatch == (3e-4, 1e-4)
    assert run.figure("other_experts") == pytest.approx(0.02)
    assert RunSummary.from_json(json.loads(json.dumps(run.as_json()))) == run
    assert json.loads(json.dumps(run.as_json()))["evaluations"][1] == {
        "step": 2, "accuracy": 0.6, "greedy_accuracy": 0.5
    }  # fmt: skip


def test_the_table_has_means_spreads_and_no_figure_that_was_not_measured(tmp_path: Path) -> None:
    runs = [summary(tmp_path, "a", 0, after=0.6), summary(tmp_path, "a", 1, after=0.4)]
    runs.append(summary(tmp_path, "b", 0, after=0.3, clipped=None))
    _, _, first, second = markdown_table(runs).splitlines()
    assert first.startswith("| a | 2 | 0.200 | 0.500 | +0.300 +- 0.141 | +0.200 | +0.200 | 2.0e-04 |  | 10.00% |")
    assert second.startswith("| b | 1 | 0.200 | 0.300 | +0.100 | +0.100 | +0.200 | 2.0e-04 |  |  |")
    precisions = markdown_table(runs, PRECISIONS).splitlines()[2]
    assert precisions.endswith("|  |  |  |  | 2.00% |  |  | 2e-09 |")
    for picture in (accuracy_picture, reward_picture, mismatch_picture):
        drawn = str(picture(runs))
        assert drawn.count("<polyline") == drawn.count("<polygon") == 2, "one panel: the arm, and the first one in gray"
        assert ">b<" in drawn
        assert ">gray: a<" in drawn
        assert 'class="title"' in drawn
    variant = [summary(tmp_path, "a + correction", 0, after=0.6), replace(runs[2], arm="exact", mismatch=(0.0, 1e-13))]
    drawn = accuracy_picture([*runs, *variant])
    assert drawn.count("<polyline") == 6, "a panel for every arm but the first"
    assert ">a + correction<" in drawn
    assert "exact" not in mismatch_picture([*runs, *variant])


def test_curves_are_compared_by_their_means_over_common_seeds_beside_the_spread_of_seeds(tmp_path: Path) -> None:
    on = [summary(tmp_path, "on", seed, after=after) for seed, after in ((0, 0.6), (1, 0.4), (2, 0.9))]
    off = [summary(tmp_path, "off", seed, after=after) for seed, after in ((0, 0.65), (1, 0.55))]
    found = CurveComparison.of("held-out accuracy", [*on, *off], ("on", "off"))
    assert found is not None
    assert (found.seeds, found.steps) == ((0, 1), (0, 2))
    assert found.differences == pytest.approx((0.0, 0.1))
    # Sample variances 0.02 and 0.005, their mean 0.0125.
    assert found.spreads == pytest.approx((0.0, 0.0125**0.5))
    assert found.steps_within == 2
    assert found.equal_until == (0, 0)
    assert found.as_json()["largest_difference"] == {
        "step": 2, "difference": pytest.approx(0.1), "spread_of_seeds": pytest.approx(0.0125**0.5)
    }  # fmt: skip
    assert "`off` minus `on`, means over seeds 0, 1: furthest apart at step 2 with +0.100" in found.sentence()
    assert "within the spread in 2 of 2 steps" in found.sentence()
    apart = CurveComparison.of("reward", [*on[:2], *(summary(tmp_path, "far", seed, after=0.9) for seed in (0, 1))],
                               ("on", "far"))  # fmt: skip
    assert apart is not None
    assert (apart.steps, apart.steps_within, apart.equal_until) == ((1, 2), 1, (1, 1))
    assert CurveComparison.of("reward", [*on, off[0]], ("on", "off")) is None


def test_a_new_run_replaces_the_kept_one_of_its_arm_and_seed(tmp_path: Path) -> None:
    kept = [summary(tmp_path, arm, seed, after=0.4) for arm in ("b", "gone", "a") for seed in (1, 0)]
    new = summary(tmp_path / "new", "a", 1, after=0.7)
    runs = merged(kept, [new], ["a", "b"])
    assert [(run.arm, run.seed) for run in runs] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert runs[1] is new


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, its results in a folder of the test."""
    script = importlib.import_module("countdown_study")
    monkeypatch.setattr(script, "RESULTS", tmp_path / "results")
    return script


@pytest.fixture
def finish(study: ModuleType) -> Callable[..., None]:
    """Leave behind what a complete run of an arm of the study of precisions does."""

    def leave(out: Path, arm: str, seed: int, commit: str, *, after: float) -> None:
        config = study.config_of(study.STUDIES["fp8"], arm, seed, out)
        write_run(Path(config.out), after=after)
        lines = (Path(config.out) / METRICS_FILE).read_text().splitlines()
        last = {**json.loads(lines[-1]), "step": config.num_steps}
        (Path(config.out) / METRICS_FILE).write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
        study.machine_file(config).write_text(json.dumps({"commit": commit}))

    return leave


def test_results_outlive_the_folder_of_their_runs(
    study: ModuleType, finish: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = study.STUDIES["fp8"].arms
    finish(tmp_path / "old", first, 0, "aaa", after=0.5)
    finish(tmp_path / "old", second, 0, "aaa", after=0.5)
    study.write_results("fp8", tmp_path / "old")
    finish(tmp_path / "new", second, 0, "bbb", after=0.6)
    finish(tmp_path / "new", second, 1, "bbb", after=0.6)

    def results() -> list[tuple[str, int, str]]:
        study.write_results("fp8", tmp_path / "new")
        document = json.loads((tmp_path / "results" / "countdown_fp8.json").read_text())
        return [(run["arm"], run["seed"], run["machine"]["commit"]) for run in document["runs"]]

    of_new = [(second, 0, "bbb"), (second, 1, "bbb")]
    assert results() == [(first, 0, "aaa"), *of_new]
    assert results() == [(first, 0, "aaa"), *of_new]
    assert (tmp_path / "results" / "countdown_fp8.md").read_text().count("\n| ") == 2
    changed = {**study.STUDIES["fp8"].arms, first: ("train.learning_rate=1e-3",)}
    monkeypatch.setitem(study.STUDIES, "fp8", study.Study(arms=changed, overrides=study.STUDIES["fp8"].overrides))
    assert results() == of_new, "a run with other settings was kept"


def test_results_of_another_base_config_do_not_stay(
    study: ModuleType, finish: Callable[..., None], tmp_path: Path
) -> None:
    arm = next(iter(study.STUDIES["fp8"].arms))
    finish(tmp_path / "old", arm, 0, "aaa", after=0.5)
    study.write_results("fp8", tmp_path / "old")
    document = json.loads((tmp_path / "results" / "countdown_fp8.json").read_text())
    assert len(study.kept_runs(study.STUDIES["fp8"], document)) == 1
    document["base"]["model"]["num_layers"] += 1
    assert study.kept_runs(study.STUDIES["fp8"], document) == []


def test_the_committed_results_are_of_the_present_arms(study: ModuleType) -> None:
    for name, one in study.STUDIES.items():
        document = json.loads((ROOT / "benchmarks" / "results" / "cpu" / f"countdown_{name}.json").read_text())
        assert len(study.kept_runs(one, document)) == len(document["runs"]), name


def test_a_run_without_a_step_is_refused(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text('{"step": 0}\n')
    with pytest.raises(InvalidInputError, match="has no finished step"):
        RunSummary.read(tmp_path, arm="a", seed=0, machine={})
