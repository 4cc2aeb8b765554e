"""The cost model beside published measurements, fitted sets marked.

python -m benchmarks.validate_model    # --points: every figure; --memory; --forecasts; --ablation; --constants; --json
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from benchmarks.validate_model.ablation import WORTH, ablations
from benchmarks.validate_model.compare import PUBLISHED, memory_forecasts, validate
from benchmarks.validate_model.constants import carried_constants
from benchmarks.validate_model.forecasts import (
    by_class,
    called_pairs,
    pair_figures,
    pooled,
    with_known_step,
    without_known_step,
)
from benchmarks.validate_model.result import ValidationResult
from moe_rl.cli.console import json_text, progress_bar, results
from moe_rl.config import load_cluster, load_model
from moe_rl.core.errors import InvalidInputError
from moe_rl.report.tables import figures_table

FAILED = 1


def validate_model(
    published: Annotated[Path, typer.Option(help="Folder of published sets (*.yaml).")] = PUBLISHED,
    points: Annotated[
        bool, typer.Option("--points", help="Show every published figure beside the predicted one.")
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="List the forecast peak of every published configuration that ran instead.")
    ] = False,
    forecasts: Annotated[
        bool, typer.Option("--forecasts", help="Say how often 80 % intervals hold, and which pairs they call, instead.")
    ] = False,
    ablation: Annotated[
        bool, typer.Option("--ablation", help="Leave every term out in turn, and say which is worth it, instead.")
    ] = False,
    constants: Annotated[
        bool, typer.Option("--constants", help="List what published rows determine, and how many carry it, instead.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict published measurements and say how far off the cost model is, fitted sets marked.

    Ends with exit code 1 when a set misses its limit.
    """
    if memory:
        _print_memory(published, as_json=as_json)
        return
    if forecasts:
        _print_forecasts(published, as_json=as_json)
        return
    if ablation:
        _print_ablation(published, as_json=as_json)
        return
    if constants:
        _print_constants(published, as_json=as_json)
        return
    with progress_bar() as advance:
        advance("predicting published measurements", 0, 1)
        compared = validate(
            published,
            model_named=lambda name: load_model(name).spec,
            cluster_named=load_cluster,
        )
    if as_json:
        document = {"schema": "moe_rl.validate-model/1", "sets": {result.name: result.as_json() for result in compared}}
        sys.stdout.write(json_text(document))
    else:
        _print(compared, points=points)
    if any(result.passed is False for result in compared):
        raise typer.Exit(FAILED)


def _print_forecasts(folder: Path, *, as_json: bool) -> None:
    ways = [list(way(folder)) for way in (without_known_step, with_known_step)]
    classes = [figures for forecasts in ways for figures in by_class(forecasts)]
    classes.append(pooled([forecast for forecasts in ways for forecast in forecasts]))
    pairs = pair_figures(list(called_pairs(folder)))
    if as_json:
        rows = [asdict(figures) | {"width_to_error": figures.width_to_error} for figures in classes]
        sys.stdout.write(
            json_text({"schema": "moe_rl.forecasts/1", "classes": rows, "pairs": [asdict(each) for each in pairs]})
        )
        return
    table = figures_table("runs", "rows", "mean |log|", "80 % holds", "left out", "half width", "/ |log|", gap=2)
    table.columns[0].no_wrap = False
    for figures in classes:
        left_out = "" if figures.coverage_left_out is None else f"{figures.coverage_left_out:.0%}"
        shares = f"{figures.coverage:.0%}", left_out
        widths = f"{figures.half_width:.3f}", f"{figures.width_to_error:.2f}"
        table.add_row(Text(figures.name), str(figures.count), f"{figures.log_error:.3f}", *shares, *widths)
    console = results()
    console.print(table)
    for each in pairs:
        said = f"{each.count} pairs differ by more than 10 %, {each.called} are called, {each.right} rightly"
        console.print(f"{each.name}: {said}")


