"""Moves experts between home slots: weights, fp32 masters and Adam moments, in one exchange and one commit.

An expert's weights exist once per expert-DP rank and move inside each EP group; its optimizer state exists once, in
shards, and moves between any two ranks of the (EP, expert-DP) grid. Everything received waits in scratch memory until
all ranks have everything; then it is copied into place. A failure before that leaves the old placement whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from moe_rl.megatron.expert_state import ExpertOptimizerState, overlap
from moe_rl.megatron.experts import Experts
from moe_rl.megatron.groups import ExpertGroups


class ReorderError(RuntimeError):
    """A reorder was given up on every rank before anything moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMove:
    """One expert of one layer from one home slot to another; slots count over all ranks: rank * E/P + slot."""

    experts: Experts
    source: int
    destination: int


@dataclass(slots=True)
class _Transfer:
    """What this rank sends, and where what it receives will be written."""

    sends: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """(global rank, tensor)"""
    receives: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """(global rank, destination)"""

    @property
    def received_bytes(self) -> int:
        return sum(target.numel() * target.element_size() for _, target in self.receives)


def moves_between(
    old: NDArray[np.int32], new: NDArray[np.int32], layers: Sequence[tuple[int, Experts]]
) -> list[ExpertMove]:
    """Return the moves of the given (layer, experts) from `old` to `new`, both [L, E] experts by home slot."""
    moves = []
    for layer, experts in layers:
        slot_of = np.argsort(old[layer])
        for destination in np.flatnonzero(old[layer] != new[layer]).tolist():
            source = int(slot_of[new[layer, destination]])
            moves.append(ExpertMove(experts=experts, source=source, destination=destination))
    return moves


@torch.no_grad()
def migrate(moves: Sequence[ExpertMove], *, groups: ExpertGroups, state: ExpertOptimizerState) -> int:
    """Carry out `moves` on every rank; return the bytes that this rank received.

    A collective of all ranks of the pipeline stage. Raises `ReorderError` on all of them when one could not prepare.
    """
    transfer, problem = _Transfer(), ""
    scratch: list[torch.Tensor] = []
    try:
        transfer = _transfer(moves, groups, state)
        scratch = _scratch(transfer)
    except (RuntimeError, MemoryError) as error:
        problem = f" This rank: {error}"
    if not groups.all_true(not problem):
        raise ReorderError(f"a rank could not prepare the reorder; no expert was moved.{problem}")
    _exchange(transfer, scratch, groups)
    if not groups.all_true(True):
        raise ReorderError("a rank did not receive its experts; no expert was moved.")
    for (_, target), received in zip(transfer.receives, scratch, strict=True):
        target.copy_(received)
    return transfer.received_bytes


def _scratch(transfer: _Transfer) -> list[torch.Tensor]:
    """Return memory for everything that this rank receives."""
    return [torch.empty_like(target) for _, target in transfer.receives]


def _transfer(moves: Sequence[ExpertMove], groups: ExpertGroups, state: ExpertOptimizerState) -> _Transfer:
    """Walk the moves in the order that every rank follows and note this rank's part."""
    transfer = _Transfer()
    if not moves:
        return transfer
    mine = (groups.ep_group_index, groups.ep_rank)
    num_state_tensors = _number_of_state_tensors(moves, groups, state)
    for move in moves:
        per_rank = move.experts.num_local_experts
        source_rank, source_slot = divmod(move.source, per_rank)
        target_rank, target_slot = divmod(move.destination, per_rank)
        parameters = zip(move.experts.parameters_of(source_slot), move.experts.parameters_of(target_slot), strict=True)
        for source, target in parameters:
            for group in range(groups.num_ep_groups):
                if mine == (group, source_rank):
                    transfer.sends.append((groups.grid[group, target_rank], source.detach().view(-1)))
                if mine == (group, target_rank):
                    transfer.receives.append((groups.grid[group, source_rank], target.detach().view(-1)))
            if not num_state_tensors:
                continue
            from_shards, to_shards = state.shards(source), state.shards(target)
            for from_group, to_group, start, stop in overlap(from_shards, to_shards):
                if mine == (from_group, source_rank):
                    offset = from_shards[from_group][0]
                    peer = groups.grid[to_group, target_rank]
                    transfer.sends += [(peer, t[start - offset : stop - offset]) for t in state.tensors(source)]
                if mine == (to_group, target_rank):
                    offset = to_shards[to_group][0]
                    peer = groups.grid[from_group, source_rank]
                    transfer.receives += [(peer, t[start - offset : stop - offset]) for t in state.tensors(target)]
    return transfer


def _number_of_state_tensors(moves: Sequence[ExpertMove], groups: ExpertGroups, state: ExpertOptimizerState) -> int:
    """Return how many state tensors a parameter has; raise where ranks or parameters differ."""
    counts = {
        len(state.tensors(parameter))
        for move in moves
        for slot in range(move.experts.num_local_experts)
        for parameter in move.experts.parameters_of(slot)
        if _held(state, parameter, groups.ep_group_index)
    }
    local = sorted(counts) or [-1]
    everyone = groups.gather(np.array([local[0], local[-1]], np.int64))
    found = sorted(set(everyone[everyone >= 0].tolist()))
    if len(found) > 1:
        raise RuntimeError(f"the optimizer holds {found} state tensors for different expert parameters.")
    return found[0] if found else 0


def _held(state: ExpertOptimizerState, parameter: torch.nn.Parameter, expert_dp_rank: int) -> bool:
    start, stop = state.shards(parameter)[expert_dp_rank]
    return start < stop


def _exchange(transfer: _Transfer, scratch: Sequence[torch.Tensor], groups: ExpertGroups) -> None:
    """Fill `scratch` from the ranks that `transfer` names; messages of a pair of ranks match in order."""
    me = dist.get_rank()
    own = [tensor for rank, tensor in transfer.sends if rank == me]
    operations = [
        dist.P2POp(dist.isend, tensor, rank, groups.grid_group) for rank, tensor in transfer.sends if rank != me
    ]
    for (rank, _), buffer in zip(transfer.receives, scratch, strict=True):
        if rank == me:
            buffer.copy_(own.pop(0))
        else:
            operations.append(dist.P2POp(dist.irecv, buffer, rank, groups.grid_group))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
