"""The picture of a sweep: a row of plots per swept parameter, a line per policy."""

import itertools
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.mappings import without
from moe_rl.report.colors import policy_colors
from moe_rl.report.curves import MARKERS, Axes, Box, Line, draw_sample, plot
from moe_rl.report.svg import LETTER, WIDTH, Svg, standalone
from moe_rl.report.sweep import METRICS, SweepData, SweptPoint, Value, axis_name, describe, text_of
from moe_rl.report.units import sequences_of
from moe_rl.version import install_line

PNG_SCALE = 2.0  # Pixels per unit of the drawing: text stays sharp on a screen of high density.
MAX_PANELS = 4  # More panels of 210 units in a row would not fit a page.
# 8, 16, 32 are a ratio of 4: from there on an axis is logarithmic.
LOGARITHMIC_FROM = 4.0
MIN_PANEL, PANEL_HEIGHT = 210.0, 200.0
LEFT, RIGHT, GAP, INSET, LINE = 64.0, 16.0, 16.0, 22.0, 16.0
# Two rows of values and the name of the axis stand below a plot.
BELOW = 60.0
# A longer value at an axis or in a title leaves the panels no room.
LABEL_LETTERS = 20
# This gray is seen on white and on black.
FORCED_BALANCE = "#777f88"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """The points along one parameter, the others fixed."""

    parameter: str
    fixed: Mapping[str, Value]
    points: Sequence[SweptPoint]

    @property
    def title(self) -> str:
        """The other parameters and their values."""
        return describe(self.fixed, _label)


def draw_sweep(sweep: SweepData, kind: str = "svg") -> bytes:
    """Return the picture as svg, png or pdf; the last two need the extra `plot`. The same sweep gives the same SVG."""
    drawing = standalone(sweep_panels(sweep)).encode()
    if kind == "svg":
        return drawing
    return _renderer(kind)(drawing)


def check_picture(kind: str) -> None:
    """Raise with what is missing where a picture of this kind cannot be made here."""
    if kind in ("png", "pdf"):
        _renderer(kind)


def _renderer(kind: str) -> Callable[[bytes], bytes]:
    try:
        import cairosvg
    except (ImportError, OSError) as error:  # OSError: the package is there, the system library cairo is not
        raise InvalidInputError(
            f"a .{kind} file needs CairoSVG ({install_line('plot')}) and the system library cairo; a .svg file does "
            f"not. The import failed: {error}."
        ) from error
    if kind == "png":
        convert = cairosvg.svg2png
    else:
        convert = cairosvg.svg2pdf
    return lambda drawing: bytes(convert(bytestring=drawing, scale=PNG_SCALE if kind == "png" else 1.0))


def sweep_panels(sweep: SweepData, width: float = WIDTH) -> Markup:
    """Return the drawing, at least so wide, for a page that has a style sheet; the best point of all has a ring."""
    rows = []
    for name, values in sweep.values.items():
        if len(values) > 1:
            rows.append(_panels(sweep, name))
    if not rows:
        # A sweep of one point is drawn as well.
        rows.append(_panels(sweep, next(iter(sweep.values))))
    count = max(map(len, rows))
    width = max(float(width), LEFT + RIGHT + count * MIN_PANEL + (count - 1) * GAP)
    drawn = max(map(_num_points, rows))
    head: list[str] = []
    for text in _title(sweep, drawn=drawn):
        head += textwrap.wrap(text, int((width - 24) / LETTER))
    svg = Svg(width=width, height=0.0, label=f"{METRICS[sweep.metric]}: {sweep.what}")
    for index, text in enumerate(head):
        svg.text(12, 20 + LINE * index, text, css="title" if index == 0 else "label")
    top, legend = 20 + LINE * len(head), dict[str, Line]()
    for row in rows:
        top = _draw_row(svg, sweep, row, top, legend)
    yardsticks_last = sorted(legend, key=lambda name: legend[name].marker is None)
    svg.height = svg.legend(yardsticks_last, lambda name, x, y: draw_sample(svg, legend[name], x, y), top=top)
    return svg.markup()


