"""Seeded fuzzing of the C++ replica planner, thousands of cells per call, checked in numpy by what a plan promises.

`FEW` cells run by default; the slow test runs as many as the variable FUZZ_CASES says: a million in `make fuzz`. A
failure names the seed of its batch, and `check_batch(np.random.default_rng(seed))` repeats it.
"""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from least_max_rank_load import least_max_rank_load
from strategies import HARDWARE, model_spec, replicated

from moe_rl.core.cost import layer_cost_params
from moe_rl.core.native import native_core
from moe_rl.core.topology import ClusterTopology

pytestmark = pytest.mark.skipif(native_core() is None, reason="the C++ core is not built")
FEW = 20_000
MANY = int(os.environ.get("FUZZ_CASES", "100000"))


def skewed_rows(rng: np.random.Generator, cells: int, experts: int) -> np.ndarray:
    """[cells, E] rows: lognormal, Zipf, one hot expert, sparse, or nothing at all, from a handful to a million."""
    kind = rng.integers(0, 5)
    if kind == 0:
        popularity = np.exp(rng.uniform(0, 2.5) * rng.standard_normal((cells, experts)))
    elif kind == 1:
        popularity = rng.permuted(np.tile(1.0 / np.arange(1, experts + 1), (cells, 1)), axis=1)
    elif kind == 2:
        popularity = np.full((cells, experts), 1e-3)
        popularity[np.arange(cells), rng.integers(0, experts, cells)] = 1.0
    elif kind == 3:
        popularity = rng.random((cells, experts)) * (rng.random((cells, experts)) < 0.3)
    else:
        popularity = np.ones((cells, experts))
    largest = np.maximum(popularity.max(axis=1, keepdims=True), 1e-12)
    size = np.exp(rng.uniform(0, np.log(1e6), (cells, 1))) * (rng.random((cells, 1)) > 0.02)
    return rng.poisson(popularity / largest * size)


