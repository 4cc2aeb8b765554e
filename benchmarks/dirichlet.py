"""Expected loads from a hierarchy of Dirichlet draws: popularity, drift per step, noise per micro-batch.

A generator of loads, not of tokens: it has named degrees of imbalance from mild to collapse, but no sequences, so use
`moe_rl.simulators.synthetic` where packing or micro-batch layout matters.

L MoE layers, M micro-batches, E experts, K experts per token; G EP groups, P source ranks.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.load import StepLoad
from moe_rl.core.registry import Registry
from moe_rl.core.topology import ClusterTopology

SHAPE_FLOOR = 1e-4
MOST_LIKELY = 0.98
"""Highest probability that a token selects an expert."""
WATER_FILL_ROUNDS = 60
WATER_FILL_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class DirichletScenario:
    """How uneven, how drifting and how noisy the expert popularities are."""

    name: str = "custom"
    alpha: float
    """Concentration of the base popularity: larger is flatter."""
    step_concentration: float
    """Larger drifts less from step to step."""
    micro_batch_concentration: float
    """Larger differs less from micro-batch to micro-batch."""

    def __post_init__(self) -> None:
        for name in ("alpha", "step_concentration", "micro_batch_concentration"):
            require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}.")


DIRICHLET_SCENARIOS = Registry(
    "load scenario",
    [
        DirichletScenario(name=name, alpha=alpha, step_concentration=step, micro_batch_concentration=micro_batch)
        for name, alpha, step, micro_batch in (
            ("mild", 4, 64, 40),
            ("medium", 1.5, 48, 12),
            ("heavy", 0.8, 32, 6),
            ("extreme", 0.4, 24, 3),
            ("bursty", 1.5, 32, 1.2),
            ("heavy+bursty", 0.6, 24, 1.0),
            ("collapse", 0.25, 16, 0.5),
        )
    ],
)


def dirichlet_steps(
    scenario: DirichletScenario,
    *,
    num_layers: int,
    num_experts: int,
    top_k: int,
    num_micro_batches: int = 8,
    num_steps: int = 2,
    seed: int = 1,
) -> NDArray[np.float64]:
    """Return `[steps, L, M, E]`, the probability that a token selects each expert; every row sums to K.

    Steps share the base popularity: the first can serve as history for planning the second. Draw order: the base of
    all layers, then per step the step's and the micro-batches' draws.
    """
    require(
        1 <= top_k <= MOST_LIKELY * num_experts,
        f"top_k must lie in 1 .. {MOST_LIKELY} of num_experts ({num_experts}), got {top_k}.",
    )
    rng = np.random.default_rng(seed)
    base = rng.dirichlet(np.full(num_experts, scenario.alpha), num_layers)
    steps = np.empty((num_steps, num_layers, num_micro_batches, num_experts))
    for step in range(num_steps):
        popularity = _around(base, scenario.step_concentration, rng)
        repeated = np.broadcast_to(popularity[:, None], steps.shape[1:])
        steps[step] = water_fill(_around(repeated, scenario.micro_batch_concentration, rng), top_k)
    return steps


def _around(center: NDArray[np.float64], concentration: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return Dirichlet(concentration * E * center) over the last axis."""
    shape = np.maximum(concentration * center.shape[-1] * center, SHAPE_FLOOR)
    # A draw may underflow to 0; a trace of popularity lets water-filling give K experts something in every case.
    drawn = np.maximum(rng.gamma(shape), 1e-200)
    normalized: NDArray[np.float64] = drawn / drawn.sum(axis=-1, keepdims=True)
    return normalized


def water_fill(popularity: NDArray[np.float64], top_k: int) -> NDArray[np.float64]:
    """Turn popularities `[..., E]` that sum to 1 into probabilities of being among the K distinct choices of a token.

    Every row sums to K and no entry exceeds 0.98: what the most popular experts cannot take goes to the others by their
    shares.
    """
    chosen = np.minimum(top_k * popularity, MOST_LIKELY)
    for _ in range(WATER_FILL_ROUNDS):
        missing = top_k - chosen.sum(axis=-1, keepdims=True)
        if (np.abs(missing) <= WATER_FILL_TOLERANCE).all():
            break
        below = chosen < MOST_LIKELY
        free = np.where(below, chosen, 0).sum(axis=-1, keepdims=True)
        scale = 1 + missing / np.where(free > 0, free, 1)
        chosen = np.where(below, np.minimum(chosen * scale, MOST_LIKELY), chosen)
    return chosen


def expected_load(
    probability: NDArray[np.float64], *, topology: ClusterTopology, tokens_per_rank: int, top_k: int
) -> StepLoad:
    """Return the load of `tokens_per_rank` tokens on every source rank with probabilities `[L, M, E]`.

    All source ranks share the probabilities and rows are expectations, rounded so that every rank sends exactly
    `tokens_per_rank * K` pairs per layer and micro-batch.
    """
    require(tokens_per_rank >= 1, f"tokens_per_rank must be at least 1, got {tokens_per_rank}.")
    require(
        probability.ndim == 3 and bool(np.allclose(probability.sum(axis=2), top_k, atol=1e-6)),
        f"probabilities must be [L, M, E] and sum to top_k ({top_k}) over the experts.",
    )
    num_layers, num_micro_batches, num_experts = probability.shape
    groups, sources = topology.num_ep_groups, topology.ep_size
    running = np.cumsum(probability, axis=2) * tokens_per_rank
    running[:, :, -1] = tokens_per_rank * top_k
    # Every rank rounds the running sum at another point, so that no expert gains by rounding on all ranks.
    rounding = np.arange(groups * sources)[:, None, None, None] / (groups * sources)
    pairs = np.diff(np.floor(running + rounding).astype(np.int32), axis=3, prepend=0)
    shape = (groups, sources, num_layers, num_micro_batches, num_experts)
    return StepLoad(
        pairs=np.ascontiguousarray(pairs.reshape(shape).transpose(0, 3, 2, 1, 4)),
        tokens=np.full((groups, num_micro_batches, sources), tokens_per_rank, np.int64),
        top_k=top_k,
    )
