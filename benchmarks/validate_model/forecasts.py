"""How often the 80 % interval of a forecast holds the measured step, how wide it is, and which pairs it calls.

Three ways to forecast published runs: from the constants alone (of the vendor's runs by a fit on other settings), after
one known step of the same cluster and model, and as the ratio of two settings of them. Runs of a class are left out in
`FOLDS` parts: how wide the interval has to be is measured on the other parts, so coverage says what a new run finds.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from math import log
from pathlib import Path

import numpy as np
import yaml

from benchmarks.validate_model.fit import FOLDS, SHIPPED, Fit, first_fit, fit
from moe_rl.config import load_cluster, load_model, load_software
from moe_rl.core.cost import Floats
from moe_rl.core.interval import COVERAGE, Interval
from moe_rl.core.software import TUNED, TYPICAL, SoftwareCosts
from moe_rl.core.topology import HardwareSpec
from moe_rl.profiling.posterior import KnownStep, Posterior, Price, Prior
from moe_rl.simulators.whole_runs import ClusterNamed, WholeRun

# Weight of tuned software where a known step decides which runs; see `moe_rl.study.known_steps`.
TUNED_WEIGHT = 0.25
LARGE_RATIO = 0.1
# Coverage of fewer runs is a matter of one run; they are judged together.
SMALLEST_CLASS = 20
POOL = "every class below 20 rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """One published run beside its forecast."""

    run: WholeRun
    kind: str
    """Class of the run."""
    interval: Interval
    """Seconds per token of a GPU."""

    @property
    def error(self) -> float:
        """Logarithm of forecast / measured seconds."""
        return log(self.interval.value * self.run.tokens_per_s)

    @property
    def half_width(self) -> float:
        """Half of the interval, of a logarithm."""
        return 0.5 * log(self.interval.high / self.interval.low)

    def holds(self, scale: float) -> bool:
        """Return whether the interval, `scale` times as wide, holds the measured step."""
        return abs(self.error) <= scale * self.half_width


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFigures:
    """How the forecasts of one class of runs did."""

    name: str
    count: int
    log_error: float
    """Mean absolute error of the logarithm."""
    coverage: float
    """Share of runs that the shipped interval holds."""
    coverage_left_out: float | None
    """The same with the width that the other parts of the class ask for; None for a class too small to be cut."""
    half_width: float
    """Median, of a logarithm."""

    @property
    def width_to_error(self) -> float:
        """Half width over mean error: 1.6 for a normal distribution."""
        return self.half_width / self.log_error


def price_of(run: WholeRun) -> Price:
    """Return the seconds per token of a GPU, as a function of the constants."""

    def price(hardware: HardwareSpec, costs: SoftwareCosts) -> Floats:
        return np.array([1.0 / run.predicted(hardware, costs).tokens_per_s_per_gpu])

    return price


def vendor_runs(folder: Path, cluster_named: ClusterNamed = load_cluster) -> list[WholeRun]:
    """Return the runs of a vendor's own benchmarks, on clusters as they are shipped or changed."""
    return [run for run, _ in _rows(folder / "whole_runs.yaml", cluster_named)]


def user_runs(folder: Path) -> list[tuple[WholeRun, str]]:
    """Return other people's runs and the class of each."""
    return _rows(folder / "other_users.yaml")


def _rows(path: Path, cluster_named: ClusterNamed = load_cluster) -> list[tuple[WholeRun, str]]:
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))["points"]
    return [(WholeRun.of(row, lambda name: load_model(name).spec, cluster_named), row.get("class", "")) for row in rows]


def without_known_step(folder: Path) -> Iterator[Forecast]:
    """Yield the forecast of every run from constants alone, a vendor's by a fit on the other settings."""
    vendor = vendor_runs(folder)
    settings = np.random.default_rng(0).permutation(sorted({run.facts for run in vendor})).tolist()
    for part in range(FOLDS):
        left_out = [run for run in vendor if settings.index(run.facts) % FOLDS == part]
        others = [run for run in vendor if run not in left_out]
        constants = fit(others, first_fit(load_cluster), start=SHIPPED)
        for run in left_out:
            posterior = Posterior.of([_fitted_prior(run, constants)])
            yield Forecast(run=run, kind="vendor", interval=posterior.forecasts(price_of(run))[0])
    for run, kind in user_runs(folder):
        posterior = Posterior.of([prior_of(run, TYPICAL)])
        yield Forecast(run=run, kind=kind, interval=posterior.forecasts(price_of(run))[0])


