"""Read what `torch.save` wrote without torch and without running any of it.

A `.pt` file is a zip archive with a pickle (`data.pkl`) and the raw bytes of every tensor storage (`data/<key>`). The
pickle is read by an unpickler that knows tensors, numpy arrays and plain containers and nothing else: every other name
becomes an inert `Opaque`, so no code of the file or of any package is ever imported or called. Tensors are views of
the mapped file.
"""

import math
import pickle
import zipfile
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.pages import drop_pages

CHECK_BYTES = 4 << 20
STORAGE_DTYPES = {
    "ByteStorage": "u1", "CharStorage": "i1", "ShortStorage": "<i2", "IntStorage": "<i4", "LongStorage": "<i8",
    "HalfStorage": "<f2", "FloatStorage": "<f4", "DoubleStorage": "<f8", "BoolStorage": "?",
    "BFloat16Storage": "<u2", "UntypedStorage": "u1",
}  # fmt: skip
TORCH_DTYPES = {"uint8": "u1", "uint16": "<u2", "uint32": "<u4", "int8": "i1", "int16": "<i2", "int32": "<i4"}
TORCH_DTYPES |= {"int64": "<i8", "bool": "?", "float16": "<f2", "float32": "<f4", "float64": "<f8"}


class Opaque:
    """Stands for an object of a class that is not read; keeps its name for messages and swallows its contents."""

    name = ""

    def __new__(cls, *_: object, **__: object) -> "Opaque":  # noqa: D102
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None: ...

    def __setstate__(self, _: object) -> None: ...

    def __setitem__(self, _: object, __: object) -> None: ...

    def append(self, _: object) -> None:
        """Take part in the unpickling of list subclasses."""

    def extend(self, _: object) -> None:
        """Take part in the unpickling of list subclasses."""


class _Array:
    """A numpy array being unpickled; `value` is set by its state."""

    def __init__(self) -> None:
        self.value: NDArray[Any] | None = None

    def __setstate__(self, state: object) -> None:
        match state:
            case (_, tuple(shape), _Dtype() as dtype, bool(fortran), bytes(data)):
                self.value = _shaped(np.frombuffer(data, _number_dtype(dtype.code)), shape, fortran=fortran)
            case _:
                pass  # an array of objects: stays unread


class _Dtype:
    def __init__(self, code: object = "", *_: object) -> None:
        self.code = code if isinstance(code, str) else ""

    def __setstate__(self, state: object) -> None:
        if isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">"):
            self.code = f"{state[1]}{self.code.lstrip('<>|=')}"


class _Call:
    """A function that a pickle may call and nothing else: its attributes cannot be set by the pickle."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *arguments: object) -> object:
        return self._function(*arguments)

    def __setstate__(self, _: object) -> None:
        raise InvalidInputError("its pickle calls a function that is not allowed")


class _Storage:
    """The bytes of one tensor storage and the dtype it was saved with."""

    def __init__(self, data: NDArray[np.uint8], code: str) -> None:
        self.data, self.code = data, code


class _Unpickler(pickle._Unpickler):
    """The interpreter's own unpickler in Python, whose memo grows with what is stored and not with what is claimed."""

    def __init__(self, data: bytes, storage: Callable[[str], NDArray[np.uint8]]) -> None:
        super().__init__(BytesIO(data), encoding="utf-8")
        self._storage = storage

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return the one safe stand-in for a name, or a class of inert objects."""
        stand_in = _STAND_INS.get((module_name.replace("numpy._core", "numpy.core"), global_name))
        if stand_in is not None:
            return stand_in
        if module_name == "torch" and global_name in TORCH_DTYPES:
            return TORCH_DTYPES[global_name]
        if global_name in STORAGE_DTYPES and module_name in ("torch", "torch.storage"):
            return STORAGE_DTYPES[global_name]
        return type("Opaque", (Opaque,), {"name": f"{module_name}.{global_name}"})

    def persistent_load(self, pid: Any, /) -> object:
        """Return the storage that a tensor refers to."""
        match pid:
            case ("storage", str(code), str(key), *_):
                return _Storage(self._storage(key), code)
        raise InvalidInputError("a tensor refers to its storage in an unknown format")


def load_torch_file(path: Path, *, verify: bool = True) -> Any:
    """Return the object of a `torch.save` file: dicts, lists, numbers, strings, and arrays for tensors.

    `verify` reads all of the file to compare checksums; without it only the pickle is read.

    Raises `InvalidInputError` for anything that is not such a file; the older format without a zip archive included.
    """
    if not zipfile.is_zipfile(path):
        raise InvalidInputError(
            f"{path} was not written by torch.save of PyTorch 1.6 or later: it is not a zip archive."
        )
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename: member for member in archive.infolist()}
        return _load(np.asarray(np.memmap(path, np.uint8, mode="r")), members, verify)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path} cannot be read: {str(error).rstrip('.')}.") from error
    except Exception as error:  # a damaged archive or pickle makes its reader fail in any way, but never runs anything
        raise InvalidInputError(f"{path} is damaged: its content cannot be read.") from error


def _load(file_bytes: NDArray[np.uint8], members: dict[str, zipfile.ZipInfo], verify: bool) -> Any:
    root = next((name.removesuffix("data.pkl") for name in members if name.endswith("/data.pkl")), None)
    if root is None:
        raise InvalidInputError("it holds no data.pkl")

    def storage(key: str) -> NDArray[np.uint8]:
        member = members.get(f"{root}data/{key}")
        if member is None:
            raise InvalidInputError(f"tensor storage {key!r} is missing")
        return _stored_bytes(file_bytes, member, verify=verify)

    pickled = _stored_bytes(file_bytes, members[f"{root}data.pkl"], verify=True)
    return _plain(_Unpickler(pickled.tobytes(), storage).load(), {})


def _stored_bytes(file_bytes: NDArray[np.uint8], member: zipfile.ZipInfo, *, verify: bool) -> NDArray[np.uint8]:
    """Return a member's bytes as a view of the file; torch stores them without compression."""
    require(
        member.compress_type == zipfile.ZIP_STORED, f"{member.filename} is compressed, but torch.save never compresses"
    )
    # The local header's name and extra field may be longer than the directory's: read their lengths from it.
    header = file_bytes[member.header_offset : member.header_offset + 30]
    require(len(header) == 30, f"the zip entry of {member.filename} is damaged")
    name_length, extra_length = np.frombuffer(header[26:30].tobytes(), "<u2").tolist()
    start = member.header_offset + 30 + name_length + extra_length
    require(start + member.file_size <= len(file_bytes), f"{member.filename} extends past the end of the file")
    data = file_bytes[start : start + member.file_size]
    crc = 0
    for chunk_start in range(0, len(data) if verify else 0, CHECK_BYTES):
        # 4 MiB at a time, dropped once read: the file may be larger than memory.
        piece = data[chunk_start : chunk_start + CHECK_BYTES]
        crc = zlib.crc32(piece.data, crc)
        drop_pages(piece)
    require(not verify or crc == member.CRC, f"the checksum of {member.filename} does not match its bytes")
    return data


