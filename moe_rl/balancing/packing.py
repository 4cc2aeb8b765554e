"""Micro-batches of a running pass packed anew: every data-parallel rank deals its own sequences to them.

A framework has given each rank its sequences, and forms micro-batches on each rank by length alone. Which of them run
at the same time on all ranks decides how well their experts' loads complement each other. S sequences of a rank, M
micro-batches, l MoE layers of a pipeline stage, B bins (nodes, or ranks where there are no replicas).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.schedule import cluster_topology, step_setting
from moe_rl.core.layout import BatchLayout
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.native import native_core
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.objective import OBJECTIVES
from moe_rl.planner.packing import packed_on_their_ranks
from moe_rl.simulators.balanced import cost_of_lengths
from moe_rl.simulators.setting import StepSetting, TrainingRun


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSequences:
    """What a rank tells all others of its sequences."""

    dp_rank: int
    stage: int
    """Pipeline stage, whose layers are counted."""
    tokens: NDArray[np.int64]
    """[S]"""
    micro_batch: NDArray[np.int32]
    """[S] as the framework has formed them."""
    bin_load: NDArray[np.int32]
    """[S, B, l] rows that the experts of each bin get."""

    @classmethod
    def of(
        cls,
        pairs: NDArray[np.int32],
        home_rank: NDArray[np.int32],
        *,
        tokens: Sequence[int],
        topology: ClusterTopology,
        by_rank: bool,
        dp_rank: int,
        stage: int,
        micro_batches: Sequence[Sequence[int]],
    ) -> "RankSequences":
        """Return them from the pairs [S, l, E] of the sequences and the homes [l, E] of this stage's experts."""
        core, bins = native_core(), bins_of(topology, by_rank=by_rank)
        micro_batch = np.empty(len(tokens), np.int32)
        for index, sequences in enumerate(micro_batches):
            micro_batch[list(sequences)] = index
        bin_of = (home_rank // (topology.ep_size // bins)).astype(np.int32)
        shape = len(tokens), bins, len(home_rank)
        load = np.zeros(shape, np.int32) if core is None else core.bin_loads(pairs, bin_of, bins, 1).reshape(shape)
        lengths = np.array(tokens, np.int64)
        return cls(dp_rank=dp_rank, stage=stage, tokens=lengths, micro_batch=micro_batch, bin_load=load)


def bins_of(topology: ClusterTopology, *, by_rank: bool) -> int:
    """Return B: replicas level the ranks of a node, so that only nodes are left to complement each other."""
    return topology.ep_size if by_rank else topology.num_nodes


def packed_micro_batches(
    everyone: Sequence[RankSequences],
    *,
    config: BalancerConfig,
    model: MoeModelSpec,
    ep_size: int,
    num_ep_groups: int,
    token_budget: int,
    setting: StepSetting | None,
) -> dict[int, NDArray[np.int32]] | None:
    """Return [S] micro-batch of every sequence, by data-parallel rank; None where there is nothing to pack for.

    `everyone` are all ranks of the run, one for each data-parallel rank and stage. No sequence changes its rank, no
    micro-batch is left empty or gets more than `token_budget` tokens, and the price is no higher than of what the
    framework has formed. The same on every rank.
    """
    core, ranks = native_core(), sorted({rank_sequences.dp_rank for rank_sequences in everyone})
    slices, remainder = divmod(ep_size * num_ep_groups, len(ranks))
    by_place = {(rank_sequences.dp_rank, rank_sequences.stage): rank_sequences for rank_sequences in everyone}
    stages = sorted({rank_sequences.stage for rank_sequences in everyone})
    first_stage = [by_place[rank, stages[0]] for rank in ranks]
    load = np.concatenate(
        [np.concatenate([by_place[rank, stage].bin_load for stage in stages], axis=2, dtype=np.int32) for rank in ranks]
    )
    if core is None or remainder or not load.any():
        return None
    topology = cluster_topology(config, ep_size=ep_size, num_ep_groups=num_ep_groups, slices_per_dp_rank=slices)
    tokens = np.concatenate([rank_sequences.tokens for rank_sequences in first_stage])
    owner = np.repeat(
        np.arange(len(ranks), dtype=np.int32), [len(rank_sequences.tokens) for rank_sequences in first_stage]
    )
    stated_layout = BatchLayout(
        micro_batch=np.concatenate([rank_sequences.micro_batch for rank_sequences in first_stage]),
        dp_rank=owner,
        order=np.arange(len(tokens), dtype=np.int32),
        num_micro_batches=int(max(rank_sequences.micro_batch.max() for rank_sequences in first_stage)) + 1,
        num_dp_ranks=len(ranks),
        token_budget=token_budget,
    )
    cost = None
    objective = OBJECTIVES[config.pricing.objective]
    if objective.in_seconds:
        per_rank = tokens.sum() / topology.num_ranks / stated_layout.num_micro_batches
        run = TrainingRun(model=model, topology=topology, setting=step_setting(config, setting, forward_only=False))
        cost = cost_of_lengths(run, tokens, tokens_per_rank=per_rank)
    packed_layout = packed_on_their_ranks(
        stated_layout,
        load,
        tokens=tokens,
        cost=cost,
        top_k=model.top_k,
        topology=topology,
        objective=objective,
        core=core,
    )
    return {rank: packed_layout[owner == index] for index, rank in enumerate(ranks)}
