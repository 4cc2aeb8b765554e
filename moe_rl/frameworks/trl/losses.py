"""TRL: `GRPOTrainer` with every objective of this package.

    trainer = policy_loss_trainer("gspo", clip_ratio_low=3e-4)(model, reward_funcs=..., args=..., train_dataset=...)

Generation, rewards, advantages, the reference KL (`beta`) and vLLM's importance weights stay TRL's, as do the divisors
of its `loss_type`. Source: TRL 1.16.0, trl/trainer/grpo_trainer.py, `_compute_loss`.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moe_rl.core.errors import require
from moe_rl.frameworks.run_settings import settings_from_environment
from moe_rl.importance import PolicyLossInputs, PolicyTokenLoss, policy_token_loss
from moe_rl.importance.context_parallel import ContextParallel
from moe_rl.importance.diagnostics import kl_estimate
from moe_rl.importance.objectives import Objective, make_objective
from moe_rl.importance.router_shift import RouterShiftUse
from moe_rl.importance.router_store import RouterStore
from moe_rl.importance.router_tap import RouterTap
from moe_rl.importance.sequences import SequenceLayout
from moe_rl.importance.tensors import as_floats, bounded_exp, working_dtype

# What the old pass stores; torch.int32 for a gamma that is exact to 1e-6, at twice the memory.
WORD = torch.int16
# In TRL's batches: [B, prompt + completion] where the old policy's routers are kept of each token, -1 on padding.
KEYS = "router_shift_keys"


def policy_loss_trainer(
    objective: str | Objective,
    *,
    gamma: Callable[[Tensor], Tensor] | None = None,
    router_shift: RouterShiftUse | None = None,
    **options: Any,
) -> Any:
    """Return a subclass of `trl.GRPOTrainer` whose policy term is `objective` with its `options`.

    With MOE_RL_ROUTER_SHIFT=0.8 in the environment the routers are read in TRL's own pass of old log-probabilities and
    in every update, and gamma, at least 0.8, weighs the loss; a batch of which TRL makes no such pass is trained on
    once, by the weights that it would be compared with. Or `gamma`: called with the current log-probabilities [B, S] of
    the completion, returns the router shift there. TRL's `epsilon`, `epsilon_high` and `delta` act where the
    objective has them. What else belongs to TRL's own policy term (`importance_sampling_level`,
    `off_policy_mask_threshold`, `top_entropy_quantile`) is the objective's to say: where it is set, the trainer is not
    made, as where the entropy bonus is on.
    """
    base: Any = importlib.import_module("trl").GRPOTrainer
    rule = make_objective(objective, options)
    settings = settings_from_environment()
    floor = 0.0 if settings is None else settings.router_shift

    class PolicyLossTrainer(base):  # type: ignore[misc]  # TRL has no types here
        """`GRPOTrainer` with another policy term."""

        _tap: RouterTap | None = None
        _read: tuple[RouterStore, Tensor] | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            objective_of(self, rule, options)
            if floor:
                self._tap = RouterTap(self.accelerator.unwrap_model(self.model), word=WORD)

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            training = self.model.training  # an evaluation may come between two updates of one batch
            self._read = None if training else self._read
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            if training and self._read is not None:
                return output | {KEYS: self._read[1]}
            return output

        def _get_per_token_logps_and_entropies(
            self, model: Any, input_ids: Tensor, attention_mask: Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            call = functools.partial(
                super()._get_per_token_logps_and_entropies, model, input_ids, attention_mask, *args, **kwargs
            )
            # The first pass without gradient after generation is the old policy's, a later one the reference's.
            if self._tap is None or self._read is not None or torch.is_grad_enabled() or not self.model.training:
                return call()
            real = attention_mask.bool()
            keys = torch.where(real, real.flatten().cumsum(0).view_as(real) - 1, -1)
            batches = keys.split(kwargs.get("batch_size") or len(keys))
            with self._tap.old_pass(int(real.sum())) as store, self._tap.told(batches):
                self._read = store, keys
                return call()

        def _compute_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
            if not floor or KEYS not in inputs:
                return _loss(self, model, inputs, objective_of(self, rule, options), gamma, router_shift)
            assert self._tap is not None
            assert self._read is not None
            keys, metrics = inputs[KEYS], self._metrics["train"]
            predicting = keys[:, -1 - inputs["completion_ids"].shape[1] : -1]
            with self._tap.update_pass(self._read[0]) as update, self._tap.told([keys]):

                def read(_: Tensor) -> Tensor:
                    shift = update.finish(predicting, floor=floor)
                    for name, value in as_floats(shift.metrics).items():
                        metrics[name].append(value)
                    return shift.ratio

                return _loss(self, model, inputs, objective_of(self, rule, options), read, router_shift)

    return PolicyLossTrainer


def objective_of(trainer: Any, rule: Objective, options: Mapping[str, Any]) -> Objective:
    """Return the objective with the trainer's widths, below `options`; raise where a setting would not act."""
    for name, off, instead in (
        ("off_policy_mask_threshold", None, " The objective `opsm` has a similar mask."),
        ("top_entropy_quantile", 1.0, ""),
    ):
        require(
            getattr(trainer, name, off) == off,
            f"{name} has no effect, because moe_rl replaces TRL's own policy loss.{instead}",
        )
    require(not getattr(trainer, "_entropy_bonus_enabled", False), "this trainer does not support the entropy bonus.")
    level = trainer.importance_sampling_level
    require(
        level == "token" or rule.ratio_level == level,
        f"importance_sampling_level {level!r} has no effect on the objective {rule.name!r}: use the objective `gspo`.",
    )
    low, high, dual = trainer.epsilon_low, trainer.epsilon_high, trainer.args.delta
    # TRL's default leaves both widths equal, and then neither was chosen for cispo.
    if rule.name == "cispo" and high != low:
        high -= 1.0  # TRL's is the largest weight itself
    return rule.with_widths(low, high, dual, options, exact=("ppo", "grpo"), flag="epsilon, epsilon_high or delta")


