"""Moves experts between home slots: weights, fp32 masters and Adam moments, in rounds of bounded scratch memory.

An expert's weights exist once per expert-DP rank and move inside each EP group; its optimizer state exists once, in
shards, and moves between any two ranks of the (EP, expert-DP) grid. What a round receives waits in scratch memory until
all ranks have everything; then it is copied into place, and the arrangement is one in which every expert is in exactly
one slot, weights and state together. So a reorder that fails leaves a whole arrangement, not a mixture:

- what a rank may lack (memory, optimizer state) is found, and all scratch memory is allocated, before anything is sent;
  then all ranks of the run give up together and nothing has moved;
- after that only a lost rank or connection can stop a round. No rank that notices it commits the round, and `on_commit`
  has told the arrangement of the last one. (A rank that is lost between the last agreement of a round and its commit
  can leave others one round ahead; like any lost rank it sends the run back to its checkpoint.)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from moe_rl.balancing.exchange import gather
from moe_rl.balancing.rounds import MIN_MOVES, arrangements_between
from moe_rl.balancing.streams import streams_of

ALIGNMENT_BYTES = 16


class ReorderError(RuntimeError):
    """A reorder was given up on every rank; the message says what has moved by then."""


class LocalExperts(Protocol):
    """The experts of one layer on this rank."""

    @property
    def num_local_experts(self) -> int:
        """E/P."""

    def parameters_of(self, slot: int) -> Sequence[torch.Tensor]:
        """Return the parameters of the expert in home slot `slot`, in one order on all ranks."""


class ExpertState(Protocol):
    """What the optimizer keeps for the parameters that `LocalExperts.parameters_of` returns."""

    def shards(self, parameter: Any) -> list[tuple[int, int]]:
        """Return, per expert-DP rank, the elements start .. stop - 1 of `parameter` whose state it holds."""

    def tensors(self, parameter: Any) -> list[list[torch.Tensor]]:
        """Return this rank's state of `parameter`, in one order on all ranks; empty where it holds no shard.

        Each is flat and stands first in a list of the places where it is kept; the others mirror it.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGrid:
    """The G x P ranks that hold the experts of a layer: G EP groups of P ranks."""

    grid: NDArray[np.int64]
    """[G, P] global ranks."""
    grid_group: Any
    """Process group of these ranks."""
    device: torch.device
    """Where tensors of the group live."""

    @property
    def ep_size(self) -> int:
        """P, ranks that share the experts of a layer."""
        return int(self.grid.shape[1])

    @property
    def num_ep_groups(self) -> int:
        """G, EP groups; each holds all experts."""
        return int(self.grid.shape[0])

    @property
    def place(self) -> tuple[int, int]:
        """(which of the G EP groups, EP rank) of this process."""
        group, rank = np.argwhere(self.grid == dist.get_rank())[0].tolist()
        return group, rank

    def gather_in_run(self, local: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return [W, ...]: the int64 array `local` [...] of all ranks of the run, those of other stages included."""
        return gather(local, None)

    def all_true_in_run(self, mine: bool) -> bool:
        """Return whether `mine` is true on every rank of the run."""
        return bool(self.gather_in_run(np.array([int(mine)], np.int64)).all())

    def all_true(self, mine: bool) -> bool:
        """Return whether `mine` is true on every rank of the grid, or of the run."""
        return self.all_true_in_run(mine)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMove:
    """One expert of one layer from one home slot to another; slots count over all ranks: rank * E/P + slot."""

    experts: LocalExperts
    source: int
    destination: int


@dataclass(slots=True)
class _Transfer:
    """What this rank sends in a round, and where what it receives will be written."""

    sends: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """(global rank, flat tensor)"""
    receives: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """(global rank, flat destination)"""
    mirrors: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Index among `receives` -> other places of the same numbers."""

    @property
    def received_bytes(self) -> int:
        """From other ranks."""
        own_rank = dist.get_rank()
        return sum(target.nbytes for rank, target in self.receives if rank != own_rank)

    @property
    def scratch_bytes(self) -> int:
        """Of all that arrives, every piece aligned."""
        return sum(_aligned(target.nbytes) for _, target in self.receives)

    def pieces_of(self, scratch: torch.Tensor) -> list[torch.Tensor]:
        """Return one view of `scratch` [bytes] per receive, shaped like its destination."""
        pieces, start = [], 0
        for _, target in self.receives:
            pieces.append(scratch[start : start + target.nbytes].view(target.dtype))
            start += _aligned(target.nbytes)
        return pieces


def moves_between(
    old_experts: NDArray[np.int32], new_experts: NDArray[np.int32], layers: Sequence[LocalExperts]
) -> list[ExpertMove]:
    """Return the moves of the L layers from `old_experts` to `new_experts`, both [L, E] experts by home slot."""
    moves = []
    for layer, experts in enumerate(layers):
        slot_of = np.argsort(old_experts[layer])
        for destination in np.flatnonzero(old_experts[layer] != new_experts[layer]).tolist():
            source = int(slot_of[new_experts[layer, destination]])
            moves.append(ExpertMove(experts=experts, source=source, destination=destination))
    return moves


@torch.no_grad()
def migrate(
    old: NDArray[np.int32],
    new: NDArray[np.int32],
    layers: Sequence[LocalExperts],
    *,
    groups: ExpertGrid,
    state: ExpertState | None,
    max_scratch_bytes: int,
    on_commit: Callable[[NDArray[np.int32]], None],
) -> int:
    """Rearrange the L layers of this rank from `old` to `new`, [L, E] experts by home slot; return bytes received.

    A collective of all ranks of the run. Without `state` weights move alone. Scratch memory stays within
    `max_scratch_bytes`, or two experts with their optimizer state where that is more. `on_commit` is called with the
    arrangement after every round. Raises `ReorderError` on all ranks of the pipeline stage.
    """
    transfers: list[_Transfer] = []
    arrangements: list[NDArray[np.int32]] = []
    scratch, failure = torch.empty(0), ""
    num_state_tensors = 0 if state is None else _number_of_state_tensors(layers, groups, state)
    try:
        num_shards = groups.num_ep_groups
        bytes_per_move = max((_bytes_per_move(e, num_state_tensors, num_shards) for e in layers), default=1)
        # Below two a swap inside one rank could not be carried out.
        max_moves = max(MIN_MOVES, max_scratch_bytes // bytes_per_move)
        per_rank = new.shape[1] // groups.ep_size
        arrangements = arrangements_between(old, new, per_rank=per_rank, max_moves=max_moves)
        for arrangement_before, arrangement_after in pairwise([old, *arrangements]):
            moves = moves_between(arrangement_before, arrangement_after, layers)
            transfers.append(_transfer(moves, groups, state, num_state_tensors))
        scratch = _scratch(transfers, device=groups.device)
    except Exception as error:  # whatever it is, the other ranks wait in the next line
        failure = f" The error on this rank: {error}"
    if not groups.all_true_in_run(not failure):
        raise ReorderError(f"no expert was moved, because a rank could not prepare the move.{failure}")
    for index, (arrangement, transfer) in enumerate(zip(arrangements, transfers, strict=True)):
        pieces = transfer.pieces_of(scratch)
        try:
            _exchange(transfer, pieces, groups)
            # Nobody overwrites anything before everybody has everything, on the device too: a vote between hosts would
            # pass while the messages that it is about are still under way.
            streams_of(groups.device).synchronize()
            groups.all_true(True)
        except Exception as error:  # a lost connection, or a message that the group's backend refuses
            raise ReorderError(
                f"moving the experts failed in round {index + 1} of {len(transfers)}. Each expert is complete and on "
                f"the rank where the earlier rounds put it. The error: {error}"
            ) from error
        for number, ((_, target), received_piece) in enumerate(zip(transfer.receives, pieces, strict=True)):
            for place in (target, *transfer.mirrors.get(number, ())):
                place.copy_(received_piece)
        on_commit(arrangement)
    return sum(transfer.received_bytes for transfer in transfers)


def _scratch(transfers: Sequence[_Transfer], *, device: torch.device) -> torch.Tensor:
    """Return memory [bytes] for what this rank receives in its largest round."""
    return torch.empty(max((t.scratch_bytes for t in transfers), default=0), dtype=torch.uint8, device=device)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _bytes_per_move(experts: LocalExperts, num_state_tensors: int, num_shards: int) -> int:
    """Return the most that a rank can receive with one expert: its weights, and all its state if one shard holds it."""
    state_bytes = num_state_tensors * torch.float32.itemsize
    padding = num_state_tensors * num_shards * ALIGNMENT_BYTES
    return sum(_aligned(p.nbytes) + p.numel() * state_bytes + padding for p in experts.parameters_of(0))


def _transfer(
    moves: Sequence[ExpertMove], groups: ExpertGrid, state: ExpertState | None, num_state_tensors: int
) -> _Transfer:
    """Walk the moves in the order that every rank follows and note this rank's part."""
    transfer = _Transfer()
    own_place = groups.place
    for move in moves:
        per_rank = move.experts.num_local_experts
        source_rank, source_slot = divmod(move.source, per_rank)
        target_rank, target_slot = divmod(move.destination, per_rank)
        parameters = zip(move.experts.parameters_of(source_slot), move.experts.parameters_of(target_slot), strict=True)
        for source, target in parameters:
            for group in range(groups.num_ep_groups):
                if own_place == (group, source_rank):
                    transfer.sends.append((groups.grid[group, target_rank], source.detach().view(-1)))
                if own_place == (group, target_rank):
                    transfer.receives.append((groups.grid[group, source_rank], target.detach().view(-1)))
            if state is None or not num_state_tensors:
                continue
            from_shards, to_shards = state.shards(source), state.shards(target)
            for from_group, to_group, start, stop in overlap(from_shards, to_shards):
                if own_place == (from_group, source_rank):
                    offset = from_shards[from_group][0]
                    peer = groups.grid[to_group, target_rank]
                    transfer.sends += [(peer, t[start - offset : stop - offset]) for t, *_ in state.tensors(source)]
                if own_place == (to_group, target_rank):
                    offset = to_shards[to_group][0]
                    peer = groups.grid[from_group, source_rank]
                    for places in state.tensors(target):
                        first_tensor, *mirrors = (t[start - offset : stop - offset] for t in places)
                        if mirrors:  # Megatron's own tensor mirrors an offloaded master
                            transfer.mirrors[len(transfer.receives)] = mirrors
                        transfer.receives.append((peer, first_tensor))
    return transfer


def _number_of_state_tensors(layers: Sequence[LocalExperts], groups: ExpertGrid, state: ExpertState) -> int:
    """Return how many state tensors a parameter has; a collective of the run. Raise where these differ."""
    counts, problem = {-1}, ""
    try:
        counts = {
            len(state.tensors(parameter))
            for experts in layers
            for slot in range(experts.num_local_experts)
            for parameter in experts.parameters_of(slot)
            if _held(state, parameter, groups.place[0])
        } or {-1}
    except Exception as error:  # whatever it is, the other ranks wait in the next line
        problem = f" The error on this rank: {error}"
    counts_of_ranks = groups.gather_in_run(np.array([min(counts), max(counts), int(not problem)], np.int64))
    numbers = sorted(set(counts_of_ranks[:, :2][counts_of_ranks[:, :2] >= 0].tolist()))
    if not counts_of_ranks[:, 2].all():
        raise ReorderError(f"no expert was moved, because a rank could not find its optimizer state.{problem}")
    if len(numbers) > 1:
        raise ReorderError(
            "no expert was moved, because the optimizer has different numbers of state tensors for expert "
            f"parameters: {numbers}."
        )
    return numbers[0] if numbers else 0


def _held(state: ExpertState, parameter: torch.Tensor, expert_dp_rank: int) -> bool:
    shards = state.shards(parameter)
    return bool(shards) and shards[expert_dp_rank][0] < shards[expert_dp_rank][1]


def _exchange(transfer: _Transfer, pieces: Sequence[torch.Tensor], groups: ExpertGrid) -> None:
    """Fill `pieces` from the ranks that `transfer` names; messages of a pair of ranks match in order.

    What lies on the host, as offloaded state does, travels from a copy on the device: at most as much as arrives, since
    as many experts leave a rank in a round. Messages are bytes: Megatron's precision-aware optimizer keeps the lower
    halves of fp32 masters as int16, a type that NCCL does not know.
    """
    me = dist.get_rank()
    own_tensors = iter([tensor for rank, tensor in transfer.sends if rank == me])
    operations = [
        dist.P2POp(dist.isend, tensor.to(groups.device).view(torch.uint8), rank, groups.grid_group)
        for rank, tensor in transfer.sends
        if rank != me
    ]
    for (rank, _), piece in zip(transfer.receives, pieces, strict=True):
        if rank == me:
            piece.copy_(next(own_tensors))
        else:
            operations.append(dist.P2POp(dist.irecv, piece.view(torch.uint8), rank, groups.grid_group))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


def overlap(source: list[tuple[int, int]], target: list[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (source shard, target shard, start, stop) of every non-empty intersection of two cuts of one parameter."""
    for from_rank, (a0, a1) in enumerate(source):
        for to_rank, (b0, b1) in enumerate(target):
            start, stop = max(a0, b0), min(a1, b1)
            if start < stop:
                yield from_rank, to_rank, start, stop
