"""Layouts that other syncs refuse, one test each, with homes that a balancer has moved: exact, and near the bound."""

import numpy as np
import pytest
from layout_cases import (
    Drawn,
    TrainerSizes,
    drawn_homes,
    drawn_slots,
    engine_ranks,
    nodes_apart,
    problem_of,
    sync,
    weights_of,
)

from moe_rl.core.errors import InvalidInputError
from moe_rl.sync import EngineLayout, SyncProblem, TrainerLayout, even_stages, plan_sync


def exact(sizes: TrainerSizes, engines: tuple[EngineLayout, ...], *, homes: np.ndarray | None = None) -> Drawn:
    """Sync once and return the layouts: every slot right to the bit, the schedule at most 1.2 times the bound."""
    homes = drawn_homes(np.random.default_rng(2), sizes) if homes is None else homes
    node_of = nodes_apart(sizes.ranks, sum(engine.size for engine in engines), 4)
    problem, shape = problem_of(homes, sizes, engines, node_of)
    drawn = Drawn(sizes=sizes, homes=homes, problem=problem, shape=shape)
    plan = plan_sync(problem, message_bytes=1)
    ran = sync(plan, drawn, engine_ranks(problem, shape))
    assert sum(engine.wrong_slots(weights_of(shape, 7)) for engine in ran.engines.values()) == 0
    assert plan.num_steps <= 1.2 * plan.least_steps
    return drawn


def engine_of(sizes: TrainerSizes, *, ep: int, tp: int = 1, redundant: int = 0, whole: bool = False, seed: int = 1):  # type: ignore[no-untyped-def]
    slots = drawn_slots(np.random.default_rng(seed), sizes, ep, redundant)
    return EngineLayout(slots=slots, ep_size=ep, tp_size=tp, whole_tensors=whole)


def test_expert_tensor_parallel_2() -> None:
    sizes = TrainerSizes(experts=16, ep=2, etp=2)
    drawn = exact(sizes, (engine_of(sizes, ep=4),))
    # Different trainers have the halves of an expert.
    assert drawn.problem.atoms_per_expert == 2


def test_virtual_pipeline_2() -> None:
    sizes = TrainerSizes(layers=8, experts=16, ep=2, pp=2, vpp=2)
    drawn = exact(sizes, (engine_of(sizes, ep=2, tp=2),))
    assert drawn.problem.trainer.stage_of_layer == even_stages(8, pp_size=2, vpp_size=2) == (0, 0, 1, 1, 0, 0, 1, 1)


def test_an_engine_whose_ep_is_not_its_tp() -> None:
    sizes = TrainerSizes(experts=16, ep=4)
    exact(sizes, (engine_of(sizes, ep=2, tp=4),))
    exact(sizes, (engine_of(sizes, ep=4, tp=2, whole=True),))


def test_redundant_slots() -> None:
    sizes = TrainerSizes(experts=16, ep=4)
    exact(sizes, (engine_of(sizes, ep=4, redundant=2),))


def test_two_replicas_with_different_maps() -> None:
    sizes = TrainerSizes(experts=16, ep=4)
    engines = tuple(engine_of(sizes, ep=4, redundant=1, seed=seed) for seed in (1, 2))
    assert not np.array_equal(engines[0].slots, engines[1].slots)
    exact(sizes, engines)


