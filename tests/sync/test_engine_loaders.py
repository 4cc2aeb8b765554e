"""Random layouts through the loaders of SGLang and vLLM as released: every slot of theirs right to the bit.

`make test-sync` brings their files; without them this is skipped.
"""

import os

import numpy as np
import pytest
from engine_code import FOLDER
from engine_slots import QUANTIZERS, LoadedSlots, SglangSlots, VllmSlots
from layout_cases import Drawn, TrainerSizes, draw, drawn_homes, drawn_slots, nodes_apart, problem_of, sync, weights_of

from moe_rl.sync import EngineLayout, plan_sync

pytestmark = pytest.mark.skipif(
    FOLDER not in os.environ, reason="SGLang's and vLLM's files are not here: make test-sync brings them"
)

ENGINES = {"sglang": SglangSlots, "vllm": VllmSlots}
LAYOUTS = range(2000, 2200)


def loaded(drawn: Drawn, engine: type[LoadedSlots], *, quantized: str = "", step: int = 7) -> int:
    """Sync once through the engine's loader and return how many slots were filled; none may be wrong.

    `quantized`: of an engine that then quantizes its own slots.
    """
    problem = drawn.problem
    ranks = {each.rank: engine(drawn.shape, each.engine, each.index) for each in problem.engine_ranks()}
    sync(plan_sync(problem, message_bytes=1), drawn, ranks, step=step)
    weights = weights_of(drawn.shape, step)
    assert sum(rank.wrong_slots(weights) for rank in ranks.values()) == 0
    if quantized:
        assert sum(rank.wrong_quantized_slots(weights, QUANTIZERS[quantized]) for rank in ranks.values()) == 0
    for rank in ranks.values():
        rank.versions.require(step)
    return sum(rank.local.size for rank in ranks.values())


@pytest.mark.parametrize("name", ENGINES)
def test_200_random_layouts_are_exact(name: str) -> None:
    """Every second engine quantizes what it got, in FP8 or MXFP8, as if whole experts had been quantized and cut."""
    kinds = ("", "FP8", "", "MXFP8")
    slots = [loaded(draw(seed), ENGINES[name], quantized=kinds[seed % len(kinds)]) for seed in LAYOUTS]
    assert sum(slots) > 10_000


@pytest.mark.parametrize("name", ENGINES)
def test_a_slot_that_nothing_wrote_is_seen(name: str) -> None:
    """The comparison itself: an engine that no sync reached has no right slot."""
    drawn = draw(LAYOUTS[0])
    each = next(iter(drawn.problem.engine_ranks()))
    rank = ENGINES[name](drawn.shape, each.engine, each.index)
    assert rank.wrong_slots(weights_of(drawn.shape, 7)) == rank.local.size


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    ("sizes", "ep", "tp", "redundant"),
    [
        pytest.param(TrainerSizes(experts=16, ep=2, etp=2), 4, 1, 0, id="ETP 2"),
        pytest.param(TrainerSizes(layers=8, experts=16, ep=2, pp=2, vpp=2), 2, 2, 0, id="VPP 2"),
        pytest.param(TrainerSizes(experts=16, ep=4), 2, 4, 0, id="engine EP is not its TP"),
        pytest.param(TrainerSizes(experts=16, ep=4), 4, 1, 2, id="redundant slots"),
    ],
)
@pytest.mark.parametrize("whole", [False, True], ids=["slices", "whole tensors"])
def test_layouts_that_other_syncs_refuse(
    name: str, sizes: TrainerSizes, ep: int, tp: int, redundant: int, whole: bool
) -> None:
    """With homes that a balancer has moved, and two replicas with different maps."""
    homes = drawn_homes(np.random.default_rng(2), sizes)
    maps = [drawn_slots(np.random.default_rng(seed), sizes, ep, redundant) for seed in (1, 2)]
    engines = tuple(EngineLayout(slots=slots, ep_size=ep, tp_size=tp, whole_tensors=whole) for slots in maps)
    node_of = nodes_apart(sizes.ranks, sum(engine.size for engine in engines), 4)
    problem, shape = problem_of(homes, sizes, engines, node_of)
    loaded(Drawn(sizes=sizes, homes=homes, problem=problem, shape=shape), ENGINES[name])


@pytest.mark.parametrize("name", ENGINES)
def test_a_map_changed_by_the_sync(name: str) -> None:
    """Two syncs into the same engine ranks, the second with another map of redundant slots and other weights: the
    loader fills the new slots, and routers find them."""
    sizes = TrainerSizes(experts=16, ep=4)
    homes = drawn_homes(np.random.default_rng(2), sizes)
    ranks: dict[int, LoadedSlots] = {}
    for step, seed in ((7, 3), (8, 4)):
        slots = drawn_slots(np.random.default_rng(seed), sizes, 4, 1)
        engine = EngineLayout(slots=slots, ep_size=4, whole_tensors=True)
        problem, shape = problem_of(homes, sizes, (engine,), nodes_apart(sizes.ranks, engine.size, 4))
        for each in problem.engine_ranks():
            if each.rank in ranks:
                ranks[each.rank].change_map(engine)
            else:
                ranks[each.rank] = ENGINES[name](shape, engine, each.index)
            assert ranks[each.rank].map_of_routers().tolist() == engine.slots.tolist()
        drawn = Drawn(sizes=sizes, homes=homes, problem=problem, shape=shape)
        sync(plan_sync(problem, message_bytes=1), drawn, ranks, step=step)
        assert sum(rank.wrong_slots(weights_of(shape, step)) for rank in ranks.values()) == 0
        for rank in ranks.values():
            rank.versions.require(step)
