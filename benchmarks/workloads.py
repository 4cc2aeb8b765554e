"""Stress workloads W0 - W7: each isolates one thing that a planner can get wrong.

Names as in the token-imbalance benchmark of NVIDIA/Megatron-LM pull request 7488; the definitions are ours, by the
weight of every expert, so that they hold for any expert-parallel size. Sequences carry their micro-batch and
data-parallel rank: use them with `BatchLayout.recorded`.

    python -m benchmarks.workloads W2_hot_rank hot.moetrace num_layers=8 num_experts=128

L MoE layers, E experts, K experts per token, P EP ranks, M micro-batches, D data-parallel ranks.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require, require_least
from moe_rl.core.registry import Registry
from moe_rl.core.trace import RoutingTrace, route_dtype
from moe_rl.replay import write_trace
from moe_rl.simulators.synthetic import generated_step

HEAT = 8.0
"""Weight of a hot expert; the others weigh 1."""
BURST_HEAT = 64.0
BATCH_VALUES = 1 << 22
"""Logits [rows, L, E] held at a time."""
BURST_PERIOD = 4
"""One micro-batch in so many is a burst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What to generate; equal values give equal traces."""

    name: str
    """One of `WORKLOADS`."""
    num_layers: int = 1
    num_experts: int = 64
    top_k: int = 8
    ep_size: int = 8
    """P: decides which experts share a rank (contiguous placement)."""
    num_dp_ranks: int = 8
    num_micro_batches: int = 8
    """M, micro-batches of a step."""
    tokens_per_cell: int = 1024
    """Tokens of a (micro-batch, DP rank) cell; W4 keeps only their mean."""
    sequences_per_cell: int = 4
    num_steps: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        require_least(
            self, num_layers=1, num_experts=1, top_k=1, ep_size=1, num_dp_ranks=1, num_micro_batches=1,
            sequences_per_cell=1, num_steps=1,
        )  # fmt: skip
        require(self.top_k <= self.num_experts, f"top_k ({self.top_k}) exceeds num_experts ({self.num_experts}).")
        require(
            self.num_experts % self.ep_size == 0,
            f"expert-model-parallel size {self.ep_size} does not divide the {self.num_experts} experts.",
        )
        require(
            self.tokens_per_cell >= self.sequences_per_cell,
            f"tokens_per_cell ({self.tokens_per_cell}) is less than sequences_per_cell ({self.sequences_per_cell}).",
        )
        kind = self.kind
        require(
            self.experts_per_rank >= kind.fewest_experts_per_rank, f"{self.name} needs two experts per EP rank or more."
        )
        require(self.num_dp_ranks >= 2 or not kind.ragged, f"{self.name} needs two data-parallel ranks or more.")
        require(
            not kind.idle_half or (self.ep_size >= 2 and self.top_k <= self.num_experts - _num_idle(self)),
            f"{self.name} needs two EP ranks or more and top_k experts on half of them.",
        )

    @property
    def kind(self) -> "WorkloadKind":
        """What the name stands for; an unknown name raises."""
        return WORKLOADS[self.name]

    @property
    def experts_per_rank(self) -> int:
        """Experts whose home is on one EP rank, E / P."""
        return self.num_experts // self.ep_size


Hot = Callable[[Workload, int, np.random.Generator], NDArray[np.bool_]]
"""(workload, micro-batch counted over all steps, generator of the whole run's choices) -> [L, E] which experts are
hot."""


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    """One stress workload: its hot experts, and what it asks of the shape that it is made for."""

    name: str
    summary: str
    hot: Hot | None
    """None: routes go round all experts in turn."""
    heat: float = HEAT
    fewest_experts_per_rank: int = 1
    ragged: bool = False
    """True: data-parallel ranks hold unequal shares of the tokens."""
    idle_half: bool = False
    """True: half of the EP ranks get nothing."""

    def weights(self, workload: Workload, micro_batch: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Return [L, E] how likely each expert is chosen, relative to the others; the hot experts are drawn by rng."""
        assert self.hot is not None
        weights = np.where(self.hot(workload, micro_batch, rng), self.heat, 1.0)
        if self.idle_half:
            weights[:, : _num_idle(workload)] = 0
        return weights


def _num_hot(workload: Workload) -> int:
    return max(1, workload.num_experts // 8)


def _num_idle(workload: Workload) -> int:
    return workload.ep_size // 2 * workload.experts_per_rank


def _marked(workload: Workload, experts: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Return [L, E], True at `experts` [L, n]."""
    marked = np.zeros((workload.num_layers, workload.num_experts), np.bool_)
    np.put_along_axis(marked, experts, True, axis=1)
    return marked


def _none(workload: Workload, micro_batch: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    del micro_batch, rng
    return np.zeros((workload.num_layers, workload.num_experts), np.bool_)


def _random_set(workload: Workload, micro_batch: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    del micro_batch
    order = rng.permuted(np.tile(np.arange(workload.num_experts), (workload.num_layers, 1)), axis=1)
    return _marked(workload, order[:, : _num_hot(workload)])


def _one_rank(workload: Workload, micro_batch: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    del micro_batch
    rank = rng.integers(0, workload.ep_size, workload.num_layers)
    return np.asarray(np.arange(workload.num_experts) // workload.experts_per_rank == rank[:, None])


def _one_per_rank(workload: Workload, micro_batch: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    del micro_batch
    slot = rng.integers(0, workload.experts_per_rank, (workload.num_layers, workload.ep_size))
    return _marked(workload, np.arange(workload.ep_size) * workload.experts_per_rank + slot)


def _rotating(workload: Workload, micro_batch: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    first = rng.integers(0, workload.num_experts, workload.num_layers) + micro_batch * _num_hot(workload)
    return _marked(workload, (first[:, None] + np.arange(_num_hot(workload))) % workload.num_experts)


def _burst(workload: Workload, micro_batch: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    bursts = micro_batch % BURST_PERIOD == BURST_PERIOD - 1
    return (_one_rank if bursts else _none)(workload, micro_batch, rng)


WORKLOADS: Registry[WorkloadKind] = Registry(
    "workload",
    [
        WorkloadKind("W0_balanced", "every expert gets the same number of tokens, up to one", None),
        WorkloadKind("W1_hot_expert_set", "a random eighth of the experts is hot in every micro-batch", _random_set),
        WorkloadKind("W2_hot_rank", "the experts of one EP rank are hot", _one_rank),
        WorkloadKind(
            "W3_spread_hot_experts", "one hot expert on every EP rank: uneven experts, even ranks", _one_per_rank,
            fewest_experts_per_rank=2,
        ),
        WorkloadKind(
            "W4_source_ragged", "even experts, but DP rank d holds d + 1 shares of the tokens", _none, ragged=True
        ),
        WorkloadKind("W5_zero_expert_rank", "the experts of half the EP ranks get no token", _none, idle_half=True),
        WorkloadKind("W6_rotating_hotspot", "hot experts move on with every micro-batch: totals hide them", _rotating),
        WorkloadKind(
            "W7_burst", "even, but in every fourth micro-batch one EP rank is very hot", _burst, heat=BURST_HEAT
        ),
    ],
)  # fmt: skip


def workload_steps(workload: Workload) -> Iterator[RoutingTrace]:
    """Yield one trace per step; hot sets stay where they are over micro-batches and steps unless the name says else."""
    for step in range(workload.num_steps):
        yield _one_step(workload, step)


def _one_step(workload: Workload, step: int) -> RoutingTrace:
    micro_batches = workload.num_micro_batches
    lengths = np.tile(_sequence_lengths(workload), (micro_batches, 1, 1))
    num_sequences = lengths.size
    micro_batch, dp_rank, _ = np.unravel_index(np.arange(num_sequences), lengths.shape)
    rows_of_micro_batch = lengths.sum(axis=(1, 2))
    routes = []
    for index, num_rows in enumerate(rows_of_micro_batch.tolist()):
        counted = step * micro_batches + index
        rng = np.random.default_rng([workload.seed, counted])
        if workload.kind.hot is None:
            routes.append(_round_robin(workload, counted * num_rows, num_rows))
            continue
        # The run's own choices come from the same generator in every micro-batch, its tokens from another.
        weights = workload.kind.weights(workload, counted, np.random.default_rng(workload.seed))
        routes.append(_sample(weights, num_rows, workload.top_k, rng))
    return generated_step(
        np.concatenate(routes).astype(route_dtype(workload.num_experts)),
        lengths.ravel(),
        num_experts=workload.num_experts,
        sample_id=step * num_sequences + np.arange(num_sequences),
        group_id=step * num_sequences + np.arange(num_sequences),
        step=np.full(num_sequences, step),
        micro_batch=micro_batch,
        dp_rank=dp_rank,
    )


def _sequence_lengths(workload: Workload) -> NDArray[np.int64]:
    """Return `[D, sequences per cell]` lengths."""
    dp_ranks, sequences = workload.num_dp_ranks, workload.sequences_per_cell
    tokens = np.full(dp_ranks, workload.tokens_per_cell)
    if workload.kind.ragged:
        shares = np.arange(1, dp_ranks + 1) / (dp_ranks * (dp_ranks + 1) / 2)
        running = np.rint(np.cumsum(shares) * workload.tokens_per_cell * dp_ranks)
        tokens = np.diff(running, prepend=0).astype(np.int64)
    ends = tokens[:, None] * np.arange(1, sequences + 1) // sequences
    return np.diff(ends, axis=1, prepend=0)


def _round_robin(workload: Workload, first_row: int, num_rows: int) -> NDArray[np.int64]:
    rows = first_row + np.arange(num_rows)
    ids = (rows[:, None] * workload.top_k + np.arange(workload.top_k)) % workload.num_experts
    return np.repeat(ids[:, None], workload.num_layers, axis=1)


def _sample(weights: NDArray[np.float64], num_rows: int, top_k: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw K distinct experts per row and layer, one after the other by weight (Gumbel top-k); weight 0: never."""
    with np.errstate(divide="ignore"):
        logits = np.log(weights).astype(np.float32)
    chosen = np.empty((num_rows, len(weights), top_k), np.int64)
    rows_at_once = max(1, BATCH_VALUES // logits.size)
    for first in range(0, num_rows, rows_at_once):
        some = chosen[first : first + rows_at_once]
        # -ln of an exponential is Gumbel; adding it in log space is choosing by weight
        scores = logits - np.log(rng.standard_exponential((len(some), *logits.shape), np.float32))
        some[:] = np.argpartition(scores, -top_k, axis=2)[:, :, -top_k:]
    return chosen


def main() -> None:
    """Write the workload that the arguments name."""
    name, target, *options = sys.argv[1:]
    chosen = Workload(name=name, **{key: int(value) for key, _, value in (each.partition("=") for each in options)})
    write_trace(
        workload_steps(chosen),
        Path(target),
        num_experts=chosen.num_experts,
        moe_layer_ids=tuple(range(chosen.num_layers)),
        top_k=chosen.top_k,
    )


if __name__ == "__main__":
    main()
