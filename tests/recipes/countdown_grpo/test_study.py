"""A study's figures are those of the runs: lifts, means over steps, and spreads over seeds."""

import json
from pathlib import Path

import pytest

from moe_rl.core.errors import InvalidInputError
from moe_rl.recipes.countdown_grpo.metrics import METRICS_FILE
from moe_rl.recipes.countdown_grpo.study import RunSummary, accuracy_picture, markdown_table


def summary(folder: Path, arm: str, seed: int, *, after: float, clipped: float | None = 0.1) -> RunSummary:
    """A run of two steps."""
    run = folder / f"{arm}{seed}"
    run.mkdir()
    step = {"reward/mean": 0.5, "mismatch/k3_kl": 1e-4, "time/step_s": 2.0}
    if clipped is not None:
        step["actor/pg_clipfrac"] = clipped
    lines = [
        {"step": 0, "evaluation/accuracy": 0.2, "evaluation/greedy_accuracy": 0.3},
        {"step": 1, **step, "mismatch/k3_kl": 3e-4},
        {"step": 2, **step, "evaluation/accuracy": after, "evaluation/greedy_accuracy": 0.5},
    ]
    (run / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunSummary.read(run, arm=arm, seed=seed)


def test_a_run_is_summed_up(tmp_path: Path) -> None:
    run = summary(tmp_path, "grpo", 0, after=0.6)
    assert (run.num_steps, run.seconds) == (2, 4.0)
    assert run.lift == pytest.approx(0.4)
    assert run.greedy_lift == pytest.approx(0.2)
    assert run.means["mismatch_k3_kl"] == pytest.approx(2e-4)
    assert "router_agreement" not in run.means
    assert json.loads(json.dumps(run.as_json()))["evaluations"][1] == {
        "step": 2, "accuracy": 0.6, "greedy_accuracy": 0.5
    }  # fmt: skip


def test_the_table_has_means_spreads_and_no_figure_that_was_not_measured(tmp_path: Path) -> None:
    runs = [summary(tmp_path, "a", 0, after=0.6), summary(tmp_path, "a", 1, after=0.4)]
    runs.append(summary(tmp_path, "b", 0, after=0.3, clipped=None))
    _, _, first, second = markdown_table(runs).splitlines()
    assert first.startswith("| a | 2 | 0.200 | 0.500 | +0.300 +- 0.141 | +0.200 | +0.200 | 2.0e-04 |  |  | 10.00% |")
    assert second.startswith("| b | 1 | 0.200 | 0.300 | +0.100 | +0.100 | +0.200 | 2.0e-04 |  |  |  |")
    assert str(accuracy_picture(runs)).count("<polyline") == 2


def test_a_run_without_a_step_is_refused(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text('{"step": 0}\n')
    with pytest.raises(InvalidInputError, match="no finished step"):
        RunSummary.read(tmp_path, arm="a", seed=0)
