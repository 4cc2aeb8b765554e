"""Which instance takes a token: one rule, whatever the tokens that really occur."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import HARDWARE, load_of, problem_of, random_pairs, seeds

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.load import StepLoad
from moe_rl.core.metrics import rank_load
from moe_rl.core.plan import Plan, ReplicaPlan, slot_map, split_point, token_ordinals
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


def load_from(ids: np.ndarray, experts: int) -> StepLoad:
    micro_batches, layers, ranks, tokens, _ = ids.shape
    pairs = np.zeros((1, micro_batches, layers, ranks, experts), np.int32)
    for index in np.ndindex(micro_batches, layers, ranks):
        pairs[0, *index] = np.bincount(ids[index].ravel(), minlength=experts)
    return StepLoad(pairs=pairs, tokens=np.full((1, micro_batches, ranks), tokens), top_k=TOP_K)


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
        cell = plan.replicas.slice_of(0, micro_batch, layer)
        held[plan.replicas.physical_id[cell]] = plan.replicas.expert[cell]
        assert (held[slots] == ids[micro_batch, layer, source]).all()
        rows[0, micro_batch, layer] += np.bincount(slots.ravel() // plan.placement.slots_per_rank, minlength=ranks)
    return rows


@pytest.mark.parametrize("name", ["static", "eplb-oracle", "lplb-oracle", "ultraep"])
@given(seed=seeds)
def test_tokens_arrive_where_the_metrics_count_them(name: str, seed: int) -> None:
    """Also when other tokens occur than were planned, where quotas are shares."""
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


def test_a_quota_takes_the_first_tokens_and_of_others_its_share(plan: Plan) -> None:
    """The replica takes the 6 pairs of rank 1 and none of rank 0's 6: half of the expert."""
    assert plan.replicas.expert.tolist() == [0]
    assert plan.replicas.physical_id.tolist() == [5]
    assert plan.replicas.source_quota.tolist() == [[0, 6]]
    assert plan.replicas.source_pairs.tolist() == [[6, 6]]
    assert slots_of(plan, [[0]] * 6) == [[5]] * 6
    assert slots_of(plan, [[0]] * 4) == [[5]] * 4
    assert slots_of(plan, [[0]] * 10) == [[5]] * 8 + [[0]] * 2
    assert slots_of(plan, [[0]] * 2, source_rank=0) == [[0]] * 2
    assert slots_of(plan, [[0]] * 10, source_rank=0) == [[5]] * 2 + [[0]] * 8


def test_dropped_pairs_stay_dropped_and_use_no_quota(plan: Plan) -> None:
    assert slots_of(plan, [[0, -1], [-1, 0], [1, 3]]) == [[5, -1], [-1, 5], [1, 4]]
    assert slots_of(plan, [[-1, -1]]) == [[-1, -1]]


@given(data=st.data())
def test_a_split_is_exact_as_planned_and_within_one_pair_of_its_shares(data: st.DataObject) -> None:
    """Instances in a row, the home last: cuts that never cross, cover all, and add up to the planned shares.

    With no pair planned on any source, a home has one share of one.
    """
    ranks, instances = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    quota = np.array(data.draw(st.lists(st.integers(0, 30), min_size=ranks * instances, max_size=ranks * instances)))
    quota = quota.reshape(instances, ranks)
    planned, total = quota.sum(axis=0), np.maximum(quota.sum(), 1)
    share = quota.sum(axis=1)[:, None] + (0 if quota.any() else np.arange(instances)[:, None] == instances - 1)
    actual = np.array(data.draw(st.lists(st.integers(0, 60), min_size=ranks, max_size=ranks)))
    terms = {"planned": planned, "total": total, "source": np.arange(ranks), "num_sources": ranks}
    upto, upto_share = quota.cumsum(axis=0), share.cumsum(axis=0)
    assert (split_point(upto, upto_share, actual=planned, **terms) == upto).all()
    cuts = split_point(upto, upto_share, actual=actual, **terms)
    assert (cuts[-1] == actual).all()
    assert (np.diff(cuts, axis=0, prepend=0) >= 0).all()
    kept = np.minimum(actual, planned)
    wanted = upto * kept / np.maximum(planned, 1) + upto_share * (actual - kept) / total
    assert (np.abs(cuts - wanted) < 1).all()
    # All sources alike, the roundings of the ranks cancel.
    alike = split_point(upto_share, upto_share, **{**terms, "planned": total, "actual": np.full(ranks, actual[0])})
    assert (np.abs(alike.sum(axis=1) - upto_share[:, 0] / total * actual[0] * ranks) <= 0.5 + 1e-9).all()


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
        source_pairs=np.ones((4, 4), np.int32),
        resident=np.array([False, False, False, True]),
        num_ep_groups=1,
        num_micro_batches=2,
        num_layers=1,
    )
    plan = replace(static, replicas=replicas)
    assert plan.replicas.copies == 3
    assert plan.replicas.quota.tolist() == [4, 4, 4, 4]
    assert plan.replicas.index_of_replica().tolist() == [0, 0, 1, 1]
    assert plan.replicas_per_plan == 1.5
    assert plan.cross_node_replicas_per_plan(TOPOLOGY.node_of_rank) == 0.5


