"""Simulate a trace over every combination of the values of some options, side by side, to be stopped and resumed."""

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moe_rl.config import load_cluster, load_model
from moe_rl.core.errors import InvalidInputError, located, nearest_name, require
from moe_rl.core.mappings import overlap, subset, without
from moe_rl.option_groups import AUTO, words_of
from moe_rl.report.faces import SimulationReport, Sweep
from moe_rl.report.sweep import SweptPoint, Value, describe
from moe_rl.study.collect_notes import collected_notes
from moe_rl.study.executors import Executor
from moe_rl.study.groups import TraceOptions
from moe_rl.study.options import SimulationOptions
from moe_rl.study.plan_and_price import predict
from moe_rl.study.ranks import topology_of, with_groups_of_gpus
from moe_rl.study.resident_slots import KINDS, deciding_policy, open_scenario
from moe_rl.study.scenario import Progress, check_policies, open_trace_of_model, step_of, with_batch
from moe_rl.study.shown import SHOWN
from moe_rl.study.sweep_file import finish_points
from moe_rl.study.traces import TraceLike, digest_of
from moe_rl.version import __version__
from moe_rl.yaml_files import FROM_TRACE, checked

logger = logging.getLogger(__name__)

# Facts of a report that are the same for every point: a line's `settings` have them.
TOO_LONG = ("constants", "assumptions", "model_shape")


# Options for reading the trace, lists, and the objective: points with other objectives have other figures.
NOT_SWEPT = frozenset({*words_of(TraceOptions), "policy", "policy_option", "objective"})


def flags() -> dict[str, str]:
    """Return the options that can be swept, by every name that they go by."""
    name_by_flag = {}
    for field, word in words_of(SimulationOptions).items():
        if field not in NOT_SWEPT and not isinstance(word.default, list):
            for name in SHOWN[field].flags:
                name_by_flag[name.removeprefix("--").replace("-", "_")] = field
    return name_by_flag


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Swept options with their values, in the order given."""

    values: Mapping[str, tuple[Value, ...]]
    options: tuple[SimulationOptions, ...]
    """One per point; the last option varies fastest."""

    @property
    def points(self) -> list[dict[str, Value]]:
        """The swept values of every point."""
        return [options.words(self.values) for options in self.options]


def parse_grid(entries: Sequence[str], base: SimulationOptions) -> Grid:
    """Return the grid that `name=value,value` entries span over `base`; "none" stands for an option not given."""
    axes: list[tuple[str, list[Value]]] = []
    for entry in entries:
        name, equals, values_text = entry.partition("=")
        require(bool(equals and values_text.strip()), f"--sweep {entry!r} must have the form name=value,value.")
        texts = [text.strip() for text in values_text.split(",") if text.strip()]
        axes.append((name, [None if text == "none" else text for text in texts]))
    return span_grid(axes, base)


def span_grid(axes: Iterable[tuple[str, Sequence[Value]]], base: SimulationOptions) -> Grid:
    """Return every combination of the values of options over `base`; every value is checked as the option is."""
    name_by_flag, values_of = flags(), dict[str, Sequence[Value]]()
    for name, values in axes:
        field = name_by_flag.get(name.strip().removeprefix("--").replace("-", "_"))
        if field is None:
            raise InvalidInputError(
                f"--sweep {name!r} is not an option whose values can be compared.{nearest_name(name, name_by_flag)}"
            )
        require(field not in values_of, f"--sweep gives {field} twice.")
        require(
            isinstance(values, list | tuple | range) and len(values) > 0,
            f"--sweep {field} needs a list of values, got {values!r}.",
        )
        values_of[field] = values
    require(len(values_of) > 0, "--sweep must name an option, e.g. --sweep expert_model_parallel_size=8,16.")
    # Only what was said: a default that follows from another option must follow from the point's.
    stated = base.stated_words()
    options = []
    for combination in itertools.product(*values_of.values()):
        point = dict(zip(values_of, combination, strict=True))
        options.append(checked(stated | point, SimulationOptions))
    checked_values: dict[str, tuple[Value, ...]] = {}
    for name, values in values_of.items():
        checked_values[name] = tuple(dict.fromkeys(point.value_of(name) for point in options))
        require(len(checked_values[name]) == len(values), f"--sweep gives a value of {name} twice.")
    return Grid(values=checked_values, options=tuple(options))


def run_sweep(
    trace: TraceLike,
    grid: Grid,
    options: SimulationOptions,
    out: Path | None,
    *,
    progress: Progress,
    executor: Executor,
    command: str = "",
    tell: Callable[[str], None] = logger.info,
) -> Sweep:
    """Simulate every point of `grid` that is not in the file `out` yet (None: no file); the grid varies `options`.

    `tell` gets sentences about the points that were found in the file.
    """
    progress("checking the settings", 0, 1)
    # Every point before any is simulated: nobody waits an hour for a sentence about the last one.
    with collected_notes():
        for point, its_options in zip(grid.points, grid.options, strict=True):
            with located(describe(point)):
                _check(trace, its_options)
    task = partial(_figures_of_point, trace, grid, options, command)
    settings = _settings(trace, options, grid)
    lines = finish_points(out, settings, grid.points, task, executor, name=describe, progress=progress, tell=tell)
    return _sweep(grid, lines)


def _check(trace: TraceLike, options: SimulationOptions) -> None:
    """Raise where a point cannot be simulated, as far as that shows without counting its loads."""
    check_policies(options.planning, options.kernels)
    source, model = open_trace_of_model(trace, options)
    for name in KINDS:
        if options.value_of(name) == AUTO:
            deciding_policy(options.planning, options.pricing, model.spec, name)
    recorded_parts = tuple(source.parts(step_of(source, options)))
    options = with_batch(with_groups_of_gpus(options), recorded_parts)
    hardware = load_cluster(options.pricing.cluster)
    topology_of(options, hardware, recorded_parts, num_experts=source.num_experts)


def _settings(trace: TraceLike, options: SimulationOptions, grid: Grid) -> dict[str, Any]:
    """Return everything but the point that decides a point's figures."""
    stated = without(options.words(), grid.values)
    settings: dict[str, Any] = {
        "moe_rl_version": __version__,
        "trace_sha256": digest_of(trace),
        "swept": sorted(grid.values),
        "options": stated,
    }
    if "cluster" not in grid.values:
        # Not the sources: a reworded one changes no figure.
        cluster = asdict(load_cluster(options.pricing.cluster))
        settings["cluster"] = without(cluster, ["sources"])
    if "model" not in grid.values and options.shape.model != FROM_TRACE:
        settings["model"] = asdict(load_model(options.shape.model).spec)
    return settings


