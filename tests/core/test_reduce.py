"""Load reduction against a loop over tokens that follows the documented words one by one."""

import itertools
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_rl.core import reduce as reduce_module
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.layout import BatchLayout
from moe_rl.core.native import VARIABLE, native_core
from moe_rl.core.pages import drop_pages
from moe_rl.core.reduce import Filler, reduce_load
from moe_rl.core.topology import ClusterTopology, HardwareSpec
from moe_rl.core.trace import RoutingTrace, SequenceCounts, fill_sequence_fields, route_dtype


@pytest.fixture(scope="module", params=["0", "1"] if native_core() else ["0"], ids=lambda wanted: f"native={wanted}")
def counted_by(request: pytest.FixtureRequest) -> Iterator[None]:
    """In numpy, then in C++."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, request.param)
        yield


RATES = [
    f.name
    for f in fields(HardwareSpec)
    if f.name not in ("name", "ranks_per_node", "a2a_mixing", "pooled_nics", "sources")
]
HARDWARE = HardwareSpec(name="any", ranks_per_node=8, **dict.fromkeys(RATES, 1))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Case:
    trace: RoutingTrace
    layout: BatchLayout
    topology: ClusterTopology


def make_trace(
    rng: np.random.Generator,
    lengths: NDArray[np.int64],
    *,
    num_layers: int,
    num_experts: int,
    top_k: int,
    filler_share: float = 0.0,
    dtype: type[np.unsignedinteger] | None = None,
) -> RoutingTrace:
    num_tokens = int(lengths.sum())
    routes = np.argsort(rng.random((num_tokens, num_layers, num_experts)), axis=2)[:, :, :top_k]
    valid = rng.random(num_tokens) >= filler_share
    dtype = dtype or route_dtype(num_experts)
    routes[~valid] = np.iinfo(dtype).max  # what stands in a filler row is never read as a route
    return RoutingTrace(
        routed_experts=routes.astype(dtype),
        valid=valid,
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        num_experts=num_experts,
        moe_layer_ids=tuple(range(1, 2 * num_layers, 2)),
        provenance="synthetic",
        **fill_sequence_fields(len(lengths), {}),
    )


@st.composite
def cases(draw: st.DrawFn, min_experts: int = 1) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_experts = draw(st.sampled_from([e for e in (1, 2, 5, 8, 300) if e >= min_experts]))
    top_k = draw(st.sampled_from(sorted({1, min(3, num_experts), min(8, num_experts), min(9, num_experts)})))
    lengths = np.array(draw(st.lists(st.integers(0, 40), min_size=1, max_size=8)), np.int64)
    topology = ClusterTopology(
        hardware=HARDWARE,
        ep_size=draw(st.sampled_from([1, 2, 4])),
        num_ep_groups=draw(st.sampled_from([1, 2])),
        slices_per_dp_rank=1,
        ranks_per_node=4,
    )
    slices = draw(st.sampled_from([s for s in (1, 2, 4, 8) if topology.num_ranks % s == 0]))
    topology = replace(topology, slices_per_dp_rank=slices)
    num_micro_batches = draw(st.integers(1, 3))
    layout = BatchLayout(
        micro_batch=rng.integers(0, num_micro_batches, len(lengths)).astype(np.int32),
        dp_rank=rng.integers(0, topology.num_dp_ranks, len(lengths)).astype(np.int32),
        order=rng.permutation(len(lengths)).astype(np.int32),
        num_micro_batches=num_micro_batches,
        num_dp_ranks=topology.num_dp_ranks,
    )
    trace = make_trace(
        rng,
        lengths,
        num_layers=draw(st.integers(1, 3)),
        num_experts=num_experts,
        top_k=top_k,
        filler_share=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        dtype=draw(st.sampled_from([route_dtype(num_experts), np.uint16])),
    )
    return Case(trace=trace, layout=layout, topology=topology)


def dispatched(trace: RoutingTrace, row: int, run: int, filler: Filler) -> NDArray[np.int64] | None:
    """[L, any] ids that a row sends its pairs to; `run` counts the filler rows before it in its run."""
    layers, top_k, experts = trace.num_layers, trace.top_k, trace.num_experts
    if trace.valid[row]:
        return trace.routed_experts[row].astype(np.int64)
    if filler is Filler.NONE:
        return None
    if filler is Filler.FIRST_EXPERTS:
        return np.tile(np.arange(top_k), (layers, 1))
    if filler is Filler.EXPERT_ZERO:
        return np.zeros((layers, 1), np.int64)
    if filler is Filler.EXPERT_ZERO_TOP_K:
        return np.zeros((layers, top_k), np.int64)
    # slime pads all decoder layers, dense ones too, with one running count, and drops the dense ones later
    num_decoder_layers = trace.moe_layer_ids[-1] + 1
    padding = np.arange((run + 1) * num_decoder_layers * top_k).reshape(run + 1, num_decoder_layers, top_k) % experts
    return padding[run, list(trace.moe_layer_ids)]


def by_hand(case: Case, filler: Filler) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    trace, layout, topology = case.trace, case.layout, case.topology
    groups, micro_batches, sources = topology.num_ep_groups, layout.num_micro_batches, topology.ep_size
    pairs = np.zeros((groups, micro_batches, trace.num_layers, sources, trace.num_experts), np.int64)
    tokens = np.zeros((groups, micro_batches, sources), np.int64)
    for micro_batch in range(micro_batches):
        for dp_rank in range(topology.num_dp_ranks):
            inside = np.flatnonzero((layout.micro_batch == micro_batch) & (layout.dp_rank == dp_rank))
            cell = []
            for sequence in inside[np.argsort(layout.order[inside])]:
                run = 0
                for row in range(trace.cu_seqlens[sequence], trace.cu_seqlens[sequence + 1]):
                    cell.append((row, run))
                    run = 0 if trace.valid[row] else run + 1
            for position, (row, run) in enumerate(cell):
                rank = dp_rank * topology.slices_per_dp_rank + position * topology.slices_per_dp_rank // len(cell)
                group, source = divmod(rank, sources)
                ids = dispatched(trace, row, run, filler)
                if ids is None:
                    continue
                tokens[group, micro_batch, source] += 1
                for layer in range(trace.num_layers):
                    for expert in ids[layer]:
                        pairs[group, micro_batch, layer, source, expert] += 1
    return pairs, tokens


def split(trace: RoutingTrace, at: list[int]) -> list[RoutingTrace]:
    bounds = [0, *sorted(at), trace.num_sequences]
    return [trace.select(np.arange(a, b)) for a, b in itertools.pairwise(bounds)]


def counts_only(trace: RoutingTrace) -> SequenceCounts:
    counts = np.zeros((trace.num_sequences, trace.num_layers, trace.num_experts), np.uint32)
    valid = np.zeros(trace.num_sequences, np.int64)
    for sequence in range(trace.num_sequences):
        rows = slice(trace.cu_seqlens[sequence], trace.cu_seqlens[sequence + 1])
        routes = trace.routed_experts[rows][trace.valid[rows]]
        valid[sequence] = len(routes)
        for layer in range(trace.num_layers):
            counts[sequence, layer] = np.bincount(routes[:, layer].ravel(), minlength=trace.num_experts)
    return SequenceCounts(
        tokens_per_expert=counts,
        num_tokens=trace.sequence_lengths,
        num_valid_tokens=valid,
        top_k=trace.top_k,
        moe_layer_ids=trace.moe_layer_ids,
        **fill_sequence_fields(trace.num_sequences, {}),
    )


@pytest.mark.lengthy
@pytest.mark.usefixtures("counted_by")
@given(case=cases(), filler=st.sampled_from(Filler), chunk=st.sampled_from([1, 7, 65_536]), data=st.data())
@settings(deadline=None, max_examples=150)
def test_every_token_is_counted_where_the_words_say(
    case: Case, filler: Filler, chunk: int, data: st.DataObject
) -> None:
    pairs, tokens = by_hand(case, filler)
    cuts = data.draw(st.lists(st.integers(0, case.trace.num_sequences), max_size=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoutingTrace.chunks, "__defaults__", (chunk,))
        patch.setattr(reduce_module, "CHUNK_TOKENS", chunk)
        patch.setattr(reduce_module, "TILE_TOKENS", 5)
        load = reduce_load(
            split(case.trace, cuts),
            layout=case.layout,
            topology=case.topology,
            filler=filler,
        )
    np.testing.assert_array_equal(load.pairs, pairs)
    np.testing.assert_array_equal(load.tokens, tokens)
    assert load.top_k == case.trace.top_k


@given(case=cases(), filler=st.sampled_from(Filler))
@settings(deadline=None, max_examples=60)
def test_counts_of_whole_sequences_reduce_as_their_routes_do_where_ranks_hold_whole_sequences(
    case: Case, filler: Filler
) -> None:
    topology = replace(case.topology, slices_per_dp_rank=1)
    layout = replace(
        case.layout, dp_rank=case.layout.dp_rank % topology.num_dp_ranks, num_dp_ranks=topology.num_dp_ranks
    )
    # one run of filler rows per sequence, at its end: a counts-only trace cannot hold more
    rows_left = np.repeat(case.trace.cu_seqlens[1:], case.trace.sequence_lengths) - np.arange(case.trace.num_tokens)
    trace = replace(case.trace, valid=case.trace.valid & (rows_left > 2))
    routes = trace.routed_experts.copy()
    routes[~trace.valid] = 0
    trace = replace(trace, routed_experts=np.minimum(routes, trace.num_experts - 1), valid=rows_left > 2)
    exact = reduce_load([trace], layout=layout, topology=topology, filler=filler)
    counts = reduce_load([counts_only(trace)], layout=layout, topology=topology, filler=filler)
    np.testing.assert_array_equal(counts.pairs, exact.pairs)
    np.testing.assert_array_equal(counts.tokens, exact.tokens)


@given(case=cases(), filler=st.sampled_from(Filler))
@settings(deadline=None, max_examples=60)
def test_counts_cut_by_slices_keep_every_sum_and_stay_near_their_share(case: Case, filler: Filler) -> None:
    exact = reduce_load([case.trace], layout=case.layout, topology=case.topology)
    counts = reduce_load([counts_only(case.trace)], layout=case.layout, topology=case.topology)
    # summed over the source ranks of a DP rank nothing is lost; several groups share the cut, so sum over both
    np.testing.assert_array_equal(counts.pairs.sum(axis=(0, 3)), exact.pairs.sum(axis=(0, 3)))
    np.testing.assert_array_equal(counts.tokens.sum(axis=(0, 2)), exact.tokens.sum(axis=(0, 2)))
    full = reduce_load([counts_only(case.trace)], layout=case.layout, topology=case.topology, filler=filler)
    if filler is not Filler.NONE:
        assert full.tokens.sum() == case.trace.num_tokens
    per_row = 1 if filler is Filler.EXPERT_ZERO else case.trace.top_k
    extra = full.pairs.sum(axis=(0, 1, 3, 4)) - counts.pairs.sum(axis=(0, 1, 3, 4))
    assert (extra == (full.tokens.sum() - counts.tokens.sum()) * per_row).all()


def test_one_sequence_of_counts_is_cut_by_share_within_half_a_pair() -> None:
    lengths = np.array([10])
    trace = make_trace(np.random.default_rng(0), lengths, num_layers=2, num_experts=8, top_k=3)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, slices_per_dp_rank=4, ranks_per_node=4)
    layout = BatchLayout.ep_group(lengths, token_budget=10)
    counts = counts_only(trace)
    load = reduce_load([counts], layout=layout, topology=topology)
    rows = np.array([3, 2, 3, 2])  # slice s begins at ceil(s * 10 / 4)
    share = counts.tokens_per_expert[0][:, None, :] * rows[None, :, None] / 10
    # what the first ranks have together is rounded to the nearest pair
    assert np.abs(np.cumsum(load.pairs[0, 0] - share, axis=1)).max() <= 0.5 + 1e-9
    assert load.tokens[0, 0].sum() == 10


@pytest.mark.usefixtures("counted_by")
def test_the_lowest_row_with_an_id_out_of_range_is_named() -> None:
    lengths = np.array([30, 30])
    trace = make_trace(np.random.default_rng(0), lengths, num_layers=2, num_experts=8, top_k=3)
    routes = trace.routed_experts.copy()
    routes[50, 0, 2] = 8
    routes[41, 1, 0] = 200
    trace = replace(trace, routed_experts=routes)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=2, slices_per_dp_rank=2, ranks_per_node=2)
    layout = BatchLayout.ep_group(lengths, token_budget=40)
    with pytest.raises(
        InvalidInputError, match=r"token 41 of part 0 has expert id 200 in MoE layer 3, but expert ids must be 0 to 7"
    ):
        reduce_load([trace], layout=layout, topology=topology)
    masked = trace.valid.copy()
    masked[[41, 50]] = False
    assert reduce_load([replace(trace, valid=masked)], layout=layout, topology=topology).tokens.sum() == 58


@pytest.mark.usefixtures("counted_by")
def test_slime_counts_its_padding_anew_in_every_sequence() -> None:
    lengths = np.array([3, 3])
    trace = make_trace(np.random.default_rng(0), lengths, num_layers=1, num_experts=100, top_k=2)
    trace = replace(trace, valid=np.array([True, False, False, False, True, False]), moe_layer_ids=(0,))
    topology = ClusterTopology(hardware=HARDWARE, ep_size=1, ranks_per_node=1)
    layout = BatchLayout.ep_group(lengths, token_budget=10)
    load, routed = (
        reduce_load([trace], layout=layout, topology=topology, filler=filler) for filler in ("round_robin", "none")
    )
    padding = load.pairs.ravel() - routed.pairs.ravel()
    # runs of 2, 1 and 1 rows: 0 1 2 3, then 0 1, then 0 1
    assert padding[:5].tolist() == [3, 3, 1, 1, 0]
    assert padding.sum() == 8


@pytest.mark.usefixtures("counted_by")
def test_more_layers_times_experts_than_two_bytes_hold() -> None:
    routes = np.array([[[0, 39_999], [1, 30_000], [7, 39_998]]] * 3, np.uint16)
    trace = RoutingTrace.from_sequences([routes], num_experts=40_000)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=1, ranks_per_node=1)
    layout = BatchLayout.ep_group(np.array([3]), token_budget=3)
    load = reduce_load([trace], layout=layout, topology=topology)
    layer, expert = np.nonzero(load.pairs[0, 0, :, 0])
    assert list(zip(layer, expert, strict=True)) == [(0, 0), (0, 39_999), (1, 1), (1, 30_000), (2, 7), (2, 39_998)]
    assert load.pairs.max() == 3


def test_parts_that_do_not_fit_are_refused() -> None:
    rng = np.random.default_rng(0)
    lengths = np.array([3, 4])
    trace = make_trace(rng, lengths, num_layers=2, num_experts=8, top_k=3)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=2, ranks_per_node=2)
    layout = BatchLayout.in_order(lengths, num_dp_ranks=2, token_budget=10)
    nothing = BatchLayout.in_order(lengths[:0], num_dp_ranks=2, token_budget=10)
    with pytest.raises(InvalidInputError, match="there is no trace to count"):
        reduce_load([], layout=nothing, topology=topology)
    with pytest.raises(InvalidInputError, match="the batch layout has 2 sequences, but the trace has 4"):
        reduce_load([trace, trace], layout=layout, topology=topology)
    with pytest.raises(InvalidInputError, match="2 data-parallel ranks, but the topology has 4"):
        reduce_load([trace], layout=layout, topology=replace(topology, ep_size=4, ranks_per_node=4))
    other = make_trace(rng, lengths, num_layers=1, num_experts=8, top_k=3)
    with pytest.raises(InvalidInputError, match="all parts of a step must have the same"):
        reduce_load([trace.select(np.array([0])), other.select(np.array([1]))], layout=layout, topology=topology)
    with pytest.raises(InvalidInputError, match="the kind of filler tokens 'zeros' is unknown"):
        reduce_load([trace], layout=layout, topology=topology, filler="zeros")


@pytest.mark.usefixtures("counted_by")
@pytest.mark.parametrize("num_tokens", [0, 1])
def test_nothing_and_next_to_nothing(num_tokens: int) -> None:
    lengths = np.array([num_tokens])
    trace = make_trace(np.random.default_rng(0), lengths, num_layers=2, num_experts=4, top_k=4)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, slices_per_dp_rank=4, ranks_per_node=4)
    layout = BatchLayout.ep_group(lengths, token_budget=10)
    load = reduce_load([trace], layout=layout, topology=topology)
    assert load.pairs.shape == (1, 1, 2, 4, 4)
    assert (load.pairs[0, 0, :, 0] == num_tokens).all()
    assert load.pairs.sum() == num_tokens * 2 * 4


@pytest.mark.usefixtures("counted_by")
def test_all_tokens_to_one_expert_do_not_overflow_a_narrow_counter() -> None:
    lengths = np.array([70_000])
    trace = make_trace(np.random.default_rng(0), np.array([0]), num_layers=1, num_experts=4, top_k=2)
    routes = np.zeros((70_000, 1, 2), np.uint8)
    trace = replace(trace, routed_experts=routes, valid=np.ones(70_000, np.bool_), cu_seqlens=np.array([0, 70_000]))
    topology = ClusterTopology(hardware=HARDWARE, ep_size=1, ranks_per_node=1)
    layout = BatchLayout.ep_group(lengths, token_budget=70_000)
    load = reduce_load([trace], layout=layout, topology=topology)
    assert load.pairs.ravel().tolist() == [140_000, 0, 0, 0]


@pytest.mark.usefixtures("counted_by")
def test_a_memory_mapped_trace_reduces_the_same_and_leaves_no_pages_behind(tmp_path: Path) -> None:
    lengths = np.full(40, 1000)
    trace = make_trace(np.random.default_rng(0), lengths, num_layers=4, num_experts=16, top_k=4)
    path = tmp_path / "routes"
    trace.routed_experts.tofile(path)
    mapped = np.memmap(path, np.uint8, "r", shape=trace.routed_experts.shape)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=2, slices_per_dp_rank=2, ranks_per_node=2)
    layout = BatchLayout.ep_group(lengths, token_budget=4000)
    expected = reduce_load([trace], layout=layout, topology=topology)
    load = reduce_load([replace(trace, routed_experts=mapped)], layout=layout, topology=topology)
    np.testing.assert_array_equal(load.pairs, expected.pairs)
    assert resident_kib(path) <= 64  # 640 KiB were read


def resident_kib(path: Path) -> int:
    """Resident KiB of this process's mappings of a file."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def test_dropping_pages_loses_no_value(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    values = np.arange(40_000, dtype=np.uint8)
    values.tofile(path)
    for mode in ("r", "r+", "c"):
        mapped = np.memmap(path, np.uint8, mode)
        if mode != "r":
            mapped[20_000] = 77
        drop_pages(mapped[100:39_000])
        expected = values.copy()
        expected[20_000] = values[20_000] if mode == "r" else 77
        np.testing.assert_array_equal(mapped, expected)
        del mapped
        values.tofile(path)
    anonymous = mmap.mmap(-1, 40_000)
    array = np.frombuffer(anonymous, np.uint8)
    array[:] = 5
    drop_pages(array)
    assert (array == 5).all()
    drop_pages(np.zeros(100_000))


def test_loads_that_no_memory_holds_are_refused_by_their_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.array([6, 4], np.int64)
    trace = make_trace(np.random.default_rng(0), lengths, num_layers=3, num_experts=8, top_k=2)
    layout = BatchLayout.recorded(np.array([0, 1]), np.array([0, 0]), num_dp_ranks=1)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, slices_per_dp_rank=4)
    size = reduce_load([trace], layout=layout, topology=topology).pairs.nbytes
    assert size == reduce_module.load_bytes(1, 2, 3, 4, 8)
    monkeypatch.setattr(reduce_module, "MAX_LOAD_BYTES", size - 1)
    with pytest.raises(
        InvalidInputError, match="1 EP groups x 2 micro-batches x 3 MoE layers x 4 EP ranks x 8 experts"
    ):
        reduce_load([trace], layout=layout, topology=topology)
    monkeypatch.setattr(reduce_module, "MAX_LOAD_BYTES", size)
    reduce_load([trace], layout=layout, topology=topology)
