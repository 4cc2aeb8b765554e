"""Inline SVG charts of loads: heat maps.

M micro-batches, L MoE layers, P EP ranks.
"""

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from moe_rl.report.heatmap import png_data_uri
from moe_rl.report.svg import Svg

MAP_WIDTH = 460
"""Two maps stand side by side."""
WORDS = 68
"""Length of what stands beside a map, which may have few layers."""


def layer_map(
    values: NDArray[np.float32], *, label: str, layer_ids: Sequence[int], across: str, every: int, top: float
) -> Markup:
    """Draw values [L, N] as a heat map: layers down, what `across` names from left to right.

    A dashed line stands after every `every` columns (the ranks of a node); 0 for none.
    """
    layers, columns = values.shape
    left, right, above, below = 52, 10, 8, 42
    # 94 layers get 3.6 units each; few layers stop growing at 16.
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
    middle = max(above + (bottom - above) / 2, WORDS / 2)
    svg.text(13, middle, "MoE layer", anchor="middle", css="label", turn=True)
    return svg.markup()


def whole_ticks(count: int, *, at_most: int = 12) -> list[int]:
    """Return indices to label on an axis of `count` places."""
    step = next(s for s in (1, 2, 4, 8, 10, 16, 20, 32, 50, 100, 200, 500, 1000, 10_000) if (count - 1) / s <= at_most)
    return list(range(0, count, step))
