"""What ranks tell each other on the host while they plan: small objects, over groups of their own.

The groups carry nothing else, so that a thread beside the training loop may use them. G EP groups of P ranks.
"""

import pickle
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError

# What of an object travels with its length, so that what fits takes one exchange.
SMALL_BYTES = 2**14
S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanExchange:
    """CPU groups of the ranks of this rank's EP group, and of those that hold the same experts in the other ones."""

    ep: dist.ProcessGroup
    expert_dp: dist.ProcessGroup
    expert_tp: dist.ProcessGroup | None = None
    """The ranks that hold the parts of the same experts under expert tensor parallelism; None where experts are whole.
    Each part has EP groups of its own; all parts run the rows of all of them, by one plan."""

    @property
    def rank(self) -> int:
        """EP rank of this process."""
        return int(self.ep.rank())

    @property
    def size(self) -> int:
        """P, ranks of an EP group."""
        return int(self.ep.size())

    @property
    def num_groups(self) -> int:
        """G, EP groups."""
        return int(self.expert_dp.size())

    @property
    def group_index(self) -> int:
        """Which of the G EP groups this process is in."""
        return int(self.expert_dp.rank())

    @property
    def part(self) -> int:
        """Which part of its experts this process holds."""
        return 0 if self.expert_tp is None else int(self.expert_tp.rank())

    def destroy(self) -> None:
        """Give the connections back; a collective of all ranks."""
        for group in filter(None, (self.ep, self.expert_dp, self.expert_tp)):
            with suppress(ValueError):  # the framework has destroyed it with its own
                dist.destroy_process_group(group)

    def gather(self, message: T) -> list[T]:
        """Return what every rank of the EP group gave."""
        return gathered(message, self.ep)

    def gather_parts(self, message: T) -> list[T]:
        """Return what every rank gave that holds a part of the same experts."""
        return [message] if self.expert_tp is None else gathered(message, self.expert_tp)

    def gather_in_grid(self, message: T) -> list[list[T]]:
        """Return what every rank gave, by EP group and EP rank."""
        return gathered(gathered(message, self.ep), self.expert_dp)

    def together(self, step: Callable[[], T], tell: Callable[[T], S]) -> tuple[T, list[list[S]]]:
        """Return what `step` returns on this rank, and what every rank tells of its own, by EP group and EP rank.

        Where a step fails on any rank it fails on all: with the rank's own error there, and elsewhere with an
        `InvalidInputError` that names the rank and says what it said.
        """

        def stepped() -> tuple[T, S]:
            value = step()
            return value, tell(value)

        outcome, error = attempted(stepped)
        outcomes_in_grid = self.gather_in_grid((None if outcome is None else outcome[1], told(error)))
        said_by = self.gather_parts(
            [[errors_of_ranks for _, errors_of_ranks in of_group] for of_group in outcomes_in_grid]
        )
        if error is not None:
            raise error
        for group, of_group in chain.from_iterable(map(enumerate, said_by)):
            for rank, errors_of_ranks in enumerate(of_group):
                if errors_of_ranks:
                    raise InvalidInputError(
                        f"EP rank {rank} of EP group {group} cannot plan this pass: {errors_of_ranks}"
                    )
        assert outcome is not None
        # no rank failed, so every value is set
        return outcome[0], [[value for value, _ in of_group] for of_group in outcomes_in_grid]  # type: ignore[misc]

    def gather_over_groups(self, message: T) -> list[T]:
        """Return what the ranks gave that hold the same experts in every EP group."""
        return gathered(message, self.expert_dp)

    def scatter_messages(self, messages: Sequence[T]) -> list[T]:
        """Return what each rank of the EP group had for this one; `messages[p]` is what this rank has for rank p."""
        if self.size == 1:
            return list(messages)
        pickles = [np.frombuffer(pickle.dumps(message), np.uint8) for message in messages]
        lengths_of_ranks = self.gather([len(message) for message in pickles])
        shapes = [(lengths[self.rank],) for lengths in lengths_of_ranks]
        return [pickle.loads(message.tobytes()) for message in self.scatter(pickles, shapes=shapes)]

    def scatter(self, parts: Sequence[NDArray[Any]], *, shapes: Sequence[Sequence[int]]) -> list[NDArray[Any]]:
        """Return what each rank p had for this one, of `shapes[p]`; `parts[p]` is what this rank has for rank p.

        All arrays have one dtype.
        """
        dtype = parts[0].dtype
        sent_bytes = torch.from_numpy(np.concatenate([part.ravel() for part in parts]).view(np.uint8))
        sizes = [int(np.prod(shape)) * dtype.itemsize for shape in shapes]
        received_bytes = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.all_to_all_single(
            received_bytes,
            sent_bytes,
            output_split_sizes=sizes,
            input_split_sizes=[part.nbytes for part in parts],
            group=self.ep,
        )
        pieces = np.split(received_bytes.numpy(), np.cumsum(sizes)[:-1])
        return [piece.view(dtype).reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def attempted(step: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what `step` returns, or why it failed: a rank that fails must still take part in the next exchange."""
    try:
        return step(), None
    except Exception as error:  # whatever it is, the others wait for this rank
        return None, error


def agreed(step: Callable[[], T]) -> T:
    """Return this rank's result of `step` if it succeeds on all ranks of the run; a collective call.

    If it raises on any rank, every rank raises an `InvalidInputError` that says what failed. No rank goes on alone or
    waits for a rank that has failed.
    """
    value, error = attempted(step)
    kind = "" if error is None or isinstance(error, InvalidInputError) else f"{type(error).__name__}: "
    words = [kind + told(error)]
    if dist.is_initialized():
        words = gathered(words[0])
    for rank, word in enumerate(words):
        if word:
            raise InvalidInputError(kind + told(error) or f"rank {rank} raised an error: {word}") from error
    return value  # type: ignore[return-value]  # no rank failed


def told(error: Exception | None) -> str:
    """Return what other ranks are told of an error; empty without one."""
    return "" if error is None else str(error) or type(error).__name__


def gathered(own_message: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return what every rank of a group (default: of the run) gave; a collective of them.

    Small objects take one exchange, where `all_gather_object` takes two: planning waits for the network, not for bytes.
    """
    if dist.get_world_size(group) == 1:
        return [own_message]
    payload = pickle.dumps(own_message)
    message = np.frombuffer(len(payload).to_bytes(8, "little") + payload, np.uint8)
    messages = gather(np.resize(message[:SMALL_BYTES], SMALL_BYTES), group)
    lengths = [8 + int.from_bytes(packet[:8].tobytes(), "little") for packet in messages]
    if max(lengths) > SMALL_BYTES:
        overflow = np.zeros(max(lengths) - SMALL_BYTES, np.uint8)
        overflow[: max(0, len(message) - SMALL_BYTES)] = message[SMALL_BYTES:]
        messages = np.concatenate([messages, gather(overflow, group)], axis=1)
    return [pickle.loads(packet[8:length].tobytes()) for packet, length in zip(messages, lengths, strict=True)]


def gather(local: NDArray[Any], *groups: dist.ProcessGroup | None) -> NDArray[Any]:
    """Return [..., G, P, *local.shape]: the array `local` of the P ranks of the first group, those of all G ranks of
    the second, and so on; None is the group of all ranks. A collective; all ranks must give the same shape and dtype.
    """
    local = np.ascontiguousarray(local)
    # As bytes: NCCL and gloo know few of numpy's types.
    values_of_ranks = torch.from_numpy(local.ravel().view(np.uint8)).to(_device_of(groups[0]))
    sizes = []
    for group in groups:
        parts = [torch.empty_like(values_of_ranks) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, values_of_ranks, group=group)
        values_of_ranks = torch.stack(parts)
        sizes.append(len(parts))
    result: NDArray[Any] = values_of_ranks.cpu().numpy().reshape(-1).view(local.dtype)
    return result.reshape(*sizes[::-1], *local.shape)


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return where a group's collectives want their tensors: on the host if one of its backends takes them there."""
    # Not get_backend_config: torch alone knows it, of its own groups, and colocated frameworks put theirs around these.
    on_device = dist.get_backend(group) in ("nccl", "cuda:nccl")
    return torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu")


def own_group(groups: Iterable[tuple[int, ...]], **settings: Any) -> dist.ProcessGroup:
    """Create every distinct group of `groups`, on all ranks in one order, and return the one with this rank.

    `settings` are those of `torch.distributed.new_group`.

    Not with `use_local_synchronization`: torch then names a group after the number of groups that the rank is in,
    which differs between ranks, and they wait for each other under different names.
    """
    rank = dist.get_rank()
    # Sorted, so that all ranks create the same groups in one order, those without them included.
    group_by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {
        ranks: dist.new_group(list(ranks), **settings) for ranks in sorted(set(groups))
    }
    return next(group for ranks, group in group_by_ranks.items() if rank in ranks)
