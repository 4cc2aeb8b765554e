"""`moe-rl sweep`: simulate a trace over a grid of settings, one point after the other, to be stopped and resumed."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_rl import __version__
from moe_rl.cli.console import Advance, collected_notes, progress_bar, results, say
from moe_rl.cli.options import StudyOptions, with_options
from moe_rl.cli.outputs import check_outputs, write_outputs
from moe_rl.cli.result import simulate_study
from moe_rl.cli.simulate import command_line
from moe_rl.cli.study import check_policies, open_study, open_trace, topology_of
from moe_rl.cli.sweep_file import SweepFile, open_sweep
from moe_rl.cli.sweep_grid import Grid, Value, parse_grid
from moe_rl.config import FROM_TRACE, load_cluster, load_model, override_model
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.report import SimulationReport
from moe_rl.report.sweep import Sweep, SweptPoint, describe, print_sweep
from moe_rl.report.sweep_chart import draw_sweep

PICTURES = (".png", ".svg", ".pdf")
TOO_LONG = ("constants", "assumptions", "model_shape")
"""Facts of a report that are the same for every point and stand in its settings."""


@with_options(StudyOptions)
def sweep(
    trace: Annotated[Path, typer.Argument(help="Trace directory, or a file of any known format.", show_default=False)],
    options: StudyOptions,
    swept: Annotated[
        list[str],
        typer.Option(
            "--sweep",
            help="Option and its values, e.g. expert_model_parallel_size=8,16,32; again for a second option: every "
            "combination is simulated.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="File of finished points (.jsonl).", show_default=False)],
    plot: Annotated[Path | None, typer.Option(help="Draw the speed-up (.png, .svg or .pdf).")] = None,
) -> None:
    """Simulate every combination of some options, with a line of JSON for each point that is done.

    A sweep that was interrupted or killed goes on with the same command: finished points are not computed again. Values
    may be added to it; any other change of the settings is refused.

    Example: moe-rl sweep run.moetrace --model qwen3-30b-a3b --cluster h100 --micro-batch-tokens 8192
    --sweep ep=8,16,32 --sweep replica_slots=1,2 --out sweep.jsonl --plot sweep.png
    """
    require(out.suffix == ".jsonl", f"--out {out} must end in .jsonl.")
    require(plot is None or plot.suffix in PICTURES, f"--plot {plot} must end in {', '.join(PICTURES)}.")
    check_outputs({"--out": out, "--plot": plot}, inputs=(trace,))
    grid = parse_grid(swept, options)
    with progress_bar() as advance:
        advance("checking the settings", 0, 1)
        with collected_notes():
            _check_points(trace, grid)
        settings = _settings(trace, options, grid)
        with open_sweep(out, settings) as file:
            if file.dropped:
                say(f"note: the last line of {out} was incomplete; its point is simulated again.")
            _run(trace, grid, file, advance)
            lines = [file.line(point) or {} for point in grid.points]
    found = _sweep(grid, lines)
    if plot is not None:
        write_outputs({plot: draw_sweep(found, plot.suffix.removeprefix("."))})
    print_sweep(found, results())
    for note in dict.fromkeys(note for line in lines for note in line["notes"]):
        if all(note in line["notes"] for line in lines):
            say(f"note: {note}")
    say(f"{out} holds {len(lines)} of {len(lines)} points")
    if plot is not None:
        say(f"wrote {plot}")


def _check_points(trace: Path, grid: Grid) -> None:
    """Raise for a point that cannot be simulated, before any is."""
    for point, options in zip(grid.points, grid.options, strict=True):
        try:
            check_policies(options)
            named = None if options.model == FROM_TRACE else load_model(options.model)
            model = None if named is None else override_model(named, options.model_overrides())
            source = open_trace(trace, options, model)
            topology_of(options, load_cluster(options.cluster), ()).experts_per_rank(source.num_experts)
        except InvalidInputError as error:
            raise InvalidInputError(f"{describe(point)}: {error}") from error


def _settings(trace: Path, options: StudyOptions, grid: Grid) -> dict[str, Any]:
    """Return everything but the point that decides a point's figures."""
    said = {name: value for name, value in options.model_dump().items() if name not in grid.values}
    settings: dict[str, Any] = {
        "moe_rl_version": __version__,
        "trace_sha256": _digest(trace),
        "swept": sorted(grid.values),
        "options": said,
    }
    if "cluster" not in grid.values:
        cluster = asdict(load_cluster(options.cluster))
        settings["cluster"] = {name: value for name, value in cluster.items() if name != "sources"}
    if "model" not in grid.values and options.model != FROM_TRACE:
        settings["model"] = asdict(load_model(options.model).spec)
    return settings


