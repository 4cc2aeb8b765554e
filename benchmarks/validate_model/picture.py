"""Forecast against measured throughput of published runs: a vendor's as tuned, other users' as typical software."""

from collections.abc import Sequence
from math import log

from markupsafe import Markup

from benchmarks.validate_model.compare import PUBLISHED
from benchmarks.validate_model.forecasts import user_runs, vendor_runs
from moe_rl.config import load_software
from moe_rl.core.software import TUNED, TYPICAL, SoftwareCosts
from moe_rl.report.svg import Svg
from moe_rl.simulators.whole_runs import WholeRun

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 460, 70, 52, 52
COLORS = {TUNED: "#2f6fd0", TYPICAL: "#d9730d"}
MARKS = (500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
FIRST, LAST = 400.0, 60_000.0
SAMPLE = (
    '<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" fill-opacity=".75" stroke="{color}" stroke-width="1.4"/>'
)

# (measured, forecast) tokens/s of a GPU.
Points = Sequence[tuple[float, float]]


def forecast_picture() -> Markup:
    """Return the scatter of forecast against measured, each kind of software in its color."""
    vendor, users = vendor_runs(PUBLISHED), [run for run, _ in user_runs(PUBLISHED)]
    kinds = {
        f"a vendor's own benchmarks, as tuned ({len(vendor)})": (_points(vendor, TUNED), TUNED, True),
        f"other people's runs, as typical ({len(users)})": (_points(users, TYPICAL), TYPICAL, True),
        "the same runs, as tuned": (_points(users, TUNED), TUNED, False),
    }
    svg = Svg(height=HEIGHT, width=WIDTH, label="Forecast against measured tokens/s of a GPU, published runs")
    _axes(svg)
    for row, (name, (points, software, filled)) in enumerate(kinds.items()):
        color = COLORS[software]
        fill = color if filled else "none"
        svg.raw("".join(SAMPLE.format(x=_x(was), y=_y(said), color=color, fill=fill) for was, said in points))
        svg.raw(SAMPLE.format(x=LEFT + 14, y=TOP + 14 + 18 * row, color=color, fill=fill))
        svg.text(LEFT + 26, TOP + 18 + 18 * row, name)
    return svg.markup()


def _points(runs: Sequence[WholeRun], software: str) -> Points:
    costs: SoftwareCosts = load_software(software).costs
    return [(run.tokens_per_s, run.predicted(software=costs).tokens_per_s_per_gpu) for run in runs]


def _axes(svg: Svg) -> None:
    svg.text(LEFT, 22, "Forecast against measured tokens/s of a GPU: published runs", css="title")
    svg.text(LEFT, 40, "above the line: forecast too fast", css="label")
    for mark in MARKS:
        svg.line(_x(mark), _y(FIRST), _x(mark), _y(LAST))
        svg.line(_x(FIRST), _y(mark), _x(LAST), _y(mark))
        svg.text(_x(mark), HEIGHT - BOTTOM + 18, f"{mark:,}", anchor="middle", css="tick")
        svg.text(LEFT - 8, _y(mark) + 4, f"{mark:,}", anchor="end", css="tick")
    svg.line(_x(FIRST), _y(FIRST), _x(LAST), _y(LAST), "axis")
    svg.text((LEFT + WIDTH) / 2, HEIGHT - 10, "measured", anchor="middle", css="label")
    svg.text(14, (TOP + HEIGHT - BOTTOM) / 2, "forecast", anchor="middle", css="label", turn=True)


def _share(value: float) -> float:
    return (log(value) - log(FIRST)) / (log(LAST) - log(FIRST))


def _x(measured: float) -> float:
    return LEFT + (WIDTH - 20 - LEFT) * _share(measured)


def _y(forecast: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * _share(forecast)
