"""Count what routers choose in a pass, on the device and without making the host wait.

Kept are, per sequence, the pairs of every expert, and the choices of a few rows (`SequenceRows.sampled_rows`).
Axes: S sequences of a micro-batch, N rows of it on this rank, U sampled rows, L MoE layers of this stage, E experts, K
choices.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from moe_rl.balancing.loads import RouteArray, as_array
from moe_rl.balancing.route_forecast import MicroBatchRoutes
from moe_rl.balancing.sequence_rows import SequenceRows
from moe_rl.core.errors import require


class HostCopies:
    """Tensors or arrays on the way to the host."""

    def __init__(self, tensors: Sequence[RouteArray]) -> None:
        """Start to copy those that are on a device, in the order of its stream."""
        self._on_host: list[Any] = list(tensors)
        self._arrived: torch.cuda.Event | None = None
        if not any(isinstance(tensor, torch.Tensor) and tensor.is_cuda for tensor in tensors):
            return
        for index, source in enumerate(tensors):
            tensor = torch.as_tensor(source)
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._on_host[index] = pinned.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def arrays(self) -> list[NDArray[Any]]:
        """Return them when all have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return [as_array(tensor) for tensor in self._on_host]


class _LayerChoices(NamedTuple):
    """The routers' choices in one layer of one micro-batch, on the device."""

    counts_SE: torch.Tensor
    sampled_ids_UK: torch.Tensor


class CountedPass:
    """The counts of a pass, on the way to the host."""

    def __init__(
        self, rows: Sequence[SequenceRows], tensors: Sequence[torch.Tensor], own_counts: Sequence[torch.Tensor]
    ) -> None:
        """`tensors` are, per micro-batch, counts [S, L, E] and sampled ids [U, L, K]; `own_counts` are [L, E]."""
        self._rows, self._copies, self._own_copies = rows, HostCopies(tensors), HostCopies(own_counts)

    def micro_batches(self) -> list[MicroBatchRoutes]:
        """Return the routes of every micro-batch when they have arrived."""
        arrays = iter(self._copies.arrays())
        micro_batches = []
        for rows in self._rows:
            counts_SLE, sampled_ids_ULK = next(arrays), next(arrays)
            micro_batches.append(MicroBatchRoutes(rows=rows, counts_SLE=counts_SLE, sampled_ids_ULK=sampled_ids_ULK))
        return micro_batches

    def own_pairs(self) -> NDArray[np.int32]:
        """Return [M, L, E] the pairs of this rank's own rows, when they have arrived.

        The counts of `micro_batches` are those of whole sequences, of which tensor-parallel ranks have a part each:
        with 100 pairs of a sequence here and 60 on the other rank, both ranks get 160 there, and 100 or 60 here.
        """
        return np.stack(self._own_copies.arrays())


class RouteCounter:
    """Counts the choices of this rank's routers in one pass."""

    def __init__(self, rows: Sequence[SequenceRows], shape: tuple[int, int, int], device: torch.device) -> None:
        """`rows` are those of every micro-batch, `shape` is (L, E, K)."""
        self.rows = rows
        self._num_layers, self._num_experts, self._top_k = shape
        self._device = device
        self._sequence_of_row = [_on_device(part.sequence_of_row, device) for part in rows]
        self._sampled_rows = [_on_device(part.sampled_rows, device) for part in rows]
        self._choices: dict[tuple[int, int], _LayerChoices] = {}  # by (micro-batch, layer)

    def count_map(self, micro_batch: int, layer: int, routing_map: torch.Tensor) -> None:
        """Count a router's [N, E] map of chosen experts; `layer` is one of this rank's, from 0 on."""
        sequence_of_row = self._sequences_of(micro_batch, len(routing_map))
        if sequence_of_row is None:
            return
        counts_SE = self._zero_counts(micro_batch).index_add_(0, sequence_of_row, routing_map.to(torch.int32))
        sampled_map = routing_map.index_select(0, self._sampled_rows[micro_batch]).to(torch.uint8)
        sampled_ids_UK = sampled_map.topk(self._top_k, dim=1).indices.to(torch.int16)
        self._choices[micro_batch, layer] = _LayerChoices(counts_SE, sampled_ids_UK)

    def count_ids(self, micro_batch: int, layer: int, expert_ids: torch.Tensor) -> None:
        """Count a router's [N, K] chosen experts; `layer` as in `count_map`."""
        sequence_of_row = self._sequences_of(micro_batch, len(expert_ids))
        if sequence_of_row is None:
            return
        counts_SE = self._zero_counts(micro_batch)
        # Entry (s, e) of the counts is entry s * E + e of the flat counts.
        flat_index = (sequence_of_row[:, None] * self._num_experts + expert_ids).flatten()
        counts_SE.view(-1).scatter_add_(0, flat_index, torch.ones_like(flat_index, dtype=torch.int32))
        sampled_ids_UK = expert_ids.index_select(0, self._sampled_rows[micro_batch]).to(torch.int16)
        self._choices[micro_batch, layer] = _LayerChoices(counts_SE, sampled_ids_UK)

    def forget_after(self, num_micro_batches: int) -> None:
        """Forget micro-batches that were announced and did not come."""
        self.rows = self.rows[:num_micro_batches]

    def start_fetch(self, sum_over_ranks: Callable[[torch.Tensor], None]) -> CountedPass:
        """Start to bring the counts to the host.

        `sum_over_ranks` adds counts, in place, over the ranks that share sequences. It is a collective, called once per
        micro-batch, for all layers together.
        """
        tensors: list[torch.Tensor] = []
        own_counts: list[torch.Tensor] = []
        for micro_batch in range(len(self.rows)):
            choices = [self._choices_in(micro_batch, layer) for layer in range(self._num_layers)]
            counts_SLE = torch.stack([of_layer.counts_SE for of_layer in choices], dim=1)
            own_counts.append(counts_SLE.sum(dim=0, dtype=torch.int32))
            sum_over_ranks(counts_SLE)
            tensors += [counts_SLE, torch.stack([of_layer.sampled_ids_UK for of_layer in choices], dim=1)]
        return CountedPass(self.rows, tensors, own_counts)

    def _sequences_of(self, micro_batch: int, num_rows: int) -> torch.Tensor | None:
        """Return [N] the sequence of every row; None for a micro-batch beyond those of the pass."""
        if micro_batch >= len(self.rows):
            return None
        sequence_of_row = self._sequence_of_row[micro_batch]
        if not len(sequence_of_row):  # not announced: all are of sequence 0
            return sequence_of_row.new_zeros(num_rows)
        require(
            len(sequence_of_row) == num_rows,
            f"{len(sequence_of_row)} tokens were announced for micro-batch {micro_batch}, but the routers got "
            f"{num_rows}.",
        )
        return sequence_of_row

    def _zero_counts(self, micro_batch: int) -> torch.Tensor:
        num_sequences = len(self.rows[micro_batch].keys)
        return torch.zeros(num_sequences, self._num_experts, dtype=torch.int32, device=self._device)

    def _choices_in(self, micro_batch: int, layer: int) -> _LayerChoices:
        """Return what was counted in a layer: zeros if its router did not run."""
        choices = self._choices.get((micro_batch, layer))
        if choices is not None:
            return choices
        no_ids_shape = (len(self._sampled_rows[micro_batch]), self._top_k)
        no_ids = torch.zeros(no_ids_shape, dtype=torch.int16, device=self._device)
        return _LayerChoices(self._zero_counts(micro_batch), no_ids)


def _on_device(indices: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(indices)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
