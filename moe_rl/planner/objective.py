"""By what plans are compared. A new objective is one class here, one name in `study/options.yaml`.

    time        seconds of the step, priced by `core.cost`: replicas, moves of experts and all-to-all all take time
    imbalance   rows of the busiest rank; replicas (within the slots) and moves cost nothing

Nobody compares the name. Whoever plans or reports asks what it needs to know:

    objective.in_seconds          are costs seconds, so that the prices of `PlanProblem.cost` may be added to them?
    objective.copies_are_free     must a replica save more than its transfer takes?
    objective.moves_are_free      must a new home save more than its move takes?
    objective.is_peak             does the worst (group, micro-batch, layer) alone count?
    objective.total(costs_GML)    one number for a whole plan, lower is better
    objective.by_layer(costs_GML) one number for every layer, by which homes of several plans are mixed

Example: two EP groups, one micro-batch, two layers, costs [[[3 1]] [[2 4]]].

    time        EP groups run side by side, so the slower one counts: max(3 + 1, 2 + 4) = 6 seconds
    imbalance   the busiest rank of every (group, micro-batch, layer): 3 + 1 + 2 + 4 = 10 rows
    a peak      the fullest of all: 4 rows

The searches follow these facts, those of the C++ core too: they lower the sum of the busiest bins, and under a peak
the busiest bin of all (`planner.search`, `csrc/reorder.cpp`).
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.registry import Registry


class PlanObjective(ABC):
    """What is minimized. Axes: G EP groups, M micro-batches, L MoE layers."""

    name: ClassVar[str]
    """In the registry, in every output, and what a user types."""
    in_seconds: ClassVar[bool] = False
    """Costs are seconds; else they are rows (token-expert pairs) of the busiest rank."""
    is_peak: ClassVar[bool] = False
    """A plan is as good as its worst (group, micro-batch, layer)."""

    @property
    def copies_are_free(self) -> bool:
        """A replica costs nothing while there is a slot for it: rows have nothing to pay its transfer with."""
        return not self.in_seconds

    @property
    def moves_are_free(self) -> bool:
        """Moving an expert to another home costs nothing."""
        return not self.in_seconds

    @abstractmethod
    def total(self, costs_GML: NDArray[np.float64]) -> float:
        """Return the cost of a plan from the costs of its layers, without the moves that lead to it."""

    def by_layer(self, costs_GML: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return [L] the cost of every layer by itself."""
        costs_L: NDArray[np.float64] = (
            costs_GML.max(axis=(0, 1), initial=0.0) if self.is_peak else costs_GML.sum(axis=(0, 1))
        )
        return costs_L


class Time(PlanObjective):
    """Seconds of the step's MoE layers."""

    name = "time"
    in_seconds = True

    def total(self, costs_GML: NDArray[np.float64]) -> float:
        """Return the seconds of the slowest EP group: the groups run side by side."""
        seconds_G = costs_GML.sum(axis=(1, 2))
        return float(seconds_G.max(initial=0.0))


class Imbalance(PlanObjective):
    """Rows of the busiest rank, which says how even a plan is and nothing about its price."""

    name = "imbalance"

    def total(self, costs_GML: NDArray[np.float64]) -> float:
        """Return the rows of the busiest ranks of all EP groups together."""
        rows_G = costs_GML.sum(axis=(1, 2))
        return float(rows_G.sum())


TIME = Time()
IMBALANCE = Imbalance()
OBJECTIVES: Registry[PlanObjective] = Registry("objective", [TIME, IMBALANCE], group="moe_rl.plan_objectives")


def objective_of(objective: PlanObjective | str) -> PlanObjective:
    """Return an objective, or the one of that name: settings and plan files have names.

    Raises `InvalidInputError` for an unknown name, with the nearest known one.
    """
    if isinstance(objective, str):
        return OBJECTIVES[objective]
    return objective
