"""Lines over axes: metrics along a run, loads over layers, a sweep. One plot in a picture, or several."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from moe_rl.core.errors import require
from moe_rl.report.svg import LETTER, Svg
from moe_rl.report.units import multiples, ticks

LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 44
# Points of a longer curve would touch each other.
MARKED_POINTS = 40
SAMPLE_WIDTH = 26  # A legend shows a piece of each line.
# The texts of an axis may reach this far beyond its ends.
MARGIN = 12.0
MARKERS = {
    "circle": '<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{color}"/>',
    "square": '<rect x="{left:.1f}" y="{top:.1f}" width="6" height="6" fill="{color}"/>',
    "diamond": '<path d="M{x:.1f} {top:.1f}l3.6 3l-3.6 3l-3.6 -3z" fill="{color}"/>',
    "triangle": '<path d="M{x:.1f} {top:.1f}l3.6 6h-7.2z" fill="{color}"/>',
    "ring": '<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#fff" stroke="{color}" stroke-width="1.6"/>',
}
Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a chart."""

    points: Sequence[Point]
    """(x, y), x rising; points whose y is not finite are left out."""
    color: str
    dashed: bool = False
    marker: str | None = "circle"
    """A key of `MARKERS`; None for a line without points."""
    band: Sequence[tuple[float, float, float]] = ()
    """(x, low, high) of a band behind the line, such as all seeds of a mean."""
    answer: Point | None = None
    """A place that gets a ring: what the picture is about."""
    answer_name: str = ""
    """Words beside the ring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Names and scales of the axes."""

    x: str
    y: str
    log: bool = False
    """Powers of ten on the y axis; values that are not positive are left out."""
    from_one: bool = False
    """The y axis starts at 1 (ratios to a mean), else at 0."""
    limits: tuple[float, float] | None = None
    """Ends of the y axis, for plots side by side; by default the values decide."""
    marks: Mapping[float, str] | None = None
    """Texts at places of the x axis; by default round numbers."""
    log_x: bool = False
    """Equal ratios of x are equal distances."""

    def can_show(self, y: float) -> bool:
        """Return whether a value has a place on the y axis."""
        return math.isfinite(y) and (y > 0 or not self.log)


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Where in a picture the axes of a plot run; `inset` is left free at both ends of the x axis."""

    left: float
    top: float
    width: float
    height: float
    inset: float = 0.0


def line_chart(
    lines: Mapping[str, Line], axes: Axes, *, width: float = 460, height: float = 260, legend: bool = False
) -> Markup:
    """Draw named lines over common axes; raises `InvalidInputError` if there is nothing to draw."""
    svg = Svg(height=height, width=width, label=f"{axes.y} against {axes.x}: {', '.join(lines)}")
    plot(svg, lines, axes, Box(left=LEFT, top=TOP, width=width - LEFT - RIGHT, height=height - TOP - BOTTOM))
    svg.text((LEFT + width - RIGHT) / 2, height - 6, axes.x, anchor="middle", css="label")
    svg.text(15, (TOP + height - BOTTOM) / 2, axes.y, anchor="middle", css="label", turn=True)
    if legend:
        svg.height = svg.legend(lines, lambda name, x, y: draw_sample(svg, lines[name], x, y), top=height + 10.0)
    return svg.markup()


def plot(svg: Svg, lines: Mapping[str, Line], axes: Axes, box: Box, *, numbers: bool = True) -> None:
    """Draw lines, grid and texts of the axes; without `numbers` the plot shares the y axis of the plot to its left."""
    visible_points: dict[str, list[Point]] = {}
    places, heights = list(axes.marks or ()), []
    for name, line in lines.items():
        visible_points[name] = []
        for x, y in line.points:
            if axes.can_show(y):
                visible_points[name].append((x, y))
                places.append(x)
                heights.append(y)
    require(
        len(heights) > 0, f"there is nothing to plot: {axes.y} has no {'positive' if axes.log else 'finite'} value."
    )
    for line in lines.values():
        # A band may reach beyond every line, and must not leave the plot.
        for _, *ends in line.band:
            heights += filter(axes.can_show, ends)
    low, high, marks = _y_axis(heights, axes)
    leftmost, rightmost = min(places), max(places)
    bottom, right = box.top + box.height, box.left + box.width

    def on_x_axis(x: float) -> float:
        return math.log(x) if axes.log_x else x

    def on_y_axis(y: float) -> float:
        return math.log10(y) if axes.log else y

    def x_of(x: float) -> float:
        start, end, value = on_x_axis(leftmost), on_x_axis(rightmost), on_x_axis(x)
        # A single x stands in the middle.
        share = 0.5
        if end > start:
            share = (value - start) / (end - start)
        return box.left + box.inset + (box.width - 2 * box.inset) * share

    def y_of(y: float) -> float:
        start, end, value = on_y_axis(low), on_y_axis(high), on_y_axis(y)
        return box.top + box.height * (1.0 - (value - start) / (end - start))

    # All marks with as many decimals as the longest needs: 1.0, 1.25, 1.5 -> 1.00, 1.25, 1.50.
    decimals = max(len(f"{mark:.4g}".partition(".")[2]) for mark in marks)
    for mark in marks:
        svg.line(box.left, y_of(mark), right, y_of(mark), "axis" if y_of(mark) == bottom else "grid")
        if numbers:
            if axes.log:
                text = f"{mark:.0e}"
            else:
                text = f"{mark:.{decimals}f}"
            svg.text(box.left - 7, y_of(mark) + 4, text, anchor="end", css="tick")
    if marks[0] > low:
        svg.line(box.left, bottom, right, bottom, "axis")
    row_ends = [-math.inf, -math.inf]
    for mark, text in (_round_marks(leftmost, rightmost) if axes.marks is None else axes.marks).items():
        x, half = x_of(mark), LETTER * len(text) / 2
        svg.line(x, bottom, x, bottom + 4, "axis")
        # Long words at an end of the axis keep out of the plot beside it; a text that would overlap goes a row lower.
        center = max(min(x, right + MARGIN - half), box.left - MARGIN + half)
        for row, row_end in enumerate(row_ends):
            if center - half > row_end:
                svg.text(center, bottom + 17 + 13 * row, text, anchor="middle", css="tick")
                row_ends[row] = center + half
                break
    for line in lines.values():
        lower_edge, upper_edge = [], []
        for x, start, end in line.band:
            if axes.can_show(end):
                lower_edge.append((x_of(x), y_of(max(start, low))))
                upper_edge.append((x_of(x), y_of(end)))
        if lower_edge:
            corners = _path([*lower_edge, *reversed(upper_edge)])
            svg.raw(f'<polygon fill="{line.color}" fill-opacity="0.18" points="{corners}"/>')
    for name, line in lines.items():
        _draw_line(svg, line, [(x_of(x), y_of(y)) for x, y in visible_points[name]])
    for line in lines.values():
        if line.answer is not None:
            _draw_answer(svg, x_of(line.answer[0]), y_of(line.answer[1]), line.answer_name, box)


def _round_marks(leftmost: float, rightmost: float) -> dict[float, str]:
    """Return the texts of the x axis at round numbers."""
    texts = {}
    for mark in ticks(rightmost, at_most=8):
        if leftmost <= mark <= rightmost:
            texts[mark] = f"{mark:.4g}"
    return texts


def _draw_answer(svg: Svg, x: float, y: float, name: str, box: Box) -> None:
    """Draw a ring with its name on the side that has more room, below the ring so that no line runs through it."""
    svg.raw(f'<circle class="answer" cx="{x:.1f}" cy="{y:.1f}" r="7"/>')
    place, anchor = x + 12, "start"
    if x > box.left + box.width / 2:
        place, anchor = x - 12, "end"
    # The halo is a text of its own: what turns a picture into PNG or PDF does not know `paint-order`, and hid the name.
    for css in ("halo", "answer-name"):
        svg.text(place, y + 22, name, anchor=anchor, css=css)


def draw_sample(svg: Svg, line: Line, x: float, y: float) -> None:
    """Draw a line's sample for a legend, from `x` `SAMPLE_WIDTH` to the right."""
    _draw_line(svg, line, [(x, y), (x + SAMPLE_WIDTH, y)], marked=[(x + SAMPLE_WIDTH / 2, y)])


