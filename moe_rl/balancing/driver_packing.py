"""Sequences of an update packed over all data-parallel ranks by the driver, from their lengths alone.

A driver knows lengths before anything runs, with routing replay and without; what routes add is left to the workers. A
micro-batch lasts as long as its slowest rank, so long sequences should meet long ones. The framework's rules are kept
in the search itself. S sequences, D data-parallel ranks.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.schedule import cluster_topology, step_setting
from moe_rl.core.errors import require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.native import native_core
from moe_rl.core.schedules import FRAMEWORK_LAYOUTS, with_rule
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.packing import best_start
from moe_rl.planner.registry import POLICIES
from moe_rl.simulators.balanced import cost_of_lengths
from moe_rl.simulators.setting import StepSetting, TrainingRun

PADDING_TOKENS = 2
"""Of a padding sample: a prompt and a response of one token each, the fewest that verl can train on. verl's own have
128 since 0.9.1, all the same token, and tokens that are alike choose the same experts."""


def packs_in_driver(config: BalancerConfig) -> bool:
    """Return whether the run's policy moves sequences, and the run changes anything at all."""
    return config.moves_sequences and POLICIES[config.policy].levers.pack


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverPacking:
    """How a driver packs the updates of a run."""

    framework: str
    """Whose rules are kept, and from whose layout the search starts; a name of `FRAMEWORK_LAYOUTS`."""
    model: MoeModelSpec
    topology: ClusterTopology
    setting: StepSetting
    token_budget: int
    """Most tokens of a data-parallel rank in a micro-batch."""
    padding_samples: int = 0
    """Padding samples that a rank may get in every mini-batch, at most."""

    @classmethod
    def of_run(
        cls,
        framework: str,
        config: BalancerConfig,
        *,
        model: MoeModelSpec,
        shape: StepSetting,
        num_dp_ranks: int,
        ep_size: int,
        tokens_per_gpu: int,
    ) -> Self:
        """Return how updates are packed whose tensor, context and pipeline parallel sizes are those of `shape`.

        `tokens_per_gpu` is the budget of one GPU: the slices of a sequence under context parallelism share one each.
        Raises `InvalidInputError` where the ranks of a pipeline stage do not fill EP groups.
        """
        slices = shape.tensor_model_parallel_size * shape.context_parallel_size
        ranks = num_dp_ranks * slices
        require(
            ranks % ep_size == 0,
            f"the {ranks} ranks of a pipeline stage cannot be divided into EP groups of {ep_size} ranks.",
        )
        return cls(
            framework=framework,
            model=model,
            topology=cluster_topology(
                config, ep_size=ep_size, num_ep_groups=ranks // ep_size, slices_per_dp_rank=slices
            ),
            setting=step_setting(config, shape, forward_only=False),
            token_budget=tokens_per_gpu * shape.context_parallel_size,
        )

    def layout(self, lengths: NDArray[np.int64], stated: BatchLayout | None = None) -> BatchLayout | None:
        """Return the layout of one update of sequences of these lengths; None where there is nothing to pack.

        It is predicted no slower than the one `stated`, or the framework's own, with experts taken as balanced. Ranks
        may have fewer sequences than others, by up to `padding_samples`.
        """
        ranks, core = self.topology.num_dp_ranks, native_core()
        longest_tokens = int(lengths.max(initial=0))
        if core is None or len(lengths) <= ranks or ranks == 1 or longest_tokens > self.token_budget:
            return None
        run = TrainingRun(model=self.model, topology=self.topology, setting=self.setting)
        if stated is None:
            virtual = self.setting.num_virtual_stages > 1
            multiple = self.setting.pipeline_model_parallel_size if virtual else 1
            stated = FRAMEWORK_LAYOUTS[self.framework](
                lengths, num_dp_ranks=ranks, token_budget=self.token_budget, multiple_of=multiple
            )
        framework_layout = with_rule(stated, self.framework, padding_samples=self.padding_samples)
        per_rank = float(lengths.sum()) / self.topology.num_ranks / max(1, framework_layout.num_micro_batches)
        cost = cost_of_lengths(run, lengths, tokens_per_rank=per_rank)
        return best_start(framework_layout, cost, lengths, self.topology, core)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedShares:
    """The sequences of a rollout in the order in which ranks take them, in equal shares.

    S sequences and Q padding samples are N.
    """

    order: NDArray[np.int64]
    """[N] sequence at each position: the first N / D are rank 0's, and so on. S and above are padding samples."""
    micro_batch: NDArray[np.int64]
    """[N] micro-batch, inside its mini-batch, of the sequence at each position."""
    padding_samples: int = 0
    """Q, padding samples of all ranks and mini-batches together."""


