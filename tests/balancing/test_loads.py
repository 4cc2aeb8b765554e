"""What a rank says of its own routes: how much of its load they tell."""

from dataclasses import replace

import numpy as np
import pytest
from strategies import model_spec

from moe_rl.balancing.loads import RankRows, count_routes, narrow
from moe_rl.core.errors import InvalidInputError

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


def test_expert_0_is_an_expert_and_a_row_without_any_known_choice_is_none() -> None:
    """Rows: all known, half known, not known."""
    routes = [np.array([[[0, 0]], [[-1, 0]], [[-1, -1]]])]
    pairs, rows = count_routes(routes, num_layers=1, num_experts=2)
    assert (pairs.tolist(), rows.tolist()) == ([[[3, 0]]], [2])
    known = RankRows.of(routes, model=model_spec(num_experts=2, num_layers=1, top_k=2), layers=[0])
    assert known.routes[0].tolist() == [[[0, 0]]], "tokens are drawn from rows that are known in full"
    assert known.sizes_of_rank.tolist() == [[3], [1]]


def test_rows_that_all_know_their_choices_are_counted_in_full() -> None:
    assert count_routes([np.array([[[0]], [[1]]])], num_layers=1, num_experts=2)[1].tolist() == [2]


@pytest.mark.parametrize("layers", [[0, 1, 2, 3], [1, 2], [0], [3], [0, 2], [2, 1], []])
def test_the_layers_that_are_asked_for_are_counted_and_consecutive_ones_are_not_copied(layers: list[int]) -> None:
    ids = np.arange(8, dtype=np.int64).reshape(2, 4, 1)
    rows = RankRows.of([ids], model=model_spec(num_experts=8, num_layers=4, top_k=1), layers=layers)
    assert rows.pairs.tolist() == [[[int(expert in ids[:, layer]) for expert in range(8)] for layer in layers]]
    np.testing.assert_array_equal(rows.routes[0], ids[:, layers])
    is_slice = bool(layers) and layers == list(range(layers[0], layers[-1] + 1))
    assert np.shares_memory(rows.routes[0], ids) == is_slice


@pytest.mark.parametrize(
    "routes",
    [np.zeros((3, 1, 2), np.int64), np.zeros((3, 2), np.int64), np.zeros((3, 2, 2))],
    ids=["layers", "axes", "floats"],
)
def test_routes_of_another_shape_are_refused(routes: np.ndarray) -> None:
    with pytest.raises(InvalidInputError, match=r"micro-batch 0 must be integers of shape \[tokens, 2 MoE layers"):
        count_routes([routes], num_layers=2, num_experts=4)


def test_parts_of_a_rank_draw_together_what_one_rank_with_all_rows_draws() -> None:
    """5 and 3 rows of two EP ranks' 8 + 4; at most so many are drawn that all are."""
    ids = np.arange(8).reshape(8, 1, 1)
    counts = np.array([[8], [4]])

    def rows_of(routes: np.ndarray) -> RankRows:
        return RankRows(pairs=np.zeros((1, 1, 8), np.int32), rows=np.array([len(routes)]), routes=(routes,))

    parts = [rows_of(ids[:5]), rows_of(ids[5:])]
    drawn = [of_part.of_all_parts(parts, part).drawn(counts, 0)[0] for part, of_part in enumerate(parts)]
    assert [part.ravel().tolist() for part in drawn] == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert rows_of(ids).drawn(counts, 0)[0].ravel().tolist() == list(range(8))
    assert parts[1].of_all_parts(parts, 1).drawable.tolist() == [8]
    assert replace(parts[0], routes=()).drawable.tolist() == [0], "of counts nothing can be drawn"


@pytest.mark.parametrize(("most", "dtype"), [(2**16 - 1, np.uint16), (2**16, np.int32)])
def test_counts_travel_in_the_narrowest_type_that_holds_them(most: int, dtype: type) -> None:
    counts = narrow(np.array([most]), most)
    assert (counts.dtype, counts.tolist()) == (dtype, [most])
