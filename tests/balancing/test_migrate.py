"""Experts move with their optimizer state: every number is where its expert is, whatever the cuts and the rounds."""

from collections.abc import Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from thread_ranks import ThreadRanks

from moe_rl.balancing import migrate
from moe_rl.balancing.homes import ExpertHomes, GradientsWaitError
from moe_rl.balancing.migrate import ALIGNMENT_BYTES, ExpertGrid, ReorderError
from moe_rl.balancing.schedule import home_experts
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.placement import ExpertPlacement

GRID = np.array([[3, 1], [0, 2]])
"""[EP group, EP rank] -> rank of the run."""
EP_SIZE, LAYERS, EXPERTS = 2, 3, 8
PER_RANK = EXPERTS // EP_SIZE
OWN_LAYERS = (0, 2)
"""Layer 1 is on another pipeline stage."""
SIZES = (7, 12, 1)
"""Elements of an expert's parameters."""
KINDS = 2
"""State tensors of a parameter: fp32, and int16."""


def values(layer: int, expert: int, index: int, kind: int = -1) -> Any:
    """Return the elements of one parameter (kind -1) or state tensor of one expert: unlike those of any other."""
    start = ((layer * EXPERTS + expert) * len(SIZES) + index) * (KINDS + 1) + kind + 1
    return torch.arange(SIZES[index]) + 20 * start


def shards_of(slot: int, index: int) -> list[tuple[int, int]]:
    """Two expert-DP ranks hold a parameter's state, cut at another place in every slot; some hold nothing."""
    cut = (slot * 5 + index * 3) % (SIZES[index] + 1)
    return [(0, cut), (cut, SIZES[index])]


