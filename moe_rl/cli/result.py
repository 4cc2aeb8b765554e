"""From a study and its plans to the report: simulate, and say under which conditions the numbers hold."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from moe_rl import __version__
from moe_rl.cli.study import Progress, Study, make_plans, repacked_loads
from moe_rl.core.load import ExpertLoad
from moe_rl.core.metrics import StepPrediction
from moe_rl.core.plan import Plan
from moe_rl.core.topology import ClusterTopology, HardwareSpec
from moe_rl.core.trace import RoutingTrace
from moe_rl.planner.bounds import mean_bound, node_bound, placement_bound
from moe_rl.replay import concatenate
from moe_rl.report import LoadBounds, PolicyLoads, SimulationReport
from moe_rl.report.simulation import BASELINE
from moe_rl.report.units import GIB, encodable, format_count
from moe_rl.simulators.all_to_all import MAX_EXACT_PAIRS
from moe_rl.simulators.result import SimulationResult
from moe_rl.simulators.sensitivity import FACTORS, PERTURBED_CONSTANTS, perturbed_rankings
from moe_rl.simulators.setting import StepSetting
from moe_rl.simulators.step import simulate_policies

MAX_FOLLOWED_PAIRS = 100_000_000
"""Token-expert pairs followed over all policies; beyond it the loads alone are simulated, a token's experts taken as
independent. A pair takes about 0.1 us."""
TIME_FIELDS = (
    "step_time_s",
    "tokens_per_s",
    "speedup_vs_static",
    "fraction_of_forced_balance",
    "fraction_of_ideal",
    "phi",
    "breakdown_s",
)
"""Figures that mean nothing where a plan took copies to be free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What a simulation leaves for its outputs."""

    report: SimulationReport
    plans: Mapping[str, Plan]
    loads: Mapping[str, ExpertLoad]
    """Under the layout of every policy that repacks sequences."""


def simulate_study(
    study: Study, progress: Progress, *, command: str, warnings: list[str], sensitivity: bool = False
) -> Simulated:
    """Plan and simulate every policy of the study, static always among them.

    With `sensitivity` the same plans are simulated again under constants that are 30 % off.
    """
    asked = study.options.policy
    policies = asked if BASELINE in asked else [BASELINE, *asked]
    plans = make_plans(study, policies, progress)
    progress("simulating", 0, 1)
    problem, loads = study.problem, repacked_loads(study, plans)
    timed = study.options.objective == "time"
    rounds = 2 + len(PERTURBED_CONSTANTS) * len(FACTORS) if sensitivity else 1
    routes = _routes(study, rounds * (1 + len(plans))) if timed else None

    def simulate(setting: StepSetting) -> SimulationResult:
        return simulate_policies(plans, replace(study.training_step, setting=setting), loads=loads, trace=routes)

    setting = study.options.step_setting()
    result = simulate(setting)
    report = SimulationReport(
        trace=trace_facts(study),
        setting=setting_facts(study, result, timed=timed),
        policies=tuple(_shown(policy.prediction, timed=timed) for policy in result.policies.values()),
        yardsticks=tuple(yardstick.prediction for yardstick in result.yardsticks().values()) if timed else (),
        loads={name: PolicyLoads.from_rank_loads(policy.rank_load) for name, policy in result.policies.items()},
        bounds={name: load_bounds(plan, loads.get(name, problem.load), study.topology) for name, plan in plans.items()},
        memory={name: policy.memory for name, policy in {**result.policies, **result.yardsticks()}.items()},
        sensitivity=tuple(perturbed_rankings(simulate, setting)) if sensitivity else (),
        notes=tuple(dict.fromkeys([*notes(study, plans), *_memory_notes(study, result), *warnings])),
        command=command,
        version=__version__,
    )
    return Simulated(report=report, plans=plans, loads=loads)


def load_bounds(plan: Plan, load: ExpertLoad, topology: ClusterTopology) -> LoadBounds:
    """Return what the imbalance of a plan cannot go below on its own layout's load."""
    return LoadBounds(
        lb0=mean_bound(load).imbalance,
        node=None
        if _instances_cross_nodes(plan, topology)
        else node_bound(load, plan.placement.home_rank, topology.ranks_per_domain).imbalance,
        placement=placement_bound(load, plan).imbalance,
    )