def _digest(trace: Path) -> str:
    """Return a digest of the names and contents of the trace's files, wherever it lies."""
    digest = hashlib.sha256()
    for path in sorted(path for path in trace.rglob("*") if path.is_file()) if trace.is_dir() else [trace]:
        name = path.relative_to(trace) if trace.is_dir() else path.suffix
        with path.open("rb") as file:
            digest.update(f"{name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _run(trace: Path, grid: Grid, file: SweepFile, advance: Advance) -> None:
    total = len(grid.points)
    reused = sum(file.line(point) is not None for point in grid.points)
    if reused:
        say(f"{reused} of {total} points are in {file.path} already")
    try:
        for index, (point, options) in enumerate(zip(grid.points, grid.options, strict=True)):
            if file.line(point) is None:
                now = partial(_advance_point, advance, describe(point), index, total)
                file.append(point, _figures(_simulated(trace, point, options, now)))
    except KeyboardInterrupt:
        say(f"stopped with {file.num_lines} points in {file.path}: the same command goes on")
        raise


def _advance_point(advance: Advance, point: str, done: int, total: int, what: str, *_: int) -> None:
    """Show progress inside a point as progress of the sweep."""
    advance(f"{point}: {what}", done, total)


def _simulated(trace: Path, point: Mapping[str, Value], options: StudyOptions, advance: Advance) -> SimulationReport:
    try:
        with collected_notes() as warnings:
            study = open_study(trace, options, advance)
            return simulate_study(study, advance, command=command_line(), warnings=warnings).report
    except InvalidInputError as error:
        raise InvalidInputError(f"{describe(point)}: {error}") from error


def _figures(report: SimulationReport) -> dict[str, object]:
    """Return the report's document without what repeats in every point or grows with the micro-batches."""
    document: dict[str, Any] = report.as_json()
    policies = {
        name: {key: value for key, value in figures.items() if key != "imbalance_by_micro_batch"}
        for name, figures in document["policies"].items()
    }
    setting = {name: value for name, value in document["setting"].items() if name not in TOO_LONG}
    kept = {name: document[name] for name in ("trace", "yardsticks", "notes") if name in document}
    return {"setting": setting, "policies": policies, **kept}


def _sweep(grid: Grid, lines: list[dict[str, Any]]) -> Sweep:
    timed = grid.options[0].objective == "time"
    metric = "speedup_vs_static" if timed else "imbalance"
    return Sweep(
        values={name: tuple(values) for name, values in grid.values.items()},
        metric=metric,
        points=tuple(
            SweptPoint(
                point=point,
                policies=_of_metric(line["policies"], metric),
                yardsticks=_of_metric(line.get("yardsticks", {}), metric),
                imbalance_static=line["policies"]["static"]["imbalance"],
                phi=line["setting"].get("phi"),
            )
            for point, line in zip(grid.points, lines, strict=True)
        ),
        trace=lines[0]["trace"],
        setting={
            name: value
            for name, value in lines[0]["setting"].items()
            if all(line["setting"].get(name) == value for line in lines)
        },
    )


def _of_metric(figures: Mapping[str, Mapping[str, Any]], metric: str) -> dict[str, float]:
    return {name: values[metric] for name, values in figures.items() if metric in values}
