"""What a pass was planned to do and what it did."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.metrics import imbalance


@dataclass(frozen=True, slots=True, kw_only=True)
class PassMetrics:
    """One forward or forward-backward pass of one EP group; rows are token-expert pairs. Layers of this stage only."""

    policy: str
    fallback: str
    """Why the pass ran without its plan; empty when it followed it."""
    actual_rows: NDArray[np.int64]
    """[M, L, P] rows that every rank computed."""
    predicted_rows: NDArray[np.int64] | None
    """[M, L, P] rows that the plan expects under the loads it was made for; None where these are not known."""
    static_rows: NDArray[np.int64] | None
    """[M, L, P] the same for homes alone."""
    replicas: int
    """Replicas of this EP group in all micro-batches and layers."""
    pushed_bytes: int
    """Weight bytes that this rank sent to replicas."""
    returned_bytes: int
    """Gradient bytes that this rank sent home."""
    plan_time_s: float

    def as_dict(self) -> dict[str, float]:
        """Return scalars by name, for a metrics logger."""
        values = {
            "moe_rl/imbalance": imbalance(self.actual_rows[None]),
            "moe_rl/max_vio": _max_vio(self.actual_rows),
            "moe_rl/replicas": float(self.replicas),
            "moe_rl/pushed_bytes": float(self.pushed_bytes),
            "moe_rl/returned_bytes": float(self.returned_bytes),
            "moe_rl/plan_time_s": self.plan_time_s,
            "moe_rl/fallback": float(bool(self.fallback)),
        }
        if self.predicted_rows is not None:
            values["moe_rl/predicted_imbalance"] = imbalance(self.predicted_rows[None])
            difference = np.abs(self.predicted_rows - self.actual_rows).sum()
            values["moe_rl/misplaced_share"] = float(difference / 2 / max(1, int(self.actual_rows.sum())))
        if self.static_rows is not None:
            values["moe_rl/static_imbalance"] = imbalance(self.static_rows[None])
        return values


def _max_vio(rows: NDArray[np.int64]) -> float:
    """Return the largest (most loaded rank / mean rank) - 1 over micro-batches and layers."""
    mean = rows.mean(axis=2)
    return float(np.max(np.where(mean > 0, rows.max(axis=2) / np.maximum(mean, 1e-300) - 1.0, 0.0), initial=0.0))
