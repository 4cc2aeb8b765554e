"""Policies are found by name, and a wrong name or parameter gets the nearest right one."""

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from moe_rl.core.errors import InvalidInputError
from moe_rl.planner import POLICIES, Planner, make_planner
from moe_rl.planner.others.static import StaticPlanner


@pytest.mark.parametrize(
    ("name", "parameters", "wanted"),
    [
        ("relibra", {"iterations": "many"}, "iterations must be a whole number, got 'many'"),
        ("relibra", {"iterations": 1.5}, "iterations must be a whole number"),
        ("relibra", {"iterations": True}, "iterations must be a whole number"),
        ("ultraep", {"tolerance": float("nan")}, "tolerance must be a number"),
        ("eplb", {"hierarchical": 7}, "hierarchical must be true or false"),
    ],
)
def test_a_parameter_of_another_kind_is_refused(name: str, parameters: dict[str, object], wanted: str) -> None:
    with pytest.raises(InvalidInputError, match=f"policy '{name}': {wanted}"):
        make_planner(name, **parameters)  # type: ignore[arg-type]


def test_a_whole_number_is_a_number() -> None:
    make_planner("ultraep", tolerance=0)


class NeedsTwo(StaticPlanner):
    """A planner whose parameter has no default."""

    name: ClassVar[str] = "needs-two"

    def __init__(self, two: int) -> None:
        self.two = two


class Abstract(Planner):
    """A planner that cannot plan."""

    name: ClassVar[str] = "abstract"


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (NeedsTwo, "all fields must have a default, but two have none"),
        (Abstract, "must be a subclass of moe_rl.planner.Planner"),
        (SimpleNamespace(name="object"), "must be a subclass of moe_rl.planner.Planner"),
    ],
)
def test_what_is_no_policy_is_not_registered(policy: Any, wanted: str) -> None:
    with pytest.raises(InvalidInputError, match=wanted):
        POLICIES.register(policy)
    assert policy.name not in POLICIES
