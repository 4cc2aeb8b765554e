"""How results are compared: by the worst row, not by one number for the tensor.

One wrong row of ten thousand vanishes in a norm over everything; here it fails, and the message names it.
"""

from dataclasses import dataclass

import torch

LIMIT = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8 + 1e-5}
"""Relative L2 error of a row, and error of an element relative to max(rms, |expected|), against float64.

float32: adding K products of random sign one by one errs by 2^-24 of the partial sum each time, together by
2^-24 * sqrt(K / 2) of the typical sum: 4e-6 at K = 8192. bfloat16 adds its unit roundoff 2^-8.
"""

FP8_SUM = 4 * 2.0**-13
"""What FP8 products add to these on a GPU, where sums keep about 14 bits between two promotions to fp32 (DeepSeek-V3,
arXiv 2412.19437 section 3.3.2): four steps of 32 products, each off by 2^-13. Not yet measured on a GPU of ours; the
interpreter adds in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Where and how far two results differ most."""

    row_error: float
    """Largest relative L2 error of a row."""
    row: tuple[int, ...]
    """Index of that row."""
    element_error: float
    """Largest error relative to max(rms, |expected|)."""
    element: tuple[int, ...]
    got: float
    expected: float


def compare(got: torch.Tensor, expected: torch.Tensor) -> Comparison:
    """Compare [..., columns] with float64 expectations; both finite."""
    got, expected = got.to(torch.float64), expected.to(torch.float64)
    if not got.numel():
        return Comparison(row_error=0.0, row=(), element_error=0.0, element=(), got=0.0, expected=0.0)
    error = got - expected
    rms = float(expected.square().mean().sqrt())
    norm = expected.norm(dim=-1)
    # A row of zeros must be zeros: any error there is measured against a typical row instead.
    typical = max(rms * expected.shape[-1] ** 0.5, torch.finfo(torch.float64).tiny)
    rows = error.norm(dim=-1) / torch.where(norm > 0, norm, typical)
    elements = error.abs() / expected.abs().clamp_min(max(rms, torch.finfo(torch.float64).tiny))
    row, element = _index_of_max(rows), _index_of_max(elements)
    return Comparison(
        row_error=float(rows[row]), row=row, element_error=float(elements[element]), element=element,
        got=float(got[element]), expected=float(expected[element]),
    )  # fmt: skip


def assert_close(
    got: torch.Tensor, expected: torch.Tensor, *, dtype: torch.dtype | None = None,
    m_offsets: torch.Tensor | None = None, is_fp8: bool = False,
) -> None:  # fmt: skip
    """Raise AssertionError unless `got` is `expected` up to fp32 sums and rounding to `dtype` (that of `got`).

    Checks shape, then that NaN and infinities stand in the same places, then the worst row, then the worst element.
    `is_fp8`: sums of FP8 products, which GPUs keep in fewer bits. `m_offsets` lets the message name the group of a row
    of [M, columns].
    """
    if got.shape != expected.shape:
        raise AssertionError(f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    if got.device != expected.device:
        raise AssertionError(f"result on {got.device}, expected on {expected.device}")
    for name, is_special in (("NaN", torch.isnan), ("infinity", torch.isinf)):
        different = (is_special(got) != is_special(expected)).nonzero()
        if different.numel():
            raise AssertionError(f"{name} at {different.shape[0]} wrong places, first {tuple(different[0].tolist())}")
    finite = torch.isfinite(expected)
    compared = compare(torch.where(finite, got, 0), torch.where(finite, expected, 0))
    limit = LIMIT[dtype or got.dtype] + (FP8_SUM if is_fp8 and got.device.type == "cuda" else 0.0)
    if max(compared.row_error, compared.element_error) > limit:
        raise AssertionError(
            f"worst row {compared.row}{_group_of(compared.row, m_offsets)} errs by {compared.row_error:.3g}; "
            f"worst element {compared.element} is {compared.got:.9g}, expected "
            f"{compared.expected:.9g}, off by {compared.element_error:.3g}; the limit is {limit:.3g}"
        )


def _index_of_max(values: torch.Tensor) -> tuple[int, ...]:
    if values.dim() == 0:
        return ()
    return tuple(int(i) for i in torch.unravel_index(values.argmax(), values.shape))


def _group_of(row: tuple[int, ...], m_offsets: torch.Tensor | None) -> str:
    if m_offsets is None or not row:
        return ""
    group = int(torch.searchsorted(m_offsets.cpu(), row[0], right=True)) - 1
    return f" of group {group}" if group < m_offsets.numel() - 1 else " beyond the last group"
