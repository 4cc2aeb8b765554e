"""Simulate a trace over a grid of settings, points side by side, to be stopped and resumed."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_rl.config import load_cluster, load_model
from moe_rl.core.errors import InvalidInputError
from moe_rl.report.faces import SimulationReport, Sweep
from moe_rl.report.sweep import SweptPoint, describe
from moe_rl.study.collect_notes import collected_notes
from moe_rl.study.executors import Executor
from moe_rl.study.options import AUTO, SimulationOptions
from moe_rl.study.plan_and_price import predict
from moe_rl.study.resident_slots import KINDS, deciding_policy, open_scenario
from moe_rl.study.scenario import Progress, check_policies, open_trace_of_model, topology_of
from moe_rl.study.sweep_file import open_sweep
from moe_rl.study.sweep_grid import Grid
from moe_rl.study.traces import TraceLike, digest_of
from moe_rl.version import __version__
from moe_rl.yaml_files import FROM_TRACE

logger = logging.getLogger(__name__)

TOO_LONG = ("constants", "assumptions", "model_shape")
"""Facts of a report that are the same for every point and stand in its settings."""


def run_sweep(
    trace: TraceLike,
    grid: Grid,
    options: SimulationOptions,
    out: Path,
    *,
    progress: Progress,
    executor: Executor,
    command: str = "",
    tell: Callable[[str], None] = logger.info,
) -> Sweep:
    """Simulate every point of `grid` that is not in the file `out` yet; `options` are those the grid varies.

    Every point is checked before the first is simulated. `tell` gets sentences about what was found in the file.
    """
    progress("checking the settings", 0, 1)
    with collected_notes():
        _check_points(trace, grid)
    with open_sweep(out, _settings(trace, options, grid)) as file:
        if file.dropped:
            tell(f"note: the last line of {out} was incomplete; its point is simulated again.")
        task = _PointTask(trace, grid, command)
        file.complete(grid.points, task, executor, name=describe, progress=progress, tell=tell)
        return _sweep(grid, [file.line(point) or {} for point in grid.points])


def _check_points(trace: TraceLike, grid: Grid) -> None:
    """Raise for a point that cannot be simulated, before any is."""
    for point, options in zip(grid.points, grid.options, strict=True):
        try:
            check_policies(options)
            source, model = open_trace_of_model(trace, options)
            for name in KINDS:
                if getattr(options, name) == AUTO:
                    deciding_policy(options, model.spec, name)
            topology_of(options, load_cluster(options.cluster), (), num_experts=source.num_experts)
        except InvalidInputError as error:
            raise InvalidInputError(f"{describe(point)}: {error}") from error


def _settings(trace: TraceLike, options: SimulationOptions, grid: Grid) -> dict[str, Any]:
    """Return everything but the point that decides a point's figures."""
    said = {name: value for name, value in options.model_dump().items() if name not in grid.values}
    settings: dict[str, Any] = {
        "moe_rl_version": __version__,
        "trace_sha256": digest_of(trace),
        "swept": sorted(grid.values),
        "options": said,
    }
    if "cluster" not in grid.values:
        cluster = asdict(load_cluster(options.cluster))
        settings["cluster"] = {name: value for name, value in cluster.items() if name != "sources"}
    if "model" not in grid.values and options.model != FROM_TRACE:
        settings["model"] = asdict(load_model(options.model).spec)
    return settings


@dataclass(frozen=True, slots=True)
class _PointTask:
    """Figures of a point by its index, wherever that runs."""

    trace: TraceLike
    grid: Grid
    command: str

    def __call__(self, index: int) -> dict[str, object]:
        point, options = self.grid.points[index], self.grid.options[index]
        try:
            with collected_notes() as warnings:
                scenario = open_scenario(self.trace, options, _silent)
                return _figures(predict(scenario, _silent, command=self.command, warnings=warnings))
        except InvalidInputError as error:
            raise InvalidInputError(f"{describe(point)}: {error}") from error


def _silent(what: str, done: int, total: int) -> None:
    pass


def _figures(report: SimulationReport) -> dict[str, object]:
    """Return the report's document without what repeats in every point or grows with the micro-batches."""
    document: dict[str, Any] = report.as_json()
    policies = {
        name: {key: value for key, value in figures.items() if key != "imbalance_by_micro_batch"}
        for name, figures in document["policies"].items()
    }
    setting = {name: value for name, value in document["setting"].items() if name not in TOO_LONG}
    kept: dict[str, Any] = {name: document[name] for name in ("trace", "yardsticks", "notes") if name in document}
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
        notes=tuple(note for note in dict.fromkeys(lines[0]["notes"]) if all(note in line["notes"] for line in lines)),
    )


def _of_metric(figures: Mapping[str, Mapping[str, Any]], metric: str) -> dict[str, float]:
    return {name: values[metric] for name, values in figures.items() if metric in values}