def with_known_step(folder: Path) -> Iterator[Forecast]:
    """Yield every other run's forecast after each run of the same cluster and model was known, software left open."""
    runs = user_runs(folder)
    for (known, kind), (run, other_kind) in permutations(runs, 2):
        if kind.split()[0] == other_kind.split()[0] and _comparable(known, run):
            step = KnownStep(price=price_of(known), seconds=1.0 / known.tokens_per_s, name=known.name)
            priors = [prior_of(run, TUNED, TUNED_WEIGHT), prior_of(run, TYPICAL, 1.0 - TUNED_WEIGHT)]
            interval = Posterior.of(priors, [step]).forecasts(price_of(run))[0]
            yield Forecast(run=run, kind=f"{kind.split()[0]}, one known step", interval=interval)


def called_pairs(folder: Path) -> Iterator[tuple[str, float, Interval]]:
    """Yield class, measured ratio of seconds and forecast ratio of every two settings of a cluster and model."""
    vendor = [(run, "vendor") for run in {run.facts: run for run in vendor_runs(folder)}.values()]
    for runs, software in ((vendor, TUNED), (user_runs(folder), TYPICAL)):
        for (run, kind), (other, other_kind) in combinations(runs, 2):
            if kind.split()[0] == other_kind.split()[0] and _comparable(run, other):
                ratio = Posterior.of([prior_of(run, software)]).ratio(price_of(run), price_of(other))
                yield software, other.tokens_per_s / run.tokens_per_s, ratio


def prior_of(run: WholeRun, software: str, weight: float = 1.0) -> Prior:
    """Return the shipped constants of the run's cluster under that software."""
    return Prior(hardware=run.batch.topology.hardware, software=load_software(software), weight=weight)


def _fitted_prior(run: WholeRun, constants: Fit) -> Prior:
    shipped = prior_of(run, TUNED)
    software = replace(shipped.software, costs=constants.software(SoftwareCosts()))
    return replace(shipped, hardware=constants.hardware(shipped.hardware), software=software)


def _comparable(run: WholeRun, other: WholeRun) -> bool:
    return (run.model, run.cluster) == (other.model, other.cluster) and run.facts != other.facts


def figures(name: str, forecasts: Sequence[Forecast]) -> ClassFigures:
    """Return how a class did; every part is judged with the width that the other parts ask for."""
    needed = np.array([abs(one.error) / one.half_width for one in forecasts])
    part = np.random.default_rng(0).permutation(len(forecasts)) % FOLDS
    held = [
        one.holds(float(np.quantile(needed[part != own], COVERAGE)))
        for one, own in zip(forecasts, part.tolist(), strict=True)
    ]
    return ClassFigures(
        name=name,
        count=len(forecasts),
        log_error=float(np.mean([abs(one.error) for one in forecasts])),
        coverage=float(np.mean([one.holds(1.0) for one in forecasts])),
        coverage_left_out=float(np.mean(held)) if len(forecasts) >= SMALLEST_CLASS else None,
        half_width=float(np.median([one.half_width for one in forecasts])),
    )


def by_class(forecasts: Sequence[Forecast]) -> list[ClassFigures]:
    """Return the figures of every class of at least `SMALLEST_CLASS` runs, and of the others together."""
    kinds = list(dict.fromkeys(one.kind for one in forecasts))
    large = [kind for kind in kinds if sum(one.kind == kind for one in forecasts) >= SMALLEST_CLASS]
    found = [figures(kind, [one for one in forecasts if one.kind == kind]) for kind in large]
    pooled = [one for one in forecasts if one.kind not in large]
    return [*found, *([figures(", ".join(kind for kind in kinds if kind not in large), pooled)] if pooled else [])]


def pooled(forecasts: Sequence[Forecast]) -> ClassFigures:
    """Return the figures of all classes below `SMALLEST_CLASS` runs, whichever way they were forecast."""
    counts = Counter(one.kind for one in forecasts)
    return figures(POOL, [one for one in forecasts if counts[one.kind] < SMALLEST_CLASS])


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFigures:
    """Of the pairs of settings whose measured ratio is above 10 %: how many are called, and how many rightly."""

    name: str
    count: int
    called: int
    right: int


def pair_figures(pairs: Sequence[tuple[str, float, Interval]]) -> list[PairFigures]:
    """Return the calls by software."""
    found = []
    for name in dict.fromkeys(name for name, _, _ in pairs):
        large = [(ratio, call) for of, ratio, call in pairs if of == name and abs(log(ratio)) > log(1 + LARGE_RATIO)]
        calls = [(ratio, call) for ratio, call in large if call.tells_apart]
        right = sum((ratio > 1) == (call.value > 1) for ratio, call in calls)
        found.append(PairFigures(name=name, count=len(large), called=len(calls), right=right))
    return found