@dataclass
class Experts:
    """One layer's experts on one rank, with their optimizer state."""

    layer: int
    group: int
    ep_rank: int
    num_local_experts: int = PER_RANK
    parameters: list[list[Any]] = field(default_factory=list)
    states: dict[int, list[list[Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for slot in range(PER_RANK):
            expert = self.ep_rank * PER_RANK + slot
            of_slot = [torch.nn.Parameter(values(self.layer, expert, index).float()) for index in range(len(SIZES))]
            self.parameters.append(of_slot)
            for index, parameter in enumerate(of_slot):
                start, stop = shards_of(slot, index)[self.group]
                numbers = [values(self.layer, expert, index, kind)[start:stop] for kind in range(KINDS)]
                first = numbers[0].float()
                # A copy of the first stands at another place, as Megatron keeps one of an offloaded master.
                places = [[first, first.clone()], [numbers[1].to(torch.int16)]] if start < stop else []
                self.states[id(parameter)] = places

    def parameters_of(self, slot: int) -> list[Any]:
        return self.parameters[slot]

    def held(self) -> list[int]:
        """Return which expert is in every slot; fail unless it is there whole, with the state of its shard."""
        experts = []
        for of_slot in self.parameters:
            expert = int(of_slot[0][0]) // (20 * (KINDS + 1) * len(SIZES)) - self.layer * EXPERTS
            for index, parameter in enumerate(of_slot):
                assert torch.equal(parameter.detach(), values(self.layer, expert, index).float())
            experts.append(expert)
        return experts

    def states_are_of(self, experts: Sequence[int]) -> bool:
        """Return whether the state in every slot is that of these experts, in all its places."""
        return all(
            torch.equal(
                place.long(), values(self.layer, expert, index, kind)[slice(*shards_of(slot, index)[self.group])]
            )
            for slot, expert in enumerate(experts)
            for index, parameter in enumerate(self.parameters[slot])
            for kind, places in enumerate(self.states[id(parameter)])
            for place in places
        )


@dataclass
class State:
    """The optimizer's state of all layers of a rank."""

    layers: list[Experts]
    fails: bool = False

    def _slot_of(self, parameter: Any) -> tuple[int, int]:
        for experts in self.layers:
            for slot, of_slot in enumerate(experts.parameters):
                for index, own in enumerate(of_slot):
                    if own is parameter:
                        return slot, index
        raise AssertionError("a parameter of another rank")

    def shards(self, parameter: Any) -> list[tuple[int, int]]:
        return shards_of(*self._slot_of(parameter))

    def tensors(self, parameter: Any) -> list[list[Any]]:
        if self.fails:
            raise ZeroDivisionError("the state is gone")
        return next(e.states[id(parameter)] for e in self.layers if id(parameter) in e.states)


def place_of(rank: int) -> tuple[int, int]:
    group, ep_rank = np.argwhere(rank == GRID)[0].tolist()
    return group, ep_rank


def grid() -> ExpertGrid:
    return ExpertGrid(grid=GRID, grid_group="the grid", device=torch.device("cpu"))


def layers_of(rank: int) -> list[Experts]:
    group, ep_rank = place_of(rank)
    return [Experts(layer=layer, group=group, ep_rank=ep_rank) for layer in OWN_LAYERS]


def arrangements(seed: int, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.stack([rng.permutation(EXPERTS) for _ in OWN_LAYERS]).astype(np.int32) for _ in range(count)]


START = np.tile(np.arange(EXPERTS, dtype=np.int32), (len(OWN_LAYERS), 1))


def bytes_of_expert(*, with_state: bool) -> int:
    """Most that one expert can bring to a rank, every piece aligned."""

    def aligned(num_bytes: int) -> int:
        return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    # A shard may arrive in as many pieces as there are expert-DP ranks.
    kinds = KINDS if with_state else 0
    return sum(aligned(4 * size) + kinds * (4 * size + len(GRID) * ALIGNMENT_BYTES) for size in SIZES)


def received_bytes(rank: int, before: np.ndarray, after: np.ndarray, *, with_state: bool) -> int:
    """Return what a rank receives from others if every expert travels once."""
    group, ep_rank = place_of(rank)
    total = 0
    for old, new in zip(before, after, strict=True):
        for slot in range(PER_RANK):
            source = int(np.flatnonzero(old == new[ep_rank * PER_RANK + slot])[0])
            source_rank, source_slot = divmod(source, PER_RANK)
            if source == ep_rank * PER_RANK + slot:
                continue
            total += 4 * sum(SIZES) * (source_rank != ep_rank)
            for index in range(len(SIZES)) if with_state else ():
                there = set(range(*shards_of(slot, index)[group]))
                for other in range(len(GRID)):
                    shared = there & set(range(*shards_of(source_slot, index)[other]))
                    total += 6 * len(shared) * ((other, source_rank) != (group, ep_rank))
    return total


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("scratch_experts", [0, 3, 100])
def test_everything_of_an_expert_moves_together(scratch_experts: int, with_state: bool) -> None:
    ranks, steps = ThreadRanks(GRID.size), [START, *arrangements(scratch_experts, 2), START]
    most = max(2, scratch_experts) * bytes_of_expert(with_state=with_state)
    scratch = []

    def step(rank: int) -> list[tuple[int, int]]:
        layers, counts = layers_of(rank), []
        state = State(layers) if with_state else None
        for before, after in pairwise(steps):
            committed: list[np.ndarray] = [before]

            def commit(arrangement: np.ndarray, committed: list[np.ndarray] = committed) -> None:
                _, ep_rank = place_of(rank)
                committed.append(arrangement)
                for experts, slots in zip(layers, arrangement, strict=True):
                    own = slots[ep_rank * PER_RANK : (ep_rank + 1) * PER_RANK].tolist()
                    assert experts.held() == own
                    assert not with_state or experts.states_are_of(own)

            received = migrate.migrate(
                before, after, layers, groups=grid(), state=state, max_scratch_bytes=most, on_commit=commit
            )
            np.testing.assert_array_equal(committed[-1], after)
            counts.append((len(committed) - 1, received))
        return counts

    make = migrate._scratch

    def measured(*args: Any, **words: Any) -> Any:
        memory = make(*args, **words)
        scratch.append(memory.nbytes)
        return memory

    with patch.object(migrate, "gather", ranks.gather), patch.object(migrate, "_scratch", measured):
        found = ranks.run(step)
    assert not [error for error in found if isinstance(error, BaseException)], found
    assert 0 < max(scratch) <= most
    for rank, counts in enumerate(found):
        for (num_rounds, received), (before, after) in zip(counts, pairwise(steps), strict=True):
            expected = received_bytes(rank, before, after, with_state=with_state)
            if num_rounds == 1:
                assert received == expected
            else:
                assert received >= expected, "an expert that waits on the way travels twice"
    rounds = [num_rounds for num_rounds, _ in found[0]]
    assert (max(rounds) == 1) == (scratch_experts == 100), "one round where everything fits"


def test_nothing_to_move_is_nothing_received() -> None:
    ranks = ThreadRanks(GRID.size)

    def step(rank: int) -> int:
        layers = layers_of(rank)
        return migrate.migrate(
            START, START, layers, groups=grid(), state=State(layers), max_scratch_bytes=0, on_commit=pytest.fail
        )

    with patch.object(migrate, "gather", ranks.gather):
        assert ranks.run(step) == [0] * GRID.size


def lost_state(state: State, rank: int) -> None:
    state.fails = True


def fewer_tensors(state: State, rank: int) -> None:
    for experts in state.layers:
        experts.states = {key: places[:1] for key, places in experts.states.items()}


def no_tensors(state: State, rank: int) -> None:
    for experts in state.layers:
        experts.states = {key: [] for key in experts.states}


def one_that_differs(state: State, rank: int) -> None:
    experts = state.layers[-1]
    key = next(key for key, places in experts.states.items() if places)
    experts.states[key] = experts.states[key][:1]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (lost_state, "a rank could not find its optimizer state"),
        (fewer_tensors, r"different numbers of state tensors for expert parameters: \[1, 2\]"),
        (no_tensors, r"different numbers of state tensors for expert parameters: \[0, 2\]"),
        (one_that_differs, r"different numbers of state tensors for expert parameters: \[1, 2\]"),
    ],
)
@pytest.mark.parametrize("failing", [0, 3])
def test_a_state_that_cannot_move_is_refused_on_all_ranks_and_nothing_has_moved(
    fault: Any, why: str, failing: int
) -> None:
    ranks, target = ThreadRanks(GRID.size), arrangements(5, 1)[0]

    def step(rank: int) -> str:
        layers = layers_of(rank)
        state = State(layers)
        if rank == failing:
            fault(state, rank)
        with pytest.raises(ReorderError, match=why) as refused:
            migrate.migrate(
                START, target, layers, groups=grid(), state=state, max_scratch_bytes=0, on_commit=pytest.fail
            )
        own = list(range(place_of(rank)[1] * PER_RANK, (place_of(rank)[1] + 1) * PER_RANK))
        assert [experts.held() for experts in layers] == [own, own]
        return str(refused.value)

    with patch.object(migrate, "gather", ranks.gather):
        said = ranks.run(step)
    assert not [error for error in said if isinstance(error, BaseException)], said
    assert all("no expert was moved" in words for words in said)
    if fault is lost_state:
        assert ["the state is gone" in words for words in said] == [rank == failing for rank in range(GRID.size)]


def test_a_rank_without_memory_stops_all_before_anything_moves() -> None:
    ranks, target, make = ThreadRanks(GRID.size), arrangements(6, 1)[0], migrate._scratch

    def scratch(*args: Any, **words: Any) -> Any:
        if ranks.rank() == 2:
            raise MemoryError("no room")
        return make(*args, **words)

    def step(rank: int) -> list[list[int]]:
        layers = layers_of(rank)
        with pytest.raises(ReorderError, match="no expert was moved, because a rank could not prepare the move"):
            migrate.migrate(
                START, target, layers, groups=grid(), state=None, max_scratch_bytes=0, on_commit=pytest.fail
            )
        return [experts.held() for experts in layers]

    with patch.object(migrate, "gather", ranks.gather), patch.object(migrate, "_scratch", scratch):
        for rank, held in enumerate(ranks.run(step)):
            first = place_of(rank)[1] * PER_RANK
            assert held == [list(range(first, first + PER_RANK))] * 2


def test_a_connection_that_breaks_names_the_round_and_commits_nothing() -> None:
    ranks, target = ThreadRanks(GRID.size), arrangements(7, 1)[0]

    def broken(*_: Any) -> None:
        raise RuntimeError("connection reset")

    def step(rank: int) -> None:
        layers = layers_of(rank)
        with pytest.raises(ReorderError, match=r"moving the experts failed in round 1 of \d+.*connection reset"):
            migrate.migrate(
                START, target, layers, groups=grid(), state=None, max_scratch_bytes=0, on_commit=pytest.fail
            )

    with patch.object(migrate, "gather", ranks.gather), patch.object(migrate, "_exchange", broken):
        assert ranks.run(step) == [None] * GRID.size


class Movable:
    """The experts of one rank as a framework holds them, for `ExpertHomes`."""

    layers = OWN_LAYERS

    def __init__(self, rank: int) -> None:
        self.experts = layers_of(rank)
        self.followed: ExpertPlacement | None = None
        self.waits = False
        self._ep_rank = place_of(rank)[1]

    def ready(self) -> tuple[list[Experts], State]:
        return self.experts, State(self.experts)

    def follow(self, placement: ExpertPlacement) -> None:
        self.followed = placement
        self.are_at(placement)

    def gradients_wait(self) -> bool:
        return self.waits

    def are_at(self, placement: ExpertPlacement, state_at: ExpertPlacement | None = None) -> bool:
        """Whether weights are where one placement says and states where the other one does; fail where not."""
        for layer, experts in zip(self.layers, self.experts, strict=True):
            own = slice(self._ep_rank * PER_RANK, (self._ep_rank + 1) * PER_RANK)
            assert experts.held() == home_experts(placement)[layer][own].tolist()
            if state_at is not None:
                assert experts.states_are_of(home_experts(state_at)[layer][own].tolist())
        return True


def placement_of(seed: int | None) -> ExpertPlacement:
    """Megatron's, or one in which every rank has PER_RANK homes of each layer, drawn."""
    own = ExpertPlacement.contiguous(num_layers=LAYERS, num_experts=EXPERTS, ep_size=EP_SIZE, spare_slots=1)
    if seed is None:
        return own
    rng = np.random.default_rng(seed)
    homes = np.stack([rng.permutation(np.repeat(np.arange(EP_SIZE), PER_RANK)) for _ in range(LAYERS)])
    return ExpertPlacement.from_home_rank(homes, ep_size=EP_SIZE).with_slots(resident_slots=0, spare_slots=1)


def on_homes(step: Any) -> None:
    """Call `step(rank, homes, movable)` on all ranks; raise what fails there."""
    ranks = ThreadRanks(GRID.size)

    def on_rank(rank: int) -> None:
        movable = Movable(rank)
        homes = ExpertHomes(placement_of(None), movable, groups=grid(), max_scratch_bytes=0)
        step(rank, homes, movable)

    with patch.object(migrate, "gather", ranks.gather):
        for error in ranks.run(on_rank):
            if isinstance(error, BaseException):
                raise error


def test_homes_are_where_the_experts_are_and_errands_bring_all_back() -> None:
    first, second = placement_of(1), placement_of(2)

    def step(rank: int, homes: ExpertHomes, movable: Movable) -> None:
        assert homes.state_is_home
        with homes.canonical():
            movable.are_at(homes.own_placement, homes.own_placement)
        assert homes.reorder(first) > 0
        assert not homes.state_is_home
        movable.are_at(first, first)
        assert movable.followed is not None
        with homes.canonical(weights_only=True):
            movable.are_at(homes.own_placement, first)
            assert not homes.state_is_home, "an export leaves it where it is"
            np.testing.assert_array_equal(homes.placement.home_rank, homes.own_placement.home_rank)
        movable.are_at(first, first)
        with suppress(KeyError), homes.canonical():
            movable.are_at(homes.own_placement, homes.own_placement)
            assert homes.state_is_home
            raise KeyError("the save fails")
        movable.are_at(first, first)
        assert not homes.state_is_home
        assert homes.reorder(second) > 0
        movable.are_at(second, second)
        assert homes.reorder(second) == 0
        np.testing.assert_array_equal(homes.placement.home_rank, second.home_rank)
        assert homes.reorder(homes.own_placement) > 0
        assert homes.state_is_home

    on_homes(step)


def test_every_round_is_followed_where_the_experts_are_by_then() -> None:
    target = placement_of(3)

    def step(rank: int, homes: ExpertHomes, movable: Movable) -> None:
        seen: list[ExpertPlacement] = []
        follow = movable.follow

        def noted(placement: ExpertPlacement) -> None:
            follow(placement)
            seen.append(placement)
            assert homes.placement is placement
            assert homes._state_placement is placement

        movable.follow = noted  # type: ignore[method-assign]
        homes.reorder(target)
        assert len(seen) > 1, "two experts of scratch memory are several rounds"
        own = list(OWN_LAYERS)
        np.testing.assert_array_equal(home_experts(seen[-1])[own], home_experts(target)[own])
        for placement in seen:
            np.testing.assert_array_equal(placement.home_rank[1], homes.own_placement.home_rank[1])
            for layer in OWN_LAYERS:
                by_slot = home_experts(placement)[layer]
                np.testing.assert_array_equal(placement.home_rank[layer][by_slot], np.arange(EXPERTS) // PER_RANK)

    on_homes(step)


def test_gradients_that_wait_on_one_rank_hold_all_where_they_are() -> None:
    target = placement_of(4)

    def step(rank: int, homes: ExpertHomes, movable: Movable) -> None:
        movable.waits = rank == 2
        with pytest.raises(GradientsWaitError):
            homes.reorder(target)
        movable.are_at(homes.own_placement, homes.own_placement)
        assert homes.reorder(homes.own_placement) == 0, "nothing would move, so nothing is lost"
        movable.waits = False
        homes.reorder(target)
        movable.waits = rank == 1
        with homes.canonical():  # gradients stay, and so do their experts in the end
            movable.are_at(homes.own_placement, homes.own_placement)
        movable.are_at(target, target)

    on_homes(step)


def test_ranks_with_different_targets_or_targets_of_another_size_stay() -> None:
    wrong = ExpertPlacement.contiguous(num_layers=LAYERS, num_experts=2 * EXPERTS, ep_size=EP_SIZE)
    other_ranks = ExpertPlacement.contiguous(num_layers=LAYERS, num_experts=EXPERTS, ep_size=2 * EP_SIZE)

    def step(rank: int, homes: ExpertHomes, movable: Movable) -> None:
        with pytest.raises(InvalidInputError, match="all ranks must be given the same expert placement"):
            homes.reorder(placement_of(5 + (rank == 3)))
        for placement in (wrong, other_ranks):
            with pytest.raises(InvalidInputError, match="the placement does not match this run"):
                homes.reorder(placement)
        movable.are_at(homes.own_placement, homes.own_placement)

    on_homes(step)


def test_where_no_errand_failed_there_is_no_way_back_to_make_up_for() -> None:
    """Ranks agree on one move per reorder, and on one more behind an errand whose way back was lost."""

    def step(rank: int, homes: ExpertHomes, movable: Movable) -> None:
        targets: list[ExpertPlacement] = []
        move = homes._move

        def noted(home: ExpertPlacement, **words: Any) -> int:
            targets.append(home)
            return move(home, **words)

        homes._move = noted  # type: ignore[method-assign]
        for seed in (1, 2):
            homes.reorder(placement_of(seed))
            with homes.canonical(weights_only=True):
                pass
        assert len(targets) == 2 * 3, "a reorder, there and back"

    on_homes(step)


def test_the_way_back_of_an_errand_that_failed_is_made_up_for() -> None:
    first, second = placement_of(8), placement_of(9)

    @contextmanager
    def failing(homes: ExpertHomes) -> Any:
        with homes.canonical(weights_only=True):
            yield
            homes._carry_out = lambda *_, **__: (_ for _ in ()).throw(ReorderError("lost"))  # type: ignore[method-assign, assignment]

    def step(rank: int, homes: ExpertHomes, movable: Movable) -> None:
        homes.reorder(first)
        with pytest.raises(ReorderError), failing(homes):
            pass
        del homes._carry_out
        movable.are_at(homes.own_placement, first)
        homes.reorder(second)
        movable.are_at(second, second)

    on_homes(step)