def test_moved_homes() -> None:
    """As many atoms leave every trainer as before, wherever experts have gone."""
    sizes = TrainerSizes(experts=16, ep=4)
    contiguous = np.tile(np.arange(16) // 4, (4, 1)).astype(np.int32)
    moved = drawn_homes(np.random.default_rng(8), sizes)
    engines = (engine_of(sizes, ep=4),)
    counts = []
    for homes in (contiguous, moved):
        plan = plan_sync(exact(sizes, engines, homes=homes).problem, message_bytes=1)
        counts.append(plan.atoms_out[:4].tolist())
    assert counts[0] == counts[1] == [16] * 4


def test_a_map_changed_by_the_sync_costs_nothing() -> None:
    """The same engine rank gets other experts the next time: as many atoms, as many steps."""
    sizes = TrainerSizes(experts=16, ep=4)
    plans = [
        plan_sync(exact(sizes, (engine_of(sizes, ep=4, redundant=1, seed=seed),)).problem, message_bytes=1)
        for seed in (3, 4)
    ]
    assert plans[0].atoms_in.sum() == plans[1].atoms_in.sum()
    assert plans[0].digest != plans[1].digest


def test_engines_and_trainers_on_the_same_nodes() -> None:
    sizes = TrainerSizes(experts=16, ep=4)
    homes = drawn_homes(np.random.default_rng(2), sizes)
    engines = (engine_of(sizes, ep=4),)
    problem, shape = problem_of(homes, sizes, engines, (0, 0, 1, 1, 0, 0, 1, 1))
    plan = plan_sync(problem, message_bytes=1)
    drawn = Drawn(sizes=sizes, homes=homes, problem=problem, shape=shape)
    ran = sync(plan, drawn, engine_ranks(problem, shape))
    assert sum(engine.wrong_slots(weights_of(shape, 7)) for engine in ran.engines.values()) == 0
    # What a node's trainers hold does not enter it by NIC.
    assert plan.atoms_in.sum() < problem.num_atoms


@pytest.mark.parametrize("layers", [0, 1])
def test_edges_of_size(layers: int) -> None:
    slots = np.array([[1, 0]] * layers, np.int32).reshape(layers, 2)
    trainer = TrainerLayout.in_megatron_order(np.zeros((layers, 2), np.int32), ep_size=1)
    engines = (EngineLayout(slots=slots, ep_size=2),)
    problem = SyncProblem(trainer=trainer, engines=engines, node_of=(0, 1, 1), expert_bytes=6)
    plan = plan_sync(problem)
    assert plan.least_steps == 2 * layers  # both experts leave by the only trainer's NIC
    assert len(plan.deliveries.atom) == 2 * layers


def test_all_experts_on_one_trainer() -> None:
    homes = np.zeros((2, 8), np.int32)
    trainer = TrainerLayout.in_megatron_order(homes, ep_size=4)
    slots = np.tile(np.arange(8, dtype=np.int32), (2, 1))
    engines = (EngineLayout(slots=slots, ep_size=4),)
    problem = SyncProblem(trainer=trainer, engines=engines, node_of=(0, 1, 2, 3, 4, 4, 4, 4), expert_bytes=6)
    plan = plan_sync(problem)
    assert plan.least_steps == plan.num_steps == 16


@pytest.mark.parametrize(("change", "sentence"), [
    ({"node_of": (0, 1)}, "node_of must name the node of each of 3 ranks, got 2 entries"),
    ({"engines": ()}, "at least one engine"),
    ({"expert_bytes": 0}, "cannot be cut into 1 equal parts"),
    ({"engines": (EngineLayout(slots=np.array([[0, 0]], np.int32), ep_size=2),)}, "no slot holds expert 1"),
    ({"engines": (EngineLayout(slots=np.array([[0, 2]], np.int32), ep_size=2),)}, "not in the range 0 to 1"),
    ({"engines": (EngineLayout(slots=np.array([[0, 1]] * 2, np.int32), ep_size=2),)}, "engine 0 has 2 MoE layers"),
])  # fmt: skip
def test_layouts_that_do_not_fit_are_refused_by_name(change: dict[str, object], sentence: str) -> None:
    values: dict[str, object] = {
        "trainer": TrainerLayout.in_megatron_order(np.zeros((1, 2), np.int32), ep_size=1),
        "engines": (EngineLayout(slots=np.array([[1, 0]], np.int32), ep_size=2),),
        "node_of": (0, 1, 1),
        "expert_bytes": 6,
    }
    with pytest.raises(InvalidInputError, match=sentence):
        SyncProblem(**{**values, **change})  # type: ignore[arg-type]
