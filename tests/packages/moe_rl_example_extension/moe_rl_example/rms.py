"""An objective of the planner, declared by the entry point `rms` of pyproject.toml."""

import numpy as np
from numpy.typing import NDArray

from moe_rl.planner import PlanObjective


class RootMeanSquare(PlanObjective):
    """Rows of the busiest ranks, full ones counted more: between their sum and the fullest of them all."""

    name = "rms"
    power = 2

    def total(self, costs_GML: NDArray[np.float64]) -> float:
        """Return the root mean square over EP groups, micro-batches and MoE layers."""
        return float(np.sqrt(np.square(costs_GML).mean())) if costs_GML.size else 0.0


OBJECTIVE = RootMeanSquare()
