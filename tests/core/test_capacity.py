"""The certificate of capacity: exact where routes are known, never below what can occur, and honest about its risk."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import HARDWARE, load_of, problem_of, problems, random_pairs, seeds

from moe_rl.core.capacity import Capacity
from moe_rl.core.certificate import certify
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import rank_load
from moe_rl.core.plan import Plan
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.registry import make_planner


def rows_that_fit(capacity: Capacity) -> np.ndarray:
    """[G, M, 1, 1] rows of the buffer that Megatron sizes by the factor, as its dispatcher pads and rounds."""
    fullest, fewest = capacity.tokens.max(axis=2), capacity.tokens.min(axis=2)
    padded = np.where(fullest > fewest, -(-fullest // 64) * 64, fullest)
    return (padded * capacity.top_k * capacity.factor).astype(np.int64)[..., None, None]


@settings(max_examples=40)
@given(problem=problems(), policy=st.sampled_from(["static", "ultraep", "moonep", "moe-rl"]))
def test_with_all_routes_known_the_bound_is_what_occurs(problem: PlanProblem, policy: str) -> None:
    problem = replace(problem, sequence_load=None)
    plan = make_planner(policy).plan(problem)
    capacity = certify(plan, problem.load, problem.load.tokens)
    rows = rank_load(plan, problem.load)
    assert (capacity.rows == rows).all()
    assert (capacity.worst_rows == rows).all()
    assert (rows <= rows_that_fit(capacity)).all()
    assert capacity.exceeded(rows) == []
    assert capacity.received_tokens() <= int(rows.max(initial=0))


def test_a_tail_is_padded_as_the_dispatcher_pads_it() -> None:
    """8 rows where 30 tokens meet on 32 ranks: ranks with unequal numbers of tokens get whole chunks of 64."""
    rows = np.zeros((1, 2, 1, 32), np.int64)
    rows[0, 0], rows[0, 1, 0, 5] = 256, 8
    tokens = np.stack([np.full(32, 64), np.arange(32) < 30])[None].astype(np.int64)
    capacity = Capacity(rows=rows, worst_rows=rows, tokens=tokens, top_k=4, risk=0.0, unknown_share=0.0)
    assert capacity.padded_tokens.tolist() == [[64, 64]]
    assert capacity.factor == capacity.static_factor == 1.0001
    assert (rows <= rows_that_fit(capacity)).all()
    alike = replace(capacity, tokens=np.stack([np.full(32, 64), np.ones(32)])[None].astype(np.int64))
    assert alike.factor == 2.0001  # equal numbers may go unpadded: 1 token, 4 rows, and 8 arrive
    assert alike.static_factor == 1.0001


def with_unknown(load: StepLoad, rng: np.random.Generator, *, favored: int | None = None) -> tuple[StepLoad, StepLoad]:
    """The load that planners expect, and one that occurs: every source has unknown tokens, which choose anything or
    experts `favored` .. favored + K - 1."""
    unknown = rng.integers(0, 6, load.tokens.shape)
    shape = (*load.pairs.shape[:-1],)
    extra = np.zeros(load.pairs.shape, np.int32)
    for cell in np.ndindex(*shape):
        group, micro_batch, _, source = cell
        for _ in range(int(unknown[group, micro_batch, source])):
            experts = (
                rng.choice(load.num_experts, load.top_k, replace=False)
                if favored is None
                else (favored + np.arange(load.top_k)) % load.num_experts
            )
            extra[cell][experts] += 1
    tokens = load.tokens + unknown
    return load.completed(tokens), replace(load, pairs=load.pairs + extra, tokens=tokens)


def small_problem(seed: int) -> tuple[PlanProblem, StepLoad]:
    rng = np.random.default_rng(seed)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)
    load = load_of(random_pairs(rng, (1, 2, 2, 4, 8), most=40), 2)
    return problem_of(load, topology, cross_node_slots=1, objective="imbalance"), load


@settings(max_examples=40)
@given(seed=seeds, favored=st.none() | st.integers(0, 7), policy=st.sampled_from(["static", "ultraep", "moe-rl"]))
def test_nothing_that_tokens_without_a_route_choose_exceeds_the_worst_case(
    seed: int, favored: int | None, policy: str
) -> None:
    problem, known = small_problem(seed)
    expected, occurs = with_unknown(known, np.random.default_rng(seed + 1), favored=favored)
    plan = make_planner(policy).plan(replace(problem, load=expected))
    rows = rank_load(plan, occurs)
    worst = certify(plan, known, occurs.tokens, risk=0.0)
    assert (rows <= worst.rows).all()
    quantile = certify(plan, known, occurs.tokens, risk=1e-4)
    assert (quantile.rows <= worst.rows).all()
    assert (quantile.worst_rows == worst.rows).all()
    above = rows > quantile.rows
    assert len(quantile.exceeded(rows)) == int(above.sum())  # adversarial rows are seen, each with its cell
    assert bool(above.any()) == bool(quantile.exceeded(rows))


def drawn_step(seed: int, *, ranks: int, tokens: int, share: float) -> tuple[StepLoad, StepLoad]:
    """(what is known, what occurs) of a step whose tokens choose by skewed shares of their source's own."""
    rng = np.random.default_rng(seed)
    experts, top_k, layers = 4 * ranks, 4, 3
    logits = rng.normal(0, 1.0, (layers, 1, experts)) + rng.normal(0, 0.4, (layers, ranks, experts))
    pairs, known = (np.zeros((1, 2, layers, ranks, experts), np.int32) for _ in range(2))
    hidden = rng.random((2, ranks, tokens)) < share
    for micro_batch in range(2):
        for layer in range(layers):
            noise = -np.log(-np.log(rng.random((ranks, tokens, experts))))
            chosen = np.argpartition(logits[layer][:, None] + noise, -top_k, axis=2)[..., -top_k:]
            for source in range(ranks):
                pairs[0, micro_batch, layer, source] = np.bincount(chosen[source].ravel(), minlength=experts)
                kept = chosen[source][~hidden[micro_batch, source]]
                known[0, micro_batch, layer, source] = np.bincount(kept.ravel(), minlength=experts)
    whole = StepLoad(pairs=pairs, tokens=np.full((1, 2, ranks), tokens), top_k=top_k)
    return StepLoad(pairs=known, tokens=(tokens - hidden.sum(axis=2))[None], top_k=top_k), whole


