"""Which copy an engine sends a token to: an instance of its expert, and as even as the engine makes it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.core.decode import DecodeBatches
from moe_rl.core.expert_map import ExpertMap
from moe_rl.frameworks.sglang.expert_map import nearest_copies, static_slots
from moe_rl.rollout_engines import ROLLOUT_ENGINES, ReplicaChoice

CHOICES = {f"{engine.name}, {choice.name}": choice for engine in ROLLOUT_ENGINES for choice in engine.choices}
EXPERTS = 8


def batches_of(routes: np.ndarray, *, ep_size: int, per_batch: int) -> DecodeBatches:
    index = np.arange(len(routes))
    return DecodeBatches(
        routes=routes.astype(np.uint8),
        batch=index // per_batch,
        source=index % per_batch % ep_size,
        num_batches=-(-len(routes) // per_batch),
        num_experts=EXPERTS,
        ep_size=ep_size,
    )


def all_twice(*, layers: tuple[int, ...] = (0, 2), num_layers: int = 3) -> ExpertMap:
    """4 ranks of 4 slots; every expert on ranks r and r + 2."""
    row = [0, 1, 2, 3, 4, 5, 6, 7] * 2
    return ExpertMap(
        slots=np.array([row] * len(layers), np.int32),
        moe_layer_ids=layers,
        num_layers=num_layers,
        num_experts=EXPERTS,
        ep_size=4,
    )


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
@given(seed=st.integers(0, 20), num_tokens=st.integers(0, 40), top_k=st.integers(1, EXPERTS))
def test_a_pair_is_served_by_a_slot_of_its_expert(
    choice: ReplicaChoice, seed: int, num_tokens: int, top_k: int
) -> None:
    rng = np.random.default_rng(seed)
    routes = np.argsort(rng.random((num_tokens, 2, EXPERTS)), axis=2)[:, :, :top_k]
    expert_map, batches = all_twice(), batches_of(routes, ep_size=4, per_batch=16)
    served = choice.serve(expert_map, batches, 2)
    layer = np.arange(2)[None, :, None]
    assert np.array_equal(expert_map.slots[layer, served], routes)
    assert np.array_equal(served, choice.serve(expert_map, batches, 2))


def test_by_row_means_that_copies_of_one_hot_expert_share_evenly() -> None:
    routes = np.zeros((64, 2, 1))
    served = CHOICES["sglang, by row"].serve(all_twice(), batches_of(routes, ep_size=4, per_batch=64), 4)
    for layer in range(2):
        first, second = np.bincount(served[:, layer].ravel(), minlength=16)[[0, 8]]
        assert first + second == 64
        assert abs(first - second) <= 4


def test_sglang_prefers_its_own_copy_then_its_node_and_only_then_draws() -> None:
    """Slots 0 and 5 and 14 are on ranks 0, 1 and 3; nodes are of two ranks."""
    slots = np.array([0, 5, 14])
    near = nearest_copies(slots, ep_size=4, slots_per_rank=4, ranks_per_node=2)
    assert near.tolist() == [0, 5, 14, 14]
    together = nearest_copies(np.array([0, 5]), ep_size=4, slots_per_rank=4, ranks_per_node=2)
    assert together.tolist() == [0, 5, -1, -1]
    assert nearest_copies(np.array([9]), ep_size=4, slots_per_rank=4, ranks_per_node=2).tolist() == [9] * 4
    one_node = nearest_copies(np.array([0, 5]), ep_size=4, slots_per_rank=4, ranks_per_node=4)
    assert one_node.tolist() == [0, 5, -1, -1]


def test_static_draws_are_of_ranks_without_a_copy_and_pass_through_dense_layers() -> None:
    """Copies of expert 0 on ranks 0 and 1 of 4 on one node: ranks 2 and 3 draw, each for itself."""
    row = [0, 1, 0, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    maps = [
        ExpertMap(
            slots=np.array([row], np.int32),
            moe_layer_ids=(layer,),
            num_layers=layer + 1,
            num_experts=EXPERTS,
            ep_size=4,
        )
        for layer in range(6)
    ]
    maps = [each for each in maps if each.num_twins() == 1]
    tables = [static_slots(each, 4) for each in maps]
    for table in tables:
        assert table.shape == (4, 1, EXPERTS)
        slots = np.array(row)[table[:, 0]]
        assert np.array_equal(slots, np.tile(np.arange(EXPERTS), (4, 1)))
    assert len({table.tobytes() for table in tables}) > 1
