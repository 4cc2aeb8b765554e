"""A sweep over settings: its points, and the words for them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moe_rl.report.words import read_words

Value = int | float | str | bool | None

METRICS = {"speedup_vs_static": "speed-up over static placement", "imbalance": "max / mean rank load"}
BASELINE = "static"
_NAMES: dict[str, dict[str, str]] = read_words("swept_options.yaml")


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
class SweptFigure:
    """The metric of one policy at one point."""

    point: SweptPoint
    policy: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepData:
    """The points of a grid, the last parameter varying fastest."""

    values: Mapping[str, tuple[Value, ...]]
    """By swept parameter, in the order given."""
    metric: str
    """A key of `METRICS`."""
    points: tuple[SweptPoint, ...]
    trace: Mapping[str, object]
    """Facts of the trace."""
    setting: Mapping[str, object]
    """Conditions that hold for every point."""
    notes: tuple[str, ...] = ()
    """Sentences that hold for every point."""

    @property
    def policies(self) -> list[str]:
        """Policies of all points, static left out where the metric compares with it."""
        names: dict[str, None] = {}
        for point in self.points:
            names |= dict.fromkeys(point.policies)
        return [name for name in names if name != BASELINE or self.metric == "imbalance"]

    @property
    def what(self) -> str:
        """Trace, model and cluster, in a line."""
        model, cluster = self.setting.get("model", "several models"), self.setting.get("cluster", "several clusters")
        return f"{self.trace.get('name')}, {model} on {cluster}"

    def figures(self, points: Sequence[SweptPoint]) -> list[SweptFigure]:
        """Return the figures of these points, policy by policy."""
        figures = []
        for point in points:
            for name in self.policies:
                if name in point.policies:
                    figures.append(SweptFigure(point=point, policy=name, value=point.policies[name]))
        return figures

    def best(self, figures: Sequence[SweptFigure]) -> SweptFigure:
        """Return the best of some figures, of equals the first."""
        if self.metric == "speedup_vs_static":
            return max(figures, key=lambda figure: figure.value)
        return min(figures, key=lambda figure: figure.value)

    @property
    def answer(self) -> SweptFigure:
        """The best figure of all."""
        return self.best(self.figures(self.points))

    @property
    def finding(self) -> str:
        """What the sweep found, in a sentence: the best policy anywhere, and from where to where its figure goes."""
        best, figures = self.answer, []
        for point in self.points:
            if best.policy in point.policies:
                figures.append(point.policies[best.policy])
        low, high = min(figures), max(figures)
        name, where = best.policy, f"best at {describe(best.point.point)}"
        if self.metric == "imbalance":
            return f"{name} leaves the busiest rank at {low:.2f} to {high:.2f} times the mean load; {where}"
        if f"{low:.2f}" == f"{high:.2f}":
            return f"{name} is {high:.2f}x as fast as static placement at every point"
        return f"{name} is {low:.2f}x to {high:.2f}x as fast as static placement; {where}"


def short_name(parameter: str) -> str:
    """Return the name of a parameter for a heading."""
    return _NAMES.get(parameter, {}).get("short", parameter.replace("_", " "))


def axis_name(parameter: str) -> str:
    """Return the name of a parameter for an axis, with its unit."""
    return _NAMES.get(parameter, {}).get("axis", short_name(parameter))


def text_of(value: Value) -> str:
    """Return a swept value for people."""
    if isinstance(value, bool):
        if value:
            return "yes"
        return "no"
    if value is None:
        return "none"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def describe(point: Mapping[str, Value], text_of: Callable[[Value], str] = text_of) -> str:
    """Return e.g. "EP 16, tokens/rank 8,192"; `text_of` writes a value."""
    return ", ".join(f"{short_name(name)} {text_of(value)}" for name, value in point.items())
