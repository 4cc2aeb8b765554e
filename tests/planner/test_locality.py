"""Locality: with routes, plans are chosen by visits that were counted, and bring together what meets in a token."""

from dataclasses import replace
from typing import Any

import numpy as np
import plan_recount
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_recount import validate_plan
from strategies import HARDWARE, problem_of, topologies

from moe_rl.config import CONFIGS
from moe_rl.core.cost import layer_cost_params
from moe_rl.core.layout import BatchLayout
from moe_rl.core.metrics import rank_load
from moe_rl.core.native import native_core
from moe_rl.core.plan import REPLICA_COLUMNS, Plan
from moe_rl.core.reduce import reduce_load
from moe_rl.core.routes import RouteSample
from moe_rl.core.sequence_load import SequenceLoad
from moe_rl.core.topology import ClusterTopology
from moe_rl.core.trace import RoutingTrace
from moe_rl.core.visits import CountedVisits, count_rows, count_visits
from moe_rl.planner.base import ALL_LEVERS, PlanProblem
from moe_rl.planner.candidates import CandidatePricing, CopySettings
from moe_rl.planner.moe_rl_policy import MoeRlPlanner
from moe_rl.planner.predict import predicted_cost
from moe_rl.planner.registry import make_planner
from moe_rl.planner.relayout import load_of_plan
from moe_rl.replay.sequences import count_sequences
from moe_rl.study.options import SimulationOptions
from moe_rl.study.scenario import state_scenario

pytestmark = pytest.mark.skipif(native_core() is None, reason="the C++ core is not built")
SHORT = {"reorder_iterations": 640, "pack_iterations": 1280, "rounds": 2, "search_steps": 20}


def traced_problem(
    rng: np.random.Generator, topology: ClusterTopology, *, max_ids: int = 1 << 24, **options: Any
) -> PlanProblem:
    """Sequences with tastes of their own, any of them empty, under a layout that may be repacked."""
    experts = max(2, topology.ep_size * int(rng.integers(1, 4)))
    top_k, layers = int(rng.integers(1, min(4, experts) + 1)), int(rng.integers(1, 4))
    lengths = [*rng.integers(0, 60, int(rng.integers(0, 12))).tolist(), 30]
    sequences = []
    for length in lengths:
        taste = rng.normal(0, rng.choice([0.1, 1.5]), (layers, experts))
        sequences.append(np.argsort(-(taste + rng.gumbel(size=(length, layers, experts))), axis=2)[:, :, :top_k])
    return problem_on(RoutingTrace.from_sequences(sequences, num_experts=experts), rng, topology, max_ids, **options)


def problem_on(
    trace: RoutingTrace,
    rng: np.random.Generator,
    topology: ClusterTopology,
    max_ids: int = 1 << 24,
    *,
    hierarchical: bool = True,
    **options: Any,
) -> PlanProblem:
    lengths, micro_batches = trace.sequence_lengths, 3
    layout = BatchLayout(
        micro_batch=rng.integers(0, micro_batches, len(lengths)).astype(np.int32),
        dp_rank=rng.integers(0, topology.num_dp_ranks, len(lengths)).astype(np.int32),
        order=np.arange(len(lengths), dtype=np.int32),
        num_micro_batches=micro_batches,
        num_dp_ranks=topology.num_dp_ranks,
    )
    load = reduce_load([trace], layout=layout, topology=topology)
    routes = RouteSample.drawn([trace], layout=layout, topology=topology, max_ids=max_ids)
    problem = problem_of(
        replace(load, routes=routes),
        topology,
        layout=layout,
        objective="time",
        sequence_load=SequenceLoad.of_different(count_sequences(trace).tokens_per_expert),
        sequence_tokens=lengths,
        **options,
    )
    # Slow links and dear rows of tokens, so that travel and balance both decide at these sizes.
    slow = HARDWARE.perturbed(rdma_gb_per_s=1e-3)
    prices = layer_cost_params(problem.model, replace(topology, hardware=slow), hierarchical=hierarchical)
    return replace(problem, cost=replace(prices, prefetch_hidden_s=rng.choice([0, 1])))


