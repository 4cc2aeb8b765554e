"""Stacked bars, one per policy: parts of the time, parts of the memory, and reasons for the imbalance that is left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from moe_rl.core.mappings import in_units, subset
from moe_rl.core.metrics import StepPrediction
from moe_rl.report.colors import part_color
from moe_rl.report.simulation import LoadBounds
from moe_rl.report.svg import WIDTH, Svg
from moe_rl.report.units import GIB, decimals, ticks, time_unit
from moe_rl.simulators.memory import MemoryForecast
from moe_rl.simulators.rl_step import TRAINING_PARTS, RlStep

LEFT, RIGHT, BAR, GAP, APART, TOP, BOTTOM = 118, 66, 24, 9, 12, 6, 44
# A limit farther than twice the longest bar is named, not drawn: bars keep at least half of the width.
FAR = 2.0
# Some bars end with words such as "81.3 does not fit".
WORDS_RIGHT = 128
# Time that overlap hides is hatched.
HATCH = (
    '<defs><pattern id="hid" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="hatch" width="6" height="6"/><line class="axis" x1="0" y1="0" x2="0" y2="6"/></pattern></defs>'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar: its parts in the chart's unit, negative ones drawn hatched over the end of the rest."""

    name: str
    parts: Mapping[str, float]
    end: str
    """Text behind the bar."""
    alarm: bool = False
    """True marks the text behind the bar."""
    yardstick: bool = False
    """True sets the bar apart from those of policies."""

    @property
    def length(self) -> float:
        """Where it ends, before negative parts are laid over its end."""
        return _length(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A line across all bars."""

    at: float
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """Bars and their drawing, for a page that writes the legend itself."""

    bars: Sequence[Bar]
    drawing: Markup

    @property
    def legend(self) -> dict[str, str]:
        """Color by the name of every part that some bar shows, in the order in which they appear."""
        return _legend(self.bars)

    @property
    def has_hidden_time(self) -> bool:
        """Whether some bar has a hatched part."""
        return any(min(bar.parts.values(), default=0.0) < 0.0 for bar in self.bars)


def _legend(bars: Sequence[Bar]) -> dict[str, str]:
    colors = {}
    for bar in bars:
        for part, value in bar.parts.items():
            if value > 0:
                colors[part_name(part)] = part_color(part)
    return colors


def time_bars(predictions: Sequence[StepPrediction], *, num_policies: int) -> BarChart:
    """Draw `breakdown_s` of every prediction; those after `num_policies` are yardsticks.

    Parts that are negative (time that overlap hides) are hatched over the end of the bar.
    """
    breakdowns = [prediction.breakdown_s or {} for prediction in predictions]
    unit, size = time_unit([max(map(_length, breakdowns))])
    totals = [sum(breakdown.values()) for breakdown in breakdowns]
    places = decimals(max(totals) / size, 3)
    bars = []
    for index, (prediction, breakdown, total) in enumerate(zip(predictions, breakdowns, totals, strict=True)):
        parts, end = in_units(breakdown, size), f"{total / size:.{places}f}"
        bars.append(Bar(name=prediction.policy, parts=parts, end=end, yardstick=index >= num_policies))
    label = "Where the time of a step goes, one bar per policy"
    return BarChart(bars=bars, drawing=stacked(bars, label=label, axis="time of a step", unit=unit))


def memory_bars(memory: Mapping[str, MemoryForecast], *, num_policies: int) -> BarChart:
    """Draw the peak of every policy's fullest rank against the GPU's memory."""
    bars = []
    for index, (name, forecast) in enumerate(memory.items()):
        peak = f"{forecast.peak_bytes / GIB:.1f}"
        if not forecast.fits:
            peak += " does not fit"
        parts = in_units(forecast.parts_bytes, GIB)
        bars.append(Bar(name=name, parts=parts, end=peak, alarm=not forecast.fits, yardstick=index >= num_policies))
    hbm = max(forecast.hbm_bytes for forecast in memory.values()) / GIB
    drawing = stacked(
        bars,
        label="Peak memory of the fullest rank, one bar per policy",
        axis="peak memory of the fullest rank",
        unit="GiB",
        limit=Limit(at=hbm, name=f"{hbm:.1f} GiB of the GPU"),
    )
    return BarChart(bars=bars, drawing=drawing)


def excess_bars(predictions: Sequence[StepPrediction], bounds: Mapping[str, LoadBounds]) -> BarChart:
    """Draw the load of every policy's busiest rank above the mean, split by the bound that explains it."""
    bars = []
    for prediction in predictions:
        excess = bounds[prediction.policy].excess(prediction)
        end = f"{100.0 * (prediction.imbalance - 1.0):.1f}"
        bars.append(Bar(name=prediction.policy, parts=in_units(excess, 0.01), end=end))
    drawing = stacked(
        bars,
        label="Load of the busiest rank above the mean, split by cause",
        axis="load of the busiest rank above the mean",
        unit="%",
    )
    return BarChart(bars=bars, drawing=drawing)


def rl_bars(steps: Mapping[str, RlStep], width: float = WIDTH) -> Markup:
    """Draw who works when in a step of RL: a bar per policy, and one of the trainer's GPUs where they are apart."""
    step_times_s = [step.step_time_s for step in steps.values()]
    unit, size = time_unit(step_times_s)
    places = decimals(max(step_times_s) / size, 3)
    bars = []
    for name, step in steps.items():
        lanes = {name: dict(step.parts_s)}
        if step.beside:
            # Whoever is done first waits for the other, and both for the new weights.
            sync = step.parts_s["weight_sync"]
            lanes = {}
            for who, parts in {name: ("rollout", "reward"), "its trainer": TRAINING_PARTS}.items():
                busy = subset(step.parts_s, parts)
                idle_s = step.step_time_s - sync - sum(busy.values())
                lanes[who] = {**busy, "idle": idle_s, "weight_sync": sync}
        end = f"{step.step_time_s / size:.{places}f}"
        for who, lane in lanes.items():
            bars.append(Bar(name=who, parts=in_units(lane, size), end=end))
    return stacked(
        bars, label="Who works when in a step of RL", axis="one step of RL", unit=unit, legend=True, width=width
    )


def _length(parts: Mapping[str, float]) -> float:
    return sum(value for value in parts.values() if value > 0.0)


def part_name(part: str) -> str:
    """Return the words for a part of a bar."""
    words = {"all_to_all": "all-to-all", "expert_gemm": "expert GEMM", "split": "split of tokens"}
    return words.get(part, part.replace("_", " "))


def stacked(
    bars: Sequence[Bar],
    *,
    label: str,
    axis: str,
    unit: str,
    limit: Limit | None = None,
    right: int = RIGHT,
    legend: bool = False,
    width: float = WIDTH,
) -> Markup:
    """Draw the bars over a common axis; `right` is the room behind them. A page writes the legend itself."""
    above = TOP + 16 * (limit is not None)
    # One gap sets the yardsticks apart; bars of yardsticks alone need none.
    num_apart = len({bar.yardstick for bar in bars}) == 2
    height = above + len(bars) * (BAR + GAP) + APART * num_apart + BOTTOM
    svg = Svg(height=height, label=label, width=width)
    longest = max(bar.length for bar in bars)
    # 80 GiB beside bars of 20 would squeeze them into a quarter of the width.
    beyond = limit is not None and limit.at > FAR * longest > 0.0
    reach = max(longest, limit.at if limit and not beyond else 0.0, 1e-12)
    if any(bar.alarm for bar in bars):
        right = WORDS_RIGHT
    scale = (width - LEFT - right) / reach
    if limit and not beyond:
        line = LEFT + limit.at * scale
    else:
        line = -1.0
    for mark in ticks(reach, at_most=6):
        # Ticks go on to the first one beyond the longest bar.
        if mark <= reach * 1.001:
            x = LEFT + mark * scale
            svg.line(x, above - 4, x, height - BOTTOM, "grid")
            svg.text(x, height - BOTTOM + 16, f"{mark:.4g}", anchor="middle", css="tick")
    svg.text((LEFT + width - right) / 2, height - 6, f"{axis} ({unit})", anchor="middle", css="label")
    svg.raw(HATCH)
    for index, bar in enumerate(bars):
        y = above + index * (BAR + GAP) + APART * (num_apart and bar.yardstick)
        svg.text(LEFT - 8, y + BAR / 2 + 4, bar.name, anchor="end", css="tick" if bar.yardstick else "name")
        end = _draw(svg, bar, y=float(y), scale=scale, unit=unit)
        x = end + 6
        if end <= line < end + 42:  # the line would cross the text
            x = line + 6
        svg.text(x, y + BAR / 2 + 4, bar.end, css="alarm" if bar.alarm else "tick")
    if limit is not None and beyond:
        svg.text(
            width - right,
            above - 9,
            f"{limit.name}: far to the right \N{RIGHTWARDS ARROW}",
            anchor="end",
            css="limit-name",
        )
    elif limit is not None:
        anchor = "start"
        if line > width / 2:
            anchor = "end"
        svg.line(line, above - 6, line, height - BOTTOM, "limit")
        svg.text(line, above - 9, limit.name, anchor=anchor, css="limit-name")
    if legend:
        colors = _legend(bars)

        def sample(name: str, x: float, y: float) -> None:
            svg.raw(f'<rect x="{x + 10:.1f}" y="{y - 5:.1f}" width="12" height="12" fill="{colors[name]}"/>')

        svg.height = svg.legend(colors, sample, top=height + 12.0)
    return svg.markup()


def _draw(svg: Svg, bar: Bar, *, y: float, scale: float, unit: str) -> float:
    """Draw the parts of a bar and return where it ends."""
    x = furthest = float(LEFT)
    for part, value in sorted(bar.parts.items(), key=lambda item: item[1] < 0):  # hidden time lies over the rest
        width = abs(value) * scale
        if not width:
            continue
        start, fill = x, part_color(part)
        if value < 0:
            start, fill = x - width, "url(#hid)"
        tip = f"{bar.name}: {part_name(part)} {value:.4g} {unit}"
        svg.raw(
            f'<rect x="{start:.2f}" y="{y:.1f}" width="{width:.2f}" height="{BAR}" fill="{fill}">'
            f"<title>{escape(tip)}</title></rect>"
        )
        x += value * scale
        furthest = max(furthest, x)
    return furthest
