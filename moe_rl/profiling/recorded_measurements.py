"""From a recording to rows that `calibrate` reads: one expert GEMM and one all-to-all per phase."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from moe_rl.core.errors import require
from moe_rl.core.mappings import attributes
from moe_rl.core.model import MoeModelSpec
from moe_rl.profiling.attribution import AttributedWork, expert_seconds_of_ranks
from moe_rl.profiling.measurements import PHASES, Measurement
from moe_rl.profiling.waiting import WaitSplit

# Largest max / mean expert time of a rank at which routing counts as uniform.
BALANCED_WITHIN = 1.1

NO_HOST_TIME = (
    "no moe_layer rows (for layer_fixed_forward_ms and layer_fixed_backward_ms): a recording of kernels does not show "
    "host time."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedShape:
    """The facts that a recording does not hold."""

    model: MoeModelSpec
    dispatcher: str
    ep_size: int
    ranks_per_node: int
    tokens_per_rank: int
    group: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedMeasurements:
    """Rows, and the reasons why others are missing."""

    rows: tuple[Measurement, ...]
    remarks: tuple[str, ...]
    """Sentences: which rows are missing, and why."""


def derive_measurements(
    per_rank: Sequence[Sequence[AttributedWork]], waiting: WaitSplit | None, shape: RecordedShape
) -> DerivedMeasurements:
    """Return the rows that the recording allows, each a median over calls, and why others are missing.

    The cost model is affine in rows, so the mean over ranks of an expert GEMM is its time under uniform routing. A
    transfer is not: it follows the busiest rank, and is left out where routing was uneven or a rank is missing.
    """
    require(
        shape.model.activation != "gelu",
        f"model {shape.model.name!r}: only gated experts can be measured, not experts with activation "
        f"{shape.model.activation}.",
    )
    remarks = [NO_HOST_TIME]
    if len(per_rank) < shape.ep_size:
        remarks.append(f"expert_gemm rows are means over {len(per_rank)} of the {shape.ep_size} EP ranks.")
    rows = []
    for phase in PHASES:
        seconds = _expert_call_seconds(per_rank, phase)
        if seconds:
            rows.append(_row(shape, "expert_gemm", phase, seconds))
        else:
            remarks.append(f"no expert_gemm rows for {phase}: no moe_rl range of this phase contains expert work.")
    refusal = _why_no_transfers(len(per_rank), waiting, shape)
    if waiting is None or refusal:
        measured = {}
    else:
        measured = waiting.transfers_s
    for phase in PHASES if measured else ():
        transfers = [seconds for (_, call), seconds in measured.items() if call.phase == phase]
        if transfers:
            rows.append(_row(shape, "all_to_all", phase, transfers))
        else:
            remarks.append(f"no all_to_all rows for {phase}: no moe_rl range of this phase contains an all-to-all.")
    return DerivedMeasurements(rows=tuple(rows), remarks=(*remarks, *([refusal] if refusal else [])))


def _why_no_transfers(num_recordings: int, waiting: WaitSplit | None, shape: RecordedShape) -> str:
    if num_recordings != shape.ep_size:
        return f"no all_to_all rows: {num_recordings} of {shape.ep_size} ranks were recorded, so waiting is not known."
    if shape.model.num_expert_groups > 1:
        return f"no all_to_all rows: calibration does not support the expert groups of {shape.model.name}."
    if waiting is None:
        return "no all_to_all rows: waiting cannot be separated from transfer."
    imbalance = waiting.expert_imbalance
    if imbalance is not None and imbalance > BALANCED_WITHIN:
        return (
            f"no all_to_all rows: the busiest rank's experts took {imbalance:.2f} times the mean, but calibration "
            "assumes uniform routing (record with --moe-router-force-load-balancing)."
        )
    return ""


def _expert_call_seconds(per_rank: Sequence[Sequence[AttributedWork]], phase: str) -> list[float]:
    """Return the mean over ranks of every call's expert time."""
    of_ranks = expert_seconds_of_ranks(per_rank)
    return [float(seconds.mean()) for call, seconds in of_ranks.items() if call.phase == phase]


def _row(shape: RecordedShape, kind: str, phase: str, seconds: Sequence[float]) -> Measurement:
    of_model = ("hidden_size", "moe_ffn_hidden_size", "num_experts", "top_k")
    of_run = ("dispatcher", "ep_size", "ranks_per_node", "tokens_per_rank", "group")
    return Measurement(
        kind=kind,
        phase=phase,
        # The median: the first calls of a recording often wait for an allocation or for a kernel to load.
        time_ms=1e3 * median(seconds),
        **attributes(shape.model, of_model),
        **attributes(shape, of_run),
    )
