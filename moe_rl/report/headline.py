"""The meaning of the numbers in a few sentences: the loss by imbalance, and the gain of the best policy."""

from dataclasses import dataclass

from moe_rl.core.metrics import StepPrediction
from moe_rl.report.simulation import UNPACKED, ReportData
from moe_rl.report.units import format_bytes, format_time, largest_shares
from moe_rl.report.words import read_words

# A gain below this is inside the model's error (about 3 % on ratios of policies): the headline calls it little.
LITTLE = 0.03
# A gain by packing below this needs no sentence on who packs.
TO_SPEAK_OF = 0.005
# The policy with packing and balancing.
WHOLE = "moe-rl"
WORDS = read_words("sentences.yaml")["headline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The sentence that answers the question, those that go on with it, and a few that explain it.

    The whole run comes first: whether it fits, then a step of RL, then the update.
    """

    title: str
    more: tuple[str, ...] = ()
    details: tuple[str, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """The answer."""
        return (self.title, *self.more)


def headline(report: ReportData) -> Headline:
    """Return the sentences for a report; they follow from its numbers alone."""
    if report.baseline is None:
        return Headline(title=WORDS["no_baseline"].format(best=report.best), details=(WORDS["no_speedup"],))
    if report.timed:
        return _timed(report, report.baseline)
    return _balance_only(report, report.baseline)


def _timed(report: ReportData, static: StepPrediction) -> Headline:
    best, forced, waiting = report.best, report.yardstick("forced_balance"), None
    gain = (static.step_time_s or 0.0) / (best.step_time_s or 1.0)
    if forced and forced.step_time_s and static.step_time_s:
        waiting = 1.0 - forced.step_time_s / static.step_time_s
    shares = _packing_split(report)
    if waiting is not None and waiting < LITTLE and gain - 1.0 < LITTLE:
        kind = "little_waiting"
    elif len(report.policies) == 1:
        kind = "nothing_compared"
    elif gain - 1.0 < LITTLE:
        kind = "little_gain"
    else:
        kind, shares = "gain", shares or _shares(report, "the time saved", "step_time_s")
    gains = f"{gain:.2f}x"
    if (low := min(report.speedups, default=gain)) < (high := max(report.speedups, default=gain)):
        gains = f"{low:.2f}x to {high:.2f}x"
    words = {"best": best, "gains": gains, "waiting": max(waiting or 0.0, 0.0), "shares": shares}
    words["engine"] = _beside_engine(report, best)
    title = WORDS[kind].format(**words)
    if report.scaled:
        tokens = round(float(str(report.setting["tokens_per_rank"])))
        title = f"{title[:-1]} (loads scaled to {tokens:,} tokens per rank)."
    # A saving below 0.1 % would print as "0.0%".
    if waiting is not None and waiting >= 0.001:
        saved = WORDS["saved"].format(waiting=waiting)
    else:
        saved = ""
    details = [WORDS["busiest"].format(static=static, saved=saved)]
    if gain - 1.0 >= LITTLE:
        details += [*_of_forced(best), *_runner_up(report, best), *_price(best)]
    details += _above_engine(report, best)
    lead, *more = [*_misfit(report, best), *_rl_step(report, best), title]
    return Headline(title=lead, more=tuple(more), details=tuple(details))


def _beside_engine(report: ReportData, best: StepPrediction) -> str:
    """Say how much the best policy gains over the best engine, which users get from a flag of the dispatcher."""
    engine, gain = report.best_engine, report.speedup_vs_best_engine(best)
    if engine is None or gain is None or engine.policy == best.policy:
        return ""
    return str(WORDS["engine"].format(engine=engine, gain=gain))


def _above_engine(report: ReportData, best: StepPrediction) -> list[str]:
    """Say what is gained over the run's own engine by what it leaves to be planned; the title says it of the best."""
    row = next((row for row in report.policies if row.policy == report.above_engine), None)
    if row is None or row is best or report.best_engine is None:
        return []
    gain = report.speedup_vs_best_engine(row)
    return [WORDS["above_engine"].format(row=row, gain=gain, engine=report.best_engine)]


def _misfit(report: ReportData, best: StepPrediction) -> list[str]:
    """Say that the run does not fit, and with which option it does, at which cost."""
    misfit = report.misfit
    if misfit is None:
        return []
    sentence = WORDS["misfit"].format(misfit=misfit)
    remedy = misfit.remedy
    if remedy is None:
        return [sentence, WORDS["no_remedy"]]
    if remedy.slower >= 0:
        longer = f"takes {remedy.slower:.0%} longer"
    else:
        longer = f"takes {-remedy.slower:.0%} less time"
    if remedy.gpu_factor > 1:
        longer += f" on {remedy.gpu_factor} times the GPUs"
    rl_step = ""
    if remedy.rl_speedup is not None:
        rl_step = WORDS["remedy_rl"].format(gain=remedy.rl_speedup)
    return [f"{sentence} {WORDS['remedy'].format(remedy=remedy, cost=longer, best=best, rl_step=rl_step)}"]


def _rl_step(report: ReportData, best: StepPrediction) -> list[str]:
    """Say what the best policy brings to a step of RL, and what limits that step."""
    rl = report.rl
    if rl is None or report.misfit is not None:  # what it is with the option that makes it fit has been said
        return []
    if rl.waits_for_rollout:
        return [str(WORDS["rl_nothing"])]
    limit = largest_shares(rl.shares)
    if rl.saved <= 0:
        return [str(WORDS["rl_slower"].format(limit=limit))]
    if rl.brings_little:
        whole_s = rl.steps["static"].step_time_s
        saved, whole = format_time(rl.saved * whole_s), format_time(whole_s)
        return [WORDS["rl_little"].format(rl=rl, saved=saved, whole=whole, limit=limit)]
    low, high = f"{rl.low:.2f}x", f"{rl.high:.2f}x"
    if low == high:
        gains = low
    else:
        gains = f"{low} to {high}"
    return [WORDS["rl_step"].format(best=best, rl=rl, gains=gains, limit=limit)]


def _packing_split(report: ReportData) -> str:
    """Say what balancing and packing each bring, and which runs pack; empty where packing brings less, or little."""
    figures = _levers(report, "step_time_s")
    if figures is None:
        return ""
    static, unpacked, all_levers = figures
    where = WORDS["packs"].get(report.setting.get("packing"), "")
    balancing = max(static / unpacked - 1.0, 0.0)
    packing = min(unpacked, static) / all_levers - 1.0
    if packing < TO_SPEAK_OF or packing <= balancing or not where:
        return ""
    return str(WORDS["mostly_packing"].format(balancing=balancing, packing=packing, where=where))


def _levers(report: ReportData, figure: str) -> tuple[float, float, float] | None:
    """Return a figure of static placement, of balancing alone and of `moe-rl`, where that is best; None without one.

    `figure` is an attribute of a policy.
    """
    alone = () if report.balancing_alone is None else (report.balancing_alone,)
    figures = {row.policy: getattr(row, figure) for row in (*report.policies, *alone)}
    static, unpacked, all_levers = figures.get("static"), figures.get(UNPACKED), figures.get(WHOLE)
    if report.best.policy != WHOLE or not (static and unpacked and all_levers):
        return None
    return static, unpacked, all_levers


def _shares(report: ReportData, what: str, figure: str) -> str:
    """Say how much of `what` comes from balancing experts, and how much packing adds to that.

    `figure` is the attribute of a policy that is compared: lower is better.
    """
    figures = _levers(report, figure)
    if figures is None:
        return ""
    static, unpacked, all_levers = figures
    # Packing may also undo a little of what balancing gains: shares stay within 0 and 100 %.
    balancing = min(max((static - unpacked) / (static - all_levers), 0.0), 1.0)
    return str(WORDS["shares"].format(balancing=balancing, what=what, packing=1.0 - balancing))


def _of_forced(best: StepPrediction) -> list[str]:
    reached = best.fraction_of_forced_balance
    if reached is None:
        return []
    # From 100.5 % on the rounded share reads as more than perfect balance, which needs an explanation.
    if reached >= 1.005:
        beyond = WORDS["beyond"]
    else:
        beyond = ""
    return [WORDS["reached"].format(best=best, reached=reached, beyond=beyond)]


def _runner_up(report: ReportData, best: StepPrediction) -> list[str]:
    second = report.runner_up
    if second is None or best.policy == "static" or not best.step_time_s:
        return []
    behind = (second.step_time_s or 0.0) / best.step_time_s - 1.0
    return [WORDS["next_best" if behind >= 0.01 else "no_difference"].format(best=best, second=second, behind=behind)]


def _price(best: StepPrediction) -> list[str]:
    sentences = []
    if best.replicas_per_plan:
        sentences.append(f"{best.replicas_per_plan:.1f} expert copies per layer and micro-batch")
    if best.moved_bytes:
        sentences.append(f"{format_bytes(best.moved_bytes)} of experts moved per step")
    if not sentences:
        return []
    return [f"Cost: {' and '.join(sentences)}."]


def _balance_only(report: ReportData, static: StepPrediction) -> Headline:
    best, shares = report.best, ""
    recovered = 0.0
    if static.imbalance > 1.0:
        recovered = 1.0 - (best.imbalance - 1.0) / (static.imbalance - 1.0)
    if len(report.policies) == 1:
        kind = "nothing_compared"
    elif static.imbalance - 1.0 < LITTLE:
        kind = "little_load"
    elif recovered < LITTLE:
        kind = "no_improvement"
    else:
        kind, shares = "cut", _shares(report, "this reduction", "imbalance")
    title = WORDS[kind].format(best=best, static=static, recovered=recovered, shares=shares)
    return Headline(title=title, details=(*_price(best), WORDS["untimed"]))
