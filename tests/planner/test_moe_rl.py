"""The policy `moe-rl`: its acceptance figures on real routing, what each lever does, and what it never does."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from plan_recount import validate_plan
from strategies import HARDWARE, load_of, model_spec, problem_of, problems, random_pairs

from moe_rl.core.cost import layer_cost_params
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.layout import BatchLayout
from moe_rl.core.metrics import imbalance, rank_load
from moe_rl.core.native import native_core
from moe_rl.core.plan import Plan
from moe_rl.core.reduce import reduce_load
from moe_rl.core.sequence_load import SequenceLoad
from moe_rl.core.topology import ClusterTopology
from moe_rl.core.trace import RoutingTrace
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.bounds import node_bound
from moe_rl.planner.moe_rl_policy import MoeRlPlanner
from moe_rl.planner.objective import OBJECTIVES
from moe_rl.planner.registry import make_planner
from moe_rl.planner.relayout import load_for_layout, load_of_plan
from moe_rl.replay.sequences import count_sequences
from moe_rl.simulators.synthetic import PRESET_A, PRESET_B, SequenceModel, synthetic_trace

QUICK = {"pack_iterations": 40_000, "reorder_iterations": 2_000}


def problem_on(trace: RoutingTrace, ep_size: int, token_budget: int, **options: object) -> PlanProblem:
    """The comparison protocol on a trace: one cell per micro-batch, nodes of 8, balance of token-expert pairs."""
    topology = ClusterTopology(hardware=HARDWARE, ep_size=ep_size, slices_per_dp_rank=ep_size)
    layout = BatchLayout.ep_group(trace.sequence_lengths, token_budget=token_budget)
    model = model_spec(num_experts=trace.num_experts, num_layers=trace.num_layers, top_k=trace.top_k)
    return PlanProblem(
        load=reduce_load([trace], layout=layout, topology=topology),
        layout=layout,
        model=model,
        topology=topology,
        cost=layer_cost_params(model, topology),
        sequence_load=SequenceLoad.of_different(count_sequences(trace).tokens_per_expert),
        sequence_tokens=trace.sequence_lengths,
        load_of_layout=lambda other: reduce_load([trace], layout=other, topology=topology),
        **{"objective": "imbalance", **options},
    )


@cache
def dev_trace(path: Path) -> RoutingTrace:
    arrays = np.load(path)
    return RoutingTrace.from_sequences([arrays[key] for key in arrays], num_experts=32)


@cache
def small_trace(seed: int = 0) -> RoutingTrace:
    """Sixty sequences of three layers and 16 experts, in prompt groups of four."""
    return synthetic_trace(
        SequenceModel(
            num_layers=3,
            num_experts=16,
            top_k=3,
            num_sequences=60,
            mean_length=40,
            expert_sigma=0.6,
            domain_sigma=0.6,
            sequence_sigma=0.9,
            token_persistence=0.5,
            group_size=4,
            group_share=0.5,
            seed=seed,
        )
    )


def small_problem(**options: object) -> PlanProblem:
    trace = small_trace()
    given = problem_on(trace, 8, 400, **options)
    topology = replace(given.topology, ranks_per_node=4)
    return replace(
        given, topology=topology, load_of_layout=lambda other: reduce_load([trace], layout=other, topology=topology)
    )


def score(problem: PlanProblem, plan: Plan) -> float:
    """Imbalance on the loads of the plan's own layout, after the validator found nothing to say."""
    load = load_of_plan(problem, plan.layout)
    assert validate_plan(problem, plan, load=load, sequence_lengths=problem.sequence_tokens) == []
    return imbalance(rank_load(plan, load))


@pytest.mark.parametrize(
    ("ep_size", "token_budget", "at_most"),
    [(8, 2048, 1.002), (16, 2048, 1.025), (32, 2048, 1.067), (8, 8192, 1.001), (16, 8192, 1.009), (32, 8192, 1.028)],
)
def test_it_has_its_figure_on_real_routing(
    dev_trace_path: Path, ep_size: int, token_budget: int, at_most: float
) -> None:
    problem = problem_on(dev_trace(dev_trace_path), ep_size, token_budget)
    assert score(problem, MoeRlPlanner().plan(problem)) <= at_most


