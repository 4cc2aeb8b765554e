"""Where the experts of a run have their homes, and how they move to others.

L MoE layers of the whole model, E experts.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.migrate import ExpertGrid, ExpertState, LocalExperts, migrate
from moe_rl.balancing.schedule import home_experts
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.placement import ExpertPlacement
from moe_rl.profiling import ranges


class GradientsWaitError(InvalidInputError):
    """Experts were asked to move while gradients wait in their parameters: said on all ranks, and nothing has moved."""


class MovableExperts(Protocol):
    """The experts of this rank as the framework holds them."""

    @property
    def layers(self) -> Sequence[int]:
        """Which MoE layers of the model this rank has."""

    def ready(self) -> tuple[Sequence[LocalExperts], ExpertState]:
        """Return the experts of every layer of `layers`, whole, to read and write, and the optimizer's state of them.

        Raises `InvalidInputError` on all ranks where that state cannot move.
        """

    def follow(self, placement: ExpertPlacement) -> None:
        """Note that they are now where `placement` says."""

    def gradients_wait(self) -> bool:
        """Return whether an expert of this rank has a gradient other than zero that no optimizer step has used.

        A move takes weights and optimizer state along, and leaves gradients behind: another expert's.
        """


class ExpertHomes:
    """Moves weights and optimizer state of experts, and lets the layers know. Every method is called on all ranks."""

    def __init__(
        self, placement: ExpertPlacement, movable: MovableExperts, *, groups: ExpertGrid, max_scratch_bytes: int
    ) -> None:
        self.own_placement = placement
        """Where the framework puts the experts."""
        self.placement = placement
        """Where the weights are; for layers of other pipeline stages, where they were last sent."""
        self._state_placement = placement
        """Where the optimizer state is: elsewhere only while weights are on an errand of their own."""
        self._ever_moved = False
        """Whether any rank of the run has moved an expert; all ranks know it alike."""
        self.groups = groups
        self._movable = movable
        self._max_scratch_bytes = max_scratch_bytes

    @property
    def state_is_home(self) -> bool:
        """Whether the optimizer state of this rank's experts is where the framework expects it."""
        layers = list(self._movable.layers)
        state_homes = home_experts(self._state_placement)[layers]
        return np.array_equal(state_homes, home_experts(self.own_placement)[layers])

    def reorder(self, placement: ExpertPlacement) -> int:
        """Move experts to the homes of `placement`, with their optimizer state; return the bytes this rank received.

        Raises `InvalidInputError` for a placement of another size or one that differs between ranks,
        `GradientsWaitError` where gradients wait in layers that would change, and `ReorderError` where the move was
        given up; then `self.placement` tells, for the layers of this rank, where the experts are.
        """
        own_placement = self.own_placement
        require(
            placement.home_rank.shape == own_placement.home_rank.shape and placement.ep_size == own_placement.ep_size,
            "the placement does not match this run: its home_rank [MoE layers, experts] has shape "
            f"{list(placement.home_rank.shape)} for {placement.ep_size} EP ranks, but this run needs shape "
            f"{list(own_placement.home_rank.shape)} for {own_placement.ep_size} EP ranks.",
        )
        home = placement.with_slots(resident_slots=own_placement.resident_slots, spare_slots=own_placement.spare_slots)
        if self.placement is not self._state_placement:  # the way back of an errand failed
            self._move(self._state_placement, weights_only=True)
        return self._move(home, wants_no_gradients=True)

    @contextmanager
    def canonical(self, *, weights_only: bool = False) -> Iterator[None]:
        """Put every expert back where the framework expects it while a checkpoint or a weight export runs.

        `weights_only` leaves the optimizer state where it is, which moves a fraction of the bytes: for an export. No
        optimizer step may run inside then. Gradients may wait: they stay, and so do their experts in the end.

        While no expert has ever moved nobody is asked: a rank that alone has failed can save at once.
        """
        if not self._ever_moved:
            yield
            return
        placement = self.placement
        self._move(self.own_placement, weights_only=weights_only)
        try:
            yield
        finally:
            self._move(placement, weights_only=weights_only)

    def _move(self, home: ExpertPlacement, *, weights_only: bool = False, wants_no_gradients: bool = False) -> int:
        """Move to `home`; agree on it first, and then on nothing more if nobody has anything to move."""
        layers = list(self._movable.layers)
        old_experts, new_experts = home_experts(self.placement)[layers], home_experts(home)[layers]
        # Of all slots, so that ranks agree on residents too.
        digest = np.frombuffer(hashlib.sha256(home.physical_to_logical_map.tobytes()).digest(), np.int64)
        moves = not np.array_equal(old_experts, new_experts)
        waits = moves and wants_no_gradients and self._movable.gradients_wait()
        facts_of_ranks = self.groups.gather_in_run(np.append(digest, [int(moves), int(waits)]))
        require(
            bool((facts_of_ranks[:, :-2] == digest).all()),
            "all ranks must be given the same expert placement, but the placements differ.",
        )
        if facts_of_ranks[:, -1].any():
            raise GradientsWaitError(
                "experts cannot move now, because their gradients still wait for an optimizer step and would be "
                "lost. Call reorder() after the step, or zero the gradients first (zero_grad_buffer() of the "
                "model, zero_grad() of the optimizer)."
            )
        received_bytes = 0
        if facts_of_ranks[:, -2].any():
            received_bytes = self._carry_out(old_experts, new_experts, weights_only=weights_only)
        self.placement = home
        if not weights_only:
            self._state_placement = home
        return received_bytes

    def _carry_out(self, old_experts: NDArray[np.int32], new_experts: NDArray[np.int32], *, weights_only: bool) -> int:
        """Move experts from slots `old_experts` [layers, E] to `new_experts`; return the bytes received here."""
        self._ever_moved = True
        experts, state_to_move = self._movable.ready()
        state = None if weights_only else state_to_move
        with ranges.range("reorder"):
            return migrate(
                old_experts,
                new_experts,
                experts,
                groups=self.groups,
                state=state,
                max_scratch_bytes=self._max_scratch_bytes,
                on_commit=lambda arrangement: self._follow(arrangement, weights_only=weights_only),
            )

    def _follow(self, arrangement: NDArray[np.int32], *, weights_only: bool) -> None:
        """Note that the experts of this rank's layers now sit in the home slots that `arrangement` [layers, E] says.

        Nobody is resident until all have arrived: on the way a copy could meet its own home.
        """
        slots, home_rank = self.placement.physical_to_logical_map.copy(), self.placement.home_rank.copy()
        ep_size, per_rank = self.own_placement.ep_size, self.own_placement.num_experts // self.own_placement.ep_size
        slots.reshape(len(slots), ep_size, -1)[:, :, per_rank:] = -1  # nobody is resident on the way
        for layer, experts in zip(self._movable.layers, arrangement, strict=True):
            slots[layer].reshape(ep_size, -1)[:, :per_rank] = experts.reshape(ep_size, per_rank)
            home_rank[layer, experts] = np.arange(len(experts)) // per_rank
        self.placement = replace(self.placement, physical_to_logical_map=slots, home_rank=home_rank)
        if not weights_only:
            self._state_placement = self.placement
        self._movable.follow(self.placement)


class ImaginedHomes(ExpertHomes):
    """Homes of a run that is only observed: `placement` is where a balanced run would have its experts by now.

    What a balanced run agrees on and refuses is agreed on and refused here too, so that it is the same placement. The
    weights stay where the framework put them, so there is nothing to bring home for a checkpoint.
    """

    @property
    def state_is_home(self) -> bool:
        """True: nothing moves."""
        return True

    def _carry_out(self, old_experts: NDArray[np.int32], new_experts: NDArray[np.int32], *, weights_only: bool) -> int:
        return 0

    @contextmanager
    def canonical(self, *, weights_only: bool = False) -> Iterator[None]:
        """Do nothing: every expert is where the framework expects it."""
        yield
