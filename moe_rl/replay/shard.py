"""One shard: a `RoutingTrace` or `SequenceCounts` of one step as a file of arrays, and back without a copy.

T tokens, S sequences, L MoE layers, K experts per token, E experts. A shard of routes has routed_experts u8 or u16
[T, L, K], valid [T], cu_seqlens [S + 1] and the per-sequence columns, optionally policy_version [T] and
router_logprobs f16 [T, L, K]; a shard of counts has tokens_per_expert u32 [S, L, E], num_tokens and num_valid_tokens
[S] and the per-sequence columns. In a coded trace routed_experts is u8 [bytes], a stream of `moe_rl.routes`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, located, require
from moe_rl.core.mappings import subset
from moe_rl.core.pages import drop_pages
from moe_rl.core.trace import SEQUENCE_FIELDS, RoutingTrace, SequenceCounts, route_dtype
from moe_rl.replay.array_file import CorruptFileError, file_crc32, map_arrays, read_header, write_arrays
from moe_rl.replay.manifest import CODED_SCHEMA, OPTIONAL_COLUMNS, SCHEMA, Manifest, ShardRecord
from moe_rl.replay.sequences import Trace
from moe_rl.routes.coded import CodedRoutes

# dtype and shape of every array of a shard.
Layout = dict[str, tuple[Any, tuple[int, ...]]]


def expected_arrays(manifest: Manifest, *, num_tokens: int, num_sequences: int) -> Layout:
    """Return what the arrays of a shard with so many rows and sequences must be."""
    layout: Layout = {name: (dtype, (num_sequences,)) for name, dtype in SEQUENCE_FIELDS.items()}
    if manifest.counts_only:
        layout["tokens_per_expert"] = (np.uint32, (num_sequences, manifest.num_layers, manifest.num_experts))
        return layout | dict.fromkeys(("num_tokens", "num_valid_tokens"), (np.int64, (num_sequences,)))
    routes_shape = (num_tokens, manifest.num_layers, manifest.top_k)
    layout["routed_experts"] = (np.uint8, ()) if manifest.coded else (route_dtype(manifest.num_experts), routes_shape)
    layout["valid"] = (np.bool_, (num_tokens,))
    layout["cu_seqlens"] = (np.int64, (num_sequences + 1,))
    optional: Layout = {"policy_version": (np.int32, (num_tokens,)), "router_logprobs": (np.float16, routes_shape)}
    return layout | subset(optional, manifest.optional_columns)


def write_shard(path: Path, trace: Trace, manifest: Manifest) -> tuple[int, int]:
    """Write the trace, which `manifest` describes, to `path`; return (size in bytes, CRC-32)."""
    num_tokens = int(trace.sequence_lengths.sum())
    expected = expected_arrays(manifest, num_tokens=num_tokens, num_sequences=trace.num_sequences)
    if manifest.coded and isinstance(trace, RoutingTrace):
        trace, coded = _coded(trace)
        return write_arrays(path, _arrays(trace, expected) | {"routed_experts": coded.data}, {"schema": CODED_SCHEMA})
    return write_arrays(path, _arrays(trace, expected), {"schema": SCHEMA})


def _arrays(trace: Trace, expected: Layout) -> dict[str, NDArray[Any]]:
    return {name: getattr(trace, name).astype(dtype, copy=False) for name, (dtype, _) in expected.items()}


def _coded(trace: RoutingTrace) -> tuple[RoutingTrace, CodedRoutes]:
    """Return the trace's routes coded, and the trace with log-probabilities in the order of ascending ids."""
    coded = CodedRoutes.of(trace.routed_experts, num_experts=trace.num_experts, valid=trace.valid)
    if trace.router_logprobs is None:
        return trace, coded
    # A coded row is a set with ascending ids; its log-probabilities must follow them.
    order = np.argsort(trace.routed_experts, axis=2, kind="stable")
    return replace(trace, router_logprobs=np.take_along_axis(trace.router_logprobs, order, axis=2)), coded


def check_shard_file(path: Path, manifest: Manifest, shard: ShardRecord) -> None:
    """Raise unless the file is there, has its size and declares the right arrays; no array is read."""
    try:
        size = path.stat().st_size
        require(size == shard.size_bytes, f"{path} is truncated or damaged: it has {size} of {shard.size_bytes} bytes.")
        header = {name: (spec.dtype, spec.shape) for name, spec in read_header(path).items()}
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}.") from error
    except CorruptFileError as error:
        raise InvalidInputError(f"{path} is corrupt: {error}.") from error
    expected = expected_arrays(manifest, num_tokens=shard.num_tokens, num_sequences=shard.num_sequences)
    if manifest.coded and len(header.get("routed_experts", (0, ()))[1]) == 1:
        expected["routed_experts"] = (np.dtype(np.uint8), header["routed_experts"][1])  # of any number of bytes
    require(header == expected, f"{path} is corrupt: its arrays do not match the manifest.")


def check_shard_bytes(path: Path, shard: ShardRecord) -> None:
    """Raise where a byte of the file has changed since it was written."""
    require(f"{file_crc32(path):08x}" == shard.crc32, f"{path} is corrupt: its checksum does not match the manifest.")


def map_shard(path: Path, manifest: Manifest, shard: ShardRecord) -> Trace:
    """Return the shard as views of the mapped file; raise where it contradicts itself or the manifest."""
    arrays: dict[str, Any] = map_arrays(path)
    shared: dict[str, Any] = {
        "model": manifest.model,
        "provenance": manifest.provenance,
        "moe_layer_ids": manifest.moe_layer_ids,
    }
    with located(path):
        if manifest.counts_only:
            trace: Trace = SequenceCounts(**arrays, **shared, top_k=manifest.top_k)
        else:
            if manifest.coded:
                arrays["routed_experts"] = CodedRoutes(arrays["routed_experts"])
                fits = arrays["routed_experts"].num_experts == manifest.num_experts
                require(fits, "the number of experts in the routes differs from that in the manifest.")
            trace = RoutingTrace(**arrays, **shared, num_experts=manifest.num_experts)
            if not manifest.coded:  # else they are checked as they are decoded
                _check_ids(trace)
    require(bool((trace.step == shard.step).all()), f"{path} also contains sequences of steps other than {shard.step}.")
    total = int(trace.sequence_lengths.sum())
    require(total == shard.num_tokens, f"{path} has {total} tokens, but its manifest says {shard.num_tokens}.")
    return trace


def optional_columns(trace: Trace) -> tuple[str, ...]:
    """Return the names of the optional columns that the trace has."""
    return tuple(name for name in OPTIONAL_COLUMNS if getattr(trace, name, None) is not None)


def _check_ids(trace: RoutingTrace) -> None:
    """Raise for an id that the dtype can hold but the model does not have: a write by other hands."""
    # A byte of 2 is neither True nor False to numpy: `~` and sums would go wrong silently.
    flags: NDArray[np.uint8] = trace.valid.view(np.uint8)
    require(not flags.size or int(flags.max()) <= 1, "the array `valid` contains values other than true and false.")
    if trace.num_experts == int(np.iinfo(trace.routed_experts.dtype).max) + 1:
        return
    for start, ids in trace.chunks():
        if ids.size and int(ids.max()) >= trace.num_experts:
            outside = (ids >= trace.num_experts).any(axis=(1, 2)) & trace.valid[start : start + len(ids)]
            require(
                not outside.any(),
                f"token {start + int(np.argmax(outside))} has an expert id outside 0 to {trace.num_experts - 1}.",
            )
        drop_pages(ids)
