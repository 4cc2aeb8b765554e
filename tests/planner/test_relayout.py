"""`load_for_layout`: sequences cut into pieces, in the C++ core and in numpy."""

import numpy as np
import pytest
from numpy.random import default_rng

from moe_rl.config import load_cluster
from moe_rl.core.layout import BatchLayout
from moe_rl.core.native import native_core
from moe_rl.core.sequence_load import SequenceLoad
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner import relayout
from moe_rl.planner.relayout import load_for_layout


@pytest.mark.skipif(native_core() is None, reason="compares the C++ core with numpy")
@pytest.mark.parametrize(("slices", "ep_size"), [(8, 8), (2, 4), (1, 8)])
def test_core_and_numpy_cut_sequences_alike(monkeypatch: pytest.MonkeyPatch, slices: int, ep_size: int) -> None:
    rng = default_rng(slices)
    tokens = np.append(rng.integers(1, 90, 40), [0, 1, 3_000_000])  # the last one is too long for doubles
    load = rng.integers(0, 2 * tokens[:, None, None] + 1, (len(tokens), 3, 16)).astype(np.int32)
    topology = ClusterTopology(hardware=load_cluster("h100"), ep_size=ep_size, slices_per_dp_rank=slices)
    layout = BatchLayout.in_order(tokens, num_dp_ranks=topology.num_dp_ranks, token_budget=3_000_000)

    def loads() -> tuple[np.ndarray, np.ndarray]:
        found = load_for_layout(SequenceLoad.of_different(load), tokens, layout, topology, top_k=2)
        return found.pairs, found.tokens

    pairs, held = loads()
    monkeypatch.setattr(relayout, "native_core", lambda: None)
    slow_pairs, slow_held = loads()
    np.testing.assert_array_equal(pairs, slow_pairs)
    np.testing.assert_array_equal(held, slow_held)
    np.testing.assert_array_equal(pairs.sum(axis=(0, 1, 3)), load.sum(axis=0))
    assert held.sum() == tokens.sum()


@pytest.mark.parametrize("native", [True, False])
def test_a_repeated_sequence_is_cut_like_one_of_its_own(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    """Also where two in a row are the same sequence: each starts anew."""
    if native and native_core() is None:
        pytest.skip("there is no C++ core")
    if not native:
        monkeypatch.setattr(relayout, "native_core", lambda: None)
    rng = default_rng(0)
    lengths = np.array([7, 30])
    counts = rng.integers(0, 2 * lengths[:, None, None] + 1, (2, 3, 16)).astype(np.int32)
    row = np.array([0, 0, 1, 1, 1, 0], np.int32)
    tokens = lengths[row]
    topology = ClusterTopology(hardware=load_cluster("h100"), ep_size=4, slices_per_dp_rank=4)
    layout = BatchLayout.in_order(tokens, num_dp_ranks=topology.num_dp_ranks, token_budget=60)
    shared, own = SequenceLoad(counts=counts, row=row), SequenceLoad.of_different(counts[row])
    loads = [load_for_layout(load, tokens, layout, topology, top_k=2).pairs for load in (shared, own)]
    np.testing.assert_array_equal(*loads)
