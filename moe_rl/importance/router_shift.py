"""Router-shift ratio: how far the router has moved since the old policy, as one weight in (0, 1] per token.

With e[t, l, k] the K experts that layer l used for token t under the OLD policy and r the router's probability
of them,

    shift[t] = mean over layers l and experts k of | log r_new(e[t, l, k]) - log r_old(e[t, l, k]) |
    gamma[t] = max( exp(-max(shift[t] - noise, 0)), floor ),  never differentiated

noise is the shift that numerics give without any update (0 unless measured). Source: RSPO, arXiv 2510.23027. The
paper leaves open: the floor (gamma_min), the treatment of sigmoid routers, and whether gamma enters before or after
the ratio clip (`RouterShiftUse`). The mean runs over all layers
*before* the exponential; a product of per-layer ratios is a different, much smaller number and is not offered.

gamma compares the trainer's old and current policies; in bypass mode, without an old forward pass, there is none.
Between rollout engine and trainer there is one where the engine returns combine weights (`rollout_router_shift`).

T tokens, L layers, K experts per token, E experts.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe_rl.core.errors import require
from moe_rl.importance.context_parallel import SumReducer
from moe_rl.importance.options import Options, option, require_word
from moe_rl.importance.router_storage import StoredRouterLogProbs
from moe_rl.importance.tensors import LOG_PROB_FLOOR, working_dtype

ScoreFunction = Literal["softmax", "sigmoid", "sigmoid-normalized", "sqrtsoftplus"]
Order = Literal["before-clip", "after-clip"]

_LOW_PRECISION = (torch.float16, torch.bfloat16)

# Tokens per step: temporaries stay in cache.
_CHUNK = 2048

# gamma_min. The paper does not give it; a public third-party implementation on verl that restates its equations (mean
# over K and over layers, exp(-shift), stop-gradient, weight before the clip) has this default.
DEFAULT_FLOOR = 0.8

# 1 - gamma of a router that has not moved, where one side went through bfloat16: 0.0038, see docs/importance.md.
BFLOAT16_NOISE = 4e-3


@torch.no_grad()
def router_log_probs(logits: Tensor, expert_ids: Tensor, *, score_function: ScoreFunction = "softmax") -> Tensor:
    """Return the router's log-probability of given experts: logits [T, E], ids [T, K] -> [T, K], at least float32.

    `softmax`: log softmax over all E experts (RSPO). `sigmoid`: log sigmoid of the expert's own logit, the raw
    score of DeepSeek-V3 style routers. `sigmoid-normalized`: that score divided by its sum over all E.
    `sqrtsoftplus`: log sqrt(softplus(logit)), DeepSeek-V4's score. The paper only treats softmax; the others are our
    reading. Logits are those before any aux-free bias,
    and before the top-k renormalization, which would hide the shift. Ids below 0 (no route) give 0; mask them
    with `valid`.
    """
    require_word("score_function", score_function, ScoreFunction)
    require(
        logits.ndim == 2 and expert_ids.ndim == 2 and logits.shape[0] == expert_ids.shape[0],
        f"logits must have shape [T, E] and expert_ids [T, K], got {tuple(logits.shape)} and "
        f"{tuple(expert_ids.shape)}.",
    )
    ids = expert_ids.to(torch.int64)
    if ids.numel() and ids.device.type == "cpu":  # elsewhere the look would wait for the device, whose gather refuses
        largest_id = int(ids.max())
        require(largest_id < logits.shape[1], f"expert id {largest_id} is out of range for {logits.shape[1]} experts.")
    log_probs = torch.empty(ids.shape, dtype=working_dtype(logits), device=logits.device)
    for start in range(0, ids.shape[0], _CHUNK):
        rows = slice(start, start + _CHUNK)
        log_probs[rows] = _chosen_log_probs(logits[rows].to(log_probs.dtype), ids[rows], score_function)
    return log_probs


def _chosen_log_probs(scores: Tensor, ids: Tensor, score_function: str) -> Tensor:
    scores_of_choices = scores.gather(1, ids.clamp(min=0))
    if score_function == "softmax":
        log_probs = scores_of_choices - scores.logsumexp(dim=1, keepdim=True)
    elif score_function == "sqrtsoftplus":
        log_probs = 0.5 * torch.nn.functional.softplus(scores_of_choices).log()
    else:
        log_probs = torch.nn.functional.logsigmoid(scores_of_choices)
        if score_function == "sigmoid-normalized":
            log_probs = log_probs - torch.nn.functional.logsigmoid(scores).logsumexp(dim=1, keepdim=True)
    return torch.where(ids >= 0, log_probs, torch.zeros_like(log_probs))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterShift:
    """The router-shift ratio of one batch."""

    ratio: Tensor
    """[T] gamma, detached; 1 for tokens without a route, NaN where a router log-probability is NaN."""
    shift: Tensor
    """[T] mean |delta log-probability| over layers and experts, nothing subtracted."""
    shift_p99: Tensor
    """[] 99th percentile of the shift of routed tokens. Of a pass without an update it is the `noise` to subtract."""
    metrics: dict[str, Tensor]
    """Under `router_corr/`, over tokens with a route, each []: `gamma_mean`, `gamma_min`, `gamma_floor_frac`,
    `shift_abs_mean`; of gamma before noise and floor `gamma_raw_p01`, `_p10`, `_p50` and `clipfrac_gamma_0_8`; and
    `layer_{id}/shift` for each layer given an id; where the old ones were stored, `log_prob_floor_frac`, the share of
    this rank's entries that lie at or below the end of the store's grid (e^-16): their shift is read too small."""


class RouterShiftAccumulator:
    """Sums |delta log-probability| layer by layer: two [T] vectors are all it keeps.

    Feed it each layer's log-probabilities as they appear, drop them, and call `finish`. Pipeline stages each
    feed their own layers and pass a `sum_over_ranks` that adds the stages: the sums are added before the
    exponential.
    """

    def __init__(self, num_tokens: int, *, device: torch.device | str = "cpu") -> None:
        """Start at zero for `num_tokens` tokens."""
        require(num_tokens >= 0, f"num_tokens must be >= 0, got {num_tokens}.")
        self._sums = torch.zeros(2, num_tokens, device=device)
        self._layers: dict[int, Tensor] = {}
        self._floored: Tensor | None = None

    @torch.no_grad()
    def add_layer(
        self, new_log_probs: Tensor, old_log_probs: Tensor, *, valid: Tensor | None = None, layer: int | None = None
    ) -> None:
        """Add one layer: log-probabilities [T, K] of the old policy's experts under the new and the old router.

        `valid`: bool [T] or [T, K], False where there is no route (those entries may hold anything). `layer`:
        an id under which the layer's own mean shift is reported. Where the old ones were stored in fp16 or bf16, the
        new ones are rounded to the same grid before the difference is taken (docs/importance-reference.md).
        """
        self._check_layer(new_log_probs, old_log_probs, valid)
        sums = layer_sums(new_log_probs, old_log_probs, valid)
        self._sums += sums
        if layer is not None:
            self._layers[layer] = sums.sum(dim=1)

    def add(
        self,
        stored: StoredRouterLogProbs,
        logits: Tensor,
        *,
        score_function: ScoreFunction = "softmax",
        layer: int | None = None,
    ) -> None:
        """Add one layer from what the old pass stored and the new router's logits [T, E], rounded alike."""
        new_log_probs = stored.rounded(router_log_probs(logits, stored.expert_ids, score_function=score_function))
        floored = stored.floored(new_log_probs)
        if self._floored is None:
            self._floored = floored
        else:
            self._floored = self._floored + floored
        self.add_layer(new_log_probs, stored.log_probs, valid=stored.valid, layer=layer)

    def finish(
        self, *, floor: float = DEFAULT_FLOOR, noise: float | Tensor = 0.0, sum_over_ranks: SumReducer | None = None
    ) -> RouterShift:
        """Return gamma = max(exp(-max(total / count - noise, 0)), floor); a token that no layer routed gets 1.

        `noise`: the shift that numerics alone give, [] or [T]: `shift_p99` of a pass without an update (the
        recomputed old policy against itself, or one forward in each precision at the same weights). With it a
        router that has not moved costs nothing, and one that has is damped for what exceeds it. `sum_over_ranks`
        sums the [2, T] partial sums over pipeline stages. A NaN log-probability on a routed token gives a NaN gamma,
        which `policy_loss` masks and counts.
        """
        if sum_over_ranks is None:
            sums = self._sums
        else:
            sums = sum_over_ranks(self._sums)
        return shift_of(sums, self._layers, floor=floor, noise=noise, floored=self._floored)

    def _check_layer(self, new: Tensor, old: Tensor, valid: Tensor | None) -> None:
        num_tokens = self._sums.shape[1]
        require(
            new.ndim == 2 and new.shape == old.shape and new.shape[0] == num_tokens,
            f"the new and old log-probabilities must have shape [{num_tokens}, K], "
            f"got {tuple(new.shape)} and {tuple(old.shape)}.",
        )
        if valid is not None:
            require(
                valid.dtype == torch.bool and valid.shape in (new.shape, new.shape[:1]),
                f"`valid` must be a bool tensor of shape [T] or [T, K] = {tuple(new.shape)}, "
                f"got {valid.dtype} {tuple(valid.shape)}.",
            )


