"""Policies are found by name, and a wrong name or parameter gets the nearest right one."""

import pytest

from moe_rl.core.errors import InvalidInputError
from moe_rl.planner.registry import POLICIES, make_planner, policy_parameters


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_carries_its_registered_name(name: str) -> None:
    assert make_planner(name).name == name


def test_an_unknown_policy_gets_the_nearest_name() -> None:
    with pytest.raises(InvalidInputError, match=r"unknown policy 'statik'\. Did you mean 'static'"):
        make_planner("statik")


@pytest.mark.parametrize("name", POLICIES)
def test_an_unknown_parameter_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"policy '{name}' .*no_such_parameter"):
        make_planner(name, no_such_parameter=1)


@pytest.mark.parametrize("name", POLICIES)
def test_every_parameter_is_a_keyword_with_a_default(name: str) -> None:
    assert len(set(policy_parameters(name))) == len(policy_parameters(name))
    make_planner(name)


@pytest.mark.parametrize(
    ("name", "parameters", "wanted"),
    [
        ("relibra", {"iterations": "many"}, "iterations must be a whole number, got 'many'"),
        ("relibra", {"iterations": 1.5}, "iterations must be a whole number"),
        ("relibra", {"iterations": True}, "iterations must be a whole number"),
        ("ultraep", {"tolerance": float("nan")}, "tolerance must be a number"),
        ("eplb", {"hierarchical": 7}, "hierarchical must be true or false"),
        ("moe-rl", {"backend": "gpu"}, "backend must be one of auto, native, numpy"),
        ("moe-rl", {"prompt_groups": 3}, "prompt_groups must be a word"),
    ],
)
def test_a_parameter_of_another_kind_is_refused(name: str, parameters: dict[str, object], wanted: str) -> None:
    with pytest.raises(InvalidInputError, match=f"policy '{name}': {wanted}"):
        make_planner(name, **parameters)  # type: ignore[arg-type]


def test_a_whole_number_is_a_number() -> None:
    make_planner("ultraep", tolerance=0)
