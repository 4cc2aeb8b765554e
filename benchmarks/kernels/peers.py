"""Kernels of others, compiled from what their wheels carry, and what was published of such kernels.

A wheel is unpacked, not installed: DeepGEMM's headers (with CUTLASS's) for nvcc, FBGEMM's and Liger's Triton sources
for the Triton that compiles ours.
"""

import importlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.kernels.aot import bundled, verdict
from benchmarks.kernels.recording import recorded
from benchmarks.kernels.roofs import PEAK_TFLOPS, SM_SHARED_BYTES, SMS, ProductRow, TileShape, product_row
from benchmarks.kernels.sass import disassemble

HOPPER = 90
ROWS, GROUPS, N, K = 4096, 16, 1536, 2048
"""Qwen3-30B's gate/up projection on one of eight ranks."""


class MissingPeerError(Exception):
    """A peer that is not compiled; the message says why."""


def unpacked(wheels: Path, distribution: str, into: Path, prefix: str) -> None:
    """Unpack what a wheel has below `prefix`, without what packages import on their own."""
    found = sorted(wheels.glob(f"{distribution}-*.whl"))
    if not found:
        raise MissingPeerError(f"there is no wheel of {distribution} in {wheels}.")
    with zipfile.ZipFile(found[-1]) as wheel:
        below = [name for name in wheel.namelist() if name.startswith(prefix)]
        wheel.extractall(into, [name for name in below if not name.endswith("__init__.py")])


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaPeer:
    """One DeepGEMM kernel (deepseek-ai/DeepGEMM) as its launcher instantiates it."""

    name: str
    header: str
    kernel: str
    tile: TileShape


_FP8, _BF16 = "cutlass::bfloat16_t, epilogue::transform::EpilogueIdentity", "cutlass::bfloat16_t"
_SQUARE = TileShape(rows=128, columns=128, step=128, element_bytes=1, num_warps=8, multicast=2)
DEEP_GEMM = (
    CudaPeer(name="DeepGEMM 1d2d, multicast 2", header="sm90_fp8_gemm_1d2d", tile=_SQUARE,
         kernel="sm90_fp8_gemm_1d2d_impl<cute::UMMA::Major::K, 0, 1536, 2048, 16, 128, 128, 128, 128, 128, 128, 5, "
                f"128, 256, 2, false, 132, GemmType::MGroupedContiguous, {_FP8}>"),
    CudaPeer(name="DeepGEMM 1d2d, multicast 2", header="sm90_fp8_gemm_1d2d", tile=replace(_SQUARE, columns=160),
         kernel="sm90_fp8_gemm_1d2d_impl<cute::UMMA::Major::K, 0, 1600, 2048, 16, 128, 160, 128, 128, 128, 64, 5, 128, "
                f"256, 2, false, 132, GemmType::MGroupedContiguous, {_FP8}>"),
    CudaPeer(name="DeepGEMM 1d1d (wgrad)", header="sm90_fp8_gemm_1d1d", tile=replace(_SQUARE, multicast=1),
         kernel="sm90_fp8_gemm_1d1d_impl<0, 1536, 2048, 16, 128, 128, 128, 128, 128, 5, 128, 256, 1, false, 132, "
                "GemmType::KGroupedContiguous, float>"),
    CudaPeer(name="DeepGEMM bf16, multicast 2", header="sm90_bf16_gemm",
         tile=replace(_SQUARE, columns=256, step=64, element_bytes=2),
         kernel="sm90_bf16_gemm_impl<cute::UMMA::Major::K, cute::UMMA::Major::K, 0, 1536, 2048, 16, 128, 256, 64, 128, "
                f"128, 128, 4, 128, 256, 2, false, 132, GemmType::MGroupedContiguous, false, {_BF16}>"),
)  # fmt: skip