def _loss(
    trainer: Any,
    model: Any,
    inputs: Mapping[str, Any],
    rule: Objective,
    gamma: Callable[[Tensor], Tensor] | None,
    router_shift: RouterShiftUse | None,
) -> Tensor:
    completion = inputs["completion_ids"]
    if "tool_mask" not in inputs:
        mask = inputs["completion_mask"]
    else:
        mask = inputs["completion_mask"] * inputs["tool_mask"]
    log_prob, entropy, auxiliary = trainer._get_per_token_logps_and_entropies(
        model,
        torch.cat([inputs["prompt_ids"], completion], dim=1),
        torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        completion.shape[1],
        compute_entropy=True,
        compute_aux_loss=trainer.aux_loss_enabled,
    )
    old = inputs.get("old_per_token_logps")
    old = log_prob.detach() if old is None else old
    advantages = inputs["advantages"]
    if advantages.ndim == 1:
        advantages = advantages.unsqueeze(1)
    weighted = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    require(
        not (weighted and rule.name == "vespo"),
        "with vespo, TRL puts vLLM's importance weights inside the objective: turn "
        "vllm_importance_sampling_correction off.",
    )
    # TRL weighs tokens or whole sequences: [B, S] or [B, 1].
    weights = inputs["importance_sampling_ratio"] if weighted else None
    tokens = policy_token_loss(
        PolicyLossInputs(
            log_prob=log_prob,
            old_log_prob=old,
            advantages=advantages.expand_as(log_prob),
            response_mask=mask,
            rollout_log_prob=inputs.get("sampling_per_token_logps"),
            rollout_is_weights=None if weights is None else weights.expand_as(log_prob),
            router_shift_ratio=None if gamma is None else gamma(log_prob.detach()),
            context_parallel=ContextParallel.whole(),
        ),
        rule,
        router_shift=router_shift,
    )
    loss, metrics = tokens.loss, dict(tokens.metrics)
    layout = SequenceLayout.of(tokens.mask, None, ContextParallel.whole())
    if trainer.beta != 0.0:
        current = torch.where(tokens.mask, log_prob.to(working_dtype(log_prob)), 0.0)
        ratio = None
        if trainer.args.use_bias_correction_kl:
            ratio = bounded_exp(log_prob - old)
        reference = torch.where(tokens.mask, inputs["ref_per_token_logps"].to(current), 0.0)
        kl = kl_estimate(current, reference, "k3", importance_ratio=ratio) * tokens.mask
        loss = loss + trainer.beta * kl
        metrics["kl"] = layout.token_mean(kl, tokens.mask)
    metrics["entropy"] = layout.token_mean(entropy, tokens.mask)
    mode = "train" if trainer.model.training else "eval"
    for name, value in (as_floats(metrics) | _clip_ratios(trainer, rule, tokens, advantages)).items():
        trainer._metrics[mode][name].append(value)
    # TRL adds the router's auxiliary loss undivided, but for the accumulation steps.
    divided = _divided(trainer, loss, tokens.mask, inputs, mode)
    if not trainer.aux_loss_enabled:
        return divided
    trainer._metrics[mode]["aux_loss"].append(trainer.accelerator.gather_for_metrics(auxiliary).mean().item())
    if mode == "train":
        steps = trainer.current_gradient_accumulation_steps
    else:
        steps = 1.0
    balance: Tensor = trainer.router_aux_loss_coef * auxiliary / steps
    return divided + balance


