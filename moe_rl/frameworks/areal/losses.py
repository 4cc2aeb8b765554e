"""AReaL: every objective in the place of `grpo_loss_fn`.

    install(areal.trainer.ppo.actor, objective="gspo")

where the workers import it. Settings that would not act are refused where AReaL makes its actor, before any rollout.
`input_data` holds `logprobs` (the behavior policy), `prox_logp` (the proximal policy; the behavior policy where it is
absent), `advantages`, `loss_mask`, for packed tensors `cu_seqlens`, and, where the router shift is to enter,
`router_shift_ratio`. Source: AReaL 1.0.4, areal/trainer/ppo/actor.py and areal/utils/functional/functional.py.
"""

import functools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor

from moe_rl.core.errors import require
from moe_rl.importance import PolicyLossInputs, policy_token_loss
from moe_rl.importance.context_parallel import ContextParallel
from moe_rl.importance.objectives import OBJECTIVES, Objective
from moe_rl.importance.router_shift import RouterShiftUse
from moe_rl.importance.tensors import as_floats

_WIDTHS = ("eps_clip", "eps_clip_higher", "c_clip")
# What AReaL binds where nothing is set: PPO around the proximal policy, without weights of rejection sampling.
_DEFAULTS = {
    "importance_sampling_level": "token",
    "m2_threshold": None,
    "prox_logp_method": "recompute",
    "rejection_sampling": None,
    "sapo_tau_pos": 1.0,
    "sapo_tau_neg": 1.05,
    "use_decoupled_loss": True,
    "use_sapo_loss": False,
}


def install(actor: ModuleType, *, objective: str = "ppo", **defaults: Any) -> None:
    """Put `grpo_loss_fn` with these keywords in the place of AReaL's; `actor` is its areal.trainer.ppo.actor.

    `InvalidInputError` for an objective that is not known at once, for settings that would not act where a `PPOActor`
    is made.
    """
    OBJECTIVES[objective]
    original_init = actor.PPOActor.__init__

    @functools.wraps(original_init)
    def checked(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        # Fields that this version of AReaL does not have cannot have been set.
        stated = {name: getattr(config, name) for name in (*_WIDTHS, *_DEFAULTS) if hasattr(config, name)}
        objective_of(objective, defaults.get("options"), **stated)
        original_init(self, config, *args, **kwargs)

    actor.PPOActor.__init__ = checked
    actor.grpo_loss_fn = functools.partial(grpo_loss_fn, objective=objective, **defaults)  # type: ignore[attr-defined]


def objective_of(
    objective: str,
    options: Mapping[str, Any] | None,
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    **settings: Any,
) -> Objective:
    """Return the objective with AReaL's widths, below `options`; raise where another setting would not act."""
    for name, value in settings.items():
        require(
            value is None or value is False or _DEFAULTS.get(name) == value,
            f"{name}={value!r} has no effect on this loss. Instead, use objective gspo or sapo, objective "
            "decoupled_ppo with its behavior_filter, or m2po_mask.",
        )
    high = eps_clip if eps_clip_higher is None else eps_clip_higher
    exact = ("ppo", "grpo", "decoupled_ppo")
    return OBJECTIVES[objective].with_widths(eps_clip, high, c_clip, options or {}, exact=exact, flag="eps_clip*")


def grpo_loss_fn(
    logprobs: Tensor,
    entropy: Tensor,
    input_data: Mapping[str, Any],
    eps_clip: float = 0.2,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    *,
    objective: str = "ppo",
    options: Mapping[str, Any] | None = None,
    current_version: int | None = None,
    router_shift: RouterShiftUse | None = None,
    log: Callable[[dict[str, float]], None] | None = None,
    vocab_min_logits: Tensor | None = None,
    vocab_max_logits: Tensor | None = None,
    **settings: Any,
) -> Tensor:
    """Return the loss over the tokens of this micro-batch, [], averaged as AReaL does (over `loss_mask`).

    `eps_clip`, `eps_clip_higher` (None: `eps_clip`) and `c_clip` are the objective's clip widths: set, they act or are
    refused; `options` are its others and stand above them. `log` gets the metrics as floats; what AReaL hands over for
    its own log alone (`vocab_*_logits`) is not read. What it binds for its own loss (`rejection_sampling`,
    `importance_sampling_level`, ...) has its counterpart in the objective: where it is set to anything but AReaL's
    default, it is refused.
    """
    rule = objective_of(objective, options, eps_clip, eps_clip_higher, c_clip, **settings)
    require("teacher_logp" not in input_data, "this loss does not support distillation from a teacher.")
    behavior, proximal = input_data["logprobs"], input_data.get("prox_logp")
    mask: Tensor = input_data["loss_mask"].bool()
    tokens = policy_token_loss(
        PolicyLossInputs(
            log_prob=logprobs,
            old_log_prob=behavior if proximal is None else proximal,
            rollout_log_prob=behavior,
            advantages=input_data["advantages"],
            response_mask=mask,
            router_shift_ratio=input_data.get("router_shift_ratio"),
            policy_version=input_data.get("versions"),
            current_version=current_version,
            cu_seqlens=input_data.get("cu_seqlens") if logprobs.ndim == 1 else None,
            context_parallel=ContextParallel.whole(),  # AReaL gathers before the loss
        ),
        rule,
        router_shift=router_shift,
    )
    if log is not None:
        log(as_floats(tokens.metrics))
    return tokens.loss.sum() / mask.sum().clamp(min=1)
