"""Which correction to turn on or off, judged from a run's own metrics; each advice names its number, rule and source.

A rule reads one metric, under any of the names by which six frameworks log it, as the mean (or the largest value) over
the last half of the records. It speaks only if its metric is logged and beyond its bound. `not_judged` lists the rules
that had nothing to read, since their silence does not mean that the run is healthy. Needs neither torch nor the run.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.registry import Registry
from moe_rl.launch.sources import read_text
from moe_rl.yaml_files import read_yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceRule:
    """A bound on a metric and what to do beyond it."""

    name: str
    metrics: Sequence[str]
    """Names of the same metric; the first that is logged is read."""
    bound: float
    above: bool
    """True: speaks above the bound; False: below it."""
    advice: str
    source: str
    largest: bool = False
    """Reads the largest value instead of the mean."""
    relative: bool = False
    """Reads the value divided by the median of the first half."""
    magnitude: bool = False
    """Reads the absolute value: frameworks differ in the sign of an estimate."""
    danger: str = ""
    """Which kind of sign of a coming collapse this is; empty: none."""

    def read(self, records: Sequence[Mapping[str, object]]) -> tuple[str, float] | str:
        """Return the metric's name and value, or why there is no value."""
        # A mean over many steps: what a run did at its start is over, and one step alone is noise.
        half = len(records) // 2
        for metric in self.metrics:
            values = _numbers(records[half:], metric)
            if not values:
                continue
            if self.largest:
                value = max(values)
            else:
                value = fmean(values)
            if self.relative:
                # The median, since a jump in the first half would hide one of today.
                start = _numbers(records[:half], metric)
                if not start or median(start) == 0:
                    return f"{metric} is not logged in earlier steps, so it cannot be compared with them"
                value /= median(start)
            return metric, abs(value) if self.magnitude else value
        return f"none of the metrics {', '.join(self.metrics)} is logged as a finite number"

    def speaks(self, value: float) -> bool:
        """Return whether a value is beyond the bound."""
        if self.above:
            return value > self.bound
        return value < self.bound


RULES: Registry[AdviceRule] = Registry(
    "advice rule",
    [AdviceRule(name=name, **rule) for name, rule in read_yaml(Path(__file__).with_name("advice.yaml")).items()],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What a rule says about a run."""

    rule: str
    metric: str
    value: float
    bound: float
    advice: str
    source: str

    def __str__(self) -> str:
        """Return the advice in sentences."""
        return f"{self.advice} ({self.metric} is {self.value:.3g}, the limit is {self.bound:g}; {self.source})"


def advise(records: Sequence[Mapping[str, object]]) -> list[Advice]:
    """Return what the rules say about a run's metrics, one mapping per step.

    A metric that is not logged is skipped (see `not_judged`). Raises if no record holds a metric of any rule.
    """
    require(len(records) > 0, "the log contains no metrics, so no advice is possible.")
    read = _readings(records)
    advice = [
        Advice(rule=rule.name, metric=metric, value=value, bound=rule.bound, advice=rule.advice, source=rule.source)
        for rule, metric, value in read
        if rule.speaks(value)
    ]
    advice += _layers(records[len(records) // 2 :])
    if not read and not advice:
        metrics = ", ".join(metric for rule in RULES for metric in rule.metrics)
        raise InvalidInputError(f"the log contains none of the metrics that the advice depends on: {metrics}.")
    return advice


def _readings(records: Sequence[Mapping[str, object]]) -> list[tuple[AdviceRule, str, float]]:
    """Return (rule, metric, value) of every rule that has something to read."""
    return [(rule, *seen) for rule in RULES if not isinstance(seen := rule.read(records), str)]


# A log of one step shows no danger, and the last half of a longer log leaves the first step out. In the first update
# Adam's second moment is that of one gradient (arXiv 1908.03265: its variance is then largest), so that the step is as
# long as the learning rate whatever the run is like: healthy runs of the Countdown study have a KL of up to 0.14 there.
LEAST_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DangerVerdict:
    """Whether a run is about to collapse, as far as its log shows."""

    in_danger: bool | None
    """None: the log has too few steps or metrics to decide."""
    reason: str


def verdict(records: Sequence[Mapping[str, object]]) -> DangerVerdict:
    """Return whether two signs of different kinds agree that the run is about to collapse; one alone may be noise."""
    kinds = dict.fromkeys(rule.danger for rule in RULES if rule.danger)
    speaks_by_kind: dict[str, bool] = {}
    for rule, _, value in _readings(records):
        speaks_by_kind[rule.danger] = rule.speaks(value) or speaks_by_kind.get(rule.danger, False)
    logged = [kind for kind in kinds if kind in speaks_by_kind]
    if len(records) < LEAST_STEPS:
        reason = f"a verdict needs at least {LEAST_STEPS} steps, but the log has {len(records)}."
        return DangerVerdict(in_danger=None, reason=reason)
    if len(logged) < 2:
        only = "none of them"
        if logged:
            only = f"only one kind ({logged[0]})"
        return DangerVerdict(
            in_danger=None,
            reason=f"signs of two kinds must agree ({', '.join(kinds)}), but the log contains metrics of {only}.",
        )
    agreeing = [kind for kind, speaks in speaks_by_kind.items() if kind and speaks]
    # One sign alone may be noise: a KL of 0.14 in a first step, a burst of clipping in one batch.
    if len(agreeing) > 1:
        return DangerVerdict(in_danger=True, reason=f"signs in {' and '.join(agreeing)} metrics agree.")
    return DangerVerdict(
        in_danger=False,
        reason=f"no two kinds of signs agree. The log contains metrics of the kinds {', '.join(logged)}.",
    )


def not_judged(records: Sequence[Mapping[str, object]]) -> dict[str, str]:
    """Return the rules that could not judge a run, each with the reason."""
    reasons = {}
    for rule in RULES:
        reading = rule.read(records)
        if isinstance(reading, str):
            reasons[rule.name] = reading
    return reasons


def _numbers(records: Iterable[Mapping[str, object]], metric: str) -> list[float]:
    """Return the finite values of a metric."""
    numbers = []
    for record in records:
        value = record.get(metric)
        # NaN, such as a mean over no token, is no reading.
        if isinstance(value, int | float) and math.isfinite(value):
            numbers.append(float(value))
    return numbers


def _layers(records: Sequence[Mapping[str, object]]) -> list[Advice]:
    """Return advice about the layer whose router moves more than three times as far as the average one."""
    names: dict[str, None] = {}
    for record in records:
        names |= dict.fromkeys(record)
    layers = [name for name in names if name.startswith("router_corr/layer_") and name.endswith("/shift")]
    shifts = {name: fmean(values) for name in layers if (values := _numbers(records, name))}
    if not shifts:
        return []
    worst, average = max(shifts, key=shifts.__getitem__), fmean(shifts.values())
    # One layer alone is its own average, and layers that stand still have none to compare with.
    if shifts[worst] <= 3.0 * average or average <= 0.0:
        return []
    return [
        Advice(
            rule="one-layer-drifts",
            metric=worst,
            value=shifts[worst],
            bound=3.0 * average,
            advice=(
                "The router of one layer changes more than three times as much as the average one. Freeze this router "
                "or lower its learning rate before you correct the loss of all tokens."
            ),
            source="a comparison within the run",
        )
    ]


def read_metrics(path: Path) -> list[dict[str, object]]:
    """Read one JSON object per line; each is a step."""
    records = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidInputError(f"{path}, line {number}, is not JSON: {error}") from error
        require(isinstance(record, dict), f"{path}, line {number}, is not a JSON object.")
        records.append(record)
    return records
