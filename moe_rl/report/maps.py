"""The heat maps of the page: load of every rank, and imbalance of every micro-batch, both by layer.

L MoE layers, P EP ranks, M micro-batches.
"""

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from moe_rl.report.simulation import ReportData
from moe_rl.report.svg import Svg
from moe_rl.report.words import read_words

WORDS = read_words("sentences.yaml")["maps"]
# Two maps stand side by side.
MAP_WIDTH = 460
# "MoE layer", turned upwards, is this long: a map of few layers is shorter.
WORDS_LENGTH = 68
LEVELS = 255
# Blue has no load, white the mean, red 60 % of the way from the mean to the top, dark red the top.
_COLORS = ((33, 102, 172), (247, 247, 244), (214, 96, 77), (103, 0, 31))


def stops(top: float) -> tuple[float, ...]:
    """Return the relative loads that have exactly the `_COLORS`; between them colors change linearly."""
    return 0.0, 1.0, 1.0 + 0.6 * (top - 1.0), top


def color_of(value: float, top: float) -> tuple[int, int, int]:
    """Return red, green, blue of a relative load: blue below 1, near white at 1, red up to `top`."""

    def between(channel: Sequence[int]) -> int:
        return round(float(np.interp(value, stops(top), channel)))

    reds, greens, blues = zip(*_COLORS, strict=True)
    return between(reds), between(greens), between(blues)


def levels(values: NDArray[np.floating], top: float) -> NDArray[np.uint8]:
    """Return relative loads as one byte each: load = byte * top / 255."""
    level: NDArray[np.uint8] = np.rint(np.clip(values / top, 0.0, 1.0) * LEVELS).astype(np.uint8)
    return level


def png_data_uri(values: NDArray[np.floating], top: float) -> str:
    """Return the `data:` URI of an indexed PNG for relative loads [rows, columns], one pixel each."""
    rows, columns = values.shape
    lines = np.concatenate([np.zeros((rows, 1), np.uint8), levels(values, top)], axis=1)
    palette = b"".join(bytes(color_of(index / LEVELS * top, top)) for index in range(LEVELS + 1))
    # 8 bits per pixel, colour type 3: an index into the palette; every row starts with filter 0.
    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"PLTE", palette), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n"
    for kind, content in chunks:
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        data += struct.pack(">I", len(content)) + kind + content + checksum
    return "data:image/png;base64," + base64.b64encode(data).decode("ascii")


@dataclass(frozen=True, slots=True, kw_only=True)
class MapKind:
    """Maps [L, N] of one quantity, one per policy, on a common scale."""

    title: str
    caption: str
    quantity: str
    """Name of the scale."""
    across: str
    """Name of the columns."""
    every: int
    """Columns between dashed lines (the ranks of a node); 0 for none."""
    layer_ids: Sequence[int]
    values: Mapping[str, NDArray[np.float32]]
    """By policy."""
    shown: tuple[str, ...]
    """Policies shown before anything is chosen: before, after."""

    @property
    def top(self) -> float:
        """Upper end of the scale."""
        return max(2.0, *map(self._largest, self.values))

    @property
    def gradient(self) -> Markup:
        """Stops of the scale's CSS gradient."""
        stops_in_css = (f"rgb{color} {at / self.top:.1%}" for at, color in zip(stops(self.top), _COLORS, strict=True))
        return Markup(", ".join(stops_in_css))

    def most(self, name: str) -> str:
        """Return the largest value of a policy's map, as its caption says it."""
        return f"{self._largest(name):.2f}"

    def _largest(self, name: str) -> float:
        return float(self.values[name].max(initial=0.0))

    def picture(self, name: str) -> Markup:
        """Draw the map of a policy: layers from top to bottom, columns from left to right."""
        values = self.values[name]
        layers, columns = values.shape
        left, right, above, below = 52, 10, 8, 42
        # 94 layers get 3.6 units each; few layers stop growing at 16.
        cell_height = min(16.0, max(3.2, 340.0 / layers))
        height = above + layers * cell_height + below
        svg = Svg(height=height, width=MAP_WIDTH, label=f"{self.title}: {name}")
        width, bottom = MAP_WIDTH - left - right, above + layers * cell_height
        svg.raw(
            f'<image class="pixels" data-map="1" x="{left}" y="{above}" width="{width}" height="{bottom - above:.1f}" '
            f'preserveAspectRatio="none" href="{png_data_uri(values, self.top)}"/>'
        )
        for column in _whole_ticks(columns, at_most=16):
            svg.text(left + (column + 0.5) * width / columns, bottom + 15, column, anchor="middle", css="tick")
        for layer in _whole_ticks(layers, at_most=8):
            y = above + (layer + 0.5) * cell_height + 4
            svg.text(left - 6, y, self.layer_ids[layer], anchor="end", css="tick")
        if self.every:
            edges = range(self.every, columns, self.every)
        else:
            edges = range(0)
        for edge in edges:
            x = left + edge * width / columns
            svg.line(x, above - 4, x, bottom + 4, "node")
        caption = self.across + (" (dashed: node boundary)" if len(edges) else "")
        svg.text(left + width / 2, height - 6, caption, anchor="middle", css="label")
        middle = max(above + (bottom - above) / 2, WORDS_LENGTH / 2)
        svg.text(13, middle, "MoE layer", anchor="middle", css="label", turn=True)
        return svg.markup()

    def data(self) -> dict[str, object]:
        """Return the data with which the page's script shows another policy and a tool tip."""
        top = self.top
        return {
            "top": top,
            "layers": list(self.layer_ids),
            "columns": next(iter(self.values.values())).shape[1],
            "column": self.across.removeprefix("EP "),
            "shown": list(self.shown),
            "policies": {name: self._policy_data(name, value) for name, value in self.values.items()},
        }

    def _policy_data(self, name: str, values: NDArray[np.floating]) -> dict[str, str]:
        coded_levels = base64.b64encode(levels(values, self.top).tobytes()).decode("ascii")
        return {"png": png_data_uri(values, self.top), "most": self.most(name), "levels": coded_levels}


def _whole_ticks(count: int, *, at_most: int) -> list[int]:
    """Return indices to label on an axis of `count` places."""
    for step in (1, 2, 4, 8, 10, 16, 20, 32, 50, 100, 200, 500, 1000):
        if (count - 1) / step <= at_most:
            return list(range(0, count, step))
    return list(range(0, count, 10_000))


def rank_maps(report: ReportData) -> MapKind:
    """Return the load of every rank and layer in the whole step."""
    values = _by_policy(report, "rank_share")
    ranks = next(iter(values.values())).shape[1]
    every = min(int(str(report.setting.get("ranks_per_node", ranks))), ranks)
    return _maps(report, "ranks", values, every=every)


def micro_batch_maps(report: ReportData) -> MapKind:
    """Return the imbalance of every layer in every micro-batch."""
    return _maps(report, "micro_batches", _by_policy(report, "imbalance_map"), every=0)


def _by_policy(report: ReportData, quantity: str) -> dict[str, NDArray[np.float32]]:
    """Return an array of `PolicyLoads` for every policy."""
    return {name: getattr(report.loads[name], quantity) for name in report.policy_names}


def _maps(report: ReportData, kind: str, values: Mapping[str, NDArray[np.float32]], *, every: int) -> MapKind:
    policies = tuple(prediction.policy for prediction in report.before_and_after)
    return MapKind(**WORDS[kind], every=every, layer_ids=report.layer_ids, values=values, shown=policies)
