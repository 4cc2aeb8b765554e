"""The page of a run shows what was measured and nothing else."""

import re

import pytest
from rich.console import Console

from examples.countdown.page import TrainingReport, print_training_report, render_training_html, table_rows
from moe_rl.core.errors import InvalidInputError

STEPS = [{"step": 0, "evaluation/accuracy": 0.2}] + [
    {
        "step": step,
        "reward/mean": 0.1 * step,
        "mismatch/free_k3_kl": 2e-4,
        "mismatch/replayed_k3_kl": 1e-4,
        "moe_rl/static_imbalance": 1.5,
        "moe_rl/imbalance": 1.1,
        "moe_rl/misplaced_share": 0.0,
    }
    for step in range(1, 5)
]
STEPS[-1]["evaluation/accuracy"] = 0.6


def charts(page: str) -> int:
    return page.count('<div class="chart"')


def report(steps: list[dict[str, float]] = STEPS) -> TrainingReport:
    return TrainingReport(title="a <run>", steps=steps, setting={"replay": "R3"})


def test_table_and_sentences_follow_from_the_metrics() -> None:
    rows = {words: (first, last) for words, first, last in table_rows(report())}
    assert rows["held-out accuracy"] == ("0.200", "0.600")
    assert rows["reward of the rollouts"] == ("0.150", "0.350")
    assert "busiest rank, predicted" not in rows
    said = " ".join(report().sentences)
    assert report().finding == "Held-out accuracy 0.20 → 0.60, busiest rank 1.50 → 1.10 of the mean load"
    assert "of samples went from 0.200 to 0.600" in said
    assert "1.50 times the mean load with experts at home, 1.10" in said
    assert "Every row of every step ran on the rank that was planned" in said
    moved = [line | {"moe_rl/misplaced_share": 0.25} if line["step"] == 2 else line for line in STEPS]
    assert "At most 25.00% of a step's rows" in " ".join(report(moved).sentences)


def test_what_was_not_measured_is_absent() -> None:
    bare = report([{"step": 1, "reward/mean": 0.5}])
    assert [row[0] for row in table_rows(bare)] == ["reward of the rollouts"]
    assert bare.sentences == ()
    assert bare.finding == "A <run>"
    page = render_training_html(bare)
    assert charts(page) == 1
    assert "KL" not in page


def test_a_chart_without_a_value_that_its_axis_can_show_is_left_out() -> None:
    exact = [line | {"mismatch/free_k3_kl": 0.0, "mismatch/replayed_k3_kl": -1e-12} for line in STEPS]
    assert charts(render_training_html(report(exact))) == 2


def test_the_page_is_whole_and_escaped() -> None:
    page = render_training_html(report())
    assert charts(page) == 3
    assert f"<h1>{report().finding}</h1>" in page
    assert "a &lt;run&gt;" in page
    assert "<run>" not in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)


def test_the_terminal_shows_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    print_training_report(report(), Console(width=100, markup=False))
    shown = capsys.readouterr().out
    assert "held-out accuracy" in shown
    assert "0.600" in shown


def test_a_run_without_a_step_has_no_report() -> None:
    with pytest.raises(InvalidInputError, match="has not finished a step"):
        report([{"step": 0, "evaluation/accuracy": 0.1}])
