"""Which step the weights in every slot of an engine rank are of, and what their trainers' sums were."""

import numpy as np
from numpy.typing import NDArray

from moe_rl.sync.errors import SyncError


class SlotVersions:
    """Steps of the weights in the slots of one engine rank, -1 before the first sync.

    An engine calls `require(step)` before it generates.
    """

    def __init__(self, local_slots: NDArray[np.int32]) -> None:
        self.local_slots = local_slots
        """[L, W / EP] expert in every slot."""
        self.steps = np.full(local_slots.shape, -1, np.int64)

    def wrote(self, layer: int, expert: int, step: int) -> None:
        """Note that all slots of an expert hold its weights of `step`; call it once the loader is done."""
        self.steps[layer, self.local_slots[layer] == expert] = step

    def move(self, local_slots: NDArray[np.int32]) -> None:
        """Take another map: a slot that changes its expert holds no step until that expert is written."""
        is_same = local_slots == self.local_slots if local_slots.shape == self.local_slots.shape else False
        self.steps = np.where(is_same, self.steps, -1) if np.ndim(is_same) else np.full(local_slots.shape, -1, np.int64)
        self.local_slots = local_slots

    def require(self, step: int) -> None:
        """Raise `SyncError` unless every slot holds the weights of `step`."""
        stale = np.argwhere(self.steps != step)
        if len(stale):
            layer, slot = stale[0].tolist()
            raise SyncError(
                f"{len(stale)} of {self.steps.size} expert slots do not hold the weights of step {step}; for example, "
                f"slot {slot} of MoE layer {layer} holds those of step {self.steps[layer, slot]}. Sync again before "
                "generating."
            )
