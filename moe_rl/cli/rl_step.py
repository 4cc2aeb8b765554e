"""`moe-rl rl-step`: what balancing brings to the whole step of RL."""

from pathlib import Path
from typing import Annotated

import typer

from moe_rl.cli.console import AsJson, command_line, print_json, progress_bar, results, say
from moe_rl.cli.options import TracePath, with_options
from moe_rl.core.errors import require
from moe_rl.core.outputs import check_outputs, write_outputs
from moe_rl.report.rl_timeline import rl_timeline
from moe_rl.report.svg import standalone
from moe_rl.report.terminal import figures_table
from moe_rl.report.units import decimals
from moe_rl.study.collect_notes import collected_notes
from moe_rl.study.resident_slots import open_scenario
from moe_rl.study.rl_step import RlStepOptions, as_json, rl_notes, rl_steps


@with_options(RlStepOptions)
def rl_step(
    trace: TracePath,
    options: RlStepOptions,
    plot: Annotated[Path | None, typer.Option(help="Draw who works when (.svg).")] = None,
    to_json: AsJson = False,
) -> None:
    """Predict rollout, reward, log-probabilities, reference, update and weight sync of a step, policy by policy.

    Example: moe-rl rl-step run.moetrace --model qwen3-30b-a3b --ep 16 --micro-batch-tokens 8192 --rollout-engine-size 4
    --rollout-tokens-per-s 900
    """
    require(plot is None or plot.suffix == ".svg", f"--plot {plot} must end in .svg.")
    check_outputs({"--plot": plot}, inputs=(trace,))
    with progress_bar() as advance, collected_notes() as warnings:
        steps = rl_steps(open_scenario(trace, options, advance), options, advance)
    notes = [*rl_notes(options), *warnings]
    if plot is not None:
        write_outputs({plot: standalone(rl_timeline(steps)).encode()})
    figures = as_json(steps)
    if to_json:
        print_json({"schema": "moe_rl.rl-step/1", "command": command_line(), "policies": figures, "notes": notes})
        return
    static = steps["static"]
    table = figures_table(
        "policy", *(name.replace("_", " ") for name in static.parts_s), "step (s)", "vs static", "update"
    )
    places = decimals(max(step.step_time_s for step in steps.values()), 4)
    for name, step in steps.items():
        table.add_row(
            name,
            *(f"{seconds:.{places}f}" for seconds in step.parts_s.values()),
            f"{step.step_time_s:.{places}f}",
            f"{static.step_time_s / step.step_time_s:.3f}x",
            f"{static.parts_s['update'] / step.parts_s['update']:.3f}x",
        )
    results().print(table)
    for note in notes:
        say(f"note: {note}")
    if plot is not None:
        say(f"wrote {plot}")
