"""Line charts put points where they belong."""

import re
from xml.etree import ElementTree

import pytest

from moe_rl.core.errors import InvalidInputError
from moe_rl.report.curves import BOTTOM, LEFT, RIGHT, TOP, Axes, Line, line_chart
from moe_rl.report.svg import LIGHT, standalone

AXES = Axes(x="step", y="value")


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
    with pytest.raises(InvalidInputError, match="nothing to plot"):
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


def test_the_answer_has_a_ring_and_a_name_above_its_halo() -> None:
    """Renderers of PNG and PDF do not know `paint-order`: a name with a halo of its own was covered by it."""
    lines = {"a": Line(points=[(0, 1.0), (1, 2.0), (2, 3.0)], color="#d55e00", answer=(1, 2.0), answer_name="best")}
    chart = line_chart(lines, Axes(x="x", y="y"))
    assert chart.count('class="answer"') == 1
    assert re.findall(r'class="([\w-]+)">best<', chart) == ["halo", "answer-name"]
    assert "paint-order" not in standalone(chart, LIGHT)