def _number_dtype(code: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(code)
    except TypeError as error:
        raise InvalidInputError(f"the dtype {code!r} of an array is unknown") from error
    require(dtype.kind in "iufb" and dtype.fields is None, f"arrays of dtype {code!r} are not supported")
    return dtype


def _shaped(flat: NDArray[Any], shape: tuple[Any, ...], *, fortran: bool = False) -> NDArray[Any]:
    require(all(type(extent) is int and extent >= 0 for extent in shape), "an array has an invalid shape")
    wanted = math.prod(shape)
    require(wanted == flat.size, f"an array of shape {list(shape)} has {flat.size} values instead of {wanted}")
    if fortran:
        return flat.reshape(shape[::-1]).T
    return flat.reshape(shape)


def _rebuild_tensor(storage: object, offset: object, size: object, stride: object, *_: object) -> object:
    if not isinstance(storage, _Storage):
        return Opaque()
    return _view(storage.data, storage.code, offset, size, stride)


def _rebuild_typed_tensor(
    storage: object, offset: object, size: object, stride: object, _: object, __: object, code: object, *___: object
) -> object:
    if not isinstance(storage, _Storage) or not isinstance(code, str):
        return Opaque()
    return _view(storage.data, code, offset, size, stride)


def _view(data: NDArray[np.uint8], code: str, offset: object, size: object, stride: object) -> NDArray[Any]:
    """Return the strided view of a storage; raise where it would leave the storage."""
    dtype = _number_dtype(code)
    flat = data[: len(data) // dtype.itemsize * dtype.itemsize].view(dtype)
    extents, strides = _extents(size), _extents(stride)
    require(
        type(offset) is int and offset >= 0 and len(extents) == len(strides),
        "the shape and strides of a tensor do not fit its storage",
    )
    start = int(offset)  # type: ignore[call-overload]
    if 0 in extents:
        return np.zeros(extents, dtype)
    # as_strided checks nothing: the furthest element decides whether the view stays inside.
    last_byte = start + sum((extent - 1) * step for extent, step in zip(extents, strides, strict=True))
    require(
        last_byte < len(flat),
        f"a tensor of shape {list(extents)} extends past the {len(flat)} values of its storage",
    )
    count = math.prod(extents)
    if strides == tuple(math.prod(extents[axis + 1 :]) for axis in range(len(extents))):
        return flat[start : start + count].reshape(extents)
    steps = tuple(step * dtype.itemsize for step in strides)
    return np.lib.stride_tricks.as_strided(flat[start:], extents, steps, writeable=False)


def _extents(value: object) -> tuple[int, ...]:
    require(
        isinstance(value, tuple) and len(value) <= 8 and all(type(v) is int and 0 <= v < 1 << 48 for v in value),
        "the shape and strides of a tensor do not fit its storage",
    )
    return tuple(value)  # type: ignore[arg-type]


def _encode(text: object, encoding: object = "latin1", *_: object) -> bytes:
    require(isinstance(text, str) and encoding == "latin1", "it contains bytes in an unknown encoding")
    return str(text).encode("latin1")


_STAND_INS: dict[tuple[str, str], _Call] = {
    ("torch._utils", "_rebuild_tensor_v2"): _Call(_rebuild_tensor),
    ("torch._utils", "_rebuild_tensor_v3"): _Call(_rebuild_typed_tensor),
    ("numpy.core.multiarray", "_reconstruct"): _Call(lambda *_: _Array()),
    ("numpy", "dtype"): _Call(_Dtype),
    ("collections", "OrderedDict"): _Call(lambda *_: {}),
    ("_codecs", "encode"): _Call(_encode),
    ("__builtin__", "bytes"): _Call(lambda *_: b""),
}


def _plain(value: Any, done: dict[int, Any]) -> Any:
    """Replace finished array holders inside dicts, lists and tuples; each object is visited once."""
    if isinstance(value, _Array):
        if value.value is None:
            return Opaque()
        return value.value
    if type(value) not in (dict, list, tuple):
        return value
    if id(value) not in done:
        done[id(value)] = value  # a cycle keeps its own, unfinished self
        if type(value) is dict:
            done[id(value)] = {key: _plain(item, done) for key, item in value.items()}
        elif not all(type(item) is int for item in value):  # long token lists need no copy
            done[id(value)] = type(value)(_plain(item, done) for item in value)
    return done[id(value)]
