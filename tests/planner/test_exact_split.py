"""The exact split is the optimum, by enumeration, by the cut formula and by integer programming."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import seeds

from moe_rl.core.errors import InvalidInputError
from moe_rl.planner.exact_split import exact_split, holders_of, least_max_rank_loads


def random_instances(rng: np.random.Generator, ranks: int, experts: int, spare: int) -> np.ndarray:
    """[P, E] True where a rank holds an expert: one home each, and up to `spare` more experts per rank."""
    holds = np.zeros((ranks, experts), bool)
    holds[rng.integers(0, ranks, experts), np.arange(experts)] = True
    for rank in range(ranks):
        holds[rank, rng.integers(0, experts, rng.integers(0, spare + 1))] = True
    return holds


def least_by_cuts(loads: np.ndarray, holds: np.ndarray) -> int:
    """Max over sets of ranks of the load that cannot leave the set, per rank, rounded up (max-flow = min-cut)."""
    ranks = len(holds)
    best = 0
    for size in range(1, ranks + 1):
        for chosen in itertools.combinations(range(ranks), size):
            outside = [rank for rank in range(ranks) if rank not in chosen]
            inside_only = ~holds[outside].any(axis=0)
            best = max(best, -(-int(loads[inside_only].sum()) // size))
    return best


@given(seed=seeds, ranks=st.integers(1, 6), experts=st.integers(1, 12), spare=st.integers(0, 3))
def test_no_split_is_better(seed: int, ranks: int, experts: int, spare: int) -> None:
    rng = np.random.default_rng(seed)
    holds = random_instances(rng, ranks, experts, spare)
    loads = np.where(rng.random(experts) < 0.2, 0, rng.geometric(0.02, experts))
    split = exact_split(loads, holders_of(holds), ranks)
    assert (split.rows >= 0).all()
    assert (split.rows.sum(axis=0) == loads).all()
    assert not split.rows[~holds].any()
    assert split.rows.sum(axis=1).max() == split.max_rank_load == least_by_cuts(loads, holds)


def every_split(load: int, ranks: list[int], num_ranks: int) -> list[tuple[int, ...]]:
    """All ways to put `load` pairs on `ranks`, as rows of all ranks."""
    found = []
    for cuts in itertools.combinations_with_replacement(range(load + 1), len(ranks) - 1):
        parts = np.diff([0, *cuts, load])
        row = np.zeros(num_ranks, int)
        row[ranks] = parts
        found.append(tuple(row.tolist()))
    return found


@settings(max_examples=30)
@given(seed=seeds, experts=st.integers(1, 8))
def test_enumeration_of_every_split_finds_nothing_better(seed: int, experts: int) -> None:
    ranks = 3
    rng = np.random.default_rng(seed)
    holds = random_instances(rng, ranks, experts, 1)
    loads = rng.integers(0, 5, experts)
    reachable = {(0,) * ranks}
    for expert, held_by in enumerate(holders_of(holds)):
        choices = every_split(int(loads[expert]), held_by, ranks)
        reachable = {tuple(map(sum, zip(a, b, strict=True))) for a in reachable for b in choices}
    assert exact_split(loads, holders_of(holds), ranks).max_rank_load == min(map(max, reachable))


@given(seed=seeds)
def test_doubled_loads_double_the_optimum_up_to_rounding(seed: int) -> None:
    """The optimum is a ratio rounded up: ceil(2x) is 2 ceil(x) or one less."""
    rng = np.random.default_rng(seed)
    holders = holders_of(random_instances(rng, 4, 8, 2))
    loads = rng.integers(0, 100, 8)
    once, twice = (exact_split(factor * loads, holders, 4).max_rank_load for factor in (1, 2))
    assert 2 * once - 1 <= twice <= 2 * once


def test_all_tokens_on_one_expert_spread_over_its_holders() -> None:
    assert exact_split(np.array([10, 0]), [[0, 2], [1]], 3).rows.sum(axis=1).tolist() == [5, 0, 5]
    assert exact_split(np.array([0, 0]), [[0], [1]], 2).max_rank_load == 0


def test_a_chain_of_three_ranks_is_found() -> None:
    """Rank 0 shares nothing with rank 2: it passes pairs to rank 1, which passes its own on to rank 2."""
    split = exact_split(np.array([9, 7, 8, 0]), [[0, 1], [0], [1, 2], [2]], 3)
    assert split.max_rank_load == 8
    assert split.rows[0, 0] == 1


def test_an_expert_without_holder_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="expert 1 has 3 token-expert pairs, but no rank holds this expert"):
        exact_split(np.array([1, 3]), [[0], []], 1)
    assert exact_split(np.array([1, 0]), [[0], []], 1).max_rank_load == 1


@given(st.data())
def test_the_core_and_python_find_the_same_least_loads(data: st.DataObject) -> None:
    ranks, cells = data.draw(st.integers(1, 6)), data.draw(st.lists(st.integers(0, 5), max_size=4))
    holders = [sorted(data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=4))) for _ in range(sum(cells))]
    pairs = np.array(data.draw(st.lists(st.integers(0, 99), min_size=sum(cells), max_size=sum(cells))), np.int64)
    fixed = np.array(data.draw(st.lists(st.integers(0, 50), min_size=len(cells) * ranks, max_size=len(cells) * ranks)))
    given_cells = (
        fixed.astype(np.int64).reshape(len(cells), ranks),
        np.cumsum([0, *cells]),
        pairs,
        np.cumsum([0, *map(len, holders)]),
        np.array([rank for held in holders for rank in held], np.int32),
    )
    by_core = least_max_rank_loads(*given_cells)
    with pytest.MonkeyPatch.context() as without:
        without.setenv("MOE_RL_NATIVE", "0")
        np.testing.assert_array_equal(by_core, least_max_rank_loads(*given_cells))