def _print_ablation(folder: Path, *, as_json: bool) -> None:
    found = list(ablations(folder))
    if as_json:
        sys.stdout.write(
            json_text({"schema": "moe_rl.ablation/1", "worth": WORTH, "terms": [asdict(each) for each in found]})
        )
        return
    table = figures_table("term left out", "vendor's runs", "most", "class", "a cluster held out", gap=2)
    for each in found:
        kind, most = each.most
        held_out = "" if each.held_out is None else f"{each.held_out:+.4f}"
        verdict = Text("" if each.stays else f"{held_out} no class", style="" if each.stays else "red")
        table.add_row(Text(each.term), f"{each.worse['vendor']:+.4f}", f"{most:+.4f}", Text(kind), verdict)
    console = results()
    console.print(table)
    console.print(f"growth of the mean |log| of a class; a term is worth it from {WORTH} on")
    console.print(
        "a cluster held out: for terms that no class carries, by fits without them on the other clusters' runs"
    )


def _print_constants(folder: Path, *, as_json: bool) -> None:
    found = list(carried_constants(folder))
    if as_json:
        sys.stdout.write(json_text({"schema": "moe_rl.constants/1", "constants": [asdict(each) for each in found]}))
        return
    table = figures_table("constant", "value", "runs that determine it", "kind", gap=2)
    # A sentence, which else would take the room of the figures.
    table.columns[-1].no_wrap, table.columns[-1].justify = False, "left"
    for each in found:
        table.add_row(Text(each.name), f"{each.value:g}", f"{each.rows} of {each.of}", Text(each.kind))
    results().print(table)


def _print_memory(folder: Path, *, as_json: bool) -> None:
    forecasts = memory_forecasts(folder, model_named=lambda name: load_model(name).spec, cluster_named=load_cluster)
    rows = [
        {
            "run": run.name,
            "forecast_bytes": memory.peak_bytes,
            "hbm_bytes": memory.hbm_bytes,
            "fits": memory.fits,
            "parts_bytes": memory.parts_bytes,
        }
        | ({} if run.peak_bytes is None else {"published_bytes": run.peak_bytes})
        for run, memory in forecasts
    ]
    if as_json:
        sys.stdout.write(json_text(rows))
        return
    table = figures_table("run", "GB per GPU", "published", "of", "", "parts (GB)")
    table.columns[0].no_wrap = table.columns[-1].no_wrap = False
    table.columns[-1].justify = "left"
    for run, memory in forecasts:
        parts = (f"{name.replace('_', ' ')} {size / 1e9:.1f}" for name, size in memory.parts_bytes.items() if size)
        table.add_row(
            Text(run.name),
            f"{memory.peak_bytes / 1e9:.1f}",
            "" if run.peak_bytes is None else f"{run.peak_bytes / 1e9:.1f}",
            f"{memory.hbm_bytes / 1e9:.1f}",
            Text("fits" if memory.fits else "DOES NOT FIT", style="green" if memory.fits else "red"),
            ", ".join(parts),
        )
    console = results()
    console.print(table)
    console.print(
        f"{sum(memory.fits for _, memory in forecasts)} of {len(forecasts)} configurations that ran are forecast to fit"
    )


def _print(compared: Sequence[ValidationResult], *, points: bool) -> None:
    console = results()
    table = figures_table("set", "points", "mean error", "median", "largest", "limit")
    table.columns[0].no_wrap = False
    table.add_column("", no_wrap=True)
    table.add_column("constants fitted, and on which data", max_width=36)
    for result in compared:
        limit = "" if result.limit_mean_error is None else f"{result.limit_mean_error:.1%}"
        verdict = {True: "ok", False: "missed", None: ""}[result.passed]
        largest = max(result.points, key=lambda point: abs(point.error)).error
        table.add_row(
            Text(result.title),
            str(len(result.points)),
            f"{result.mean_error:.1%}",
            f"{result.median_error:.1%}",
            f"{largest:+.1%}",
            limit,
            Text(verdict, style="red" if verdict == "missed" else "green"),
            Text(result.fitted),
        )
    console.print(table)
    if points:
        for result in compared:
            console.print(Text(f"{result.title} ({result.source})", style="bold"))
            for point in result.points:
                figures = f"{point.published:9.4g} published, {point.predicted:9.4g} predicted"
                console.print(f"  {point.name:34} {figures} {point.error:+7.1%}  {point.unit}")


if __name__ == "__main__":
    try:
        typer.run(validate_model)
    except InvalidInputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
