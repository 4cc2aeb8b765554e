"""A plan from what every worker knows of its own rows: counts are gathered, then all ranks plan alike.

Needs torch.distributed, and nothing of any framework's. G EP groups, P EP ranks.
"""

from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.exchange import gather
from moe_rl.balancing.loads import narrow
from moe_rl.balancing.schedule import cluster_topology, plan_of_load
from moe_rl.core.errors import require
from moe_rl.core.load import StepLoad
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.planner.base import COPIES, Levers


def plan_from_local(
    counts: NDArray[np.integer],
    ep_group: dist.ProcessGroup,
    *,
    config: BalancerConfig,
    model: MoeModelSpec,
    expert_dp_group: dist.ProcessGroup | None = None,
    placement: ExpertPlacement | None = None,
    forward_only: bool = False,
    may: Levers = COPIES,
) -> Plan:
    """Return the plan of one `forward_backward_func` call from what every worker knows of it; the same on all ranks.

    `counts` [M, L, E] are the token-expert pairs of this rank's own rows (its slice under TP and CP). A collective of
    the EP group, and of `expert_dp_group` where several EP groups hold the same experts: `begin_pass` wants a plan for
    all of them. Counts do not say which experts meet in a token, so plans know no locality: give a balancer's methods
    routes where you have them. The other arguments are those of `plan_from_schedule`.
    """
    pairs = np.asarray(counts)
    require(
        pairs.ndim == 3 and pairs.shape[1:] == (model.num_moe_layers, model.num_experts) and not (pairs < 0).any(),
        f"counts must be [M, {model.num_moe_layers} MoE layers, {model.num_experts} experts] and not negative, got "
        f"{list(pairs.shape)}.",
    )
    rows = -(-pairs.sum(axis=2).max(axis=1, initial=0) // model.top_k)
    groups = [ep_group] if expert_dp_group is None else [ep_group, expert_dp_group]

    def gather_grid(local: NDArray[Any]) -> NDArray[Any]:
        return gather(local, *groups).reshape(-1, ep_group.size(), *local.shape)

    facts = gather_grid(np.array([len(pairs), pairs.max(initial=0)], np.int64))
    counts = np.unique(facts[..., 0]).tolist()
    require(len(counts) == 1, f"the ranks gave counts of different numbers of micro-batches: {counts}.")
    everyone = gather_grid(narrow(pairs, int(facts[..., 1].max())))
    load = StepLoad(
        pairs=np.ascontiguousarray(everyone.transpose(0, 2, 3, 1, 4), np.int32),
        tokens=np.ascontiguousarray(gather_grid(rows.astype(np.int64)).transpose(0, 2, 1)),
        top_k=model.top_k,
    )
    return plan_of_load(
        load,
        config=config,
        model=model,
        topology=cluster_topology(config, ep_size=load.ep_size, num_ep_groups=load.num_ep_groups),
        placement=placement,
        forward_only=forward_only,
        may=may,
    )