def under(problem: PlanProblem, plan: Plan) -> PlanProblem:
    return replace(
        problem,
        layout=plan.layout,
        load=load_of_plan(problem, plan.layout),
        sequence_load=None,
        sequence_tokens=None,
    )


def check_never_worse(seed: int, topology: ClusterTopology) -> None:
    rng = np.random.default_rng(seed)
    problem = traced_problem(
        rng,
        topology,
        max_ids=int(rng.choice([50, 1 << 24])),
        hierarchical=bool(rng.integers(2)),
        replica_slots=int(rng.integers(0, 3)),
        cross_node_slots=int(rng.integers(0, 3)),
        resident_slots=int(rng.integers(0, 3)),
    )
    if rng.random() < 0.3:  # a part of the tokens without known routes
        more = rng.integers(0, 30, problem.load.tokens.shape)
        load = problem.load.completed(problem.load.tokens + more)
        problem = replace(problem, load=load, layout=replace(problem.layout, fixed=True))
    problem = replace(problem, objective=str(rng.choice(["time", "time", "imbalance"])))
    planner = MoeRlPlanner(**SHORT, pack=bool(rng.integers(2)), reorder=bool(rng.integers(2)))
    plan, static = planner.plan(problem), make_planner("static").plan(problem)
    at = under(problem, plan)
    assert not validate_plan(problem, plan, load=at.load)
    if not problem.objective.in_seconds:
        most, without = rank_load(plan, at.load), rank_load(static, problem.load)
        assert most.max(axis=3).sum() <= without.max(axis=3).sum()
        return
    own = predicted_cost(plan, at)
    assert plan.predicted_cost_s == pytest.approx(own, rel=1e-9)
    assert own <= predicted_cost(static, problem) * (1 + 1e-9)


@pytest.mark.lengthy
@settings(max_examples=40)
@given(seed=st.integers(0, 2**40), topology=topologies())
def test_a_plan_is_never_worse_than_static_and_costs_what_it_says(seed: int, topology: ClusterTopology) -> None:
    check_never_worse(seed, topology)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**40), topology=topologies())
def test_a_candidate_mixed_by_layer_is_what_pricing_its_homes_would_give(seed: int, topology: ClusterTopology) -> None:
    rng = np.random.default_rng(seed)
    problem = traced_problem(
        rng,
        topology,
        hierarchical=bool(rng.integers(2)),
        replica_slots=int(rng.integers(0, 3)),
        cross_node_slots=int(rng.integers(0, 3)),
    )
    problem = replace(problem, objective=str(rng.choice(["time", "imbalance"])))
    start = problem.starting_placement().home_rank
    pricing = CandidatePricing(
        problem=problem,
        may=ALL_LEVERS,
        core=native_core(),
        start=start,
        settings=CopySettings(search_steps=20, tolerance=0.0005, cross_node_gain=0.009, num_threads=1),
    )
    candidates = [
        pricing.candidate(rng.permuted(start, axis=1), problem.layout, problem.load)
        for _ in range(int(rng.integers(1, 4)))
    ]
    mixed = pricing.mixed(candidates, rng.integers(0, len(candidates), len(start)))
    priced = pricing.candidate(mixed.home, problem.layout, problem.load)
    assert (mixed.price, mixed.most_rows) == (priced.price, priced.most_rows)
    for name in ("residents", "cell_cost", "busiest_rows"):
        assert np.array_equal(getattr(mixed, name), getattr(priced, name)), name
    for name in ("offsets", *REPLICA_COLUMNS):
        assert np.array_equal(getattr(mixed.replicas, name), getattr(priced.replicas, name)), name


