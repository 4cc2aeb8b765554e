"""`moe-rl tune`: search for the parallel layout at a fixed number of GPUs."""

from functools import partial
from pathlib import Path

from rich.console import Console

from moe_rl.cli.console import deliver, json_text, progress_bar, say
from moe_rl.cli.options import with_options
from moe_rl.core.errors import require
from moe_rl.core.outputs import check_outputs
from moe_rl.study.executors import executor_named
from moe_rl.study.rl_options import TuneOptions


@with_options(TuneOptions)
def tune(
    options: TuneOptions,
    trace: Path | None = None,
    out: Path | None = None,
    json_path: Path | None = None,
    plot: Path | None = None,
    jobs: int | None = None,
    executor: str = "local",
    ray_address: str | None = None,
) -> None:
    """Search for the parallel layout, micro-batch size and recomputation that train fastest on --gpus GPUs.

    Example: moe-rl tune run.moetrace --model qwen3-30b-a3b --cluster h100 --gpus 32 --plot tune.svg
    """
    from moe_rl.report.tuned_settings import PASTED
    from moe_rl.study.search_layouts import tune as search

    require(out is None or out.suffix == ".jsonl", f"--out {out} must end in .jsonl.")
    require(plot is None or plot.suffix in (".html", ".svg"), f"--plot {plot} must end in .html or .svg.")
    check_outputs({"--out": out, "--json": json_path, "--plot": plot}, inputs=() if trace is None else (trace,))
    workers = executor_named(executor, jobs=jobs, ray_address=ray_address)
    with progress_bar() as advance:
        outcome = search(trace, options, executor=workers, progress=advance, out=out, tell=say)

    def show(console: Console) -> None:
        for line in str(outcome).splitlines():
            console.print(line, soft_wrap=True)
        for framework in PASTED:
            console.print(f"\n{framework}:\n{outcome.best.lines(framework)}", soft_wrap=True)

    deliver({}, partial(json_text, outcome.as_json()), json_path, show)
    if plot is not None:
        outcome.save(plot)
        say(f"wrote {plot}")
