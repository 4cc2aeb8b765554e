"""Predict the time of a training step under every policy: closed form, from the loads of each layer and micro-batch.

A micro-batch costs the sum over layers of its slowest rank's attention part and its slowest rank's routed-expert part,
because every all-to-all is a barrier over the EP group; a step is the sum over micro-batches of its slowest EP group,
stretched by the pipeline bubble, plus the moves once per step. G EP groups, M micro-batches, L MoE layers, P ranks.
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import LayerCostParams
from moe_rl.core.errors import require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import StepPrediction, imbalance, node_load
from moe_rl.core.placement import ExpertMigration, ExpertPlacement
from moe_rl.core.plan import Plan, ReplicaPlan
from moe_rl.core.plan_rows import Replicas
from moe_rl.simulators.all_to_all import Destinations
from moe_rl.simulators.base_time import SourceWork
from moe_rl.simulators.memory import forecast_memory
from moe_rl.simulators.movement import STEP_PARTS, moved_bytes, movement_time, once_per_step
from moe_rl.simulators.pipeline import pipelined
from moe_rl.simulators.pricing import StepPricing, TrainingStep, whole
from moe_rl.simulators.result import IMBALANCE_PARTS, PolicyResult, SimulationConditions, SimulationResult
from moe_rl.simulators.rows import fewest_rows


def simulate_policies(
    plans: Mapping[str, Plan],
    step: TrainingStep,
    *,
    loads: Mapping[str, StepLoad] | None = None,
    destinations: "DestinationsByPolicy | None" = None,
) -> SimulationResult:
    """Return the time of each plan's step, with `static`, forced balance and the lower bound beside it.

    A plan that repacks sequences has another layout than the step's: `loads` then holds the same step's load under it,
    by policy name. Where loads have routes the ranks and nodes that tokens visit are counted, else a token's
    experts are taken as independent. `destinations` keeps where the rows of the plans go from one call to the next, for
    calls in which nothing but constants changes.
    """
    destinations_by_policy = {} if destinations is None else destinations
    own_loads = loads or {}
    _check(plans, step, own_loads)
    pricing = StepPricing.of(step)
    steps = dict.fromkeys(plans, step)
    for name, load in own_loads.items():
        if name in plans:
            steps[name] = replace(step, load=load, layout=plans[name].layout)
    static_plan, bounds = _static_plan(step.load, step.layout), dict[tuple[int, int], PolicyResult]()
    static_result = _policy(
        "static", static_plan, pricing, step, _placed(YARDSTICK, static_plan, pricing, step, destinations_by_policy)
    )
    balanced = _forced_balance(pricing, step)
    phi = _phi(balanced)

    def bound(plan: Plan, step_of_bound: TrainingStep) -> PolicyResult:
        """Return the lower bound of plans with this layout and as many slots, whatever other policies have."""
        slots = max(plan.placement.slots_per_rank, pricing.topology.experts_per_rank(pricing.model.num_experts))
        if (id(step_of_bound), slots) not in bounds:
            bounds[id(step_of_bound), slots] = _ideal(pricing, step_of_bound, slots)
        return bounds[id(step_of_bound), slots]

    def result(name: str) -> PolicyResult:
        plan, step_of_plan = plans[name], steps[name]
        return _policy(
            name, plan, pricing, step_of_plan, _placed(name, plan, pricing, step_of_plan, destinations_by_policy)
        )

    def compared(outcome: PolicyResult, ideal: PolicyResult) -> PolicyResult:
        """Return the result with its ratios, `ideal` being its lower bound; a step that takes no time has none."""
        seconds = outcome.step_time_s
        if seconds <= 0:
            return outcome
        prediction = replace(
            outcome.prediction,
            tokens_per_s=outcome.tokens / seconds,
            speedup_vs_static=static_result.step_time_s / seconds,
            fraction_of_forced_balance=balanced.step_time_s / seconds,
            fraction_of_ideal=ideal.step_time_s / seconds,
            phi=phi,
        )
        return replace(outcome, prediction=prediction)

    # A policy's arrays are its own, and numpy and the core let other threads run.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        results = dict(zip(plans, pool.map(result, plans), strict=True))
    # A policy with more slots than static, or another layout, may go lower: the lowest bound is the one shown.
    of_static = bound(static_plan, step)
    of_policies = {name: bound(plan, steps[name]) for name, plan in plans.items()}
    ideal = min(
        [of_static, *of_policies.values()],
        key=lambda outcome: (outcome.step_time_s, outcome.prediction.inter_node_copies_per_token or 0.0),
    )
    return SimulationResult(
        policies={name: compared(outcome, of_policies[name]) for name, outcome in results.items()},
        static=compared(static_result, of_static),
        forced_balance=compared(balanced, of_static),
        ideal=compared(ideal, ideal),
        conditions=_conditions(pricing, step, static_result, phi),
    )


def cost_params_for(step: TrainingStep) -> LayerCostParams:
    """Return the constants by which the simulator prices a layer of this step: give the same ones to planners."""
    return StepPricing.of(step).passes[0]


# The yardstick's rows have a key of their own, since a policy `static` may be among the plans.
YARDSTICK = "static yardstick"
DestinationsByPolicy = dict[str, Destinations]
# These parts do not belong to a micro-batch's way through the layers.
ONCE_PER_STEP = ("pipeline_imbalance", "pipeline_p2p", "pipeline_bubble", *STEP_PARTS, "reorder")


def _phi(balanced: PolicyResult) -> float | None:
    """Return the share of balanced micro-batches that grows with imbalance; None for a step without tokens."""
    parts = balanced.prediction.breakdown_s or {}
    total = sum(seconds for name, seconds in parts.items() if name not in ONCE_PER_STEP)
    if total <= 0:
        return None
    return sum(parts[name] for name in IMBALANCE_PARTS) / total


def _placed(
    key: str, plan: Plan, pricing: StepPricing, step: TrainingStep, destinations_by_policy: DestinationsByPolicy
) -> Destinations:
    """Return where the plan's rows go, from `destinations_by_policy` if they were asked for before."""
    if key not in destinations_by_policy:
        destinations_by_policy[key] = pricing.destinations(plan, step.load)
    return destinations_by_policy[key]


