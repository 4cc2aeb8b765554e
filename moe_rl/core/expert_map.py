"""The expert in every slot of a rollout engine, layer by layer. It stays for as long as the engine runs.

L MoE layers, H hidden layers (dense ones included), E experts, P ranks of an EP group, W slots of all ranks together:
slot p is on rank p // (W / P).
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.model import are_layer_numbers
from moe_rl.core.placement import count_instances


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMap:
    """A map as an engine loads it. The constructor checks shapes; `check` whether an engine may be given the map.

    >>> ExpertMap.start(num_layers=1, moe_layer_ids=(0,), num_experts=4, ep_size=2, copies=2).slots
    array([[0, 1, 2, 3, 0, 1]], dtype=int32)
    """

    slots: NDArray[np.int32]
    """[L, W] expert in every slot."""
    moe_layer_ids: tuple[int, ...]
    """[L] hidden layers that the rows are of, ascending."""
    num_layers: int
    """H"""
    num_experts: int
    ep_size: int

    def __post_init__(self) -> None:
        ids = self.moe_layer_ids
        has_row_per_layer = self.slots.ndim == 2 and len(self.slots) == len(ids)
        require(
            has_row_per_layer,
            f"an expert map must have shape [MoE layers, slots] with {len(ids)} MoE layers, got "
            f"{list(self.slots.shape)}.",
        )
        require(
            are_layer_numbers(ids, self.num_layers),
            f"the layer numbers of an expert map must be ascending and less than {self.num_layers}, got {list(ids)}.",
        )
        width = self.slots.shape[1]
        is_even = width % self.ep_size == 0 and width >= self.num_experts
        require(
            is_even,
            f"the expert map has {width} slots per layer, but the number of slots must be at least {self.num_experts} "
            f"(the number of experts) and a multiple of {self.ep_size} (the number of EP ranks).",
        )

    @classmethod
    def start(
        cls, *, num_layers: int, moe_layer_ids: tuple[int, ...], num_experts: int, ep_size: int, copies: int = 0
    ) -> Self:
        """Return the map that engines start with when they are given none: slot p holds expert p mod E."""
        # 128 experts and 8 copies: slots 128 to 135 hold experts 0 to 7 once more.
        row = (np.arange(num_experts + copies) % num_experts).astype(np.int32)
        return cls(
            slots=np.tile(row, (len(moe_layer_ids), 1)),
            moe_layer_ids=moe_layer_ids,
            num_layers=num_layers,
            num_experts=num_experts,
            ep_size=ep_size,
        )

    @property
    def num_slots(self) -> int:
        """W, slots of a layer."""
        return int(self.slots.shape[1])

    @property
    def slots_per_rank(self) -> int:
        """W / P, slots of a rank in a layer."""
        return self.num_slots // self.ep_size

    @property
    def num_copies(self) -> int:
        """W - E, slots of a layer beside one for every expert."""
        return self.num_slots - self.num_experts

    def check(self) -> None:
        """Raise unless every row holds every expert, and no rank one of them twice.

        Engines take such maps: then an expert has no weights, or the second slot of a rank is never filled.
        """
        instances = self._held_per_rank()
        for row, expert in np.argwhere(instances.sum(axis=1) == 0):
            raise InvalidInputError(
                f"the expert map has no slot for expert {expert} in layer {self.moe_layer_ids[row]}."
            )
        for row, rank, expert in np.argwhere(instances > 1):
            raise InvalidInputError(
                f"the expert map puts expert {expert} on rank {rank} twice in layer {self.moe_layer_ids[row]}."
            )

    def num_twins(self) -> int:
        """Return how many slots of all layers hold an expert that their rank holds already."""
        instances = self._held_per_rank()
        return int(np.maximum(instances - 1, 0).sum())

    def _held_per_rank(self) -> NDArray[np.int32]:
        """Return [L, P, E] slots of rank p that hold expert e; raise for an expert that does not exist."""
        for wrong_id in (int(self.slots.max(initial=0)), int(self.slots.min(initial=0))):
            is_expert = 0 <= wrong_id < self.num_experts
            require(
                is_expert,
                f"the expert map holds expert {wrong_id}, but expert ids must be 0 to {self.num_experts - 1}.",
            )
        return count_instances(self.slots, num_experts=self.num_experts, ep_size=self.ep_size)

    def with_copies_for(self, load: NDArray[np.number]) -> Self:
        """Return the map with experts in the slots that hold a second copy on their rank, or nothing (-1).

        Each takes the expert with most load [L, E] per copy that its rank lacks. Raises where a rank has more slots
        than there are experts.
        """
        require(
            self.slots_per_rank <= self.num_experts,
            f"the expert map has {self.slots_per_rank} slots per rank, but the model has only "
            f"{self.num_experts} experts.",
        )
        slots = self.slots.copy()
        for row, layer_load in zip(slots, np.asarray(load, np.float64), strict=True):
            _fill(row, layer_load, self.slots_per_rank)
        return replace(self, slots=slots)


def _fill(row: NDArray[np.int32], load: NDArray[np.float64], slots_per_rank: int) -> None:
    """Empty the slots of second copies on a rank, then fill all that are empty."""
    by_rank = row.reshape(-1, slots_per_rank)
    for experts_of_rank in by_rank:
        experts_on_rank: set[int] = set()
        for slot, expert in enumerate(experts_of_rank.tolist()):
            experts_of_rank[slot] = -1 if expert in experts_on_rank else expert
            experts_on_rank.add(expert)
    copies = np.bincount(row[row >= 0], minlength=len(load))
    # An expert that no slot holds goes first, however little it is asked for.
    for slot in np.flatnonzero(row < 0).tolist():
        wanted = np.where(copies == 0, np.inf, load / np.maximum(copies, 1))
        # A second copy on the same rank would take no load off it.
        wanted[by_rank[slot // slots_per_rank][by_rank[slot // slots_per_rank] >= 0]] = -1.0
        expert = int(np.argmax(wanted))
        row[slot] = expert
        copies[expert] += 1
