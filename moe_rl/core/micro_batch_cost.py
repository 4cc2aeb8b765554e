"""The price of a step's micro-batches: what surrounds the routed experts, and the host that launches all of it.

S sequences, G EP groups, M micro-batches, L MoE layers, D data-parallel ranks, P ranks of an EP group. The simulator
makes it with its own constants (`simulators.balanced.micro_batch_cost`), so planners price a plan as their judge does.
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
    """Seconds of a step's sequences and micro-batches, through all layers, forward and backward.

    A layer takes about the larger of its time on the GPU and its host's time to launch it, so seconds that a plan saves
    on the GPU are seconds of the step only as far as the host keeps up. Example: a layer of 1.0 ms whose host needs
    1.0 ms takes 1.26 ms; with its experts 0.2 ms faster, 1.15 ms.
    """

    sequence_s: Floats
    """[B, S] how long a sequence keeps each slice of its data-parallel rank busy beside its routed experts, in parts
    for each of which a micro-batch waits for its slowest rank: forward, backward, the output layer."""
    sequence_tokens: Floats
    """[S] tokens of the sequences."""
    routed_token_s: float
    """Routed experts and all-to-all, balanced: seconds of one more token on every rank of the EP group."""
    fixed_s: float
    """Seconds of a micro-batch that holds anything, beside its routed experts."""
    num_layers: int
    """Layers that share `sequence_s` (but for the output layer), `fixed_s` and the host's time, dense ones included."""
    num_moe_layers: int
    host_moe_layer_s: float = 0.0
    """Seconds in which the host launches an MoE layer of a micro-batch: it takes no less."""
    host_dense_layer_s: float = 0.0
    routed_fixed_s: float = 0.0
    """Seconds of balanced routed experts of a micro-batch that holds anything."""
    bubble: float = 0.0
    """Micro-batches for which a pipeline waits."""
    multiple_of: int = 1
    """The number of micro-batches is a multiple of this (virtual stages)."""
    scaled_tokens: int | None = None
    """Tokens of every rank in every micro-batch that holds anything, where loads were scaled to so many; None: ranks
    have the tokens of their sequences."""

    @property
    def host_s(self) -> float:
        """Seconds in which the host launches a micro-batch."""
        dense = self.num_layers - self.num_moe_layers
        return self.num_moe_layers * self.host_moe_layer_s + dense * self.host_dense_layer_s

    def step_s(self, routed_s: Floats, layout: BatchLayout, topology: ClusterTopology) -> float:
        """Return the seconds of a step from [G, M, L] seconds of its routed experts on the GPU.

        All layers beside routed experts are priced as the mean layer. L may be some of the MoE layers: the others then
        count as dense ones, which is the same for every plan of those some.
        """
        has_sequences = np.bincount(layout.micro_batch, minlength=layout.num_micro_batches) > 0
        if not has_sequences.any():
            return 0.0
        # Each part ends in a collective of the group, so the slowest rank of each counts, not the slowest of the sum.
        waits_s = [self._on_ranks(layout, part, topology).max(axis=2) for part in self.sequence_s]
        busy_s = self._micro_batch_s(waits_s, routed_s)[:, has_sequences]
        return float(busy_s.sum(axis=1).max()) * (1.0 + self.bubble / int(has_sequences.sum()))

    def balanced_s(self, layout: BatchLayout, topology: ClusterTopology) -> float:
        """Return the seconds of a step whose routed experts are balanced: all that lengths alone can say."""
        tokens = self._on_ranks(layout, self.sequence_tokens, topology).mean(axis=2) / topology.slices_per_dp_rank
        return self.step_s(self._balanced_layers_s(tokens), layout, topology)

    def even_s(self, num_micro_batches: int, topology: ClusterTopology) -> float:
        """Return the seconds of the step if sequences could be cut: all ranks have the same in all micro-batches."""
        share = 1.0 / (num_micro_batches * topology.num_dp_ranks)
        waits_s = [np.full((1, 1), share * part.sum()) for part in self.sequence_s]
        tokens = np.full((1, 1), share / topology.slices_per_dp_rank * self.sequence_tokens.sum())
        busy_s = self._micro_batch_s(waits_s, self._balanced_layers_s(tokens))
        return float(busy_s[0, 0]) * (num_micro_batches + self.bubble)

    def _balanced_layers_s(self, tokens: Floats) -> Floats:
        """Return [G, M, L] seconds of balanced routed experts from [G, M] tokens of every rank."""
        layer_s = (self.routed_token_s * tokens + self.routed_fixed_s) / self.num_moe_layers
        return np.repeat(layer_s[:, :, None], self.num_moe_layers, axis=2)

    def _micro_batch_s(self, waits_s: list[Floats], routed_s: Floats) -> Floats:
        """Return [G, M] seconds from those of the parts of `sequence_s`, and [G, M, L] of routed experts."""
        forward_s, backward_s, head_s = waits_s
        layer_s = (forward_s + backward_s + self.fixed_s) / self.num_layers
        moe_s: Floats = _with_host(layer_s[:, :, None] + routed_s, self.host_moe_layer_s).sum(axis=2)
        dense_s = (self.num_layers - routed_s.shape[2]) * _with_host(layer_s, self.host_dense_layer_s)
        seconds: Floats = moe_s + dense_s + head_s
        return seconds

    def _on_ranks(self, layout: BatchLayout, values: Floats, topology: ClusterTopology) -> Floats:
        """Return [G, M, P] sums of [S] values over the cell that each source rank has a slice of."""
        cells = _cell_sums(layout, values)
        if self.scaled_tokens is not None:
            tokens = _cell_sums(layout, self.sequence_tokens)
            # What a cell's tokens cost each is kept; cells that recorded nothing take their micro-batch's.
            seconds_per_token = cells.sum(axis=1, keepdims=True) / np.maximum(tokens.sum(axis=1, keepdims=True), 1.0)
            of_token = np.where(tokens > 0, cells / np.maximum(tokens, 1.0), seconds_per_token)
            cells = of_token * self.scaled_tokens * topology.slices_per_dp_rank
        # TP x CP slices of one data-parallel rank work through the same sequences.
        by_rank = cells[:, np.arange(topology.num_ranks) // topology.slices_per_dp_rank]
        grouped: Floats = by_rank.reshape(-1, topology.num_ep_groups, topology.ep_size).transpose(1, 0, 2)
        return grouped


def _with_host(device_s: Floats, host_s: float) -> Floats:
    """Return the seconds of layers that take so long on the GPU: a smooth maximum with the host's.

    Equal times of device and host add up to 2^(1/3) = 1.26 of either: they overlap, but not perfectly.
    """
    seconds: Floats = (device_s**SMOOTH + host_s**SMOOTH) ** (1.0 / SMOOTH)
    return np.where(device_s > 0, seconds, 0.0)


def _cell_sums(layout: BatchLayout, values: Floats) -> Floats:
    """Return [M, D] sums of [S] values over the sequences of each data-parallel rank in each micro-batch."""
    cells = np.zeros((layout.num_micro_batches, layout.num_dp_ranks))
    np.add.at(cells, (layout.micro_batch, layout.dp_rank), values)
    return cells