def _figures_of_point(
    trace: TraceLike, grid: Grid, options: SimulationOptions, command: str, index: int
) -> dict[str, object]:
    """Return the figures of a point, wherever that runs; a known step is one of `options`, before they are varied."""
    with located(describe(grid.points[index])), collected_notes() as warnings:
        scenario = open_scenario(trace, grid.options[index], _silent, measured=options)
        return _figures(predict(scenario, _silent, command=command, warnings=warnings))


def _silent(what: str, done: int, total: int) -> None:
    pass


def _figures(report: SimulationReport) -> dict[str, object]:
    """Return the report's document without parts that repeat in every point or grow with the micro-batches."""
    document: dict[str, Any] = report.as_json()
    policies = {name: without(row, ["imbalance_by_micro_batch"]) for name, row in document["policies"].items()}
    setting = without(document["setting"], TOO_LONG)
    return {"setting": setting, "policies": policies, **overlap(document, ("trace", "yardsticks", "notes"))}


def _sweep(grid: Grid, lines: list[dict[str, Any]]) -> Sweep:
    timed = grid.options[0].pricing.in_seconds
    metric = "imbalance"
    if timed:
        metric = "speedup_vs_static"
    points = []
    # What all points share: those of the first that every other one has as well.
    setting, notes = dict(lines[0]["setting"]), dict.fromkeys(lines[0]["notes"])
    for point, line in zip(grid.points, lines, strict=True):
        row = SweptPoint(
            point=point,
            policies=_of_metric(line["policies"], metric),
            yardsticks=_of_metric(line.get("yardsticks", {}), metric),
            imbalance_static=line["policies"]["static"]["imbalance"],
            phi=line["setting"].get("phi"),
        )
        points.append(row)
        setting = {name: value for name, value in setting.items() if line["setting"].get(name) == value}
        notes = subset(notes, [note for note in notes if note in line["notes"]])
    return Sweep(
        values=grid.values,
        metric=metric,
        points=tuple(points),
        trace=lines[0]["trace"],
        setting=setting,
        notes=tuple(notes),
    )


def _of_metric(figures: Mapping[str, Mapping[str, Any]], metric: str) -> dict[str, float]:
    return {name: values[metric] for name, values in figures.items() if metric in values}
