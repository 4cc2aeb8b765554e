"""How much of an all-to-all was waiting, and how much time imbalance cost.

An all-to-all ends for every rank when the last one has joined, so a rank's measured duration is transfer plus waiting
for slower ranks. Per call: transfer = the shortest duration over ranks, and a rank's wait is its time beyond that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moe_rl.core.errors import require
from moe_rl.profiling.attribution import AllToAll, AttributedWork, Call, all_to_all_seconds, expert_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSplit:
    """Seconds of the dispatch and combine all-to-alls of all ranks, split; and of the experts between them."""

    transfers_s: dict[AllToAll, float]
    """Shortest duration over ranks of every all-to-all."""
    wait_s: tuple[float, ...]
    """[ranks] time each rank spent waiting in all-to-alls."""
    experts_s: tuple[dict[Call, float], ...]
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
        calls = {call for of_rank in self.experts_s for call in of_rank}
        return sum(max(of_rank.get(call, 0.0) for of_rank in self.experts_s) for call in calls)

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
        return sum(sum(of_rank.values()) for of_rank in self.experts_s) / len(self.experts_s)


def split_waiting(per_rank: Sequence[Sequence[AttributedWork]]) -> WaitSplit:
    """Split all-to-all time of all ranks into transfer and waiting.

    Needs recordings of two ranks or more, ranges around dispatch and combine, and the same all-to-alls on every rank.
    """
    require(len(per_rank) > 1, "waiting can be told from transfer only with recordings of two ranks or more.")
    measured = [all_to_all_seconds(attributed) for attributed in per_rank]
    keys = set(measured[0])
    for rank, durations in enumerate(measured):
        require(
            set(durations) == keys,
            f"recording {rank} has {len(durations)} all-to-alls in moe_rl ranges, recording 0 has {len(keys)}: they "
            "cannot be compared.",
        )
    require(bool(keys), "no all-to-all lies in a moe_rl range: waiting cannot be told from transfer.")
    # The rank that joins last waits for nobody: its time is the transfer.
    transfers = {key: min(durations[key] for durations in measured) for key in measured[0]}
    transfer = sum(transfers.values())
    return WaitSplit(
        transfers_s=transfers,
        wait_s=tuple(sum(durations.values()) - transfer for durations in measured),
        experts_s=tuple(map(expert_seconds, per_rank)),
    )
