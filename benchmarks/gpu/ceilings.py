"""What this machine can do at all: copies, dense products, reads of L2."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.machine import Machine
    from benchmarks.gpu.rows import Figure

STEPS = ("copy", "bf16", "FP8", "L2")
L2_BYTES = 30 * 10**6


def run(step: str, machine: Machine) -> dict[str, Figure]:
    """Measure one rate."""
    import torch

    from benchmarks.gpu.machine import tflops

    side = machine.full(8192, 64)
    if step == "copy":
        size = machine.full(2**31, 2**12)
        source = torch.ones(size, dtype=torch.uint8, device=machine.device)
        target = torch.empty_like(source)
        us = machine.microseconds(lambda: target.copy_(source))
        return {"TB/s": 2 * size / us / 1e6}
    if step == "L2":
        # Sums of what stays in L2: one launch reads it again and again, nothing is written but the sums.
        count = machine.full(200, 1)
        data = torch.ones(machine.full(L2_BYTES // 4, 64), dtype=torch.float32, device=machine.device)
        again = data.expand(count, -1)
        us = machine.microseconds(lambda: again.sum(1))
        return {"TB/s": count * 4 * data.numel() / us / 1e6, "MB": 4 * data.numel() / 1e6}
    # Random operands: zeros draw less power and so run at a higher clock.
    a, b = (torch.randn(side, side, device=machine.device) for _ in range(2))
    if step == "bf16":
        wide = a.bfloat16(), b.bfloat16()
        return {"TFLOPS": tflops(2.0 * side**3, machine.microseconds(lambda: wide[0] @ wide[1]))}
    codes, one = (a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)), torch.ones((), device=machine.device)

    def product() -> torch.Tensor:
        found: torch.Tensor = torch._scaled_mm(codes[0], codes[1].t(), one, one, out_dtype=torch.bfloat16)
        return found

    return {"TFLOPS": tflops(2.0 * side**3, machine.microseconds(product))}