def _clip_ratios(trainer: Any, rule: Objective, tokens: PolicyTokenLoss, advantages: Tensor) -> dict[str, float]:
    """Return TRL's names of what the clip took, over all ranks' tokens, or sequences where the ratio is theirs."""
    if rule.widths == "none":
        return {}
    clipped, mask = tokens.clipped, tokens.mask
    marks = torch.stack([clipped & (advantages < 0), clipped & (advantages > 0), clipped]).to(tokens.loss.dtype)
    per_sequence = marks.sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)
    values, count = (per_sequence, mask.shape[0]) if rule.ratio_level == "sequence" else (marks, mask.sum())
    sums = torch.cat(
        [values.flatten(1).sum(dim=1), torch.as_tensor(count, dtype=marks.dtype, device=mask.device)[None]]
    )
    totals = trainer.accelerator.reduce(sums, reduction="sum")
    low, high, region = (totals[:3] / totals[3].clamp(min=1.0)).tolist()
    if rule.name == "cispo":
        return {"cispo_clip_ratio": high}
    losses, gains = trainer.accelerator.gather(per_sequence[:2].T.contiguous()).unbind(dim=1)
    ratios = {"low_mean": low, "high_mean": high, "region_mean": region, "low_min": float(losses.min())}
    return {f"clip_ratio/{name}": value for name, value in (ratios | {"high_max": float(gains.max())}).items()}


def _divided(trainer: Any, loss: Tensor, mask: Tensor, inputs: Mapping[str, Any], mode: str) -> Tensor:
    """Return the loss over the divisor of TRL's `loss_type`."""
    steps: float = 1.0
    if mode == "train":
        steps = trainer.current_gradient_accumulation_steps
    kind = trainer.loss_type
    if kind in ("cispo", "dapo", "vespo"):
        divisor: Tensor = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
        return loss.sum() / (divisor if mode == "eval" else divisor * (steps / trainer.args.steps_per_generation))
    per_sequence = loss.sum(dim=1)
    if kind in ("grpo", "sapo"):
        return (per_sequence / mask.sum(dim=1).clamp(min=1)).mean() / steps
    if kind == "luspo":
        return per_sequence.mean() / steps
    if kind == "bnpo":
        return loss.sum() / mask.sum().clamp(min=1) / steps
    require(kind == "dr_grpo", f"TRL's loss_type {kind!r} is not supported.")
    return loss.sum() / float(loss.shape[0] * trainer.max_completion_length) / steps
