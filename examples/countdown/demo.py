"""`moe-rl demo --train`: train, simulate the routes of the last step on a cluster, and write a page of each."""

from collections.abc import Sequence
from pathlib import Path

import typer

from examples.countdown.config import CountdownGrpoConfig, load_config
from examples.countdown.metrics import read_metrics
from examples.countdown.page import TrainingReport, print_training_report, render_training_html
from examples.countdown.run import RunFailedError, run
from moe_rl.cli.console import progress_bar, results, say
from moe_rl.core.outputs import check_outputs, write_outputs
from moe_rl.report.faces import SimulationReport
from moe_rl.report.html import render_html
from moe_rl.report.terminal import print_report
from moe_rl.study.collect_notes import collected_notes
from moe_rl.study.options import SimulationOptions, merge_options
from moe_rl.study.plan_and_price import predict
from moe_rl.study.resident_slots import open_scenario

HERE = Path(__file__).parent
SETTING, PROJECTION = HERE / "demo.yaml", HERE / "projection.yaml"
PROJECTION_FILE = "projection.html"


def train_demo(html: Path | None, *, command: str, overrides: Sequence[str] = ()) -> None:
    """Run, simulate, report; the pages are `html` (default: beside the run's folder) and one beside it."""
    say("a training run of two to four minutes on two idle cores, then its report; one that was ended is resumed")
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
    simulation = _project(folder / "trace.moetrace", command)
    report = _training_report(config, simulation, projection_page.name, command)
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


def _training_report(
    config: CountdownGrpoConfig, projection: SimulationReport, projection_file: str, command: str
) -> TrainingReport:
    """Return what the run of `config` measured; raises `InvalidInputError` if it has no finished step."""
    model, rollout, train = config.model, config.rollout, config.train
    return TrainingReport(
        title=f"{train.objective.upper()} on Countdown, {config.num_steps} steps",
        steps=read_metrics(Path(config.out)),
        setting={
            "model": f"Qwen3-MoE, {model.num_layers} layers, {model.num_experts} experts, top-{model.top_k}",
            "trainer": f"Megatron-Core, EP{config.world_size}, {train.precision}",
            "rollout": f"Hugging Face, {rollout.precision}, {rollout.problems_per_step} x {rollout.group_size} samples",
            "replay": train.replay,
            "balancer": config.balancer.policy if config.balancer.enabled else "off",
            "updates per rollout": train.num_mini_batches,
            "seed": config.seed,
        },
        projection=projection,
        projection_file=projection_file,
        command=command,
    )
