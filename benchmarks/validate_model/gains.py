"""Published gains of balancing beside predicted ones: planned as a user would, or from rows that were recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from benchmarks.dirichlet import DIRICHLET_SCENARIOS
from benchmarks.validate_model.drawn import planned
from benchmarks.validate_model.result import ValidationPoint, ValidationResult, compared
from moe_rl.config import load_software
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import StepPrediction
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.software import TYPICAL
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.registry import make_planner
from moe_rl.simulators.pricing import TrainingStep
from moe_rl.simulators.result import PolicyResult
from moe_rl.simulators.setting import StepSetting
from moe_rl.simulators.step import simulate_policies
from moe_rl.simulators.whole_runs import ClusterNamed, ModelNamed
from moe_rl.study.options import SimulationOptions, merge_options

RANKS = 8
LAYER_PARTS = ("expert_gemm", "all_to_all", "replicate", "prefetch")


def layer_gains(
    published: Mapping[str, Any], model_named: ModelNamed, cluster_named: ClusterNamed
) -> list[ValidationResult]:
    """Compare gains with tokens sent once to a rank, and with a row sent for every expert."""
    topology = ClusterTopology(hardware=cluster_named(published["cluster"]), ep_size=RANKS)
    results = []
    for dispatcher, told in (("flex", {}), ("alltoall", {"title": published["title_flat"]})):
        options = merge_options(SimulationOptions, {"moe_token_dispatcher_type": dispatcher, **published["options"]})
        points = [
            ValidationPoint(
                name=f"{point['model']}, {published['share']:.0%} to {hot}",
                unit=published["unit"],
                published=gain,
                predicted=_gain(
                    model_named(point["model"]),
                    topology,
                    options.step_setting(),
                    hot=hot,
                    tokens=point["tokens"],
                    share=published["share"],
                ),
            )
            for point in published["points"]
            for hot, gain in point["gains"].items()
        ]
        limit = published["limit_error"] if not told else None
        name = published["name"] + ("-flat" if told else "")
        results.append(compared(published, points, name=name, limit_error=limit, **told))
    return results


def _gain(
    model: MoeModelSpec, topology: ClusterTopology, setting: StepSetting, *, hot: int, tokens: int, share: float
) -> float:
    """Return seconds of the routed experts as they are over seconds with rows spilled."""
    one = replace(model, num_layers=1, moe_layer_ids=(0,), sliding_window=0, num_sliding_window_layers=0)
    experts, rows = one.num_experts, tokens * one.top_k
    pairs = np.full(experts, round((1 - share) * rows) // (experts - hot), np.int32)
    pairs[:hot] = round(share * rows) // hot
    pairs[-1] += rows - pairs.sum()
    load = StepLoad(
        pairs=np.broadcast_to(pairs, (1, 1, 1, RANKS, experts)).copy(),
        tokens=np.full((1, 1, RANKS), tokens),
        top_k=one.top_k,
    )
    layout = BatchLayout(
        micro_batch=np.zeros(RANKS, np.int32),
        dp_rank=np.arange(RANKS, dtype=np.int32),
        order=np.zeros(RANKS, np.int32),
        num_micro_batches=1,
        num_dp_ranks=RANKS,
    )
    problem = PlanProblem(
        load=load, layout=layout, model=one, topology=topology, cost=setting.layer_cost_params(one, topology)
    )
    plan = make_planner("llep", min_tokens=1024).plan(problem)
    lengths = np.full(RANKS, tokens)
    step = TrainingStep(load=load, layout=layout, lengths=lengths, model=one, topology=topology, setting=setting)
    result = simulate_policies({"llep": plan}, step)
    return _layer_seconds(result.static.prediction) / _layer_seconds(result.policies["llep"].prediction)


def _layer_seconds(prediction: StepPrediction) -> float:
    breakdown = prediction.breakdown_s or {}
    return sum(breakdown[name] for name in LAYER_PARTS)


def policy_gains(
    published: Mapping[str, Any], model_named: ModelNamed, cluster_named: ClusterNamed
) -> list[ValidationResult]:
    """Compare gains of whole policies, over routing drawn as severe as their papers say."""
    points = []
    for case in published["cases"]:
        setting = StepSetting(**case["setting"])
        simulate = planned(
            DIRICHLET_SCENARIOS[case["scenario"]],
            ep_size=case["ep_size"],
            tokens=case["tokens"],
            setting=setting,
            cluster=case["cluster"],
            names=tuple(case["policies"]),
        )
        result = simulate(setting)
        steps = {**result.policies, **result.yardsticks(), "static": result.static}
        for point in case["gains"]:
            gain = _step_seconds(steps[point["over"]]) / _step_seconds(steps[point["policy"]])
            name = f"{point['policy']} / {point['over']}"
            points.append(ValidationPoint(name=name, unit=published["unit"], published=point["gain"], predicted=gain))
    return [compared(published, points)]


def _step_seconds(step: PolicyResult) -> float:
    seconds = step.prediction.step_time_s
    assert seconds is not None, "the drawn step has tokens"
    return seconds


def recorded_gains(
    published: Mapping[str, Any], model_named: ModelNamed, cluster_named: ClusterNamed
) -> list[ValidationResult]:
    """Compare whole steps under recorded imbalance: the ratio of every two ways to balance, and their seconds."""
    topology = ClusterTopology(hardware=cluster_named(published["cluster"]), ep_size=published["ep_size"])
    setting = StepSetting(**published["setting"], software=load_software(TYPICAL).costs)
    ratios: list[ValidationPoint] = []
    seconds: list[ValidationPoint] = []
    for case in published["cases"]:
        layers = case["model"]["num_layers"]
        model = replace(
            model_named(published["like"]),
            name=case["name"],
            moe_layer_ids=tuple(range(layers)),
            **published["shared"],
            **case["model"],
        )
        steps = {
            name: ValidationPoint(
                name=f"{case['name']}, {name}",
                unit="s",
                published=step["seconds"],
                predicted=_recorded_step(published, model, topology, setting, step["busiest"]),
            )
            for name, step in case["steps"].items()
        }
        seconds.extend(steps.values())
        for (slow, before), (fast, after) in combinations(steps.items(), 2):
            ratio = ValidationPoint(
                name=f"{case['name']}, {fast} / {slow}",
                unit=published["unit"],
                published=before.published / after.published,
                predicted=before.predicted / after.predicted,
            )
            ratios.append(ratio)
    return [
        compared(published, ratios, limit_error=published["limit_error"]),
        compared(published, seconds, name=f"{published['name']}-seconds", title=published["title_seconds"]),
    ]


def _recorded_step(
    published: Mapping[str, Any],
    model: MoeModelSpec,
    topology: ClusterTopology,
    setting: StepSetting,
    busiest: Sequence[float],
) -> float:
    """Return the seconds of a step whose busiest rank has `busiest` times a mean rank's rows in every layer."""
    micro_batches, sequences = published["num_micro_batches"], published["sequences_per_micro_batch"]
    ranks, tokens = topology.ep_size, sequences * setting.sequence_length
    rows = np.stack([rows_in_nodes(share, topology, rows=tokens * model.top_k, slots=model.top_k) for share in busiest])
    load = StepLoad(
        pairs=np.broadcast_to(rows, (1, micro_batches, *rows.shape)).copy(),
        tokens=np.full((1, micro_batches, ranks), tokens),
        top_k=model.top_k,
    )
    cells = micro_batches * ranks
    layout = BatchLayout(
        micro_batch=np.repeat(np.arange(micro_batches, dtype=np.int32), ranks * sequences),
        dp_rank=np.tile(np.repeat(np.arange(ranks, dtype=np.int32), sequences), micro_batches),
        order=np.tile(np.arange(sequences, dtype=np.int32), cells),
        num_micro_batches=micro_batches,
        num_dp_ranks=ranks,
    )
    lengths = np.full(cells * sequences, setting.sequence_length)
    # A rank has as many slots as a token has experts; each counts as an expert, since only rows of ranks are priced.
    slots = replace(model, num_experts=ranks * model.top_k)
    step = TrainingStep(load=load, layout=layout, lengths=lengths, model=slots, topology=topology, setting=setting)
    return _step_seconds(simulate_policies({}, step).static)


def rows_in_nodes(
    busiest: float, topology: ClusterTopology, *, rows: int, slots: int
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the rows [P, P slots] that every rank sends to every slot: `rows` of each, all inside its node.

    Rank 0 gets `busiest` times the mean; the others of its node share the rest evenly. With 2 nodes of 2 ranks, 1 slot
    per rank, 100 rows and busiest = 1.5, the ranks get 150, 50, 100 and 100.
    """
    ranks, width = topology.ep_size, topology.ranks_per_domain
    share = np.ones(ranks)
    share[:width] = (width - busiest) / (width - 1)
    share[0] = busiest
    same_node = np.arange(ranks)[:, None] // width == np.arange(ranks) // width
    sent = np.repeat(same_node * share / width / slots, slots, axis=1)
    # Whole rows: what is lost by rounding down goes to the last slot of the sender's node.
    found: np.ndarray[Any, np.dtype[np.int32]] = np.floor(rows * sent).astype(np.int32)
    last_slot = (np.arange(ranks) // width + 1) * width * slots - 1
    found[np.arange(ranks), last_slot] += rows - found.sum(axis=1, dtype=np.int32)
    return found
