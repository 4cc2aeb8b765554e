"""Policies are found by name, and a wrong name or parameter gets the nearest right one."""

from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from strategies import HARDWARE, load_of, problem_of, random_pairs

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner import POLICIES, Planner, make_planner, policy_parameters
from moe_rl.planner.base import Parameters
from moe_rl.planner.static import StaticPlanner


@pytest.mark.parametrize("name", POLICIES.names)
def test_a_policy_carries_its_registered_name(name: str) -> None:
    assert make_planner(name).name == name


def test_an_unknown_policy_gets_the_nearest_name() -> None:
    with pytest.raises(InvalidInputError, match=r"unknown policy 'statik'\. Did you mean 'static'"):
        make_planner("statik")


@pytest.mark.parametrize("name", POLICIES.names)
def test_an_unknown_parameter_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"policy '{name}' .*no_such_parameter"):
        make_planner(name, no_such_parameter=1)


@pytest.mark.parametrize("name", POLICIES.names)
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


@pytest.mark.parametrize("policy", POLICIES, ids=POLICIES.names)
def test_a_policy_says_whether_and_how_experts_stay(policy: type[Planner], rng: np.random.Generator) -> None:
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)
    load = load_of(random_pairs(rng, (1, 3, 2, 4, 8), most=1000), 2)
    problem = problem_of(load, topology, history=load)
    start = problem.starting_placement().home_rank
    if policy.in_place is not None:
        assert np.array_equal(policy(**policy.in_place).plan(problem).placement.home_rank, start)
    moved = not np.array_equal(policy().plan(problem).placement.home_rank, start)
    assert not moved or policy.moves_experts()


class NeedsTwo(StaticPlanner):
    """A planner whose parameter has no default."""

    name: ClassVar[str] = "needs-two"

    def __init__(self, two: int) -> None:
        self.two = two


class Abstract(Planner):
    """A planner that cannot plan."""

    name: ClassVar[str] = "abstract"


class Misnamed(StaticPlanner):
    """A planner that says it stays in place by a parameter that it does not take."""

    name: ClassVar[str] = "misnamed"
    in_place: ClassVar[Parameters | None] = {"iterations": 0}


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (NeedsTwo, "two must have a default"),
        (Abstract, "not a subclass of moe_rl.planner.Planner"),
        (Misnamed, "in_place names iterations"),
        (SimpleNamespace(name="object"), "not a subclass of moe_rl.planner.Planner"),
    ],
)
def test_what_is_no_policy_is_not_registered(policy: Any, wanted: str) -> None:
    with pytest.raises(InvalidInputError, match=wanted):
        POLICIES.register(policy)
    assert policy.name not in POLICIES
