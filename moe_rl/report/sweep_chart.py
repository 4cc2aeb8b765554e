"""The picture of a sweep: a row of panels per swept parameter, a line per policy. Loads matplotlib when called."""

import io
import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_rl.report.colors import policy_colors
from moe_rl.report.sweep import METRICS, Sweep, SweptPoint, Value, short_name, text_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXES = {
    "expert_model_parallel_size": "expert-parallel size (ranks)",
    "tensor_model_parallel_size": "tensor-parallel size (ranks)",
    "context_parallel_size": "context-parallel size (ranks)",
    "pipeline_model_parallel_size": "pipeline stages",
    "num_ep_groups": "EP groups side by side",
    "ranks_per_node": "ranks per node",
    "tokens_per_rank": "tokens per rank and micro-batch",
    "micro_batch_tokens": "token budget of a micro-batch (tokens per DP rank)",
    "ep_group_tokens": "token budget of a micro-batch (tokens per EP group)",
    "seq_length": "sequence length (tokens)",
    "replica_slots": "replica slots (experts per rank, from its node)",
    "cross_node_slots": "replica slots (experts per rank, from other nodes)",
    "log_prob_passes": "log-probability passes beside the update",
    "moe_token_dispatcher_type": "token dispatcher",
    "moe_flex_dispatcher_backend": "backend of the flex dispatcher",
    "recompute_granularity": "recomputation",
    "fp8_format": "FP8 format",
    "overlap_moe_expert_parallel_comm": "all-to-all of one micro-batch beside computation of another",
}
"""Axis labels with units."""
MAX_PANELS = 4
"""Settings of the other parameters that a row shows."""
MARKERS = "osD^vPX*"
LOGARITHMIC_FROM = 4.0
"""Largest over smallest value from which an axis is logarithmic."""
PANEL_SIZE = (3.4, 2.75)
"""Inches."""
MIN_WIDTH = 6.8
LETTERS_PER_INCH = 13.5
"""Of titles."""
LABEL_LETTERS = 20
"""Of a value at an axis or in a title: a longer one leaves the panels no room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """The points along one parameter, the others held."""

    parameter: str
    held: Mapping[str, Value]
    points: Sequence[SweptPoint]


def draw_sweep(sweep: Sweep, kind: str) -> bytes:
    """Return the picture as `kind`: png, svg or pdf. The same sweep gives the same bytes."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [_panels(sweep, name) for name, values in sweep.values.items() if len(values) > 1]
    rows = rows or [_panels(sweep, next(iter(sweep.values)))]
    width = max(MIN_WIDTH, 0.9 + PANEL_SIZE[0] * max(map(len, rows)))
    figure = Figure(figsize=(width, 1.35 + (PANEL_SIZE[1] + 0.45) * len(rows)), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    style = {"font.size": 9.0, "svg.hashsalt": "moe_rl", "axes.titlesize": 9.0, "axes.labelsize": 9.0}
    with matplotlib.rc_context(style):
        _fill(figure, sweep, rows)
        content = io.BytesIO()
        undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
        figure.savefig(content, format=kind, metadata=undated, facecolor="white")
    return content.getvalue()


def _panels(sweep: Sweep, parameter: str) -> list[_Panel]:
    """Return a panel for every setting of the other parameters.

    Where those are too many, only the first of the others varies, and the rest stay at their first values.
    """
    others = {name: values for name, values in sweep.values.items() if name != parameter}
    if _settings(others) > MAX_PANELS:
        first = next(name for name, values in others.items() if len(values) > 1)
        others = {name: _spread(values) if name == first else values[:1] for name, values in others.items()}
    held = [dict(zip(others, combination, strict=True)) for combination in itertools.product(*others.values())]
    return [
        _Panel(
            parameter=parameter,
            held=fixed,
            points=[p for p in sweep.points if all(p.point[name] == value for name, value in fixed.items())],
        )
        for fixed in held
    ]


def _settings(values: Mapping[str, tuple[Value, ...]]) -> int:
    return math.prod(map(len, values.values()))


def _spread(values: tuple[Value, ...]) -> tuple[Value, ...]:
    """Return at most `MAX_PANELS` of the values, evenly spread, both ends among them."""
    count = min(MAX_PANELS, len(values))
    return tuple(values[index] for index in np.linspace(0, len(values) - 1, count).round().astype(int))


def _fill(figure: "Figure", sweep: Sweep, rows: Sequence[Sequence[_Panel]]) -> None:
    colors = policy_colors(sweep.policies)
    low, high = _limits(sweep)
    parts: Any = figure.subfigures(len(rows), 1, squeeze=False)[:, 0]
    handles: dict[str, Any] = {}
    for part, panels in zip(parts, rows, strict=True):
        axes = part.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for index, (ax, panel) in enumerate(zip(axes, panels, strict=True)):
            handles |= _draw_panel(ax, sweep, panel, colors)
            ax.set_ylim(low, high)
            if index == 0:
                ax.set_ylabel(METRICS[sweep.metric] + (" (×)" if sweep.metric == "speedup_vs_static" else ""))
            else:
                ax.tick_params(axis="y", length=0)
        part.supxlabel(AXES.get(panels[0].parameter, short_name(panels[0].parameter)), fontsize=9)
    drawn = max(sum(len(panel.points) for panel in row) for row in rows)
    room = int(LETTERS_PER_INCH * figure.get_figwidth())
    title = [textwrap.fill(line, room) for line in _title(sweep, drawn=drawn)]
    figure.suptitle("\n".join(title), fontsize=9.5, x=0.01, ha="left")
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), 7), frameon=False
    )