def packed_shares(packing: DriverPacking, lengths: NDArray[np.int64], *, mini_batches: int) -> PackedShares | None:
    """Return the shares after packing inside every mini-batch; None where nothing may or can be packed.

    `lengths` [S] stand in the order that the framework has made: rank d has the d-th part of D equal ones, and its k-th
    mini-batch is the k-th part of that. Mini-batches keep their sequences, so every update is of the same samples.

    Example: D = 2, two mini-batches, sequences 0 .. 7. The first mini-batch is {0, 1} of rank 0 and {4, 5} of rank 1;
    packed, rank 0 may get {0, 5} and rank 1 {4, 1}: order 0, 5, 2, 3, 4, 1, 6, 7 if the second stays. With padding
    samples rank 0 may get {0} and rank 1 {1, 4, 5}. Then all ranks have three samples in both mini-batches: 8 and 9 go
    to rank 0 in the first, 10 and 11 to one rank each in the second.
    """
    ranks = packing.topology.num_dp_ranks
    if len(lengths) == 0 or len(lengths) % (ranks * mini_batches):
        return None
    positions = np.arange(len(lengths)).reshape(ranks, mini_batches, -1)
    members = [positions[:, number].ravel() for number in range(mini_batches)]
    layouts = [packing.layout(lengths[sequences]) for sequences in members]
    packed_layouts = [layout for layout in layouts if layout is not None]
    if len(packed_layouts) < mini_batches:
        return None
    # The framework cuts every rank's share into mini-batches of one size.
    size = max(int(np.bincount(layout.dp_rank, minlength=ranks).max()) for layout in packed_layouts)
    order, micro_batch = np.empty((2, ranks, mini_batches, size), np.int64)
    paddings = 0
    for number, (layout, sequences) in enumerate(zip(packed_layouts, members, strict=True)):
        filled_layout = filled_up(layout, lengths[sequences], size)
        if filled_layout is None:  # no cell has room for a padding sample
            return packed_shares(replace(packing, padding_samples=0), lengths, mini_batches=mini_batches)
        num_missing = len(filled_layout.dp_rank) - len(sequences)
        numbers = np.append(sequences, len(lengths) + paddings + np.arange(num_missing))
        paddings += num_missing
        # Ranks one after the other, each by micro-batch: ranks have equally many, so the rows of a table are theirs.
        by_rank = np.lexsort((filled_layout.order, filled_layout.micro_batch, filled_layout.dp_rank))
        order[:, number] = numbers[by_rank].reshape(ranks, -1)
        micro_batch[:, number] = filled_layout.micro_batch[by_rank].reshape(ranks, -1)
    return PackedShares(order=order.ravel(), micro_batch=micro_batch.ravel(), padding_samples=paddings)


def filled_up(layout: BatchLayout, lengths: NDArray[np.int64], size: int) -> BatchLayout | None:
    """Return the layout with padding samples behind its sequences, so that every rank has `size`; None without room.

    They go where a rank has fewest tokens.
    """
    tokens = layout.rank_tokens(lengths)
    missing_samples = size - np.bincount(layout.dp_rank, minlength=layout.num_dp_ranks)
    dp_rank = np.repeat(np.arange(layout.num_dp_ranks, dtype=np.int32), missing_samples)
    micro_batch = np.empty_like(dp_rank)
    for index, rank in enumerate(dp_rank):
        micro_batch[index] = tokens[:, rank].argmin()
        tokens[micro_batch[index], rank] += PADDING_TOKENS
    if layout.token_budget is not None and tokens.max(initial=0) > layout.token_budget:
        return None
    return replace(
        layout,
        micro_batch=np.append(layout.micro_batch, micro_batch),
        dp_rank=np.append(layout.dp_rank, dp_rank),
        order=np.append(layout.order, layout.num_sequences + np.arange(len(dp_rank), dtype=np.int32)),
    )
