"""slime and miles: every objective as their custom loss, every rollout correction as their custom TIS function.

    --loss-type custom_loss --custom-loss-function-path moe_rl.frameworks.slime.losses.policy_loss_function
    --use-tis --custom-tis-function-path moe_rl.frameworks.slime.losses.tis_function
    --custom-config-path moe_rl.yaml            # sets what follows on the arguments

    moe_rl_objective: gspo
    moe_rl_objective_options: {clip_ratio_low: 0.0003}
    moe_rl_rollout_correction: decoupled_token_is            # a preset, or its options by name

An objective that they have too (grpo, gspo, cispo) reads `--eps-clip`, `--eps-clip-high` and `--eps-clip-c`; gspo
takes its paper's widths where slime's default of 0.2 stands. A setting that would not act is refused: with
`--custom-megatron-init-path moe_rl.frameworks.slime.attach.init` before any rollout, else in the first update.

Lists hold one 1-D tensor per sample. Under context parallelism a rank holds parts of the responses: both functions
gather whole ones first, as slime's own mis.py does, and hand back this rank's parts. Sources:
THUDM/slime:slime/backends/megatron_utils/loss.py, cp_utils.py, examples/train_infer_mismatch_helper/mis.py.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.frameworks.router_shift import READING, RouterShiftRun
from moe_rl.importance import PolicyLossInputs, opsm_mask, policy_token_loss
from moe_rl.importance.context_parallel import ContextParallel
from moe_rl.importance.diagnostics import kl_estimate
from moe_rl.importance.objectives import OBJECTIVES, Objective
from moe_rl.importance.rollout_config import RolloutCorrectionConfig
from moe_rl.importance.rollout_correction import apply_rollout_correction
from moe_rl.importance.sequences import SequenceLayout

Samples = Sequence[Tensor]


def policy_loss_function(
    args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss, metrics) of a micro-batch, reduced as slime reduces: the objective, the correction, entropy and KL.

    Reads `moe_rl_objective`, `moe_rl_objective_options` and `moe_rl_rollout_correction` of `args`, and slime's
    `eps_clip`, `eps_clip_high`, `eps_clip_c`, `use_rollout_logprobs`, `entropy_coef`, `use_kl_loss`, `kl_loss_coef`,
    `kl_loss_type`, `use_unbiased_kl`. gamma enters with MOE_RL_ROUTER_SHIFT, or as
    `batch["router_shift_ratio"]`, one tensor per sample at its response tokens, this rank's part.
    """
    framework = _framework()
    total_lengths, response_lengths = batch["total_lengths"], batch["response_lengths"]
    outputs = framework.get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=total_lengths,
        response_lengths=response_lengths,
        with_entropy=True,
        **framework.top_p_replay(args, batch),
    )
    # slime returns (empty, found), miles only what it found
    if isinstance(outputs, tuple):
        outputs = outputs[1]
    current: list[Tensor] = outputs["log_probs"]
    if args.use_rollout_logprobs:
        old = batch["rollout_log_probs"]
    else:
        old = batch.get("log_probs")
    old = old or [log_probs.detach() for log_probs in current]

    def whole(parts: Samples | None) -> Tensor | None:
        if not parts:
            return None
        return torch.cat(framework.whole(parts, total_lengths, response_lengths))

    log_prob, old_log_prob, rollout = whole(current), whole(old), whole(batch.get("rollout_log_probs"))
    assert log_prob is not None
    assert old_log_prob is not None
    mask, cu_seqlens = torch.cat(list(batch["loss_masks"])), _starts(response_lengths)
    # Lists of samples become one row of tokens, and cu_seqlens says where each starts.
    weights, correction, shift = None, getattr(args, "moe_rl_rollout_correction", None), READING.get()
    metrics: dict[str, Tensor] = {}
    if correction is not None:
        if rollout is None:
            raise InvalidInputError("a rollout correction needs the rollout's log-probabilities (--use-tis).")
        weights, mask, metrics = apply_rollout_correction(
            _config(correction), old_log_prob, rollout, mask, cu_seqlens=cu_seqlens, context_parallel=_WHOLE
        )
    objective = objective_of(args)
    inputs = PolicyLossInputs(
        log_prob=log_prob,
        old_log_prob=old_log_prob,
        advantages=whole(batch["advantages"]),  # type: ignore[arg-type]  # never empty
        response_mask=mask,
        rollout_is_weights=weights,
        rollout_log_prob=rollout,
        router_shift_ratio=whole(batch.get("router_shift_ratio")) if shift is None else _gamma(shift, response_lengths),
        cu_seqlens=cu_seqlens,
        context_parallel=_WHOLE,
    )
    tokens = policy_token_loss(inputs, objective)
    loss = policy = sum_of_sample_mean(framework.local(tokens.loss, total_lengths, response_lengths))
    entropy = sum_of_sample_mean(torch.cat(outputs["entropy"]))
    loss = loss - args.entropy_coef * entropy
    # slime's ppo_kl is the mean of old - current, the k1 estimate.
    moved = (torch.cat(list(old)) - torch.cat(current)).detach()
    clipped = framework.local(tokens.clipped.to(moved.dtype), total_lengths, response_lengths)
    reported = {"pg_loss": policy, "entropy_loss": entropy}
    if objective.name == "opsm" and objective.options["against"] == "old":
        reported["opsm_clipfrac"] = _dropped_sequences(inputs, objective.options["opsm_delta"])
    reported |= {"pg_clipfrac": sum_of_sample_mean(clipped), "ppo_kl": sum_of_sample_mean(moved)}
    if batch.get("rollout_log_probs"):
        rollout_log_probs = torch.cat(current if args.use_rollout_logprobs else list(old)).detach()
        difference = (rollout_log_probs - torch.cat(list(batch["rollout_log_probs"]))).abs()
        reported["train_rollout_logprob_abs_diff"] = sum_of_sample_mean(difference)
    if args.use_kl_loss:
        # The unbiased estimate weighs the reference KL by the ratio of current to old policy.
        ratio = None
        if getattr(args, "use_unbiased_kl", False):
            ratio = (torch.cat(current) - torch.cat(list(old))).exp()
        kind = {"low_var_kl": "k3"}.get(args.kl_loss_type, args.kl_loss_type)
        kl = kl_estimate(torch.cat(current), torch.cat(list(batch["ref_log_probs"])), kind, importance_ratio=ratio)
        reported["kl_loss"] = sum_of_sample_mean(kl)
        loss = loss + args.kl_loss_coef * reported["kl_loss"]
    if log_prob.numel() == 0:
        loss = loss + 0 * logits.sum()  # every rank's backward pass has to reach the model
    # slime divides what it logs by the number of samples, or of tokens, so means of a micro-batch come as many times.
    per_token = getattr(args, "calculate_per_token_loss", False)
    if per_token:
        count = sum(mask.sum().clamp(min=1) for mask in batch["loss_masks"])
    else:
        count = len(response_lengths)
    means = {name: value.to(loss) * count for name, value in (tokens.metrics | metrics).items()}
    return loss, {name: value.detach() for name, value in {"loss": loss, **reported, **means}.items()}