def _num_points(row: Sequence[_Panel]) -> int:
    return sum(len(panel.points) for panel in row)


def _draw_row(svg: Svg, sweep: SweepData, row: Sequence[_Panel], top: float, legend: dict[str, Line]) -> float:
    """Draw the panels of one parameter from `top` on, add their lines to `legend`, and return where they end."""
    width = (svg.width - LEFT - RIGHT - GAP * (len(row) - 1)) / len(row)
    titles = [textwrap.wrap(panel.title, int(width / LETTER)) for panel in row]
    top += LINE * max(map(len, titles)) + 14
    named = axis_name(row[0].parameter)
    for index, (panel, title) in enumerate(zip(row, titles, strict=True)):
        box = Box(left=LEFT + index * (width + GAP), top=top, width=width, height=PANEL_HEIGHT, inset=INSET)
        for line, text in enumerate(reversed(title)):
            svg.text(box.left + width / 2, top - 8 - LINE * line, text, anchor="middle")
        lines, axes = _lines(sweep, panel, named, letters=int(2 * width / LETTER / len(panel.points)))
        plot(svg, lines, axes, box, numbers=index == 0)
        legend.update(without(lines, legend))
    ratio = ""
    if sweep.metric == "speedup_vs_static":
        ratio = " (×)"
    svg.text(16, top + PANEL_HEIGHT / 2, METRICS[sweep.metric] + ratio, anchor="middle", css="label", turn=True)
    bottom = top + PANEL_HEIGHT + BELOW
    svg.text((LEFT + svg.width - RIGHT) / 2, bottom - 12, named, anchor="middle", css="label")
    return bottom


class _SweptAxis:
    """The x axis of a panel: where its points stand, and the words below them."""

    def __init__(self, panel: _Panel) -> None:
        self.values = [point.point[panel.parameter] for point in panel.points]
        self.places = []
        for value in self.values:
            if isinstance(value, int | float) and not isinstance(value, bool):
                self.places.append(float(value))
        self.is_ordered = len(self.places) == len(self.values)
        if not self.is_ordered:
            # Words, or words among numbers, stand side by side.
            self.places = list(map(float, range(len(self.values))))

    @property
    def is_logarithmic(self) -> bool:
        """Whether equal ratios are equal distances."""
        return self.is_ordered and min(self.places) > 0 and max(self.places) >= LOGARITHMIC_FROM * min(self.places)

    def marks(self, letters: int) -> dict[float, str]:
        """Return the word at every place, in at most so many letters."""
        letters = min(letters, LABEL_LETTERS)
        return {place: _label(value, letters) for place, value in zip(self.places, self.values, strict=True)}


def _lines(sweep: SweepData, panel: _Panel, named: str, *, letters: int) -> tuple[dict[str, Line], Axes]:
    """Return the lines of a panel and its axes; words at the x axis have at most so many letters."""
    axis = _SweptAxis(panel)
    colors, markers = policy_colors(sweep.policies), list(MARKERS)
    lines = {}
    if sweep.metric == "speedup_vs_static":
        ends = [(place, 1.0) for place in axis.places]
        lines["static"] = Line(points=ends, color=policy_colors(["static"])["static"], marker=None)
    balanced = _forced_balance(panel.points)
    if len(balanced) == len(axis.places):
        points = list(zip(axis.places, balanced, strict=True))
        lines["forced balance"] = Line(points=points, color=FORCED_BALANCE, dashed=True, marker=None)
    best = sweep.answer
    for index, name in enumerate(sweep.policies):
        ring, ring_name, curve = None, "", []
        for place, point in zip(axis.places, panel.points, strict=True):
            if name in point.policies:
                curve.append((place, point.policies[name]))
            if name == best.policy and point == best.point:
                ring, ring_name = (place, best.value), _figure(sweep, best.value)
        lines[name] = Line(
            points=curve,
            color=colors[name],
            dashed=not axis.is_ordered,  # a line between words means nothing
            marker=markers[index % len(markers)],
            answer=ring,
            answer_name=ring_name,
        )
    marks = axis.marks(letters)
    return lines, Axes(x=named, y=METRICS[sweep.metric], limits=_limits(sweep), marks=marks, log_x=axis.is_logarithmic)


