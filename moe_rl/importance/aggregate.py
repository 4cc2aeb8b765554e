"""Turn a per-token loss into one number, in verl's modes, so that micro-batches and data-parallel ranks add up.

The denominators belong to the whole batch, not to the micro-batch. Compute them once with
`BatchTotals.from_mask` over every sequence of the optimizer step, pass them to each micro-batch, and the losses
(and gradients) of the micro-batches and ranks sum to those of the full batch in every mode.
"""

from dataclasses import MISSING, dataclass
from typing import Literal, Self, get_args

import torch
from torch import Tensor

from moe_rl.core.errors import InvalidInputError
from moe_rl.importance.context_parallel import ContextParallel, SumReducer
from moe_rl.importance.options import Options, option, require_word
from moe_rl.importance.sequences import SequenceLayout, ValidTokens
from moe_rl.importance.tensors import require_same_shape, silenced, usable_tokens, working_dtype

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
# verl's `loss_agg_mode` values (verl-project/verl:verl/trainer/ppo/core_algos.py, `agg_loss`).
LOSS_AGG_MODES: tuple[str, ...] = get_args(LossAggMode)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTotals(Options):
    """The denominators of one optimizer step, the same on every rank and in every micro-batch."""

    batch_num_tokens: float = option(MISSING, at_least=0)
    """Valid tokens of the whole batch, over all data-parallel ranks."""
    global_batch_size: float = option(MISSING, at_least=0)
    """Sequences with at least one valid token, over all data-parallel ranks."""
    dp_size: int = option(1, at_least=1)
    """Factor on the loss: the number of ranks when the framework averages gradients over them (DDP, FSDP; Megatron:
    data-parallel times context-parallel ranks), 1 when it sums them."""
    loss_scale_factor: float | None = option(None, above=0)
    """Divisor of `seq-mean-token-sum-norm` (Dr. GRPO): a constant such as the longest allowed response, in tokens."""

    @classmethod
    def from_mask(
        cls,
        response_mask: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        sum_over_ranks: SumReducer | None = None,
        context_parallel: ContextParallel | None = None,
        dp_size: int = 1,
        loss_scale_factor: float | None = None,
    ) -> Self:
        """Count the tokens and sequences of the whole batch; `sum_over_ranks` adds the other data-parallel ranks.

        Pass the mask before rejection to let rejected tokens shrink the gradient (AReaL), after it to re-scale
        what is left (verl). Under `context_parallel` the group's parts of a sequence count once, and
        `sum_over_ranks` is over data-parallel ranks without the context-parallel ones.
        """
        mask, _ = usable_tokens(response_mask, {}, "raise")
        layout = SequenceLayout.of(mask, cu_seqlens, context_parallel)
        per_sequence = layout.count(mask, torch.float64)
        counts = torch.stack([per_sequence.sum(), (per_sequence > 0).sum().to(torch.float64)])
        if sum_over_ranks is not None:
            # float64 counts are exact up to 2^53 tokens.
            counts = sum_over_ranks(counts)
        tokens, sequences = counts.tolist()  # waits for the device, once per optimizer step
        return cls(
            batch_num_tokens=tokens, global_batch_size=sequences, dp_size=dp_size, loss_scale_factor=loss_scale_factor
        )


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    totals: BatchTotals | None = None,
    cu_seqlens: Tensor | None = None,
    context_parallel: ContextParallel | None = None,
) -> Tensor:
    """Aggregate a per-token loss, [B, S] or packed [T], into a scalar.

    With m the mask, n_i the valid tokens of sequence i, and tokens / sequences the totals of the batch:
    `token-mean` = sum(m x) / tokens; `token-sum` = sum(m x); `seq-mean-token-sum` = sum_i sum_t(m x) /
    sequences; `-norm` divides that by `loss_scale_factor` (the padded width S when None); `seq-mean-token-mean`
    = sum_i (sum_t(m x) / n_i) / sequences. All are multiplied by `dp_size`.

    Without `totals` the counts of this batch are used. A batch without valid tokens gives 0 with zero gradient. Under
    `context_parallel` the result is this rank's share: the shares of the group add up to the loss.
    Source: verl-project/verl:verl/trainer/ppo/core_algos.py, `agg_loss`.
    """
    require_same_shape(loss_mat, "loss_mat", {"loss_mask": loss_mask})
    mask, dtype = loss_mask != 0, working_dtype(loss_mat)
    valid = ValidTokens.of(mask, SequenceLayout.of(loss_mat, cu_seqlens, context_parallel), dtype)
    return reduce_loss(silenced(loss_mat, mask, dtype), valid, loss_agg_mode, totals)


def reduce_loss(values: Tensor, valid: ValidTokens, mode: str, totals: BatchTotals | None) -> Tensor:
    """Aggregate a loss that is 0 at masked tokens."""
    require_word("loss_agg_mode", mode, LossAggMode)
    layout = valid.layout
    scale = 1.0 if totals is None else float(totals.dp_size)
    if mode.startswith("token"):
        loss = values.sum()
        if mode == "token-mean":
            tokens = valid.counts.sum() if totals is None else totals.batch_num_tokens
            return _over(loss, tokens, scale)
        if scale == 1.0:
            return loss
        return loss * scale
    per_sequence = layout.local_sum(values)
    if mode == "seq-mean-token-mean":
        per_sequence = per_sequence / valid.counts.clamp(min=1.0)
    if mode == "seq-mean-token-sum-norm":
        scale /= _loss_scale(values, layout, totals)
    sequences = valid.counts.count_nonzero() if totals is None else totals.global_batch_size
    return _over(per_sequence.sum(), sequences, scale)


def _over(loss: Tensor, count: Tensor | float, scale: float) -> Tensor:
    """Return scale * loss / count, of nothing at all 0."""
    if isinstance(count, Tensor):
        mean = loss / (count + 1e-30)  # exactly the count, from 1 on
        if scale == 1.0:
            return mean
        return mean * scale
    # One multiplication of the loss: numbers of the host are divided on the host.
    return loss * (scale / max(count, 1.0))


def _loss_scale(values: Tensor, layout: SequenceLayout, totals: BatchTotals | None) -> float:
    if totals is not None and totals.loss_scale_factor is not None:
        return totals.loss_scale_factor
    if layout.is_packed:
        raise InvalidInputError("seq-mean-token-sum-norm needs BatchTotals.loss_scale_factor if tensors are packed.")
    # The width of the whole sequences, of which this rank holds 1 / size.
    return float(max(values.shape[-1] * layout.context.size, 1))
