"""From the routes that a rank knows to a plan that all ranks make alike.

Every rank counts its own rows, the counts are gathered over the EP and expert-DP groups, and every rank runs the same
deterministic planner on the same numbers. M micro-batches, L MoE layers of the whole model, K choices, E experts,
G EP groups, P EP ranks.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moe_rl.config import load_cluster
from moe_rl.core.cost import layer_cost_params
from moe_rl.core.errors import require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import ExpertLoad
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.core.topology import ClusterTopology
from moe_rl.megatron.config import BalancerConfig
from moe_rl.megatron.groups import ExpertGroups
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.registry import make_planner


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
    return ClusterTopology(
        hardware=load_cluster(config.cluster),
        ep_size=groups.ep_size,
        num_ep_groups=groups.num_ep_groups,
        ranks_per_node=min(config.ranks_per_node, groups.ep_size),
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


def gather_load(pairs: NDArray[np.int64], rows: NDArray[np.int64], *, groups: ExpertGroups, top_k: int) -> ExpertLoad:
    """Return the loads of all ranks from this rank's [M, L, E] pairs and [M] rows; a collective of all ranks."""
    shapes = groups.gather(np.array(pairs.shape, np.int64))
    require(
        bool((shapes == shapes[0, 0]).all()),
        f"the ranks gave routes of different [M, L, E]: {np.unique(shapes.reshape(-1, 3), axis=0).tolist()}.",
    )
    everyone = groups.gather(np.concatenate([pairs.ravel(), rows]))
    num_groups, ep_size = everyone.shape[:2]
    all_pairs = everyone[:, :, : pairs.size].reshape(num_groups, ep_size, *pairs.shape)
    return ExpertLoad(
        pairs=np.ascontiguousarray(all_pairs.transpose(0, 2, 3, 1, 4)).astype(np.int32),
        tokens=np.ascontiguousarray(everyone[:, :, pairs.size :].transpose(0, 2, 1)),
        top_k=top_k,
    )


def worker_layout(num_micro_batches: int, num_ranks: int) -> BatchLayout:
    """Return the layout of a worker's plan: one run of rows per (micro-batch, rank), fixed by the framework."""
    cells = np.indices((num_micro_batches, num_ranks)).reshape(2, -1).astype(np.int32)
    return BatchLayout(
        micro_batch=cells[0],
        dp_rank=cells[1],
        order=np.zeros(cells.shape[1], np.int32),
        num_micro_batches=num_micro_batches,
        num_dp_ranks=num_ranks,
        fixed=True,
    )


def plan_of_load(
    load: ExpertLoad,
    *,
    config: BalancerConfig,
    model: MoeModelSpec,
    topology: ClusterTopology,
    placement: ExpertPlacement,
    layout: BatchLayout | None = None,
    forward_only: bool = False,
) -> Plan:
    """Return the policy's plan; the same on every rank that has the same load."""
    problem = PlanProblem(
        load=load,
        layout=worker_layout(load.num_micro_batches, topology.num_ranks) if layout is None else layout,
        model=model,
        topology=topology,
        cost=layer_cost_params(model, topology, forward_only=forward_only),
        objective=config.objective,
        replica_slots=config.replica_slots,
        cross_node_slots=config.cross_node_slots,
        current_placement=placement,
    )
    return make_planner(config.policy, **config.parameters).plan(problem)
