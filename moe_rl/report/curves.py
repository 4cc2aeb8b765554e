"""Line charts of anything that was measured along a run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from moe_rl.core.errors import require
from moe_rl.report.charts import MARKED_POINTS
from moe_rl.report.svg import Svg
from moe_rl.report.units import ticks

LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 44
LEGEND_ROW = 16
Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart."""

    points: Sequence[Point]
    """(x, y), x rising; points whose y is not finite are left out."""
    color: str
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """What the axes mean."""

    x: str
    y: str
    log: bool = False
    """Powers of ten on the y axis; values that are not positive are left out."""
    from_one: bool = False
    """The y axis starts at 1 (ratios to a mean), else at 0."""

    def can_show(self, y: float) -> bool:
        """Return whether a value has a place on the y axis."""
        return math.isfinite(y) and (y > 0 or not self.log)


def line_chart(
    lines: Mapping[str, Line], axes: Axes, *, width: float = 460, height: float = 260, legend: bool = False
) -> Markup:
    """Draw named lines over common axes; raises `InvalidInputError` if there is nothing to draw.

    `legend` names the lines in the lower right corner, for a picture that stands alone.
    """
    shown = {name: [point for point in line.points if axes.can_show(point[1])] for name, line in lines.items()}
    every = [point for points in shown.values() for point in points]
    require(len(every) > 0, f"there is nothing to draw as {axes.y} against {axes.x}.")
    marks = _marks([y for _, y in every], axes)
    first, last = min(x for x, _ in every), max(x for x, _ in every)
    svg = Svg(height=height, width=width, label=f"{axes.y} against {axes.x}: {', '.join(lines)}")

    def x_of(x: float) -> float:
        share = (x - first) / (last - first) if last > first else 0.5
        return LEFT + (width - LEFT - RIGHT) * share

    def y_of(y: float) -> float:
        low, high, value = (math.log10(v) if axes.log else v for v in (marks[0], marks[-1], y))
        return TOP + (height - TOP - BOTTOM) * (1.0 - (value - low) / (high - low))

    for mark in marks:
        svg.line(LEFT, y_of(mark), width - RIGHT, y_of(mark), "axis" if mark == marks[0] else "grid")
        svg.text(LEFT - 7, y_of(mark) + 4, f"{mark:.0e}" if axes.log else f"{mark:.4g}", anchor="end", css="tick")
    for mark in ticks(last, at_most=8):
        if first <= mark <= last:
            svg.line(x_of(mark), height - BOTTOM, x_of(mark), height - BOTTOM + 4, "axis")
            svg.text(x_of(mark), height - BOTTOM + 17, f"{mark:.4g}", anchor="middle", css="tick")
    svg.text((LEFT + width - RIGHT) / 2, height - 6, axes.x, anchor="middle", css="label")
    svg.text(15, (TOP + height - BOTTOM) / 2, axes.y, anchor="middle", css="label", turn=True)
    for name, line in lines.items():
        places = [(x_of(x), y_of(y)) for x, y in shown[name]]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dash = ";stroke-dasharray:5 4" if line.dashed else ""
        svg.raw(f'<polyline class="curve" style="stroke:{line.color}{dash}" points="{path}"/>')
        if len(places) <= MARKED_POINTS:
            svg.raw("".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{line.color}"/>' for x, y in places))
    if legend:
        _draw_legend(svg, lines)
    return svg.markup()


def _draw_legend(svg: Svg, lines: Mapping[str, Line]) -> None:
    for index, (name, line) in enumerate(lines.items()):
        y = svg.height - BOTTOM - 12 - LEGEND_ROW * (len(lines) - 1 - index)
        right = svg.width - RIGHT - 4
        dash = ";stroke-dasharray:5 4" if line.dashed else ""
        svg.raw(
            f'<path class="curve" style="stroke:{line.color}{dash}" d="M{right - 26:.1f} {y - 4:.1f}H{right:.1f}"/>'
        )
        svg.text(right - 32, y, name, anchor="end", css="tick")


def _marks(values: Sequence[float], axes: Axes) -> list[float]:
    """Return rising marks from at or below the smallest value to at or above the largest."""
    if axes.log:
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return [10.0**power for power in range(low, max(high, low + 1) + 1)]
    start = min(1.0, *values) if axes.from_one else 0.0
    spread = max(max(values) - start, 0.02)
    return [start + tick for tick in ticks(spread, at_most=5)]
