"""Packs the sequences of an update into micro-batches, on all ranks together (`packing`)."""

from collections.abc import Sequence
from typing import Generic

import numpy as np

from moe_rl.balancing.balanced_run import BalancedRun, Tables
from moe_rl.balancing.exchange import gathered
from moe_rl.balancing.loads import RankRows
from moe_rl.balancing.packing import RankSequences, packed_micro_batches
from moe_rl.balancing.schedule import cluster_topology
from moe_rl.core.errors import require


class RankPacking(Generic[Tables]):
    """Gathers what ranks know of their sequences; every rank packs all of them alike and takes its own."""

    def __init__(self, run: BalancedRun[Tables], *, token_budget: int) -> None:
        self._run, self._token_budget = run, token_budget

    def packed(
        self, loads: RankRows, lengths: Sequence[int], micro_batches: Sequence[Sequence[int]]
    ) -> list[list[int]] | None:
        """Return this rank's sequences by micro-batch, None if they stay as they are; a collective of the run.

        `loads` has one micro-batch per sequence, of `lengths` tokens; `micro_batches` are the framework's.
        """
        run, place, exchange = self._run, self._run.layers.data_parallel_place, self._run.planner.exchange
        own_sequences = None
        if place.speaks:
            own_sequences = RankSequences.of(
                loads.pairs,
                run.placement.home_rank[run.planner.layers],
                tokens=lengths,
                topology=cluster_topology(run.config, ep_size=exchange.size, num_ep_groups=exchange.num_groups),
                by_rank=run.config.slots.replica_slots == 0,
                dp_rank=place.dp_rank,
                stage=place.stage,
                micro_batches=micro_batches,
            )
        budgets, sequences = zip(*gathered((self._token_budget, own_sequences)), strict=True)
        for rank, budget in enumerate(budgets):
            require(
                budget == budgets[0],
                f"all ranks must pack with the same token_budget, but rank {rank} has {budget} and rank 0 has "
                f"{budgets[0]}.",
            )
        batch_of_sequence = packed_micro_batches(
            [of_rank for of_rank in sequences if of_rank is not None],
            config=run.config,
            model=run.planner.model,
            ep_size=exchange.size,
            num_ep_groups=exchange.num_groups,
            token_budget=self._token_budget,
            setting=run.planner.setting,
        )
        if batch_of_sequence is None:
            return None
        own_batches = batch_of_sequence[place.dp_rank]
        return [np.flatnonzero(own_batches == index).tolist() for index in range(len(micro_batches))]
