"""Forward pass and update of an RL step from lengths alone, with a given imbalance and micro-batches packed to size."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.topology import ClusterTopology, HardwareSpec
from moe_rl.simulators.balanced import BalancedBatch, length_of_equal_sequences
from moe_rl.simulators.setting import StepSetting, TrainingRun

# The fullest rank has more of these `LayerRows`.
GROWING = ("rows", "padded_rows", "rank_visits", "nic_ingress", "nic_egress")


def trainer_seconds(
    model: MoeModelSpec,
    hardware: HardwareSpec,
    setting: StepSetting,
    lengths: NDArray[np.int64],
    *,
    train_gpus: int,
    ep_size: int,
    micro_batch_tokens: int,
    mini_batches: int = 1,
    imbalance: float = 1.0,
    packing: "Packing | None" = None,
) -> tuple[float, float]:
    """Return seconds of one forward pass and of one update over sequences of `lengths` [N], prompts included.

    `micro_batch_tokens` is the budget of a data-parallel rank, `mini_batches` the optimizer steps that use every sample
    once, `imbalance` the rows of the fullest rank over the mean (1.0 is forced balance), `packing` how sequences become
    micro-batches (`first_fit`). Raises `InvalidInputError` where the parallel layout does not fit the GPUs.
    """
    for name, value in (("mini_batches", mini_batches), ("micro_batch_tokens", micro_batch_tokens)):
        require(value >= 1, f"{name} must be at least 1, got {value}.")
    require(imbalance >= 1.0, f"imbalance must be at least 1, got {imbalance}.")
    stages = setting.pipeline_model_parallel_size
    slices = setting.tensor_model_parallel_size * setting.context_parallel_size
    for name, size in (("TP x CP x PP", slices * stages), ("EP x PP", ep_size * stages)):
        require(train_gpus % size == 0, f"{name} = {size} does not divide the number of training GPUs ({train_gpus}).")
    ranks = train_gpus // (slices * stages)
    batches = np.array_split(np.asarray(lengths, np.int64), mini_batches)
    pack = packing or first_fit
    bins = [pack(batch, micro_batch_tokens) for batch in batches if len(batch)]
    if not bins:
        return 0.0, 0.0
    topology = ClusterTopology(
        hardware=hardware,
        ep_size=ep_size,
        num_ep_groups=train_gpus // (stages * ep_size),
        ranks_per_node=min(hardware.ranks_per_node, ep_size),
    )
    # Ranks run in step: a mini-batch of 33 bins on 32 ranks takes two micro-batches of all of them.
    counts = [-(-len(bin_loads) // ranks) for bin_loads in bins]
    tokens_per_rank = max(1, round(int(lengths.sum()) / (sum(counts) * ranks * slices)))
    run = TrainingRun(model=model, topology=topology, setting=setting)
    length = length_of_equal_sequences(run, lengths, row_tokens=tokens_per_rank * slices)
    batch = BalancedBatch.of(run, tokens_per_rank=tokens_per_rank, sequence_length=length)
    uneven_rows = {name: getattr(batch.rows, name) * imbalance for name in GROWING}
    batch = replace(batch, rows=replace(batch.rows, **uneven_rows))
    forward_s = replace(batch, setting=replace(setting, forward_only=True)).step(sum(counts)).step_time_s
    return forward_s, sum(batch.step(count).step_time_s for count in counts)


Packing = Callable[[NDArray[np.int64], int], list[int]]
"""(lengths, token budget) -> tokens of the micro-batches."""


def fewest_bins(lengths: NDArray[np.int64], token_budget: int) -> list[int]:
    """Return equal micro-batches, as few as no packing goes below: the most that packing can bring.

    All tokens need room, and no two sequences over half of the budget share one. Example: 5, 5, 5, 1 tokens under a
    budget of 8: 3 micro-batches, though 16 tokens have room in 2.
    """
    total = int(lengths.sum())
    count = max(-(-total // token_budget), int((2 * lengths > token_budget).sum()))
    return [total // count] * count


def first_fit(lengths: NDArray[np.int64], token_budget: int) -> list[int]:
    """Return the tokens of micro-batches packed first-fit, longest first; one that is over the budget is alone."""
    bins: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        place = next((index for index, tokens in enumerate(bins) if tokens + length <= token_budget), None)
        if place is None:
            bins.append(length)
        else:
            bins[place] += length
    return bins