def _draw_panel(ax: "Axes", sweep: Sweep, panel: _Panel, colors: Mapping[str, str]) -> dict[str, Any]:
    """Draw one panel and return its legend."""
    values = [point.point[panel.parameter] for point in panel.points]
    places = _scale(ax, values)
    handles = {}
    for index, name in enumerate(sweep.policies):
        known = [(x, p.policies[name]) for x, p in zip(places, panel.points, strict=True) if name in p.policies]
        (handles[name],) = ax.plot(
            [x for x, _ in known],
            [y for _, y in known],
            color=colors[name],
            marker=MARKERS[index % len(MARKERS)],
            markersize=4.5,
            linewidth=1.6,
            linestyle="-" if _ordered(values) else ":",
        )
    balanced = [point.yardsticks["forced_balance"] for point in panel.points if "forced_balance" in point.yardsticks]
    if len(balanced) == len(places):
        (handles["forced balance"],) = ax.plot(places, balanced, color="#333333", linewidth=1.0, linestyle="--")
    if sweep.metric == "speedup_vs_static":
        handles["static"] = ax.axhline(1.0, color=policy_colors(["static"])["static"], linewidth=1.0)
    held = ", ".join(f"{short_name(name)} {_label(value)}" for name, value in panel.held.items())
    ax.set_title(textwrap.fill(held, int(LETTERS_PER_INCH * PANEL_SIZE[0])))
    ax.grid(axis="y", color="#e3e6ea", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    return handles


def _scale(ax: "Axes", values: Sequence[Value]) -> list[float]:
    """Label the horizontal axis with the swept values and return their places on it."""
    if not _ordered(values):
        ax.set_xticks(range(len(values)), [_label(value) for value in values])
        ax.set_xlim(-0.5, len(values) - 0.5)
        return [float(index) for index in range(len(values))]
    places = [float(value) for value in values]  # type: ignore[arg-type]  # _ordered: numbers only
    if min(places) > 0 and max(places) >= LOGARITHMIC_FROM * min(places):
        ax.set_xscale("log", base=2)
    ax.set_xticks(places, [_label(value) for value in values])
    ax.minorticks_off()
    ax.margins(x=0.08)
    return places


def _label(value: Value) -> str:
    """Return a value in at most `LABEL_LETTERS`: the end of a path says most."""
    text = text_of(value)
    return text if len(text) <= LABEL_LETTERS else "..." + text[3 - LABEL_LETTERS :]


def _ordered(values: Sequence[Value]) -> bool:
    """True for numbers: a line between them means something."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _limits(sweep: Sweep) -> tuple[float, float]:
    shown = [
        value
        for point in sweep.points
        for values in (point.policies, {n: v for n, v in point.yardsticks.items() if n == "forced_balance"})
        for value in values.values()
    ]
    low, high = min(1.0, *shown), max(1.02, *shown)
    room = 0.06 * (high - low)
    return low - room, high + room


def _title(sweep: Sweep, *, drawn: int) -> list[str]:
    """Return what was simulated and the conditions that hold for all panels; `drawn` points are in the fullest row."""
    setting = sweep.setting
    slots = setting.get("slots")
    sentences = {
        "ep_size": f"EP{setting.get('ep_size')}",
        "tokens_per_rank": f"{_number(setting.get('tokens_per_rank'))} tokens per rank and micro-batch",
        "sequence_length": f"sequences of {_number(setting.get('sequence_length'))} tokens",
        "dispatcher": f"dispatcher {setting.get('dispatcher')}",
        "slots": f"{slots} replica slot{'' if slots == 1 else 's'} per rank",
    }
    said = [sentence for name, sentence in sentences.items() if name in setting]
    simulated = "Simulated from recorded loads, scaled" if setting.get("scaled") else "Simulated from recorded loads"
    left_out = [f"at most {drawn} of {len(sweep.points)} points in a row"] if drawn < len(sweep.points) else []
    return [sweep.what, "; ".join([simulated, *said, *left_out])]


def _number(value: object) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)
