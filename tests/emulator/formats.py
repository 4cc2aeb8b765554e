"""Narrow floating-point formats, from their definitions: OCP OFP8 (E4M3, E5M2), OCP MX (E8M0), bfloat16."""

import numpy as np


def _decoded(exponent_bits: int, mantissa_bits: int, bias: int, *, has_infinity: bool) -> np.ndarray:
    values = np.zeros(256, np.float32)
    for code in range(256):
        mantissa = code & ((1 << mantissa_bits) - 1)
        exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
        top = exponent == (1 << exponent_bits) - 1
        if top and has_infinity:
            value = np.inf if mantissa == 0 else np.nan
        elif top and mantissa == (1 << mantissa_bits) - 1:
            value = np.nan
        elif exponent == 0:
            value = mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            value = (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
        values[code] = -value if code & 128 else value
    return values


E4M3_VALUES = _decoded(4, 3, 7, has_infinity=False)
E5M2_VALUES = _decoded(5, 2, 15, has_infinity=True)
E8M0_VALUES = np.array([2.0 ** (code - 127) for code in range(255)] + [np.nan], np.float64)
_NAN = {"e4m3": 0x7F, "e5m2": 0x7F}


def _nearest(x: np.ndarray, values: np.ndarray, nan: int) -> np.ndarray:
    """Return the code of the finite value nearest to each x, ties to even codes, beyond the last one that one."""
    finite = values[:128][np.isfinite(values[:128])].astype(np.float64)
    size = np.abs(x.astype(np.float64))
    above = np.clip(np.searchsorted(finite, size), 1, len(finite) - 1)
    low, high = finite[above - 1], finite[above]
    middle = (low + high) / 2
    up = (size > middle) | ((size == middle) & (above % 2 == 0))
    code = np.where(up, above, above - 1) | np.where(np.signbit(x), 128, 0)
    return np.where(np.isnan(x), nan, code).astype(np.uint16)


def e4m3_codes(x: np.ndarray) -> np.ndarray:
    """Round to E4M3, beyond 448 to 448 (cvt.rn.satfinite)."""
    return _nearest(x, E4M3_VALUES, 0x7F)


def e5m2_codes(x: np.ndarray) -> np.ndarray:
    """Round to E5M2, beyond 57,344 to that."""
    return _nearest(x, E5M2_VALUES, 0x7F)


def bf16_codes(x: np.ndarray) -> np.ndarray:
    """Round to bfloat16, ties to even; NaN is 0x7FFF."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def bf16_values(codes: np.ndarray) -> np.ndarray:
    """Return what bfloat16 codes stand for."""
    return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