def objective_of(args: Any) -> Objective:
    """Return the objective that the arguments ask for; raise where one of slime's own settings would not act."""
    corrected = getattr(args, "moe_rl_rollout_correction", None) is not None
    for name, acts in (("use_tis", corrected), ("use_opsm", False)):
        instead = {"use_tis": "moe_rl_rollout_correction", "use_opsm": "moe_rl_objective opsm"}[name]
        require(acts or not getattr(args, name, False), f"{name} has no effect in this loss: set {instead} instead.")
    low, high = getattr(args, "eps_clip", 0.2), getattr(args, "eps_clip_high", None)
    objective = OBJECTIVES[getattr(args, "moe_rl_objective", "grpo")]
    if objective.name == "gspo":
        objective = objective(gradient="sequence")  # slime's own, which differs under a token's rollout weights
    return objective.with_widths(
        low,
        low if high is None else high,
        getattr(args, "eps_clip_c", None),
        dict(getattr(args, "moe_rl_objective_options", None) or {}),
        exact=("ppo", "grpo", "cispo"),
        flag="--eps-clip*",
    )


def _gamma(shift: RouterShiftRun, response_lengths: Sequence[int]) -> Tensor:
    """[T] gamma at the response tokens of whole samples; the row of a token is that of the one before."""
    keys = zip(shift.coming(), response_lengths, strict=True)
    return shift.of(
        torch.cat([keys_of_sequence[len(keys_of_sequence) - 1 - count : -1] for keys_of_sequence, count in keys])
    ).ratio


