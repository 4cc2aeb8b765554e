"""Coded routes stand where arrays stood: in traces, in counts, in plans' samples, in pickles."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from strategies import HARDWARE

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.layout import BatchLayout
from moe_rl.core.reduce import Filler, read_load
from moe_rl.core.topology import ClusterTopology
from moe_rl.core.trace import RoutingTrace
from moe_rl.replay import Manifest, TraceReader, TraceWriter, convert_trace, count_sequences, open_source, write_trace
from moe_rl.replay.manifest import CODED_SCHEMA
from moe_rl.routes.coded import CodedRoutes

EXPERTS, LAYERS, TOP_K = 32, 3, 4


def drawn(rng, rows):
    return np.argsort(rng.random((rows, LAYERS, EXPERTS)), axis=2)[:, :, :TOP_K].astype(np.uint8)


def trace_of(rng, lengths=(700, 1, 9000, 40), **columns):
    ids = [drawn(rng, rows) for rows in lengths]
    valid = [np.arange(rows) < rows - (rows > 1) for rows in lengths]
    return RoutingTrace.from_sequences(ids, num_experts=EXPERTS, valid=valid, provenance="R3", **columns)


def ascending(trace):
    return np.sort(trace.routed_experts, axis=2)


def stored(path, trace, **options):
    shape = {"num_experts": EXPERTS, "moe_layer_ids": range(LAYERS), "top_k": TOP_K}
    return write_trace([trace], path, **shape, **options)


def test_slices_rows_and_pickles_are_those_of_the_array():
    rng = np.random.default_rng(1)
    ids = np.sort(drawn(rng, 20_000), axis=2)
    ids[[5, 19_999]] = 0
    coded = CodedRoutes.of(ids, num_experts=EXPERTS)
    assert (coded.shape, coded.dtype, coded.ndim, len(coded)) == (ids.shape, ids.dtype, 3, 20_000)
    some = rng.integers(0, 20_000, 50)
    for index in (slice(None), slice(7000, 9000), slice(-3, None), some, ids[:, 0, 0] > 20, 17, (slice(0, 9), 1)):
        np.testing.assert_array_equal(coded[index], ids[index])
    np.testing.assert_array_equal(np.asarray(pickle.loads(pickle.dumps(coded))), ids)
    assert len(pickle.dumps(coded)) < 0.6 * ids.nbytes
    empty = CodedRoutes.of(ids[:0], num_experts=EXPERTS)
    assert empty.shape == (0, LAYERS, TOP_K)
    assert np.asarray(empty).shape == (0, LAYERS, TOP_K)


def test_rows_that_were_not_captured_are_known():
    ids = drawn(np.random.default_rng(2), 30).astype(np.int16)
    ids[4:6] = -1
    ids[-1] = 0
    coded = CodedRoutes.of(ids, num_experts=EXPERTS)
    assert np.flatnonzero(coded.missing).tolist() == [4, 5]
    assert not coded[4:6].any()
    assert not coded[29:].any()


def test_a_coded_trace_counts_plans_and_reads_as_the_plain_one(tmp_path):
    rng = np.random.default_rng(3)
    trace = trace_of(rng, step=np.array([0, 0, 1, 1]))
    plain, coded = stored(tmp_path / "plain.moetrace", trace), stored(tmp_path / "coded.moetrace", trace, coded=True)
    assert coded.manifest.coded
    assert sum(s.size_bytes for s in coded.manifest.shards) < 0.75 * sum(s.size_bytes for s in plain.manifest.shards)
    coded.validate()
    np.testing.assert_array_equal(ascending(coded.load()), ascending(plain.load()))
    topology = ClusterTopology(hardware=HARDWARE, ep_size=4, ranks_per_node=2)
    for step in coded.steps:
        parts = list(plain.parts(step)), list(coded.parts(step))
        layout = BatchLayout.in_order(parts[0][0].sequence_lengths, num_dp_ranks=4, token_budget=10_000)
        one, other = (read_load(p, layout=layout, topology=topology, filler=Filler.ROUND_ROBIN) for p in parts)
        np.testing.assert_array_equal(one.pairs, other.pairs)
        np.testing.assert_array_equal(np.sort(one.routes.routes, axis=2), np.sort(other.routes.routes, axis=2))
        counts = [count_sequences(p[0]).tokens_per_expert for p in parts]
        np.testing.assert_array_equal(*counts)


def test_router_logprobs_go_with_their_experts(tmp_path):
    rng = np.random.default_rng(4)
    trace = trace_of(rng, (50,))
    trace = replace(trace, router_logprobs=trace.routed_experts.astype(np.float16))
    read = stored(tmp_path / "t.moetrace", trace, coded=True).load()
    rows = read.valid
    np.testing.assert_array_equal(read.router_logprobs[rows], read.routed_experts[:][rows])


def test_old_traces_open_convert_and_go_on_in_their_form(tmp_path):
    from moe_rl.config import CONFIGS

    old = open_source(next((CONFIGS / "traces").glob("*.moetrace")))  # written by the first version of the format
    assert not old.manifest.coded
    step = old.steps[0]
    coded = convert_trace(old, tmp_path / "coded.moetrace", steps=[step], coded=True)
    np.testing.assert_array_equal(ascending(coded.load()), ascending(old.load(step)))
    back = convert_trace(open_source(coded.path), tmp_path / "plain.moetrace")
    assert not back.manifest.coded
    np.testing.assert_array_equal(back.load().routed_experts, ascending(old.load(step)))
    manifest = coded.manifest
    shape = {name: getattr(manifest, name) for name in ("num_experts", "top_k", "moe_layer_ids")}
    with TraceWriter(coded.path, **shape, append=True) as writer:
        writer.append(coded.load())
    assert TraceReader(coded.path).load().num_sequences == 2 * old.load(step).num_sequences
    assert CODED_SCHEMA in (coded.path / "manifest.json").read_text()


def test_damage_and_foreign_shapes_are_one_sentence(tmp_path):
    rng = np.random.default_rng(5)
    reader = stored(tmp_path / "t.moetrace", trace_of(rng), coded=True)
    shard = reader.path / reader.manifest.shards[0].file
    good = shard.read_bytes()
    shard.write_bytes(good[:-50] + bytes([good[-50] ^ 1]) + good[-49:])
    with pytest.raises(InvalidInputError, match="checksum"):
        TraceReader(reader.path).load()
    shard.write_bytes(good)
    other = replace(reader.manifest, num_experts=64)
    other.write(reader.path)
    with pytest.raises(InvalidInputError, match="the number of experts in the routes differs"):
        TraceReader(reader.path).load()
    with pytest.raises(InvalidInputError, match="experts must be 1 to"):
        TraceWriter(tmp_path / "big.moetrace", num_experts=5000, moe_layer_ids=[0], top_k=2, coded=True)
    assert Manifest.read(reader.path).coded
