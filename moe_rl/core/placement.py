"""The expert in every slot of every EP rank, and the moves from one placement to another.

Physical id = rank * slots_per_rank + slot. Slots 0 .. E/P - 1 of a rank are its home slots in every policy that keeps
homes fixed; then come S resident slots, filled for a whole step by copies of experts from elsewhere; the slots after
them are spare: empty (-1), filled for a whole step (EPLB's redundancy), or filled for one micro-batch by a
`ReplicaPlan`. Two experts per rank, S = 1 and one spare slot, on rank 0 of three:

    slot          0      1      2          3
    holds         0      1      4          -1
                  homes         resident   spare: expert 5 in one micro-batch, nothing in the next

A resident copy costs its weights and its fp32 gradient once per step, however many micro-batches use it, and their
memory in every layer; a replica costs them in every micro-batch, in memory that all layers share.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, require


def count_instances(slots: NDArray[np.integer], *, num_experts: int, ep_size: int) -> NDArray[np.int32]:
    """Return [L, P, E]: how many of the slots [L, W] of rank p hold expert e; -1 is an empty slot."""
    layers, width = slots.shape
    layer, slot = np.nonzero(slots >= 0)
    # One key per (layer, rank, expert): a single bincount counts them all.
    key = (layer * ep_size + slot // max(1, width // ep_size)) * num_experts + slots[layer, slot]
    counts = np.bincount(key, minlength=layers * ep_size * num_experts)
    return counts.reshape(layers, ep_size, num_experts).astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacement:
    """One physical-to-logical map per layer, and each expert's home, which owns weights and optimizer state.

    >>> ExpertPlacement.contiguous(num_layers=1, num_experts=4, ep_size=2, spare_slots=1).physical_to_logical_map
    array([[ 0,  1, -1,  2,  3, -1]], dtype=int32)
    """

    physical_to_logical_map: NDArray[np.int32]
    """[L, P * slots_per_rank] logical expert in each slot, -1 empty."""
    home_rank: NDArray[np.int32]
    """[L, E] rank whose slot is the expert's home."""
    ep_size: int
    resident_slots: int = 0
    """S, slots of each rank after its E/P homes whose copies stay for the whole step."""

    def __post_init__(self) -> None:
        slots = self.physical_to_logical_map
        require(
            self.home_rank.ndim == 2, f"home_rank must have shape [MoE layers, experts], got {self.home_rank.shape}."
        )
        num_layers, num_experts = self.home_rank.shape
        is_map = slots.ndim == 2 and slots.shape[0] == num_layers and slots.shape[1] % self.ep_size == 0
        require(
            is_map,
            f"physical_to_logical_map must have shape [MoE layers, slots] = [{num_layers}, a multiple of ep_size "
            f"({self.ep_size})], got {slots.shape}.",
        )
        if slots.size and not (int(slots.min()) >= -1 and int(slots.max()) < num_experts):
            raise InvalidInputError(
                f"physical_to_logical_map holds expert {int(slots.max())}, but expert ids must be 0 to "
                f"{num_experts - 1}, or -1 for an empty slot."
            )
        instances = self.instances_per_rank()
        # [L, P, E] truth values: 385 KB for 94 layers, 32 ranks and 128 experts.
        at_home = (instances > 0) & (self.home_rank[:, None, :] == np.arange(self.ep_size)[:, None])
        for layer, expert in np.argwhere(~at_home.any(axis=1)):
            home = self.home_rank[layer, expert]
            raise InvalidInputError(f"expert {expert} has no slot on its home rank {home} in layer {layer}.")
        self._check_residents(instances)

    def _check_residents(self, instances: NDArray[np.int32]) -> None:
        """Raise unless homes stand first and no rank holds an expert twice; `instances` [L, P, E]."""
        require(self.resident_slots >= 0, f"resident_slots must be at least 0, got {self.resident_slots}.")
        if not self.resident_slots:
            return
        per_rank = self.num_experts // self.ep_size
        require(
            self.slots_per_rank >= per_rank + self.resident_slots,
            f"each rank has {self.slots_per_rank} slots, too few for its {per_rank} home experts and "
            f"{self.resident_slots} replicas that stay for the whole step.",
        )
        for layer, expert in np.argwhere(self.home_slot() % self.slots_per_rank >= per_rank):
            raise InvalidInputError(
                f"in layer {layer}, the home slot of expert {expert} is among the slots for replicas: on each "
                "rank, home experts must come first."
            )
        for layer, rank, expert in np.argwhere(instances > 1):
            raise InvalidInputError(f"rank {rank} holds expert {expert} twice in layer {layer}.")

    @property
    def num_layers(self) -> int:
        """L, MoE layers."""
        return int(self.home_rank.shape[0])

    @property
    def num_experts(self) -> int:
        """E, logical experts."""
        return int(self.home_rank.shape[1])

    @property
    def slots_per_rank(self) -> int:
        """Home and spare slots of one rank."""
        return int(self.physical_to_logical_map.shape[1]) // self.ep_size

    @property
    def spare_slots(self) -> int:
        """Slots of one rank beside its homes and residents."""
        return self.slots_per_rank - self.num_experts // self.ep_size - self.resident_slots

    @property
    def slots_of_kinds(self) -> tuple[int, int, int]:
        """(E/P, S, spare) slots of one rank."""
        return self.num_experts // self.ep_size, self.resident_slots, self.spare_slots

    @property
    def resident_experts(self) -> NDArray[np.int32]:
        """[L, P, S] expert in each resident slot, -1 empty."""
        num_homes = self.num_experts // self.ep_size
        slots = self.physical_to_logical_map.reshape(self.num_layers, self.ep_size, self.slots_per_rank)
        return slots[:, :, num_homes : num_homes + self.resident_slots]

    def of_layers(self, layers: Sequence[int]) -> Self:
        """Return the placement of some layers alone, in the order given."""
        index = np.asarray(layers, np.int64)
        return replace(
            self, physical_to_logical_map=self.physical_to_logical_map[index], home_rank=self.home_rank[index]
        )

    def instances_per_rank(self) -> NDArray[np.int32]:
        """Return [L, P, E]: how many slots of rank p hold expert e."""
        return count_instances(self.physical_to_logical_map, num_experts=self.num_experts, ep_size=self.ep_size)

    def logical_replica_count(self) -> NDArray[np.int32]:
        """Return [L, E]: how many slots hold each expert."""
        return np.asarray(self.instances_per_rank().sum(axis=1, dtype=np.int32))

    def home_slot(self) -> NDArray[np.int32]:
        """Return [L, E]: physical id of each expert's home, the lowest slot of its home rank that holds it."""
        home = np.full(self.home_rank.shape, np.iinfo(np.int32).max, np.int32)
        layer, slot = np.nonzero(self.physical_to_logical_map >= 0)
        expert = self.physical_to_logical_map[layer, slot]
        at_home = self.home_rank[layer, expert] == slot // self.slots_per_rank
        # The lowest slot wins where a rank holds an expert twice, as EPLB's redundancy may.
        np.minimum.at(home, (layer[at_home], expert[at_home]), slot[at_home].astype(np.int32))
        return home

    def with_slots(self, *, resident_slots: int, spare_slots: int) -> "ExpertPlacement":
        """Return the same homes and residents among so many slots per rank, spare ones empty.

        Raises `InvalidInputError` where there are more resident slots now.
        """
        require(
            self.resident_slots <= resident_slots,
            f"the placement keeps {self.resident_slots} replicas per rank for the whole step, but "
            f"resident_slots allows only {resident_slots}.",
        )
        residents = np.full((self.num_layers, self.ep_size, resident_slots), -1)
        residents[:, :, : self.resident_slots] = self.resident_experts
        return ExpertPlacement.from_home_rank(
            self.home_rank, ep_size=self.ep_size, spare_slots=spare_slots, resident_experts=residents
        )

    @classmethod
    def contiguous(cls, *, num_layers: int, num_experts: int, ep_size: int, spare_slots: int = 0) -> Self:
        """Return Megatron's placement: rank r is home of experts r * E/P .. (r + 1) * E/P - 1."""
        home = np.arange(num_experts) // max(1, num_experts // max(1, ep_size))
        return cls.from_home_rank(
            np.broadcast_to(home, (num_layers, num_experts)), ep_size=ep_size, spare_slots=spare_slots
        )

    @classmethod
    def from_home_rank(
        cls,
        home_rank: NDArray[np.integer],
        *,
        ep_size: int,
        spare_slots: int = 0,
        resident_experts: NDArray[np.integer] | None = None,
    ) -> Self:
        """Return the placement with experts in ascending order in their home rank's slots, spare slots empty.

        `resident_experts` [L, P, S], -1 empty, are the copies that stay for the step; None for S = 0.
        """
        home = np.array(home_rank, dtype=np.int32)
        num_layers, num_experts = home.shape
        require(
            num_experts % ep_size == 0,
            f"the expert-parallel size ({ep_size}) does not divide the number of experts ({num_experts}).",
        )
        per_rank = num_experts // ep_size
        even_sentence = f"every rank must be the home rank of exactly {per_rank} experts in every layer."
        require(bool(((home >= 0) & (home < ep_size)).all()), even_sentence)
        layer_and_rank = np.arange(num_layers)[:, None] * ep_size + home
        experts_of_rank = np.bincount(layer_and_rank.ravel(), minlength=num_layers * ep_size)
        require(bool((experts_of_rank == per_rank).all()), even_sentence)
        residents = np.zeros((num_layers, ep_size, 0), np.int32) if resident_experts is None else resident_experts
        is_table = residents.ndim == 3 and residents.shape[:2] == (num_layers, ep_size)
        require(
            is_table,
            f"resident_experts must have shape [MoE layers, EP ranks, slots] = [{num_layers}, {ep_size}, any "
            f"number], got {list(residents.shape)}.",
        )
        resident_slots = residents.shape[2]
        slots = np.full((num_layers, ep_size, per_rank + resident_slots + spare_slots), -1, np.int32)
        # Stable: the experts of a rank stay in ascending order.
        order = np.argsort(home, axis=1, kind="stable").astype(np.int32)
        slots[:, :, :per_rank] = order.reshape(num_layers, ep_size, per_rank)
        # Residents stand between homes and spare slots, so that spare ones stay last whatever S is.
        slots[:, :, per_rank : per_rank + resident_slots] = residents
        return cls(
            physical_to_logical_map=slots.reshape(num_layers, -1),
            home_rank=home,
            ep_size=ep_size,
            resident_slots=resident_slots,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMigration:
    """Slot writes that turn one placement into another; sources are read before any slot is written.

    Bytes here are bytes of homes, which take their optimizer state along once. A copy for the step costs its weights in
    every step; the code that pushes copies counts them.
    """

    layer: NDArray[np.int32]
    """[N] MoE layer of every move."""
    expert: NDArray[np.int32]
    """[N] logical expert that moves."""
    source_slot: NDArray[np.int32]
    """[N] physical id to read, under the old placement."""
    destination_slot: NDArray[np.int32]
    """[N] physical id to write; slots that nothing is written to and that end empty are in `cleared`."""
    cleared: NDArray[np.int32]
    """[C, 2] (layer, physical id) of slots that end empty."""
    new_home_rank: NDArray[np.int32]
    """[L, E] home of every expert afterwards."""
    slots_per_rank: int
    expert_bytes: int
    """Bytes of a home as moved: weights alone, or weights and optimizer state."""
    steps_served: int = 1
    """Optimizer steps until the policy moves homes again, which share the moves."""

    @classmethod
    def between(cls, old: ExpertPlacement, new: ExpertPlacement, *, expert_bytes: int) -> Self:
        """Return the moves from `old` to `new`; a copy on the same rank is preferred as the source, then the home."""
        same_experts = old.home_rank.shape == new.home_rank.shape
        same_map = old.physical_to_logical_map.shape == new.physical_to_logical_map.shape
        same_slots = (old.ep_size, old.resident_slots) == (new.ep_size, new.resident_slots)
        require(
            same_experts and same_map and same_slots,
            "experts cannot be moved between these two placements: their numbers of layers, experts, ranks or "
            "slots per rank differ.",
        )
        old_map, new_map = old.physical_to_logical_map, new.physical_to_logical_map
        per_rank = old.slots_per_rank
        layer, slot = np.nonzero((old_map != new_map) & (new_map >= 0))
        expert = new_map[layer, slot]
        source = old.home_slot()[layer, expert]
        # A copy on the same rank costs no link; otherwise the home sends.
        on_rank = old_map.reshape(len(old_map), -1, per_rank)[layer, slot // per_rank] == expert[:, None]
        local = (slot // per_rank * per_rank + on_rank.argmax(axis=1)).astype(source.dtype)
        source = np.where(on_rank.any(axis=1), local, source)
        return cls(
            layer=layer.astype(np.int32),
            expert=expert,
            source_slot=source,
            destination_slot=slot.astype(np.int32),
            # Slots that end empty are no moves: nothing travels, but the map must say -1.
            cleared=np.argwhere((old_map >= 0) & (new_map < 0)).astype(np.int32),
            new_home_rank=new.home_rank,
            slots_per_rank=per_rank,
            expert_bytes=expert_bytes,
        )

    def apply(self, placement: ExpertPlacement) -> ExpertPlacement:
        """Return `placement` after the moves."""
        slots = placement.physical_to_logical_map.copy()
        # Read from the old map, written to a copy: two experts that swap slots must not overwrite each other.
        slots[self.layer, self.destination_slot] = placement.physical_to_logical_map[self.layer, self.source_slot]
        slots[self.cleared[:, 0], self.cleared[:, 1]] = -1
        return replace(placement, physical_to_logical_map=slots, home_rank=self.new_home_rank)

    def moves(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (layer, expert, source slot, destination slot)."""
        columns = (self.layer, self.expert, self.source_slot, self.destination_slot)
        yield from zip(*(column.tolist() for column in columns), strict=True)

    @property
    def crosses_ranks(self) -> NDArray[np.bool_]:
        """[N] True where the move leaves its rank."""
        return np.asarray(self.source_slot // self.slots_per_rank != self.destination_slot // self.slots_per_rank)

    @property
    def _home_crosses(self) -> NDArray[np.bool_]:
        """[N] True where a home leaves its rank; a rank holds no copy of an expert that is at home there."""
        # A resident copy that arrives is paid for by whoever pushes residents, and carries no optimizer state.
        to_home = self.destination_slot // self.slots_per_rank == self.new_home_rank[self.layer, self.expert]
        return np.asarray(to_home & self.crosses_ranks)

    @property
    def moved_bytes(self) -> int:
        """Bytes of homes that leave their rank."""
        return int(self._home_crosses.sum()) * self.expert_bytes

    def bytes_out_of_node(self, node_of_rank: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return [P] bytes of homes that each rank sends to another node."""
        source = self.source_slot // self.slots_per_rank
        destination = self.destination_slot // self.slots_per_rank
        leaves = self._home_crosses & (node_of_rank[source] != node_of_rank[destination])
        return np.bincount(source[leaves], minlength=len(node_of_rank)).astype(np.int64) * self.expert_bytes