def layer_sums(new: Tensor, old: Tensor, valid: Tensor | None) -> Tensor:
    """Return fp32 [2, T]: the sum of |delta log-probability| over a layer's experts [T, K], and their number."""
    sums = torch.zeros(2, new.shape[0], device=new.device)
    for start in range(0, new.shape[0], _CHUNK):
        rows = slice(start, start + _CHUNK)
        # The same grid on both sides: rounding only one reads as a shift of 0.0038 (`BFLOAT16_NOISE`).
        if old.dtype in _LOW_PRECISION:
            new_log_probs = new[rows].to(old.dtype)
        else:
            new_log_probs = new[rows]
        delta = new_log_probs.float().clamp(min=LOG_PROB_FLOOR).sub_(old[rows].float().clamp(min=LOG_PROB_FLOOR)).abs_()
        if valid is None:
            sums[1, rows] = float(delta.shape[1])
        else:
            if valid.ndim == 2:
                mask = valid[rows]
            else:
                mask = valid[rows].unsqueeze(1).expand_as(delta)
            delta = delta.masked_fill_(~mask, 0.0)
            sums[1, rows] = mask.sum(dim=1).float()
        sums[0, rows] = delta.sum(dim=1)
    return sums


def shift_of(
    sums: Tensor,
    layers: Mapping[int, Tensor],
    *,
    floor: float = DEFAULT_FLOOR,
    noise: float | Tensor = 0.0,
    floored: Tensor | None = None,
) -> RouterShift:
    """Return the router shift of sums [2, T] over layers and experts; `layers`: the two sums of each layer, [2].

    `floored`: what `StoredRouterLogProbs.floored` counted, [2].
    """
    require(0.0 <= floor <= 1.0, f"floor must be between 0 and 1, got {floor}.")
    total, count = sums
    shift = total / count.clamp(min=1.0)
    raw = torch.exp(-(shift - noise).clamp(min=0.0))
    # A NaN stays in `ratio`, where policy_loss counts it, and out of the metrics.
    is_routed = (count > 0) & ~shift.isnan()
    ratio = torch.where(count > 0, raw.clamp(min=floor), torch.ones_like(raw))
    percentiles = _percentiles(shift, is_routed, (0.5, 0.9, 0.99))
    values = {
        f"layer_{layer}/shift": sums_of_layer[0] / sums_of_layer[1].clamp(min=1.0)
        for layer, sums_of_layer in layers.items()
    }
    if floored is not None:
        values["log_prob_floor_frac"] = floored[0] / floored[1].clamp(min=1.0)
    for name, statistic in {
        "gamma_mean": ratio,
        "gamma_floor_frac": raw < floor,
        "shift_abs_mean": shift,
        "clipfrac_gamma_0_8": shift > -math.log(0.8),
    }.items():
        # A masked sum, not an index: indexing by a bool mask would wait for the device.
        values[name] = torch.where(is_routed, statistic.to(shift.dtype), 0.0).sum() / is_routed.sum().clamp(min=1)
    lowest_ratio = torch.where(is_routed, ratio, 1.0)
    values["gamma_min"] = lowest_ratio.min() if lowest_ratio.numel() else lowest_ratio.new_ones(())
    # gamma falls with the shift: its 1st percentile is exp of minus the shift's 99th.
    for name, sums_of_layer in zip(("p50", "p10", "p01"), torch.exp(-percentiles).unbind(), strict=True):
        values[f"gamma_raw_{name}"] = sums_of_layer
    metrics = {f"router_corr/{name}": sums_of_layer for name, sums_of_layer in values.items()}
    return RouterShift(ratio=ratio, shift=shift, shift_p99=percentiles[2], metrics=metrics)


