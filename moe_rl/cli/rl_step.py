"""`moe-rl rl-step`: what balancing saves in a whole step of RL."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup
from rich.console import Console
from rich.table import Table

from moe_rl.cli.console import command_line, deliver, json_text, progress_bar, say_notes
from moe_rl.cli.options import with_options
from moe_rl.core.errors import require
from moe_rl.core.outputs import check_outputs
from moe_rl.report.svg import standalone
from moe_rl.report.units import decimals, format_time
from moe_rl.study.collect_notes import collected_notes
from moe_rl.study.rl_options import RlStepOptions

if TYPE_CHECKING:
    from moe_rl.study.rl_passes import RlPoint


@with_options(RlStepOptions)
def rl_step(
    options: RlStepOptions,
    trace: Path | None = None,
    sweep: str = "",
    plot: Path | None = None,
    json_path: Path | None = None,
) -> None:
    """Predict the time of each part of an RL step under every policy, from rollout to update and weight sync.

    Example: moe-rl rl-step --model qwen3-235b-a22b --ep 16 --train-gpus 128 --num-samples 512 --mean-length 5700
    --micro-batch-tokens 8192 --rollout-engine-size 16
    """
    from moe_rl.report.bars import rl_bars
    from moe_rl.study.rl_passes import as_json, rl_notes, swept_steps, sync_notes, training_passes

    require(plot is None or plot.suffix in (".html", ".svg"), f"--plot {plot} must end in .html or .svg.")
    require(plot is None or not sweep, "--plot draws one step: leave --sweep out.")
    check_outputs({"--plot": plot, "--json": json_path}, inputs=() if trace is None else (trace,))
    with progress_bar() as advance, collected_notes() as warnings:
        passes = training_passes(trace, options, advance)
        points = swept_steps(passes, options, sweep)
    notes = [*rl_notes(options, passes, of_lengths=trace is None), *sync_notes(passes, options), *warnings]
    files = dict[Path, bytes]()
    if plot is not None:
        draw = partial(rl_bars, points[""].steps)
        page = plot.suffix == ".html"
        files[plot] = _page(points[""], draw, notes) if page else standalone(draw()).encode()
    by_point = {name: as_json(point.steps, point.intervals) for name, point in points.items()}
    figures = {"points": by_point} if sweep else {"policies": by_point[""]}
    document = {"schema": "moe_rl.rl-step/1", "command": command_line(), **figures, "notes": notes}

    def show(console: Console) -> None:
        for name, point in points.items():
            for table in _tables(name or "part (s)", point, console.width):
                console.print(table)
            console.print(_headline(point))

    deliver(files, partial(json_text, document), json_path, show)
    say_notes(notes)


def _page(point: "RlPoint", draw: Callable[[float], Markup], notes: Sequence[str]) -> bytes:
    from moe_rl.report.faces import PAGE_COLUMNS, printed
    from moe_rl.report.html import render_picture

    tables = _tables("part (s)", point, PAGE_COLUMNS)
    table = printed(lambda console: console.print(*tables, sep="\n"), PAGE_COLUMNS)
    return render_picture("moe_rl rl-step", _headline(point), draw, table, notes=notes)


def _headline(point: "RlPoint") -> str:
    """Return the title of the page: the gain from balancing or, without a trace, from perfect balance."""
    from moe_rl.study.rl_passes import FORCED

    steps = point.steps
    static, (name, best) = steps["static"], min(steps.items(), key=lambda item: item[1].step_time_s)
    update = static.parts_s["update"] / best.parts_s["update"]
    step = static.step_time_s / best.step_time_s
    if not point.balances_update:
        return "The update is not balanced, because its routes are not known before it runs"
    if step <= 1.0:
        return "Balancing the update saves no time in this RL step"
    saved = f"{format_time(static.step_time_s - best.step_time_s)} less per step"
    if name == FORCED:
        return f"At most, with perfect balance: the update {update:.2f}x and the RL step {step:.3f}x as fast, {saved}"
    low, high = point.intervals[name].speedup
    return f"{name}: update {update:.2f}x, RL step {step:.3f}x ({low:.3f}-{high:.3f}) against static placement, {saved}"


def _tables(title: str, point: "RlPoint", width: int) -> list[Table]:
    """Return tables of at most `width` columns: the parts under every policy, then a row per policy with intervals."""
    from moe_rl.report.tables import figures_table

    static = point.steps["static"]
    digits = decimals(max(step.step_time_s for step in point.steps.values()), 4)
    first_column = max(len(title), *map(len, static.parts_s)) + 1
    tables = []
    for names in _side_by_side(list(point.steps), width - first_column):
        parts = figures_table(title, *names)
        for part in static.parts_s:
            seconds = [point.steps[name].parts_s[part] for name in names]
            parts.add_row(part.replace("_", " "), *(f"{part_s:.{digits}f}" for part_s in seconds))
        tables.append(parts)
    whole = figures_table("policy", "step (s)", "80 % interval", "vs static", "80 % interval", "update")
    for name, step in point.steps.items():
        interval = point.intervals[name]
        low_s, high_s = interval.step_time_s
        low, high = interval.speedup
        update = static.parts_s["update"] / step.parts_s["update"]
        speedups = (f"{static.step_time_s / step.step_time_s:.3f}x", f"{low:.3f}-{high:.3f}x", f"{update:.3f}x")
        whole.add_row(name, f"{step.step_time_s:.{digits}f}", f"{low_s:.3g}-{high_s:.3g}", *speedups)
    return [*tables, whole]


def _side_by_side(names: list[str], width: int) -> list[list[str]]:
    """Return the names in groups whose columns fit into `width`; a figure takes 10 columns at most."""
    groups: list[list[str]] = [[]]
    left = width
    for name in names:
        column = max(len(name), 10) + 1
        if groups[-1] and column > left:
            groups.append([])
            left = width
        groups[-1].append(name)
        left -= column
    return groups