@pytest.mark.lengthy
@pytest.mark.parametrize(("ep_size", "at_most", "copies"), [(16, 1.003, 1.0), (32, 1.017, 2.0)])
def test_few_cross_node_copies_remove_most_of_the_rest(
    dev_trace_path: Path, ep_size: int, at_most: float, copies: float
) -> None:
    problem = problem_on(dev_trace(dev_trace_path), ep_size, 2048, cross_node_slots=1)
    plan = MoeRlPlanner().plan(problem)
    assert score(problem, plan) <= at_most
    assert plan.cross_node_replicas_per_plan(problem.topology.node_of_rank) <= copies


@pytest.mark.parametrize("ep_size", [8, 16, 32])
@pytest.mark.parametrize(("preset", "token_budget"), [(PRESET_A, 1024), (PRESET_B, 2048)], ids=["A", "B"])
def test_on_synthetic_routing_it_reaches_the_bound_of_its_homes(
    preset: SequenceModel, token_budget: int, ep_size: int
) -> None:
    problem = problem_on(synthetic_trace(preset), ep_size, token_budget)
    plan = MoeRlPlanner().plan(problem)
    load = load_of_plan(problem, plan.layout)
    bound = node_bound(load, plan.placement.home_rank, problem.topology.ranks_per_domain)
    assert score(problem, plan) <= bound.imbalance + 0.005


@pytest.mark.lengthy
@settings(max_examples=500)
@given(problem=problems(objective="time"))
def test_it_is_never_predicted_slower_than_doing_nothing(problem: PlanProblem) -> None:
    problem = replace(problem, current_placement=None, steps_served=1000)
    plan = MoeRlPlanner(reorder_iterations=128).plan(problem)
    static = make_planner("static").plan(problem)
    assert plan.predicted_cost_s is not None
    assert static.predicted_cost_s is not None
    assert plan.predicted_cost_s <= static.predicted_cost_s * (1 + 1e-9)  # priced in C++ and in Python


@settings(max_examples=60)
@given(problem=problems(objective="imbalance"))
def test_it_is_never_less_balanced_than_doing_nothing(problem: PlanProblem) -> None:
    plan = MoeRlPlanner(reorder_iterations=128).plan(problem)
    static = make_planner("static").plan(problem)
    most, without = (rank_load(one, problem.load).max(axis=3).sum() for one in (plan, static))
    assert most <= without


@pytest.mark.parametrize("objective", OBJECTIVES.names)
def test_uniform_loads_are_left_alone(objective: str) -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=8, ranks_per_node=4)
    load = load_of(np.full((1, 4, 3, 8, 16), 100, np.int32), 2)
    problem = problem_of(load, topology, objective=objective, cross_node_slots=1)
    plan = MoeRlPlanner().plan(problem)
    static = make_planner("static").plan(problem)
    assert plan.replicas.copies == 0
    assert len(plan.migration.layer) == 0
    if objective == "time":
        assert plan.predicted_cost_s == pytest.approx(static.predicted_cost_s, rel=1e-9)
    assert plan.layout is problem.layout


def test_every_lever_can_be_switched_off_and_each_one_helps() -> None:
    problem = small_problem()
    best = score(problem, MoeRlPlanner(**QUICK).plan(problem))
    for lever in ("pack", "reorder", "replicate"):
        assert score(problem, MoeRlPlanner(**QUICK, **{lever: False}).plan(problem)) > best
    none = MoeRlPlanner(pack=False, reorder=False, replicate=False).plan(problem)
    assert none.layout is problem.layout
    assert none.replicas.copies == 0
    assert (none.placement.home_rank == problem.starting_placement().home_rank).all()


def test_the_cross_node_lever_needs_slots_and_can_be_switched_off() -> None:
    problem = small_problem(cross_node_slots=1)
    node = problem.topology.node_of_rank
    options = {"pack": False, "reorder": False}
    with_it, without = (MoeRlPlanner(**options, cross_node=on).plan(problem) for on in (True, False))
    assert with_it.cross_node_replicas_per_plan(node) > without.cross_node_replicas_per_plan(node) == 0.0
    assert score(problem, with_it) < score(problem, without)


