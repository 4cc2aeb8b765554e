"""The C++ core: any number of threads plans the same, prices as `core.cost` to 1e-9, refusals instead of crashes."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import HARDWARE, load_of, model_spec, problem_of, random_pairs, replicated, topologies

from moe_rl.core.cost import LayerCostParams, layer_cost_params
from moe_rl.core.native import native_core
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.moe_rl_policy import MoeRlPlanner
from moe_rl.planner.objective import OBJECTIVES
from moe_rl.planner.predict import cell_seconds
from moe_rl.planner.registry import make_planner

pytestmark = pytest.mark.skipif(native_core() is None, reason="the C++ core is not built")
seeds = st.integers(0, 2**40)


def core() -> Any:
    return native_core()


def shuffled_homes(rng: np.random.Generator, layers: int, experts: int, ranks: int) -> np.ndarray:
    contiguous = np.repeat(np.arange(ranks), experts // ranks)
    return rng.permuted(np.tile(contiguous, (layers, 1)), axis=1).astype(np.int32)


def random_cells(rng: np.random.Generator) -> tuple[dict[str, Any], ClusterTopology]:
    """Arguments of `replicate` for a few cells of any small shape."""
    per_node, nodes = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    ranks = per_node * nodes
    experts, groups, layers = ranks * int(rng.integers(1, 5)), int(rng.integers(1, 3)), int(rng.integers(1, 3))
    shape = (groups, int(rng.integers(1, 4)), layers, ranks, experts)
    load = load_of(random_pairs(rng, shape, most=int(rng.choice([1, 30, 3000]))), top_k=1)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=ranks, num_ep_groups=groups, ranks_per_node=per_node)
    slots, cross = int(rng.integers(0, 3)), int(rng.integers(0, 2))
    model = model_spec(num_experts=experts, num_layers=layers, top_k=1)
    prices = layer_cost_params(model, topology, hierarchical=bool(rng.integers(2)))
    prices = replace(prices, prefetch_hidden_s=0.001)
    arguments = {
        "pairs": load.pairs,
        "tokens": load.tokens,
        "home": shuffled_homes(rng, layers, experts, ranks),
        "ranks_per_domain": per_node,
        "replica_slots": slots,
        "cross_node_slots": cross,
        "spare_slots": slots + cross + int(rng.integers(2)),
        "cost": prices if rng.integers(2) else None,
        "search_nodes": int(rng.choice([0, 50])),
        "tolerance_ppm": 500,
        "cross_gain_ppm": 3000,
        "num_threads": int(rng.integers(0, 3)),
        "routes": None,
        "residents": np.zeros((layers, ranks, 0), np.int32),
        "thorough": bool(rng.integers(2)),
    }
    return arguments, topology


@settings(max_examples=100)
@given(seed=seeds)
def test_replicas_are_the_same_for_any_number_of_threads(seed: int) -> None:
    arguments, _ = random_cells(np.random.default_rng(seed))
    one, many = (replicated(arguments | {"num_threads": threads}) for threads in (1, 3))
    assert one.keys() == many.keys()
    for name, alone in one.items():
        assert np.array_equal(alone, many[name])


@settings(max_examples=60)
@given(seed=seeds)
def test_homes_keep_their_ranks_full_and_are_the_same_for_any_number_of_threads(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes, per_node, layers, cells = (int(rng.integers(1, most)) for most in (4, 4, 3, 5))
    experts = nodes * per_node * int(rng.integers(1, 4))
    load = rng.poisson(np.exp(rng.normal(2, 1.5, (cells, layers, experts)))).astype(np.int32)
    arguments = {
        "load": load,
        "row_cost": int(rng.integers(1, 4)),
        "move_cost": int(rng.choice([0, 50])),
        "move_inside_cost": int(rng.choice([0, 20])),
        "start": shuffled_homes(rng, layers, experts, nodes * per_node),
        "current": shuffled_homes(rng, layers, experts, nodes * per_node),
        "nodes": nodes,
        "ranks_per_node": per_node,
        "by_rank": bool(rng.integers(2)),
        "moving_is_free": bool(rng.integers(2)),
        "peak": bool(rng.integers(2)),
        "power": int(rng.integers(1, 5)),
        "iterations": int(rng.choice([0, 256])),
        "iterations_inside": int(rng.choice([0, 128])),
        "seed": seed,
        "tokens": None,
    }
    home, again = (core().reorder(**arguments, num_threads=threads) for threads in (1, 3))
    assert np.array_equal(home, again)
    per_rank = experts // (nodes * per_node)
    assert all((np.bincount(layer, minlength=nodes * per_node) == per_rank).all() for layer in home)


def random_token_bits(rng: np.random.Generator, *, layers: int, experts: int, nodes: int) -> tuple[Any, ...]:
    """Return the last argument of `reorder`: routes, bits, pools of every row of words, costs, deduplicated.

    Up to 40 words of a pool, more than a byte of the AVX2 form can count, and pools that fill no whole vector.
    """
    top_k, drawn = int(rng.integers(1, min(9, experts + 1))), int(rng.integers(1, 1500))
    routes = rng.random((layers, drawn, experts)).argsort(axis=2)[:, :, :top_k].astype(np.uint16)
    most_pools = int(rng.choice([1, 2, 7, 8, 13, 16, 24]))
    pools_of_row = np.sort(rng.integers(1, most_pools + 1, int(rng.integers(1, 41)))).astype(np.int32)[::-1].copy()
    pools_of_row[0] = most_pools
    bits = rng.permutation(nodes * int(pools_of_row.sum()) * 64)[:drawn].astype(np.int32)
    bit = np.full(drawn, -1, np.int32)
    bit[: len(bits)] = bits
    copy_cost = rng.integers(0, 1000, most_pools).astype(np.int64)
    return routes, bit, pools_of_row, copy_cost, bool(rng.integers(2))


@settings(max_examples=60)
@given(seed=seeds)
def test_homes_are_the_same_for_every_width_of_vectors(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes, per_node, layers, cells = int(rng.integers(2, 5)), int(rng.integers(1, 4)), int(rng.integers(1, 3)), 3
    experts = nodes * per_node * int(rng.integers(1, 5))
    start = shuffled_homes(rng, layers, experts, nodes * per_node)
    arguments = {
        "load": rng.poisson(np.exp(rng.normal(2, 1.5, (cells, layers, experts)))).astype(np.int32),
        "row_cost": int(rng.integers(1, 100)),
        "move_cost": int(rng.choice([0, 50])),
        "move_inside_cost": 0,
        "start": start,
        "current": start,
        "nodes": nodes,
        "ranks_per_node": per_node,
        "by_rank": bool(rng.integers(2)),
        "moving_is_free": False,
        "peak": False,
        "power": 1,
        "iterations": 512,
        "iterations_inside": 0,
        "seed": seed,
        "num_threads": 1,
        "tokens": random_token_bits(rng, layers=layers, experts=experts, nodes=nodes),
    }
    names = core().travel_passes()
    homes = {}
    try:
        for name in names:
            core().use_travel_passes(name)
            homes[name] = core().reorder(**arguments)
    finally:
        core().use_travel_passes(names[0])
    for name in names:
        assert np.array_equal(homes[name], homes["portable"]), name


def test_a_width_of_vectors_that_the_machine_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="no passes of that name"):
        core().use_travel_passes("avx9000")


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (2, 2), (2, 4), (3, 2)])
def test_a_move_inside_a_node_is_charged_nvlinks_price(nodes: int, per_node: int) -> None:
    """Without replicas bins are ranks: swaps that pay at NVLink's price but not at a NIC's stay inside their node."""
    ranks = nodes * per_node
    experts = 2 * ranks
    home = np.repeat(np.arange(ranks, dtype=np.int32), 2)[None, :]
    # Both experts of the first rank of every node are hot; node 0 is hotter than the others by less than a NIC's move.
    load = np.ones((1, 1, experts), np.int32)
    load[0, 0, home[0] % per_node == 0] = 100
    load[0, 0, home[0] == 0] = 110
    moved = core().reorder(
        load=load,
        row_cost=1,
        move_cost=10_000,
        move_inside_cost=10,
        start=home,
        current=home,
        nodes=nodes,
        ranks_per_node=per_node,
        by_rank=True,
        moving_is_free=False,
        peak=False,
        power=1,
        iterations=4_000,
        iterations_inside=0,
        seed=1,
        num_threads=1,
        tokens=None,
    )
    assert (moved // per_node == home // per_node).all()
    rows = np.bincount(moved[0], weights=load[0, 0], minlength=ranks)
    assert rows.max() == 111  # a hot expert and a cold one; 220 before


@settings(max_examples=60)
@given(seed=seeds)
def test_where_moves_are_free_homes_never_get_worse(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes, per_node, layers, cells = (int(rng.integers(1, most)) for most in (4, 4, 3, 5))
    ranks = nodes * per_node
    load = rng.poisson(np.exp(rng.normal(2, 1.5, (cells, layers, 3 * ranks)))).astype(np.int32)
    start, by_rank = shuffled_homes(rng, layers, 3 * ranks, ranks), bool(rng.integers(2))
    bins = ranks if by_rank else nodes

    def busiest(home: np.ndarray) -> np.ndarray:
        in_bin = (home // (ranks // bins))[:, :, None] == np.arange(bins)
        return np.einsum("cle,leb->clb", load, in_bin.astype(np.int64)).max(axis=2).sum(axis=0)

    home = core().reorder(
        load=load,
        row_cost=1,
        move_cost=0,
        move_inside_cost=0,
        start=start,
        current=start,
        nodes=nodes,
        ranks_per_node=per_node,
        by_rank=by_rank,
        moving_is_free=bool(rng.integers(2)),
        peak=False,
        power=1,
        iterations=512,
        iterations_inside=0,
        seed=seed,
        num_threads=1,
        tokens=None,
    )
    assert (busiest(home) <= busiest(start)).all()


@settings(max_examples=60)
@given(seed=seeds)
def test_a_packing_keeps_the_budget_and_costs_what_it_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences, layers, bins, batches, per_batch = (int(rng.integers(1, most)) for most in (12, 4, 4, 4, 3))
    groups = int(rng.integers(1, 3))
    batches *= groups
    places = batches * per_batch
    load = rng.integers(0, 50, (sequences, layers, 3 * bins)).astype(np.int32)
    bin_of = rng.integers(0, bins, (layers, 3 * bins)).astype(np.int32)
    bin_load = core().bin_loads(load, bin_of, bins, 2)
    by_hand = np.einsum("sle,leb->sbl", load, bin_of[:, :, None] == np.arange(bins))
    assert np.array_equal(bin_load, by_hand.reshape(sequences, -1))
    tokens, place = rng.integers(1, 100, sequences), rng.integers(0, places, sequences).astype(np.int32)
    work = rng.integers(0, 30, (int(rng.integers(1, 4)), sequences))
    arguments = {
        "bin_load": bin_load,
        "row": np.arange(sequences, dtype=np.int32),
        "bins": bins,
        "tokens": tokens,
        "work": work,
        "place": place,
        "batch_of_place": (np.arange(places) // per_batch).astype(np.int32),
        "num_batches": batches,
        "num_groups": groups,
        "budget": int(np.bincount(place, weights=tokens).max()),
        "iterations": 640,
        "heat_shift": int(rng.integers(0, 3)),
        "seed": seed,
        "travel": rng.integers(0, 40, (sequences, 2)) if rng.integers(2) else None,
        "node_of_place": rng.integers(-1, 2, places).astype(np.int32),
        "limit": int(rng.choice([2**31 - 1, 100])),  # rows of a bin above which each costs 256 more
    }
    packed, cost = core().pack(**arguments)
    assert np.bincount(packed, weights=tokens, minlength=places).max() <= arguments["budget"]

    def cost_of(place_of: np.ndarray) -> int:
        rows = np.zeros((batches, bins, layers), np.int64)
        np.add.at(rows, place_of // per_batch, bin_load.reshape(sequences, bins, layers))
        burden = [np.bincount(place_of, weights=part, minlength=places) for part in work]
        busiest = np.reshape(burden, (-1, batches, per_batch)).max(axis=2).sum(axis=0)
        travel, node = arguments["travel"], arguments["node_of_place"][place_of]
        away = 0 if travel is None else travel[np.arange(sequences), np.maximum(node, 0)][node >= 0].sum()
        highest = rows.max(axis=1)
        steep = 256 * np.maximum(highest - arguments["limit"], 0)
        groups_s = ((highest + steep).sum(axis=1) + busiest).reshape(groups, -1).sum(axis=1)
        whole = groups_s.sum() if groups == 1 else (groups_s.sum() + groups * groups_s.max()) // 2
        return int(whole + away)

    assert cost == cost_of(packed) <= cost_of(place)
    # Sequences that share their rows are packed as ones with equal rows of their own.
    row = rng.integers(0, sequences, sequences).astype(np.int32)
    shared = core().pack(**arguments | {"row": row})
    own = core().pack(**arguments | {"bin_load": np.ascontiguousarray(bin_load[row])})
    assert np.array_equal(shared[0], own[0])
    assert shared[1] == own[1]


@settings(max_examples=40)
@given(seed=seeds)
def test_layers_are_priced_as_in_the_core_package_to_1e_9(seed: int) -> None:
    """Cells with their homes alone, under constants of any size."""
    rng = np.random.default_rng(seed)
    arguments, topology = random_cells(rng)
    values = {
        field.name: float(rng.choice([1e-6, 1.0, 1e9]) * rng.uniform(0.1, 10)) for field in fields(LayerCostParams)
    }
    nic_ranks = float(rng.choice([1, topology.ranks_per_domain]))
    params = LayerCostParams(**values | {"a2a_hierarchical": float(rng.integers(2)), "a2a_nic_ranks": nic_ranks})
    found = replicated(arguments | {"cost": params, "replica_slots": 0, "cross_node_slots": 0, "spare_slots": 0})
    problem = replace(problem_of(load_of(arguments["pairs"], top_k=1), topology), cost=params)
    home = ExpertPlacement.from_home_rank(arguments["home"], ep_size=topology.ep_size)
    expected = cell_seconds(make_planner("static").plan(replace(problem, current_placement=home)), problem)
    running = problem.load.tokens.any(axis=2)[:, :, None]
    np.testing.assert_allclose(found["seconds"].reshape(expected.shape) * running, expected, rtol=1e-9)


def test_the_prediction_of_a_plan_is_the_one_it_was_chosen_by(rng: np.random.Generator) -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)
    problem = problem_of(
        load_of(random_pairs(rng, (1, 4, 3, 4, 16), most=9000), 2), topology, objective="time", cross_node_slots=1
    )
    plan = MoeRlPlanner(reorder=False).plan(problem)
    arguments = {
        "pairs": problem.load.pairs,
        "tokens": problem.load.tokens,
        "home": np.ascontiguousarray(plan.placement.home_rank),
        "ranks_per_domain": 2,
        "replica_slots": 1,
        "cross_node_slots": 1,
        "spare_slots": 2,
        "cost": problem.cost,
        "search_nodes": 200,
        "tolerance_ppm": 500,
        "cross_gain_ppm": 0,
        "num_threads": 1,
        "routes": None,
        "residents": np.zeros((3, 4, 0), np.int32),
        "thorough": False,
    }
    seconds = replicated(arguments)["seconds"]
    alone = replicated({**arguments, "replica_slots": 0, "cross_node_slots": 0})["seconds"]
    running = np.repeat(problem.load.tokens.sum(axis=(0, 2)) > 0, problem.load.num_layers)
    assert plan.predicted_cost_s == pytest.approx(seconds[running].sum(), rel=1e-9)
    assert (seconds <= alone).all()
    assert plan.replicas.copies > 0


@settings(max_examples=25)
@given(topology=topologies(), seed=seeds)
def test_the_whole_plan_is_the_same_for_any_number_of_threads(topology: ClusterTopology, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (topology.num_ep_groups, 3, 2, topology.ep_size, 2 * topology.ep_size)
    problem = problem_of(
        load_of(random_pairs(rng, shape, most=200), 2), topology, objective=str(rng.choice(OBJECTIVES.names))
    )
    short = {"reorder_iterations": 320, "search_steps": 20}
    one, many = (MoeRlPlanner(**short, num_threads=threads).plan(problem) for threads in (1, 2))
    assert one.hash == many.hash


def test_wrong_buffers_are_refused_with_a_sentence() -> None:
    arguments, _ = random_cells(np.random.default_rng(3))
    groups, _, layers, ranks, experts = arguments["pairs"].shape
    wrong = {
        "negative count": {"pairs": -1 - arguments["pairs"]},
        "outside the EP group": {"home": np.full((layers, experts), ranks, np.int32)},
        "tokens must be": {"tokens": np.zeros((groups, 9, ranks), np.int64)},
        "home must be": {"home": np.zeros((layers, experts + 1), np.int32)},
        "ranks_per_domain must divide": {"ranks_per_domain": ranks + 1},
        "must not be negative": {"replica_slots": -1},
        "spare_slots must hold": {"replica_slots": 9, "spare_slots": 8},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            replicated({**arguments, **change})


def test_loads_beyond_32_bits_in_sum_are_planned_right() -> None:
    pairs = np.zeros((1, 1, 1, 4, 4), np.int32)
    pairs[0, 0, 0, :, 0] = 2**31 - 1
    arguments = {
        "pairs": pairs,
        "tokens": np.full((1, 1, 4), 2**31 - 1),
        "home": np.arange(4, dtype=np.int32)[None],
        "ranks_per_domain": 4,
        "replica_slots": 1,
        "cross_node_slots": 0,
        "spare_slots": 1,
        "cost": None,
        "search_nodes": 0,
        "tolerance_ppm": 0,
        "cross_gain_ppm": 0,
        "num_threads": 1,
        "routes": None,
        "residents": np.zeros((1, 4, 0), np.int32),
        "thorough": False,
    }
    found = replicated(arguments)
    assert found["highest_load"].tolist() == [2**31 - 1]
    assert found["source_quota"].sum() == 3 * (2**31 - 1)


def test_the_worked_cell_of_the_core_s_page() -> None:
    """moe_rl/csrc/README.md: 80 rows with copies inside nodes, 60 with one across."""
    rows = np.array([70, 30, 20, 40, 25, 15, 20, 20])
    ends = rows * np.arange(5)[:, None] // 4
    load = core().Load(np.diff(ends, axis=0).astype(np.int32)[None, None, None], np.full((1, 1, 4), 60), None, 2)
    common = {
        "home": np.repeat(np.arange(4), 2)[None],
        "residents": np.zeros((1, 4, 0), np.int32),
        "cost": None,
        **{"replica_slots": 1, "spare_slots": 2, "search_nodes": 200, "tolerance_ppm": 500, "cross_gain_ppm": 9000},
        **{"num_threads": 1, "thorough": False},
    }
    inside, across = (core().replicate(load, cross_node_slots=slots, **common) for slots in (0, 1))
    assert [found["highest_load"].tolist() for found in (inside, across)] == [[80], [60]]
    assert across["expert"].tolist() == [0, 4]
    assert (across["physical_id"] // 4).tolist() == [2, 3]
    assert across["source_quota"].tolist() == [[0, 5, 17, 18], [6, 6, 1, 7]]


def test_packing_lowers_the_work_of_the_busiest_rank_where_loads_are_equal(rng: np.random.Generator) -> None:
    sequences, batches, per_batch = 40, 3, 4
    places = batches * per_batch
    lengths = rng.integers(10, 200, sequences)
    place = rng.permutation(np.arange(sequences) % places).astype(np.int32)
    batch_of_place = (np.arange(places) // per_batch).astype(np.int32)

    def costliest(place_of: np.ndarray) -> int:
        burden = np.bincount(place_of, weights=lengths**2, minlength=places).reshape(batches, per_batch)
        return int(burden.max(axis=1).sum())

    packed, cost = core().pack(
        bin_load=np.zeros((1, 2), np.int32),
        row=np.zeros(sequences, np.int32),
        bins=2,
        tokens=lengths,
        work=lengths[None] ** 2,
        place=place,
        batch_of_place=batch_of_place,
        num_batches=batches,
        num_groups=1,
        budget=int(lengths.sum()),
        iterations=20_000,
        heat_shift=1,
        seed=0,
        travel=None,
        node_of_place=np.zeros(places, np.int32),
    )
    assert costliest(packed) == cost < costliest(place)
    assert (np.bincount(packed, minlength=places) > 0).all()
