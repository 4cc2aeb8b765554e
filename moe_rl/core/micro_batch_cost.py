"""The price of a micro-batch from the lengths of its sequences alone. Layouts are compared by it.

S sequences, G EP groups, M micro-batches, D data-parallel ranks, P ranks of an EP group. The simulator makes it with
its own constants (`simulators.balanced.micro_batch_cost`), so planners price a layout as their judge does.
"""

from dataclasses import dataclass

import numpy as np

from moe_rl.core.cost import Floats
from moe_rl.core.layout import BatchLayout
from moe_rl.core.topology import ClusterTopology

# Exponent of the smooth maximum of a layer's time on the GPU and on its host. On the whole runs that are published 2.5
# and 3 fit best, in every part of them that is left out in turn; 4 is 0.9 points worse on settings held out.
SMOOTH = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchCost:
    """Seconds of a step's sequences and micro-batches, through all layers, forward and backward."""

    sequence_s: Floats
    """[B, S] how long a sequence keeps each slice of its data-parallel rank busy beside its routed experts, in parts
    for each of which a micro-batch waits for its slowest rank: forward, backward, the output layer."""
    sequence_tokens: Floats
    """[S] tokens that count for the routed experts."""
    routed_token_s: float
    """Routed experts and all-to-all, balanced: seconds of one more token on every rank of the EP group."""
    fixed_s: float
    """Seconds of a micro-batch that holds anything, beside its routed experts."""
    routed_fixed_s: float = 0.0
    """The same of balanced routed experts."""
    host_s: float = 0.0
    """Seconds in which the host launches a micro-batch: it takes no less."""
    bubble: float = 0.0
    """Micro-batches for which a pipeline waits."""
    multiple_of: int = 1
    """The number of micro-batches is a multiple of this (virtual stages)."""

    def busiest_s(self, layout: BatchLayout, topology: ClusterTopology) -> Floats:
        """Return [G, M] seconds of the busiest rank beside its routed experts, launches not counted."""
        # Each part ends in a collective of the group, so the slowest rank of each counts, not the slowest of the sum.
        waits = [_by_group(layout, part, topology).max(axis=2) for part in self.sequence_s]
        busiest: Floats = np.sum(waits, axis=0) + self.fixed_s
        return busiest

    def step_s(self, device_s: Floats, layout: BatchLayout) -> float:
        """Return the seconds of a step from [G, M] seconds of its micro-batches on the device."""
        running = np.bincount(layout.micro_batch, minlength=layout.num_micro_batches) > 0
        if not running.any():
            return 0.0
        # Equal times of device and host add up to 2^(1/3) = 1.26 of either: they overlap, but not perfectly.
        busy = (device_s[:, running] ** SMOOTH + self.host_s**SMOOTH) ** (1.0 / SMOOTH)
        return float(busy.sum(axis=1).max()) * (1.0 + self.bubble / int(running.sum()))

    def balanced_s(self, layout: BatchLayout, topology: ClusterTopology) -> float:
        """Return the seconds of a step whose routed experts are balanced: all that lengths alone can say."""
        mean = _by_group(layout, self.sequence_tokens, topology).mean(axis=2) / topology.slices_per_dp_rank
        routed = self.routed_token_s * mean + self.routed_fixed_s
        return self.step_s(self.busiest_s(layout, topology) + routed, layout)


def _by_group(layout: BatchLayout, values: Floats, topology: ClusterTopology) -> Floats:
    """Return [G, M, P] sums of [S] values over the cell that each source rank has a slice of."""
    cells = np.zeros((layout.num_micro_batches, layout.num_dp_ranks))
    np.add.at(cells, (layout.micro_batch, layout.dp_rank), values)
    # TP x CP slices of one data-parallel rank work through the same sequences.
    by_rank = cells[:, np.arange(topology.num_ranks) // topology.slices_per_dp_rank]
    grouped: Floats = by_rank.reshape(-1, topology.num_ep_groups, topology.ep_size).transpose(1, 0, 2)
    return grouped
