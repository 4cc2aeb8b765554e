"""How much of an all-to-all was waiting, and how much time imbalance cost.

An all-to-all ends for every rank when the last one has joined, so a rank's measured duration is transfer plus waiting
for slower ranks. Per call: transfer = the shortest duration over ranks, and a rank's wait is its time beyond that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.profiling.attribution import AllToAll, AttributedWork, Call, all_to_all_seconds, expert_seconds_of_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSplit:
    """Seconds of the dispatch and combine all-to-alls of all ranks, split; and of the experts between them."""

    transfers_s: dict[AllToAll, float]
    """Shortest duration over ranks of every all-to-all."""
    wait_s: tuple[float, ...]
    """[ranks] time each rank spent waiting in all-to-alls."""
    experts_s: dict[Call, NDArray[np.float64]]
    """[ranks] expert time, permutation included, of every call."""

    @property
    def transfer_s(self) -> float:
        """Time that every rank spends transferring."""
        return sum(self.transfers_s.values())

    @property
    def imbalance_loss_s(self) -> float:
        """Mean wait of a rank: the time that perfect balance would have saved."""
        return sum(self.wait_s) / len(self.wait_s)

    @property
    def slowest_experts_s(self) -> float:
        """Sum over calls of the slowest rank's expert time: the other ranks wait for it."""
        slowest_s = 0.0
        for seconds in self.experts_s.values():
            slowest_s += float(seconds.max())
        return slowest_s

    @property
    def expert_loss_s(self) -> float:
        """Sum over calls of the slowest rank's expert time less the mean: the loss that expert rows explain.

        The rest is waiting for attention of unequal sequences, the host, or the network.
        """
        return self.slowest_experts_s - self._mean_experts_s

    @property
    def expert_imbalance(self) -> float | None:
        """Sum over calls of the slowest rank's expert time / the same sum of the mean; None without expert work."""
        if self._mean_experts_s <= 0:
            return None
        return self.slowest_experts_s / self._mean_experts_s

    @property
    def _mean_experts_s(self) -> float:
        mean_s = 0.0
        for seconds_by_rank in self.experts_s.values():
            mean_s += float(seconds_by_rank.mean())
        return mean_s


def split_waiting(per_rank: Sequence[Sequence[AttributedWork]]) -> WaitSplit:
    """Split all-to-all time of all ranks into transfer and waiting.

    Needs recordings of two ranks or more, ranges around dispatch and combine, and the same all-to-alls on every rank.
    """
    require(len(per_rank) > 1, "to separate waiting from transfer, moe_rl needs recordings of at least two ranks.")
    durations_of_ranks = [all_to_all_seconds(attributed) for attributed in per_rank]
    keys = set(durations_of_ranks[0])
    for rank, durations in enumerate(durations_of_ranks):
        require(
            set(durations) == keys,
            f"recording {rank} has {len(durations)} all-to-alls in moe_rl ranges, but recording 0 has {len(keys)}: "
            "they cannot be compared.",
        )
    require(
        bool(keys),
        "no all-to-all is in a moe_rl range, so waiting cannot be separated from transfer: record with MOE_RL_NVTX=1.",
    )
    # The rank that joins last waits for nobody: its time is the transfer.
    transfers = dict(durations_of_ranks[0])
    for durations in durations_of_ranks[1:]:
        for key, seconds in durations.items():
            transfers[key] = min(transfers[key], seconds)
    transfer = sum(transfers.values())
    return WaitSplit(
        transfers_s=transfers,
        wait_s=tuple(sum(durations.values()) - transfer for durations in durations_of_ranks),
        experts_s=expert_seconds_of_ranks(per_rank),
    )