@given(seed=seeds)
def test_layers_of_a_group_are_taken_out_and_joined_again(seed: int) -> None:
    rng = np.random.default_rng(seed)
    load = load_of(random_pairs(rng, (2, 3, 4, 4, 8), most=40), 2)
    replicas = make_planner("ultraep").plan(problem_of(load, replace(TOPOLOGY, num_ep_groups=2))).replicas
    names = ("expert", "physical_id", "source_quota", "source_pairs", "resident")
    for group in range(2):
        parts = [(layers, replicas.of_layers(layers, group=group)) for layers in ([2], [], [3, 0])]
        like = ReplicaPlan.empty(num_ep_groups=1, num_micro_batches=3, num_layers=4, ep_size=4)
        joined = ReplicaPlan.joined(parts, num_layers=4, like=like)
        for micro_batch, layer in np.ndindex(3, 4):
            there, here = replicas.slice_of(group, micro_batch, layer), joined.slice_of(0, micro_batch, layer)
            for name in names:
                expected = getattr(replicas, name)[there] if layer != 1 else getattr(like, name)
                assert np.array_equal(getattr(joined, name)[here], expected)


def test_replica_columns_that_do_not_fit_are_refused() -> None:
    empty = ReplicaPlan.empty(num_ep_groups=1, num_micro_batches=2, num_layers=3, ep_size=4)
    assert (empty.copies, empty.slice_of(0, 1, 2)) == (0, slice(0, 0))
    with pytest.raises(InvalidInputError, match="offsets must start at 0, end at 1 and define 6 ranges"):
        replace(empty, expert=np.zeros(1, np.int32))
    with pytest.raises(InvalidInputError, match="offsets must not decrease"):
        replace(empty, offsets=np.array([0, 1, 0, 0, 0, 0, 0]))
    one = {"offsets": np.array([0, 1, 1, 1, 1, 1, 1]), "expert": np.zeros(1, np.int32)}
    with pytest.raises(InvalidInputError, match=r"physical_id must have shape \[N\] = \[1\]"):
        replace(empty, **one)
    columns = {**one, "physical_id": np.zeros(1, np.int32), "resident": np.zeros(1, bool)}
    quotas = {"source_quota": np.full((1, 4), -1, np.int32), "source_pairs": np.zeros((1, 4), np.int32)}
    with pytest.raises(InvalidInputError, match=r"source_quota\) is negative"):
        replace(empty, **columns, **quotas)
    with pytest.raises(InvalidInputError, match="a replica takes more token-expert pairs from a source rank"):
        replace(empty, **columns, **{**quotas, "source_quota": np.ones((1, 4), np.int32)})
    with pytest.raises(InvalidInputError, match=r"source_pairs must have shape \[N, P\] = \[1, 4\]"):
        replace(empty, **columns, **{**quotas, "source_pairs": np.zeros((1, 3), np.int32)})


def test_a_plan_of_parts_that_disagree_is_refused(plan: Plan) -> None:
    other = ReplicaPlan.empty(num_ep_groups=1, num_micro_batches=2, num_layers=1, ep_size=2)
    with pytest.raises(InvalidInputError, match="layout has 1 micro-batches, but its replica plan has 2"):
        replace(plan, replicas=other)
    layers = ReplicaPlan.empty(num_ep_groups=1, num_micro_batches=1, num_layers=2, ep_size=2)
    with pytest.raises(InvalidInputError, match="placement has 1 MoE layers, but its replica plan has 2"):
        replace(plan, replicas=layers)
    outside = replace(plan.replicas, physical_id=np.array([6], np.int32))
    with pytest.raises(InvalidInputError, match=r"slots are numbered 0 to 5"):
        replace(plan, replicas=outside)