def test_a_micro_batch_of_which_no_token_is_known_is_planned(rng: np.random.Generator) -> None:
    """Enough tokens were drawn for a pool of each of three micro-batches, and all of them are of the first."""
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2, slices_per_dp_rank=4)
    ids = np.argsort(rng.gumbel(size=(2000, 2, 8)), axis=2)[:, :, :2]
    known = np.arange(2000) < 1000
    trace = RoutingTrace.from_sequences(
        [ids, ids, ids], num_experts=8, valid=[known, np.zeros_like(known), np.zeros_like(known)]
    )
    problem = problem_on(trace, rng, topology, cross_node_slots=1, resident_slots=1)
    layout = BatchLayout.ep_group(trace.sequence_lengths, token_budget=2000)
    routes = RouteSample.drawn([trace], layout=layout, topology=topology)
    counts = reduce_load([trace], layout=layout, topology=topology)
    load = replace(counts, routes=routes).completed(np.full((1, 3, 4), 500))
    problem = replace(problem, load=load, layout=replace(layout, fixed=True))
    plan = MoeRlPlanner(**SHORT).plan(problem)
    assert not validate_plan(problem, plan)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(seed=st.integers(0, 2**40), topology=topologies())
def test_five_hundred_plans_are_never_worse_than_static(seed: int, topology: ClusterTopology) -> None:
    check_never_worse(seed, topology)


@pytest.mark.lengthy
@settings(max_examples=15)
@given(seed=st.integers(0, 2**40), topology=topologies(), hierarchical=st.booleans())
def test_the_plan_is_the_same_for_any_number_of_threads(
    seed: int, topology: ClusterTopology, hierarchical: bool
) -> None:
    options: dict[str, Any] = {"hierarchical": hierarchical, "cross_node_slots": 1, "resident_slots": 1}
    one, many = (
        MoeRlPlanner(**SHORT, num_threads=threads).plan(
            traced_problem(np.random.default_rng(seed), topology, **options)
        )
        for threads in (1, 3)
    )
    assert one.hash == many.hash


@pytest.mark.lengthy
@settings(max_examples=30)
@given(seed=st.integers(0, 2**40), topology=topologies())
def test_core_and_numpy_count_the_same_rows(seed: int, topology: ClusterTopology) -> None:
    rng = np.random.default_rng(seed)
    problem = traced_problem(
        rng, topology, max_ids=int(rng.choice([80, 1 << 24])), cross_node_slots=1, resident_slots=1
    )
    plan = MoeRlPlanner(**SHORT).plan(problem)
    load = under(problem, plan).load
    native = count_rows(plan, load, topology)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_RL_NATIVE", "0")
        numpy = count_rows(plan, load, topology)
    for name in ("rank_visits", "between_nodes", "nics", "counted"):
        np.testing.assert_allclose(getattr(native, name), getattr(numpy, name), rtol=1e-12)


PAIRS = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)


def paired_problem(rng: np.random.Generator, topology: ClusterTopology = PAIRS, **options: Any) -> PlanProblem:
    """8 experts, of which e and e + 4 always meet: with contiguous homes on two nodes every token visits both."""
    sequences = []
    for _ in range(24):
        first = rng.integers(0, 4, (200, 2))
        sequences.append(np.stack([first, first + 4], axis=2))
    return problem_on(RoutingTrace.from_sequences(sequences, num_experts=8), rng, topology, **options)


def copies_per_token(plan: Plan, problem: PlanProblem) -> float:
    at = under(problem, plan)
    count = count_visits if problem.cost.a2a_hierarchical else count_rows
    copies = count(plan, at.load, problem.topology).between_nodes
    return float(copies.sum()) / float(at.load.tokens.sum() * at.load.num_layers)


