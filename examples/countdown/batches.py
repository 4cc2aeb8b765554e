"""Cells: the padded micro-batches of one data-parallel rank, cut out of packed rollouts.

S sequences, T packed tokens, M micro-batches, R ranks, B sequences of a cell, N input tokens of its longest sequence,
L MoE layers, K experts per token, E experts. A sequence of n tokens has n - 1 inputs: the last token is only predicted,
so that every input row was run by the rollout engine and has a route. Megatron orders rows [N, B].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from examples.countdown.problems import EOS_ID
from examples.countdown.rollouts import Rollouts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cell:
    """One micro-batch of one rank."""

    tokens: Tensor
    """[B, N] int64 inputs, padded on the right, where causal attention keeps padding from being seen."""
    targets: Tensor
    """[B, N] int64 the token after each input."""
    target_index: Tensor
    """[B, N] int64 packed index of the target; that of some real token where the input is padding."""
    real: Tensor
    """[B, N] bool, False for padding."""

    @property
    def keys(self) -> Tensor:
        """[N * B] int64 packed index of the input of every row, in Megatron's order; -1 for padding."""
        return self.rows(torch.where(self.real, self.target_index - 1, -1))

    def of_targets(self, packed: Tensor) -> Tensor:
        """Return [B, N, ...]: the entries of `packed` [T, ...] at the targets; arbitrary at padding."""
        return packed[self.target_index]

    def of_inputs(self, packed: Tensor) -> Tensor:
        """Return [B, N, ...]: the entries of `packed` [T, ...] at the inputs; arbitrary at padding."""
        return packed[self.target_index - 1]

    def scatter(self, values: Tensor, packed: Tensor) -> None:
        """Write `values` [B, N, ...] to the targets' entries of `packed` [T, ...]."""
        packed[self.target_index[self.real]] = values[self.real].to(packed.dtype)

    def scatter_inputs(self, values: Tensor, packed: Tensor) -> None:
        """Write `values` [B, N, ...] to the inputs' entries of `packed` [T, ...]."""
        packed[self.target_index[self.real] - 1] = values[self.real].to(packed.dtype)

    def rows(self, values: Tensor) -> Tensor:
        """Return [N * B, ...] in Megatron's row order from [B, N, ...]."""
        return values.transpose(0, 1).flatten(0, 1)

    def unrows(self, rows: Tensor) -> Tensor:
        """Return [B, N, ...] from rows [N * B, ...] in Megatron's order."""
        size, longest = self.tokens.shape
        return rows.view(longest, size, *rows.shape[1:]).transpose(0, 1)

    def replayed_rows(self, routed_experts: Tensor, num_experts: int) -> Tensor:
        """Return [N * B, L, K] int64 ids to replay from `routed_experts` [T, L, K].

        Padding is dispatched too. It is sent round the experts in turn, another start per layer, so that it makes no
        expert hot.
        """
        num_layers, top_k = routed_experts.shape[1:]
        real = self.rows(self.real)
        ordinal = ((~real).cumsum(0) - 1)[:, None, None]
        layer, choice = torch.arange(num_layers)[:, None], torch.arange(top_k)
        spread = (ordinal * top_k + layer + choice) % num_experts
        known = self.rows(self.of_inputs(routed_experts)).long()
        return torch.where(real[:, None, None], known, spread)

    def expected_rows(self, routed_experts: Tensor) -> Tensor:
        """Return [N * B, L, K] int64 ids that a free router is expected to choose; -1 for padding."""
        known = self.rows(self.of_inputs(routed_experts)).long()
        return torch.where(self.rows(self.real)[:, None, None], known, -1)


def cells_of_rank(
    rollouts: Rollouts, sequences: Tensor, *, rank: int, num_ranks: int, micro_batch_size: int
) -> list[Cell]:
    """Return the M cells of a rank for the given sequences `[M * R * B]`: those of like length run together."""
    order = sequences[torch.argsort(rollouts.lengths[sequences], descending=True, stable=True)]
    grid = order.view(-1, micro_batch_size, num_ranks)
    return [_cell(rollouts, members) for members in grid[:, :, rank]]


def _cell(rollouts: Rollouts, members: Tensor) -> Cell:
    lengths = rollouts.lengths[members]
    position = torch.arange(int(lengths.max()) - 1)
    real = position < lengths[:, None] - 1
    target = rollouts.cu_seqlens[members][:, None] + 1 + torch.where(real, position, 0)
    return Cell(
        tokens=torch.where(real, rollouts.tokens[target - 1], EOS_ID),
        targets=torch.where(real, rollouts.tokens[target], EOS_ID),
        target_index=target,
        real=real,
    )
