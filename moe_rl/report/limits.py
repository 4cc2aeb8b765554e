"""What limits the best policy: its step time beside the simulator's yardsticks, its loads beside the planner's bounds.

A step under a policy is cut into work that perfect balance would leave (`kernels`), waiting for ranks with longer
sequences (`packing`: per-rank work above its even spread), waiting for the rank with the most routed rows (`routing`:
expert GEMM and all-to-all above forced balance), the plan's own copies and moves (`plan`), and the pipeline bubble.
Waiting for routing is then put down to the bound that explains most of the imbalance: node, placement or split.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moe_rl.core.mappings import in_units, subset
from moe_rl.core.metrics import StepPrediction
from moe_rl.report.bars import part_name
from moe_rl.report.simulation import LoadBounds, ReportData
from moe_rl.report.units import largest_shares
from moe_rl.report.words import read_words
from moe_rl.simulators.result import IMBALANCE_PARTS

# These parts grow with the sequences of a rank, whatever its experts do.
PER_RANK_PARTS = ("attention", "tensor_parallel", "context_parallel", "shared_experts", "dense_mlp", "head")
PLAN_PARTS = ("replicate", "prefetch", "reorder")
# These parts shrink while a rank waits: they are what work on the GPU does not cover.
UNCOVERED_PARTS = ("host", "grad_reduce", "param_gather")
# Waiting below this share of the step is inside the model's error: the step counts as work.
LITTLE_TIME = 0.03
# Imbalance below this counts as balanced.
LITTLE_LOAD = 0.02
WORDS = read_words("sentences.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Why the best policy is not faster."""

    policy: str
    verdict: str
    """kernel, host, packing, node, placement, split or plan; "balanced" where times were not computed and little is
    left."""
    seconds: Mapping[str, float]
    """Of the policy's step: kernels, packing, routing, plan, pipeline_bubble; empty where times were not computed."""
    sentences: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """Return the limits as plain values."""
        values = {"policy": self.policy, "verdict": self.verdict, "sentences": list(self.sentences)}
        return values | ({"seconds": dict(self.seconds)} if self.seconds else {})


def limits(report: ReportData) -> Limits | None:
    """Return the limits of the report's best policy; None for a report without bounds."""
    best = report.best
    bounds = report.bounds.get(best.policy)
    if bounds is None:
        return None
    excess = bounds.excess(best)
    verdict = max(excess, key=lambda name: excess[name])
    seconds = _seconds(report, best)
    if seconds:
        verdict = _verdict(seconds, verdict)
        if verdict == "kernel" and _host_covers_waits(report, best):
            verdict = "host"
    elif best.imbalance - 1.0 < LITTLE_LOAD:
        verdict = "balanced"
    sentences = (*_explained(verdict, best, bounds, seconds), *_between_nodes(report))
    return Limits(policy=best.policy, verdict=verdict, seconds=seconds, sentences=sentences)


def _seconds(report: ReportData, best: StepPrediction) -> dict[str, float]:
    """Cut the step of `best`; empty where times or yardsticks are missing."""
    forced, ideal = report.yardstick("forced_balance"), report.yardstick("ideal")
    if not (best.breakdown_s and forced and forced.breakdown_s and ideal and ideal.breakdown_s):
        return {}

    def above(names: tuple[str, ...], other: Mapping[str, float]) -> float:
        breakdown_s = best.breakdown_s or {}
        return max(0.0, sum(breakdown_s.get(name, 0.0) - other.get(name, 0.0) for name in names))

    cut = {
        "packing": above(PER_RANK_PARTS, ideal.breakdown_s),
        "routing": above(IMBALANCE_PARTS, forced.breakdown_s),
        "plan": above(PLAN_PARTS, {}),
        "pipeline_bubble": best.breakdown_s.get("pipeline_bubble", 0.0),
    }
    # A balanced step would not be shorter by waits during which the host, or a transfer of gradients, goes on.
    waiting_s = cut["packing"] + cut["routing"] + cut["plan"]
    if waiting_s:
        left = max(0.0, 1.0 - _covered_s(best.breakdown_s, ideal.breakdown_s) / waiting_s)
        cut |= {name: left * cut[name] for name in ("packing", "routing", "plan")}
    # Time that no wait explains is work.
    return {"kernels": sum(best.breakdown_s.values()) - sum(cut.values()), **cut}


def _covered_s(parts_s: Mapping[str, float], ideal_s: Mapping[str, float]) -> float:
    """Return by how many seconds more of the uncovered parts the ideal step has.

    Example: balance saves 3 s of expert GEMM, but the host's part grows from 4 s to 7 s: the waits cover 3 s.
    """
    return max(0.0, sum(ideal_s.get(name, 0.0) - parts_s.get(name, 0.0) for name in UNCOVERED_PARTS))


def _host_covers_waits(report: ReportData, best: StepPrediction) -> bool:
    """Return whether waits that would count are no longer than what the host, and transfers beside it, go on with."""
    ideal = report.yardstick("ideal")
    if not (best.breakdown_s and ideal and ideal.breakdown_s):
        return False
    host_grows = ideal.breakdown_s.get("host", 0.0) > best.breakdown_s.get("host", 0.0)
    covered_s = _covered_s(best.breakdown_s, ideal.breakdown_s)
    return host_grows and covered_s >= LITTLE_TIME * sum(best.breakdown_s.values())


def _verdict(seconds: Mapping[str, float], cause: str) -> str:
    """Return the largest wait of the step, that for routing by its `cause`; "kernel" where all of them are small."""
    waits = subset(seconds, ("packing", "routing", "plan"))
    if sum(waits.values()) < LITTLE_TIME * sum(seconds.values()):
        return "kernel"
    largest = max(waits, key=lambda name: waits[name])
    if largest == "routing":
        return cause
    return largest


def _explained(verdict: str, best: StepPrediction, bounds: LoadBounds, seconds: Mapping[str, float]) -> Iterator[str]:
    """Yield the verdict in a short sentence, and its consequence."""
    reason = ""
    if verdict in WORDS["reasons"]:
        if bounds.node is None:
            floor = ""
        else:
            floor = WORDS["reasons"]["node_floor"].format(bounds=bounds)
        reason = WORDS["reasons"][verdict].format(best=best, bounds=bounds, floor=floor)
    largest = ""
    if verdict == "kernel":
        parts_s = best.breakdown_s or {}
        largest = largest_shares(in_units(parts_s, sum(parts_s.values())), part_name)
    spent = {"kernel": "kernels", "host": "kernels", "packing": "packing", "plan": "plan"}.get(verdict, "routing")
    facts = {
        "best": best,
        "kind": verdict.capitalize(),
        "reason": reason,
        "excess": best.imbalance - 1.0,
        "share": seconds[spent] / sum(seconds.values()) if seconds else 0.0,
        "largest": largest,
    }
    # Node, placement and split are told alike: as waiting for routing.
    template = WORDS["limits"].get(verdict) or WORDS["limits"]["routing" if seconds else "untimed"]
    return (sentence.format(**facts) for sentence in template)


def _between_nodes(report: ReportData) -> list[str]:
    """Say how much of static placement's imbalance replicas inside nodes cannot reach."""
    static = report.baseline
    if static is None or static.policy not in report.bounds:
        return []
    node = report.bounds[static.policy].excess(static)["node"]
    if node < LITTLE_LOAD:
        return []
    return [WORDS["between_nodes"].format(excess=static.imbalance - 1.0, node=node)]