def _policy(name: str, plan: Plan, pricing: StepPricing, step: TrainingStep, placed: Destinations) -> PolicyResult:
    topology, loads = pricing.topology, placed.rows.rows.astype(np.int64)
    prediction = StepPrediction(
        policy=name,
        imbalance=imbalance(loads),
        node_imbalance=imbalance(node_load(loads, topology.ranks_per_domain)),
        replicas_per_plan=plan.replicas_per_plan,
        cross_node_replicas_per_plan=plan.cross_node_replicas_per_plan(topology.node_of_rank),
        moved_bytes=moved_bytes(plan, pricing),
        plan_time_s=plan.solve_time_s,
    )
    buffers = Replicas.of(plan, step.load).buffers(loads[..., 0].size, topology)
    certified_rows = _certified_rows(plan, step.load)
    return _timed(
        prediction, pricing, SourceWork.of(step), placed, plan=plan, buffers=buffers, most_rows=certified_rows
    )


def _certified_rows(plan: Plan, load: StepLoad) -> NDArray[np.int64] | None:
    """Return the plan's bound [G, M, L, P] of this load's rows; None where it has none, or counts other tokens."""
    capacity = plan.capacity
    if capacity is None or not np.array_equal(capacity.tokens, load.tokens):
        return None
    return capacity.rows


def _forced_balance(pricing: StepPricing, step: TrainingStep) -> PolicyResult:
    rows = pricing.uniform(step.load, distinct=step.load.routes is not None)
    prediction = StepPrediction(policy="forced_balance", imbalance=1.0, node_imbalance=1.0)
    destinations = Destinations.of_alike_sources(rows, pricing.topology)
    return _timed(prediction, pricing, SourceWork.of(step), destinations)


def _ideal(pricing: StepPricing, step: TrainingStep, slots_per_rank: int) -> PolicyResult:
    """Return the lower bound of plans with the step's layout and so many slots on every rank."""
    row_counts = fewest_rows(
        step.load,
        pricing.topology,
        slots_per_rank=slots_per_rank,
        limit=pricing.group_limit,
        deduplicated=pricing.deduplicates,
    )
    prediction = StepPrediction(policy="ideal", imbalance=1.0, node_imbalance=1.0)
    return _timed(prediction, pricing, SourceWork.of(step).mean(), Destinations(rows=row_counts))


