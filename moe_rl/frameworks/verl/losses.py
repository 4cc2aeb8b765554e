"""verl: every objective as a policy loss, `actor.policy_loss.loss_mode=moe_rl_gspo` and so on.

    for name, loss in policy_losses().items():          # in a module that `VERL_USE_EXTERNAL_MODULES` names
        register_policy_loss(name)(loss)

    helper.compute_rollout_correction_and_rejection_mask = rollout_corrected(helper)

The second line, for `helper` = verl.trainer.ppo.rollout_corr_helper, gives `algorithm.rollout_correction` our names
beside verl's own: `rollout_is: moe_rl_token` or `moe_rl_sequence`, `rollout_rs: moe_rl_<option of ROLLOUT_RS_OPTIONS>`.
moe_rl's plug-in does both.

An objective that verl has too (`VERLS`) reads the settings that verl's own mode reads, and is aggregated as the
installed verl does: under any of verl's settings it is verl's loss, but for `moe_rl_gspo`, which takes its paper's
widths of 3e-4 and 4e-4 where verl's default of 0.2 stands. Others have their own defaults, and read `clip_ratio_low`
and so on where these differ from verl's. What else they have is given by name to `policy_losses`. What is drawn comes
from torch's default generator, as in verl. Source: verl 0.9.1, verl/trainer/ppo/core_algos.py and
verl/workers/utils/losses.py; verl/trainer/ppo/rollout_corr_helper.py.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from moe_rl.core.errors import require
from moe_rl.core.mappings import not_none
from moe_rl.importance import PolicyLossInputs, policy_loss
from moe_rl.importance.aggregate import BatchTotals
from moe_rl.importance.context_parallel import ContextParallel
from moe_rl.importance.objectives import OBJECTIVES, Objective
from moe_rl.importance.rollout_correction import rollout_correction
from moe_rl.importance.router_shift import RouterShiftUse
from moe_rl.importance.tensors import as_floats

# (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights) -> (loss, metrics)
VerlPolicyLoss = Callable[..., tuple[Tensor, dict[str, float]]]

# Of our names in verl's configuration.
PREFIX = "moe_rl_"
_WIDTHS = ("clip_ratio_low", "clip_ratio_high")
# Our objective -> verl's own mode of it, and the settings that this mode reads: with them it is verl's loss.
VERLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ppo": ("vanilla", (*_WIDTHS, "clip_ratio_c")),
    "gspo": ("gspo", _WIDTHS),
    "gmpo": ("geo_mean", _WIDTHS),
    "cispo": ("cispo", _WIDTHS),
    "sapo": ("sapo", ("tau_pos", "tau_neg")),
    "dppo_tv": ("dppo_tv", (*_WIDTHS, "clip_ratio_c")),
    "dppo_kl": ("dppo_kl", (*_WIDTHS, "clip_ratio_c")),
    "clip_cov": ("clip_cov", (*_WIDTHS, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")),
    "kl_cov": ("kl_cov", ("kl_cov_ratio", "ppo_kl_coef")),
    "dro": ("dro", ("beta",)),
}
# verl's defaults, whatever the loss mode. An objective that verl does not have takes its own in their place, and so do
# widths of a sequence's ratio: 0.2 would clip nothing.
_GENERIC = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
_BY_SEQUENCE = "seq-mean-token-mean"
# verl 0.9.1 aggregates these modes by sequence, whatever it is asked for; 0.9.0 and before gspo too.
_ALWAYS_BY_SEQUENCE = ("geo_mean", "sapo")


# [B, S] the router shift of the micro-batch whose loss is computed, in verl's padded layout (MOE_RL_ROUTER_SHIFT).
GAMMA: ContextVar[Tensor] = ContextVar("GAMMA")


def policy_losses(
    *,
    gamma: Callable[[Tensor], Tensor] | None = None,
    router_shift: RouterShiftUse | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, VerlPolicyLoss]:
    """Return verl's name of every objective that verl's call can feed, `moe_rl_` and its own, with its policy loss.

    `gamma`: called with the current log-probabilities [B, S], returns the router shift at the same tokens, such as
    `RouterTap.update_pass` has it by then; `router_shift` says how it enters. `options`: by objective, what stands
    above the actor config. Objectives that need the rollout's log-probabilities are left out, since verl does not hand
    them over: their place is `rollout_correction`.
    """
    arguments_read = {"old_log_prob", "draw"}
    loss_options = options or {}
    for name in loss_options:
        OBJECTIVES[name]
    return {
        f"{PREFIX}{entry.name}": _policy_loss(entry, gamma, router_shift, dict(loss_options.get(entry.name, {})))
        for entry in OBJECTIVES
        if set(entry.needs) <= arguments_read
    }


def rollout_corrected(helper: Any) -> Callable[..., Any]:
    """Return what stands in for `helper.compute_rollout_correction_and_rejection_mask`, in decoupled and bypass mode.

    It is verl's own unless `rollout_is` or an option of `rollout_rs` has our prefix; then all that are set must, and
    `moe_rl.importance.rollout_correction` computes the weights, the mask and the metrics, under verl's names.
    """
    original = helper.compute_rollout_correction_and_rejection_mask

    @functools.wraps(original)
    def corrected(
        old_log_prob: Tensor,
        rollout_log_prob: Tensor,
        response_mask: Tensor,
        rollout_is: str | None = None,
        rollout_is_threshold: float | str | None = 2.0,
        rollout_is_batch_normalize: bool = False,
        rollout_rs: str | None = None,
        rollout_rs_threshold: float | str | None = None,
    ) -> Any:
        tensors = (old_log_prob, rollout_log_prob, response_mask)
        thresholds = {
            "rollout_is_threshold": rollout_is_threshold,
            "rollout_is_batch_normalize": rollout_is_batch_normalize,
            "rollout_rs_threshold": rollout_rs_threshold,
        }
        rejections = [name.strip() for name in (rollout_rs or "").split(",") if name.strip()]
        named = [*rejections, *filter(None, [rollout_is])]
        if not any(name.startswith(PREFIX) for name in named):
            return original(*tensors, rollout_is=rollout_is, rollout_rs=rollout_rs, **thresholds)
        other_names = [name for name in named if not name.startswith(PREFIX)]
        require(
            not other_names,
            f"rollout_correction: names with and without the prefix {PREFIX} cannot be mixed. Add it to "
            f"{', '.join(other_names)}.",
        )
        weights, mask, metrics = rollout_correction(
            *tensors,
            rollout_is=rollout_is and rollout_is.removeprefix(PREFIX),
            rollout_rs=",".join(name.removeprefix(PREFIX) for name in rejections) or None,
            **thresholds,  # type: ignore[arg-type]  # of three kinds
        )
        proto = None
        if weights is not None:
            proto = helper.DataProto.from_dict(tensors={"rollout_is_weights": weights})
        return proto, mask, as_floats(metrics)

    return corrected


def _policy_loss(
    entry: Objective,
    gamma: Callable[[Tensor], Tensor] | None,
    router_shift: RouterShiftUse | None,
    options: dict[str, Any],
) -> VerlPolicyLoss:
    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        info = getattr(config, "global_batch_info", None)
        mode = _aggregation(entry, loss_agg_mode, config)
        output = policy_loss(
            PolicyLossInputs(
                log_prob=log_prob,
                old_log_prob=old_log_prob,
                advantages=advantages,
                response_mask=response_mask,
                rollout_is_weights=rollout_is_weights,
                draw=torch.rand_like(old_log_prob) if "draw" in entry.needs else None,
                router_shift_ratio=None if gamma is None else gamma(log_prob.detach()),
                context_parallel=ContextParallel.whole(),  # verl gathers sequences before the loss
            ),
            objective=objective_of(entry, config, options),
            loss_agg_mode=mode,
            # verl's geo_mean takes the mean over the sequences of the micro-batch.
            totals=None if entry.name == "gmpo" else _totals(mode, response_mask, dict(info or {})),
            router_shift=router_shift,
        )
        return output.loss, as_floats(output.metrics)

    loss.__doc__ = f"{entry.name}: {entry.formula} ({entry.source})."
    return loss


def objective_of(entry: Objective, config: Any, options: Mapping[str, Any]) -> Objective:
    """Return the objective with the settings of verl's actor config; `options` stand above it.

    One that verl has too reads what verl's own mode reads. Others read what they have a place for, where it is not
    verl's default.
    """
    of_loss = getattr(config, "policy_loss", None)
    stated = {name: getattr(config, name, None) for name in (*_WIDTHS, "clip_ratio_c", "tau_pos", "tau_neg")}
    for name in _WIDTHS:
        stated[name] = getattr(config, "clip_ratio", None) if stated[name] is None else stated[name]
    stated |= {name: getattr(of_loss, name, None) for name in VERLS["clip_cov"][1][2:] + VERLS["kl_cov"][1]}
    stated["beta"] = getattr(of_loss, "dro_beta", None)
    if entry.name in VERLS:
        stated = {name: value for name, value in stated.items() if name in VERLS[entry.name][1]}
    if entry.name not in VERLS or (entry.ratio_level == "sequence" and entry.widths == "ratio"):
        stated = {name: value for name, value in stated.items() if _GENERIC.get(name) != value}
    return entry.from_settings(not_none(stated), options)


def checked_settings(config: Any, *, router_shift: bool = False) -> None:
    """Raise where the actor config asks for one of our losses with settings that it refuses: before any rollout."""
    mode = str(getattr(getattr(config, "policy_loss", None), "loss_mode", ""))
    require(
        mode.startswith(PREFIX) or not router_shift,
        f"MOE_RL_ROUTER_SHIFT needs a moe_rl loss, but policy_loss.loss_mode is {mode}. Set a loss mode that "
        f"begins with {PREFIX}, e.g. replace vanilla with {PREFIX}ppo.",
    )
    if mode.startswith(PREFIX):
        require(
            f"{mode}" in policy_losses(),
            f"verl cannot run {mode}, because verl does not pass the rollout's log-probabilities to this loss.",
        )
        objective_of(OBJECTIVES[mode.removeprefix(PREFIX)], config, {})


def _aggregation(entry: Objective, mode: str, config: Any) -> str:
    """Return how verl's own mode aggregates; what verl does not have, in its own way unless asked for another."""
    if entry.name not in VERLS:
        if mode == "token-mean":
            return entry.default_loss_agg_mode
        return mode
    own_mode = VERLS[entry.name][0]
    if type(config).__module__.partition(".")[0] == "verl":
        always = _installed_verl_is_always_by_sequence(own_mode, config)
    else:
        always = own_mode in _ALWAYS_BY_SEQUENCE
    return _BY_SEQUENCE if always else mode


