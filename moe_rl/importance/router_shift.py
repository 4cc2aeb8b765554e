"""Router-shift ratio: how far the router has moved since the old policy, as one weight in (0, 1] per token.

With e[t, l, k] the K experts that layer l used for token t under the OLD policy and r the router's probability
of them,

    shift[t] = mean over layers l and experts k of | log r_new(e[t, l, k]) - log r_old(e[t, l, k]) |
    gamma[t] = max( exp(-shift[t]), floor ),  never differentiated

Source: RSPO, arXiv 2510.23027. The paper leaves open: the floor (gamma_min), the treatment of sigmoid routers,
and whether gamma enters before or after the ratio clip (`RouterShiftUse`). The mean runs over all layers
*before* the exponential; a product of per-layer ratios is a different, much smaller number and is not offered.

Rollout engines return expert ids but no router probabilities, so gamma compares the trainer's old and current
policies. It cannot be computed between rollout and trainer, and not in bypass mode, which has no old forward
pass.

T tokens, L layers, K experts per token, E experts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe_rl.core.errors import require
from moe_rl.importance.aggregate import SumReducer
from moe_rl.importance.options import Options, require_word
from moe_rl.importance.tensors import LOG_PROB_FLOOR, as_floats, masked_mean, working_dtype

ScoreFunction = Literal["softmax", "sigmoid", "sigmoid-normalized"]
Order = Literal["before-clip", "after-clip"]

_LOW_PRECISION = (torch.float16, torch.bfloat16)

_CHUNK = 1 << 16
"""Tokens per step: temporaries stay far below one layer, and in cache."""


@torch.no_grad()
def router_log_probs(logits: Tensor, expert_ids: Tensor, *, score_function: ScoreFunction = "softmax") -> Tensor:
    """Return the router's log-probability of given experts: logits [T, E], ids [T, K] -> [T, K], at least float32.

    `softmax`: log softmax over all E experts (RSPO). `sigmoid`: log sigmoid of the expert's own logit, the raw
    score of DeepSeek-V3 style routers. `sigmoid-normalized`: that score divided by its sum over all E. The
    paper only treats softmax; both sigmoid forms are our reading. Logits are those before any aux-free bias,
    and before the top-k renormalization, which would hide the shift. Ids below 0 (no route) give 0; mask them
    with `valid`.
    """
    require_word("score_function", score_function, ScoreFunction)
    require(
        logits.ndim == 2 and expert_ids.ndim == 2 and logits.shape[0] == expert_ids.shape[0],
        f"expected logits [T, E] and expert_ids [T, K], got {tuple(logits.shape)} and {tuple(expert_ids.shape)}.",
    )
    ids = expert_ids.to(torch.int64)
    if ids.numel():
        require(
            int(ids.max()) < logits.shape[1],
            f"expert id {int(ids.max())} is out of range for {logits.shape[1]} experts.",
        )
    log_probs = torch.empty(ids.shape, dtype=working_dtype(logits), device=logits.device)
    for start in range(0, ids.shape[0], _CHUNK):
        rows = slice(start, start + _CHUNK)
        log_probs[rows] = _chosen_log_probs(logits[rows].to(log_probs.dtype), ids[rows], score_function)
    return log_probs


def _chosen_log_probs(scores: Tensor, ids: Tensor, score_function: str) -> Tensor:
    chosen = scores.gather(1, ids.clamp(min=0))
    if score_function == "softmax":
        log_probs = chosen - scores.logsumexp(dim=1, keepdim=True)
    else:
        log_probs = torch.nn.functional.logsigmoid(chosen)
        if score_function == "sigmoid-normalized":
            log_probs = log_probs - torch.nn.functional.logsigmoid(scores).logsumexp(dim=1, keepdim=True)
    return torch.where(ids >= 0, log_probs, torch.zeros_like(log_probs))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterShift:
    """The router-shift ratio of one batch."""

    ratio: Tensor
    """[T] gamma, detached; 1 for tokens without a route."""
    shift: Tensor
    """[T] mean |delta log-probability| over layers and experts."""
    metrics: dict[str, float]
    """`router_corr/gamma_mean`, `gamma_min`, `gamma_floor_frac`, `shift_abs_mean`, `clipfrac_gamma_0_8` over
    tokens with a route (absent when there are none), and `layer_{id}/shift` for each layer given an id."""


class RouterShiftAccumulator:
    """Sums |delta log-probability| layer by layer: two [T] vectors are all it keeps.

    Feed it each layer's log-probabilities as they appear, drop them, and call `finish`. Pipeline stages each
    feed their own layers and pass a `sum_over_ranks` that adds the stages: the sums are added before the
    exponential.
    """

    def __init__(
        self,
        num_tokens: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        round_new_to_old_dtype: bool = True,
    ) -> None:
        """Start at zero for `num_tokens` tokens.

        `round_new_to_old_dtype`: when the old log-probabilities were stored in fp16 or bf16, round the new ones
        to the same grid before subtracting. Rounding one side only reads the rounding error as shift (see
        docs/importance.md).
        """
        require(num_tokens >= 0, f"num_tokens must be >= 0, got {num_tokens}.")
        self._total = torch.zeros(num_tokens, dtype=dtype, device=device)
        self._count = torch.zeros(num_tokens, dtype=dtype, device=device)
        self._round = round_new_to_old_dtype
        self._layer_shift: dict[int, Tensor] = {}

    @torch.no_grad()
    def add_layer(
        self, new_log_probs: Tensor, old_log_probs: Tensor, *, valid: Tensor | None = None, layer: int | None = None
    ) -> None:
        """Add one layer: log-probabilities [T, K] of the old policy's experts under the new and the old router.

        `valid`: bool [T] or [T, K], False where there is no route (those entries may hold anything). `layer`:
        an id under which the layer's own mean shift is reported.
        """
        self._check_layer(new_log_probs, old_log_probs, valid)
        layer_total = torch.zeros((), dtype=self._total.dtype, device=self._total.device)
        layer_count = torch.zeros_like(layer_total)
        for start in range(0, self._total.shape[0], _CHUNK):
            rows = slice(start, start + _CHUNK)
            delta = self._absolute_delta(new_log_probs[rows], old_log_probs[rows])
            counts = delta.new_full((delta.shape[0],), float(delta.shape[1]))
            if valid is not None:
                mask = valid[rows] if valid.ndim == 2 else valid[rows].unsqueeze(1).expand_as(delta)
                delta = delta.masked_fill_(~mask, 0.0)
                counts = mask.sum(dim=1).to(delta.dtype)
            total = delta.sum(dim=1)
            self._total[rows] += total
            self._count[rows] += counts
            layer_total += total.sum()
            layer_count += counts.sum()
        if layer is not None:
            self._layer_shift[layer] = layer_total / layer_count.clamp(min=1.0)

    def finish(self, *, floor: float, sum_over_ranks: SumReducer | None = None) -> RouterShift:
        """Return gamma = max(exp(-total / count), floor); a token that no layer routed gets 1.

        `floor` (gamma_min) in [0, 1] is not given by the paper; 0.5, 0.7 and 0.8 are values to sweep.
        `sum_over_ranks` sums the [2, T] partial sums over pipeline stages. NaN log-probabilities on routed
        tokens are an error.
        """
        require(0.0 <= floor <= 1.0, f"floor must lie in [0, 1], got {floor}.")
        sums = torch.stack([self._total, self._count])
        if sum_over_ranks is not None:
            sums = sum_over_ranks(sums)
        total, count = sums[0], sums[1]
        bad = int(total.isnan().sum())
        require(bad == 0, f"router log-probabilities are NaN at {bad} routed token(s).")
        shift = total / count.clamp(min=1.0)
        raw = torch.exp(-shift)
        ratio = raw.clamp(min=floor)  # no route: total 0, so exactly 1
        return RouterShift(ratio=ratio, shift=shift, metrics=self._metrics(ratio, shift, raw < floor, count > 0))

    def _check_layer(self, new: Tensor, old: Tensor, valid: Tensor | None) -> None:
        num_tokens = self._total.shape[0]
        require(
            new.ndim == 2 and new.shape == old.shape and new.shape[0] == num_tokens,
            f"expected new and old log-probabilities of shape [{num_tokens}, K], "
            f"got {tuple(new.shape)} and {tuple(old.shape)}.",
        )
        require(
            new.device == old.device == self._total.device,
            f"the accumulator is on {self._total.device}, but log-probabilities came on {new.device} and {old.device}.",
        )
        if valid is not None:
            require(
                valid.dtype == torch.bool and valid.shape in (new.shape, new.shape[:1]),
                f"valid must be bool of shape [T] or [T, K] = {tuple(new.shape)}, "
                f"got {valid.dtype} {tuple(valid.shape)}.",
            )

    def _absolute_delta(self, new: Tensor, old: Tensor) -> Tensor:
        if self._round and old.dtype in _LOW_PRECISION:
            new = new.to(old.dtype)
        dtype = self._total.dtype
        delta = new.to(dtype).clamp(min=LOG_PROB_FLOOR)
        return delta.sub_(old.to(dtype).clamp(min=LOG_PROB_FLOOR)).abs_()

    def _metrics(self, ratio: Tensor, shift: Tensor, at_floor: Tensor, routed: Tensor) -> dict[str, float]:
        values = {f"router_corr/layer_{layer}/shift": mean for layer, mean in self._layer_shift.items()}
        if routed.numel() and bool(routed.any()):
            values["router_corr/gamma_mean"] = masked_mean(ratio, routed)
            values["router_corr/gamma_min"] = ratio.min()
            values["router_corr/gamma_floor_frac"] = masked_mean(at_floor.to(ratio.dtype), routed)
            values["router_corr/shift_abs_mean"] = masked_mean(shift, routed)
            values["router_corr/clipfrac_gamma_0_8"] = masked_mean((ratio < 0.8).to(ratio.dtype), routed)
        return as_floats(values)


def router_shift_ratio(
    layers: Iterable[tuple[Tensor, Tensor]],
    *,
    floor: float,
    num_tokens: int,
    valid: Tensor | None = None,
    sum_over_ranks: SumReducer | None = None,
    device: torch.device | str = "cpu",
    per_layer_metrics: bool = False,
) -> RouterShift:
    """Compute gamma [T] from (new, old) router log-probabilities [T, K], one pair per layer.

    `layers` may be a generator: one layer is held at a time. `valid`, bool [T] or [T, K], serves every layer.
    A pipeline stage without MoE layers passes an empty iterable. See `RouterShiftAccumulator` for the rest.
    """
    accumulator = RouterShiftAccumulator(num_tokens, device=device)
    for index, (new_log_probs, old_log_probs) in enumerate(layers):
        accumulator.add_layer(new_log_probs, old_log_probs, valid=valid, layer=index if per_layer_metrics else None)
    return accumulator.finish(floor=floor, sum_over_ranks=sum_over_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterShiftUse(Options):
    """Where gamma enters the objective; the published sources differ."""

    order: Order | None = None
    """None takes the objective's own (`Objective.router_shift_order`).

    `before-clip`: the log-ratio becomes log(rho) + log(gamma), then it is clipped and aggregated (abstract of
    RSPO v2; the formulas behind it were not seen, so the form is inferred). A token with A < 0 and gamma below
    1 - clip_ratio_low then hits the lower clip and gets no gradient; one with A > 0 may travel further.
    `after-clip`: the clipped per-token loss is multiplied by gamma (RSPO v1, where gamma stands outside the token
    clip)."""
    sign_power: Literal["outside", "inside"] = "outside"
    """Only for GMPO after the clip. `inside`: gamma^(sign(A)/n) as printed in v1, which would up-weight drifting
    sequences with A < 0. `outside` (default, inferred from the stated intent): gamma^(1/n) whatever the sign of A."""

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.sign_power == "inside":
            require(self.order == "after-clip", "sign_power 'inside' only exists with order 'after-clip'.")
