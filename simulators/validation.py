"""Predict published measurements, say what was fitted on what, and how far off the rest is.

A published set is a YAML file with its source. Constants come from the cluster file; the two that a set may refit for
itself are named in its summary, together with the part of the set that they were fitted on. No constant is fitted per
point.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from moe_rl.core.cost import (
    Floats,
    LayerRows,
    all_to_all_time,
    flat_shares,
    gemm_time,
    independent_visits,
    layer_cost_params,
)
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.topology import ClusterTopology, HardwareSpec
from moe_rl.simulators.balanced import BalancedBatch
from moe_rl.simulators.fit import SHIPPED, first_fit, held_out_errors
from moe_rl.simulators.memory import MemoryForecast, saved_row_bytes, transient_row_bytes
from moe_rl.simulators.setting import StepSetting
from moe_rl.simulators.whole_runs import ClusterNamed, ModelNamed, WholeRun

FIT_ROUNDS = 30
TOKEN_COPIES = 3
"""Input, output and its gradient of a measured layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationPoint:
    """One published figure beside the predicted one."""

    name: str
    unit: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted / published - 1."""
        return self.predicted / self.published - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """A comparison: points that were predicted with the same constants."""

    name: str
    title: str
    source: str
    fitted: str
    """What was fitted, and on what."""
    points: tuple[ValidationPoint, ...]
    limit_mean_error: float | None = None
    limit_error: float | None = None
    """Limit of every single error."""
    limit_median_error: float | None = None
    constants: Mapping[str, float] = field(default_factory=dict)
    """Constants that the comparison fitted."""

    @property
    def mean_error(self) -> float:
        """Mean of the absolute errors."""
        return sum(abs(point.error) for point in self.points) / len(self.points)

    @property
    def largest_error(self) -> float:
        """Largest absolute error."""
        return max(abs(point.error) for point in self.points)

    @property
    def median_error(self) -> float:
        """Median of the absolute errors."""
        return float(np.median([abs(point.error) for point in self.points]))

    @property
    def passed(self) -> bool | None:
        """Whether the limits hold; None without limits."""
        limits = (
            (self.mean_error, self.limit_mean_error),
            (self.median_error, self.limit_median_error),
            (self.largest_error, self.limit_error),
        )
        holds = [error <= limit for error, limit in limits if limit is not None]
        return all(holds) if holds else None

    def as_json(self) -> dict[str, object]:
        """Return the comparison as plain values; limits that do not exist are absent."""
        values: dict[str, object] = asdict(self) | {
            "mean_error": self.mean_error,
            "median_error": self.median_error,
            "largest_error": self.largest_error,
            "passed": self.passed,
            "points": [asdict(point) | {"error": point.error} for point in self.points],
        }
        return {name: value for name, value in values.items() if value is not None}


def published_folder() -> Path:
    """Return the folder of published sets of a checkout; raise where there is none (an installed wheel)."""
    folder = Path(__file__).resolve().parent.parent / "tests" / "simulators" / "data"
    require(folder.is_dir(), f"the published measurements are part of a checkout, there is no folder {folder}.")
    return folder


def validate(folder: Path, *, model_named: ModelNamed, cluster_named: ClusterNamed) -> list[ValidationResult]:
    """Return every comparison of every published set in `folder`, by file name."""
    results: list[ValidationResult] = []
    for published in _published(folder):
        results.extend(_KINDS[published["kind"]](published, model_named, cluster_named))
    return results


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


def _result(published: Mapping[str, Any], points: Iterable[ValidationPoint], **values: Any) -> ValidationResult:
    defaults = {name: published.get(name) for name in ("name", "title", "source", "fitted", "limit_mean_error")}
    return ValidationResult(points=tuple(points), **{**defaults, **values})


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
            model_named(case["model"]),
            topology,
            setting,
            tokens_per_rank=case["tokens_per_rank"],
            sequence_length=case["sequence_length"],
        )
        step = batch.step(topology, setting, num_micro_batches=case["num_micro_batches"])
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
    results = [_result(published, balanced)]
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
    return _result(
        published,
        points,
        name=f"{published['name']}-natural-routing",
        title=f"{published['title']}: slow-down of natural routing",
        fitted=f"one imbalance for all {len(points)} points",
        limit_mean_error=None,
        limit_error=published.get("limit_slowdown_error"),
        constants={"imbalance": 1.0 + excess},
    )


def _moe_layer(
    published: Mapping[str, Any], model_named: ModelNamed, cluster_named: ClusterNamed
) -> list[ValidationResult]:
    """Compare forward and backward of one MoE layer: as shipped, and refitted on one model family at a time."""
    hardware = cluster_named(published["cluster"])
    families = list(published["families"])

    def predicted(constants: Sequence[float], family: str) -> list[ValidationPoint]:
        cases = [case for case in published["points"] if case["family"] == family]
        return [point for case in cases for point in _moe_layer_points(published, case, hardware, constants)]

    def fit(on: Sequence[str]) -> list[float]:
        def residuals(constants: Sequence[float]) -> np.ndarray[Any, Any]:
            points = [point for family in on for point in predicted(constants, family)]
            return np.array([math.log(point.predicted / point.published) for point in points])

        return fit_logs(residuals, [hardware.gemm_tflops, 0.5])

    def result(fitted_on: Sequence[str], predicted_on: Sequence[str]) -> ValidationResult:
        constants = fit(fitted_on)
        held_out = fitted_on != predicted_on
        return _result(
            published,
            [point for family in predicted_on for point in predicted(constants, family)],
            name=f"{published['name']}-{'-'.join(predicted_on)}{'-held-out' if held_out else ''}",
            title=f"{published['title']}: {' and '.join(predicted_on)}{' held out' if held_out else ''}",
            fitted=f"gemm_tflops and the MoE part of the fixed cost, on {' and '.join(fitted_on)}",
            limit_mean_error=published.get("limit_mean_error"),
            constants=dict(zip(("gemm_tflops", "fixed_share"), constants, strict=True)),
        )

    held_out = [result([one for one in families if one != family], [family]) for family in families]
    return [*held_out, result(families, families), _moe_layer_memory(published)]


def _moe_layer_memory(published: Mapping[str, Any]) -> ValidationResult:
    """Compare the peak of one layer: bf16 weights and gradients, rows, a few tensors of tokens, receive buffer."""
    points = []
    for case in published["points"]:
        shape = published["families"][case["family"]]
        model = _layer_model(shape, activation="gelu")
        hierarchical = case["dispatcher"] != "alltoall"
        tokens, ranks = published["tokens_per_rank"], published["ep_size"]
        setting = StepSetting(dispatcher=case["dispatcher"])
        row_bytes = saved_row_bytes(model, setting) + transient_row_bytes(model, setting)
        visits = ranks * _visit_probability(model, ranks, shape["expert_group_top_k"]) if hierarchical else 0.0
        predicted = (
            4 * model.num_experts // ranks * model.expert_params
            + tokens * model.top_k * row_bytes
            + 2 * model.hidden_size * tokens * (visits + TOKEN_COPIES)
        )
        points.append(
            ValidationPoint(
                name=f"{case['family']} {case['dispatcher']}",
                unit="GB",
                published=case["peak_bytes"] / 1e9,
                predicted=predicted / 1e9,
            )
        )
    return _result(
        published,
        points,
        name=f"{published['name']}-memory",
        title=f"{published['title']}: peak memory",
        fitted="FLAT_COPIES and the temporaries of unfused GELU (whole numbers), on this set",
        limit_mean_error=published.get("limit_memory_error"),
    )


def _moe_layer_points(
    published: Mapping[str, Any], case: Mapping[str, Any], hardware: HardwareSpec, constants: Sequence[float]
) -> list[ValidationPoint]:
    gemm_tflops, fixed_share = constants
    shape = published["families"][case["family"]]
    model = _layer_model(shape, activation="gelu")
    topology = ClusterTopology(hardware=replace(hardware, gemm_tflops=gemm_tflops), ep_size=published["ep_size"])
    deduplicated = case["dispatcher"] != "alltoall"
    params = layer_cost_params(model, topology, hierarchical=deduplicated)
    visits = topology.ep_size * _visit_probability(model, topology.ep_size, shape["expert_group_top_k"])
    rows = _layer_rows(model, topology, tokens=published["tokens_per_rank"], visits=visits, deduplicated=deduplicated)
    all_to_all = 2.0 * float(all_to_all_time(params, rows))
    points = []
    for backward, fixed_ms in enumerate((hardware.layer_fixed_forward_ms, hardware.layer_fixed_backward_ms)):
        gemm = float(gemm_time(params, rows, backward=bool(backward)).max())
        phase = ("forward", "backward")[backward]
        points.append(
            ValidationPoint(
                name=f"{case['family']} {case['dispatcher']} {phase}",
                unit=published["unit"],
                published=case[phase],
                predicted=1e3 * (gemm + all_to_all) + fixed_share * fixed_ms,
            )
        )
    return points


def _all_to_all(
    published: Mapping[str, Any], model_named: ModelNamed, cluster_named: ClusterNamed
) -> list[ValidationResult]:
    """Compare the time of one dispatch or combine under uniform routing."""
    hardware = cluster_named(published["cluster"])
    points = []
    for point in published["points"]:
        case = {**published, **point}
        topology = ClusterTopology(hardware=hardware, ep_size=case["ep_size"])
        experts = case["experts_per_rank"] * topology.ep_size
        model = _layer_model({"num_experts": experts, "hidden_size": case["hidden_size"], "top_k": case["top_k"]})
        rows = _layer_rows(model, topology, tokens=case["tokens_per_rank"])
        predicted_ms = 1e3 * float(all_to_all_time(layer_cost_params(model, topology), rows))
        published_ms = case.get("published_ms")
        if published_ms is None:
            nodes = topology.num_nodes * _visit_probability(model, topology.num_nodes, 1)
            sent = case["tokens_per_rank"] * nodes * model.hidden_size * 2
            published_ms = sent / case["gb_per_s"] / 1e6
        points.append(
            ValidationPoint(name=case["name"], unit=published["unit"], published=published_ms, predicted=predicted_ms)
        )
    return [_result(published, points)]


def _whole_runs(
    published: Mapping[str, Any], model_named: ModelNamed, cluster_named: ClusterNamed
) -> list[ValidationResult]:
    """Compare whole runs: with shipped constants, and with those fitted on all other clusters or models."""
    runs = [WholeRun.of({**published, **row}, model_named, cluster_named) for row in published["points"]]

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
        return _result(published, points, **values)

    results = [result(runs, SHIPPED.errors(runs), limit_median_error=published.get("limit_median_error"))]
    for by, limit in (("cluster", "limit_held_out_error"), ("model", "limit_held_out_error")):
        if len({getattr(run, by) for run in runs}) == 1 or limit not in published:
            continue
        held_out = held_out_errors(runs, first_fit(cluster_named), by)
        results.append(
            result(
                [run for value in held_out for run in runs if getattr(run, by) == value],
                np.concatenate(list(held_out.values())),
                name=f"{published['name']}-{by}-held-out",
                title=f"{published['title']}: every {by} held out in turn",
                fitted=f"the constants of simulators/fit.py, on the runs of the other {by}s",
                limit_mean_error=published[limit],
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
            predicted=run.memory().peak_bytes / 1e9,
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
        _result(published, peaks, limit_error=published.get("limit_error")),
        _result(
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
    return [(run, run.memory()) for run in runs.values()]


_KINDS = {
    "throughput": _throughput,
    "moe_layer": _moe_layer,
    "all_to_all": _all_to_all,
    "whole_runs": _whole_runs,
    "memory_peaks": _memory_peaks,
}


def _layer_model(shape: Mapping[str, int], *, activation: str = "swiglu") -> MoeModelSpec:
    """Return a one-layer model of that MoE shape; what a single MoE layer does not use is 1."""
    return MoeModelSpec(
        name="layer",
        num_layers=1,
        moe_layer_ids=(0,),
        num_experts=shape["num_experts"],
        top_k=shape["top_k"],
        hidden_size=shape["hidden_size"],
        moe_ffn_hidden_size=shape.get("moe_ffn_hidden_size", 1),
        num_expert_groups=shape.get("num_expert_groups", 1),
        num_attention_heads=1,
        num_query_groups=1,
        kv_channels=1,
        vocab_size=1,
        activation=activation,
    )


def _visit_probability(model: MoeModelSpec, num_places: int, group_top_k: int) -> float:
    """Return the probability that a token visits one of `num_places` equal places, its K experts drawn uniformly.

    A group-limited router draws `group_top_k` groups first; a place then holds whole groups or a part of one.
    """
    held = model.num_experts // num_places
    eligible = model.num_experts * group_top_k // model.num_expert_groups
    misses = math.comb(eligible - held, model.top_k) / math.comb(eligible, model.top_k)
    return group_top_k / model.num_expert_groups * (1.0 - misses)


def _layer_rows(
    model: MoeModelSpec,
    topology: ClusterTopology,
    *,
    tokens: int,
    visits: float | None = None,
    deduplicated: bool = True,
) -> LayerRows:
    """Return the rows of uniform routing; `visits` ranks per token, or as many as independent choices give.

    Not `deduplicated`, every expert of a token is sent a row.
    """
    ranks = topology.ep_size
    per_rank = topology.experts_per_rank(model.num_experts)
    share = model.top_k / model.num_experts
    home = np.arange(model.num_experts) // per_rank == np.arange(ranks)[:, None]
    rank_visits, ingress, egress = independent_visits(home * share, np.array(float(tokens)), topology.ranks_per_domain)
    if visits is not None:
        rank_visits = np.full(ranks, tokens * visits)
    rows = np.full(ranks, float(tokens * model.top_k))
    if not deduplicated:
        local, remote = flat_shares(topology.ep_size, topology.ranks_per_domain)
        rank_visits, ingress, egress = local * rows, remote * rows, remote * rows
    none = np.zeros(())
    return LayerRows(
        rows=rows,
        padded_rows=rows,
        active_experts=np.full(ranks, float(per_rank)),
        rank_visits=rank_visits,
        nic_ingress=ingress,
        nic_egress=egress,
        replicas=none,
        cross_node_replicas=none,
    )


def fit_logs(residuals: Callable[[Sequence[float]], np.ndarray[Any, Any]], start: Sequence[float]) -> list[float]:
    """Return the positive values that minimize the sum of squares of `residuals`: damped Gauss-Newton on logarithms."""
    logs = np.log(np.asarray(start, np.float64))
    damping = 1e-3
    current = residuals(np.exp(logs).tolist())
    for _ in range(FIT_ROUNDS):
        nudge = 1e-5 * np.eye(len(logs))
        jacobian = np.stack([(residuals(np.exp(logs + one).tolist()) - current) / 1e-5 for one in nudge], axis=1)
        normal = jacobian.T @ jacobian
        step = np.linalg.solve(normal + damping * np.eye(len(logs)), -jacobian.T @ current)
        tried = residuals(np.exp(logs + step).tolist())
        if tried @ tried < current @ current:
            logs, current, damping = logs + step, tried, damping / 3
        else:
            damping *= 10
    return [float(value) for value in np.exp(logs)]