def _timed(
    prediction: StepPrediction,
    pricing: StepPricing,
    work: SourceWork,
    destinations: Destinations,
    *,
    plan: Plan | None = None,
    buffers: float = 0.0,
    most_rows: NDArray[np.int64] | None = None,
) -> PolicyResult:
    """Return the result with its step time: the slowest EP group's micro-batches, bubble and once-per-step moves.

    Only a plan moves experts and holds copies of them; `buffers` are those of its replicas. Memory is forecast for
    `most_rows` [G, M, L, P], where they are known: buffers must hold them.
    """
    rows, seconds = destinations.rows, pricing.seconds(destinations.rows, work)
    topology, time_factor = pricing.topology, pricing.setting.software.everything
    micro_batch_s = time_factor * whole(seconds)
    num_running_G = (micro_batch_s > 0).sum(axis=1).tolist()
    groups = []
    for group, count in enumerate(num_running_G):
        parts = {name: float(part[group].sum()) for name, part in seconds.items()}
        tokens = float(work.tokens[group].mean(axis=1).sum()) / max(1, count)
        groups.append(pipelined(pricing, parts, tokens=tokens, micro_batches=count))
    group = max(range(len(groups)), key=lambda index: sum(groups[index].values()))
    breakdown = groups[group]
    breakdown |= once_per_step(pricing, breakdown, micro_batches=num_running_G[group])
    breakdown["reorder"] = movement_time(plan, pricing) if plan else 0.0
    breakdown = {name: time_factor * seconds for name, seconds in breakdown.items()}
    placement = plan.placement if plan else None
    if most_rows is None:
        rows_held = rows.rows
    else:
        rows_held = np.maximum(rows.rows, most_rows)
    memory = forecast_memory(rows_held, work.tokens, placement, run=pricing, visits=rows.rank_visits, buffers=buffers)
    tokens, step_s = float(work.tokens.mean(axis=2).sum()) * topology.ep_size, sum(breakdown.values())
    layers = rows.rows.shape[2]
    sent_rows, rows_between_nodes = float(rows.nic_egress.mean(axis=3).sum()) * topology.ep_size, None
    if destinations.between_nodes is not None:
        sent_rows = float(destinations.between_nodes.sum())
        rows_between_nodes = (destinations.between_nodes / max(1, sum(num_running_G) * layers)).tolist()
    return PolicyResult(
        prediction=replace(
            prediction,
            step_time_s=step_s,
            breakdown_s=breakdown,
            peak_memory_bytes=memory.peak_bytes,
            resident_bytes=memory.parts_bytes["resident_slots"],
            inter_node_copies_per_token=sent_rows / (tokens * layers) if tokens else None,
            node_to_node_copies=rows_between_nodes,
            reorder_share=breakdown["reorder"] / step_s if step_s > 0 else None,
        ),
        memory=memory,
        visit_difference=destinations.difference,
        rank_load=rows.rows,
        micro_batch_s=micro_batch_s,
        group=group,
        tokens=round(tokens),
    )


def _conditions(
    pricing: StepPricing, step: TrainingStep, static: PolicyResult, phi: float | None
) -> SimulationConditions:
    load, topology = step.load, pricing.topology
    running_tokens = load.tokens[load.tokens.sum(axis=2) > 0]
    return SimulationConditions(
        phi=phi,
        imbalance_static=static.prediction.imbalance,
        num_micro_batches=load.num_micro_batches,
        tokens_per_rank=float(running_tokens.mean()) if running_tokens.size else 0.0,
        sequence_length=SourceWork.of(step).effective_sequence_length,
        ep_size=topology.ep_size,
        ranks_per_node=topology.ranks_per_domain,
        dispatcher=pricing.setting.dispatcher,
        recompute=pricing.setting.recompute,
        scaled=load.scaled,
    )


def _static_plan(load: StepLoad, layout: BatchLayout) -> Plan:
    placement = ExpertPlacement.contiguous(
        num_layers=load.num_layers, num_experts=load.num_experts, ep_size=load.ep_size
    )
    return Plan(
        policy="static",
        layout=layout,
        placement=placement,
        replicas=ReplicaPlan.empty(*load.pairs.shape[:4]),
        migration=ExpertMigration.between(placement, placement, expert_bytes=0),
    )


def _check(plans: Mapping[str, Plan], step: TrainingStep, own_loads: Mapping[str, StepLoad]) -> None:
    load, model = step.load, step.model
    same_shape = (load.num_layers, load.num_experts) == (model.num_moe_layers, model.num_experts)
    require(
        same_shape,
        f"the expert loads and model {model.name!r} do not match: the loads have {load.num_layers} MoE layers with "
        f"{load.num_experts} experts each, but the model has {model.num_moe_layers} with {model.num_experts} each.",
    )
    for name, plan in plans.items():
        require(
            name in own_loads or plan.layout.same_cells(step.layout),
            f"policy {name!r} changes the batch layout: pass the expert loads of the new layout in `loads`.",
        )
