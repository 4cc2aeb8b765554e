"""`static+pack` and `moe-rl-unpacked`: each does its part of `moe-rl` and nothing else."""

import numpy as np
from hypothesis import given, settings
from strategies import HARDWARE, model_spec, problems

from moe_rl.core.cost import layer_cost_params
from moe_rl.core.layout import BatchLayout
from moe_rl.core.metrics import imbalance, rank_load
from moe_rl.core.reduce import reduce_load
from moe_rl.core.sequence_load import SequenceLoad
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner import PlanProblem, make_planner
from moe_rl.planner.relayout import load_of_plan
from moe_rl.replay.sequences import count_sequences
from moe_rl.simulators.synthetic import SequenceModel, synthetic_trace
from moe_rl.study.options import SimulationOptions

QUICK = {"pack_iterations": 10_000, "reorder_iterations": 500}


def packable_problem() -> PlanProblem:
    """Sixty sequences of two layers and 16 experts on 16 ranks of two nodes, in micro-batches of 1000 tokens."""
    preset = SequenceModel(
        num_layers=2,
        num_experts=16,
        top_k=2,
        num_sequences=60,
        mean_length=60,
        expert_sigma=0.6,
        domain_sigma=0.6,
        sequence_sigma=0.9,
        token_persistence=0.6,
    )
    trace = synthetic_trace(preset)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=16, slices_per_dp_rank=16)
    layout = BatchLayout.ep_group(trace.sequence_lengths, token_budget=1000)
    model = model_spec(num_experts=16, num_layers=2, top_k=2)
    return PlanProblem(
        load=reduce_load([trace], layout=layout, topology=topology),
        layout=layout,
        model=model,
        topology=topology,
        cost=layer_cost_params(model, topology),
        objective="imbalance",
        cross_node_slots=1,
        sequence_load=SequenceLoad.of_different(count_sequences(trace).tokens_per_expert),
        sequence_tokens=trace.sequence_lengths,
        load_of_layout=lambda other: reduce_load([trace], layout=other, topology=topology),
    )


def test_static_pack_moves_sequences_and_no_expert() -> None:
    problem = packable_problem()
    plan = make_planner("static+pack").plan(problem)
    assert np.array_equal(plan.placement.home_rank, problem.starting_placement().home_rank)
    assert len(plan.replicas.expert) == 0
    static = make_planner("static").plan(problem)
    packed = imbalance(rank_load(plan, load_of_plan(problem, plan.layout)))
    assert packed < imbalance(rank_load(static, problem.load))


@settings(max_examples=30)
@given(problem=problems())
def test_unpacked_is_moe_rl_without_packing(problem: PlanProblem) -> None:
    unpacked, moe_rl = (
        make_planner(name, **QUICK, **parameters).plan(problem)
        for name, parameters in (("moe-rl-unpacked", {}), ("moe-rl", {"pack": False}))
    )
    assert np.array_equal(unpacked.placement.physical_to_logical_map, moe_rl.placement.physical_to_logical_map)
    assert np.array_equal(unpacked.replicas.source_quota, moe_rl.replicas.source_quota)
    assert unpacked.layout is problem.layout


def test_variants_take_the_parameters_of_moe_rl_but_those_that_make_them() -> None:
    options = SimulationOptions(
        policy=["static+pack", "moe-rl-unpacked", "moe-rl"],
        policy_option=["moe-rl.rounds=2", "moe-rl.pack=true", "moe-rl.reorder=true", "moe-rl-unpacked.rounds=3"],
    )
    assert options.planning.parameters_of("moe-rl") == {"rounds": 2, "pack": True, "reorder": True}
    assert options.planning.parameters_of("static+pack") == {"rounds": 2}
    assert options.planning.parameters_of("moe-rl-unpacked") == {"rounds": 3, "reorder": True}