def prove_deep_gemm(wheels: Path, nvcc: str) -> Iterator[ProductRow]:
    """Compile DeepGEMM's kernels from its headers and yield their roofs."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        unpacked(wheels, "sgl_deep_gemm", folder, "deep_gemm/include/")
        source, cubin = folder / "peer.cu", folder / "peer.cubin"
        for peer in DEEP_GEMM:
            source.write_text(
                f"#include <deep_gemm/impls/{peer.header}.cuh>\n#include <deep_gemm/epilogue/transform.cuh>\n"
                f"using namespace deep_gemm;\nvoid* kernel() {{ return (void*)&{peer.kernel}; }}\n"
            )
            options = ("-std=c++20", "-O3", "-arch=sm_90a", "--expt-relaxed-constexpr", "-w", "-cubin")
            include = folder / "deep_gemm" / "include"
            try:
                subprocess.run([nvcc, *options, "-I", str(include), str(source), "-o", str(cubin)], check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                raise MissingPeerError(f"{type(error).__name__} of {nvcc}.") from error
            program = disassemble(cubin.read_bytes(), bundled("nvdisasm"))
            # Its math warpgroups ask for their own registers at run time, and one program fills an SM.
            yield product_row(peer.name, program, peer.tile, registers=0, shared_bytes=SM_SHARED_BYTES)


Call = Callable[[Any, TileShape, dict[str, int]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonPeer:
    """One Triton kernel with a tile that its own tuning tries."""

    name: str
    distribution: str
    module: str
    call: Call
    tile: TileShape
    num_stages: int = 3


def _fbgemm_rows(module: Any, tile: TileShape, launch: dict[str, int]) -> None:
    x, w = (torch.empty(rows, K, dtype=torch.float8_e4m3fn) for rows in (ROWS, GROUPS * N))
    x_scale, w_scale = torch.empty(ROWS), torch.empty(GROUPS * N)
    module._fbgemm_grouped_gemm_fp8_rowwise.fn[(SMS,)](
        x, x_scale, w, w_scale, w_scale, torch.empty(ROWS, N, dtype=torch.bfloat16), None, _sizes(), GROUPS, ROWS, N,
        K, SMS, False, True, False, True, **_fbgemm_sides(tile), **launch,
    )  # fmt: skip


def _fbgemm_bf16(module: Any, tile: TileShape, launch: dict[str, int]) -> None:
    x, w = (torch.empty(rows, K, dtype=torch.bfloat16) for rows in (ROWS, GROUPS * N))
    module._fbgemm_grouped_gemm.fn[(SMS,)](
        x, w, torch.empty(ROWS, N, dtype=torch.bfloat16), None, _sizes(), GROUPS, ROWS, N, K, SMS, False, True, False,
        True, **_fbgemm_sides(tile), **launch,
    )  # fmt: skip


def _fbgemm_sides(tile: TileShape) -> dict[str, int]:
    return {
        "BLOCK_SIZE_M": tile.rows, "BLOCK_SIZE_N": tile.columns, "BLOCK_SIZE_K": tile.step, "NUM_CONSUMER_GROUPS": 1
    }  # fmt: skip


def _sizes() -> torch.Tensor:
    return torch.full((GROUPS,), ROWS // GROUPS, dtype=torch.int32)


def _liger_down(module: Any, tile: TileShape, launch: dict[str, int]) -> None:
    x, out = torch.empty(ROWS, K, dtype=torch.bfloat16), torch.empty(ROWS, N, dtype=torch.bfloat16)
    w, tiles = torch.empty(GROUPS, N, K, dtype=torch.bfloat16), torch.zeros(ROWS // tile.rows, dtype=torch.int32)
    module._fused_down_proj_kernel.fn[(len(tiles), N // tile.columns)](
        x, w, torch.zeros(GROUPS + 1, dtype=torch.int32), tiles, tiles, out, N, K, x.stride(0), 1, w.stride(0),
        w.stride(1), 1, out.stride(0), 1, tile.rows, tile.columns, tile.step, **launch,
    )  # fmt: skip


_FBGEMM = "fbgemm_gpu.experimental.gemm.triton_gemm.grouped_gemm"
_LIGER = "liger_kernel.ops.fused_moe_kernels"
_ALONE = replace(_SQUARE, multicast=1)
TRITON_PEERS = (
    TritonPeer(name="FBGEMM FP8 by rows, fast sums", distribution="fbgemm_gpu_genai", module=_FBGEMM,
               call=_fbgemm_rows, tile=replace(_ALONE, columns=256)),
    TritonPeer(name="FBGEMM FP8 by rows, fast sums", distribution="fbgemm_gpu_genai", module=_FBGEMM,
               call=_fbgemm_rows, tile=_ALONE),
    TritonPeer(name="FBGEMM bf16", distribution="fbgemm_gpu_genai", module=_FBGEMM, call=_fbgemm_bf16,
               tile=replace(_ALONE, columns=256, step=64, element_bytes=2)),
    TritonPeer(name="Liger bf16, down projection", distribution="liger_kernel", module=_LIGER, call=_liger_down,
               tile=replace(_ALONE, rows=64, step=64, element_bytes=2, num_warps=4)),
)  # fmt: skip
"""The widest tile of each that its tuning tries, and FBGEMM's of ours."""


