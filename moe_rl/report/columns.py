"""The columns of the policy table, shared by the terminal and the page."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from moe_rl.core.errors import nearest_name, require
from moe_rl.core.metrics import StepPrediction
from moe_rl.report.simulation import ReportData
from moe_rl.report.units import GIB, byte_unit, decimals, time_unit

DEFAULT_TIMED = (
    "imbalance",
    "step_time_s",
    "speedup_vs_static",
    "fraction_of_forced_balance",
    "moved_bytes",
    "peak_memory_bytes",
)
DEFAULT_LOADS = ("imbalance", "node_imbalance", "node_bound", "placement_bound", "replicas_per_plan", "moved_bytes")
"""What a terminal shows beside the policies' names, with and without times; the page and `--json` have all of it."""
COLUMNS = (
    "imbalance",
    "node_imbalance",
    "node_bound",
    "placement_bound",
    "step_time_s",
    "tokens_per_s",
    "speedup_vs_static",
    "fraction_of_forced_balance",
    "fraction_of_ideal",
    "replicas_per_plan",
    "cross_node_replicas_per_plan",
    "inter_node_copies_per_token",
    "moved_bytes",
    "reorder_share",
    "peak_memory_bytes",
    "resident_bytes",
    "plan_time_s",
)
"""What `--columns` takes, named as in `--json`."""
ZERO_IS_NOTHING = ("cross_node_replicas_per_plan", "inter_node_copies_per_token", "resident_bytes")
ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One figure of every policy, with the same number of decimals throughout."""

    field: str
    """Field of `StepPrediction`, or a name of its own where `values` is given."""
    heading: str
    """Two short lines."""
    meaning: str
    write: Callable[[float], str]
    values: Mapping[str, float] | None = None
    """The figure by policy, where `StepPrediction` does not hold it."""

    def cell(self, prediction: StepPrediction) -> str:
        """Return the figure as text; empty where it was not computed."""
        value = getattr(prediction, self.field) if self.values is None else self.values.get(prediction.policy)
        return "" if value is None else self.write(value)


def columns(report: ReportData) -> list[Column]:
    """Return the columns that at least one policy fills; those of times carry * where loads are scaled."""
    rows = (*report.policies, *report.yardsticks)
    mark = "*" if report.scaled else ""
    every = (*_balance_columns(), *_bound_columns(report), *_time_columns(rows, mark), *_cost_columns(rows))
    filled = [column for column in every if any(column.cell(row) for row in rows)]
    # Of one node, and of policies without such copies, these are zeros throughout.
    idle = [name for name in ZERO_IS_NOTHING if not any(getattr(row, name) for row in rows)]
    return [column for column in filled if column.field not in idle]


def chosen_columns(report: ReportData, names: Sequence[str] = ()) -> list[Column]:
    """Return the columns of these names, in this order, or ("all",) of them; without names six that matter most."""
    check_columns(names)
    found = {column.field: column for column in columns(report)}
    wanted = tuple(names) or (DEFAULT_TIMED if report.timed else DEFAULT_LOADS)
    return [found[name] for name in (found if wanted == (ALL,) else wanted) if name in found]


def check_columns(names: Iterable[str]) -> None:
    """Raise for a name that no column has."""
    known = (ALL, *COLUMNS)
    for name in names:
        require(name in known, f"--columns: no column is called {name!r}.{nearest_name(name, known)}")


def _balance_columns() -> tuple[Column, ...]:
    return (
        Column(
            field="imbalance",
            heading="max/mean\nrank",
            meaning="Rows of the busiest EP rank over the mean rank: sums over micro-batches, mean over layers. "
            "1 is balanced.",
            write="{:.3f}".format,
        ),
        Column(
            field="node_imbalance",
            heading="max/mean\nnode",
            meaning="The same for nodes; replicas inside a node cannot lower it.",
            write="{:.3f}".format,
        ),
    )


def _bound_columns(report: ReportData) -> tuple[Column, ...]:
    return (
        Column(
            field="node_bound",
            heading="bound\nnode",
            meaning="What max/mean rank cannot go below with this plan's homes and replicas inside nodes alone.",
            write="{:.3f}".format,
            values={name: bounds.node for name, bounds in report.bounds.items() if bounds.node is not None},
        ),
        Column(
            field="placement_bound",
            heading="bound\nplan",
            meaning="What it cannot go below with this plan's homes and replicas, however tokens are split over them.",
            write="{:.3f}".format,
            values={name: bounds.placement for name, bounds in report.bounds.items()},
        ),
    )


def _time_columns(rows: Sequence[StepPrediction], mark: str) -> tuple[Column, ...]:
    seconds = [row.step_time_s for row in rows if row.step_time_s]
    unit, size = time_unit(seconds)
    places = decimals(max(seconds, default=0.0) / size, 4)
    return (
        Column(
            field="step_time_s",
            heading=f"step{mark}\n{unit}",
            meaning="Predicted time of one optimizer step: forward and backward of all micro-batches.",
            write=lambda value: f"{value / size:.{places}f}",
        ),
        Column(
            field="tokens_per_s",
            heading=f"tokens{mark}\n/s",
            meaning="Tokens of the step per second, all ranks together.",
            write="{:,.0f}".format,
        ),
        Column(
            field="speedup_vs_static",
            heading=f"vs{mark}\nstatic",
            meaning="Step time of static placement over this policy's.",
            write="{:.3f}x".format,
        ),
        Column(
            field="fraction_of_forced_balance",
            heading="of forced\nbalance",
            meaning="Speed as a share of the same step with perfectly uniform routing, the usual 'ideal' of papers; a "
            "policy that packs sequences or gains locality may exceed it.",
            write="{:.1%}".format,
        ),
        Column(
            field="fraction_of_ideal",
            heading="of\nideal",
            meaning="Speed as a share of a bound that nothing can exceed: mean rows on every rank and the fewest "
            "possible visits to nodes and ranks.",
            write="{:.1%}".format,
        ),
    )


def _cost_columns(rows: Sequence[StepPrediction]) -> tuple[Column, ...]:
    most = max((row.moved_bytes or 0 for row in rows), default=0)
    unit, size = byte_unit(most or 1e9)
    places = decimals(most / size, 3)
    return (
        Column(
            field="replicas_per_plan",
            heading="copies\n/layer",
            meaning="Expert replicas copied per EP group, micro-batch and layer.",
            write="{:.1f}".format,
        ),
        Column(
            field="cross_node_replicas_per_plan",
            heading="cross\nnode",
            meaning="Those of them that come from another node.",
            write="{:.1f}".format,
        ),
        Column(
            field="inter_node_copies_per_token",
            heading="to other\nnodes",
            meaning="Other nodes that a token is sent to per MoE layer, on average; with a dispatcher that sends it "
            "once per expert, its choices that are served on other nodes.",
            write="{:.3f}".format,
        ),
        Column(
            field="moved_bytes",
            heading=f"{unit} moved,\nall ranks",
            meaning="Bytes of experts sent in the step by all ranks together: copies and their gradients, and the "
            "step's share of moving homes.",
            write=lambda value: f"{value / size:.{places}f}",
        ),
        Column(
            field="reorder_share",
            heading="reorder\nshare",
            meaning="Share of the step spent on moving homes, and copies that stay for a step, between micro-batches.",
            write="{:.1%}".format,
        ),
        Column(
            field="peak_memory_bytes",
            heading="peak GiB,\none rank",
            meaning="Predicted peak memory of the fullest rank.",
            write=lambda value: f"{value / GIB:.1f}",
        ),
        Column(
            field="resident_bytes",
            heading="resident\nGiB",
            meaning="Of that, weights and gradients of copies that a rank holds for the whole step.",
            write=lambda value: f"{value / GIB:.1f}",
        ),
        Column(
            field="plan_time_s",
            heading="planning\ns",
            meaning="Time that planning took on this machine, in seconds.",
            write="{:.2f}".format,
        ),
    )
