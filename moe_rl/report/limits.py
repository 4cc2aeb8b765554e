"""What limits the best policy: its step time beside the simulator's yardsticks, its loads beside the planner's bounds.

A step under a policy is cut into work that perfect balance would leave (`kernels`), waiting for ranks with longer
sequences (`packing`: per-rank work above its even spread), waiting for the rank with the most routed rows (`routing`:
expert GEMM and all-to-all above forced balance), the plan's own copies and moves (`plan`), and the pipeline bubble.
Waiting for routing is then put down to the bound that explains most of the imbalance: node, placement or split.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from moe_rl.core.metrics import StepPrediction
from moe_rl.report.bars import part_name
from moe_rl.report.simulation import LoadBounds, ReportData
from moe_rl.simulators.result import IMBALANCE_PARTS

PER_RANK_PARTS = ("attention", "tensor_parallel", "shared_experts", "dense_mlp", "head")
"""Parts that follow the sequences of a rank."""
PLAN_PARTS = ("replicate", "prefetch", "reorder")
LITTLE_TIME = 0.03
"""Waiting below this share of the step is inside the model's error: what is left is work."""
LITTLE_LOAD = 0.02
"""Imbalance below this counts as balanced."""
PUBLISHED = {"static": 1.5, "eplb-oracle": 1.15}
"""Lower ends of the published speed-ups over these policies, on the same loads (arXiv:2605.08639, arXiv:2606.04101)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Why the best policy is not faster, and whether this trace can show published gains."""

    policy: str
    verdict: str
    """kernel, packing, node, placement, split or plan; "balanced" where times were not computed and little is left."""
    seconds: Mapping[str, float]
    """Of the policy's step: kernels, packing, routing, plan, pipeline_bubble; empty where times were not computed."""
    sentences: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """Return the limits as plain values."""
        values = {"policy": self.policy, "verdict": self.verdict, "sentences": list(self.sentences)}
        return values | ({"seconds": dict(self.seconds)} if self.seconds else {})


def limits(report: ReportData) -> Limits | None:
    """Return what limits the report's best policy; None for a report without bounds."""
    best = report.best
    bounds = report.bounds.get(best.policy)
    if bounds is None:
        return None
    excess = bounds.excess(best)
    cause = max(excess, key=lambda name: excess[name])
    seconds = _seconds(report, best)
    if seconds:
        verdict = _verdict(seconds, cause)
        first = _timed_sentences(verdict, best, bounds, seconds)
    else:
        verdict = cause if best.imbalance - 1.0 >= LITTLE_LOAD else "balanced"
        first = (_load_sentence(verdict, best, bounds),)
    sentences = (*first, *_between_nodes(report), *_published(report))
    return Limits(policy=best.policy, verdict=verdict, seconds=seconds, sentences=sentences)


def _seconds(report: ReportData, best: StepPrediction) -> dict[str, float]:
    """Cut the step of `best`; empty where times or yardsticks are missing."""
    forced, ideal = report.yardstick("forced_balance"), report.yardstick("ideal")
    if not (best.breakdown_s and forced and forced.breakdown_s and ideal and ideal.breakdown_s):
        return {}

    def above(names: tuple[str, ...], other: Mapping[str, float]) -> float:
        own = best.breakdown_s or {}
        return max(0.0, sum(own.get(name, 0.0) - other.get(name, 0.0) for name in names))

    cut = {
        "packing": above(PER_RANK_PARTS, ideal.breakdown_s),
        "routing": above(IMBALANCE_PARTS, forced.breakdown_s),
        "plan": above(PLAN_PARTS, {}),
        "pipeline_bubble": best.breakdown_s.get("pipeline_bubble", 0.0),
    }
    return {"kernels": sum(best.breakdown_s.values()) - sum(cut.values()), **cut}


def _verdict(seconds: Mapping[str, float], cause: str) -> str:
    waits = {name: seconds[name] for name in ("packing", "routing", "plan")}
    if sum(waits.values()) < LITTLE_TIME * sum(seconds.values()):
        return "kernel"
    largest = max(waits, key=lambda name: waits[name])
    return cause if largest == "routing" else largest


