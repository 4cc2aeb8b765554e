"""Files of named arrays in the safetensors layout: written in one pass, read through memory maps, sizes never trusted.

Layout: 8 bytes little-endian header length, a JSON header of dtype, shape and byte range per array, then the bytes
(huggingface/safetensors:README.md, "Format"). `safetensors.numpy.load_file` reads what `write_arrays` writes.
"""

import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError

DTYPES: dict[str, type[np.generic]] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "U16": np.uint16,
    "F16": np.float16,
    "I32": np.int32,
    "U32": np.uint32,
    "I64": np.int64,
}
NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}
MAX_HEADER_BYTES = 1 << 20
# Bytes that are checked at a time: the check of a shard needs no memory of its size.
READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """The place of one array in the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the start of the file."""
    stop: int


class CorruptFileError(InvalidInputError):
    """The file is not a whole file of arrays; the message says what is wrong, without the file's name."""


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> tuple[int, int]:
    """Write the arrays to `path`, flush them to disk and return (size in bytes, CRC-32 of the whole file)."""
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))  # keeps every array aligned
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name in names:
        array = arrays[name]
        header[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [position, position + array.nbytes],
        }
        position += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    # Blanks behind the header: the data starts at a multiple of 8, as safetensors has it.
    text += b" " * (-len(text) % 8)
    size, crc = 0, 0
    with path.open("wb") as file:
        head = memoryview(len(text).to_bytes(8, "little") + text)
        for view in (head, *(_as_bytes(arrays[name]) for name in names)):
            file.write(view)
            crc = zlib.crc32(view, crc)
            size += len(view)
        file.flush()
        # On disk before the manifest names it: a shard that is named is whole, also after a power cut.
        os.fsync(file.fileno())
    return size, crc


def read_header(path: Path) -> dict[str, ArraySpec]:
    """Return where every array of the file stands; raise `CorruptFileError` unless they fill the file exactly."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        # A length from a damaged file must not make Python read gigabytes.
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CorruptFileError("the file is shorter than its header says")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise CorruptFileError("its header is not JSON") from error
    if not isinstance(header, dict):
        raise CorruptFileError("its header is not a JSON object")
    header.pop("__metadata__", None)
    specs = {name: _spec(name, entry, 8 + length) for name, entry in header.items()}
    position = 8 + length
    for spec in sorted(specs.values(), key=lambda spec: (spec.start, spec.stop)):
        # No array may reach into another, and no byte may belong to none.
        if spec.start != position:
            raise CorruptFileError("its arrays overlap or leave bytes unused")
        position = spec.stop
    if position != size:
        raise CorruptFileError(f"it has {size} bytes, but its header describes {position}")
    return specs


def map_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Return read-only views of every array of the file; pages are read when they are touched."""
    specs = read_header(path)
    # One mapping per shard, read-only: pages are shared by all processes that read the trace.
    file_bytes = np.asarray(np.memmap(path, np.uint8, mode="r"))
    arrays = {}
    for name, spec in specs.items():
        values = file_bytes[spec.start : spec.stop].view(spec.dtype)
        arrays[name] = values.reshape(spec.shape)
    return arrays


def file_crc32(path: Path) -> int:
    """Return the CRC-32 of the file's bytes, read a few MiB at a time."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        while data := file.read(READ_BYTES):
            crc = zlib.crc32(data, crc)
    return crc


def _as_bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _spec(name: str, entry: object, data_start: int) -> ArraySpec:
    match entry:
        case {"dtype": str(dtype_name), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
            pass
        case _:
            raise CorruptFileError(f"the header entry of {name!r} is malformed")
    if dtype_name not in DTYPES or not all(type(extent) is int and extent >= 0 for extent in shape):
        raise CorruptFileError(f"the dtype or shape of {name!r} is malformed")
    dtype = np.dtype(DTYPES[dtype_name])
    # In Python's integers: a damaged shape may ask for more than 64 bits.
    if not 0 <= start <= stop or stop - start != math.prod(shape) * dtype.itemsize:
        raise CorruptFileError(f"the number of bytes of {name!r} does not match its shape")
    return ArraySpec(dtype=dtype, shape=tuple(shape), start=data_start + start, stop=data_start + stop)
