"""The columns of the policy table, shared by the terminal and the page."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moe_rl.core.metrics import StepPrediction
from moe_rl.report.simulation import SimulationReport
from moe_rl.report.units import GIB, digits, format_bytes, format_count, time_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One figure of every policy."""

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


def columns(report: SimulationReport) -> list[Column]:
    """Return the columns that at least one policy fills; times share one unit and carry * where they are scaled."""
    rows = (*report.policies, *report.yardsticks)
    unit, size = time_unit(row.step_time_s for row in rows if row.step_time_s)
    mark = "*" if report.scaled else ""
    every = (*_balance_columns(), *_bound_columns(report), *_time_columns(unit, size, mark), *_cost_columns())
    filled = [column for column in every if any(column.cell(row) for row in rows)]
    cross_node = any(row.cross_node_replicas_per_plan for row in rows)
    return [column for column in filled if cross_node or column.field != "cross_node_replicas_per_plan"]


DROPPED_FIRST = (
    "plan_time_s",
    "reorder_share",
    "tokens_per_s",
    "fraction_of_ideal",
    "peak_memory_bytes",
    "moved_bytes",
    "replicas_per_plan",
    "placement_bound",
    "node_bound",
    "node_imbalance",
    "fraction_of_forced_balance",
    "step_time_s",
)
"""What a narrow terminal leaves out, in this order; the page and --json have all of it."""


def fitting_columns(report: SimulationReport, width: int) -> list[Column]:
    """Return as many of the columns as fit beside the policies' names, one blank between two columns."""
    rows = (*report.policies, *report.yardsticks)
    shown = columns(report)
    names = max(len(row.policy) for row in rows)

    def needed(column: Column) -> int:
        return 1 + max(len(text) for text in (*column.heading.split("\n"), *(column.cell(row) for row in rows)))

    for field in DROPPED_FIRST:
        if names + 2 + sum(needed(column) for column in shown) <= width:
            break
        shown = [column for column in shown if column.field != field]
    return shown


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


def _bound_columns(report: SimulationReport) -> tuple[Column, ...]:
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


def _time_columns(unit: str, size: float, mark: str) -> tuple[Column, ...]:
    return (
        Column(
            field="step_time_s",
            heading=f"step{mark}\n{unit}",
            meaning="Predicted time of one optimizer step: forward and backward of all micro-batches.",
            write=lambda value: digits(value / size, 4),
        ),
        Column(
            field="tokens_per_s",
            heading=f"tokens{mark}\n/s",
            meaning="Tokens of the step per second, all ranks together.",
            write=format_count,
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
            "policy that gains locality may exceed it.",
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


def _cost_columns() -> tuple[Column, ...]:
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
            field="moved_bytes",
            heading="moved\n/step",
            meaning="Bytes of experts that leave a rank in the step: copies and their gradients, and moves of homes.",
            write=format_bytes,
        ),
        Column(
            field="reorder_share",
            heading="reorder\nshare",
            meaning="Share of the step spent on moving homes, and copies that stay for a step, between micro-batches.",
            write="{:.1%}".format,
        ),
        Column(
            field="peak_memory_bytes",
            heading="peak\nGiB",
            meaning="Predicted peak memory of the fullest rank.",
            write=lambda value: f"{value / GIB:.1f}",
        ),
        Column(
            field="plan_time_s",
            heading="plan\ns",
            meaning="Time that the planner took on this machine.",
            write="{:.2f}".format,
        ),
    )
