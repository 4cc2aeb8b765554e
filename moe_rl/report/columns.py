"""The columns of the policy table, shared by the terminal and the page; their words are in columns.yaml."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moe_rl.core.errors import require_known
from moe_rl.core.metrics import StepPrediction
from moe_rl.report.simulation import ReportData
from moe_rl.report.units import GIB, byte_unit, decimals, time_unit
from moe_rl.report.words import read_words

WORDS: dict[str, dict[str, Any]] = read_words("columns.yaml")
# The columns that a terminal shows, with and without times; the page and `--json` have all.
DEFAULT_TIMED = (
    "imbalance", "step_time_s", "step_time_interval_s", "speedup_vs_static", "vs_best_engine",
    "fraction_of_forced_balance", "peak_memory_bytes",
)  # fmt: skip
DEFAULT_WITHOUT_ENGINE = (
    "imbalance", "step_time_s", "step_time_interval_s", "speedup_vs_static", "fraction_of_forced_balance",
    "moved_bytes", "peak_memory_bytes",
)  # fmt: skip
DEFAULT_LOADS = ("imbalance", "node_imbalance", "node_bound", "placement_bound", "replicas_per_plan", "moved_bytes")
ALL = "all"


# A number, or both ends of an interval.
Figure = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One figure of every policy, with the same number of decimals throughout."""

    field: str
    """As `--columns` and `--json` name it."""
    heading: str
    """Two short lines."""
    meaning: str
    write: Callable[[Figure], str]
    value: Callable[[StepPrediction], Figure | None]

    @property
    def lines(self) -> list[str]:
        """The heading's lines."""
        return self.heading.split("\n")

    def text(self, prediction: StepPrediction) -> str:
        """Return the figure as text; empty where it was not computed."""
        value = self.value(prediction)
        if value is None:
            return ""
        return self.write(value)


def cells_of(columns: Sequence[Column], prediction: StepPrediction) -> list[str]:
    """Return a policy's figures, one per column."""
    return [column.text(prediction) for column in columns]


def columns(report: ReportData) -> list[Column]:
    """Return the columns that at least one policy fills; those of times carry * where loads are scaled."""
    rows = (*report.policies, *report.yardsticks)
    columns_of_report = []
    for name, words in WORDS.items():
        value = _value(report, name)
        figures = _figures(rows, value)
        if not figures or (words.get("idle") and not any(figures)):
            continue
        unit, write = _form(words["form"], max(figures))
        first_line, second = words["heading"]
        mark = ""
        if report.scaled and words.get("scaled"):
            mark = "*"
        heading = f"{first_line}{mark}\n{second}".format(unit=unit)
        columns_of_report.append(
            Column(field=name, heading=heading, meaning=words["meaning"], write=write, value=value)
        )
    return columns_of_report


def _figures(rows: Iterable[StepPrediction], value: Callable[[StepPrediction], Figure | None]) -> list[Figure]:
    """Return a column's figures of the rows that have one."""
    figures = []
    for row in rows:
        figure = value(row)
        if figure is not None:
            figures.append(figure)
    return figures


def _value(report: ReportData, name: str) -> Callable[[StepPrediction], Figure | None]:
    """Return the function that reads a column's figure: a bound from the report, all else from the policy."""
    if name == "vs_best_engine":
        return report.speedup_vs_best_engine
    if not name.endswith("_bound"):
        return lambda row: getattr(row, name)
    bound = name.removesuffix("_bound")

    def value_of_bound(row: StepPrediction) -> Figure | None:
        if row.policy not in report.bounds:
            return None
        value: Figure | None = getattr(report.bounds[row.policy], bound)
        return value

    return value_of_bound


def _form(form: str, largest: Figure) -> tuple[str, Callable[[Figure], str]]:
    """Return the unit of a column by its largest figure, and the function that writes its figures."""
    if form == "interval":
        unit, size = time_unit([largest[1]])
        places = decimals(largest[1] / size, 3)
        return unit, lambda ends: "-".join(f"{end / size:.{places}f}" for end in ends)
    if form == "gib":
        return "GiB", lambda value: f"{value / GIB:.1f}"
    if form not in ("seconds", "bytes"):
        return "", form.format
    unit, size = time_unit([largest]) if form == "seconds" else byte_unit(largest or 1e9)
    places = decimals(largest / size, 4 if form == "seconds" else 3)
    return unit, lambda value: f"{value / size:.{places}f}"


def chosen_columns(report: ReportData, names: Sequence[str] = ()) -> list[Column]:
    """Return the columns of these names, in this order, or ("all",) of them; without names those that matter most."""
    check_columns(names)
    column_by_field = {column.field: column for column in columns(report)}
    if report.best_engine is None:
        timed = DEFAULT_WITHOUT_ENGINE
    else:
        timed = DEFAULT_TIMED
    wanted = tuple(names) or (timed if report.timed else DEFAULT_LOADS)
    if not names and "step_time_interval_s" in column_by_field:
        # A terminal of 80 columns has room for six figures.
        dropped = "fraction_of_forced_balance"
        if report.best_engine is None:
            dropped = "moved_bytes"
        wanted = tuple(name for name in wanted if name != dropped)
    if wanted == (ALL,):
        return list(column_by_field.values())
    # A column that no policy fills is left out.
    return [column_by_field[name] for name in wanted if name in column_by_field]


def check_columns(names: Iterable[str]) -> None:
    """Raise for a name that no column has."""
    names_of_columns = (ALL, *WORDS)
    for name in names:
        require_known(name, names_of_columns, f"--columns: there is no column {name!r}.")
