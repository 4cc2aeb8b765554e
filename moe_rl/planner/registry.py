"""Policies by name. To add one: a module with a `Planner`, and one line in `POLICIES`."""

import inspect
from collections.abc import Callable, Mapping
from typing import get_type_hints

from moe_rl.core.errors import InvalidInputError, nearest_name, require_kind
from moe_rl.planner.base import Planner
from moe_rl.planner.eplb import EplbOraclePlanner, EplbPlanner
from moe_rl.planner.lplb import LplbOraclePlanner
from moe_rl.planner.moe_rl_policy import MoeRlPlanner
from moe_rl.planner.relibra import RelibraPlanner
from moe_rl.planner.static import StaticPlanner
from moe_rl.planner.ultraep import UltraEpPlanner

POLICIES: Mapping[str, Callable[..., Planner]] = {
    "static": StaticPlanner,
    "eplb": EplbPlanner,
    "eplb-oracle": EplbOraclePlanner,
    "lplb-oracle": LplbOraclePlanner,
    "ultraep": UltraEpPlanner,
    "relibra": RelibraPlanner,
    "moe-rl": MoeRlPlanner,
}
"""Name used in every output -> factory that takes the policy's parameters as keywords."""


def make_planner(name: str, **parameters: int | float | str | bool) -> Planner:
    """Return the policy called `name` with the given parameters, the others at their defaults.

    Raises `InvalidInputError` for an unknown policy or parameter, naming the nearest known one, and for a value of
    another kind than the parameter's.
    """
    if name not in POLICIES:
        raise InvalidInputError(f"unknown policy {name!r}.{nearest_name(name, POLICIES)}")
    known = policy_parameters(name)
    for parameter in parameters:
        if not known:
            raise InvalidInputError(f"policy {name!r} takes no parameters, got {parameter!r}.")
        if parameter not in known:
            raise InvalidInputError(f"policy {name!r} has no parameter {parameter!r}.{nearest_name(parameter, known)}")
    kinds = get_type_hints(POLICIES[name])
    for parameter, value in parameters.items():
        require_kind(f"policy {name!r}: {parameter}", value, kinds[parameter])
    return POLICIES[name](**parameters)


def policy_parameters(name: str) -> tuple[str, ...]:
    """Return the names of the parameters that `make_planner(name, ...)` takes."""
    return tuple(inspect.signature(POLICIES[name]).parameters)