def _instances_cross_nodes(plan: Plan, topology: ClusterTopology) -> bool:
    node, home = topology.node_of_rank, plan.placement.home_rank
    layer, rank, expert = np.nonzero(plan.placement.instances_per_rank())
    replicas = plan.replicas
    of_replica = replicas.cell_of_replica() % max(1, replicas.num_layers)
    replica_rank = replicas.physical_id // plan.placement.slots_per_rank
    return bool(
        (node[rank] != node[home[layer, expert]]).any()
        or (node[replica_rank] != node[home[of_replica, replicas.expert]]).any()
    )


def _routes(study: Study, num_policies: int) -> RoutingTrace | None:
    """Return the step's routes, which say which experts meet in one token, where following them takes seconds."""
    parts = [part for part in study.batch.parts if isinstance(part, RoutingTrace)]
    if len(parts) < len(study.batch.parts):
        return None
    pairs = sum(part.routed_experts.size for part in parts)
    followed = min(pairs, max(MAX_EXACT_PAIRS, pairs // study.batch.load.num_micro_batches))
    if followed * num_policies > MAX_FOLLOWED_PAIRS:
        return None
    joined = concatenate(parts)
    return joined if isinstance(joined, RoutingTrace) else None


def _shown(prediction: StepPrediction, *, timed: bool) -> StepPrediction:
    absent: dict[str, Any] = dict.fromkeys(TIME_FIELDS)
    return prediction if timed else replace(prediction, **absent)


def trace_facts(study: Study) -> dict[str, object]:
    """Return what was replayed; counts are of the simulated step."""
    source, batch = study.source, study.batch
    return {
        "name": encodable(source.path.name),
        "path": encodable(str(source.path)),
        "format": source.format,
        "model": encodable(source.model),
        "provenance": source.provenance,
        "step": batch.step,
        "num_steps": len(source.steps),
        "num_sequences": len(batch.lengths),
        "num_tokens": batch.num_tokens,
        "num_tokens_without_route": batch.unrouted_tokens,
        "sequence_length_mean": round(float(batch.lengths.mean()), 1),
        "sequence_length_max": int(batch.lengths.max()),
        "num_moe_layers": len(source.moe_layer_ids),
        "num_experts": source.num_experts,
        "top_k": source.top_k,
        "counts_only": source.counts_only,
        "moe_layer_ids": list(source.moe_layer_ids),
    }


def setting_facts(study: Study, result: SimulationResult, *, timed: bool) -> dict[str, object]:
    """Return the conditions that the numbers hold under."""
    options, topology, problem = study.options, study.topology, study.problem
    conditions = result.conditions.as_json()
    if not timed:
        conditions.pop("phi", None)
    counted = result.static.visit_difference is not None
    facts = {
        "model": problem.model.name,
        "cluster": topology.hardware.name,
        **conditions,
        "ranks_per_node": topology.ranks_per_node,
        "num_nodes": topology.num_nodes,
        "num_ep_groups": topology.num_ep_groups,
        "visits": ("counted in the trace" if counted else "of independent choices") if timed else None,
        "slots": problem.replica_slots,
        "cross_node_slots": problem.cross_node_slots,
        "objective": problem.objective,
        "micro_batches": _micro_batch_rule(study),
        "recorded_tokens_per_rank": round(study.batch.recorded_tokens_per_rank, 1),
        "tensor_model_parallel_size": options.tensor_model_parallel_size,
        "context_parallel_size": options.context_parallel_size,
        "pipeline_model_parallel_size": options.pipeline_model_parallel_size,
        "num_virtual_stages": options.num_virtual_stages_per_pipeline_rank,
        "overlap_all_to_all": options.overlap_moe_expert_parallel_comm,
        "overlap_shared_experts": options.moe_shared_expert_overlap,
        "precision": options.step_setting().precision,
        "log_prob_passes": options.log_prob_passes,
        "forward_only": options.forward_only,
        "filler": options.filler,
        "eplb_history": study.history,
        "seed": options.seed,
        "model_origin": study.model.origin,
        "model_shape": {name: value for name, value in asdict(problem.model).items() if name != "assumed_fields"},
        "assumptions": list(study.model.assumptions),
        "constants": _constants(topology.hardware),
    }
    return {name: value for name, value in facts.items() if value is not None}


def notes(study: Study, plans: Mapping[str, Plan]) -> list[str]:
    """Return what a reader must know beside the numbers."""
    options, batch = study.options, study.batch
    said = [f"model: {sentence}." for sentence in study.model.assumptions]
    if study.history and not study.history.startswith("previous"):
        said.append(f"eplb plans on the {study.history}, for want of an earlier step.")
    if options.tokens_per_rank is not None:
        said.append(
            "scaled: shares recorded in micro-batches of "
            f"{format_count(batch.recorded_tokens_per_rank)} tokens per rank, applied to "
            f"{format_count(options.tokens_per_rank)}. Small micro-batches fluctuate more than large ones, so policies "
            "that plan per micro-batch gain more here than on real micro-batches of that size."
        )
    if options.objective == "time" and options.seq_length is None:
        said.append(
            f"attention is priced at the recorded lengths (mean {format_count(float(batch.lengths.mean()))} tokens); "
            "longer sequences make balancing matter less: see --seq-length."
        )
    if batch.unrouted_tokens and options.filler == "none":
        said.append(
            f"{batch.unrouted_tokens} of {batch.num_tokens} rows hold no route and are left out; --filler says what "
            "the trainer dispatches for them."
        )
    if options.recompute_granularity == "selective" and "moe" not in options.recompute_modules:
        said.append(f"recomputation of {', '.join(options.recompute_modules)} is not priced.")
    if options.objective == "imbalance":
        said.append("times are not computed: with objective imbalance a plan takes copies to be free.")
    return [*said, *(f"{name}: {note}" for name, plan in plans.items() for note in plan.notes)]


def _memory_notes(study: Study, result: SimulationResult) -> list[str]:
    """Return a sentence that names every policy whose forecast peak is more than the GPU has.

    Where perfect balance does not fit either, the sentence says so instead, and what fills the memory.
    """
    hardware, balanced = study.topology.hardware, result.forced_balance.memory
    if not balanced.fits:
        largest = sorted(balanced.parts_bytes.items(), key=lambda part: -part[1])[:3]
        parts = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.1f} GiB" for name, size in largest)
        return [
            f"out of memory even with perfect balance: the forecast peak of {balanced.peak_bytes / GIB:.1f} GiB "
            f"exceeds the {hardware.hbm_gib:g} GiB of {hardware.name} ({parts}); no plan changes that."
        ]
    peaks = {name: policy.memory.peak_bytes / GIB for name, policy in result.policies.items() if not policy.memory.fits}
    said = ", ".join(f"{name} {peak:.1f} GiB" for name, peak in peaks.items())
    return [
        f"out of memory: the forecast peak exceeds the {hardware.hbm_gib:g} GiB of {hardware.name}: {said}."
    ] * bool(said)


def _micro_batch_rule(study: Study) -> str:
    options = study.options
    if options.ep_group_tokens is not None:
        return f"at most {options.ep_group_tokens} tokens per EP group, sequences in random order"
    if options.micro_batch_tokens is not None:
        return f"at most {options.micro_batch_tokens} tokens per DP rank, sequences in the trace's order"
    return "as recorded"


def _constants(hardware: HardwareSpec) -> dict[str, object]:
    return {
        item.name: {"value": getattr(hardware, item.name), "source": hardware.sources.get(item.name, "")}
        for item in fields(hardware)
        if item.name not in ("name", "sources")
    }
