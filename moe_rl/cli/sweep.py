"""`moe-rl sweep`: simulate a trace over a grid of settings; a sweep can be stopped and resumed."""

from pathlib import Path

from moe_rl.cli.console import command_line, progress_bar, results, say, say_notes
from moe_rl.cli.options import with_options
from moe_rl.core.errors import require
from moe_rl.core.outputs import check_outputs
from moe_rl.study.executors import executor_named
from moe_rl.study.options import SimulationOptions


@with_options(SimulationOptions)
def sweep(
    trace: Path,
    options: SimulationOptions,
    swept: list[str],
    out: Path,
    plot: Path | None = None,
    jobs: int | None = None,
    executor: str = "local",
    ray_address: str | None = None,
) -> None:
    """Simulate every combination of option values; write a JSON line for each.

    The same command resumes an interrupted sweep. You may add values, but no other change of the settings is accepted.

    Example: moe-rl sweep run.moetrace --model qwen3-30b-a3b --cluster h100
    --sweep ep=8,16,32 --sweep replica_slots=1,2 --out sweep.jsonl --plot sweep.svg
    """
    from moe_rl.report.faces import PICTURES
    from moe_rl.report.sweep import BASELINE
    from moe_rl.report.sweep_chart import check_picture
    from moe_rl.report.terminal import print_sweep
    from moe_rl.study.run_sweep import parse_grid, run_sweep

    require(out.suffix == ".jsonl", f"--out {out} must end in .jsonl.")
    require(
        plot is None or plot.suffix in PICTURES,
        f"--plot {plot} must end in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}.",
    )
    require(
        plot is None or set(options.planning.policy) != {BASELINE},
        "--plot shows what policies gain over static placement: give another policy besides static.",
    )
    check_outputs({"--out": out, "--plot": plot}, inputs=(trace,))
    if plot is not None:
        check_picture(plot.suffix.removeprefix("."))
    workers = executor_named(executor, jobs=jobs, ray_address=ray_address)
    grid = parse_grid(swept, options)
    with progress_bar() as advance:
        sweep_data = run_sweep(
            trace, grid, options, out, progress=advance, executor=workers, command=command_line(), tell=say
        )
    if plot is not None:
        sweep_data.save(plot)
    print_sweep(sweep_data, results())
    say_notes(sweep_data.notes)
    say(f"{out} has all {len(sweep_data.points)} points")
    if plot is not None:
        say(f"wrote {plot}")
