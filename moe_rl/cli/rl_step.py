"""`moe-rl rl-step`: what balancing saves in a whole step of RL."""

from collections.abc import Callable, Iterable, Sequence
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
from moe_rl.report.units import decimals
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
            console.print(_table(name or "part (s)", point))
            console.print(_headline(point))

    deliver(files, partial(json_text, document), json_path, show)
    say_notes(notes)


def _page(point: "RlPoint", draw: Callable[[float], Markup], notes: Sequence[str]) -> bytes:
    from moe_rl.report.faces import PAGE_COLUMNS, printed
    from moe_rl.report.html import render_picture

    table = printed(lambda console: console.print(_table("part (s)", point)), PAGE_COLUMNS)
    return render_picture("moe_rl rl-step", _headline(point), draw, table, notes=notes)


def _headline(point: "RlPoint") -> str:
    """Return the title of the page: the gain from balancing or, without a trace, from perfect balance."""
    from moe_rl.study.rl_passes import FORCED

    steps = point.steps
    static, (name, best) = steps["static"], min(steps.items(), key=lambda item: item[1].step_time_s)
    update = static.parts_s["update"] / best.parts_s["update"]
    step = static.step_time_s / best.step_time_s
    if step <= 1.0:
        return "Balancing the update saves no time in this RL step"
    if name == FORCED:
        return f"Perfect balance would make the update {update:.2f}x and the RL step {step:.2f}x as fast"
    return f"{name}: update {update:.2f}x, RL step {step:.2f}x against static placement"


def _table(title: str, point: "RlPoint") -> Table:
    """Return a row per part and a column per policy."""
    import numpy as np  # which the help of the command does not wait for

    from moe_rl.report.tables import figures_table

    steps = list(point.steps.values())
    static = point.steps["static"]
    table = figures_table(title, *point.steps)
    step_s = np.array([step.step_time_s for step in steps])
    update_s = np.array([step.parts_s["update"] for step in steps])

    def add(name: str, figures: Iterable[float], form: str) -> None:
        table.add_row(name, *(form.format(figure) for figure in figures))

    seconds_form = f"{{:.{decimals(float(step_s.max()), 4)}f}}"
    for part in static.parts_s:
        add(part.replace("_", " "), [step.parts_s[part] for step in steps], seconds_form)
    interval_cells, speedup_cells = [], []
    for interval in point.intervals.values():
        low, high = interval.step_time_s
        interval_cells.append(f"{low:.3g}-{high:.3g}")
        low, high = interval.speedup
        speedup_cells.append(f"{low:.3f}-{high:.3f}x")
    add("step (s)", step_s, seconds_form)
    table.add_row("80 % interval (s)", *interval_cells)
    add("step vs static", static.step_time_s / step_s, "{:.3f}x")
    table.add_row("80 % interval", *speedup_cells)
    add("update vs static", static.parts_s["update"] / update_s, "{:.3f}x")
    return table