def test_experts_that_meet_come_to_one_node(rng: np.random.Generator) -> None:
    """Then a token visits one node, the other one half of the time; balance and counts alone cannot tell."""
    problem = paired_problem(rng)
    plans = {on: MoeRlPlanner(pack=False, locality=on).plan(problem) for on in (True, False)}
    assert copies_per_token(make_planner("static").plan(problem), problem) == pytest.approx(1.0)
    assert copies_per_token(plans[True], problem) < 0.55
    home = plans[True].placement.home_rank
    assert (home[:, :4] // 2 == home[:, 4:] // 2).all()
    blind = replace(problem, load=replace(problem.load, routes=None))
    assert (
        plans[False].placement.home_rank.tolist() == MoeRlPlanner(pack=False).plan(blind).placement.home_rank.tolist()
    )


@pytest.mark.parametrize("hierarchical", [True, False])
def test_copies_that_stay_keep_tokens_on_their_node_where_they_pay(
    rng: np.random.Generator, hierarchical: bool
) -> None:
    """With room for every expert on every node little needs to travel; where copies are dear none is made."""
    problem = paired_problem(rng, resident_slots=2, hierarchical=hierarchical)
    problem = replace(problem, cost=replace(problem.cost, prefetch_bytes_per_s=1e15))
    plan = MoeRlPlanner(reorder=False, pack=False).plan(problem)
    assert not validate_plan(problem, plan)
    assert (plan.placement.resident_experts >= 0).any()
    static = make_planner("static").plan(problem)
    assert copies_per_token(plan, problem) < 0.3 * copies_per_token(static, problem)  # some rows level the nodes
    dear = replace(problem, cost=replace(problem.cost, prefetch_bytes_per_s=1.0))
    none = MoeRlPlanner(reorder=False, pack=False).plan(dear)
    assert (none.placement.resident_experts < 0).all()
    assert none.placement.resident_slots == 2


@pytest.mark.parametrize("hierarchical", [True, False])
def test_a_sequence_goes_to_the_node_of_its_experts(rng: np.random.Generator, hierarchical: bool) -> None:
    """Half of the sequences use experts of one node only: packed, no token has to travel, wherever a run is cut."""
    sequences = [np.sort(rng.permuted(np.tile(np.arange(4), (100, 2, 1)), axis=2)[:, :, :2]) + 4 * (i % 2)
                 for i in range(24)]  # fmt: skip
    trace = RoutingTrace.from_sequences(sequences, num_experts=8)
    for slices in (1, 4):
        problem = problem_on(trace, rng, replace(PAIRS, slices_per_dp_rank=slices), hierarchical=hierarchical)
        layout = BatchLayout.in_order(
            trace.sequence_lengths, num_dp_ranks=problem.layout.num_dp_ranks, token_budget=2400 // (4 // slices)
        )
        topology = problem.topology
        load = reduce_load([trace], layout=layout, topology=topology)
        routes = RouteSample.drawn([trace], layout=layout, topology=topology)
        problem = replace(problem, layout=layout, load=replace(load, routes=routes))
        plan = MoeRlPlanner(reorder=False).plan(problem)
        assert copies_per_token(make_planner("static").plan(problem), problem) > 0.3
        assert copies_per_token(plan, problem) < 0.05


def test_a_sample_stands_in_the_order_of_its_layout(rng: np.random.Generator) -> None:
    problem = paired_problem(rng)
    routes = problem.load.routes
    assert routes is not None
    assert len(routes.token) == routes.routes.shape[1] == 24 * 200
    parts = routes.cells(np.array([1, 0]))
    one = slice(int(routes.cell_start[1]), int(routes.cell_start[2]))
    assert parts.token[: one.stop - one.start].tolist() == routes.token[one].tolist()
    again = routes.under(problem.layout, problem.sequence_tokens, problem.topology)
    assert again.token.tolist() == routes.token.tolist()
    assert (np.diff(routes.source) >= 0).sum() >= len(routes.source) - 1 - problem.load.num_micro_batches


@pytest.mark.lengthy
@settings(max_examples=25)
@given(seed=st.integers(0, 2**40), topology=topologies())
def test_residents_are_of_other_nodes_and_bring_no_rank_more_than_the_mean(
    seed: int, topology: ClusterTopology
) -> None:
    """A node holds no expert twice, and what it is not home of it cannot pass on: more would stay with the rank."""
    problem = traced_problem(np.random.default_rng(seed), topology, resident_slots=2)
    plan = MoeRlPlanner(**SHORT).plan(problem)
    residents, node = plan.placement.resident_experts, topology.node_of_rank
    for layer, home in enumerate(plan.placement.home_rank):
        for here in range(topology.num_nodes):
            held = residents[layer, node == here].ravel()
            held = held[held >= 0]
            assert len(set(held)) == len(held)
            assert (node[home[held]] != here).all()
    load, replicas = under(problem, plan).load, plan.replicas
    brought = np.zeros((np.prod(load.pairs.shape[:3]), topology.ep_size), np.int64)
    rank = replicas.physical_id // plan.placement.slots_per_rank
    kept = replicas.resident
    np.add.at(brought, (replicas.index_of_replica()[kept], rank[kept]), replicas.source_quota[kept].sum(axis=1))
    mean = -(-load.pairs.sum(axis=(3, 4), dtype=np.int64).reshape(-1) // topology.ep_size)
    assert (brought.max(axis=1) <= mean).all()


def test_a_copy_spares_the_busiest_node_not_the_most_tokens(rng: np.random.Generator) -> None:
    """Three nodes of one rank, 3 experts and a slot each; 60 tokens of node 0 want expert 3, 50 expert 6.

    Of node 1's, 40 want expert 7 and 40 expert 8, both at home on node 2: one of them node 1 copies. A copy of 3 spares
    node 0 more tokens, but leaves node 2 with 50 + 40 to receive; with a copy of 6 no node has more than 60.
    """
    chosen = (3,) * 60 + (6,) * 50 + (0,) * 90, (7,) * 40 + (8,) * 40 + (3, 4, 5) * 40, (6, 7, 8, 6) * 50
    sequences = [np.asarray(ids).reshape(200, 1, 1) for ids in chosen]
    trace = RoutingTrace.from_sequences(sequences, num_experts=9)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=3, ranks_per_node=1)
    layout = BatchLayout.in_order(trace.sequence_lengths, num_dp_ranks=3, token_budget=200)
    load = reduce_load([trace], layout=layout, topology=topology)
    routes = RouteSample.drawn([trace], layout=layout, topology=topology)
    problem = problem_on(trace, rng, topology, resident_slots=1)
    problem = replace(
        problem,
        layout=replace(layout, fixed=True),
        load=replace(load, routes=routes),
        cost=replace(problem.cost, prefetch_bytes_per_s=1e15),
    )
    plan = MoeRlPlanner(reorder=False, pack=False).plan(problem)
    held = plan.placement.resident_experts[0, :, 0].tolist()
    assert held[0] == 6
    assert held[1] in (7, 8)


@pytest.mark.lengthy
@pytest.mark.parametrize("hierarchical", [True, False])
def test_the_validator_finds_a_wrong_visit_and_a_wrong_price(rng: np.random.Generator, hierarchical: bool) -> None:
    problem = paired_problem(rng, hierarchical=hierarchical, cross_node_slots=1)
    problem = replace(problem, layout=replace(problem.layout, fixed=True))
    plan = make_planner("ultraep").plan(problem)
    assert plan.predicted_cost_s is not None
    assert plan.replicas.copies > 0
    assert validate_plan(problem, plan) == []
    cheap = replace(plan, predicted_cost_s=plan.predicted_cost_s * (1 - 1e-6))
    (found,) = validate_plan(problem, cheap)
    assert found.startswith("the plan is predicted to take")

    def miscounted(*args: Any) -> CountedVisits:
        right = count_visits(*args) if hierarchical else count_rows(*args)
        return replace(right, rank_visits=right.rank_visits + 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_recount, "count_visits" if hierarchical else "count_rows", miscounted)
        found = validate_plan(problem, plan)[0]
    assert found.startswith("group 0, micro-batch 0, layer 0: visits of rank 0 are counted as")


def test_rows_that_copies_keep_off_nics_count_before_the_kept_plan_drops_those_copies() -> None:
    """With alltoall the kept plan once compared transfers of copies with the traffic of a plan without them.

    It held 351 copies instead of 604, and its MoE layers took as long as without copies across nodes.
    """
    options = SimulationOptions(
        cluster="h800",
        expert_model_parallel_size=32,
        tokens_per_rank=2048,
        seq_length=4096,
        replica_slots=2,
        cross_node_slots=2,
        moe_token_dispatcher_type="alltoall",
    )
    problem = state_scenario(CONFIGS / "traces" / "countdown-grpo.moetrace", options, lambda *_: None).problem
    pricing = MoeRlPlanner()._search(problem, ALL_LEVERS, native_core()).pricing
    without, searched, kept = (
        pricing.candidate(pricing.start, problem.layout, problem.load, **words).cost
        for words in ({"cross_nodes": False}, {}, {"final": True})
    )
    assert searched < 0.96 * without
    assert kept <= 1.01 * searched
