"""From the routes that a rank knows to a plan that all ranks make alike.

Every rank counts its own rows, the counts are gathered over the EP and expert-DP groups, and every rank runs the same
deterministic planner on the same numbers. M micro-batches, L MoE layers of the whole model, K choices, E experts,
G EP groups, P EP ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.load import ExpertLoad
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.core.topology import ClusterTopology
from moe_rl.megatron.config import BalancerConfig
from moe_rl.megatron.groups import ExpertGroups, gather_grid
from moe_rl.megatron.layer import LayerState
from moe_rl.megatron.schedule import cluster_topology, plan_of_load


def model_spec(config: Any) -> MoeModelSpec:
    """Return the shape of a model from its `TransformerConfig`; the vocabulary, which no plan needs, is given as 1."""
    frequency = config.moe_layer_freq
    is_moe = [i % frequency == 0 for i in range(config.num_layers)] if isinstance(frequency, int) else frequency
    return MoeModelSpec(
        name="megatron",
        num_layers=config.num_layers,
        moe_layer_ids=tuple(index for index, moe in enumerate(is_moe) if moe),
        num_experts=config.num_moe_experts,
        top_k=config.moe_router_topk,
        hidden_size=config.hidden_size,
        moe_ffn_hidden_size=config.moe_ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        vocab_size=1,
        activation="swiglu" if config.gated_linear_unit else "gelu",
    )


def topology_of(config: BalancerConfig, groups: ExpertGroups) -> ClusterTopology:
    """Return the EP groups as a cluster: every EP rank holds its own rows, so it counts as a data-parallel rank."""
    return cluster_topology(config, ep_size=groups.ep_size, num_ep_groups=groups.num_ep_groups)


def plan_from_local(
    counts: NDArray[np.integer],
    ep_group: dist.ProcessGroup,
    *,
    config: BalancerConfig,
    model: MoeModelSpec,
    expert_dp_group: dist.ProcessGroup | None = None,
    placement: ExpertPlacement | None = None,
    forward_only: bool = False,
    reorder: bool = False,
) -> Plan:
    """Return the plan of one `forward_backward_func` call from what every worker knows of it; the same on all ranks.

    `counts` [M, L, E] are the token-expert pairs of this rank's own rows (its slice under TP and CP). A collective of
    the EP group, and of `expert_dp_group` where several EP groups hold the same experts: `begin_pass` wants a plan for
    all of them. The other arguments are those of `plan_from_schedule`.
    """
    pairs = np.asarray(counts)
    require(
        pairs.ndim == 3 and pairs.shape[1:] == (model.num_moe_layers, model.num_experts) and not (pairs < 0).any(),
        f"counts must be [M, {model.num_moe_layers} MoE layers, {model.num_experts} experts] and not negative, got "
        f"{list(pairs.shape)}.",
    )
    rows = -(-pairs.sum(axis=2).max(axis=1, initial=0) // model.top_k)

    def gather(local: NDArray[np.int64]) -> NDArray[np.int64]:
        return gather_grid(local, ep_group, expert_dp_group)

    load = gather_load(pairs.astype(np.int64), rows.astype(np.int64), gather=gather, top_k=model.top_k)
    return plan_of_load(
        load,
        config=config,
        model=model,
        topology=cluster_topology(config, ep_size=load.ep_size, num_ep_groups=load.num_ep_groups),
        placement=placement,
        forward_only=forward_only,
        reorder=reorder,
    )


def count_routes(
    routes: Sequence[torch.Tensor | NDArray[np.integer]], *, num_layers: int, num_experts: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return ([M, L, E] pairs, [M] rows) of one rank from its routes, one [N, L, K] integer array per micro-batch.

    Rows are those that the rank really holds (its slice under tensor or context parallelism), in any order; -1 marks a
    choice that is not known. Raises `InvalidInputError` for another shape and for an id outside -1 .. E - 1.
    """
    pairs = np.zeros((len(routes), num_layers, num_experts), np.int64)
    rows = np.zeros(len(routes), np.int64)
    for micro_batch, given in enumerate(routes):
        ids = np.asarray(given.detach().cpu() if isinstance(given, torch.Tensor) else given)
        require(
            ids.ndim == 3 and ids.shape[1] == num_layers and np.issubdtype(ids.dtype, np.integer),
            f"the routes of micro-batch {micro_batch} must be integers [N, L, K] with L = {num_layers} MoE layers, "
            f"got {ids.dtype} {list(ids.shape)}.",
        )
        if ids.size:
            require(
                int(ids.min()) >= -1 and int(ids.max()) < num_experts,
                f"the routes of micro-batch {micro_batch} hold expert ids {int(ids.min())} .. {int(ids.max())}, "
                f"outside -1 .. {num_experts - 1}.",
            )
        for layer in range(num_layers):
            known = ids[:, layer][ids[:, layer] >= 0]
            pairs[micro_batch, layer] = np.bincount(known, minlength=num_experts)
        rows[micro_batch] = int((ids >= 0).any(axis=(1, 2)).sum())
    return pairs, rows


def count_routed(
    states: Sequence[LayerState], *, num_micro_batches: int, model: MoeModelSpec
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return ([M, L, E] pairs, [M] rows) that the routers of this rank chose; layers of other stages have none."""
    pairs = np.zeros((num_micro_batches, model.num_moe_layers, model.num_experts), np.int64)
    for state in states:
        for micro_batch, counts in (state.routed or {}).items():
            if micro_batch < num_micro_batches:
                pairs[micro_batch, state.layer] = counts.cpu().numpy()
    return pairs, pairs.sum(axis=2).max(axis=1, initial=0) // model.top_k


def gather_load(
    pairs: NDArray[np.int64],
    rows: NDArray[np.int64],
    *,
    gather: Callable[[NDArray[np.int64]], NDArray[np.int64]],
    top_k: int,
) -> ExpertLoad:
    """Return the loads of all ranks from this rank's [M, L, E] pairs and [M] rows.

    `gather` is the collective that turns every rank's array [...] into all of them, [G, P, ...].
    """
    shapes = gather(np.array(pairs.shape, np.int64))
    require(
        bool((shapes == shapes[0, 0]).all()),
        f"the ranks gave routes of different [M, L, E]: {np.unique(shapes.reshape(-1, 3), axis=0).tolist()}.",
    )
    everyone = gather(np.concatenate([pairs.ravel(), rows]))
    num_groups, ep_size = everyone.shape[:2]
    all_pairs = everyone[:, :, : pairs.size].reshape(num_groups, ep_size, *pairs.shape)
    return ExpertLoad(
        pairs=np.ascontiguousarray(all_pairs.transpose(0, 2, 3, 1, 4)).astype(np.int32),
        tokens=np.ascontiguousarray(everyone[:, :, pairs.size :].transpose(0, 2, 1)),
        top_k=top_k,
    )
