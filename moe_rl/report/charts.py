"""Inline SVG charts of loads: curves over micro-batches and layers, and heat maps.

M micro-batches, L MoE layers, P EP ranks.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from moe_rl.report.heatmap import png_data_uri
from moe_rl.report.svg import Svg
from moe_rl.report.units import ticks

MAP_WIDTH = 460
"""Two curves or maps stand side by side."""
MARKED_POINTS = 40
"""Curves of at most so many points show every point."""


def imbalance_curves(
    curves: Mapping[str, NDArray[np.float32]], colors: Mapping[str, str], *, along: str, ids: Sequence[int]
) -> Markup:
    """Draw max / mean rank load against what `along` names ("micro-batch", "MoE layer"), one line per policy.

    `curves` are [N] each; `ids` [N] stand on the axis.
    """
    left, right, top, bottom, height = 58, 14, 12, 44, 260
    width = MAP_WIDTH
    svg = Svg(height=height, width=width, label=f"Imbalance by {along}, one line per policy")
    count = len(ids)
    highest = max((float(curve.max(initial=1.0)) for curve in curves.values()), default=1.0)
    marks = [1.0 + tick for tick in ticks(max(highest - 1.0, 0.1), at_most=5)]
    spread = marks[-1] - 1.0

    def x_of(index: float) -> float:
        return left + (width - left - right) * (index / (count - 1) if count > 1 else 0.5)

    def y_of(value: float) -> float:
        return top + (height - top - bottom) * (1.0 - (value - 1.0) / spread)

    for mark in marks:
        svg.line(left, y_of(mark), width - right, y_of(mark), "axis" if mark == 1.0 else "grid")
        svg.text(left - 7, y_of(mark) + 4, f"{mark:.4g}", anchor="end", css="tick")
    for index in whole_ticks(count):
        svg.line(x_of(index), height - bottom, x_of(index), height - bottom + 4, "axis")
        svg.text(x_of(index), height - bottom + 17, ids[index], anchor="middle", css="tick")
    svg.text((left + width - right) / 2, height - 6, along, anchor="middle", css="label")
    svg.text(15, (top + height - bottom) / 2, "max / mean rank load", anchor="middle", css="label", turn=True)
    for name, curve in curves.items():
        points = [(x_of(index), y_of(float(value))) for index, value in enumerate(curve)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        svg.raw(f'<polyline class="curve" style="stroke:{colors[name]}" points="{path}"/>')
        if count <= MARKED_POINTS:
            svg.raw("".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colors[name]}"/>' for x, y in points))
    return svg.markup()


def layer_map(
    values: NDArray[np.float32], *, label: str, layer_ids: Sequence[int], across: str, every: int, top: float
) -> Markup:
    """Draw values [L, N] as a heat map: layers down, what `across` names from left to right.

    A dashed line stands after every `every` columns (the ranks of a node); 0 for none.
    """
    layers, columns = values.shape
    left, right, above, below = 52, 10, 8, 42
    cell_height = min(16.0, max(3.2, 340.0 / layers))
    height = above + layers * cell_height + below
    svg = Svg(height=height, width=MAP_WIDTH, label=label)
    width, bottom = MAP_WIDTH - left - right, above + layers * cell_height
    svg.raw(
        f'<image class="pixels" data-map="1" x="{left}" y="{above}" width="{width}" height="{bottom - above:.1f}" '
        f'preserveAspectRatio="none" href="{png_data_uri(values, top)}"/>'
    )
    for column in whole_ticks(columns, at_most=16):
        svg.text(left + (column + 0.5) * width / columns, bottom + 15, column, anchor="middle", css="tick")
    for layer in whole_ticks(layers, at_most=8):
        svg.text(left - 6, above + (layer + 0.5) * cell_height + 4, layer_ids[layer], anchor="end", css="tick")
    edges = range(every, columns, every) if every else range(0)
    for edge in edges:
        svg.line(left + edge * width / columns, above - 4, left + edge * width / columns, bottom + 4, "node")
    said = across + (" (dashed: node boundary)" if len(edges) else "")
    svg.text(left + width / 2, height - 6, said, anchor="middle", css="label")
    svg.text(13, above + (bottom - above) / 2, "MoE layer", anchor="middle", css="label", turn=True)
    return svg.markup()


def whole_ticks(count: int, *, at_most: int = 12) -> list[int]:
    """Return indices to label on an axis of `count` places."""
    step = next(s for s in (1, 2, 4, 8, 10, 16, 20, 32, 50, 100, 200, 500, 1000, 10_000) if (count - 1) / s <= at_most)
    return list(range(0, count, step))
