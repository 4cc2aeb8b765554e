"""The report of a run shows what was measured and nothing else; line charts put points where they belong."""

import re
from xml.etree import ElementTree

import pytest
from rich.console import Console

from moe_rl.core.errors import InvalidInputError
from moe_rl.report.curves import BOTTOM, LEFT, RIGHT, TOP, Axes, Line, line_chart
from moe_rl.report.training import TrainingReport, print_training_report, render_training_html, table_rows

AXES = Axes(x="step", y="value")
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


def polylines(svg: str) -> list[list[tuple[float, float]]]:
    points = [element.get("points", "") for element in ElementTree.fromstring(svg).iter("polyline")]
    return [[tuple(map(float, point.split(","))) for point in line.split()] for line in points]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("axes", "values"),
    [
        (Axes(x="step", y="reward"), [0.0, 0.5, 1.0]),
        (Axes(x="step", y="load", from_one=True), [1.0, 1.1, 1.2]),
        (Axes(x="step", y="KL", log=True), [1e-4, 1e-3, 1e-2]),
    ],
)
def test_equal_steps_of_value_are_equal_steps_of_height(axes: Axes, values: list[float]) -> None:
    svg = line_chart({"a": Line(points=list(enumerate(values)), color="#000")}, axes)
    (line,) = polylines(str(svg))
    (x0, y0), (x1, y1), (x2, y2) = line
    assert (x0, x2) == (LEFT, 460 - RIGHT)
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert y1 == pytest.approx((y0 + y2) / 2, abs=0.1)
    assert (y0, y2) == (260 - BOTTOM, TOP)


def drawn(points: list[tuple[float, float]], axes: Axes) -> list[tuple[float, float]]:
    """The places of the only line of a chart."""
    (line,) = polylines(str(line_chart({"a": Line(points=points, color="#000")}, axes)))
    return line


def test_values_that_cannot_be_drawn_are_left_out() -> None:
    points = [(0.0, 1.0), (1.0, float("nan")), (2.0, 0.0), (3.0, 10.0)]
    assert len(drawn(points, Axes(x="x", y="y"))) == 3
    assert len(drawn(points, Axes(x="x", y="y", log=True))) == 2
    with pytest.raises(InvalidInputError, match="nothing to draw"):
        drawn([(0.0, 0.0)], Axes(x="x", y="y", log=True))


def test_a_band_lies_inside_the_axes_and_holds_its_line() -> None:
    points, band = [(0.0, 1.0), (1.0, 2.0)], [(0.0, 0.5, 1.5), (1.0, 1.0, 4.0)]
    svg = str(line_chart({"a": Line(points=points, color="#000", band=band)}, AXES))
    around, line = (
        [tuple(map(float, point.split(","))) for point in re.findall(kind + r' [^>]*points="([^"]+)"', svg)[0].split()]
        for kind in ("polygon", "polyline")
    )
    assert all(TOP <= y <= 260 - BOTTOM for _, y in around)
    assert around[0][1] > line[0][1] > around[-1][1]
    assert around[1][1] > line[1][1] > around[2][1]


def test_a_single_point_and_a_flat_line_have_a_place() -> None:
    for points in ([(3.0, 0.0)], [(0.0, 1.0), (1.0, 1.0)]):
        for axes in (Axes(x="x", y="y"), Axes(x="x", y="y", from_one=True)):
            assert all(TOP <= y <= 260 - BOTTOM for _, y in drawn(points, axes))


def test_table_and_sentences_follow_from_the_metrics() -> None:
    rows = {words: (first, last) for words, first, last in table_rows(report())}
    assert rows["held-out accuracy"] == ("0.200", "0.600")
    assert rows["reward of the rollouts"] == ("0.150", "0.350")
    assert "busiest rank, predicted" not in rows
    said = " ".join(report().sentences)
    assert "of samples went from 0.200 to 0.600" in said
    assert "1.50 times the mean load with experts at home, 1.10" in said
    assert "Every row of every step ran on the rank that was planned" in said
    moved = [line | {"moe_rl/misplaced_share": 0.25} if line["step"] == 2 else line for line in STEPS]
    assert "At most 25.00% of a step's rows" in " ".join(report(moved).sentences)


def test_what_was_not_measured_is_absent() -> None:
    bare = report([{"step": 1, "reward/mean": 0.5}])
    assert [row[0] for row in table_rows(bare)] == ["reward of the rollouts"]
    assert bare.sentences == ()
    page = render_training_html(bare)
    assert charts(page) == 1
    assert "KL" not in page


def test_a_chart_without_a_value_that_its_axis_can_show_is_left_out() -> None:
    exact = [line | {"mismatch/free_k3_kl": 0.0, "mismatch/replayed_k3_kl": -1e-12} for line in STEPS]
    assert charts(render_training_html(report(exact))) == 2


def test_the_page_is_whole_and_escaped() -> None:
    page = render_training_html(report())
    assert charts(page) == 3
    assert "a &lt;run&gt;" in page
    assert "<run>" not in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)


def test_the_terminal_shows_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    print_training_report(report(), Console(width=100, markup=False))
    shown = capsys.readouterr().out
    assert "held-out accuracy" in shown
    assert "0.600" in shown


def test_a_run_without_a_step_has_no_report() -> None:
    with pytest.raises(InvalidInputError, match="no finished step"):
        report([{"step": 0, "evaluation/accuracy": 0.1}])
