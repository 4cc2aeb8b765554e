"""How far two training curves are apart, and what that may be."""

import math
import statistics

FP32_LIMIT = 1e-6
"""The contract of the runtime: only the order of sums differs."""
BF16_UNIT_ROUNDOFF = 2.0**-8
"""Two orders of one bf16 sum differ by at most its rounding."""
E4M3_UNIT_ROUNDOFF = 2.0**-4
"""FP8 operands have three mantissa bits."""
E5M2_UNIT_ROUNDOFF = 2.0**-3
"""Two of them, in gradients of the hybrid format."""

DRAWS = 2.0
"""Rounding errors of two trainings are two draws from one distribution: how far one may be off, in terms of the other.

The root mean square of some ten steps, which depend on each other, varies by about a third from draw to draw.
"""

Curve = dict[str, list[float]]


def relative_difference(first: Curve, second: Curve) -> float:
    """Largest relative difference of a loss or gradient norm; infinite where one is not a number."""
    worst = 0.0
    for name in ("loss", "grad_norm"):
        assert len(first[name]) == len(second[name]) > 0
        for a, b in zip(first[name], second[name], strict=True):
            difference = abs(a - b) / abs(a)
            worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def times_the_yardstick(plain: Curve, other: Curve, *yardsticks: Curve) -> float:
    """How many times as far from `plain` as the `yardsticks` the curve `other` is; infinite where it is not a number.

    Distances are root mean squares of relative differences over the steps; the worse of loss and gradient norm counts.
    A yardstick may end before the others do. Of several the median counts: one step may outweigh the rest (a loss near
    zero, a token at the edge of the clip), and then a single yardstick is one draw, which may be small or huge.
    """
    worst = 0.0
    for name in ("loss", "grad_norm"):
        measures = [_distance(plain[name][: len(each[name])], each[name]) for each in yardsticks]
        times = _distance(plain[name], other[name]) / statistics.median(measures)
        worst = max(worst, times if times == times else float("inf"))
    return worst


def _distance(first: list[float], second: list[float]) -> float:
    assert len(first) == len(second) > 0
    squares = [((a - b) / a) ** 2 for a, b in zip(first, second, strict=True)]
    return math.sqrt(sum(squares) / len(squares))