def _figure(sweep: SweepData, value: float) -> str:
    """Return the metric's value for people."""
    if sweep.metric == "speedup_vs_static":
        return f"{value:.2f}x"
    return f"{value:.2f} times the mean"


def _panels(sweep: SweepData, parameter: str) -> list[_Panel]:
    """Return a panel for every setting of the other parameters.

    Where those are too many, only the first of the others varies, and the rest stay at their first values.
    """
    other_parameters = without(sweep.values, [parameter])
    if math.prod(map(len, other_parameters.values())) > MAX_PANELS:
        longest = next(name for name, values in other_parameters.items() if len(values) > 1)
        for name, values in other_parameters.items():
            other_parameters[name] = _spread(values) if name == longest else values[:1]
    panels = []
    for combination in itertools.product(*other_parameters.values()):
        fixed = dict(zip(other_parameters, combination, strict=True))
        points = [point for point in sweep.points if fixed.items() <= point.point.items()]
        panels.append(_Panel(parameter=parameter, fixed=fixed, points=points))
    return panels


def _spread(values: tuple[Value, ...]) -> tuple[Value, ...]:
    """Return at most `MAX_PANELS` of the values, evenly spread, both ends among them."""
    count = min(MAX_PANELS, len(values))
    distance = (len(values) - 1) / max(1, count - 1)
    return tuple(values[round(index * distance)] for index in range(count))


def _label(value: Value, letters: int = LABEL_LETTERS) -> str:
    """Return a value in at most so many letters, but at least five."""
    text, room = text_of(value), max(letters, 5)
    # The end of a path says most.
    if len(text) <= room:
        return text
    return "..." + text[3 - room :]


def _forced_balance(points: Sequence[SweptPoint]) -> list[float]:
    """Return the metric under forced balance of the points that have it."""
    return [point.yardsticks["forced_balance"] for point in points if "forced_balance" in point.yardsticks]


def _limits(sweep: SweepData) -> tuple[float, float]:
    values = _forced_balance(sweep.points)
    for point in sweep.points:
        values += point.policies.values()
    low, high = min(1.0, *values), max(1.02, *values)
    # Markers reach 3 units beyond their point: 6 % of a panel of 200 keeps them inside.
    room = 0.06 * (high - low)
    return low - room, high + room


def _title(sweep: SweepData, *, drawn: int) -> list[str]:
    """Return what was simulated and the conditions that hold for all panels; `drawn` points are in the fullest row."""
    setting = sweep.setting
    slots = setting.get("slots")
    sentences = {
        "ep_size": f"EP{setting.get('ep_size')}",
        "tokens_per_rank": f"{float(str(setting.get('tokens_per_rank') or 0)):,.0f} tokens per rank and micro-batch",
        "sequence_length": sequences_of(setting),
        "dispatcher": f"dispatcher {setting.get('dispatcher')}",
        "slots": f"{slots} replica slot{'' if slots == 1 else 's'} per rank",
    }
    conditions = []
    for name, sentence in sentences.items():
        if name in setting:
            conditions.append(sentence)
    simulated = "Simulated from recorded loads"
    if setting.get("scaled"):
        simulated = "Simulated from recorded loads, scaled"
    if drawn < len(sweep.points):
        left_out = [f"a row shows at most {drawn} of {len(sweep.points)} points"]
    else:
        left_out = []
    return [sweep.what, "; ".join([simulated, *conditions, *left_out])]
