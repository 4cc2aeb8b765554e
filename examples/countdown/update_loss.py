"""The policy loss of one optimizer update, cell by cell.

S sequences, T packed tokens, R ranks, B sequences of a cell, N inputs of its longest one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from examples.countdown.batches import Cell
from examples.countdown.config import TrainSection
from examples.countdown.old_policy import Metrics, OldPolicy
from examples.countdown.passes import CellOutput
from examples.countdown.rollouts import Rollouts
from moe_rl.importance import (
    BatchTotals,
    PolicyLossInputs,
    UpdatePass,
    apply_rollout_correction,
    as_floats,
    group_normalized_advantages,
    policy_loss,
)
from moe_rl.importance.objectives import make_objective


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """What the updates of a step train on; the same on all ranks."""

    rollouts: Rollouts
    old: OldPolicy
    advantages: Tensor
    """[T] float32, constant over a sequence."""
    mask: Tensor
    """[T] bool, response tokens that the rollout correction keeps."""
    weights: Tensor | None
    """[T] float32 of the rollout correction."""
    metrics: Metrics
    """Of the rollout correction."""

    @classmethod
    def of(cls, rollouts: Rollouts, old: OldPolicy, train: TrainSection) -> "Targets":
        """Return group-normalized advantages and, where it is asked for, the rollout correction."""
        per_sequence = group_normalized_advantages(rollouts.rewards, rollouts.problem_id)
        mask, weights = rollouts.response_mask, None
        metrics: Metrics = {}
        correction = train.correction()
        if correction is not None:
            weights, mask, found = apply_rollout_correction(
                correction, old.logprobs, rollouts.logprobs, mask, cu_seqlens=rollouts.cu_seqlens
            )
            metrics = as_floats(found)
        return cls(
            rollouts=rollouts,
            old=old,
            advantages=per_sequence[rollouts.sequence_of_token],
            mask=mask,
            weights=weights,
            metrics=metrics,
        )

    def totals(self, sequences: Tensor, *, max_response_tokens: int) -> BatchTotals:
        """Return the denominators of an update on consecutive `sequences`, over all ranks."""
        bounds = self.rollouts.cu_seqlens[int(sequences[0]) : int(sequences[-1]) + 2]
        return BatchTotals.from_mask(
            self.mask[int(bounds[0]) : int(bounds[-1])],
            cu_seqlens=bounds - bounds[0],
            dp_size=dist.get_world_size(),
            loss_scale_factor=float(max_response_tokens),
        )


class UpdateLoss:
    """The loss of a pass over this rank's cells, and the means of its metrics over the tokens of all ranks."""

    def __init__(
        self, train: TrainSection, targets: Targets, totals: BatchTotals, cells: Sequence[Cell], routers: UpdatePass
    ) -> None:
        self._train, self._targets, self._totals, self._cells = train, targets, totals, cells
        self._routers = routers
        self._loss = 0.0
        self._tokens = 0
        self._sums: Metrics = {}

    def __call__(self, index: int, output: CellOutput) -> Tensor:
        """Return the share of a cell."""
        cell, targets, train = self._cells[index], self._targets, self._train
        mask = cell.of_targets(targets.mask) & cell.real
        section = train.router_shift
        gamma = self._routers.finish(cell.keys, floor=0.0 if section is None else section.floor).ratio
        assert self._routers.agreement is not None
        agreement = cell.of_inputs(self._routers.agreement)[mask]
        result = policy_loss(
            PolicyLossInputs(
                log_prob=output.logprobs,
                old_log_prob=cell.of_targets(targets.old.logprobs),
                advantages=cell.of_targets(targets.advantages),
                response_mask=mask,
                rollout_is_weights=None if targets.weights is None else cell.of_targets(targets.weights),
                router_shift_ratio=None if section is None else cell.unrows(gamma),
                rollout_log_prob=cell.of_targets(targets.rollouts.logprobs),
                policy_version=cell.of_targets(targets.rollouts.policy_version),
                current_version=int(targets.rollouts.policy_version.max()),
            ),
            objective=make_objective(train.objective, dict(train.objective_options)),
            loss_agg_mode=train.loss_agg_mode,
            totals=self._totals,
            router_shift=None if section is None else section.use(),
        )
        self._loss += float(result.loss.detach()) / self._totals.dp_size
        drifted = float(agreement.mean()) if len(agreement) else 1.0
        self._add(as_floats(result.metrics) | {"router/agreement": drifted}, mask)
        return result.loss

    def metrics(self) -> Metrics:
        """Return the loss and the means of the metrics; a collective of all ranks."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (self._loss, self._tokens, self._sums))
        tokens = sum(count for _, count, _ in everyone)
        names = sorted({name for _, _, sums in everyone for name in sums})
        means = {name: sum(sums.get(name, 0.0) for _, _, sums in everyone) / max(1, tokens) for name in names}
        return means | {"train/loss": sum(loss for loss, _, _ in everyone)}

    def _add(self, metrics: Metrics, mask: Tensor) -> None:
        """Add metrics that are means over the tokens of a cell."""
        tokens = int(mask.sum())
        self._tokens += tokens
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + value * tokens
