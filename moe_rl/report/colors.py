"""One color per policy and per part of a step, the same in every chart; readable without color vision."""

import itertools
from collections.abc import Iterable

from moe_rl.report.words import read_words

# The palette of Okabe and Ito without black, and two more. Its orange and its sky blue are darker here: a line has a
# contrast of 3:1 to light paper and to dark.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#c98500", "#3595cf", "#8c6bb1", "#a6761d")

PART_COLORS: dict[str, str] = read_words("colors.yaml")
POLICY_COLORS: dict[str, str] = read_words("policy_colors.yaml")
BASELINE_COLOR = POLICY_COLORS["static"]


def policy_colors(names: Iterable[str]) -> dict[str, str]:
    """Return a color for each policy: its own, whatever else the chart shows.

    Names without one (policies of other packages, EP sizes) take the colors of the series that are left, in order.

    >>> policy_colors(["moe-rl"])["moe-rl"] == policy_colors(["static", "ultraep", "moe-rl"])["moe-rl"]
    True
    """
    names = list(names)
    used_colors = {POLICY_COLORS[name] for name in names if name in POLICY_COLORS}
    series = itertools.cycle([color for color in SERIES if color not in used_colors])
    return {name: POLICY_COLORS.get(name) or next(series) for name in names}


def part_color(part: str) -> str:
    """Return the color of a part of the step; a part that is not listed gets one of the series, by its name."""
    return PART_COLORS.get(part, SERIES[sum(part.encode()) % len(SERIES)])
