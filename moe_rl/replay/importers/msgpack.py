"""Read MessagePack (msgpack/msgpack:spec.md) without trusting a declared size; extension types are refused."""

import struct
from typing import Any

from moe_rl.core.errors import InvalidInputError, require

MAX_DEPTH = 64

_FIXED = {0xC0: None, 0xC2: False, 0xC3: True}
_NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
_NUMBERS |= {0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_BYTES = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I"}
_TEXT = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_ARRAYS = {0xDC: ">H", 0xDD: ">I"}
_MAPS = {0xDE: ">H", 0xDF: ">I"}


def unpack(data: bytes) -> Any:
    """Return the one value that `data` encodes; bytes come as memoryviews of `data`."""
    reader = _Reader(data)
    value = reader.value(0)
    require(reader.position == len(data), "the MessagePack data goes on after its end.")
    return value


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        self.position = 0

    def take(self, count: int) -> memoryview:
        require(count <= len(self.data) - self.position, "the MessagePack data ends too early.")
        self.position += count
        return self.data[self.position - count : self.position]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def value(self, depth: int) -> Any:
        require(depth < MAX_DEPTH, f"the MessagePack data is nested deeper than {MAX_DEPTH}.")
        code = self.take(1)[0]
        if code <= 0x7F:
            return code
        if code >= 0xE0:
            return code - 0x100
        if code in _FIXED:
            return _FIXED[code]
        if code in _NUMBERS:
            return self.number(_NUMBERS[code])
        if code in _BYTES:
            return self.take(self.number(_BYTES[code]))
        if code & 0xE0 == 0xA0 or code in _TEXT:
            return self.text(self.number(_TEXT[code]) if code in _TEXT else code & 0x1F)
        if code & 0xF0 == 0x90 or code in _ARRAYS:
            return self.array(self.number(_ARRAYS[code]) if code in _ARRAYS else code & 0x0F, depth)
        if code & 0xF0 == 0x80 or code in _MAPS:
            return self.map(self.number(_MAPS[code]) if code in _MAPS else code & 0x0F, depth)
        raise InvalidInputError(f"MessagePack type 0x{code:02x} is not read.")

    def text(self, length: int) -> str:
        try:
            return str(self.take(length), "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidInputError("a MessagePack string is not UTF-8.") from error

    def array(self, length: int, depth: int) -> list[Any]:
        require(length <= len(self.data) - self.position, "the MessagePack data ends too early.")
        return [self.value(depth + 1) for _ in range(length)]

    def map(self, length: int, depth: int) -> dict[Any, Any]:
        require(2 * length <= len(self.data) - self.position, "the MessagePack data ends too early.")
        result = {}
        for _ in range(length):
            key = self.value(depth + 1)
            require(isinstance(key, str | int), "a MessagePack map has a key that is neither text nor number.")
            result[key] = self.value(depth + 1)
        return result