def _draw_line(svg: Svg, line: Line, places: Sequence[Point], marked: Sequence[Point] | None = None) -> None:
    dash = ";stroke-dasharray:5 4" if line.dashed else ""
    svg.raw(f'<polyline class="curve" style="stroke:{line.color}{dash}" points="{_path(places)}"/>')
    if line.marker is not None and len(places) <= MARKED_POINTS:
        shape = MARKERS[line.marker]
        for x, y in places if marked is None else marked:
            svg.raw(shape.format(x=x, y=y, left=x - 3, top=y - 3, color=line.color))


def _path(places: Iterable[Point]) -> str:
    """Return places as SVG writes them: "1.0,2.5 3.0,4.0"."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _y_axis(values: Sequence[float], axes: Axes) -> tuple[float, float, list[float]]:
    """Return both ends of the y axis and the rising marks on it."""
    if axes.log and axes.limits is not None:
        values = axes.limits
    elif axes.limits is not None:
        low, high = axes.limits
        step = ticks(high - low, at_most=7)[1]
        return low, high, multiples(step, range(math.ceil(low / step), math.floor(high / step) + 1))
    if axes.log:
        start, end = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        marks = [10.0**power for power in range(start, max(end, start + 1) + 1)]
    else:
        start_at = 0.0
        if axes.from_one:
            start_at = min(1.0, *values)
        marks = [start_at + tick for tick in ticks(max(max(values) - start_at, 0.02), at_most=5)]
    return marks[0], marks[-1], marks
