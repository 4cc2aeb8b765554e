"""How fast this machine moves bytes and multiplies, measured, and how near to that a kernel comes.

Datasheet peaks are not reached by anything; what `fill_`, `copy_` and a large matrix product reach here and now is.
Work is counted from real sizes: padding is a cost of the kernel, not work.
"""

from dataclasses import asdict, dataclass
from typing import Literal

import torch

from benchmarks.operators.timer import Method, time_call
from moe_rl.core.errors import require

Precision = Literal["bf16", "fp8"]
CPU_BYTES, GPU_BYTES = 2**24, 2**31
CPU_SIDE, GPU_SIDE = 256, 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a call has to do at least: bytes read and written once each, and multiply-adds counted as two."""

    bytes_moved: int
    flops: int = 0
    precision: Precision = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Measured rates of one device."""

    device: str
    fill_gb_per_s: float
    copy_gb_per_s: float
    """Bytes read plus bytes written, per second."""
    bf16_tflops: float
    fp8_tflops: float | None
    """None where the device has no FP8 matrix product."""

    def covers(self, work: Work) -> bool:
        """Return whether every rate that `work` needs was measured."""
        return work.flops == 0 or work.precision == "bf16" or self.fp8_tflops is not None

    def least_time_us(self, work: Work) -> float:
        """Return the time of `work` at the measured rates, bytes and products fully overlapped."""
        require(self.covers(work), f"roofline: {self.device} has no measured FP8 rate.")
        peak = self.bf16_tflops if work.precision == "bf16" else self.fp8_tflops
        for_products = work.flops / peak / 1e6 if peak else 0.0
        return max(work.bytes_moved / self.copy_gb_per_s / 1e3, for_products)

    def fraction(self, work: Work, time_us: float) -> float:
        """Return the share of the measured rate that a call of `time_us` reaches; 1 is the roofline."""
        require(time_us > 0, f"roofline: time must be positive, got {time_us} us.")
        return self.least_time_us(work) / time_us

    def as_dict(self) -> dict[str, object]:
        """Return what a result file holds."""
        return asdict(self)


def gb_per_s(work: Work, time_us: float) -> float:
    """Return 1e9 bytes per second."""
    return work.bytes_moved / time_us / 1e3


def tflops(work: Work, time_us: float) -> float:
    """Return 1e12 operations per second."""
    return work.flops / time_us / 1e6


def measure_roofline(device: str) -> Roofline:
    """Measure `device` ("cuda", or "cpu" at sizes that take a moment only)."""
    on_gpu = device == "cuda"
    method: Method = "events" if on_gpu else "wall"
    fill, copy = _measure_bytes(GPU_BYTES if on_gpu else CPU_BYTES, device, method)
    side = GPU_SIDE if on_gpu else CPU_SIDE
    products = Work(bytes_moved=0, flops=2 * side**3)
    # Random operands: zeros draw less power and so run at a higher clock.
    a, b = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
    product = time_call(lambda: a @ b, method=method)
    return Roofline(
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
        fill_gb_per_s=fill,
        copy_gb_per_s=copy,
        bf16_tflops=tflops(products, product.median_us),
        fp8_tflops=_measure_fp8(side) if on_gpu and torch.cuda.get_device_capability() >= (8, 9) else None,
    )


def _measure_bytes(size: int, device: str, method: Method) -> tuple[float, float]:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    fill = time_call(lambda: target.fill_(1), method=method)
    copy = time_call(lambda: target.copy_(source), method=method)
    return gb_per_s(Work(bytes_moved=size), fill.median_us), gb_per_s(Work(bytes_moved=2 * size), copy.median_us)


def _measure_fp8(side: int) -> float:
    a, b = (torch.randn(side, side, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")

    def product() -> torch.Tensor:
        out: torch.Tensor = torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        return out

    timing = time_call(product, method="events")
    return tflops(Work(bytes_moved=0, flops=2 * side**3), timing.median_us)
