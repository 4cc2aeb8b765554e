"""Which correction to switch on or off, said from a run's own metrics: each advice with its number, rule and source.

A rule reads one metric under any of the names that frameworks log it by, as the mean (or the largest) over the last
half of the records. It speaks only when its metric is there and beyond its bound; silence is no praise.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.registry import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A bound on a metric and what to do beyond it."""

    name: str
    metrics: tuple[str, ...]
    """Names of the same number; the first that is logged is read."""
    bound: float
    above: bool
    """Speaks above the bound; False: below."""
    advice: str
    source: str
    largest: bool = False
    """Reads the largest value instead of the mean."""


RULES: Registry[Rule] = Registry(
    "advice rule",
    [
        Rule(
            name="correct-rollouts",
            metrics=("mismatch/k3_kl", "rollout_corr/k3_kl", "mismatch/kl", "rollout_corr/kl"),
            bound=1e-3,
            above=True,
            advice="Rollout engine and trainer differ as much as an MoE without routing replay: switch on R3, or "
            "truncated token weights (preset decoupled_token_is).",
            source="arXiv 2510.11370: 1.5e-3 for a 30B MoE, 7.5e-4 with R3, 6.4e-4 for a dense 8B",
        ),
        Rule(
            name="no-correction-needed",
            metrics=("mismatch/k3_kl", "rollout_corr/k3_kl"),
            bound=1e-6,
            above=False,
            advice="Rollout engine and trainer agree to rounding: rollout correction has nothing to correct and can "
            "stay off.",
            source="moe_rl's Countdown study in float32: 1e-11, and no difference between its arms",
        ),
        Rule(
            name="replay-routes",
            metrics=("mismatch/router_agreement",),
            bound=0.95,
            above=False,
            advice="The trainer would route many tokens to other experts than the rollout engine did: replay the "
            "recorded experts (R3).",
            source="arXiv 2510.11370: about 10 % of the routers differ",
        ),
        Rule(
            name="weights-unreliable",
            metrics=("rollout_corr/rollout_is_eff_sample_size", "rollout_corr/mixture_eff_sample_size"),
            bound=0.7,
            above=False,
            advice="Few tokens carry the importance weights: reject what is far off (preset "
            "decoupled_geo_rs_token_tis), or mix (reliability_mixture_weights).",
            source="arXiv 2605.13907: the effective sample size fell from 0.95 to 0.70 in a run that lost accuracy",
        ),
        Rule(
            name="punished-silenced",
            metrics=("actor/frac_negative_zero_grad",),
            bound=0.5,
            above=True,
            advice="Most tokens with a negative advantage get no gradient, so training runs on the positive ones: with "
            "the router shift before the clip take order 'after-clip' or subtract its noise; without it widen the "
            "lower clip or update less often per rollout.",
            source="tests/importance/test_gamma_noise.py: all of them under router jitter of 1e-3",
        ),
        Rule(
            name="router-shift-idle",
            metrics=("router_corr/gamma_raw_p01", "router_corr/gamma_min"),
            bound=0.999,
            above=True,
            advice="The router does not move within a rollout: the router shift changes nothing and can be switched "
            "off, with what it stores.",
            source="definition of gamma, arXiv 2510.23027",
        ),
        Rule(
            name="router-drifts",
            metrics=("router_corr/clipfrac_gamma_0_8",),
            bound=0.1,
            above=True,
            advice="Many tokens have a gamma below 0.8: make fewer updates per rollout, or replay the experts of the "
            "old policy (R2).",
            source="arXiv 2510.23027 (gamma), 2512.01374 (small off-policiness: R2)",
        ),
        Rule(
            name="stale-rollouts",
            metrics=("staleness/max",),
            bound=1.5,
            above=True,
            largest=True,
            advice="Tokens are two or more policy versions old: take decoupled_ppo with max_staleness, which clips "
            "around a recent policy and weights by the one that generated.",
            source="arXiv 2505.24298",
        ),
        Rule(
            name="bad-tokens",
            metrics=("actor/non_finite_tokens", "rollout_corr/non_finite_tokens"),
            bound=0.0,
            above=True,
            largest=True,
            advice="Tokens were left out because a log-probability was not finite: give the rollout engine and the "
            "trainer the same temperature, top-p and top-k.",
            source="moe_rl.importance.tensors",
        ),
    ],
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
        """The advice in sentences."""
        return f"{self.advice} ({self.metric} is {self.value:.3g}, bound {self.bound:g}; {self.source})"


def advise(records: Sequence[Mapping[str, object]]) -> list[Advice]:
    """Return what the rules say about a run's metrics, one mapping per step.

    A metric that is not there is passed over. Raises where no record holds a metric that any rule reads.
    """
    require(len(records) > 0, "there are no metrics to advise on.")
    late = records[len(records) // 2 :]
    found = []
    read = 0
    for rule in RULES:
        values: list[float] = []
        metric = ""
        for metric in rule.metrics:
            values = _numbers(late, metric)
            if values:
                break
        if not values:
            continue
        read += 1
        value = max(values) if rule.largest else fmean(values)
        if value > rule.bound if rule.above else value < rule.bound:
            found.append(
                Advice(
                    rule=rule.name,
                    metric=metric,
                    value=value,
                    bound=rule.bound,
                    advice=rule.advice,
                    source=rule.source,
                )
            )
    found += _layers(late)
    if read == 0 and not found:
        known = ", ".join(metric for rule in RULES for metric in rule.metrics)
        raise InvalidInputError(f"the metrics hold none that a rule reads: {known}.")
    return found


def _numbers(records: Iterable[Mapping[str, object]], metric: str) -> list[float]:
    """The finite values of a metric."""
    found = (record.get(metric) for record in records)
    return [float(value) for value in found if isinstance(value, int | float) and math.isfinite(value)]


def _layers(records: Sequence[Mapping[str, object]]) -> list[Advice]:
    """Name the layer whose router moves three times as far as the average one."""
    names = dict.fromkeys(name for record in records for name in record)
    layers = [name for name in names if name.startswith("router_corr/layer_") and name.endswith("/shift")]
    means = {name: values for name in layers if (values := _numbers(records, name))}
    if len(means) < 2:
        return []
    shifts = {name: fmean(values) for name, values in means.items()}
    worst, average = max(shifts, key=shifts.__getitem__), fmean(shifts.values())
    if shifts[worst] <= 3.0 * average or average <= 0.0:
        return []
    return [
        Advice(
            rule="one-layer-drifts",
            metric=worst,
            value=shifts[worst],
            bound=3.0 * average,
            advice="One layer's router moves three times as far as the average one: freeze it or lower its learning "
            "rate before correcting all tokens for it.",
            source="a comparison within the run",
        )
    ]


def read_metrics(path: Path) -> list[dict[str, object]]:
    """Read one JSON object per line, a step each."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}") from error
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidInputError(f"{path}, line {number}, is not JSON: {error}") from error
        require(isinstance(record, dict), f"{path}, line {number}, is not a JSON object.")
        records.append(record)
    return records
