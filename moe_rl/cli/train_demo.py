"""`moe-rl demo --train`: a whole small RL run, then its report with a projection of the recorded routes."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import typer

from moe_rl.cli.console import progress_bar, results, say
from moe_rl.config import CONFIGS
from moe_rl.core.errors import require
from moe_rl.core.outputs import check_outputs, write_outputs
from moe_rl.report import SimulationReport, render_html
from moe_rl.report.terminal import print_report
from moe_rl.report.training import print_training_report, render_training_html
from moe_rl.study.collect_notes import collected_notes
from moe_rl.study.options import SimulationOptions, merge_options
from moe_rl.study.predict import predict
from moe_rl.study.resident_slots import open_scenario

SETTING = CONFIGS / "experiments" / "countdown_grpo_demo.yaml"
PROJECTION = CONFIGS / "experiments" / "countdown_projection.yaml"
NEEDED = ("torch", "transformers", "megatron", "tensorboard")
PROJECTION_FILE = "projection.html"


def train_demo(html: Path | None, *, command: str, overrides: Sequence[str] = ()) -> None:
    """Run, simulate, report; the pages are `html` (by default beside the run's folder) and one beside it."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    require(
        not missing,
        f"a training run needs {', '.join(missing)}: `make test` sets up an environment that has all of it.",
    )
    say("a training run of two to four minutes on two idle cores, then its report; one that was ended is resumed")
    from moe_rl.recipes.countdown_grpo.config import load_config
    from moe_rl.recipes.countdown_grpo.report import TRACE_FOLDER, training_report
    from moe_rl.recipes.countdown_grpo.run import RunFailedError, run

    config = load_config(SETTING, overrides)
    page = html or Path(config.out).with_name(f"{Path(config.out).name}.html")
    projection_page = page.with_name(f"{page.stem}-{PROJECTION_FILE}")
    check_outputs({"--html": page, "the projection's page": projection_page})
    say(f"{config.num_steps} steps of GRPO with {config.balancer.policy} as the balancer, in {config.out}")
    try:
        folder = run(config, resume=True, announce=say)
    except RunFailedError as error:
        say(f"error: {error}")
        raise typer.Exit(1) from None
    say("simulating the routes of the last step on a cluster")
    simulation = _project(folder / TRACE_FOLDER, command)
    report = training_report(config, projection=simulation, projection_file=projection_page.name, command=command)
    write_outputs({page: render_training_html(report).encode(), projection_page: render_html(simulation).encode()})
    console = results()
    print_training_report(report, console)
    console.print()
    print_report(simulation, console)
    for path in (page, projection_page):
        say(f"wrote {path}")


def _project(trace: Path, command: str) -> SimulationReport:
    """Return the simulation of the run's last step on a real cluster."""
    with progress_bar() as advance, collected_notes() as warnings:
        scenario = open_scenario(trace, merge_options(SimulationOptions, {}, PROJECTION), advance)
        return predict(scenario, advance, command=command, warnings=warnings)
