"""Draw a matrix of loads as a small indexed PNG: one pixel per (layer, rank), scaled up by the page."""

import base64
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

LEVELS = 255
_COLORS = ((33, 102, 172), (247, 247, 244), (214, 96, 77), (103, 0, 31))
"""Of no load, of the mean, at 60 % of the way from the mean to the top, and of the top."""


def color_of(value: float, top: float) -> tuple[int, int, int]:
    """Return red, green, blue of a relative load: blue below 1, near white at 1, red up to `top`."""
    stops = (0.0, 1.0, 1.0 + 0.6 * (top - 1.0), top)
    red, green, blue = (round(float(np.interp(value, stops, channel))) for channel in zip(*_COLORS, strict=True))
    return red, green, blue


def png_data_uri(values: NDArray[np.floating], top: float) -> str:
    """Return the `data:` URI of a PNG for relative loads [rows, columns]."""
    rows, columns = values.shape
    level = np.rint(np.clip(values / top, 0.0, 1.0) * LEVELS).astype(np.uint8)
    lines = np.concatenate([np.zeros((rows, 1), np.uint8), level], axis=1)
    palette = bytes(part for index in range(LEVELS + 1) for part in color_of(index / LEVELS * top, top))
    # 8 bits per pixel, colour type 3: an index into the palette; every row starts with filter 0.
    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"PLTE", palette), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)
    return "data:image/png;base64," + base64.b64encode(data).decode("ascii")


def levels_base64(values: NDArray[np.floating], top: float) -> str:
    """Return relative loads as base64 of one byte each, for the tool tip: byte * top / 255."""
    level = np.rint(np.clip(values / top, 0.0, 1.0) * LEVELS).astype(np.uint8)
    return base64.b64encode(level.tobytes()).decode("ascii")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
