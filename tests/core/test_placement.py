"""Placements hold every expert, and a migration leads from one to the other."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import placements

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.placement import ExpertMigration, ExpertPlacement


def random_placement(rng: np.random.Generator, *, ep_size: int, per_rank: int, spare: int) -> ExpertPlacement:
    """Shuffled homes in shuffled slots; every spare slot holds a random expert or nothing."""
    num_layers, num_experts = 2, ep_size * per_rank
    slots = np.full((num_layers, ep_size, per_rank + spare), -1, np.int32)
    home = np.zeros((num_layers, num_experts), np.int32)
    for layer in range(num_layers):
        order = rng.permutation(num_experts).reshape(ep_size, per_rank)
        for rank in range(ep_size):
            extra = rng.integers(-1, num_experts, spare)
            slots[layer, rank] = rng.permutation(np.concatenate([order[rank], extra]))
            home[layer, order[rank]] = rank
    return ExpertPlacement(physical_to_logical_map=slots.reshape(num_layers, -1), home_rank=home, ep_size=ep_size)


sizes = {
    "seed": st.integers(0, 10_000),
    "ep_size": st.integers(1, 5),
    "per_rank": st.integers(1, 4),
    "spare": st.integers(0, 2),
}


@given(**sizes)
def test_a_migration_leads_from_one_placement_to_the_other(seed: int, ep_size: int, per_rank: int, spare: int) -> None:
    rng = np.random.default_rng(seed)
    old, new = (random_placement(rng, ep_size=ep_size, per_rank=per_rank, spare=spare) for _ in range(2))
    migration = ExpertMigration.between(old, new, expert_bytes=10)
    arrived = migration.apply(old)
    assert (arrived.physical_to_logical_map == new.physical_to_logical_map).all()
    assert (arrived.home_rank == new.home_rank).all()
    for layer, expert, source, destination in migration.moves():
        assert old.physical_to_logical_map[layer, source] == expert
        assert new.physical_to_logical_map[layer, destination] == expert
    ranks = [(dst // new.slots_per_rank, src // new.slots_per_rank, la, e) for la, e, src, dst in migration.moves()]
    assert migration.moved_bytes == 10 * sum(to == new.home_rank[la, e] != source for to, source, la, e in ranks)


@given(**sizes)
def test_a_move_stays_on_its_rank_when_it_can(seed: int, ep_size: int, per_rank: int, spare: int) -> None:
    rng = np.random.default_rng(seed)
    old, new = (random_placement(rng, ep_size=ep_size, per_rank=per_rank, spare=spare) for _ in range(2))
    held = old.instances_per_rank()
    migration = ExpertMigration.between(old, new, expert_bytes=1)
    for layer, expert, source, destination in migration.moves():
        rank = destination // old.slots_per_rank
        assert (source // old.slots_per_rank == rank) == bool(held[layer, rank, expert])


def test_no_move_between_equal_placements(rng: np.random.Generator) -> None:
    placement = random_placement(rng, ep_size=4, per_rank=2, spare=1)
    migration = ExpertMigration.between(placement, placement, expert_bytes=1)
    assert (len(migration.layer), len(migration.cleared), migration.moved_bytes) == (0, 0, 0)


def test_bytes_out_of_node_count_only_what_crosses() -> None:
    """Experts 0 and 2 trade places across two nodes of one rank; expert 1 and 3 stay."""
    old = ExpertPlacement.contiguous(num_layers=1, num_experts=4, ep_size=2)
    new = ExpertPlacement.from_home_rank(np.array([[1, 0, 0, 1]]), ep_size=2)
    migration = ExpertMigration.between(old, new, expert_bytes=100)
    assert migration.bytes_out_of_node(np.array([0, 1])).tolist() == [100, 100]
    assert migration.bytes_out_of_node(np.array([0, 0])).tolist() == [0, 0]


@given(**sizes)
def test_homes_and_counts_agree_with_the_map(seed: int, ep_size: int, per_rank: int, spare: int) -> None:
    placement = random_placement(np.random.default_rng(seed), ep_size=ep_size, per_rank=per_rank, spare=spare)
    home = placement.home_slot()
    for layer in range(placement.num_layers):
        row = placement.physical_to_logical_map[layer]
        for expert in range(placement.num_experts):
            assert placement.logical_replica_count()[layer, expert] == (row == expert).sum()
            on_home = [
                slot
                for slot in np.flatnonzero(row == expert)
                if slot // placement.slots_per_rank == placement.home_rank[layer, expert]
            ]
            assert home[layer, expert] == on_home[0]


def test_a_lost_expert_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="expert 1 has no slot on its home rank 1 in layer 0"):
        ExpertPlacement(
            physical_to_logical_map=np.array([[0, -1]], np.int32),
            home_rank=np.array([[0, 1]], np.int32),
            ep_size=2,
        )
    with pytest.raises(InvalidInputError, match="expert 0 has no slot on its home rank 5"):
        ExpertPlacement(
            physical_to_logical_map=np.array([[0, 1]], np.int32),
            home_rank=np.array([[5, 1]], np.int32),
            ep_size=2,
        )


def test_uneven_homes_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="home rank of exactly 2 experts"):
        ExpertPlacement.from_home_rank(np.array([[0, 0, 0, 1]]), ep_size=2)


def test_the_contiguous_placement_is_megatrons() -> None:
    placement = ExpertPlacement.contiguous(num_layers=1, num_experts=6, ep_size=3, spare_slots=1)
    assert placement.physical_to_logical_map.tolist() == [[0, 1, -1, 2, 3, -1, 4, 5, -1]]


def test_residents_stand_between_homes_and_spare_slots() -> None:
    placement = ExpertPlacement.from_home_rank(
        np.array([[0, 0, 1, 1]]), ep_size=2, spare_slots=1, resident_experts=np.array([[[3, -1], [0, 1]]])
    )
    assert placement.physical_to_logical_map.tolist() == [[0, 1, 3, -1, -1, 2, 3, 0, 1, -1]]
    assert placement.resident_experts.tolist() == [[[3, -1], [0, 1]]]
    assert placement.slots_of_kinds == (2, 2, 1)
    assert placement.home_slot().tolist() == [[0, 1, 5, 6]]


@given(data=st.data(), resident_slots=st.integers(0, 2), spare_slots=st.integers(0, 2))
def test_residents_come_and_go_with_a_migration_and_are_no_moved_homes(
    data: st.DataObject, resident_slots: int, spare_slots: int
) -> None:
    slots = {"ep_size": 4, "spare_slots": spare_slots, "resident_slots": resident_slots}
    first, other = (data.draw(placements(num_layers=2, num_experts=8, **slots)) for _ in range(2))
    apart = ExpertPlacement.from_home_rank(first.home_rank, ep_size=4, spare_slots=resident_slots + spare_slots)
    nobody = replace(apart, resident_slots=resident_slots)
    for old, new in ((first, other), (first, nobody), (nobody, first)):
        arrived = ExpertMigration.between(old, new, expert_bytes=10).apply(old)
        assert (arrived.resident_experts == new.resident_experts).all()
        assert (arrived.home_rank == new.home_rank).all()
    assert ExpertMigration.between(nobody, first, expert_bytes=10).moved_bytes == 0


@pytest.mark.parametrize(
    ("residents", "reason"),
    [
        ([[[0], [1]]], "rank 0 holds expert 0 twice"),
        ([[[2, 2], [1, 0]]], "rank 0 holds expert 2 twice"),
        ([[[4], [1]]], "holds expert 4, but expert ids must be 0 to 3"),
        ([[[2]]], r"must have shape \[MoE layers, EP ranks, slots\] = \[1, 2, any number\], got \[1, 1, 1\]"),
    ],
)
def test_residents_that_cannot_be_are_refused(residents: list[list[list[int]]], reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        ExpertPlacement.from_home_rank(np.array([[0, 0, 1, 1]]), ep_size=2, resident_experts=np.array(residents))


def test_homes_behind_residents_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="the home slot of expert 0 is among the slots for replicas"):
        ExpertPlacement(
            physical_to_logical_map=np.array([[-1, 0, 1, -1]], np.int32),
            home_rank=np.array([[0, 1]], np.int32),
            ep_size=2,
            resident_slots=1,
        )
