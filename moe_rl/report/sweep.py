"""A sweep over settings: its points, and their table in a terminal."""

from collections.abc import Mapping
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_rl.core.errors import require

Value = int | float | str | bool | None

METRICS = {"speedup_vs_static": "speed-up over static placement", "imbalance": "max / mean rank load"}
BASELINE = "static"
SHORT_NAMES = {
    "expert_model_parallel_size": "EP",
    "tokens_per_rank": "tokens/rank",
    "micro_batch_tokens": "tokens/rank",
    "ep_group_tokens": "tokens/EP group",
    "seq_length": "sequence",
    "replica_slots": "slots",
    "cross_node_slots": "cross-node slots",
    "moe_token_dispatcher_type": "dispatcher",
    "moe_flex_dispatcher_backend": "backend",
    "recompute_granularity": "recompute",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptPoint:
    """One simulated point of a sweep."""

    point: Mapping[str, Value]
    """Swept options."""
    policies: Mapping[str, float]
    """The metric by policy, static among them."""
    yardsticks: Mapping[str, float]
    imbalance_static: float
    phi: float | None
    """None where times were not computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The points of a grid, the last parameter varying fastest."""

    values: Mapping[str, tuple[Value, ...]]
    """By swept parameter, in the order given."""
    metric: str
    """A key of `METRICS`."""
    points: tuple[SweptPoint, ...]
    trace: Mapping[str, object]
    """What was replayed."""
    setting: Mapping[str, object]
    """Conditions that hold for every point."""

    def __post_init__(self) -> None:
        require(self.metric in METRICS, f"a sweep cannot show {self.metric!r}.")
        require(len(self.points) > 0, "a sweep needs a point.")

    @property
    def policies(self) -> list[str]:
        """Policies of all points, static left out where the metric compares with it."""
        names = dict.fromkeys(name for point in self.points for name in point.policies)
        return [name for name in names if name != BASELINE or self.metric == "imbalance"]

    @property
    def what(self) -> str:
        """What was simulated, in a line."""
        model, cluster = (self.setting.get(name, f"several {name}s") for name in ("model", "cluster"))
        return f"{self.trace.get('name')}, {model} on {cluster}"


def short_name(parameter: str) -> str:
    """Return the name of a parameter for a heading."""
    return SHORT_NAMES.get(parameter, parameter.replace("_", " "))


def text_of(value: Value) -> str:
    """Return a swept value for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def describe(point: Mapping[str, Value]) -> str:
    """Return e.g. "EP 16, tokens/rank 8,192"."""
    return ", ".join(f"{short_name(name)} {text_of(value)}" for name, value in point.items())


def print_sweep(sweep: Sweep, console: Console) -> None:
    """Print one line per point: what was swept, how uneven static placement is, and the metric of every policy."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in sweep.values:
        table.add_column(short_name(name), justify="right", no_wrap=True)
    headings = ["max/mean", *(["phi"] if sweep.points[0].phi is not None else []), *sweep.policies]
    yardsticks = ["forced_balance"] if any("forced_balance" in point.yardsticks for point in sweep.points) else []
    for heading in (*headings, *yardsticks):
        table.add_column(heading.replace("forced_balance", "forced balance"), justify="right")
    form = "{:.3f}x" if sweep.metric == "speedup_vs_static" else "{:.3f}"
    for point in sweep.points:
        cells = [Text(text_of(value)) for value in point.point.values()]
        cells.append(Text(f"{point.imbalance_static:.3f}"))
        if point.phi is not None:
            cells.append(Text(f"{point.phi:.2f}"))
        best = _best(sweep, point)
        for name in sweep.policies:
            value = point.policies.get(name)
            cells.append(Text("" if value is None else form.format(value), style="bold green" if name == best else ""))
        cells += [Text(form.format(point.yardsticks[name]), style="dim") for name in yardsticks]
        table.add_row(*cells)
    console.print(Text(f"{METRICS[sweep.metric].capitalize()}, simulated: {sweep.what}", style="bold"))
    console.print(table)


def _best(sweep: Sweep, point: SweptPoint) -> str:
    shown = {name: value for name, value in point.policies.items() if name in sweep.policies}
    if not shown:
        return ""
    return (
        max(shown, key=lambda n: shown[n])
        if sweep.metric == "speedup_vs_static"
        else min(shown, key=lambda n: shown[n])
    )
