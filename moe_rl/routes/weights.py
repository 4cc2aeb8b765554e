"""Combine weights beside routes: the float32 factor of every chosen expert, kept bit by bit.

A block of weights holds what a block of ids holds: up to 1024 rows of one layer, in the order of its ids. Its bytes are
split into four planes (all lowest bytes, ..., all highest), of which zlib makes something where it can: weights between
0 and 1 share most of their exponents, and those that were bfloat16 have two planes of zeros.
"""

import struct
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, require

# Bytes of the four planes, lowest byte first; a plane as long as the weights are many is not compressed.
PLANES = struct.Struct("<4I")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightColumn:
    """The combine weights of a chunk."""

    size: NDArray[np.uint32]
    """[L, blocks] bytes of every block."""
    crc: NDArray[np.uint32]
    """[L, blocks] its checksum."""
    body: NDArray[np.uint8]
    num_rows: int
    top_k: int
    block_rows: int

    def read(self, layer: int, block: int) -> NDArray[np.float32]:
        """Return the weights [n, K] of a block; raise in one sentence if they are damaged."""
        sizes_before = self.size.reshape(-1)[: layer * self.size.shape[1] + block]
        first_byte, size = int(sizes_before.sum(dtype=np.int64)), int(self.size[layer, block])
        data = self.body[first_byte : first_byte + size].tobytes()
        damaged = InvalidInputError(f"the combine weights of block {block} are corrupt.")
        if len(data) < PLANES.size or zlib.crc32(data) != self.crc[layer, block]:
            raise damaged
        count = min(self.block_rows, self.num_rows - block * self.block_rows) * self.top_k
        sizes = PLANES.unpack_from(data)
        planes, plane_start = np.empty((4, count), np.uint8), PLANES.size
        for place, plane_size in enumerate(sizes):
            plane = data[plane_start : plane_start + plane_size]
            if plane_size != count:
                # At most `count` bytes and one more: a small bomb cannot take gigabytes.
                plane = _inflated(plane, count)
            if len(plane) != count:
                raise damaged
            planes[place] = np.frombuffer(plane, np.uint8)
            plane_start += plane_size
        if plane_start != len(data):
            raise damaged
        return np.ascontiguousarray(planes.T).view("<f4").reshape(-1, self.top_k)


def _inflated(plane: bytes, count: int) -> bytes:
    reader = zlib.decompressobj()
    try:
        return reader.decompress(plane, count + 1)
    except zlib.error:
        return b""


def encode_weights(weights: NDArray[np.float32], block_rows: int) -> WeightColumn:
    """Return the column of weights [N, L, K]."""
    rows, layers, top_k = weights.shape
    blocks = -(-rows // block_rows)
    parts = [
        _block_of(weights[block * block_rows : (block + 1) * block_rows, layer])
        for layer in range(layers)
        for block in range(blocks)
    ]
    return WeightColumn(
        size=np.array([len(part) for part in parts], "<u4").reshape(layers, blocks),
        crc=np.array([zlib.crc32(part) for part in parts], "<u4").reshape(layers, blocks),
        body=np.frombuffer(b"".join(parts), np.uint8),
        num_rows=rows,
        top_k=top_k,
        block_rows=block_rows,
    )


def _block_of(weights: NDArray[np.float32]) -> bytes:
    planes = np.ascontiguousarray(weights, "<f4").view(np.uint8).reshape(-1, 4).T
    stored_planes = []
    for plane in planes:
        plane_bytes = plane.tobytes()
        compressed = zlib.compress(plane_bytes, 1)
        stored_planes.append(compressed if len(compressed) < len(plane_bytes) else plane_bytes)
    return PLANES.pack(*map(len, stored_planes)) + b"".join(stored_planes)


def in_order_of(ids: NDArray[np.integer], weights: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return `weights` [T, L, K] as they stand when every row of `ids` ascends.

    Example: experts 7, 2 with weights .9, .1 become experts 2, 7 with .1, .9.
    """
    order = np.argsort(ids, axis=-1, kind="stable")
    return np.take_along_axis(np.asarray(weights, np.float32), order, axis=-1)


def split_packed(packed: NDArray[np.integer]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return (ids, combine weights), both [T, L, K], of prime-rl's packed routes: int32 [T, L, 2K].

    A row holds K expert ids, then the bits of their K float32 weights (PrimeIntellect-ai/prime-rl#3523). Raises
    `InvalidInputError` where the second half is not of such weights (`are_packed`).
    """
    words = np.asarray(packed)
    require(
        words.dtype == np.int32 and words.ndim == 3 and words.shape[2] % 2 == 0,
        f"packed routes must be int32 of shape [tokens, layers, 2 x top-k], got {words.dtype} {list(words.shape)}.",
    )
    top_k = words.shape[2] // 2
    sound = are_packed(words)
    require(
        sound,
        "the second half of packed routes must contain combine weights (float32 bit patterns stored as "
        "int32) that are finite and not negative.",
    )
    return np.ascontiguousarray(words[:, :, :top_k]), np.ascontiguousarray(words[:, :, top_k:]).view(np.float32)


def are_packed(words: NDArray[np.integer]) -> bool:
    """Return whether int32 [T, L, 2K] are ids and weights, and not ids alone.

    Bits of an id, a small integer, are a float below 1e-37; weights are 0, or normal numbers that are finite.
    """
    if words.dtype != np.int32 or words.shape[-1] % 2:
        return False
    weights = np.ascontiguousarray(words[..., words.shape[-1] // 2 :]).view(np.float32)
    normal = np.isfinite(weights) & (weights >= np.finfo(np.float32).tiny)
    return bool((normal | (weights == 0)).all() and (normal.any() or not words.any()))
