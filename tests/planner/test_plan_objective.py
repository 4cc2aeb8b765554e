"""Two more objectives of the planner, a class each. All that plans follows their facts, the C++ searches too."""

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from least_max_rank_load import least_max_rank_load
from moe_rl_example.rms import RootMeanSquare
from numpy.typing import NDArray
from strategies import HARDWARE, load_of, problem_of

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import rank_load
from moe_rl.core.native import native_core
from moe_rl.core.sequence_load import SequenceLoad
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner import ALL_LEVERS, OBJECTIVES, PLACEMENT, Levers, PlanObjective, make_planner
from moe_rl.planner.objective import IMBALANCE, TIME
from moe_rl.planner.packing import packed_on_their_ranks
from moe_rl.planner.relayout import load_of_plan


class PeakRows(PlanObjective):
    """Rows of the fullest rank in the worst (group, micro-batch, layer), which size a buffer allocated once."""

    name = "peak-rows"
    is_peak = True

    def total(self, costs_GML: NDArray[np.float64]) -> float:
        """Return the rows of the fullest rank."""
        return float(costs_GML.max(initial=0.0))


PEAK, RMS = PeakRows(), RootMeanSquare()
every_other_objective = pytest.mark.parametrize("objective", [PEAK, RMS], ids=lambda objective: objective.name)
needs_core = pytest.mark.skipif(native_core() is None, reason="the searches are the C++ core's")


def one_node(ranks: int) -> ClusterTopology:
    return ClusterTopology(
        hardware=HARDWARE, ep_size=ranks, num_ep_groups=1, slices_per_dp_rank=1, ranks_per_node=ranks
    )