def _installed_verl_is_always_by_sequence(mode: str, config: Any) -> bool:
    """Return whether the installed verl aggregates its loss `mode` by sequence even if it is asked for the token mean.

    Versions differ (gspo: by sequence up to 0.9.0, as asked from 0.9.1 on), so verl's own function is asked once for
    two sequences, of one token with advantage 1 and of three with advantage -1, at equal policies: the token losses
    -1 and 1, 1, 1 have the sum 2, and the means of the sequences, -1 and 1, have the sum 0. No denominator of a global
    batch makes these equal.
    """
    if mode not in _PROBED:
        core_algos: Any = importlib.import_module("verl.trainer.ppo.core_algos")
        mask = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])

        def loss(aggregation: str) -> Tensor:
            result: tuple[Tensor, Any] = core_algos.get_policy_loss_fn(mode)(
                old_log_prob=-torch.ones(2, 3),
                log_prob=-torch.ones(2, 3),
                advantages=torch.tensor([[1.0], [-1.0]]).expand(2, 3),
                response_mask=mask,
                loss_agg_mode=aggregation,
                config=config,
            )
            return result[0]

        _PROBED[mode] = bool(torch.isclose(loss("token-mean"), loss(_BY_SEQUENCE)))
    return _PROBED[mode]


# By verl's loss mode: what `_installed_verl_is_always_by_sequence` has found.
_PROBED: dict[str, bool] = {}


def _totals(mode: str, response_mask: Tensor, batch_facts: dict[str, Any]) -> BatchTotals | None:
    """Return the denominators of verl's global batch; None where verl leaves them to the micro-batch."""
    needed = "global_batch_size"
    if mode == "token-mean":
        needed = "batch_num_tokens"
    dp_size, scale = int(batch_facts.get("dp_size") or 1), batch_facts.get("loss_scale_factor")
    if batch_facts.get(needed) is None and mode != "token-sum":
        require(dp_size == 1, f"{mode} with dp_size {dp_size} needs {needed}, which verl did not pass.")
        if scale is None:
            return None
        return BatchTotals.from_mask(response_mask, loss_scale_factor=scale)
    return BatchTotals(
        batch_num_tokens=float(batch_facts.get("batch_num_tokens") or 0),
        global_batch_size=float(batch_facts.get("global_batch_size") or 0),
        dp_size=dp_size,
        loss_scale_factor=scale,
    )
