"""Predict published measurements of one MoE layer alone: its times, its memory, its all-to-all."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.validate_model.result import ValidationPoint, ValidationResult, compared, fit_logs
from moe_rl.core.cost import LayerRows, all_to_all_time, flat_shares, gemm_time, independent_visits, layer_cost_params
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.topology import ClusterTopology, HardwareSpec
from moe_rl.simulators.memory import saved_row_bytes, transient_row_bytes
from moe_rl.simulators.setting import StepSetting
from moe_rl.simulators.whole_runs import ClusterNamed, ModelNamed

TOKEN_COPIES = 3
"""Input, output and its gradient of a measured layer."""


def moe_layer(
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
        return compared(
            published,
            [point for family in predicted_on for point in predicted(constants, family)],
            name=f"{published['name']}-{'-'.join(predicted_on)}{'-held-out' if held_out else ''}",
            title=f"{published['title']}: {' and '.join(predicted_on)}{' held out' if held_out else ''}",
            fitted=f"gemm_tflops and the MoE part of the fixed cost, on the {' and '.join(fitted_on)} points",
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
    return compared(
        published,
        points,
        name=f"{published['name']}-memory",
        title=f"{published['title']}: peak memory",
        fitted="FLAT_COPIES and the bytes of unfused GELU's temporaries (both integers), on this set",
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


def all_to_all(
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
    return [compared(published, points)]


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
