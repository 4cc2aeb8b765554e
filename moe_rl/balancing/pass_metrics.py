"""Metrics of a pass: what its plan predicted and what the pass did."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.loads import Source
from moe_rl.core.metrics import imbalance
from moe_rl.simulators.memory import MemoryForecast


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """Reason for which a pass ran without the replicas of its plan."""

    kind: Literal["ranks", "placement", "micro-batches", "layout", "observed"]
    """What the plan contradicts: the plans of other ranks, the current expert placement, or the batch."""
    sentence: str
    """The reason as a sentence with figures."""


# The sentence of a pass that is observed: it runs without replicas on purpose.
OBSERVED = Misfit(kind="observed", sentence="moe_rl only observes this run")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOutcome:
    """Effect of a plan on the tokens that a pass really had, and effect of the framework's own placement."""

    rows: NDArray[np.int64]
    """[M, l, P] token-expert pairs of every rank under the plan."""
    moe_layer_s: float
    """Simulated seconds of this stage's MoE layers under the plan (`core.cost`), not measured ones. Moves to other home
    ranks are not included."""
    moe_layer_s_at_home: float
    """Simulated seconds of the same layers if every expert is where the framework puts it, without replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassMetrics:
    """Metrics of one EP group's pass (forward or forward-backward) in one pipeline stage. Rows: token-expert pairs."""

    policy: str
    source: Source = "routes"
    """Source of the loads that the plan was made from."""
    known_share: float = 1.0
    """Fraction of this rank's rows that the source knew. The others were estimated from the mean of the previous
    pass."""
    misfit: Misfit | None
    """Reason for which the pass ran without its plan; None if it followed the plan."""
    notes: tuple[str, ...]
    """Notes of the plan: which of its means it does not use, and why, with figures."""
    actual_rows: NDArray[np.int64]
    """[M, L, P] rows that every rank computed in the micro-batches that ran."""
    predicted_rows: NDArray[np.int64] | None
    """[M, L, P] rows that the plan predicts for the loads it was made from; None if these are not known.

    M is smaller than in `actual_rows` if the pass runs more micro-batches than were announced."""
    static_rows: NDArray[np.int64] | None
    """[M, L, P] predicted rows without replicas, with every expert on its home rank."""
    replicas: int
    """Replicas of this EP group in all micro-batches and layers."""
    residents: int = 0
    """Replicas that are kept for the whole step, in all layers of the model."""
    pushed_bytes: int
    """Weight bytes that this rank sent to replicas."""
    returned_bytes: int
    """Gradient bytes that this rank sent to home ranks."""
    plan_time_s: float
    """Seconds from the start to the end of planning, which overlaps with other work."""
    plan_wait_s: float
    """Seconds that `begin_pass` waited for the plan."""
    plan_cpu_s: float = 0.0
    """Seconds of computation that this rank spent on the plan. The rest of `plan_wait_s` is waiting for other ranks,
    the network or a CPU core."""
    reordered_bytes: int = 0
    """Weight and optimizer bytes that this rank received before the pass, because experts moved to it."""
    reorder_s: float = 0.0
    """Seconds that these moves took, including the wait for the choice of home ranks."""
    would_be: PassOutcome | None = None
    """What the plan would have achieved in this pass, if `observe` is set. None in other runs, and if the pass did not
    have the announced number of micro-batches."""
    memory: MemoryForecast | None = None
    """Memory forecast made before the pass; None for forward-only passes and if the loads were not known."""
    micro_batches_in_flight: int | None = None
    """Maximum number of micro-batches whose forward pass has run and whose backward pass has not. None if that is not
    known, as in forward-only and interleaved passes."""

    def as_dict(self) -> dict[str, float]:
        """Return the scalar metrics by name, for a logger."""
        values = {
            "moe_rl/imbalance": imbalance(self.actual_rows[None]),
            "moe_rl/max_vio": float(np.max(_overload(self.actual_rows), initial=1.0)) - 1.0,
            **self._megatrons(),
            "moe_rl/replicas": float(self.replicas),
            "moe_rl/residents": float(self.residents),
            "moe_rl/pushed_bytes": float(self.pushed_bytes),
            "moe_rl/returned_bytes": float(self.returned_bytes),
            "moe_rl/plan_time_s": self.plan_time_s,
            "moe_rl/plan_wait_s": self.plan_wait_s,
            "moe_rl/plan_cpu_s": self.plan_cpu_s,
            "moe_rl/fallback": float(self.misfit is not None),
            "moe_rl/reordered_bytes": float(self.reordered_bytes),
            "moe_rl/reorder_s": self.reorder_s,
            "moe_rl/known_share": self.known_share,
        }
        if self.memory is not None:
            values["moe_rl/forecast_peak_bytes"] = float(self.memory.peak_bytes)
            values["moe_rl/largest_micro_batch_tokens"] = float(self.memory.largest_micro_batch)
        if self.predicted_rows is not None and self.predicted_rows.any():
            values["moe_rl/predicted_imbalance"] = imbalance(self.predicted_rows[None])
            rows_of_planned = self.actual_rows[: len(self.predicted_rows)]
            difference = np.abs(self.predicted_rows - rows_of_planned).sum()
            values["moe_rl/misplaced_share"] = float(difference / 2 / max(1, int(rows_of_planned.sum())))
        if self.would_be is not None:
            values["moe_rl/would_be_imbalance"] = imbalance(self.would_be.rows[None])
            values["moe_rl/would_be_moe_layer_s"] = self.would_be.moe_layer_s
            values["moe_rl/moe_layer_s"] = self.would_be.moe_layer_s_at_home
        if self.static_rows is not None and self.static_rows.any():
            values["moe_rl/static_imbalance"] = imbalance(self.static_rows[None])
        return values

    def _megatrons(self) -> dict[str, float]:
        """Return what Megatron-LM calls overload factors, over the micro-batches and layers of this EP group.

        Names and meaning are those of `MoEOverloadFactorTracker` in NVIDIA/Megatron-LM's
        megatron/core/transformer/moe/moe_logging.py, which megatron-core 0.16.1 does not have: rows of the most loaded
        rank over the balanced number per (micro-batch, layer), their mean and maximum; and, for what stays in memory
        until backward, the highest running sum of rows of a rank over that of the balanced numbers.
        """
        overload = _overload(self.actual_rows)
        values = {
            "moe/avg_overload_factor": float(overload.mean()) if overload.size else 1.0,
            "moe/max_overload_factor": float(overload.max(initial=1.0)),
        }
        if self.micro_batches_in_flight is not None and self.actual_rows.any():
            per_micro_batch = self.actual_rows.sum(axis=1)
            window = min(self.micro_batches_in_flight, len(per_micro_batch))
            rows_in_flight = np.lib.stride_tricks.sliding_window_view(per_micro_batch, window, axis=0).sum(axis=2)
            values["moe/max_cum_overload_factor"] = float(rows_in_flight.max() / rows_in_flight.mean(axis=1).max())
        return values


def _overload(rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return [M, L] most loaded rank / mean rank; 1 where nothing ran."""
    mean = rows.mean(axis=2)
    return np.where(mean > 0, rows.max(axis=2) / np.maximum(mean, 1e-300), 1.0)
