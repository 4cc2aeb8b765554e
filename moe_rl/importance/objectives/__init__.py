"""The registry of policy objectives: one dataclass each, one line here."""

import dataclasses
import functools
from typing import Any

import torch

from moe_rl.core.errors import InvalidInputError, nearest_name
from moe_rl.core.registry import Registry
from moe_rl.importance.objectives.base import Marks, Objective, ObjectiveBatch, TokenLoss
from moe_rl.importance.objectives.clipped import Dapo, Dcpo, DecoupledPpo, Grpo, Opsm, Ppo, Qurl
from moe_rl.importance.objectives.covariance import ClipCov, KlCov
from moe_rl.importance.objectives.gradient import (
    Aspo,
    Cispo,
    DppoKl,
    DppoTv,
    Dro,
    PrimeRl,
    PrimeRlIpo,
    Reinforce,
    Sapo,
    Topr,
)
from moe_rl.importance.objectives.reweighted import Archer, Fipo, RlPlus
from moe_rl.importance.objectives.sequence import Ctpo, Gmpo, Gspo, Luspo, Segment, Vespo

OBJECTIVES: Registry[type[Objective]] = Registry(
    "objective",
    [
        *(
            Ppo,
            Grpo,
            Dapo,
            Gspo,
            Luspo,
            Segment,
            Gmpo,
            Vespo,
            Cispo,
            Sapo,
            DppoTv,
            DppoKl,
            Ctpo,
            Aspo,
            Dcpo,
            DecoupledPpo,
            Opsm,
            Qurl,
            Fipo,
            Archer,
            RlPlus,
        ),
        *(ClipCov, KlCov),
        *(Reinforce, Dro, Topr, PrimeRl, PrimeRlIpo),
    ],
)
"""Objective classes by name; where a user types one, a hyphen reads as an underscore (`dppo-tv`)."""


def _named(name: str) -> type[Objective]:
    return OBJECTIVES[name.lower().replace("-", "_")]


@functools.cache
def _with_defaults(name: str) -> Objective:
    """The one instance: checking options costs as much as a pass over the tokens."""
    return _named(name)()


def make_objective(objective: str | Objective, options: dict[str, Any]) -> Objective:
    """Return the objective of that name with `options`; an instance is returned as it is and takes no options."""
    if isinstance(objective, Objective):
        if options:
            raise InvalidInputError(
                f"options {sorted(options)} belong into the {type(objective).__name__} that was given."
            )
        return objective
    if not isinstance(objective, str):
        raise InvalidInputError(f"objective must be a name or an Objective, got {objective!r}.")
    if not options and not torch.compiler.is_compiling():
        return _with_defaults(objective)
    cls = _named(objective)
    for option in options:
        known = [field.name for field in dataclasses.fields(cls)]
        if option not in known:
            raise InvalidInputError(f"objective {cls.name!r} has no option {option!r}.{nearest_name(option, known)}")
    return cls(**options)


__all__ = ["OBJECTIVES", "Marks", "Objective", "ObjectiveBatch", "TokenLoss", "make_objective"]
