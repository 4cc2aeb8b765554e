"""The tables of `moe-rl profile`, at most 100 columns wide."""

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_rl.profiling.attribution import CATEGORIES
from moe_rl.profiling.waiting import WaitSplit
from moe_rl.report.tables import figures_table
from moe_rl.report.units import decimals, time_unit
from moe_rl.study.compare_recording import AttributedStep, PredictedStep

MAX_RANK_COLUMNS = 8  # With them and the mean a table still has at most 100 columns.
DIGITS = 4  # Significant digits of a table's largest number.
SELDOM = ("reorder", "plan", "optimizer")  # Categories that get a row only where they occur.


def print_profile(profiled: AttributedStep, prediction: PredictedStep | None, console: Console) -> None:
    """Print seconds per category and rank, the split of waiting, and predicted beside measured."""
    console.print(_categories(profiled))
    if profiled.waiting is None:
        console.print(Text(f"waiting cannot be computed: {profiled.why_no_waiting}"))
    else:
        _print_waiting(profiled, profiled.waiting, console)
    if prediction is not None:
        console.print(_comparison(profiled, prediction))
    for note in profiled.notes:
        console.print(Text(f"note: {note}", style="yellow"))


def _written(seconds: Iterable[float]) -> tuple[str, Callable[[float], str]]:
    """Return a unit, and a function that writes seconds in it with equally many decimals, so that columns line up."""
    values = list(seconds)
    unit, size = time_unit(values)
    largest = max(values, default=0.0) / size
    places = decimals(largest, DIGITS) + (largest < 1.0)  # the zero before the point is no digit
    return unit, lambda value: f"{value / size:.{places}f}"


def _categories(profiled: AttributedStep) -> Table:
    rows = []
    for name in CATEGORIES:
        seconds = [of_rank[name] for of_rank in profiled.seconds]
        if name not in SELDOM or any(seconds):
            rows.append((name, seconds))
    kinds = [
        ("communication", profiled.kernel_seconds(communication=True)),
        ("computation", profiled.kernel_seconds(communication=False)),
    ]
    busy = profiled.busy or []
    spans = [
        ("exposed communication", [of_rank.exposed_communication_s for of_rank in busy]),
        ("idle", [of_rank.idle_s for of_rank in busy]),
        ("first to last kernel", [of_rank.span_s for of_rank in busy]),
    ]
    if profiled.steps > 1:
        steps = f", {profiled.steps} steps"
    else:
        steps = ""
    return _by_rank(profiled, f"by rank{steps}", [rows, kinds, spans if busy else []])


def _by_rank(
    profiled: AttributedStep, heading: str, sections: Sequence[Sequence[tuple[str, Sequence[float]]]]
) -> Table:
    """Return a table of seconds with one column per rank."""
    unit, write = _written(seconds for section in sections for _, row in section for seconds in row)
    headings, cells = _rank_columns(list(profiled.runs))
    table = figures_table(f"{unit} {heading}", *headings)
    for section in sections:
        for name, seconds in section:
            table.add_row(_words(name), *map(write, cells(seconds)))
        table.add_section()
    return table


def _rank_columns(ranks: Sequence[int]) -> tuple[list[str], Callable[[Sequence[float]], list[float]]]:
    """Return headings and a function for the cells below them: each rank if they are few, else their spread."""
    if len(ranks) == 1:
        return [f"rank {ranks[0]}"], list
    if len(ranks) <= MAX_RANK_COLUMNS:
        return [*(f"rank {rank}" for rank in ranks), "mean"], lambda seconds: [*seconds, sum(seconds) / len(seconds)]
    return ["mean", "least", "most"], lambda seconds: [sum(seconds) / len(seconds), min(seconds), max(seconds)]


def _print_waiting(profiled: AttributedStep, waiting: WaitSplit, console: Console) -> None:
    rows = [
        ("transfer", [waiting.transfer_s] * len(waiting.wait_s)),
        ("waiting for slower ranks", list(waiting.wait_s)),
    ]
    console.print(_by_rank(profiled, "of all-to-all by rank", [rows]))
    unit, write = _written([waiting.imbalance_loss_s, waiting.expert_loss_s])
    console.print(
        Text(
            f"Because of imbalance, a rank waits {write(waiting.imbalance_loss_s)} {unit} on average. The slowest "
            f"rank's experts explain {write(waiting.expert_loss_s)} {unit} of it.",
            style="bold",
        )
    )


def _comparison(profiled: AttributedStep, prediction: PredictedStep) -> Table:
    unit, write = _written(value for row in profiled.compared for value in (row.predicted_s, row.measured_s))
    table = figures_table(f"{unit} of a step, {prediction.policy}", "predicted", "measured", "error", gap=2)
    for row in profiled.compared:
        if row.relative_error is None or not row.predicted_s:
            error = ""
        else:
            error = f"{row.relative_error:+.1%}"
        table.add_row(_words(row.part), write(row.predicted_s), write(row.measured_s), error)
    return table


def _words(name: str) -> str:
    return name.replace("all_to_all", "all-to-all").replace("_", " ")
