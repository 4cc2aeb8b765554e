"""Where sequences can stand in a batch, and which loads micro-batches then have."""

import numpy as np
import pytest
from strategies import HARDWARE, load_of, problem_of, random_pairs

from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.sequence_places import SequencePlaces

GROUPS, MICRO_BATCHES, LAYERS, RANKS, EXPERTS = 2, 2, 1, 2, 4


@pytest.fixture
def places(rng: np.random.Generator) -> SequencePlaces:
    """The places of the docstring's example: two EP groups of two data-parallel ranks, two micro-batches."""
    topology = ClusterTopology(hardware=HARDWARE, ep_size=RANKS, num_ep_groups=GROUPS, ranks_per_node=RANKS)
    pairs = random_pairs(rng, (GROUPS, MICRO_BATCHES, LAYERS, RANKS, EXPERTS), most=9)
    return SequencePlaces(problem_of(load_of(pairs, top_k=1), topology))


def test_the_example_of_the_docstring(places: SequencePlaces) -> None:
    np.testing.assert_array_equal(places.given_place, np.arange(8))
    np.testing.assert_array_equal(places.cell_of_place(), [0, 0, 2, 2, 1, 1, 3, 3])
    first_node, num_nodes = places.nodes()
    np.testing.assert_array_equal(first_node, np.zeros(8))
    np.testing.assert_array_equal(num_nodes, np.ones(8))


def test_a_layout_has_the_places_that_it_was_made_of_and_is_the_given_one_where_none_moved(
    places: SequencePlaces,
) -> None:
    stated = places.problem.layout
    assert places.layout(places.given_place, places.given_order) is stated
    moved = places.given_place[::-1].copy()
    layout = places.layout(moved, places.given_order)
    np.testing.assert_array_equal(layout.micro_batch * stated.num_dp_ranks + layout.dp_rank, moved)
