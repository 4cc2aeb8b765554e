"""The registry of policy objectives: a row each (function, ratio level, facts); presets are rows of other defaults."""

from dataclasses import replace
from typing import Any

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.registry import Registry
from moe_rl.importance.objectives import formulas
from moe_rl.importance.objectives.base import Objective, ObjectiveBatch, PolicyLossInputs, TokenLoss

_OF_SEQUENCES = "seq-mean-token-mean"
_PPO = Objective(loss=formulas.ppo, frameworks=("verl", "slime", "AReaL", "NeMo-RL", "TRL"))
_GSPO = Objective(
    loss=formulas.gspo,
    frameworks=("verl", "slime", "NeMo-RL", "TRL"),
    ratio_level="sequence",
    router_shift_order="after-clip",  # before it, numerics alone are wider than the clip
    default_loss_agg_mode=_OF_SEQUENCES,
)
_CISPO = Objective(loss=formulas.cispo, frameworks=("verl", "NeMo-RL"))
_PRIME = {"widths": "probability", "default_loss_agg_mode": "token-sum", "frameworks": ("prime-rl",)}

# Objectives by name; where a user types one, a hyphen reads as an underscore (`dppo-tv`).
OBJECTIVES: Registry[Objective] = Registry(
    "objective",
    [
        _PPO,
        replace(
            _PPO,
            name="grpo",
            formula="`ppo` on group-normalized advantages",
            source="arXiv 2402.03300 (no dual clip; set `clip_ratio_c=None` to match)",
            default_loss_agg_mode=_OF_SEQUENCES,
        ),
        replace(
            _PPO,
            name="dapo",
            formula="`ppo` with hi > lo",
            source="arXiv 2503.14476 (no dual clip; set `clip_ratio_c=None` to match)",
            options={"clip_ratio_high": 0.28},
        ),
        _GSPO,
        replace(
            _GSPO,
            name="luspo",
            formula="`gspo` with each sequence weighted by its length",
            source='TRL `loss_type="luspo"`',
            frameworks=("TRL",),
            default_loss_agg_mode="seq-mean-token-sum",
        ),
        Objective(
            loss=formulas.gmpo,
            frameworks=("verl",),
            ratio_level="sequence",
            widths="log ratio",
            default_loss_agg_mode=_OF_SEQUENCES,
            geometric_weights=True,
        ),
        Objective(
            loss=formulas.vespo,
            frameworks=("TRL",),
            ratio_level="sequence",
            widths="none",
            router_shift_order="after-clip",
        ),
        _CISPO,
        replace(
            _CISPO,
            name="scale_rl",
            formula="`cispo` with weights from 0 to 5 and a float32 output layer",
            source="arXiv 2510.13786; SkyRL `CISPOConfig`, TRL `cast_lm_head_to_fp32`",
            frameworks=("SkyRL", "TRL"),
            options={"clip_ratio_low": 1.0, "clip_ratio_high": 4.0},
        ),
        Objective(loss=formulas.sapo, frameworks=("verl",), widths="none", default_loss_agg_mode=_OF_SEQUENCES),
        Objective(loss=formulas.dppo_tv, frameworks=("verl", "prime-rl"), widths="probability"),
        Objective(loss=formulas.dppo_kl, frameworks=("verl",), widths="divergence"),
        Objective(loss=formulas.ctpo, ratio_level="prefix", widths="log ratio"),
        Objective(loss=formulas.aspo),
        Objective(loss=formulas.dcpo),
        Objective(loss=formulas.decoupled_ppo, frameworks=("AReaL",), needs=("old_log_prob", "rollout_log_prob")),
        Objective(loss=formulas.opsm, frameworks=("slime",)),
        Objective(loss=formulas.clip_cov, frameworks=("verl",), needs=("old_log_prob", "draw"), additive=False),
        Objective(loss=formulas.kl_cov, frameworks=("verl",), widths="none", additive=False),
        Objective(loss=formulas.reinforce, frameworks=("verl",), ratio_level="none", widths="none", needs=()),
        Objective(loss=formulas.dro, frameworks=("verl", "ROLL"), ratio_level="none", widths="none"),
        Objective(loss=formulas.topr, frameworks=("ROLL",), widths="none", router_shift_order="after-clip"),
        Objective(loss=formulas.prime_rl, **_PRIME),  # type: ignore[arg-type]  # facts of three kinds
        Objective(loss=formulas.prime_rl_ipo, **_PRIME),  # type: ignore[arg-type]
    ],
)


def make_objective(objective: str | Objective, options: dict[str, Any]) -> Objective:
    """Return the objective of that name with `options`; an instance is returned as it is and takes no options."""
    if isinstance(objective, Objective):
        if options:
            raise InvalidInputError(
                f"options {sorted(options)} can be passed only if objective is a name: set them in the Objective "
                "itself."
            )
        return objective
    if not isinstance(objective, str):
        raise InvalidInputError(f"objective must be a name or an Objective, got {objective!r}.")
    return OBJECTIVES[objective.lower().replace("-", "_")](**options)


__all__ = ["OBJECTIVES", "Objective", "ObjectiveBatch", "PolicyLossInputs", "TokenLoss", "make_objective"]