def tis_function(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Samples,
    rollout_log_probs: Samples,
    loss_masks: Samples,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Return (weighted loss, masks after rejection, metrics) by `args.moe_rl_rollout_correction`.

    `pg_loss` and every metric are flat over this rank's tokens; slime averages the metrics.
    """
    correction = getattr(args, "moe_rl_rollout_correction", None)
    if correction is None:
        raise InvalidInputError(
            "tis_function needs moe_rl_rollout_correction: set it to the name of a preset or to a mapping of options."
        )
    framework = _framework()
    train = torch.cat(framework.whole(train_log_probs, total_lengths, response_lengths))
    rollout = torch.cat(framework.whole(rollout_log_probs, total_lengths, response_lengths))
    mask = torch.cat(list(loss_masks))
    weights, mask_kept, metrics = apply_rollout_correction(
        _config(correction), train, rollout, mask, cu_seqlens=_starts(response_lengths), context_parallel=_WHOLE
    )
    weights = torch.ones_like(train) if weights is None else weights
    flat = {name: value.to(pg_loss).expand_as(pg_loss) for name, value in metrics.items()}
    masks = [part.to(old.dtype) for part, old in zip(mask_kept.split(list(response_lengths)), loss_masks, strict=True)]
    return pg_loss * framework.local(weights, total_lengths, response_lengths), masks, flat


_WHOLE = ContextParallel.whole()


class _Framework:
    """slime's or miles' functions that need their process groups."""

    def __init__(self, package: str) -> None:
        context = importlib.import_module(f"{package}.cp_utils")
        parallel_state = importlib.import_module("megatron.core.parallel_state")
        self.get_log_probs_and_entropy = importlib.import_module(f"{package}.loss").get_log_probs_and_entropy
        # Where the rollout's top-p token sets are replayed, log-probabilities are over them.
        replay = importlib.import_module(f"{package}.loss")
        self.top_p_replay: Callable[..., dict[str, Any]] = getattr(
            replay, "get_rollout_top_p_logprob_kwargs", lambda args, batch: {}
        )
        self._gather, self._slice = context.all_gather_with_cp, context.slice_log_prob_with_cp
        self._split = (
            parallel_state.model_parallel_is_initialized() and parallel_state.get_context_parallel_world_size() > 1
        )

    def whole(self, parts: Samples, total_lengths: Sequence[int], response_lengths: Sequence[int]) -> list[Tensor]:
        """Whole responses from this rank's parts, differentiable."""
        if not self._split:
            return list(parts)
        samples = zip(parts, total_lengths, response_lengths, strict=True)
        return [self._gather(part, total, response) for part, total, response in samples]

    def local(self, values: Tensor, total_lengths: Sequence[int], response_lengths: Sequence[int]) -> Tensor:
        """This rank's parts, flat, of whole responses [T]."""
        if not self._split:
            return values
        samples = values.split(list(response_lengths))
        return torch.cat(
            [self._slice(sample, *n) for sample, *n in zip(samples, total_lengths, response_lengths, strict=True)]
        )


def _framework() -> _Framework:
    for package in ("slime.backends.megatron_utils", "miles.backends.training_utils"):
        try:
            return _Framework(package)
        except ModuleNotFoundError as error:
            # Another module that slime itself lacks is an error to show, not a reason to look for miles.
            if error.name is None or error.name.partition(".")[0] != package.partition(".")[0]:
                raise
    raise InvalidInputError("neither slime nor miles can be imported with its Megatron backend.")


def _config(correction: str | Mapping[str, Any]) -> RolloutCorrectionConfig:
    # slime's mean weight is over all sequences of the batch, empty ones too.
    if isinstance(correction, str):
        return RolloutCorrectionConfig.preset(correction, rollout_is_count_empty=True)
    return RolloutCorrectionConfig.preset("disabled", **({"rollout_is_count_empty": True} | dict(correction)))


def _dropped_sequences(inputs: PolicyLossInputs, delta: float) -> Tensor:
    """Return slime's `opsm_clipfrac`, []: each dropped sequence's tokens over its valid ones, summed.

    The tokens of tools and users count above the line and not below it, as in slime: one dropped sequence may be 1.5.
    """
    assert inputs.old_log_prob is not None
    log_prob, cu_seqlens = inputs.log_prob.detach(), inputs.cu_seqlens
    mask, old = inputs.response_mask != 0, inputs.old_log_prob
    kept = opsm_mask(
        log_prob, old, inputs.advantages, mask, delta=delta, cu_seqlens=cu_seqlens, context_parallel=_WHOLE
    )
    layout = SequenceLayout.of(mask, cu_seqlens, _WHOLE)
    dtype = log_prob.dtype
    punished = layout.sum((inputs.advantages < 0).to(dtype))
    dropped = layout.sum((mask & ~kept).to(dtype)) > 0
    return (punished * dropped / layout.sum(mask.to(dtype)).clamp(min=1.0)).sum()


def _starts(response_lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(response_lengths)])
