"""The policy table in a terminal, and the sentences below it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_rl.core.outputs import printable
from moe_rl.report.columns import cells_of, chosen_columns, columns
from moe_rl.report.headline import headline
from moe_rl.report.limits import limits
from moe_rl.report.ranking import ranking_sentences
from moe_rl.report.simulation import ReportData
from moe_rl.report.sweep import METRICS, SweepData, short_name, text_of
from moe_rl.report.tables import figures_table
from moe_rl.report.units import (
    GIB,
    batch_words,
    counted,
    format_count,
    layout_words,
    parallelism,
    sequences_of,
)

MAX_WIDTH = 100
# A setting has no slots of these kinds unless it says so.
SLOTS = {"cross_node_slots": "cross-node", "resident_slots": "resident"}
# The sentences below the table get 8 lines; in fewer than 80 columns the hint at the others takes two of them.
NARROW, LINES = 80, 8


def policy_table(report: ReportData, names: Sequence[str] = ()) -> Table:
    """Return one line per policy, the yardsticks set apart below; `names` are columns as `--columns` takes them."""
    columns = chosen_columns(report, names)
    table = figures_table("policy", *(column.heading for column in columns))
    table.columns[0].vertical = "bottom"
    best = report.best.policy
    for index, prediction in enumerate(report.policies):
        style = ""
        if prediction.policy == best != "static":
            style = "bold green"
        is_last = index == len(report.policies) - 1
        table.add_row(Text(prediction.policy), *cells_of(columns, prediction), style=style, end_section=is_last)
    for prediction in report.yardsticks:
        table.add_row(Text(prediction.policy), *cells_of(columns, prediction), style="dim")
    return table


def print_report(report: ReportData, console: Console, *, names: Sequence[str] = (), explain: bool = False) -> None:
    """Print the setting, the table with the columns of these `names`, and what follows from it in `LINES` lines.

    Cautions, and whether the ranking holds where that was asked for, are printed however long they are; with `explain`
    every sentence is.
    """
    width = min(console.width, MAX_WIDTH)
    for line in setting_lines(report):
        console.print(Text(line, style="dim"), width=width)
    if report.model_caution:
        console.print(Text(printable(report.model_caution), style="yellow"), width=width)
    with _wide_enough(console, table := policy_table(report, names)):
        console.print(table)
    sentences = _sentences(report)
    always = len(headline(report).lines) + len(report.cautions) + len(ranking_sentences(report))
    always += bool(report.small_batch_caution)
    if explain:
        printed = sentences
    else:
        printed = _that_fit(sentences, console, width, always=always)
    for sentence in printed:
        console.print(sentence, width=width)
    hidden = len(columns(report)) - len(chosen_columns(report, names))
    if len(printed) < len(sentences):
        left = [f"{len(sentences) - len(printed)} more sentences: --explain"]
    else:
        left = []
    if hidden:
        left.append(f"{hidden} more columns: --columns all")
    if left and not explain:
        console.print(Text("; ".join([*left, "all of it: --html"]), style="dim"), width=width)


@contextmanager
def _wide_enough(console: Console, table: Table) -> Iterator[None]:
    """Let the terminal wrap a table that is wider than itself, rather than cut its figures."""
    # rich shortens cells to the console's width: "1.18…" would be read as a figure.
    before = console.width
    console.width = max(
        before, console.measure(table, options=console.options.update(max_width=10 * MAX_WIDTH)).maximum
    )
    yield
    console.width = before


def _sentences(report: ReportData) -> list[Text]:
    """Return every sentence of the report, what matters most first."""
    sentences, limited = headline(report), limits(report)
    if limited:
        limiting = limited.sentences
    else:
        limiting = ()
    foremost = (*sentences.details[:1], *limiting[:1])
    explained = (*ranking_sentences(report), *foremost, *sentences.details[1:], *limiting[1:])
    notes = [f"note: {note}" for note in report.notes]
    return [
        *_texts(filter(None, [report.small_batch_caution]), "yellow"),
        *_texts(sentences.lines, "bold"),
        *_texts(report.cautions, "yellow"),
        *_texts(explained),
        *_texts(notes, "yellow"),
    ]


def _texts(sentences: Iterable[str], style: str = "") -> list[Text]:
    return [Text(printable(sentence), style=style) for sentence in sentences]


def _that_fit(sentences: Sequence[Text], console: Console, width: int, *, always: int) -> list[Text]:
    """Return the first sentences that leave room for saying how many more there are: 80 columns, or two lines.

    The first `always` of them stand there however long they are.
    """
    # One line is kept for what is left out, two where the terminal is narrow.
    left = LINES - 1 - (width < NARROW)
    for count, sentence in enumerate(sentences):
        left -= len(sentence.wrap(console, width))
        if left < 0 and count >= always:
            return list(sentences[:count])
    return list(sentences)


def setting_lines(report: ReportData) -> list[str]:
    """Return what was simulated, in three short lines."""
    trace, setting = report.trace, report.setting
    per_rank = format_count(_number(setting, "tokens_per_rank"))
    micro_batches = counted(setting["num_micro_batches"], "micro-batch", "micro-batches")
    what = [
        f"{trace['name']}: {batch_words(trace, setting)}",
        f"{trace['num_moe_layers']} MoE layers, {trace['num_experts']} experts, top-{trace['top_k']}",
        f"routing {trace['provenance']}",
    ]
    if layout := layout_words(setting):
        micro_batches_of = f"{micro_batches} of {per_rank} tokens per rank, {layout}"
    else:
        micro_batches_of = f"{micro_batches} of {per_rank} tokens per rank"
    assumed = ", model assumed from the trace," if report.model_caution else ""
    where = [
        f"{setting['model']}{assumed} on {counted(setting['num_gpus'], 'GPU', 'GPUs')} of {setting['cluster']}",
        f"{parallelism(setting)} ({setting['ranks_per_node']} ranks per node)",
        micro_batches_of,
    ]
    how = [sequences_of(setting), f"{counted(setting['slots'], 'replica slot', 'replica slots')} per rank"]
    for key, kind in SLOTS.items():
        if setting.get(key):
            how.append(f"{setting[key]} {kind}")
    if not report.timed:
        how.append(f"objective {setting['objective']}")
    if report.timed:
        how += [f"dispatcher {setting['dispatcher']}", f"recompute {setting['recompute']}"]
        if "software" in setting:
            how.append(f"software {setting['software']}")
    memory = report.memory.get(report.best.policy)
    if report.timed and memory is not None and memory.fits:
        how.append(f"fits: {memory.peak_bytes / GIB:.1f} of {memory.hbm_bytes / GIB:.1f} GiB")
    if report.phi is not None:
        how.append(f"phi {report.phi:.2f} (share of the step that grows with imbalance)")
    if report.scaled:
        where[-1] += " (scaled)"
    return [printable(", ".join(part)) for part in (what, where, how)]


def _number(values: Mapping[str, object], key: str) -> float:
    value = values.get(key)
    if not isinstance(value, int | float):
        return 0.0
    return float(value)


def print_sweep(sweep: SweepData, console: Console) -> None:
    """Print one line per point: what was swept, how uneven static placement is, and the metric of every policy."""
    swept = [*map(short_name, sweep.values), "max/mean"]
    if sweep.points[0].phi is not None:
        swept.append("phi")
    has_balance = any("forced_balance" in point.yardsticks for point in sweep.points)
    headings = [*swept, *sweep.policies]
    if has_balance:
        headings.append("forced balance")
    table = figures_table(*headings)
    form = "{:.3f}"
    if sweep.metric == "speedup_vs_static":
        form = "{:.3f}x"
    for point in sweep.points:
        cells = [Text(text_of(value)) for value in point.point.values()]
        cells.append(Text(f"{point.imbalance_static:.3f}"))
        if point.phi is not None:
            cells.append(Text(f"{point.phi:.2f}"))
        figures = sweep.figures([point])
        best = sweep.best(figures).policy if figures else ""
        for name in sweep.policies:
            style = "bold green" if name == best else ""
            if name in point.policies:
                cells.append(Text(form.format(point.policies[name]), style=style))
            else:
                cells.append(Text("", style=style))
        if has_balance:
            cells.append(Text(form.format(point.yardsticks["forced_balance"]), style="dim"))
        table.add_row(*cells)
    console.print(Text(f"{METRICS[sweep.metric].capitalize()}, simulated: {sweep.what}", style="bold"))
    console.print(table)
