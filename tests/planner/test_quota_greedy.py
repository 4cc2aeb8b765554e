"""The batched quota greedy equals the one written from its text, and keeps between the optimum and the start."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from least_max_rank_load import least_max_rank_load
from strategies import seeds

from moe_rl.planner.quota_greedy import NodeReplicas, replicate_by_quota

Copies = list[tuple[int, int, int, int]]


def literal_attempt(loads: np.ndarray, target: int, slots: int, min_tokens: int) -> Copies | None:
    """Feasibility test "quota greedy", one node, one step at a time: (donor, expert, receiver, pairs)."""
    ranks, per_rank = loads.shape
    load = loads.sum(axis=1)
    free, slack = [slots] * ranks, [max(0, target - int(x)) for x in load]
    copies: Copies = []
    for donor in sorted(range(ranks), key=lambda r: -load[r]):
        need = max(0, int(load[donor]) - target)
        for expert in sorted(range(per_rank), key=lambda x: -loads[donor, x]):
            available = max(0, int(loads[donor, expert]) - 1)
            hosts = {c[2] for c in copies if c[:2] == (donor, expert)}
            while need > 0 and available > 0:
                open_ = [r for r in range(ranks) if r != donor and free[r] and slack[r] > 0 and r not in hosts]
                if not open_:
                    break
                receiver = max(open_, key=lambda r: slack[r])
                amount = min(need, available, slack[receiver])
                if amount < min_tokens and amount < need:
                    break
                copies.append((donor, expert, receiver, amount))
                hosts.add(receiver)
                slack[receiver] -= amount
                free[receiver] -= 1
                need -= amount
                available -= amount
        if need > 0:
            return None
    return copies


def literal_search(loads: np.ndarray, slots: int, tolerance: float, min_tokens: int) -> Copies:
    """Bisection over the target, one node."""
    low, high = -(-int(loads.sum()) // len(loads)), int(loads.sum(axis=1).max())
    close = max(1, int(tolerance * low))
    if slots == 0 or high <= low + close:
        return []
    best: Copies = []
    target = low
    while high - low > close:
        found = literal_attempt(loads, target, slots, min_tokens)
        if found is not None:
            best, high = found, target
        else:
            low = target
        target = (low + high) // 2
    return best


def random_nodes(seed: int, problems: int, ranks: int, per_rank: int) -> np.ndarray:
    """[B, g, X] skewed loads with empty experts and, in the first problem, all pairs on one expert."""
    rng = np.random.default_rng(seed)
    loads = np.exp(rng.normal(3.0, 1.3, (problems, ranks, per_rank))).astype(np.int64)
    loads[rng.random(loads.shape) < 0.15] = 0
    loads[0] = 0
    loads[0, rng.integers(ranks), rng.integers(per_rank)] = 1000
    return loads


def copies_of(found: NodeReplicas, problem: int) -> Copies:
    receiver, slot = np.nonzero(found.donor[problem] >= 0)
    columns = (found.donor, found.expert, None, found.quota)
    rows = [receiver if c is None else c[problem, receiver, slot] for c in columns]
    return sorted(zip(*(row.tolist() for row in rows), strict=True))


@given(
    seed=seeds,
    ranks=st.integers(1, 6),
    per_rank=st.integers(1, 4),
    slots=st.integers(0, 2),
    min_tokens=st.sampled_from([0, 5, 40]),
)
def test_the_batched_greedy_equals_the_literal_one(
    seed: int, ranks: int, per_rank: int, slots: int, min_tokens: int
) -> None:
    loads = random_nodes(seed, 4, ranks, per_rank)
    found = replicate_by_quota(loads, slots=slots, tolerance=0.01, min_tokens=min_tokens)
    for problem in range(len(loads)):
        expected = sorted(literal_search(loads[problem], slots, 0.01, min_tokens))
        assert copies_of(found, problem) == expected


def highest_after(loads: np.ndarray, found: NodeReplicas, problem: int) -> int:
    load = loads[problem].sum(axis=1)
    for donor, _, receiver, amount in copies_of(found, problem):
        load[donor] -= amount
        load[receiver] += amount
    return int(load.max())


@settings(max_examples=15)
@given(seed=seeds, slots=st.integers(1, 2))
def test_it_lies_between_the_integer_programming_optimum_and_the_start(seed: int, slots: int) -> None:
    loads = random_nodes(seed, 3, ranks=3, per_rank=2)
    found = replicate_by_quota(loads, slots=slots, tolerance=0.0)
    for problem in range(len(loads)):
        optimum = least_max_rank_load(loads[problem].ravel(), np.repeat(np.arange(3), 2), ep_size=3, slots=slots)
        highest = highest_after(loads, found, problem)
        assert optimum * (1 - 1e-3) <= highest <= loads[problem].sum(axis=1).max()


def test_two_ranks_share_one_hot_expert_evenly() -> None:
    loads = np.array([[[90], [10]]])
    found = replicate_by_quota(loads, slots=1, tolerance=0.0)
    assert copies_of(found, 0) == [(0, 0, 1, 40)]


@pytest.mark.parametrize("shape", [(0, 4, 2), (3, 1, 2)])
def test_nothing_to_do_is_no_replica(shape: tuple[int, int, int]) -> None:
    found = replicate_by_quota(np.full(shape, 7), slots=1, tolerance=0.01)
    assert (found.donor == -1).all()
