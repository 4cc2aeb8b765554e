"""Where this process stands among the expert-parallel groups, and small exchanges between their ranks."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from moe_rl.balancing.exchange import PlanExchange, gather, gathered, own_group
from moe_rl.balancing.migrate import ExpertGrid
from moe_rl.core.errors import require


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroups(ExpertGrid):
    """EP group (P ranks that share a layer's experts), expert-DP group (G ranks that hold the same experts, or the same
    parts of them) and expert-tensor group (T ranks that hold the parts of the same experts)."""

    ep: dist.ProcessGroup
    expert_dp: dist.ProcessGroup
    expert_tp: dist.ProcessGroup
    replicas: dist.ProcessGroup
    """The ranks of the EP group once more: replica traffic does not queue behind Megatron's own."""

    @classmethod
    def current(cls) -> Self:
        """Return Megatron's groups and two of our own; a collective of all ranks, after `check_groups`."""
        ep = parallel_state.get_expert_model_parallel_group()
        expert_dp = parallel_state.get_expert_data_parallel_group()
        ranks = np.array(dist.get_process_group_ranks(ep))
        grid = gather(ranks, expert_dp)
        own_places = (tuple(ranks.tolist()), tuple(grid.ravel().tolist()))
        places_in_ep, places_in_grid = zip(*gathered(own_places), strict=True)
        groups = cls(
            ep=ep,
            expert_dp=expert_dp,
            expert_tp=parallel_state.get_expert_tensor_parallel_group(),
            # Of their own, with Megatron's time limit: a hang in them ends as one of Megatron's does.
            replicas=own_group(places_in_ep, timeout=_timeout(ep)),
            grid_group=own_group(places_in_grid, timeout=_timeout(ep)),
            grid=grid,
            device=_device(),
        )
        groups.warm()
        return groups

    def warm(self) -> None:
        """Connect the ranks of every group by a call that all of them make.

        NCCL builds a group's communicator in the group's first call, which has to be one of all its ranks. What follows
        may be messages between some of them: a first reorder in which a rank has nothing to move would leave the
        others waiting for it.
        """
        for group in (self.ep, self.expert_dp, self.replicas, self.grid_group):
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    def rebuilt(self) -> Self:
        """Return the groups after Megatron's were destroyed and made anew, connected; a collective of all ranks.

        Where a framework puts new groups into the objects that everybody holds, ours among them, they are only
        connected.
        """
        if parallel_state.get_expert_model_parallel_group() is self.ep:
            self.warm()
            return self
        self.destroy()
        return self.current()

    def destroy(self) -> None:
        """Give our own two groups' connections back; a collective of all ranks."""
        for group in (self.replicas, self.grid_group):
            with suppress(ValueError):  # the framework has destroyed it with its own
                dist.destroy_process_group(group)

    @property
    def part(self) -> tuple[int, int]:
        """(t, T): this rank's place among the ranks that hold the parts of the same experts, and their number."""
        return self.expert_tp.rank(), self.expert_tp.size()

    def all_true(self, holds: bool) -> bool:
        """Return whether `holds` is true on every rank of all EP groups of this pipeline stage."""
        return bool(gather(np.array([int(holds)], np.int64), self.ep, self.expert_dp, self.expert_tp).all())


def plan_exchange(groups: ExpertGroups) -> PlanExchange:
    """Return host groups of the EP and expert-DP ranks for planning alone; a collective of all ranks of the run."""
    kinds = (groups.ep, groups.expert_dp, groups.expert_tp)[: 3 if groups.expert_tp.size() > 1 else 2]
    groups_of_ranks = gathered([tuple(dist.get_process_group_ranks(kind)) for kind in kinds])
    process_groups = [
        own_group(ranks, backend="gloo", timeout=_timeout(groups.ep)) for ranks in zip(*groups_of_ranks, strict=True)
    ]
    return PlanExchange(**dict(zip(("ep", "expert_dp", "expert_tp"), process_groups, strict=False)))


def check_groups(ep_size: int) -> None:
    """Raise unless Megatron's groups are there, of the EP size that the model was built for, and of a kind we know."""
    require(
        parallel_state.model_parallel_is_initialized(),
        "Megatron's model-parallel groups are not initialized: call initialize_model_parallel before attach.",
    )
    megatron_ep_size = parallel_state.get_expert_model_parallel_world_size()
    require(
        megatron_ep_size == ep_size,
        f"the model was built with expert_model_parallel_size {ep_size}, but Megatron's groups have "
        f"{megatron_ep_size} EP ranks.",
    )


def _device() -> torch.device:
    device_index: Any = torch.cuda.current_device()
    if isinstance(device_index, torch.device):
        return device_index
    return torch.device("cuda", device_index)


def _timeout(group: dist.ProcessGroup) -> Any:
    """Return the group's own time limit, so that the replica group ends a hang as Megatron's groups do."""
    return group._get_backend(_device()).options._timeout
