"""One color per policy and per part of a step, the same in every chart; readable without color vision."""

import itertools
from collections.abc import Iterable

from moe_rl.report.words import read_words

BASELINE_COLOR = "#7d8590"
# The palette of Okabe and Ito without black, and two more. Its orange and its sky blue are darker here: a line has a
# contrast of 3:1 to light paper and to dark.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#c98500", "#3595cf", "#8c6bb1", "#a6761d")

PART_COLORS: dict[str, str] = read_words("colors.yaml")


def policy_colors(names: Iterable[str]) -> dict[str, str]:
    """Return a color for each policy, in the order given; static is gray."""
    series = itertools.cycle(SERIES)
    return {name: BASELINE_COLOR if name == "static" else next(series) for name in names}


def part_color(part: str) -> str:
    """Return the color of a part of the step; a part that is not listed gets one of the series, by its name."""
    return PART_COLORS.get(part, SERIES[sum(part.encode()) % len(SERIES)])