def test_packing_keeps_the_budget_the_micro_batches_and_every_sequence() -> None:
    problem = small_problem()
    plan = MoeRlPlanner(**QUICK).plan(problem)
    assert (plan.layout.micro_batch != problem.layout.micro_batch).any()
    assert plan.layout.num_micro_batches == problem.layout.num_micro_batches
    held = plan.layout.rank_tokens(small_trace().sequence_lengths)
    assert (held <= 400).all()
    assert (held > 0).all()


@pytest.mark.parametrize("objective", ["imbalance", "time"])
def test_cells_of_several_data_parallel_ranks_and_ep_groups_are_packed(objective: str) -> None:
    trace = small_trace()
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, num_ep_groups=2, slices_per_dp_rank=2, ranks_per_node=2)
    layout = BatchLayout.in_order(trace.sequence_lengths, num_dp_ranks=4, token_budget=300)
    model = model_spec(num_experts=trace.num_experts, num_layers=trace.num_layers, top_k=trace.top_k)
    problem = PlanProblem(
        load=reduce_load([trace], layout=layout, topology=topology),
        layout=layout,
        model=model,
        topology=topology,
        cost=layer_cost_params(model, topology),
        objective=objective,
        sequence_load=SequenceLoad.of_different(count_sequences(trace).tokens_per_expert),
        sequence_tokens=trace.sequence_lengths,
        load_of_layout=lambda other: reduce_load([trace], layout=other, topology=topology),
    )
    plan = MoeRlPlanner(**QUICK).plan(problem)
    given = MoeRlPlanner(**QUICK, pack=False).plan(problem)
    assert plan.layout.num_micro_batches == layout.num_micro_batches
    if objective == "imbalance":
        assert score(problem, plan) < score(problem, given)
    else:
        assert score(problem, plan) >= 1.0
        assert plan.predicted_cost_s <= given.predicted_cost_s


def test_a_fixed_layout_or_unknown_sequences_are_not_repacked_and_the_plan_says_so() -> None:
    problem = small_problem()
    fixed = replace(problem, layout=replace(problem.layout, fixed=True))
    unknown = replace(problem, sequence_load=None, sequence_tokens=None)
    for case, reason in (
        (fixed, "the batch layout is fixed"),
        (unknown, "the expert loads of single sequences are not known"),
    ):
        plan = MoeRlPlanner(**QUICK).plan(case)
        assert plan.layout is case.layout
        assert any(reason in note for note in plan.notes)


def test_homes_move_only_when_that_pays_back_within_the_steps_they_serve() -> None:
    problem = small_problem(objective="time")
    once = MoeRlPlanner(**QUICK, pack=False, replicate=False).plan(problem)
    long = MoeRlPlanner(**QUICK, pack=False, replicate=False).plan(replace(problem, steps_served=10**7))
    assert once.migration.moved_bytes == 0
    assert long.migration.moved_bytes > 0
    assert long.predicted_cost_s < once.predicted_cost_s


def test_every_instance_first_takes_what_is_already_on_its_rank(rng: np.random.Generator) -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=8, ranks_per_node=4)
    problem = problem_of(
        load_of(random_pairs(rng, (1, 2, 4, 8, 16), most=300), 2), topology, objective="imbalance", cross_node_slots=1
    )
    plan = MoeRlPlanner(reorder=False).plan(problem)
    replicas = plan.replicas
    cell, rank = replicas.index_of_replica(), replicas.physical_id // plan.placement.slots_per_rank
    pairs = problem.load.pairs.reshape(-1, 8, 16)
    every = np.arange(len(cell))
    local = np.minimum(replicas.quota, pairs[cell, rank, replicas.expert])
    assert len(cell) > 0
    assert (replicas.source_quota[every, rank] == local).all()


def test_the_plan_depends_on_the_seed_and_not_on_the_threads() -> None:
    problem = small_problem()
    hashes = {MoeRlPlanner(**QUICK, num_threads=threads).plan(problem).hash for threads in (1, 2, 5)}
    assert len(hashes) == 1
    assert MoeRlPlanner(**QUICK).plan(replace(problem, seed=1)).hash not in hashes