def random_batch(rng: np.random.Generator) -> dict[str, Any]:
    """Arguments of `replicate` for some hundred cells of one shape."""
    per_node, nodes = int(rng.integers(1, 9)), int(rng.integers(1, 4))
    ranks = per_node * nodes
    experts, cells = ranks * int(rng.integers(1, 5)), int(rng.integers(100, 400))
    rows = skewed_rows(rng, cells, experts)
    share = rng.dirichlet(np.full(ranks, rng.choice([0.2, 5.0])))
    upto = np.rint(np.cumsum(share)[:, None] * rows[:, None, :]).astype(np.int64)
    upto[:, -1] = rows
    pairs = np.diff(upto, axis=1, prepend=0).astype(np.int32).reshape(1, 1, cells, ranks, experts)
    slots, cross = int(rng.integers(0, 3)), int(rng.integers(0, 3)) // 2
    topology = ClusterTopology(hardware=HARDWARE, ep_size=ranks, ranks_per_node=per_node)
    model = model_spec(num_experts=experts, num_layers=1, top_k=1)
    prices = layer_cost_params(model, topology, hierarchical=bool(rng.integers(2)))
    prices = replace(prices, prefetch_hidden_s=float(rng.choice([0.0, 0.1])))
    home = rng.permuted(np.tile(np.repeat(np.arange(ranks), experts // ranks), (cells, 1)), axis=1).astype(np.int32)
    residents = random_residents(rng, home, ranks, per_node) if rng.random() < 0.4 else np.zeros((cells, ranks, 0))
    # One micro-batch of `cells` layers; tokens enough that no share exceeds one.
    tokens = np.full((1, 1, ranks), max(1, int(rows.sum(axis=1).max())), np.int64)
    routes = random_routes(rng, cells, ranks, experts) if rng.random() < 0.4 else None
    return {
        "pairs": pairs,
        "tokens": tokens,
        "routes": routes,
        "ranks_per_domain": per_node,
        "home": home,
        "replica_slots": slots,
        "cross_node_slots": cross,
        "spare_slots": slots + cross,
        "cost": prices if rng.random() < 0.3 else None,
        "search_nodes": int(rng.choice([0, 20, 200])),
        "tolerance_ppm": int(rng.choice([0, 500, 10_000])),
        "cross_gain_ppm": int(rng.choice([0, 9000])),
        "num_threads": 1,
        "residents": residents.astype(np.int32),
        "thorough": bool(rng.integers(2)),
    }


def random_residents(rng: np.random.Generator, home: np.ndarray, ranks: int, per_node: int) -> np.ndarray:
    """[cells, P, S] experts from other nodes that ranks hold for the step, on a node once at most, -1 for none."""
    slots = int(rng.integers(1, 3))
    held = np.full((len(home), ranks, slots), -1)
    for cell, first in np.ndindex(len(home), ranks // per_node):
        away = rng.permutation(np.flatnonzero(home[cell] // per_node != first))[
            : int(rng.integers(0, per_node * slots + 1))
        ]
        seats = rng.permutation(per_node * slots)[: len(away)]
        held[cell, first * per_node + seats // slots, seats % slots] = away
    return held


def random_routes(rng: np.random.Generator, layers: int, ranks: int, experts: int) -> tuple[np.ndarray, ...]:
    """Drawn tokens of one cell, whether or not they have anything to do with its loads."""
    drawn, top_k = int(rng.integers(0, 60)), int(rng.integers(1, min(experts, 8) + 1))
    popularity = rng.normal(0, 1.5, experts) + rng.gumbel(size=(layers, drawn, experts))
    routes = np.argsort(-popularity, axis=2)[:, :, :top_k].astype(np.uint16)
    source = np.sort(rng.integers(0, ranks, drawn)).astype(np.int32)
    return routes, rng.permutation(drawn).astype(np.int64), source, np.array([0, drawn])


def check_batch(rng: np.random.Generator) -> int:
    """Plan one batch and check every promise; return how many cells it had."""
    given = random_batch(rng)
    residents = given["residents"]
    pairs, home, per_node = given["pairs"][0, 0].astype(np.int64), given["home"], given["ranks_per_domain"]
    cells, ranks, experts = pairs.shape
    slots, cross = given["replica_slots"], given["cross_node_slots"]
    found = replicated(given)
    offsets, expert, slot, kind = (found[name] for name in ("offsets", "expert", "physical_id", "kind"))
    source_quota, highest = found["source_quota"], found["highest_load"]
    time_s = found["seconds"]
    alone_s = replicated({**given, "replica_slots": 0, "cross_node_slots": 0})["seconds"]
    cell = np.repeat(np.arange(cells), np.diff(offsets))
    before_spare = experts // ranks + residents.shape[2]
    per_rank = before_spare + slots + cross
    rank, within = np.divmod(slot.astype(np.int64), per_rank)
    quota, stays = source_quota.sum(axis=1, dtype=np.int64), kind == 2

    assert len(cell) == len(expert) == offsets[-1]
    assert (quota >= 1).all()
    # Slots exist, are of their kind, and serve one copy; an expert is on a rank once.
    crosses = rank // per_node != home[cell, expert] // per_node
    assert ((slot >= 0) & (rank < ranks) & (rank != home[cell, expert])).all()
    assert (crosses == (kind > 0)).all()
    seat = within[stays] - experts // ranks
    assert (residents[cell[stays], rank[stays], seat] == expert[stays]).all()
    first = before_spare + np.where(crosses, slots, 0)
    assert ((within >= first) & (within < first + np.where(crosses, cross, slots)))[~stays].all()
    assert len(np.unique(cell * (ranks * per_rank) + slot)) == len(cell)
    assert len(np.unique((cell * ranks + rank) * experts + expert)) == len(cell)
    # No source gives more than it has, and the highest rank load is as said and never above that without copies.
    taken = np.zeros_like(pairs)
    np.add.at(taken, (cell, slice(None), expert), source_quota)
    assert (taken <= pairs).all()
    load = np.zeros((cells, ranks), np.int64)
    np.add.at(load, (np.arange(cells)[:, None], home), pairs.sum(axis=1))
    for some in (stays, ~stays):
        before = load.max(axis=1)
        np.subtract.at(load, (cell[some], home[cell[some], expert[some]]), quota[some])
        np.add.at(load, (cell[some], rank[some]), quota[some])
    assert (load >= 0).all()
    assert (load.max(axis=1) <= highest).all()
    if given["cost"] is None:
        assert (highest <= before).all()
    else:
        assert np.isfinite(time_s).all()
        assert (time_s <= alone_s).all()
    return cells


def fuzz(cases: int, first_seed: int) -> None:
    done, seed = 0, first_seed
    while done < cases:
        try:
            done += check_batch(np.random.default_rng(seed))
        except Exception as error:
            raise AssertionError(f"batch {seed} fails") from error
        seed += 1


@pytest.mark.lengthy
def test_random_cells_get_plans_that_keep_every_promise() -> None:
    fuzz(FEW, first_seed=0)


@pytest.mark.slow
def test_many_random_cells_get_plans_that_keep_every_promise() -> None:
    fuzz(MANY, first_seed=1 << 20)


def gap_to_the_optimum(seed: int) -> float:
    """Share by which the planner is above the integer program: up to 4 ranks, 32 experts, R = 1, three families."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.choice([2, 3, 4]))
    experts = ranks * int(rng.integers(1, 32 // ranks + 1))
    shares = (
        np.exp(0.9 * rng.standard_normal(experts)),
        rng.permutation(1.0 / np.arange(1, experts + 1)),
        rng.dirichlet(np.full(experts, 0.3)),
    )[seed % 3]
    rows = rng.multinomial(4096 * ranks, shares / shares.sum())
    home = np.repeat(np.arange(ranks), experts // ranks).astype(np.int32)
    pairs = np.zeros((1, 1, 1, ranks, experts), np.int32)
    pairs[0, 0, 0, 0] = rows
    copies = native_core().replicate(
        native_core().Load(pairs, np.full((1, 1, ranks), 4096 * ranks), None, ranks),
        home=home[None],
        replica_slots=1,
        cross_node_slots=0,
        spare_slots=1,
        cost=None,
        search_nodes=200,
        tolerance_ppm=500,
        cross_gain_ppm=0,
        num_threads=1,
        residents=np.zeros((1, ranks, 0), np.int32),
        thorough=False,
    )
    load = np.bincount(home, weights=rows, minlength=ranks)
    quota = copies["source_quota"].sum(axis=1)
    np.subtract.at(load, home[copies["expert"]], quota)
    np.add.at(load, copies["physical_id"] // (experts // ranks + 1), quota)
    return float(load.max() / least_max_rank_load(rows, home, ep_size=ranks, slots=1) - 1.0)


def check_gaps(seeds: range) -> None:
    gaps = [gap_to_the_optimum(seed) for seed in seeds]
    # The program's own relative gap is 1e-4, and an integer plan may be a row above a fractional one.
    assert min(gaps) > -2e-3
    assert np.mean(gaps) <= 1e-3
    assert max(gaps) <= 1e-2


@pytest.mark.lengthy
def test_replicas_are_near_the_integer_programming_optimum() -> None:
    check_gaps(range(25))


@pytest.mark.slow
def test_replicas_are_near_the_integer_programming_optimum_on_a_hundred_instances() -> None:
    check_gaps(range(100))
