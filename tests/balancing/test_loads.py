"""What a rank says of its own routes: how much of its load they tell."""

import numpy as np
import pytest
from strategies import model_spec

from moe_rl.balancing.loads import RankRows

MODEL = model_spec(num_experts=4, num_layers=2, top_k=2)


@pytest.mark.parametrize(
    ("known_rows", "unknown_rows", "share"),
    [([6, 2], [0, 0], 1.0), ([6, 0], [0, 2], 0.75), ([0], [3], 0.0), ([0], [0], 1.0)],
)
def test_rows_without_a_route_are_not_known(known_rows: list[int], unknown_rows: list[int], share: float) -> None:
    routes = [
        np.concatenate([np.tile(np.array([0, 3]), (known, 2, 1)), np.full((unknown, 2, 2), -1)])
        for known, unknown in zip(known_rows, unknown_rows, strict=True)
    ]
    rows = RankRows.of(routes, model=MODEL, layers=[0, 1])
    assert rows.known == share
    assert rows.pairs.sum() == 4 * sum(known_rows)
