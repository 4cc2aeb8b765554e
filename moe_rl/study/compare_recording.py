"""A recorded step, attributed, beside a policy's step out of a file of `moe-rl simulate --json`: `moe-rl profile`."""

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_rl.core.errors import InvalidInputError, require, require_known
from moe_rl.core.mappings import in_units
from moe_rl.profiling.attribution import AttributedWork, BusyTime, Call, attribute, busy_time, seconds_by_category
from moe_rl.profiling.comparison import PART_OF_PREDICTION, ComparedPart, compare, measured_parts
from moe_rl.profiling.events import ProfiledRun
from moe_rl.profiling.waiting import WaitSplit, split_waiting
from moe_rl.report.document import SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """The simulator's step of one policy."""

    policy: str
    breakdown_s: Mapping[str, float]
    num_micro_batches: int | None
    """None: the file does not say."""

    def share_of_step(self, calls: Collection[Call]) -> tuple[float, list[str]]:
        """Return the share of the predicted micro-batches that was recorded, and notes on it for the reader."""
        predicted = self.num_micro_batches
        micro_batches = {call.micro_batch for call in calls}
        recorded = len(micro_batches - {None})
        if not recorded or predicted is None:
            return 1.0, ["the recording does not say which micro-batches it contains, so moe_rl assumes whole steps."]
        require(
            recorded <= predicted,
            f"the recording and the prediction are of different steps: the recording has {recorded} micro-batches, "
            f"the prediction only {predicted}.",
        )
        if recorded == predicted:
            return 1.0, []
        return recorded / predicted, [
            f"the recording contains {recorded} of the {predicted} micro-batches, so predicted seconds are scaled "
            "by that share."
        ]

    def notes(self) -> list[str]:
        """Return a sentence that names the predicted parts without a measured counterpart."""
        parts = []
        for name, seconds in self.breakdown_s.items():
            if name not in PART_OF_PREDICTION and seconds:
                parts.append(f"{name} {seconds:.3g} s")
        if not parts:
            return []
        return [f"not compared, because these parts are predicted but are not GPU work: {', '.join(parts)}."]


