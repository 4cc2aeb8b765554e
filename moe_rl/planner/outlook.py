"""What earlier steps say of those to come: homes serve several steps, and this step's luck is not theirs.

A home that is chosen now is paid once and serves N steps. Homes that fit this step best fit it better than any other:
that gain is real in this step and mostly gone in the next, and whoever takes it for the gain of N steps moves a third
of the experts in every step of a task that never changes. So the micro-batches of earlier steps are halved. On one half
and this step the search learns homes; on the other half, which it never saw, they are judged, and a layer's homes move
where they save there, beyond what chance would, more in N steps than their move costs.

Where the task switched, earlier steps say nothing of those to come, and this step stands for all N. A switch shows in
the loads of the experts: the step differs from an earlier one by more than drift, and by far more than micro-batches
of one step differ from each other.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.load import StepLoad
from moe_rl.planner.base import PlanProblem

SWITCHED = 4.0
"""Squared difference of two steps' shares over what their micro-batches lead to expect, 1 for steps of one kind; above
this the difference is no chance."""
DRIFT = 0.05
"""Total variation between two steps' loads up to which they are of one task: a policy moves .001 to .01 in a step of
RL, and .05 to .08 in all of a fine-tuning; tasks differ by .1 and more."""
CHANCE = 2.0
"""Standard errors by which a gain has to exceed what a move costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The steps to come, as far as earlier ones show them."""

    learned: StepLoad
    """Micro-batches of earlier steps on which homes are learned, beside this step's."""
    learned_weight: float
    """How often each of them counts where one of this step counts once."""
    judged: StepLoad
    """Those on which homes are judged."""
    judged_weight: float
    """How many micro-batches of the N steps each of them stands for."""
    steps: float
    """Steps like this one over which the search pays a move: N over the steps that it sees."""

    @classmethod
    def of(cls, problem: PlanProblem) -> Self | None:
        """Return the outlook of a step, None where nothing is to be gained from one.

        That is: homes serve one step, moves are free, or no earlier step in
        `PlanProblem.history` is of the same task.
        """
        steps_served, history = problem.steps_served, problem.history
        if steps_served == 1 or history is None or problem.objective.moves_are_free:
            return None
        num_running, similar_batches = len(_running(problem.load)), _of_the_same_task(problem.load, history)
        if len(similar_batches) < 2:
            return None
        judged_batches, learned_batches = (
            _spread(half, num_running) for half in (similar_batches[::2], similar_batches[1::2])
        )
        return cls(
            learned=history.micro_batches(learned_batches),
            learned_weight=len(similar_batches[1::2]) / len(learned_batches),
            judged=history.micro_batches(judged_batches),
            judged_weight=steps_served * num_running / len(judged_batches),
            steps=steps_served * num_running / (num_running + len(similar_batches[1::2])),
        )

    def best_homes(
        self,
        homes: list[NDArray[np.int32]],
        judged_seconds: list[NDArray[np.float64]],
        moves_s: list[NDArray[np.float64]],
    ) -> NDArray[np.int32]:
        """Return [L, E] homes, in every layer those that surely save most over those in force, which stand first.

        `homes` [L, E] have taken `judged_seconds` [G, M, L] in the micro-batches on which they are judged, and moves of
        `moves_s` [L] seconds lead there. Sure is a sum of gains less `CHANCE` of its standard errors.
        """

        def saved(after: NDArray[np.float64]) -> NDArray[np.float64]:
            gain = (judged_seconds[0] - after).sum(axis=0)
            if len(gain) > 1:
                error = np.sqrt(len(gain) * gain.var(axis=0, ddof=1))
            else:
                error = np.abs(gain).sum(axis=0)
            sure: NDArray[np.float64] = gain.sum(axis=0) - CHANCE * error
            return sure * self.judged_weight

        gain_of_homes = np.stack([saved(after) - paid for after, paid in zip(judged_seconds, moves_s, strict=True)])
        layers = np.arange(gain_of_homes.shape[1])
        best: NDArray[np.int32] = np.stack(homes)[np.argmax(gain_of_homes, axis=0), layers]
        return best


def switched(load: StepLoad, earlier: StepLoad) -> bool:
    """Return whether two steps are of different tasks.

    Experts' shares of a micro-batch scatter around their step's; means of M and H micro-batches of one kind differ with
    variance (1 / M + 1 / H) of that scatter. Summed over layers and experts, the observed difference is compared to it.
    """
    shares, earlier_shares = _shares(load), _shares(earlier)
    if min(len(shares), len(earlier_shares)) < 2:
        return False
    scatter = (len(shares) * shares.var(axis=0) + len(earlier_shares) * earlier_shares.var(axis=0)).sum() / (
        len(shares) + len(earlier_shares) - 2
    )
    expected_difference = scatter * (1 / len(shares) + 1 / len(earlier_shares))
    difference = shares.mean(axis=0) - earlier_shares.mean(axis=0)
    total_variation = np.abs(difference).sum(axis=1).mean() / 2
    return bool((difference**2).sum() > SWITCHED * expected_difference and total_variation > DRIFT)


def _of_the_same_task(load: StepLoad, history: StepLoad) -> NDArray[np.int64]:
    """Return the micro-batches of `history` that stand in stretches, as long as the step, of the step's own task."""
    running_batches, stretch_length = _running(history), max(1, len(_running(load)))
    stretches = np.split(
        running_batches,
        np.arange(len(running_batches) % stretch_length or stretch_length, len(running_batches), stretch_length),
    )
    similar_stretches = [stretch for stretch in stretches if not switched(load, history.micro_batches(stretch))]
    return np.concatenate([np.zeros(0, np.int64), *similar_stretches])


def _spread(cells: NDArray[np.int64], max_cells: int) -> NDArray[np.int64]:
    """Return at most so many of the cells, evenly spread."""
    count = min(max_cells, len(cells))
    spread: NDArray[np.int64] = cells[np.arange(count) * len(cells) // count]
    return spread


def _running(load: StepLoad) -> NDArray[np.int64]:
    """Return the micro-batches with tokens."""
    return np.flatnonzero(load.tokens.any(axis=(0, 2)))


def _shares(load: StepLoad) -> NDArray[np.float64]:
    """Return [M, L, E] shares of every running micro-batch's pairs, all EP groups together."""
    pairs = load.per_expert().sum(axis=0)[_running(load)].astype(np.float64)
    shares: NDArray[np.float64] = pairs / np.maximum(pairs.sum(axis=2, keepdims=True), 1.0)
    return shares
