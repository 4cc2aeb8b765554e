"""Predicted beside measured seconds of a training step, part by part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_rl.core.errors import require
from moe_rl.profiling.attribution import ALL_TO_ALL, EXPERT_GEMM, OUTSIDE_EXPERTS, AttributedWork, seconds_by_part
from moe_rl.profiling.waiting import WaitSplit

# Keys of a prediction's `breakdown_s`; `overlap` and `pipeline_bubble` are not work of a GPU.
PART_OF_PREDICTION = {
    "expert_gemm": EXPERT_GEMM, "all_to_all": ALL_TO_ALL, "replicate": "replicate", "prefetch": "replicate",
    "attention": "attention", "tensor_parallel": "attention", "context_parallel": "attention",
    "shared_experts": OUTSIDE_EXPERTS, "dense_mlp": OUTSIDE_EXPERTS, "fixed": OUTSIDE_EXPERTS, "head": OUTSIDE_EXPERTS,
    "optimizer": "optimizer", "reorder": "reorder",
}  # fmt: skip
ONCE_PER_STEP = ("optimizer", "reorder")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPart:
    """Predicted beside measured seconds of one part."""

    part: str
    predicted_s: float
    measured_s: float

    @property
    def relative_error(self) -> float | None:
        """predicted / measured - 1; None where nothing was measured."""
        if self.measured_s <= 0:
            return None
        return self.predicted_s / self.measured_s - 1.0


def measured_parts(per_rank: Sequence[Sequence[AttributedWork]], waiting: WaitSplit | None) -> dict[str, float]:
    """Return the seconds of every part as a step sees them, all recorded steps together.

    The all-to-all is its transfer, and the experts are the slowest rank of every call. Without ranges (`waiting` None)
    the all-to-all is that of the rank that spent least in it, which may still hold waiting, and the experts those of
    the slowest rank of the whole recording. Everything else is the slowest rank's total.
    """
    require(len(per_rank) > 0, "no recordings were given.")
    totals = [seconds_by_part(attributed) for attributed in per_rank]
    measured: dict[str, float] = {}
    for of_rank in totals:
        for part, seconds in of_rank.items():
            measured[part] = max(measured.get(part, 0.0), seconds)
    if ALL_TO_ALL in measured:
        # The rank that spends least in it waits least: nearest to the transfer alone.
        measured[ALL_TO_ALL] = min(of_rank.get(ALL_TO_ALL, 0.0) for of_rank in totals)
    if waiting is not None:
        measured[ALL_TO_ALL] = waiting.transfer_s
        if EXPERT_GEMM in measured:
            measured[EXPERT_GEMM] = waiting.slowest_experts_s
    return measured


def compare(
    breakdown_s: Mapping[str, float],
    measured_s: Mapping[str, float],
    *,
    share_of_step: float = 1.0,
    attention_marked: bool = True,
) -> list[ComparedPart]:
    """Return one row per part that either side knows, in the order of `PART_OF_PREDICTION`.

    `share_of_step` is the recorded share of the step's micro-batches; what happens once per step is not scaled by it.
    Without ranges around attention only its core kernels are known, so it is compared as a part of the rest.
    """
    predicted: dict[str, float] = {}
    for name, seconds in breakdown_s.items():
        part = PART_OF_PREDICTION.get(name)
        if part is not None and seconds > 0:
            # A recording of 4 of 32 micro-batches holds an eighth of the layers' work and the whole optimizer.
            scale = 1.0
            if part not in ONCE_PER_STEP:
                scale = share_of_step
            predicted[part] = predicted.get(part, 0.0) + scale * seconds
    measured = {part: seconds for part, seconds in measured_s.items() if seconds > 0}
    if not attention_marked:
        for seconds_of_part in (predicted, measured):
            if "attention" in seconds_of_part:
                seconds_of_part[OUTSIDE_EXPERTS] = seconds_of_part.get(OUTSIDE_EXPERTS, 0.0) + seconds_of_part.pop(
                    "attention"
                )
    rows = []
    for part in dict.fromkeys(PART_OF_PREDICTION.values()):
        if part in predicted or part in measured:
            predicted_s, measured_part_s = predicted.get(part, 0.0), measured.get(part, 0.0)
            rows.append(ComparedPart(part=part, predicted_s=predicted_s, measured_s=measured_part_s))
    return rows
