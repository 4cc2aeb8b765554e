"""A pipeline stage that knows its own layers alone chooses homes and copies for these, and leaves the others."""

import numpy as np
import pytest
from strategies import model_spec

from benchmarks.in_memory_exchange import InMemory, on_all_ranks
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.loads import RankRows
from moe_rl.balancing.pass_planner import PassPlanner
from moe_rl.balancing.pass_request import PassRequest, PlannedPass
from moe_rl.balancing.pass_source import CountedRows
from moe_rl.core.native import native_core
from moe_rl.core.placement import ExpertPlacement
from moe_rl.planner.base import PLACEMENT

pytestmark = pytest.mark.skipif(native_core() is None, reason="the C++ core is not built")
RANKS, LAYERS, EXPERTS = 4, 4, 8
MODEL = model_spec(num_experts=EXPERTS, num_layers=LAYERS, top_k=2)
CONFIG = BalancerConfig(objective="imbalance", ranks_per_node=2, resident_slots=1)


def rows_of(rank: int, layers: list[int]) -> RankRows:
    """Two micro-batches in which experts 0 and 1, both at home on rank 0, take most."""
    rng = np.random.default_rng(rank)
    taste = rng.exponential(2.0 ** np.arange(EXPERTS), (2, 64, LAYERS, EXPERTS))
    return RankRows.of(list(np.argsort(taste, axis=3)[..., :2]), model=MODEL, layers=layers)


@pytest.mark.parametrize("layers", [[0, 1], [2], [1, 3]])
def test_a_stage_moves_the_experts_of_its_own_layers(layers: list[int]) -> None:
    placement = ExpertPlacement.contiguous(
        num_layers=LAYERS, num_experts=EXPERTS, ep_size=RANKS, spare_slots=CONFIG.slots.foreign
    ).with_slots(resident_slots=CONFIG.slots.resident_slots, spare_slots=CONFIG.slots.spare)

    def planned(exchange: InMemory) -> PlannedPass:
        planner = PassPlanner(exchange, layers=layers, model=MODEL)
        request = PassRequest(config=CONFIG, placement=placement, may=PLACEMENT, of_stage=True)
        return planner.plan_pass(request, CountedRows(rows_of(exchange.rank, layers)))

    found = on_all_ranks(RANKS, planned)
    assert len({each.plan.placement.physical_to_logical_map.tobytes() for each in found}) == 1
    plan = found[0].plan
    moved = (plan.placement.home_rank != placement.home_rank).any(axis=1)
    assert moved.tolist() == [layer in layers for layer in range(LAYERS)]
    assert plan.placement.resident_slots == CONFIG.slots.resident_slots
    predicted, static = found[0].predicted_rows, found[0].static_rows
    assert predicted is not None
    assert static is not None
    assert predicted.shape == (2, len(layers), RANKS)
    assert predicted.max(axis=2).sum() < static.max(axis=2).sum()
