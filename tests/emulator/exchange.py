"""Plain tiles, once emulated and once interpreted: `python -m emulator.exchange NAME FILE` emulates and saves."""

import sys
from pathlib import Path

import torch

from benchmarks.kernels.cases import GemmCase, rows_gemm
from moe_rl.kernels.gemm import triton_kernel
from moe_rl.kernels.gemm.tiling import GemmConfig, Scaling

PLAIN_TILES: dict[str, tuple[Scaling, GemmConfig]] = {
    "none": ("none", GemmConfig(kernel="tma", block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=4)),
    "block": ("block", GemmConfig(kernel="tma", block_m=128, block_n=128, block_k=128, num_warps=8, num_stages=4)),
    "row": ("row", GemmConfig(kernel="pointer", block_m=64, block_n=128, block_k=128, num_warps=4, num_stages=3)),
}


def plain_results(name: str) -> list[torch.Tensor]:
    """Return forward and dgrad of a plain tile, by whatever runs kernels here."""
    from emulator.cases import exact_operands

    scaling, tile = PLAIN_TILES[name]
    made = exact_operands(GemmCase(sizes=(70, 0, 130), n=208, k=336, extra_rows=5, scaling=scaling))
    found = [triton_kernel.forward(rows_gemm(made.x, made.weights, made.m_offsets), chosen=tile)]
    if scaling != "row" and tile.kernel == "tma":
        found.append(triton_kernel.dgrad(rows_gemm(made.dy, made.weights, made.m_offsets), chosen=tile))
    return found


if __name__ == "__main__":
    from emulator.launch import emulated
    from emulator.schedules import Schedule

    torch.set_num_threads(1)
    with emulated(90, Schedule(name="late")):
        results = plain_results(sys.argv[1])
    torch.save(results, Path(sys.argv[2]))
