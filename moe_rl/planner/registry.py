"""Policies by name. To add one: a module with a `Planner`, and its class in `POLICIES`.

Another package adds one through the entry-point group `moe_rl.policies`.
"""

import inspect
from typing import get_type_hints

from moe_rl.core.errors import InvalidInputError, nearest_name, require, require_kind
from moe_rl.core.registry import Registry
from moe_rl.planner.base import Planner
from moe_rl.planner.forecast import ForecastPlanner
from moe_rl.planner.moe_rl_policy import MoeRlPlanner
from moe_rl.planner.others.echo import EchoPlanner
from moe_rl.planner.others.eplb import EplbOraclePlanner, EplbPlanner
from moe_rl.planner.others.llep import LlepPlanner
from moe_rl.planner.others.lplb import LplbOraclePlanner
from moe_rl.planner.others.moonep import MoonEpPlanner
from moe_rl.planner.others.relibra import RelibraPlanner
from moe_rl.planner.others.static import StaticPlanner
from moe_rl.planner.others.ultraep import UltraEpPlanner
from moe_rl.planner.variants import MoeRlUnpackedPlanner, StaticPackPlanner


def _check(policy: type[Planner]) -> None:
    """Raise unless `policy` is a class of planners whose parameters all have defaults."""
    is_planner = inspect.isclass(policy) and issubclass(policy, Planner) and not inspect.isabstract(policy)
    require(is_planner, f"policy {policy.name!r} must be a subclass of moe_rl.planner.Planner that defines plan().")
    parameters = inspect.signature(policy).parameters
    lacking = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    require(not lacking, f"policy {policy.name!r}: all fields must have a default, but {', '.join(lacking)} have none.")


POLICIES: Registry[type[Planner]] = Registry(
    "policy",
    [
        StaticPlanner,
        StaticPackPlanner,
        EplbPlanner,
        EplbOraclePlanner,
        LplbOraclePlanner,
        LlepPlanner,
        EchoPlanner,
        UltraEpPlanner,
        MoonEpPlanner,
        RelibraPlanner,
        ForecastPlanner,
        MoeRlUnpackedPlanner,
        MoeRlPlanner,
    ],
    group="moe_rl.policies",
    check=_check,
)
"""Classes of planners, which take the policy's parameters as keywords."""


def make_planner(name: str, **parameters: int | float | str | bool) -> Planner:
    """Return the policy called `name` with the given parameters, all others at their defaults.

    Raises `InvalidInputError` for an unknown policy or parameter, naming the nearest known one, and for a value of
    another kind than the parameter's.
    """
    policy = POLICIES[name]
    if not parameters:
        return policy()
    parameters_of_policy = policy_parameters(name)
    for parameter in parameters:
        if not parameters_of_policy:
            raise InvalidInputError(f"policy {name!r} has no parameters, so {parameter!r} cannot be set.")
        if parameter not in parameters_of_policy:
            raise InvalidInputError(
                f"policy {name!r} has no parameter {parameter!r}.{nearest_name(parameter, parameters_of_policy)}"
            )
    kinds = get_type_hints(policy)
    for parameter, value in parameters.items():
        require_kind(f"policy {name!r}: {parameter}", value, kinds[parameter])
    return policy(**parameters)


def policy_parameters(name: str) -> tuple[str, ...]:
    """Return the names of the parameters that `make_planner(name, ...)` takes."""
    return tuple(inspect.signature(POLICIES[name]).parameters)


def default_policies() -> list[str]:
    """Return the policies of a table whose reader named none."""
    return [policy.name for policy in POLICIES if policy.by_default]
