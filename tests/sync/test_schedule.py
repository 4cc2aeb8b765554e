"""The calendars: C++ and Python agree, the bound is one, planning is a function of its input."""

from itertools import pairwise

import numpy as np
import pytest
from layout_cases import TrainerSizes, draw, drawn_homes, drawn_slots, nodes_apart, problem_of

from moe_rl.core.native import native_core
from moe_rl.sync import EngineLayout, plan_sync
from moe_rl.sync.bound import _least_even_share
from moe_rl.sync.schedule import fill_calendars_in_python

COLUMNS = ("atom", "source", "ingress", "step")


@pytest.mark.skipif(native_core() is None, reason="the C++ core is not built")
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("relays", [True, False])
def test_the_core_fills_calendars_as_the_reference_does(
    seed: int, relays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = draw(seed).problem
    message_bytes = problem.atom_bytes * (1 + seed % 3)
    native = plan_sync(problem, message_bytes=message_bytes, relays=relays)
    monkeypatch.setattr("moe_rl.sync.plan.fill_calendars", fill_calendars_in_python)
    reference = plan_sync(problem, message_bytes=message_bytes, relays=relays)
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(native.deliveries, name), getattr(reference.deliveries, name))
    assert native.digest == reference.digest


@pytest.mark.parametrize("seed", range(30))
def test_no_port_does_two_things_at_once_and_relays_wait_for_what_they_pass_on(seed: int) -> None:
    problem = draw(seed).problem
    plan = plan_sync(problem, message_bytes=problem.atom_bytes * (1 + seed % 2))
    made, by_nic = plan.deliveries, plan.by_nic
    for ranks in (made.source, made.ingress):
        used = list(zip(ranks[by_nic].tolist(), made.step[by_nic].tolist(), strict=True))
        assert len(set(used)) == len(used)
    came = {(int(a), int(i)): int(s) for a, i, s in zip(made.atom, made.ingress, made.step, strict=True)}
    for atom, source, step in zip(made.atom.tolist(), made.source.tolist(), made.step.tolist(), strict=True):
        if source >= problem.trainer.size:
            assert came[atom, source] // plan.steps_per_round < step // plan.steps_per_round
        else:
            assert source in problem.holders_of_atoms()[atom]


def eight_to(engines: int, layers: int = 6, *, ep: int = 8, tp: int = 1):  # type: ignore[no-untyped-def]
    """Eight trainers of one node, and engines of a node each."""
    rng = np.random.default_rng(3)
    sizes = TrainerSizes(layers=layers, experts=64, ep=8)
    layouts = tuple(EngineLayout(slots=drawn_slots(rng, sizes, ep), ep_size=ep, tp_size=tp) for _ in range(engines))
    homes = drawn_homes(rng, sizes)
    return problem_of(homes, sizes, layouts, nodes_apart(8, 8 * engines, 8))[0]


@pytest.mark.parametrize(("engines", "most"), [(1, 1.0), (2, 1.2), (4, 1.2), (12, 1.35)])
def test_many_engine_nodes_cost_little_more_than_one(engines: int, most: float) -> None:
    plan = plan_sync(eight_to(engines, layers=12), message_bytes=1)
    # Every node takes in each of 12 * 64 experts once, by eight NICs.
    assert plan.least_steps == 12 * 64 // 8
    assert plan.num_steps <= most * plan.least_steps


def test_without_relays_every_engine_node_costs_as_much_as_the_first() -> None:
    plan = plan_sync(eight_to(4), message_bytes=1, relays=False)
    assert plan.num_steps == 4 * plan.least_steps


def test_tensor_parallel_engines_inside_a_node_need_no_more_atoms() -> None:
    problem = eight_to(2, ep=1, tp=8)
    assert problem.parts_per_expert == 8
    assert problem.atoms_per_expert == 1
    assert plan_sync(problem, message_bytes=1).least_steps == 6 * 64 // 8


def test_a_shared_node_moves_nothing_over_its_nics() -> None:
    problem = eight_to(1)
    colocated = type(problem)(
        trainer=problem.trainer, engines=problem.engines, node_of=(0,) * 16, expert_bytes=problem.expert_bytes
    )
    plan = plan_sync(colocated, message_bytes=1)
    assert plan.least_steps == 0
    assert plan.num_steps == 0
    assert not plan.by_nic.any()


@pytest.mark.parametrize(("jobs", "ports", "least"), [
    ({}, [1], 0),
    ({(0,): 6, (0, 1): 2}, [1, 1], 6),
    ({(0,): 6, (0, 1): 8}, [1, 1], 7),
    ({(0, 1): 5, (1, 2): 5, (2, 3): 5}, [1, 1, 1, 1], 4),
    ({(0,): 3, (1,): 9, (0, 1): 4}, [1, 3], 4),
])  # fmt: skip
def test_the_least_even_share(jobs: dict[tuple[int, ...], int], ports: list[int], least: int) -> None:
    assert _least_even_share(jobs, ports) == least


def test_steps_ascend_and_every_message_of_a_pair_has_a_round() -> None:
    plan = plan_sync(draw(4).problem, message_bytes=1)
    assert all(a <= b for a, b in pairwise(plan.deliveries.step.tolist()))