def all_homes(experts: int, ranks: int) -> NDArray[np.int64]:
    """Return [A, E] all A assignments of as many experts to each rank."""
    homes = [np.full(experts, -1)]
    for rank in range(ranks):
        partial, homes = homes, []
        for home in partial:
            for members in combinations(np.flatnonzero(home < 0), experts // ranks):
                homes.append(home.copy())
                homes[-1][list(members)] = rank
    return np.array(homes)


def least_by_homes(objective: PlanObjective, rows_MLE: NDArray[np.int64], ranks: int) -> float:
    """Return the lowest total over all homes; layers do not depend on each other, but for the total."""
    homes_AE = all_homes(rows_MLE.shape[2], ranks)
    members_APE = (homes_AE[:, None, :] == np.arange(ranks)[:, None]).astype(np.int64)
    busiest_AML = np.einsum("mle,ape->amlp", rows_MLE, members_APE).max(axis=3)
    best = [
        min(range(len(homes_AE)), key=lambda at: objective.by_layer(busiest_ML[at][None, :, None])[0])
        for busiest_ML in busiest_AML.transpose(2, 0, 1)
    ]
    busiest_ML = np.stack([busiest_AML[at, :, layer] for layer, at in enumerate(best)], axis=1)
    return objective.total(busiest_ML[None].astype(np.float64))


def skewed_pairs(seed: int, *, micro_batches: int, layers: int, ranks: int, experts: int) -> NDArray[np.int32]:
    """[1, M, L, P, E] pairs whose micro-batches differ in size and in their popular experts, one expert idle."""
    rng = np.random.default_rng(seed)
    popularity = np.exp(rng.normal(1.5, 1.0, (1, micro_batches, layers, 1, experts)))
    popularity *= rng.uniform(0.5, 2.0, (1, micro_batches, 1, 1, 1))
    popularity[..., 0] = 0
    pairs: NDArray[np.int32] = rng.poisson(popularity / ranks, (1, micro_batches, layers, ranks, experts)).astype(
        np.int32
    )
    return pairs


def cost_of(problem, planner="moe-rl", may: Levers = ALL_LEVERS, **parameters: bool) -> float:
    """Return what the problem's objective makes of a plan, counted from its rows."""
    plan = make_planner(planner, **parameters).plan(problem, may)
    assert plan.objective == problem.objective.name
    busiest_GML = rank_load(plan, load_of_plan(problem, plan.layout)).max(axis=3)
    return problem.objective.total(busiest_GML.astype(np.float64))


@needs_core
@every_other_objective
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("seed", range(6))
def test_homes_meet_the_optimum_of_all_homes(
    objective: PlanObjective, nodes: int, ranks_per_node: int, seed: int
) -> None:
    ranks = nodes * ranks_per_node
    load = load_of(skewed_pairs(seed, micro_batches=4, layers=3, ranks=ranks, experts=8), 2)
    topology = replace(one_node(ranks), ranks_per_node=ranks_per_node)
    problem = problem_of(load, topology, objective=objective, replica_slots=0)
    rows_MLE = load.pairs.sum(axis=(0, 3), dtype=np.int64)
    assert cost_of(problem, may=PLACEMENT) == pytest.approx(least_by_homes(objective, rows_MLE, ranks), rel=1e-12)


@needs_core
@every_other_objective
def test_the_sum_of_busiest_ranks_misses_that_optimum(objective: PlanObjective) -> None:
    """Else the test above would pass without a search that follows the objective."""
    excess = 0.0
    for seed in range(8):
        load = load_of(skewed_pairs(seed, micro_batches=4, layers=3, ranks=2, experts=8), 2)
        problem = problem_of(load, one_node(2), objective=IMBALANCE, replica_slots=0)
        busiest_GML = rank_load(make_planner("moe-rl").plan(problem, PLACEMENT), load).max(axis=3)
        rows_MLE = load.pairs.sum(axis=(0, 3), dtype=np.int64)
        excess += objective.total(busiest_GML.astype(np.float64)) - least_by_homes(objective, rows_MLE, 2)
    assert excess > 1e-6


@every_other_objective
@pytest.mark.parametrize("seed", range(4))
def test_the_reference_planner_follows_it(objective: PlanObjective, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_RL_NATIVE", "0")
    load = load_of(skewed_pairs(seed, micro_batches=3, layers=2, ranks=2, experts=6), 2)
    problem = problem_of(load, one_node(2), objective=objective, replica_slots=0)
    least = least_by_homes(objective, load.pairs.sum(axis=(0, 3), dtype=np.int64), 2)
    assert cost_of(problem, may=PLACEMENT) == pytest.approx(least, rel=1e-12)


@needs_core
@pytest.mark.lengthy
@pytest.mark.parametrize("seed", range(3))
def test_replicas_meet_the_optimum_of_each_cell(seed: int) -> None:
    pytest.importorskip("scipy")
    load = load_of(skewed_pairs(seed, micro_batches=2, layers=1, ranks=3, experts=6), 2)
    problem = problem_of(load, one_node(3), objective=PEAK, replica_slots=1)
    homes_E = np.repeat(np.arange(3), 2)
    rows_ME = load.pairs.sum(axis=(0, 3), dtype=np.int64)[:, 0]
    least = max(least_max_rank_load(rows_E, homes_E, ep_size=3, slots=1) for rows_E in rows_ME)
    # The bound splits rows in fractions, and is known to a relative gap of 1e-4.
    assert cost_of(problem, may=Levers(replicate=True), tolerance=0.0) <= np.ceil(least * (1 + 1e-4))


def least_by_places(
    objective: PlanObjective, rows_SR: NDArray[np.int64], allowed: list[list[int]], *, groups: int, micro_batches: int
) -> float:
    """Return the lowest total over all layouts without an empty place; `allowed` are the places of each sequence."""
    costs = []
    for places in product(*allowed):
        if len(set(places)) < groups * micro_batches:
            continue
        rows_PR = np.zeros((micro_batches * groups, rows_SR.shape[1]))
        np.add.at(rows_PR, list(places), rows_SR)
        costs.append(objective.total(rows_PR.max(axis=1).reshape(micro_batches, groups).T[:, :, None]))
    return min(costs)


@needs_core
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("objective", [PEAK, RMS, IMBALANCE], ids=lambda objective: objective.name)
@pytest.mark.parametrize("seed", range(4))
def test_packing_meets_the_optimum_of_all_layouts(objective: PlanObjective, seed: int, groups: int) -> None:
    rng = np.random.default_rng(seed)
    num_sequences, micro_batches, experts = 6, 3 if groups == 1 else 2, 4
    tokens = rng.integers(3, 9, num_sequences)
    favorite = rng.dirichlet(np.full(experts, 0.4), (num_sequences, 1))
    sequence_load = np.stack([rng.multinomial(count, share) for count, share in zip(tokens, favorite, strict=True)])
    topology = replace(one_node(2), num_ep_groups=groups, slices_per_dp_rank=2)
    place = np.arange(num_sequences, dtype=np.int32) % (micro_batches * groups)
    layout = BatchLayout(
        micro_batch=place // groups,
        dp_rank=place % groups,
        order=np.arange(num_sequences, dtype=np.int32),
        num_micro_batches=micro_batches,
        num_dp_ranks=groups,
        token_budget=int(tokens.sum()),
    )

    def load_of_layout(changed: BatchLayout) -> StepLoad:
        pairs = np.zeros((groups, micro_batches, 1, 2, experts), np.int32)
        np.add.at(pairs[:, :, 0, 0], (changed.dp_rank, changed.micro_batch), sequence_load[:, 0])
        return load_of(pairs, 1)

    problem = problem_of(
        load_of_layout(layout),
        topology,
        objective=objective,
        replica_slots=0,
        layout=layout,
        sequence_load=SequenceLoad.of_different(sequence_load),
        sequence_tokens=tokens,
        load_of_layout=load_of_layout,
    )
    homes = np.array([0, 0, 1, 1])
    rows_SR = np.stack([(sequence_load[:, 0] * (homes == rank)).sum(axis=1) for rank in range(2)], axis=1)
    anywhere = [list(range(micro_batches * groups))] * num_sequences
    least = least_by_places(objective, rows_SR, anywhere, groups=groups, micro_batches=micro_batches)
    assert cost_of(problem, may=Levers(pack=True)) == pytest.approx(least, rel=1e-12)


@needs_core
@every_other_objective
@pytest.mark.parametrize("seed", range(4))
def test_sequences_that_keep_their_rank_meet_the_optimum_too(objective: PlanObjective, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_sequences, micro_batches, groups = 8, 2, 2
    rows_SR = rng.integers(0, 20, (num_sequences, 2)).astype(np.int32)
    dp_rank = np.arange(num_sequences, dtype=np.int32) % groups
    stated = BatchLayout(
        micro_batch=(np.arange(num_sequences, dtype=np.int32) // groups) % micro_batches,
        dp_rank=dp_rank,
        order=np.arange(num_sequences, dtype=np.int32),
        num_micro_batches=micro_batches,
        num_dp_ranks=groups,
        token_budget=1000,
    )
    micro_batch = packed_on_their_ranks(
        stated,
        rows_SR[:, :, None],
        tokens=np.full(num_sequences, 10),
        cost=None,
        top_k=1,
        topology=replace(one_node(2), num_ep_groups=groups, slices_per_dp_rank=2),
        objective=objective,
        core=native_core(),
    )
    rows_GMR = np.zeros((groups, micro_batches, 2))
    np.add.at(rows_GMR, (dp_rank, micro_batch), rows_SR)
    own_places = [[m * groups + int(rank) for m in range(micro_batches)] for rank in dp_rank]
    least = least_by_places(objective, rows_SR, own_places, groups=groups, micro_batches=micro_batches)
    assert objective.total(rows_GMR.max(axis=2)[:, :, None]) == pytest.approx(least, rel=1e-12)


@needs_core
def test_powers_of_a_large_step_do_not_overflow() -> None:
    """Two micro-batches of 2^31 - 2^20 rows: their fourth powers have 124 bits."""
    rows = np.full((2, 1, 4), 1 << 27, np.int32)
    rows[:, :, :2] = (1 << 30) - (1 << 27) - (1 << 19)
    start = np.array([[0, 0, 1, 1]], np.int32)
    arguments = {"row_cost": 1, "move_cost": 0, "move_inside_cost": 0, "nodes": 1, "ranks_per_node": 2}
    home = native_core().reorder(
        load=rows, start=start, current=start, by_rank=True, moving_is_free=False, peak=False, power=4, **arguments,
        iterations=4_000, iterations_inside=0, seed=0, num_threads=1, tokens=None,
    )  # fmt: skip
    assert home[0, 0] != home[0, 1]


@pytest.mark.parametrize("policy", ["static", "relibra", "llep", "ultraep", "moonep", "eplb-oracle", "lplb-oracle"])
@every_other_objective
def test_every_policy_plans_under_it(objective: PlanObjective, policy: str) -> None:
    load = load_of(skewed_pairs(0, micro_batches=2, layers=2, ranks=4, experts=8), 2)
    problem = problem_of(load, one_node(4), objective=objective)
    assert make_planner(policy).plan(problem).predicted_cost_s is None


@pytest.mark.parametrize(
    "pairs", [np.zeros((1, 2, 1, 2, 4), np.int32), np.eye(4, dtype=np.int32)[None, None, None, :2] * 0]
)
def test_a_step_without_tokens_has_no_peak(pairs: NDArray[np.int32]) -> None:
    problem = problem_of(load_of(pairs, 1), one_node(2), objective=PEAK)
    assert cost_of(problem) == 0


def test_all_rows_on_one_expert_are_halved_by_its_replica() -> None:
    pairs = np.zeros((1, 1, 1, 2, 4), np.int32)
    pairs[..., 0] = 8
    problem = problem_of(load_of(pairs, 1), one_node(2), objective=PEAK, replica_slots=1)
    assert cost_of(problem) == 8


def test_a_plan_is_as_good_as_what_its_objective_counts() -> None:
    """The example of the module: two EP groups, one micro-batch, two layers."""
    costs_GML = np.array([[[3.0, 1.0]], [[2.0, 4.0]]])
    assert TIME.total(costs_GML) == 6.0
    assert IMBALANCE.total(costs_GML) == 10.0
    assert PEAK.total(costs_GML) == 4.0
    assert RMS.total(costs_GML) == np.sqrt(30 / 4)
    assert IMBALANCE.by_layer(costs_GML).tolist() == [5.0, 5.0]
    assert PEAK.by_layer(costs_GML).tolist() == [3.0, 4.0]
    assert RMS.by_layer(costs_GML).tolist() == [13.0, 17.0]


def test_an_objective_is_taken_by_name_and_an_unknown_one_is_named() -> None:
    load = load_of(np.ones((1, 1, 1, 2, 4), np.int32), 1)
    assert problem_of(load, one_node(2), objective="imbalance").objective is OBJECTIVES["imbalance"]
    with pytest.raises(InvalidInputError, match="unknown objective 'imbalanse'"):
        replace(problem_of(load, one_node(2)), objective="imbalanse")
