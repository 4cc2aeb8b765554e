"""A plan from what every worker knows of its own rows: counts are gathered, then all ranks plan alike.

Needs torch.distributed, and nothing of any framework's. G EP groups, P EP ranks.
"""

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.exchange import gathered
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
        f"the counts must be at least 0 and have shape [micro-batches, {model.num_moe_layers} MoE layers, "
        f"{model.num_experts} experts], got shape {list(pairs.shape)} and a minimum of {pairs.min(initial=0)}.",
    )
    # Each rank's counts say how they are narrowed: pickled, those of several types travel together.
    of_groups = [gathered(narrow(pairs, int(pairs.max(initial=0))), ep_group)]
    if expert_dp_group is not None:
        of_groups = gathered(of_groups[0], expert_dp_group)
    numbers = sorted({len(loads_of_rank) for of_group in of_groups for loads_of_rank in of_group})
    require(len(numbers) == 1, f"all ranks must have the same number of micro-batches, but they have {numbers}.")
    pairs_of_groups = np.array(of_groups, np.int32).transpose(0, 2, 3, 1, 4)
    load = StepLoad(
        pairs=np.ascontiguousarray(pairs_of_groups),
        tokens=-(-pairs_of_groups.sum(axis=4, dtype=np.int64).max(axis=2, initial=0) // model.top_k),
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