@pytest.mark.parametrize("ranks", [8, 16])
@pytest.mark.parametrize("share", [0.01, 0.05])
def test_tokens_that_choose_as_assumed_stay_below_the_quantile(ranks: int, share: float) -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=ranks, ranks_per_node=8)
    for seed in range(4):
        known, occurs = drawn_step(seed, ranks=ranks, tokens=1024, share=share)
        told = known.completed(occurs.tokens, of_known_sequences=True)
        problem = problem_of(told, topology, cross_node_slots=1, objective="imbalance")
        plan = make_planner("moe-rl").plan(problem)
        capacity = certify(plan, known, occurs.tokens, risk=1e-4)
        assert capacity.exceeded(rank_load(plan, occurs)) == []
        assert capacity.factor < capacity.worst_factor
        assert any("worst case" in sentence for sentence in capacity.sentences())


def test_no_place_is_above_its_bound_more_often_than_was_said() -> None:
    """Tokens drawn from the very shares that the bound assumes, the K choices of each systematic."""
    risk, draws, topology = 0.9, 300, ClusterTopology(hardware=HARDWARE, ep_size=8, ranks_per_node=4)
    known, occurs = drawn_step(11, ranks=8, tokens=96, share=0.2)
    told = known.completed(occurs.tokens, of_known_sequences=True)
    plan = make_planner("moe-rl").plan(problem_of(told, topology, cross_node_slots=1, objective="imbalance"))
    assert len(plan.replicas.expert) > 0
    capacity = certify(plan, known, occurs.tokens, risk=risk)
    rng, above = np.random.default_rng(0), np.zeros(capacity.rows.shape, np.int64)
    missing = occurs.tokens - known.tokens
    edges = np.cumsum(known.pairs / known.tokens[:, :, None, :, None], axis=4)  # each chance, one behind the other
    for _ in range(draws):
        pairs = known.pairs.copy()
        for group, batch, layer, source in np.ndindex(*pairs.shape[:4]):
            shift = rng.random(int(missing[group, batch, source]))
            marks = shift[:, None] + np.arange(known.top_k)  # one choice per unit: K different experts
            chosen = np.minimum(np.searchsorted(edges[group, batch, layer, source], marks.ravel(), side="right"), 31)
            pairs[group, batch, layer, source] += np.bincount(chosen, minlength=32).astype(np.int32)
        above += rank_load(plan, replace(occurs, pairs=pairs)) > capacity.rows
    expected = draws * risk / above.size
    assert above.max() <= expected + 5 * np.sqrt(expected) + 1
    assert (capacity.rows < capacity.worst_rows).any()


def test_a_rank_that_knows_nothing_gets_the_worst_case() -> None:
    problem, known = small_problem(3)
    nothing = replace(known, pairs=known.pairs * 0, tokens=known.tokens * 0)
    plan = make_planner("static").plan(problem)
    capacity = certify(plan, nothing, known.tokens, risk=0.5)
    assert (capacity.rows == capacity.worst_rows).all()


def test_an_exact_engine_bounds_ranks_by_their_domain() -> None:
    problem, known = small_problem(5)
    _, occurs = with_unknown(known, np.random.default_rng(5))
    plan: Plan = make_planner("static").plan(problem)
    capacity = certify(plan, known, occurs.tokens, risk=0.0, exact_domain=2)
    nodes = rank_load(plan, occurs).reshape(1, 2, 2, 2, 2).sum(axis=4)
    assert (-(-nodes // 2) <= capacity.rows[..., ::2]).all()


def test_sizes_that_contradict_are_refused() -> None:
    problem, known = small_problem(7)
    plan = make_planner("static").plan(problem)
    with pytest.raises(InvalidInputError, match="is less than the number of its tokens with a recorded route"):
        certify(plan, known, known.tokens - 1)
    with pytest.raises(InvalidInputError, match="recorded batch size"):
        certify(plan, replace(known, scaled=True), known.tokens + 1)
    with pytest.raises(InvalidInputError, match="risk"):
        certify(plan, known, known.tokens, risk=1.0)
