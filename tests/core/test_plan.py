"""Which instance takes a token: one rule, whatever the tokens that really occur."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import HARDWARE, load_of, problem_of, random_pairs, seeds

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.load import ExpertLoad
from moe_rl.core.metrics import rank_load
from moe_rl.core.plan import Plan, ReplicaPlan, slot_map, token_ordinals
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.registry import make_planner

TOPOLOGY = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)
TOP_K = 2


def routed(rng: np.random.Generator, shape: tuple[int, int, int, int], experts: int) -> np.ndarray:
    """[M, L, P, T, K] distinct skewed ids of every token of every source rank."""
    micro_batches, layers, ranks, tokens = shape
    popularity = rng.normal(0.0, 1.5, (micro_batches, layers, 1, 1, experts))
    score = popularity + rng.gumbel(size=(micro_batches, layers, ranks, tokens, experts))
    return np.argsort(-score, axis=-1)[..., :TOP_K]


def load_from(ids: np.ndarray, experts: int) -> ExpertLoad:
    micro_batches, layers, ranks, tokens, _ = ids.shape
    pairs = np.zeros((1, micro_batches, layers, ranks, experts), np.int32)
    for index in np.ndindex(micro_batches, layers, ranks):
        pairs[0, *index] = np.bincount(ids[index].ravel(), minlength=experts)
    return ExpertLoad(pairs=pairs, tokens=np.full((1, micro_batches, ranks), tokens), top_k=TOP_K)


def rows_by_slot_map(plan: Plan, ids: np.ndarray) -> np.ndarray:
    """[1, M, L, P] rows of every rank when each source rank follows `slot_map`."""
    micro_batches, layers, ranks, _, _ = ids.shape
    rows = np.zeros((1, micro_batches, layers, ranks), np.int64)
    for micro_batch, layer, source in np.ndindex(micro_batches, layers, ranks):
        slots = slot_map(
            plan,
            group=0,
            micro_batch=micro_batch,
            layer=layer,
            source_rank=source,
            routed_experts=ids[micro_batch, layer, source],
        )
        held = plan.placement.physical_to_logical_map[layer].copy()
        cell = plan.replicas.cell(0, micro_batch, layer)
        held[plan.replicas.physical_id[cell]] = plan.replicas.expert[cell]
        assert (held[slots] == ids[micro_batch, layer, source]).all()
        rows[0, micro_batch, layer] += np.bincount(slots.ravel() // plan.placement.slots_per_rank, minlength=ranks)
    return rows


@pytest.mark.parametrize("name", ["static", "eplb-oracle", "lplb-oracle", "ultraep"])
@given(seed=seeds)
def test_tokens_arrive_where_the_metrics_count_them(name: str, seed: int) -> None:
    """Also when other tokens occur than were planned: what quotas do not cover goes home."""
    rng = np.random.default_rng(seed)
    planned, occurring = (routed(rng, (2, 2, 4, 9), 8) for _ in range(2))
    plan = make_planner(name).plan(problem_of(load_from(planned, 8), TOPOLOGY, replica_slots=2))
    for ids in (planned, occurring):
        assert (rows_by_slot_map(plan, ids) == rank_load(plan, load_from(ids, 8))).all()


@given(ids=st.lists(st.integers(0, 4), max_size=30).map(lambda ids: np.array(ids, np.int64).reshape(-1, 1)))
def test_ordinals_count_earlier_tokens_of_the_expert(ids: np.ndarray) -> None:
    flat = ids.ravel().tolist()
    assert token_ordinals(ids).ravel().tolist() == [flat[:i].count(e) for i, e in enumerate(flat)]


@pytest.fixture
def plan() -> Plan:
    """Expert 0 is hot on rank 0 of two; ultraep copies it to rank 1 for the one micro-batch."""
    pairs = np.zeros((1, 1, 1, 2, 4), np.int32)
    pairs[0, 0, 0, :, 0] = 6
    pairs[0, 0, 0, :, 1] = [1, 0]
    topology = ClusterTopology(hardware=HARDWARE, ep_size=2, ranks_per_node=2)
    return make_planner("ultraep", tolerance=0.0).plan(problem_of(load_of(pairs, 1), topology))


def slots_of(plan: Plan, ids: list[list[int]], source_rank: int = 1, **options: object) -> list[list[int]]:
    given_ids = np.array(ids, np.int64)
    return slot_map(
        plan, group=0, micro_batch=0, layer=0, source_rank=source_rank, routed_experts=given_ids, **options
    ).tolist()


def test_a_quota_takes_the_first_tokens_and_home_the_rest(plan: Plan) -> None:
    assert plan.replicas.expert.tolist() == [0]
    assert plan.replicas.physical_id.tolist() == [5]
    assert plan.replicas.source_quota.tolist() == [[0, 6]]
    assert slots_of(plan, [[0]] * 8) == [[5]] * 6 + [[0]] * 2
    assert slots_of(plan, [[0]] * 2, source_rank=0) == [[0]] * 2


def test_dropped_pairs_stay_dropped_and_use_no_quota(plan: Plan) -> None:
    assert slots_of(plan, [[0, -1], [-1, 0], [1, 3]]) == [[5, -1], [-1, 5], [1, 4]]
    assert slots_of(plan, [[-1, -1]]) == [[-1, -1]]


def test_rows_without_a_route_go_home_and_use_no_quota(plan: Plan) -> None:
    """Seven tokens of expert 0; the third holds no route, so that all six others find room in the quota."""
    valid = np.array([True, True, False, True, True, True, True])
    assert slots_of(plan, [[0]] * 7, valid=valid) == [[5], [5], [0], [5], [5], [5], [5]]


def test_no_tokens_give_no_slots(plan: Plan) -> None:
    empty = np.zeros((0, 2), np.int64)
    assert slot_map(plan, group=0, micro_batch=0, layer=0, source_rank=0, routed_experts=empty).shape == (0, 2)


@given(seed=seeds)
def test_the_hash_changes_with_whatever_moves_a_token(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pairs = rng.integers(1, 200, (1, 2, 2, 4, 8)).astype(np.int32)
    pairs[..., 0] += 500
    plan = make_planner("ultraep").plan(problem_of(load_of(pairs, 2), TOPOLOGY))
    quota = plan.replicas.source_quota.copy()
    quota[0, 0] += 1
    other_quota = replace(plan, replicas=replace(plan.replicas, source_quota=quota))
    other_order = replace(plan, layout=replace(plan.layout, order=plan.layout.order[::-1].copy()))
    assert len({plan.hash, other_quota.hash, other_order.hash}) == 3
    assert replace(plan, solve_time_s=9.0, notes=("slow",)).hash == plan.hash


def test_copies_and_cross_node_copies_are_counted_per_cell() -> None:
    """Three copies in two cells, one of them from the other node; the resident one is no copy."""
    pairs = random_pairs(np.random.default_rng(0), (1, 2, 1, 4, 8), most=20)
    static = make_planner("static").plan(problem_of(load_of(pairs, 2), TOPOLOGY, replica_slots=1))
    replicas = ReplicaPlan(
        offsets=np.array([0, 2, 4]),
        expert=np.array([0, 2, 6, 0], np.int32),
        physical_id=np.array([5, 11, 8, 5], np.int32),
        source_quota=np.ones((4, 4), np.int32),
        resident=np.array([False, False, False, True]),
        num_ep_groups=1,
        num_micro_batches=2,
        num_layers=1,
    )
    plan = replace(static, replicas=replicas)
    assert plan.replicas.copies == 3
    assert plan.replicas.quota.tolist() == [4, 4, 4, 4]
    assert plan.replicas.cell_of_replica().tolist() == [0, 0, 1, 1]
    assert plan.replicas_per_plan == 1.5
    assert plan.cross_node_replicas_per_plan(TOPOLOGY.node_of_rank) == 0.5


def test_replica_columns_that_do_not_fit_are_refused() -> None:
    empty = ReplicaPlan.empty(num_ep_groups=1, num_micro_batches=2, num_layers=3, ep_size=4)
    assert (empty.copies, empty.cell(0, 1, 2)) == (0, slice(0, 0))
    with pytest.raises(InvalidInputError, match="offsets must run from 0 to 1 over 6"):
        replace(empty, expert=np.zeros(1, np.int32))
    with pytest.raises(InvalidInputError, match="offsets must not decrease"):
        replace(empty, offsets=np.array([0, 1, 0, 0, 0, 0, 0]))
    one = {"offsets": np.array([0, 1, 1, 1, 1, 1, 1]), "expert": np.zeros(1, np.int32)}
    with pytest.raises(InvalidInputError, match=r"physical_id must be \[N\] = \[1\]"):
        replace(empty, **one)
    columns = {**one, "physical_id": np.zeros(1, np.int32), "resident": np.zeros(1, bool)}
    with pytest.raises(InvalidInputError, match="a quota is negative"):
        replace(empty, **columns, source_quota=np.full((1, 4), -1, np.int32))


def test_a_plan_of_parts_that_disagree_is_refused(plan: Plan) -> None:
    other = ReplicaPlan.empty(num_ep_groups=1, num_micro_batches=2, num_layers=1, ep_size=2)
    with pytest.raises(InvalidInputError, match="layout has 1 micro-batches, the replica plan 2"):
        replace(plan, replicas=other)
    layers = ReplicaPlan.empty(num_ep_groups=1, num_micro_batches=1, num_layers=2, ep_size=2)
    with pytest.raises(InvalidInputError, match="placement has 1 layers, the replica plan 2"):
        replace(plan, replicas=layers)
    outside = replace(plan.replicas, physical_id=np.array([6], np.int32))
    with pytest.raises(InvalidInputError, match=r"slot outside 0 \.\. 5"):
        replace(plan, replicas=outside)