def _percentiles(values: Tensor, valid: Tensor, shares: tuple[float, ...]) -> Tensor:
    """Return the value below which each share of the valid [T] values lies, 0 where there are none; no host sync."""
    if not values.numel():
        return values.new_zeros(len(shares))
    count = valid.sum()
    # Tokens without a route sort to the end; `count` says where the others stop.
    ordered = torch.where(valid, values, torch.full_like(values, math.inf)).sort().values
    wanted_shares = torch.tensor(shares, dtype=torch.float64, device=values.device)
    places = ((count - 1).clamp(min=0) * wanted_shares).round().long()
    return torch.where(count > 0, ordered[places], torch.zeros_like(wanted_shares, dtype=values.dtype))


def router_shift_ratio(
    layers: Iterable[tuple[Tensor, Tensor]],
    *,
    num_tokens: int,
    floor: float = DEFAULT_FLOOR,
    noise: float | Tensor = 0.0,
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
    return accumulator.finish(floor=floor, noise=noise, sum_over_ranks=sum_over_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterShiftUse(Options):
    """Where gamma enters the objective; the published sources differ."""

    order: Order | None = None
    """None takes the objective's own (`Objective.router_shift_order`).

    `before-clip`: the log-ratio becomes log(rho) + log(gamma), then it is clipped and aggregated (RSPO v2: its
    abstract, and its equations as a public implementation restates them). A token with A < 0 and gamma below
    1 - clip_ratio_low then hits the lower clip and gets no gradient; one with A > 0 may travel further.
    `after-clip`: the clipped per-token loss is multiplied by gamma (RSPO v1, where gamma stands outside the token
    clip)."""
    sign_power: Literal["outside", "inside"] = "outside"
    """Only for GMPO after the clip. `inside`: gamma^(sign(A)/n) as printed in v1, which would up-weight drifting
    sequences with A < 0. `outside` (default, inferred from the stated intent): gamma^(1/n) whatever the sign of A."""

    center: bool = False
    """Divide gamma by its geometric mean over the batch's valid tokens, so that a drift common to all costs nothing and
    only differences act; single tokens may then weigh more than 1. For ratios of a sequence before the clip. The
    mean is that of the micro-batch, so micro-batches no longer add up exactly."""
    noise: float = option(BFLOAT16_NOISE, at_least=0)
    """1 - gamma of a router that has not moved. Where a clip width is narrower and gamma enters before the clip, a
    warning says so; set it to what your run shows after calibration (`RouterShiftAccumulator.finish`)."""

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.sign_power == "inside":
            require(self.order == "after-clip", "sign_power 'inside' is only available with order 'after-clip'.")
