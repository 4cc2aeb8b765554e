"""Loads travel to the ranks that plan their layers, with the routes from which tokens are drawn."""

from typing import Any

import numpy as np
import pytest
from strategies import model_spec

from benchmarks.in_memory_exchange import InMemory, on_all_ranks
from moe_rl.balancing.load_exchange import RankNotice, common_num_micro_batches, exchange_loads
from moe_rl.balancing.loads import RankRows
from moe_rl.balancing.pass_planner import PassPlanner
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.load import StepLoad
from moe_rl.planner.base import COPIES, PLACEMENT

MODEL = model_spec(num_experts=4, num_layers=2, top_k=2)


def test_every_rank_gets_counts_and_routes_of_its_layers_and_none_without_layers() -> None:
    """Three ranks, two layers: the last rank plans none."""
    rng = np.random.default_rng(0)
    routes = [
        [rng.permuted(np.tile(np.arange(4), (rank + m, 2, 1)), axis=2)[..., :2] for m in (1, 2)] for rank in range(3)
    ]

    def load_of(exchange: InMemory) -> StepLoad:
        rows = RankRows.of(routes[exchange.rank], model=MODEL, layers=[0, 1])
        notices = [exchange.gather(RankNotice.of(rows))]
        return exchange_loads(exchange, rows, notices, [[1], [0], []], top_k=2, of_all_groups=False)

    loads = on_all_ranks(3, load_of)
    for layer, load in ((1, loads[0]), (0, loads[1])):
        assert load.tokens.tolist() == [[[1, 2, 3], [2, 3, 4]]]
        for micro_batch, rank in np.ndindex(2, 3):
            counts = np.bincount(routes[rank][micro_batch][:, layer].ravel(), minlength=4)
            assert load.pairs[0, micro_batch, 0, rank].tolist() == counts.tolist()
        assert load.routes is not None
        in_order = [routes[rank][micro_batch][:, layer] for micro_batch in range(2) for rank in range(3)]
        assert load.routes.routes.tolist() == [np.concatenate(in_order).tolist()]
    assert loads[2].pairs.shape == (1, 2, 0, 3, 4)
    assert loads[2].routes is None


@pytest.mark.parametrize(
    ("parts", "passes", "said"),
    [
        ((2, 2), (None, None), ""),
        ((1, 2), (3, 3), ""),
        ((1, 2), (None, None), "1, 2"),
        ((1, 1), (3, 2), "2, 3"),
        ((1, None), (None, None), "1, None"),
    ],
)
def test_passes_have_one_number_of_micro_batches_though_their_parts_may_not(parts: Any, passes: Any, said: str) -> None:
    group = [
        RankNotice(num_micro_batches=of_part, num_micro_batches_of_pass=of_pass)
        for of_part, of_pass in zip(parts, passes, strict=True)
    ]
    if not said:
        assert common_num_micro_batches([group]) == parts[0]
        return
    with pytest.raises(InvalidInputError, match=f"number of micro-batches with routes, but they have {said}"):
        common_num_micro_batches([group])


def test_layers_of_the_whole_model_are_counted_where_experts_may_move() -> None:
    planner = PassPlanner(None, layers=[1], model=MODEL)  # type: ignore[arg-type]
    assert planner.layers_of(PLACEMENT) == [0, 1]
    assert planner.layers_of(COPIES) == [1]
