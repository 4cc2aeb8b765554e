"""Predict published measurements, say what was fitted on what, and how far off the rest is.

A published set is a YAML file with its source. Constants come from the cluster file; the two that a set may refit for
itself are named in its summary, together with the part of the set that they were fitted on. No constant is fitted per
point.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.validate_model.fit import CONSTANTS, SHIPPED, first_fit, held_out_errors, ratio_errors
from benchmarks.validate_model.gains import layer_gains, policy_gains, recorded_gains
from benchmarks.validate_model.layer import all_to_all, moe_layer
from benchmarks.validate_model.result import ValidationPoint, ValidationResult, compared, fit_logs
from moe_rl.config import load_software
from moe_rl.core.cost import Floats
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.software import TUNED, TYPICAL
from moe_rl.core.topology import ClusterTopology
from moe_rl.simulators.balanced import BalancedBatch
from moe_rl.simulators.memory import MemoryForecast
from moe_rl.simulators.setting import StepSetting, TrainingRun
from moe_rl.simulators.whole_runs import ClusterNamed, ModelNamed, WholeRun

PUBLISHED = Path(__file__).parents[2] / "tests" / "simulators" / "data"


def validate(
    folder: Path, *, model_named: ModelNamed, cluster_named: ClusterNamed, kinds: Sequence[str] = ()
) -> list[ValidationResult]:
    """Return every comparison of every published set in `folder`, by file name; of these kinds where they are given."""
    results: list[ValidationResult] = []
    for published in _published(folder):
        if not kinds or published["kind"] in kinds:
            results.extend(_KINDS[published["kind"]](published, model_named, cluster_named))
    return sorted(results, key=lambda result: "held-out" not in result.name)


def _published(folder: Path) -> list[dict[str, Any]]:
    files = sorted([*folder.glob("*.yaml"), *folder.glob("*.json")])
    require(len(files) > 0, f"{folder} holds no published sets (*.yaml, *.json).")
    sets = []
    for path in files:
        published = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.suffix == ".json" and isinstance(published, dict):
            # A bare list of runs, as exported; JSON is YAML.
            published = {"kind": "whole_runs", "name": path.stem, "title": path.stem, "fitted": "nothing"} | published
        if not isinstance(published, dict) or published.get("kind") not in _KINDS:
            raise InvalidInputError(f"{path}: kind must be one of {', '.join(_KINDS)}.")
        sets.append(published)
    return sets


def _throughput(
    published: Mapping[str, Any], model_named: ModelNamed, cluster_named: ClusterNamed
) -> list[ValidationResult]:
    """Compare TFLOP/s per GPU with forced balance, and slow-downs under natural routing where they are published."""
    balanced, slowdowns, phis = [], [], []
    for point in published["points"]:
        case = {**published, **point}
        hardware = cluster_named(case["cluster"])
        setting = StepSetting(**case.get("setting", {}), context_parallel_size=case.get("context_parallel_size", 1))
        topology = ClusterTopology(hardware=hardware, ep_size=case["ep_size"], ranks_per_node=hardware.ranks_per_node)
        batch = BalancedBatch.of(
            TrainingRun(model=model_named(case["model"]), topology=topology, setting=setting),
            tokens_per_rank=case["tokens_per_rank"],
            sequence_length=case["sequence_length"],
        )
        step = batch.step(case["num_micro_batches"])
        by_tokens = "tokens_per_s" in case
        balanced.append(
            ValidationPoint(
                name=case["name"],
                unit="tokens/s/GPU" if by_tokens else published["unit"],
                published=case["tokens_per_s"] if by_tokens else case["balanced"],
                predicted=step.tokens_per_s_per_gpu if by_tokens else step.tflops_per_s_per_gpu,
            )
        )
        if "natural" in case:
            slowdowns.append(case["balanced"] / case["natural"])
            phis.append(step.phi)
    results = [compared(published, balanced)]
    if slowdowns:
        results.append(_natural_routing(published, np.array(slowdowns), np.array(phis)))
    return results


def _natural_routing(
    published: Mapping[str, Any], slowdowns: np.ndarray[Any, np.dtype[np.float64]], phis: np.ndarray[Any, Any]
) -> ValidationResult:
    """One imbalance I for all points: time over balanced time = 1 + phi (I - 1)."""
    (excess,) = fit_logs(lambda x: np.log(1.0 + phis * x[0]) - np.log(slowdowns), [0.5])
    points = [
        ValidationPoint(name=point["name"], unit="x", published=float(slow), predicted=float(1.0 + phi * excess))
        for point, slow, phi in zip(published["points"], slowdowns, phis, strict=True)
    ]
    return compared(
        published,
        points,
        name=f"{published['name']}-natural-routing",
        title=f"{published['title']}: slow-down under natural routing",
        fitted=f"the routing imbalance (one value for all {len(points)} points), on this set",
        limit_mean_error=None,
        limit_error=published.get("limit_slowdown_error"),
        constants={"imbalance": 1.0 + excess},
    )


def memory_of(run: WholeRun) -> MemoryForecast:
    """Return the run's peak as forecast, with as many micro-batches as a pipeline's first stage holds."""
    return run.batch.memory()


def _whole_runs(
    published: Mapping[str, Any], model_named: ModelNamed, cluster_named: ClusterNamed
) -> list[ValidationResult]:
    """Compare whole runs: held out by setting, by cluster, by model, ratios of settings, and with shipped constants."""
    runs = [WholeRun.of({**published, **row}, model_named, cluster_named) for row in published["points"]]
    regressions = {row["name"] for row in published["points"] if "regression" in row}

    def result(ordered: Sequence[WholeRun], errors: Floats, **values: Any) -> ValidationResult:
        points = [
            ValidationPoint(
                name=run.name,
                unit="tokens/s/GPU",
                published=run.tokens_per_s,
                predicted=run.tokens_per_s * (1.0 + float(error)),
            )
            for run, error in zip(ordered, errors, strict=True)
        ]
        return compared(published, points, **values)

    results = []
    if "limit_held_out_error" in published:
        for by, of in (("setting", "a third of the settings"), ("model", "every model"), ("cluster", "every cluster")):
            groups = held_out_errors(runs, first_fit(cluster_named), by).values()
            left_out = [run for some, _ in groups for run in some]
            errors = np.concatenate([some for _, some in groups])
            named = {
                "fitted": f"{len(CONSTANTS)} constants, on the runs of the other {by}s",
                "name": f"{published['name']}-{by}-held-out",
            }
            title = f"{published['title']}: {of} held out in turn"
            limit = published["limit_held_out_error"][by]
            results.append(result(left_out, errors, title=title, limit_mean_error=limit, **named))
            if by == "setting":
                sound = [run.name not in regressions for run in left_out]
                kept = [run for run, holds in zip(left_out, sound, strict=True) if holds]
                without = {**named, "name": f"{named['name']}-without-regressions"}
                said = f"{title}, without the run that NVIDIA calls a regression"
                results.append(result(kept, errors[sound], title=said, limit_mean_error=limit, **without))
                ratios = ratio_errors(left_out, errors).items()
                points = [
                    ValidationPoint(name=" / ".join(pair), unit="x", published=is_, predicted=forecast)
                    for pair, (is_, forecast) in ratios
                ]
                named["name"] = f"{published['name']}-ratios-held-out"
                title = f"{published['title']}: ratio of two held-out settings (same model, same cluster)"
                results.append(compared(published, points, title=title, limit_mean_error=None, **named))
    shown = result(runs, SHIPPED.errors(runs), limit_median_error=published.get("limit_median_error"))
    return [*results, shown]


def _user_runs(
    published: Mapping[str, Any], model_named: ModelNamed, cluster_named: ClusterNamed
) -> list[ValidationResult]:
    """Compare other people's runs under typical software, and under tuned, which they do not run."""
    runs = [WholeRun.of({**published, **row}, model_named, cluster_named) for row in published["points"]]
    results = []
    for name in (TYPICAL, TUNED):
        costs = load_software(name).costs
        points = [
            ValidationPoint(
                name=run.name,
                unit=published["unit"],
                published=run.tokens_per_s,
                predicted=run.predicted(software=costs).tokens_per_s_per_gpu,
            )
            for run in runs
        ]
        judged = name == TYPICAL
        results.append(
            compared(
                published,
                points,
                name=f"{published['name']}-{name}",
                title=f"{published['title']}, forecast with --software {name}",
                fitted=published["fitted"]
                if judged
                else "nothing on this set; shows the error of the wrong --software value",
                limit_mean_error=published.get("limit_mean_error") if judged else None,
            )
        )
    return results


