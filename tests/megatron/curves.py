"""How far two training curves are apart, and what that may be."""

FP32_LIMIT = 1e-6
"""The contract of the runtime: only the order of sums differs."""
BF16_UNIT_ROUNDOFF = 2.0**-8
"""Two orders of one bf16 sum differ by at most its rounding."""

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