def test_without_turns_nothing_is_packed() -> None:
    problem = small_problem()
    assert MoeRlPlanner(**QUICK, rounds=0).plan(problem).layout is problem.layout


def test_a_higher_gain_asked_of_cross_node_copies_makes_fewer_of_them() -> None:
    problem = small_problem(cross_node_slots=1)
    node = problem.topology.node_of_rank
    copies = [
        MoeRlPlanner(**QUICK, cross_node_gain=gain).plan(problem).cross_node_replicas_per_plan(node)
        for gain in (0.0, 0.02, 1.0)
    ]
    assert copies[0] > copies[1] > copies[2] == 0.0


def test_the_search_and_a_tighter_tolerance_lower_the_imbalance(rng: np.random.Generator) -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=4)
    popularity = np.exp(0.9 * rng.standard_normal((1, 1, 200, 1, 32)))
    load = load_of(rng.poisson(popularity * 100, (1, 1, 200, 4, 32)).astype(np.int32), 8)
    problem = problem_of(load, topology, objective="imbalance")
    greedy, loose, searched = (
        score(problem, MoeRlPlanner(reorder=False, **options).plan(problem))
        for options in ({"search_steps": 0}, {"search_steps": 0, "tolerance": 0.05}, {})
    )
    assert searched < greedy < loose


def test_loads_of_a_new_layout_are_those_of_the_reduction() -> None:
    trace = small_trace()
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, num_ep_groups=2, slices_per_dp_rank=2)
    layout = BatchLayout.in_order(trace.sequence_lengths, num_dp_ranks=4, token_budget=300)
    counts = count_sequences(trace)
    load = load_for_layout(
        SequenceLoad.of_different(counts.tokens_per_expert), trace.sequence_lengths, layout, topology, trace.top_k
    )
    assert (load.pairs == reduce_load([counts], layout=layout, topology=topology).pairs).all()
    exact = reduce_load([trace], layout=layout, topology=topology)
    assert (load.per_expert() == exact.per_expert()).all()
    assert (load.tokens == exact.tokens).all()


def test_scaled_loads_are_packed_and_reordered_too() -> None:
    problem = small_problem()
    scaled = replace(
        problem, load=problem.load.scaled_to(4096), load_of_layout=lambda to: load_of_plan(problem, to).scaled_to(4096)
    )
    plan = MoeRlPlanner(**QUICK).plan(scaled)
    assert score(scaled, plan) < score(scaled, MoeRlPlanner(**QUICK, pack=False, reorder=False).plan(scaled))


@pytest.mark.parametrize(
    ("parameter", "value"),
    [("rounds", -1), ("tolerance", float("nan")), ("num_threads", -1)],
)
def test_wrong_parameters_are_refused(parameter: str, value: object) -> None:
    with pytest.raises(InvalidInputError, match=parameter):
        MoeRlPlanner(**{parameter: value})


def test_sequences_that_do_not_fit_the_problem_are_refused() -> None:
    problem = small_problem()
    assert problem.sequence_load is not None
    fewer = replace(problem.sequence_load, row=problem.sequence_load.row[1:])
    for change in ({"sequence_load": fewer}, {"sequence_tokens": None}):
        with pytest.raises(InvalidInputError, match="sequence_"):
            replace(problem, **change)


@pytest.mark.skipif(native_core() is None, reason="packing needs the C++ core")
@pytest.mark.parametrize("seed", range(3))
def test_packing_for_static_buffers_lowers_the_worst_cell_and_keeps_the_budget(seed: int) -> None:
    problem = problem_on(small_trace(seed), 16, 400)
    usual, static = (make_planner("moe-rl", **QUICK, static_buffers=wanted).plan(problem) for wanted in (False, True))
    worst = [int(rank_load(plan, load_of_plan(problem, plan.layout)).max()) for plan in (usual, static)]
    assert worst[1] < worst[0]
    assert static.layout.rank_tokens(problem.sequence_tokens).max() <= 400
    fixed = replace(problem, layout=replace(problem.layout, fixed=True))
    plans = [make_planner("moe-rl", **QUICK, static_buffers=wanted).plan(fixed) for wanted in (False, True)]
    assert plans[0].hash == plans[1].hash or plans[0].replicas.copies == plans[1].replicas.copies
