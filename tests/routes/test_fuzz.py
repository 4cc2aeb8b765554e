"""Damaged streams: one sentence or whole sets, never a crash, an id out of range, or anything else that is raised.

2,000 streams run by default; the slow test runs as many as the variable FUZZ_CASES says: a million in `make fuzz`,
and with sanitizers by `FUZZ_CASES=1000000 sh tests/native/sanitize.sh -m slow tests/routes/test_fuzz.py`. Most get
their checksums repaired, so that the damage reaches tables and decoder. A failure names the seed of its batch, and
`check_batch(seed)` repeats it.
"""

import io
import os
import zlib
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from moe_rl.core.errors import InvalidInputError
from moe_rl.routes import RoutesReader, RoutesWriter
from moe_rl.routes.chunk import HEADER, PIECE, RUN
from tests.routes import plain_codec

FEW = 2_000
MANY = int(os.environ.get("FUZZ_CASES", "100000"))
BATCH = 500
SHAPES = ((4, 1, 2, 40), (32, 4, 2, 60), (128, 8, 1, 30), (512, 10, 1, 20), (32, 4, 1, 4200), (60, 4, 1, 4100))
LEARNED = 4096


@dataclass(frozen=True)
class Stream:
    """A good stream of one chunk, and where its checksums stand: (place of the checksum, first and last byte)."""

    data: bytes
    parts: tuple[tuple[int, int, int], ...]
    body: int


def good_stream(rng: np.random.Generator, shape: tuple[int, int, int, int]) -> Stream:
    """Several sequences, with gaps, versions, a shared prompt and a later turn."""
    experts, top_k, layers, rows = shape
    scores = rng.gumbel(size=(rows, layers, experts)) - 2 * np.log1p(np.arange(experts))
    ids = np.argsort(-scores, axis=2)[:, :, :top_k]
    sink = io.BytesIO()
    with RoutesWriter(sink, num_experts=experts, top_k=top_k, layer_ids=range(layers)) as writer:
        half = rows // 2
        writer.add(5, ids, group=1, valid=rng.random(rows) > 0.1 * (rows < LEARNED))
        writer.add(6, ids[:half], group=1)
        writer.add(6, ids[half : 2 * half], start=half, policy_version=3)
    data = sink.getvalue()
    *_, pieces, gaps, versions, stored, _, _ = HEADER.unpack(data[: HEADER.size])
    (chunk,) = RoutesReader(data)._chunks
    tables, begin = chunk.tables, HEADER.size + stored
    at = HEADER.size + pieces * PIECE.itemsize + (gaps + versions) * RUN.itemsize + 4 * layers
    parts, book = [], 0
    for layer in range(layers):
        row = at + 4 * layer * tables.crc.shape[1]
        for block, (start, size) in enumerate(
            zip(chunk.start[layer].tolist(), tables.size[layer].tolist(), strict=True)
        ):
            parts.append((row + 4 * block, begin + start, begin + start + size))
        size = int(tables.book_size[layer])
        parts.append((row + 4 * (tables.crc.shape[1] - 1), begin + book, begin + book + size))
        book += size
    return Stream(data, tuple(parts), begin)


@cache
def good_streams() -> list[Stream]:
    rng = np.random.default_rng(1)
    # One in twelve is long enough to have a codebook.
    return [good_stream(rng, SHAPES[number % 4 if number % 6 else 4 + number // 6 % 2]) for number in range(24)]


def repaired(stream: Stream, data: bytearray) -> bytes:
    for place, start, stop in stream.parts:
        data[place : place + 4] = zlib.crc32(data[start:stop]).to_bytes(4, "little")
    crc = zlib.crc32(data[HEADER.size : stream.body], zlib.crc32(data[: HEADER.size - 4] + bytes(4)))
    data[HEADER.size - 4 : HEADER.size] = crc.to_bytes(4, "little")
    return bytes(data)


def damaged(rng: np.random.Generator, stream: Stream) -> bytes:
    data = bytearray(stream.data)
    kind = rng.integers(0, 10)
    if kind == 0:
        return bytes(data[: rng.integers(0, len(data))])
    if kind == 1:
        return bytes(data) + rng.bytes(int(rng.integers(1, 80)))
    if kind == 2:
        return rng.bytes(int(rng.integers(0, 300)))
    first, last = (
        (8, HEADER.size) if kind == 3 else (HEADER.size, stream.body) if kind == 4 else (stream.body, len(data))
    )
    for _ in range(int(rng.integers(1, 5))):
        place = int(rng.integers(first, last))
        size = min(int(rng.choice([1, 1, 2, 4, 8, 60])), last - place)
        change = rng.integers(0, 4)
        if change == 0:
            data[place] ^= 1 << int(rng.integers(0, 8))
        elif change == 1:
            data[place : place + size] = rng.bytes(size)
        else:
            data[place : place + size] = (b"\0" if change == 2 else b"\xff") * size
    return bytes(data) if rng.random() < 0.1 else repaired(stream, data)


def check_read(data: bytes) -> bool:
    """Read everything that a stream offers; return whether it could be read."""
    try:
        reader = RoutesReader(data)
        for key in reader.keys:
            length = reader.length(key)
            if length > 1 << 20:
                continue  # a gap that fits its tables: rows that cost no bytes
            ids, valid = reader.ids(key), reader.valid(key)
            assert ids.shape == (length, len(reader.layer_ids), reader.top_k)
            assert len(valid) == len(reader.policy_version(key)) == length
            assert not ids.size or int(ids.max()) < reader.num_experts
            assert bool((ids[:, :, 1:] >= ids[:, :, :-1]).all())
    except InvalidInputError as error:
        sentence = str(error)
        assert sentence.endswith("."), sentence
        assert "\n" not in sentence
        return False
    return True


def check_batch(seed: int, streams: int = BATCH) -> int:
    """Return how many of a batch could be read."""
    rng = np.random.default_rng(seed)
    good, read = good_streams(), 0
    for _ in range(streams):
        data = damaged(rng, good[int(rng.integers(len(good)))])
        try:
            read += check_read(data)
        except Exception as error:
            raise AssertionError(f"batch of seed {seed}: {error!r}") from error
    return read


def test_damaged_streams_are_one_sentence_or_whole_sets():
    read = sum(check_batch(seed) for seed in range(FEW // BATCH))
    assert 0.02 * FEW < read < 0.9 * FEW  # damage reaches the decoder, and most of it is found


def test_the_plain_decoder_finds_the_same_damage(monkeypatch):
    rng = np.random.default_rng(99)
    short = [stream for stream in good_streams() if len(stream.data) < 4000]
    for _ in range(60):
        data = damaged(rng, short[int(rng.integers(len(short)))])
        with monkeypatch.context() as patch:
            plain_codec.used(patch)
            plain = check_read(data)
        assert check_read(data) == plain


@pytest.mark.slow
def test_many_damaged_streams():
    for seed in range(1000, 1000 + MANY // BATCH):
        check_batch(seed)
