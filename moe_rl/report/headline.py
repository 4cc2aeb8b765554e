"""Say in a few sentences what the numbers mean: what limits the step, and what the best policy brings."""

from dataclasses import dataclass

from moe_rl.core.metrics import StepPrediction
from moe_rl.report.simulation import UNPACKED, ReportData
from moe_rl.report.units import format_bytes

LITTLE = 0.03
"""Gains below this are inside the model's error (about 3 % on ratios of policies) and are called little."""
NOTHING_COMPARED = "Only static placement was simulated: name other policies to compare it with."

WHOLE = "moe-rl"
"""The policy with packing and balancing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One sentence that answers the question, and a few that explain it."""

    title: str
    details: tuple[str, ...]


def headline(report: ReportData) -> Headline:
    """Return the sentences for a report; they follow from its numbers alone."""
    if report.baseline is None:
        best = report.best
        return Headline(
            title=f"{best.policy} leaves the busiest rank with {best.imbalance:.2f} times the mean load.",
            details=("Static placement was not simulated, so no speed-up is given.",),
        )
    if report.timed:
        return _timed(report, report.baseline)
    return _balance_only(report, report.baseline)


def _timed(report: ReportData, static: StepPrediction) -> Headline:
    best = report.best
    gain = (static.step_time_s or 0.0) / (best.step_time_s or 1.0)
    forced = report.yardstick("forced_balance")
    waiting = (
        1.0 - forced.step_time_s / static.step_time_s if forced and forced.step_time_s and static.step_time_s else None
    )
    if waiting is not None and waiting < LITTLE and gain - 1.0 < LITTLE:
        title = f"There is little to win: imbalance costs {max(waiting, 0.0):.1%} of this step."
    elif len(report.policies) == 1:
        title = NOTHING_COMPARED
    elif gain - 1.0 < LITTLE:
        title = f"No policy helps much here: the best, {best.policy}, is {gain:.2f}x as fast as static placement."
    else:
        shares = _shares(report, best, "the time saved", "step_time_s")
        title = f"{best.policy} makes this step {gain:.2f}x as fast as static placement{shares}."
    if report.scaled:
        tokens = round(float(str(report.setting["tokens_per_rank"])))
        title = f"{title[:-1]} (loads scaled to {tokens:,} tokens per rank)."
    details = [_what_limits(static, waiting)]
    if gain - 1.0 >= LITTLE:
        details += [*_of_forced(best), *_runner_up(report, best), *_price(best)]
    return Headline(title=title, details=tuple(details))


def _shares(report: ReportData, best: StepPrediction, what: str, figure: str) -> str:
    """Say how much of `what` comes from balancing experts, and how much packing adds to that.

    `figure` names what of a policy is compared: the lower, the better.
    """
    found = {row.policy: getattr(row, figure) for row in report.policies}
    static, unpacked, whole = (found.get(name) for name in ("static", UNPACKED, WHOLE))
    if best.policy != WHOLE or not (static and unpacked and whole):
        return ""
    balancing = min(max((static - unpacked) / (static - whole), 0.0), 1.0)
    packing = 1.0 - balancing
    return f": {balancing:.0%} of {what} comes from balancing experts, {packing:.0%} from packing sequences"


def _of_forced(best: StepPrediction) -> list[str]:
    reached = best.fraction_of_forced_balance
    if reached is None:
        return []
    said = f"{best.policy} reaches {reached:.0%} of the speed of perfectly balanced routing"
    if reached >= 1.005:
        said += ": packing evens out attention as well, and locality saves all-to-all; balanced routing does neither"
    return [f"{said}."]


def _what_limits(static: StepPrediction, waiting: float | None) -> str:
    busiest = f"With static placement the busiest EP rank holds {static.imbalance:.2f} times the mean load"
    if waiting is None:
        return busiest + "."
    return busiest + (
        f"; perfectly balanced routing would save {waiting:.1%} of the step." if waiting >= 0.001 else "."
    )


def _runner_up(report: ReportData, best: StepPrediction) -> list[str]:
    second = report.runner_up
    if second is None or best.policy == "static" or not best.step_time_s:
        return []
    behind = (second.step_time_s or 0.0) / best.step_time_s - 1.0
    if behind >= 0.01:
        return [f"The next best, {second.policy}, takes {behind:.0%} longer."]
    return [f"{second.policy} is within 1 % of it, which is less than the model can tell apart."]


def _price(best: StepPrediction) -> list[str]:
    said = []
    if best.replicas_per_plan:
        said.append(f"{best.replicas_per_plan:.1f} expert copies per layer and micro-batch")
    if best.moved_bytes:
        said.append(f"{format_bytes(best.moved_bytes)} of experts sent in the step by all ranks together")
    return [f"It pays with {' and '.join(said)}."] if said else []


def _balance_only(report: ReportData, static: StepPrediction) -> Headline:
    best = report.best
    recovered = 1.0 - (best.imbalance - 1.0) / (static.imbalance - 1.0) if static.imbalance > 1.0 else 0.0
    if len(report.policies) == 1:
        title = NOTHING_COMPARED
    elif static.imbalance - 1.0 < LITTLE:
        title = f"There is little to win: the busiest rank holds only {static.imbalance:.2f} times the mean load."
    elif recovered < LITTLE:
        title = (
            f"No policy improves on static placement ({static.imbalance:.2f} times the mean load on the busiest rank)."
        )
    else:
        shares = _shares(report, best, "that", "imbalance")
        title = (
            f"{best.policy} cuts the load of the busiest rank from {static.imbalance:.2f} to {best.imbalance:.2f} "
            f"times the mean, {recovered:.0%} of the excess{shares}."
        )
    details = (*_price(best), "Times were not computed (objective: imbalance).")
    return Headline(title=title, details=details)
