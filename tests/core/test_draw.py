"""Drawn sequences count as copies of them do, whatever the layout, and take no memory of copies."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from core.test_reduce import HARDWARE, make_trace

from moe_rl.core.draw import DrawnSequences, StepPart
from moe_rl.core.layout import BatchLayout
from moe_rl.core.native import native_core
from moe_rl.core.reduce import CHUNK_TOKENS, Filler, read_load
from moe_rl.core.topology import ClusterTopology
from moe_rl.core.trace import RoutingTrace, SequenceCounts
from moe_rl.replay import count_sequences


def recording(rng: np.random.Generator, *, filler_share: float = 0.0) -> RoutingTrace:
    """Eight sequences, one of them empty and one of a single token."""
    lengths = np.array([9, 0, 5, 1, 30, 12, 7, 3])
    return make_trace(rng, lengths, num_layers=2, num_experts=6, top_k=2, filler_share=filler_share)


def same_load(part: StepPart, copy: RoutingTrace | SequenceCounts, *, slices: int, filler: Filler) -> None:
    """Check that both have one load, and the same tokens to follow, on two data-parallel ranks of so many slices."""
    layout = BatchLayout.in_order(copy.sequence_lengths, num_dp_ranks=2, token_budget=40)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=2 * slices, slices_per_dp_rank=slices)
    of_part, of_copy = (read_load([one], layout=layout, topology=topology, filler=filler) for one in (part, copy))
    np.testing.assert_array_equal(of_part.pairs, of_copy.pairs)
    np.testing.assert_array_equal(of_part.tokens, of_copy.tokens)
    assert (of_part.routes is None) == (of_copy.routes is None)
    if of_part.routes is not None and of_copy.routes is not None:
        for name in ("routes", "sequence", "position", "token", "source", "cell_start", "share"):
            np.testing.assert_array_equal(getattr(of_part.routes, name), getattr(of_copy.routes, name), err_msg=name)


@pytest.mark.parametrize("filler", list(Filler))
@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("chunk", [CHUNK_TOKENS, 20])
def test_drawn_sequences_count_as_copies(
    slices: int, filler: Filler, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_rl.core.reduce.CHUNK_TOKENS", chunk)
    rng = np.random.default_rng(slices)
    for recorded in (recording(rng), recording(rng, filler_share=0.4)):
        numbers = rng.integers(recorded.num_sequences, size=40)
        same_load(
            DrawnSequences(recorded=recorded, numbers=numbers), recorded.select(numbers), slices=slices, filler=filler
        )
        counts = count_sequences(recorded)
        same_load(
            DrawnSequences(recorded=counts, numbers=numbers), counts.select(numbers), slices=slices, filler=filler
        )


@pytest.mark.parametrize("slices", [1, 3])
def test_hidden_routes_count_as_in_copies(slices: int) -> None:
    """Some sequences are hidden whole, some tokens alone; another time the same sequence is told in full."""
    rng = np.random.default_rng(7)
    recorded = recording(rng, filler_share=0.2)
    numbers = np.array([0, 4, 4, 5, 0, 2, 6, 4])
    copy = recorded.select(numbers)
    visible = np.repeat([True, False, True, True, True, False, True, True], copy.sequence_lengths)
    visible &= rng.random(len(visible)) < 0.9
    drawn = DrawnSequences(recorded=recorded, numbers=numbers, visible=visible)
    same_load(drawn, replace(copy, valid=copy.valid & visible), slices=slices, filler=Filler.NONE)


def test_nothing_drawn_is_an_empty_load() -> None:
    recorded = recording(np.random.default_rng(0))
    for numbers in (np.zeros(0, np.int64), np.array([1, 1])):
        copy = recorded.select(numbers)
        same_load(DrawnSequences(recorded=recorded, numbers=numbers), copy, slices=1, filler=Filler.NONE)


@pytest.mark.skipif(native_core() is None, reason="counting half a million rows in numpy takes long")
@pytest.mark.parametrize("slices", [1, 3])
def test_a_drawn_batch_takes_its_loads_and_a_chunk(slices: int) -> None:
    """Half a million drawn tokens: copies of their routes would take 67 MB."""
    lengths, layers, top_k = np.full(20, 250), 16, 8
    recorded = make_trace(np.random.default_rng(0), lengths, num_layers=layers, num_experts=32, top_k=top_k)
    numbers = np.random.default_rng(1).integers(len(lengths), size=2_100)
    drawn = DrawnSequences(recorded=recorded, numbers=numbers)
    layout = BatchLayout.in_order(drawn.sequence_lengths, num_dp_ranks=2, token_budget=40_000)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=2 * slices, slices_per_dp_rank=slices)
    tracemalloc.start()
    try:
        load = read_load([drawn], layout=layout, topology=topology)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert load.routes is not None
    chunk = CHUNK_TOKENS * layers * top_k
    # Drawn tokens to follow: ids, as many again while they are put in order, and a few numbers of each token.
    followed = 4 * load.routes.routes.nbytes + 12 * 8 * load.routes.routes.shape[1]
    row_columns = 4 * 8 * drawn.num_tokens
    copies = drawn.num_tokens * layers * top_k
    assert peak <= load.pairs.nbytes + 2 * chunk + followed + row_columns
    assert copies > 2 * chunk