def prove_triton_peer(peer: TritonPeer, wheels: Path) -> ProductRow:
    """Compile a Triton kernel from its wheel and return its roofs."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = peer.module.rpartition(".")[0].replace(".", "/")
        unpacked(wheels, peer.distribution, Path(folder), f"{prefix}/")
        sys.path.insert(0, folder)
        try:
            module = importlib.import_module(peer.module)
            with recorded(HOPPER) as launches:
                peer.call(module, peer.tile, {"num_warps": peer.tile.num_warps, "num_stages": peer.num_stages})
            found, kernel = verdict(launches[0]), launches[0].compile()
        except ImportError as error:
            raise MissingPeerError(f"{error}.") from error
        finally:
            sys.path.remove(folder)
    program = disassemble(kernel.asm["cubin"], bundled("nvdisasm"))
    return product_row(peer.name, program, peer.tile, registers=found.registers, shared_bytes=found.shared_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A timing that others published, in TFLOPS."""

    name: str
    tile: TileShape
    """The one that they name, or that the kernel is assumed to have."""
    tflops: float
    source: str
    is_grouped: bool = True
    is_tile_known: bool = False

    @property
    def roof_tflops(self) -> float:
        """Of L2 and of the data sheet; no other roof of these tiles is lower."""
        return min(self.tile.l2_tflops, PEAK_TFLOPS[self.tile.element_bytes])

    @property
    def share(self) -> float:
        """Of its roof."""
        return self.tflops / self.roof_tflops


_WIDE = replace(_ALONE, columns=256)
_LARGE = replace(_SQUARE, columns=160)
_WGRAD = replace(_ALONE, columns=152)
PUBLISHED = (
    Published(name="DeepGEMM 1d2d", tile=_LARGE, tflops=1381, source="deepseek-ai/DeepGEMM#74, H800",
              is_tile_known=True),
    Published(name="DeepGEMM 1d2d", tile=_SQUARE, tflops=1317, source="deepseek-ai/DeepGEMM#74, H800",
              is_tile_known=True),
    Published(name="DeepGEMM 1d1d, wgrad", tile=_WGRAD, tflops=1044, source="deepseek-ai/DeepGEMM#95, H800"),
    Published(name="DeepGEMM bf16", tile=DEEP_GEMM[3].tile, tflops=670, source="tile-ai/TileOPs#1567, H200"),
    Published(name="Triton bf16 through TMA", tile=replace(_WIDE, step=64, element_bytes=2), tflops=628,
              source="tile-ai/TileOPs#1567, H200"),
    Published(name="Triton bf16", tile=replace(_ALONE, step=64, element_bytes=2), tflops=490,
              source="tile-ai/TileOPs#1567, H200"),
    Published(name="DeepGEMM 1d2d", tile=_LARGE, tflops=1470, source="deepseek-ai/DeepGEMM#74, H800",
              is_grouped=False, is_tile_known=True),
    Published(name="DeepGEMM 1d2d", tile=_SQUARE, tflops=1404, source="deepseek-ai/DeepGEMM#74, H800",
              is_grouped=False, is_tile_known=True),
    Published(name="FBGEMM FP8 by rows", tile=_WIDE, tflops=1359, source="pytorch/FBGEMM#2546, H100",
              is_grouped=False),
    Published(name="Triton FP8 by rows", tile=_WIDE, tflops=1190, source="meta-pytorch/tritonbench#1149, H100",
              is_grouped=False, is_tile_known=True),
    Published(name="DeepGEMM 1d1d, wgrad", tile=_WGRAD, tflops=1092, source="deepseek-ai/DeepGEMM#95, H800",
              is_grouped=False, is_tile_known=True),
    Published(name="FBGEMM FP8 by blocks", tile=_ALONE, tflops=927, source="pytorch/FBGEMM#2546, H100",
              is_grouped=False),
)  # fmt: skip
"""The best that each source has, grouped products first; roofs have the data sheet's peak and DeepGEMM's constant."""


def fitted_share() -> float:
    """Return what grouped products reach of their roof; the dense ones are left out of it, to be predicted."""
    return median(timing.share for timing in PUBLISHED if timing.is_grouped)
