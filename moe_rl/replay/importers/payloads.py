"""Turn encoded routes (base64, MessagePack, .npy, nested lists) into values without trusting what they declare."""

import base64
import binascii
import io
import math
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, require

Kind = TypeVar("Kind")
WIRE_DTYPES = ("uint8", "uint16", "uint32", "int8", "int16", "int32", "int64")
# What every base64 text of .npy bytes starts with.
NPY_BASE64_START = "k05VTVBZ"

# What to do with objects that are not unpickled: a file may run code of its writer.
SAVE_ARRAYS = 'Write arrays [tokens, layers, topk] with np.savez("routes.npz", *arrays).'


def from_base64(text: object) -> bytes:
    """Return the decoded bytes of a base64 string."""
    encoded = of_kind(text, str, f"the routes must be a base64 string, got {type(text).__name__}.")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInputError("the routes are not valid base64.") from error


def from_bytes(data: bytes, dtype: str, shape: tuple[int, ...]) -> NDArray[np.integer]:
    """Return C-order `data` as an array; raise unless it has exactly the bytes that dtype and shape ask for."""
    require(dtype in WIRE_DTYPES, f"the dtype {dtype!r} is not supported. Supported dtypes: {', '.join(WIRE_DTYPES)}.")
    wanted = math.prod(shape) * np.dtype(dtype).itemsize
    require(
        all(extent >= 0 for extent in shape) and wanted == len(data),
        f"{dtype} routes of shape {list(shape)} need {wanted} bytes, but the payload has {len(data)}.",
    )
    array: NDArray[np.integer] = np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(shape)
    return array


def from_messagepack(data: bytes) -> Any:
    """Return the one value that MessagePack `data` encodes; extension types are refused, and so are sizes beyond it."""
    import msgpack  # here, because kernels are checked on GPU images that carry numpy and torch alone

    try:
        return msgpack.unpackb(data, ext_hook=_refuse_extension)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise InvalidInputError(f"the MessagePack data cannot be read: {reason.rstrip('.')}.") from error


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code} ({len(data)} bytes) is not supported")


def from_npy(data: bytes | memoryview) -> NDArray[Any]:
    """Return the array of .npy bytes as a view; objects are refused, so nothing is ever unpickled."""
    file, npy = io.BytesIO(data), cast(Any, np.lib.format)  # numpy gives its header readers no types
    try:
        version = npy.read_magic(file)
        formats = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        require(version in formats, f"the .npy file has format version {version}, which is not supported.")
        shape, order, dtype = formats[version](file)
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise InvalidInputError("the payload is not an .npy file, or its header is damaged.") from error
    hint = f" {SAVE_ARRAYS}" if dtype.kind == "O" else ""
    require(dtype.kind in "iuf", f"the .npy file has the dtype {dtype}, which is not numeric.{hint}")
    size = len(data) - file.tell()
    require(
        min(shape, default=0) >= 0 and math.prod(shape) * dtype.itemsize == size,
        f"the header of the .npy file declares {dtype} {list(shape)}, which does not match the {size} bytes of data.",
    )
    array = np.frombuffer(data, dtype, offset=file.tell())
    if order:
        return array.reshape(shape[::-1]).T
    return array.reshape(shape)


def as_routes(value: object) -> NDArray[np.integer]:
    """Return vLLM's encodings of an id array: base64 of .npy bytes, nested lists, or an array."""
    array: NDArray[np.integer] = as_array(from_npy(from_base64(value)) if isinstance(value, str) else value)
    require(
        array.ndim == 3 and array.dtype.kind in "iu",
        f"the routes must be integers of shape [tokens, layers, top-k], got {array.dtype} {list(array.shape)}.",
    )
    return array


def as_array(value: object) -> NDArray[Any]:
    """Return an array, or nested lists as one; raise for anything else."""
    if isinstance(value, list):
        try:
            value = np.asarray(value)
        except ValueError as error:
            raise InvalidInputError("the nested lists of routes have unequal lengths.") from error
    array: NDArray[Any] = of_kind(
        value, np.ndarray, f"routes cannot be read from a value of type {type(value).__name__}."
    )
    return array


def of_kind(value: object, kind: type[Kind], sentence: str) -> Kind:
    """Return `value` if it is a `kind`, else raise the sentence."""
    if not isinstance(value, kind):
        raise InvalidInputError(sentence)
    return value


def objects(value: object, sentence: str) -> list[dict[str, Any]]:
    """Return a list of JSON objects, or raise the sentence."""
    return [of_kind(item, dict, sentence) for item in of_kind(value, list, sentence)]


def integer(value: object, name: str) -> int:
    """Return `value` if it is an integer (no truth value), else raise naming `name`."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    require(type(value) is int or isinstance(value, np.integer), f"{name} must be an integer, got {value!r}.")
    return int(value)  # type: ignore[call-overload, no-any-return]
