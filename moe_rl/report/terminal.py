"""The policy table in a terminal, at most 100 columns wide."""

from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_rl.report.columns import fitting_columns
from moe_rl.report.headline import headline
from moe_rl.report.limits import limits
from moe_rl.report.ranking import ranking_sentences
from moe_rl.report.simulation import SimulationReport
from moe_rl.report.sweep import METRICS, Sweep, SweptPoint, short_name, text_of
from moe_rl.report.units import format_count, printable

MAX_WIDTH = 100


def figures_table(*headings: str, gap: int = 1) -> Table:
    """Return an empty table: words under the first heading, figures under the others, `gap` blanks between."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, no_wrap=True, justify="right" if index else "left")
    return table


def policy_table(report: SimulationReport, width: int = MAX_WIDTH) -> Table:
    """Return one line per policy, the yardsticks set apart below; columns that do not fit are left out."""
    shown = fitting_columns(report, width)
    table = figures_table("policy", *(column.heading for column in shown), gap=0)
    table.columns[0].vertical = "bottom"
    best = report.best.policy
    for index, prediction in enumerate(report.policies):
        style = "bold green" if prediction.policy == best != "static" else ""
        cells = (column.cell(prediction) for column in shown)
        table.add_row(Text(prediction.policy), *cells, style=style, end_section=index == len(report.policies) - 1)
    for prediction in report.yardsticks:
        table.add_row(Text(prediction.policy), *(column.cell(prediction) for column in shown), style="dim")
    return table


def print_report(report: SimulationReport, console: Console) -> None:
    """Print setting, table, headline, what limits the step, and notes."""
    said = headline(report)
    width = min(console.width, MAX_WIDTH)
    for line in setting_lines(report):
        console.print(Text(line, style="dim"), width=width)
    console.print(policy_table(report, width), width=width)
    console.print(Text(said.title, style="bold"), width=width)
    for sentence in said.details:
        console.print(Text(sentence), width=width)
    limited = limits(report)
    for sentence in limited.sentences if limited else ():
        console.print(Text(sentence), width=width)
    for sentence in ranking_sentences(report):
        console.print(Text(sentence), width=width)
    for note in report.notes:
        console.print(Text(printable(f"note: {note}"), style="yellow"), width=width)


def setting_lines(report: SimulationReport) -> list[str]:
    """Return what was simulated, in three short lines."""
    trace, setting = report.trace, report.setting
    tokens, per_rank = format_count(_number(trace, "num_tokens")), format_count(_number(setting, "tokens_per_rank"))
    what = [
        f"{trace['name']}: {trace['num_sequences']} sequences, {tokens} tokens",
        f"{trace['num_moe_layers']} MoE layers, {trace['num_experts']} experts, top-{trace['top_k']}",
        f"routing {trace['provenance']}",
    ]
    where = [
        f"{setting['model']} on {setting['cluster']}",
        f"EP{setting['ep_size']} ({setting['ranks_per_node']} ranks per node)",
        f"{setting['num_micro_batches']} micro-batches of {per_rank} tokens per rank",
    ]
    how = [
        f"sequences of {format_count(_number(setting, 'sequence_length'))} tokens",
        f"{setting['slots']} replica {'slot' if setting['slots'] == 1 else 'slots'} per rank",
        f"objective {setting['objective']}",
    ]
    if report.timed:
        how += [f"dispatcher {setting['dispatcher']}", f"recompute {setting['recompute']}"]
    if report.phi is not None:
        how.append(f"phi {report.phi:.2f}")
    if report.scaled:
        where[-1] += " (scaled)"
    return [printable(", ".join(part)) for part in (what, where, how)]


def _number(values: Mapping[str, object], key: str) -> float:
    value = values.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def print_sweep(sweep: Sweep, console: Console) -> None:
    """Print one line per point: what was swept, how uneven static placement is, and the metric of every policy."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in sweep.values:
        table.add_column(short_name(name), justify="right", no_wrap=True)
    headings = ["max/mean", *(["phi"] if sweep.points[0].phi is not None else []), *sweep.policies]
    yardsticks = ["forced_balance"] if any("forced_balance" in point.yardsticks for point in sweep.points) else []
    for heading in (*headings, *yardsticks):
        table.add_column(heading.replace("forced_balance", "forced balance"), justify="right")
    form = "{:.3f}x" if sweep.metric == "speedup_vs_static" else "{:.3f}"
    for point in sweep.points:
        cells = [Text(text_of(value)) for value in point.point.values()]
        cells.append(Text(f"{point.imbalance_static:.3f}"))
        if point.phi is not None:
            cells.append(Text(f"{point.phi:.2f}"))
        best = _best(sweep, point)
        for name in sweep.policies:
            value = point.policies.get(name)
            cells.append(Text("" if value is None else form.format(value), style="bold green" if name == best else ""))
        cells += [Text(form.format(point.yardsticks[name]), style="dim") for name in yardsticks]
        table.add_row(*cells)
    console.print(Text(f"{METRICS[sweep.metric].capitalize()}, simulated: {sweep.what}", style="bold"))
    console.print(table)


def _best(sweep: Sweep, point: SweptPoint) -> str:
    shown = {name: value for name, value in point.policies.items() if name in sweep.policies}
    if not shown:
        return ""
    return (
        max(shown, key=lambda n: shown[n])
        if sweep.metric == "speedup_vs_static"
        else min(shown, key=lambda n: shown[n])
    )
