"""An expert map says where experts are, and refuses what an engine would take and break on."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.expert_map import ExpertMap


def of_rows(rows: list[list[int]], *, num_experts: int, ep_size: int) -> ExpertMap:
    ids = tuple(range(len(rows)))
    slots = np.array(rows, np.int32)
    return ExpertMap(slots=slots, moe_layer_ids=ids, num_layers=len(rows), num_experts=num_experts, ep_size=ep_size)


@given(
    ep_size=st.integers(1, 4),
    per_rank=st.integers(1, 3),
    more=st.integers(0, 3),
    seed=st.integers(0, 99),
    hot=st.booleans(),
)
def test_filled_slots_hold_every_expert_and_no_rank_one_twice(
    ep_size: int, per_rank: int, more: int, seed: int, hot: bool
) -> None:
    """Whichever slots are emptied, and whatever the load: all on one expert, or none at all."""
    experts, rng = ep_size * per_rank, np.random.default_rng(seed)
    more = min(more, experts - per_rank)
    start = ExpertMap.start(
        num_layers=3, moe_layer_ids=(0, 2), num_experts=experts, ep_size=ep_size, copies=more * ep_size
    )
    assert start.num_copies == more * ep_size
    slots = np.where(rng.random(start.slots.shape) < 0.5, -1, rng.permuted(start.slots, axis=1))
    load = np.eye(experts)[[0, 0]] if hot else np.zeros((2, experts))
    replace(start, slots=slots.astype(np.int32)).with_copies_for(load).check()


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([[0, 1, 2, 3], [0, 1, 2, 2]], "no slot for expert 3 in layer 1"),
        ([[0, 0, 1, 2, 3, 1]], "puts expert 0 on rank 0 twice in layer 0"),
        ([[0, 1, 2, 4]], "holds expert 4, but expert ids must be 0 to 3"),
        ([[0, 1, 2, -1]], "holds expert -1, but expert ids must be 0 to 3"),
    ],
)
def test_a_map_that_an_engine_would_break_on_is_refused(rows: list[list[int]], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        of_rows(rows, num_experts=4, ep_size=2).check()


def test_shapes_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"5 slots per layer.* a multiple of 2 \(the number of EP ranks\)"):
        of_rows([[0, 1, 2, 3, 0]], num_experts=4, ep_size=2)
    with pytest.raises(InvalidInputError, match=r"2 slots per layer, but the number of slots must be at least 4"):
        of_rows([[0, 1]], num_experts=4, ep_size=2)
    with pytest.raises(InvalidInputError, match="3 slots per rank, but the model has only 2 experts"):
        of_rows([[0, 1, 0]], num_experts=2, ep_size=1).with_copies_for(np.ones((1, 2)))


def test_the_start_map_holds_slot_p_modulo_experts() -> None:
    start = ExpertMap.start(num_layers=2, moe_layer_ids=(1,), num_experts=4, ep_size=4, copies=4)
    assert start.slots.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert start.num_twins() == 0
    one = ExpertMap.start(num_layers=1, moe_layer_ids=(0,), num_experts=1, ep_size=1)
    one.check()