def _timed_sentences(
    verdict: str, best: StepPrediction, bounds: LoadBounds, seconds: Mapping[str, float]
) -> tuple[str, ...]:
    """Return the verdict in a short sentence, and what follows from it."""
    step = sum(seconds.values())
    if verdict == "kernel":
        return (
            f"Kernel-limited: {seconds['kernels'] / step:.0%} of the step under {best.policy} is work that perfect "
            "balance would leave.",
            f"Most of it: {_largest_parts(best)}. Faster kernels, faster links or another parallelism shorten it; "
            "placement does not.",
        )
    if verdict == "packing":
        return (
            f"Packing-limited: {seconds['packing'] / step:.1%} of the step under {best.policy} waits for the rank with "
            "the longest sequences.",
            "Attention grows with the square of their length. Micro-batches of evener sequences remove the waiting; "
            "experts have no part in it.",
        )
    if verdict == "plan":
        return (
            f"Limited by its own cost: {best.policy} spends {seconds['plan'] / step:.1%} of the step on copies and "
            "moves of experts, more than the waiting that is left.",
        )
    waiting = f"{seconds['routing'] / step:.1%} of the step under {best.policy} waits for the busiest rank: "
    return (f"{verdict.capitalize()}-limited: {waiting}{_reason(verdict, best, bounds)}",)


def _load_sentence(verdict: str, best: StepPrediction, bounds: LoadBounds) -> str:
    if verdict == "balanced":
        return (
            f"Balanced: {best.policy} leaves {best.imbalance - 1.0:.1%} above the mean load; only faster kernels, "
            "faster links or another parallelism shorten a step of such loads."
        )
    return f"{verdict.capitalize()}-limited: {_reason(verdict, best, bounds)}"


def _reason(verdict: str, best: StepPrediction, bounds: LoadBounds) -> str:
    holds = f"it holds {best.imbalance:.3f} times the mean load"
    if verdict == "node":
        floor = "" if bounds.node is None else f", no replicas inside nodes go below {bounds.node:.3f} with these homes"
        return (
            f"{holds}{floor}, its node {best.node_imbalance:.3f}. Other homes, other micro-batches (packing) or "
            "--cross-node-slots can bring nodes closer."
        )
    if verdict == "placement":
        return (
            f"{holds}, and no split of tokens over this plan's instances goes below {bounds.placement:.3f}. Other "
            "homes or more --replica-slots can."
        )
    return (
        f"{holds}, though a split of tokens over the same instances reaches {bounds.placement:.3f}: only a split for "
        "every micro-batch follows the load."
    )


def _largest_parts(best: StepPrediction) -> str:
    parts = best.breakdown_s or {}
    step = sum(parts.values())
    largest = sorted(parts, key=lambda name: -parts[name])[:3]
    return ", ".join(f"{part_name(name)} {parts[name] / step:.0%}" for name in largest)


def _between_nodes(report: ReportData) -> list[str]:
    """Say how much of static placement's imbalance replicas inside nodes cannot reach."""
    static = report.baseline
    if static is None or static.policy not in report.bounds:
        return []
    node = report.bounds[static.policy].excess(static)["node"]
    if node < LITTLE_LOAD:
        return []
    return [
        f"Static placement loads the busiest rank {static.imbalance - 1.0:.0%} above the mean; replicas inside nodes "
        f"alone cannot bring that below {node:.0%} (node bound)."
    ]


def _published(report: ReportData) -> list[str]:
    """Say whether the gains that papers report can appear on this trace in this setting."""
    static, forced = report.baseline, report.yardstick("forced_balance")
    if not report.timed or static is None or forced is None or not (forced.step_time_s and static.step_time_s):
        return []
    ceiling = _against(report, forced.step_time_s)
    reached = _against(report, report.best.step_time_s or forced.step_time_s)
    published = "Published gains (1.5-1.6x over static placement, 1.15-1.2x over EPLB with oracle loads)"
    if _as_published(reached):
        return [f"{published} appear on this trace in this setting: {report.best.policy} is {_faster(reached)}."]
    if _as_published(ceiling):
        return [
            f"{published} would be possible on this trace, where balanced routing is {_faster(ceiling)}; none of the "
            "policies simulated here gets there."
        ]
    return [
        f"{published} need more imbalance than this trace has in this setting: even perfectly balanced routing would "
        f"be only {_faster(ceiling)}."
    ]


def _against(report: ReportData, seconds: float) -> dict[str, float]:
    """Return how much faster a step of `seconds` is than those of the policies that papers compare with."""
    return {
        policy.policy: policy.step_time_s / seconds
        for policy in report.policies
        if policy.policy in PUBLISHED and policy.step_time_s
    }


def _as_published(speedups: Mapping[str, float]) -> bool:
    return all(speedup >= PUBLISHED[name] for name, speedup in speedups.items())


def _faster(speedups: Mapping[str, float]) -> str:
    return " and ".join(f"{speedup:.2f}x as fast as {name}" for name, speedup in speedups.items())
