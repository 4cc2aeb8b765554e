"""Where copies go for a rollout: never worse than EPLB on what was planned on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.core.expert_map import ExpertMap
from moe_rl.planner.rollout_map import POWER, spread_copies
from moe_rl.planner.swap_annealing import smooth_max


def start_of(experts: int, ranks: int, *, copies: int = 0, layers: int = 2) -> ExpertMap:
    return ExpertMap.start(
        num_layers=layers, moe_layer_ids=tuple(range(layers)), num_experts=experts, ep_size=ranks, copies=copies
    )


def busiest(slots: np.ndarray, load: np.ndarray, ranks: int) -> np.ndarray:
    """[L] smooth maximum over ranks, summed over batches, where copies share evenly."""
    copies = np.stack([np.bincount(row, minlength=load.shape[2]) for row in slots])
    layer = np.arange(len(slots))[:, None]
    at = (load / copies)[:, layer, slots].reshape(len(load), len(slots), ranks, -1).sum(axis=3)
    return np.asarray(smooth_max(at, POWER).sum(axis=0))


@pytest.mark.lengthy
@given(seed=st.integers(0, 30), more=st.integers(0, 3))
def test_swaps_never_make_the_packing_by_totals_worse(seed: int, more: int) -> None:
    rng = np.random.default_rng(seed)
    start, load = start_of(16, 4, copies=4 * more), rng.gamma(0.4, size=(6, 2, 16))
    made = spread_copies(load, start, iterations=60, seed=seed)
    made.check()
    assert made.slots.shape == start.slots.shape
    usable = spread_copies(load, start, iterations=0)
    assert (busiest(made.slots, load, 4) <= busiest(usable.slots, load, 4) * (1 + 1e-9)).all()


def test_experts_that_are_hot_together_are_taken_apart() -> None:
    """Totals are all alike; experts 0 .. 3 are asked for in even batches, 4 .. 7 in odd ones."""
    load = np.zeros((8, 1, 8))
    load[::2, :, :4] = load[1::2, :, 4:] = 1.0
    made = spread_copies(load, start_of(8, 4, layers=1), iterations=500)
    assert sorted(tuple(sorted(pair)) for pair in (made.slots[0].reshape(4, 2) // 4).tolist()) == [(0, 1)] * 4


@pytest.mark.parametrize("iterations", [0, 10])
def test_edges(iterations: int) -> None:
    one = spread_copies(np.ones((2, 1, 1)), start_of(1, 1, layers=1), iterations=iterations)
    assert one.slots.tolist() == [[0]]
    alone = spread_copies(np.ones((2, 2, 4)), start_of(4, 1), iterations=iterations)
    assert np.sort(alone.slots).tolist() == [[0, 1, 2, 3]] * 2
    full = spread_copies(np.eye(4)[None, :2], start_of(4, 2, copies=4), iterations=iterations)
    full.check()
    hot = spread_copies(np.tile(np.eye(8)[0], (3, 2, 1)), start_of(8, 4, copies=4), iterations=iterations)
    hot.check()
    assert (np.count_nonzero(hot.slots == 0, axis=1) == 4).all()
