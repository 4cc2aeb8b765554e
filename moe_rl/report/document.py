"""A simulation as the JSON document of `moe-rl simulate --json`."""

from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.metrics import StepPrediction
from moe_rl.report.limits import limits
from moe_rl.report.simulation import ReportData

SCHEMA = "moe_rl.simulate/1"


def document(report: ReportData) -> dict[str, object]:
    """Return the figures of `--json`; a figure that was not computed is absent."""
    figures: dict[str, object] = {
        "schema": SCHEMA,
        "moe_rl_version": report.version,
        "command": report.command,
        "trace": dict(report.trace),
        "setting": dict(report.setting),
        "notes": [*report.all_cautions, *report.notes],
        "policies": {},
    }
    policies: dict[str, object] = {}
    for row in report.policies:
        policies[row.policy] = row.as_json() | _engine(report, row) | _loads(report, row) | _memory(report, row)
    figures["policies"] = policies
    yardsticks: dict[str, object] = {}
    for row in report.yardsticks:
        yardsticks[row.policy] = row.as_json() | _memory(report, row)
    if yardsticks:
        figures["yardsticks"] = yardsticks
    if report.speedups:
        figures["speedups"] = list(report.speedups)
    if report.rl is not None:
        figures |= {"rl_speedup": report.rl.speedup, "rl_step": report.rl.as_json()}
    if report.misfit is not None:
        figures["misfit"] = report.misfit.as_json()
    if report.balancing_alone is not None:
        figures["balancing_alone"] = report.balancing_alone.as_json()
    if report.sensitivity:
        perturbed = [asdict(ranking) | {"holds": ranking.holds} for ranking in report.sensitivity]
        holds = all(ranking["holds"] for ranking in perturbed)
        figures["sensitivity"] = {"holds": holds, "perturbed": perturbed}
    if limited := limits(report):
        figures["limits"] = limited.as_json()
    return figures


def _engine(report: ReportData, prediction: StepPrediction) -> dict[str, object]:
    speedup = report.speedup_vs_best_engine(prediction)
    if speedup is None:
        return {}
    return {"vs_best_engine": speedup}


def _loads(report: ReportData, prediction: StepPrediction) -> dict[str, object]:
    loads, bounds = report.loads[prediction.policy], report.bounds.get(prediction.policy)
    curves: dict[str, object] = {
        "imbalance_by_micro_batch": _rounded(loads.imbalance_by_micro_batch),
        "imbalance_by_layer": _rounded(loads.imbalance_by_layer),
    }
    if bounds is not None:
        curves["bounds"] = bounds.as_json()
    return curves


def _memory(report: ReportData, prediction: StepPrediction) -> dict[str, object]:
    forecast = report.memory.get(prediction.policy)
    if forecast is None:
        return {}
    return {"memory": {"parts_bytes": forecast.parts_bytes, "hbm_bytes": forecast.hbm_bytes, "fits": forecast.fits}}


def _rounded(values: NDArray[np.float32]) -> list[float]:
    return [round(float(value), 4) for value in values]