def read_prediction(path: Path, policy: str) -> PredictedStep:
    """Read one policy, or yardstick, of a simulation with times."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInputError(f"--predicted {path} does not exist.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidInputError(f"--predicted {path} is not a JSON file: {error}.") from None
    is_ours = isinstance(document, dict) and document.get("schema") == SCHEMA
    require(is_ours, f"--predicted {path} was not written by moe-rl simulate --json (schema {SCHEMA}).")
    rows = {**document.get("yardsticks", {}), **document.get("policies", {})}
    require_known(policy, rows, f"{path} has no results for --policy-name {policy!r}.")
    breakdown = rows[policy].get("breakdown_s")
    timed = isinstance(breakdown, dict)
    require(timed, f"{path} has no times for {policy!r}: rerun moe-rl simulate with --objective time.")
    return PredictedStep(
        policy=policy,
        breakdown_s={name: float(seconds) for name, seconds in breakdown.items()},
        num_micro_batches=document.get("setting", {}).get("num_micro_batches"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributedStep:
    """Recordings of the ranks of one step, attributed. R ranks."""

    runs: dict[int, ProfiledRun]
    work: list[list[AttributedWork]]
    """[R] the kernels of every rank, each with the work that it did."""
    steps: int
    """Training steps in each recording."""
    waiting: WaitSplit | None
    why_no_waiting: str
    compared: tuple[ComparedPart, ...]
    notes: tuple[str, ...]

    @property
    def seconds(self) -> list[dict[str, float]]:
        """[R] seconds by category."""
        return [seconds_by_category(attributed) for attributed in self.work]

    def kernel_seconds(self, *, communication: bool) -> list[float]:
        """Return [R] summed time of the kernels that move data between ranks, or of the others."""
        seconds = []
        for work in self.work:
            kernels = filter(lambda kernel: kernel.is_communication == communication, work)
            seconds.append(sum(kernel.seconds for kernel in kernels))
        return seconds

    @property
    def busy(self) -> list[BusyTime] | None:
        """[R] how the GPUs spent their time; None for recordings of CPU operators, whose self times overlap nothing."""
        on_gpu = next(iter(self.runs.values())).device == "cuda"
        if not on_gpu:
            return None
        return [busy_time(attributed) for attributed in self.work]


def attribute_recording(
    runs: dict[int, ProfiledRun], steps: int | None, prediction: PredictedStep | None
) -> AttributedStep:
    """Attribute the recordings and hold them against the prediction; `steps` None: as many as were marked."""
    work = [attribute(run) for run in runs.values()]
    waiting, why = None, ""
    try:  # It needs ranges and two ranks: without them everything else is still worth printing.
        waiting = split_waiting(work)
    except InvalidInputError as error:
        why = str(error)
    counted = steps or _marked_steps(list(runs.values()))
    compared: list[ComparedPart] = []
    notes = _notes(runs, work)
    if prediction is not None:
        calls: set[Call] = set()
        attention_marked = False
        for kernel in itertools.chain.from_iterable(work):
            if kernel.call is not None:
                calls.add(kernel.call)
                attention_marked |= kernel.category == "attention"
        share, sentences = prediction.share_of_step(calls)
        measured = measured_parts(work, waiting)
        measured_per_step = in_units(measured, counted)
        compared = compare(
            prediction.breakdown_s, measured_per_step, share_of_step=share, attention_marked=attention_marked
        )
        notes += [*sentences, *prediction.notes(), *_compared_notes(waiting, ranks=len(runs))]
    return AttributedStep(
        runs=runs,
        work=work,
        steps=counted,
        waiting=waiting,
        why_no_waiting=why,
        compared=tuple(compared),
        notes=tuple(notes),
    )


def _marked_steps(runs: Sequence[ProfiledRun]) -> int:
    marked = {run.num_steps for run in runs}
    require(
        len(marked) == 1,
        f"the recordings have different numbers of steps ({', '.join(sorted(map(str, marked)))}): set --steps.",
    )
    return marked.pop() or 1


def _notes(runs: dict[int, ProfiledRun], work: Sequence[Sequence[AttributedWork]]) -> list[str]:
    sentences = []
    if next(iter(runs.values())).device == "cpu":
        sentences.append(
            "no GPU work was recorded. All times are those of CPU operators, without the operators that they called."
        )
    unlinked = sum(run.unlinked for run in runs.values())
    if unlinked:
        sentences.append(
            f"{unlinked} kernels have no recorded launch, so they are assigned to a part of the step by their names."
        )
    has_ranges, outside_s = False, 0.0
    for kernel in itertools.chain.from_iterable(work):
        if kernel.call:
            has_ranges = True
        elif kernel.kernel_class == "all_to_all":
            # A flat NCCL all-to-all has one kernel name for whatever it moves.
            outside_s += kernel.seconds
    if not has_ranges:
        sentences.append(
            "no ranges of moe_rl were recorded (moe_rl.profiling.ranges.enable), so kernels are assigned to a part "
            "of the step by their names."
        )
    if outside_s > 0:
        sentences.append(
            f"{outside_s:.3g} s of all-to-all kernels are outside every range of moe_rl. Their names do not show "
            "whether they dispatch, combine or pass pipeline activations, so they count as `other`."
        )
    return sentences


def _compared_notes(waiting: WaitSplit | None, *, ranks: int) -> list[str]:
    if waiting is not None:
        return [
            "measured values: the all-to-all time excludes waiting, and the experts' time in every call is that of the "
            "slowest rank."
        ]
    whose = "that of the rank that spends the least time in all-to-alls"
    if ranks == 1:
        whose = "that of this rank"
    return [f"measured values: the all-to-all time is {whose}. It includes waiting, so it may exceed the prediction."]
