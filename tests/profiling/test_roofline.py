"""The roofline is the slower of bytes and products at measured rates."""

import math

import pytest

pytest.importorskip("torch", reason="the roofline is measured with torch")

from benchmarks.operators.roofline import Roofline, Work, gb_per_s, measure_roofline, tflops
from moe_rl.core.errors import InvalidInputError

MEASURED = Roofline(device="test", fill_gb_per_s=3000.0, copy_gb_per_s=4000.0, bf16_tflops=500.0, fp8_tflops=1000.0)


def test_least_time_is_the_closed_form() -> None:
    assert MEASURED.least_time_us(Work(bytes_moved=4_000_000)) == pytest.approx(1.0)
    assert MEASURED.least_time_us(Work(bytes_moved=4_000_000, flops=10**9)) == pytest.approx(2.0)
    assert MEASURED.least_time_us(Work(bytes_moved=0, flops=10**9, precision="fp8")) == pytest.approx(1.0)


def test_a_call_at_the_measured_rate_reaches_the_roofline() -> None:
    work = Work(bytes_moved=8_000_000, flops=10**8)
    assert MEASURED.fraction(work, MEASURED.least_time_us(work)) == 1.0
    assert MEASURED.fraction(work, 4.0) == pytest.approx(0.5)


def test_rates_are_work_per_time() -> None:
    work = Work(bytes_moved=10**9, flops=10**12)
    assert gb_per_s(work, 1e6) == pytest.approx(1.0)
    assert tflops(work, 1e6) == pytest.approx(1.0)


def test_fp8_work_needs_an_fp8_rate() -> None:
    without = Roofline(device="test", fill_gb_per_s=1.0, copy_gb_per_s=1.0, bf16_tflops=1.0, fp8_tflops=None)
    with pytest.raises(InvalidInputError, match="no measured FP8 rate"):
        without.least_time_us(Work(bytes_moved=1, flops=1, precision="fp8"))
    assert not without.covers(Work(bytes_moved=1, flops=1, precision="fp8"))
    assert without.least_time_us(Work(bytes_moved=1000, precision="fp8")) == pytest.approx(1.0)
    with pytest.raises(InvalidInputError, match="time must be positive"):
        without.fraction(Work(bytes_moved=1), 0.0)


def test_this_machines_cpu_can_be_measured() -> None:
    found = measure_roofline("cpu")
    assert found.device == "cpu"
    assert found.fp8_tflops is None
    assert all(
        math.isfinite(rate) and rate > 0 for rate in (found.fill_gb_per_s, found.copy_gb_per_s, found.bf16_tflops)
    )
