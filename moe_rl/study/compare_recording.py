"""A recorded step, attributed: what `moe-rl profile` prints."""

from collections.abc import Sequence
from dataclasses import dataclass

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.profiling.attribution import AttributedWork, attribute, seconds_by_category
from moe_rl.profiling.busy_time import BusyTime, busy_time
from moe_rl.profiling.comparison import ComparedPart, compare, measured_parts
from moe_rl.profiling.events import ProfiledRun
from moe_rl.profiling.waiting import WaitSplit, split_waiting
from moe_rl.study.read_predicted import PredictedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributedStep:
    """Recordings of the ranks of one step, attributed. R ranks."""

    runs: dict[int, ProfiledRun]
    work: list[list[AttributedWork]]
    """[R] what every kernel of a rank was for."""
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
        return [sum(item.seconds for item in work if item.is_communication == communication) for work in self.work]

    @property
    def busy(self) -> list[BusyTime] | None:
        """[R] how the GPUs spent their time; None for recordings of CPU operators, whose self times overlap nothing."""
        on_gpu = next(iter(self.runs.values())).device == "cuda"
        return [busy_time(attributed) for attributed in self.work] if on_gpu else None


def attribute_recording(
    runs: dict[int, ProfiledRun], steps: int | None, prediction: PredictedStep | None
) -> AttributedStep:
    """Attribute the recordings and hold them against the prediction; `steps` None: as many as were marked."""
    work = [attribute(run) for run in runs.values()]
    waiting, why = None, ""
    try:
        waiting = split_waiting(work)
    except InvalidInputError as error:
        why = str(error)
    counted = steps or _marked_steps(list(runs.values()))
    compared: list[ComparedPart] = []
    notes = _notes(runs, work)
    if prediction is not None:
        share, said = prediction.share_of_step({item.call for mine in work for item in mine if item.call is not None})
        measured = measured_parts(work, waiting)
        compared = compare(
            prediction.breakdown_s,
            {part: seconds / counted for part, seconds in measured.items()},
            share_of_step=share,
            attention_marked=any(item.category == "attention" and item.call for mine in work for item in mine),
        )
        notes += [*said, *prediction.notes(), *_compared_notes(waiting, ranks=len(runs))]
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
        len(marked) == 1, f"the recordings hold different numbers of steps ({sorted(map(str, marked))}): give --steps."
    )
    return marked.pop() or 1


def _notes(runs: dict[int, ProfiledRun], work: Sequence[Sequence[AttributedWork]]) -> list[str]:
    said = []
    if next(iter(runs.values())).device == "cpu":
        said.append("no GPU work was recorded: seconds are of CPU operators, each without those that it called.")
    unlinked = sum(run.unlinked for run in runs.values())
    if unlinked:
        said.append(f"{unlinked} kernels have no recorded launch: they count by their name alone.")
    if not any(item.call for mine in work for item in mine):
        said.append(
            "no moe_rl range was recorded (moe_rl.profiling.ranges.enable): kernels count by their names alone."
        )
    outside = sum(item.seconds for mine in work for item in mine if item.kernel_class == "all_to_all" and not item.call)
    if outside > 0:
        said.append(
            f"{outside:.3g} s of all-to-all kernels lie in no moe_rl range: whether they dispatch, combine or pass "
            "pipeline activations their names do not say, so they count as other."
        )
    return said


def _compared_notes(waiting: WaitSplit | None, *, ranks: int) -> list[str]:
    if waiting is not None:
        return ["measured: the all-to-all without waiting, the slowest rank's experts of every call."]
    whose = "this rank's" if ranks == 1 else "the rank's that spends least in it,"
    return [f"measured: the all-to-all is {whose} waiting included, and so may exceed what was predicted."]