def _memory_peaks(
    published: Mapping[str, Any], model_named: ModelNamed, cluster_named: ClusterNamed
) -> list[ValidationResult]:
    """Compare peaks of allocated memory, and what recomputing modules costs against the set's first run of a model."""
    runs = [WholeRun.of({**published, **row}, model_named, cluster_named) for row in published["points"]]
    peaks = [
        ValidationPoint(
            name=run.name,
            unit=published["unit"],
            published=run.peak_bytes / 1e9,
            predicted=memory_of(run).peak_bytes / 1e9,
        )
        for run in runs
        if run.peak_bytes
    ]
    first: dict[str, WholeRun] = {}
    slower = []
    for run in runs:
        control = first.setdefault(run.model, run)
        if run is not control:
            slower.append(
                ValidationPoint(
                    name=run.name,
                    unit="x",
                    published=control.tokens_per_s / run.tokens_per_s,
                    predicted=control.predicted().tokens_per_s_per_gpu / run.predicted().tokens_per_s_per_gpu,
                )
            )
    return [
        compared(published, peaks, limit_error=published.get("limit_error")),
        compared(
            published,
            slower,
            name=f"{published['name']}-recompute-time",
            title="Time of recomputed modules",
            fitted="host_recompute_ms, on this set",
        ),
    ]


def memory_forecasts(
    folder: Path, *, model_named: ModelNamed, cluster_named: ClusterNamed
) -> list[tuple[WholeRun, MemoryForecast]]:
    """Return the forecast peak of every distinct configuration that is published as having run."""
    runs: dict[str, WholeRun] = {}
    for published in _published(folder):
        if published["kind"] in ("whole_runs", "memory_peaks"):
            for row in published["points"]:
                run = WholeRun.of({**published, **row}, model_named, cluster_named)
                runs.setdefault(run.facts, run)
    return [(run, memory_of(run)) for run in runs.values()]


_KINDS = {
    "throughput": _throughput,
    "moe_layer": moe_layer,
    "layer_gains": layer_gains,
    "policy_gains": policy_gains,
    "recorded_gains": recorded_gains,
    "all_to_all": all_to_all,
    "whole_runs": _whole_runs,
    "memory_peaks": _memory_peaks,
    "user_runs": _user_runs,
}
