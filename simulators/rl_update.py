"""Forward pass and update of an RL step from lengths alone, with a given imbalance and micro-batches packed to size."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require, require_least
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.topology import ClusterTopology, HardwareSpec
from moe_rl.simulators.balanced import BalancedBatch
from moe_rl.simulators.setting import StepSetting

GROWING = ("rows", "padded_rows", "rank_visits", "nic_ingress", "nic_egress")
"""Rows of `LayerRows` that the fullest rank has more of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateBatch:
    """How a trainer runs the samples of a step.

    Raises `InvalidInputError` where the parallel layout does not fit the GPUs.
    """

    model: MoeModelSpec
    hardware: HardwareSpec
    setting: StepSetting
    train_gpus: int
    ep_size: int
    micro_batch_tokens: int
    """Of one data-parallel rank."""
    mini_batches: int = 1
    """Optimizer steps in which the samples are used once."""

    def __post_init__(self) -> None:
        require_least(self, mini_batches=1, micro_batch_tokens=1)
        for name, size in (("TP x CP x PP", self._per_replica), ("EP x PP", self.ep_size * self._stages)):
            require(
                self.train_gpus % size == 0, f"{name} = {size} does not divide the {self.train_gpus} training GPUs."
            )

    @property
    def _stages(self) -> int:
        return self.setting.pipeline_model_parallel_size

    @property
    def _slices(self) -> int:
        return self.setting.tensor_model_parallel_size * self.setting.context_parallel_size

    @property
    def _per_replica(self) -> int:
        return self._slices * self._stages

    def seconds(self, lengths: NDArray[np.int64], *, imbalance: float = 1.0) -> tuple[float, float]:
        """Return seconds of one forward pass and of one update over sequences of `lengths` [N], prompts included.

        `imbalance`: rows of the fullest rank over the mean; 1.0 is forced balance.
        """
        require(imbalance >= 1.0, f"imbalance must be at least 1, got {imbalance}.")
        ranks = self.train_gpus // self._per_replica
        each = np.array_split(np.asarray(lengths, np.int64), self.mini_batches)
        bins = [first_fit(one, self.micro_batch_tokens) for one in each if len(one)]
        if not bins:
            return 0.0, 0.0
        topology = ClusterTopology(
            hardware=self.hardware,
            ep_size=self.ep_size,
            num_ep_groups=self.train_gpus // (self._stages * self.ep_size),
            ranks_per_node=min(self.hardware.ranks_per_node, self.ep_size),
        )
        counts = [-(-len(one) // ranks) for one in bins]
        tokens = int(lengths.sum()) / (sum(counts) * ranks * self._slices)
        squares = float((lengths.astype(np.float64) ** 2).sum() / max(1, lengths.sum()))
        batch = BalancedBatch.of(
            self.model,
            topology,
            self.setting,
            tokens_per_rank=max(1, round(tokens)),
            sequence_length=max(1, round(squares)),
        )
        uneven = {name: getattr(batch.rows, name) * imbalance for name in GROWING}
        batch = replace(batch, rows=replace(batch.rows, **uneven))
        forward = replace(self.setting, forward_only=True)
        update = sum(batch.step(topology, self.setting, num_micro_batches=count).step_time_s for count in counts)
        return batch.step(topology, forward, num_micro_batches=sum(counts)).step_time_s, update


def first_fit(lengths: NDArray[np.int64], token_budget: int) -> list[int]:
    """Return the tokens of micro-batches packed first-fit, longest first; one that is over the budget is alone."""
    bins: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        place = next((index for index, held in enumerate(bins) if held + length <= token_budget), None)
        if place is None:
            bins.append(length)
        else:
            bins[place] += length
    return bins
