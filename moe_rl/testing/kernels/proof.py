"""What the machine code of every kernel says about its speed, beside DeepGEMM's: `make kernel-proof`. Nothing is timed.

Run without TRITON_INTERPRET; on any CPU. A product's main loop has four roofs, in TFLOPS of one H100 (SXM):

    lockstep   all warpgroups wait at one barrier, promote or shuffle while tensor cores idle: T / (T + E) of the peak
    issue      four schedulers issue the instructions of all warps of a step in no fewer cycles than it multiplies
    shared     bytes that TMA writes and products read per step, at 128 bytes per cycle
    L2         a tile's operations per byte that it reads, at 8 TB/s (the constant of DeepGEMM's own heuristics)

T: tensor cycles of a step. E: cycles to issue what no product can hide, from `Loop.exposed`; nothing where a second
program shares the SM. Barrier latency and the drain of products are not in E, so a roof is never reached. Element-wise
kernels have the bandwidth at which issuing their instructions takes as long as moving their bytes.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moe_rl.testing.kernels.aot import bundled, verdict
from moe_rl.testing.kernels.sass import TENSOR_WORDS, Loop, Program, disassemble, issue_cycles

SMS, CLOCK_HZ, SM_REGISTERS, SM_SHARED_BYTES = 132, 1.755e9, 65_536, 233_472
PEAK_TFLOPS = {1: 1979.0, 2: 989.5}
"""By bytes per element: NVIDIA H100 SXM data sheet, dense."""
FLOPS_PER_CYCLE = {1: 8192, 2: 4096}
"""Of one SM: 64 x 128 x 32 FP8 products take 64 cycles."""
L2_BYTES_PER_S = 8e12
SHARED_BYTES_PER_CYCLE = 128
WARPGROUP_ROWS, WARPGROUP_WARPS = 64, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """The output tile of one program and its step along the sum."""

    rows: int
    columns: int
    step: int
    element_bytes: int
    num_warps: int
    """That multiply; a producer warp does not count."""
    multicast: int = 1
    """Programs that share one read of the columns' operand."""

    @property
    def tensor_cycles(self) -> float:
        """Cycles for which tensor cores are busy in a step."""
        return 2 * self.rows * self.columns * self.step / FLOPS_PER_CYCLE[self.element_bytes]

    @property
    def shared_cycles(self) -> float:
        """Cycles for which shared memory is busy in a step: written once, read once per warpgroup."""
        step_bytes = self.step * self.element_bytes
        read = self.rows // WARPGROUP_ROWS * (WARPGROUP_ROWS + self.columns)
        return (self.rows + self.columns + read) * step_bytes / SHARED_BYTES_PER_CYCLE

    @property
    def l2_tflops(self) -> float:
        """Rate at which operands come from L2 as fast as it gives them."""
        per_byte = 2 * self.rows * self.columns / (self.rows + self.columns / self.multicast) / self.element_bytes
        return per_byte * L2_BYTES_PER_S / 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRow:
    """A kernel that multiplies."""

    name: str
    tile: str
    registers: int
    shared_bytes: int
    instructions_per_step: float
    cta_barriers_per_step: float
    tensor_cycles: float
    exposed_cycles: int
    programs_per_sm: int
    lockstep_tflops: float
    issue_tflops: float
    shared_tflops: float
    l2_tflops: float
    instructions_per_tile: int
    """Outside the main loop; 0 where a program has one tile."""
    problems: tuple[str, ...]

    @property
    def ceiling_tflops(self) -> float:
        """The lowest roof."""
        return min(self.lockstep_tflops, self.issue_tflops, self.shared_tflops, self.l2_tflops)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementRow:
    """A kernel that goes over elements."""

    name: str
    registers: int
    shared_bytes: int
    instructions_per_element: float
    bytes_per_element: float
    issue_gb_per_s: float
    problems: tuple[str, ...]


def product_row(
    name: str, program: Program, tile: TileShape, *, registers: int, shared_bytes: int, problems: Sequence[str] = ()
) -> ProductRow:
    """Return the roofs of a product's machine code."""
    loop = program.main_loop()
    if loop is None:
        raise ValueError(f"{name} has no loop that multiplies")
    steps = _steps(loop, tile)
    per_sm = min(
        SM_REGISTERS // (registers * 32 * tile.num_warps) if registers else 1, SM_SHARED_BYTES // max(1, shared_bytes)
    )
    exposed = issue_cycles(loop.exposed, tile.num_warps) / steps if per_sm < 2 else 0.0
    busy, peak = tile.tensor_cycles, PEAK_TFLOPS[tile.element_bytes]
    issued = max(1, tile.num_warps // WARPGROUP_WARPS) * len(loop.body) / steps
    return ProductRow(
        name=name, tile=f"{tile.rows}x{tile.columns}x{tile.step}", registers=registers, shared_bytes=shared_bytes,
        instructions_per_step=len(loop.body) / steps, cta_barriers_per_step=loop.cta_barriers / steps,
        tensor_cycles=busy, exposed_cycles=round(exposed), programs_per_sm=max(1, per_sm),
        lockstep_tflops=peak * busy / (busy + exposed), issue_tflops=peak * min(1.0, busy / issued),
        shared_tflops=peak * min(1.0, busy / tile.shared_cycles), l2_tflops=min(peak, tile.l2_tflops),
        instructions_per_tile=program.tile_overhead(loop), problems=tuple(problems),
    )  # fmt: skip


def _steps(loop: Loop, tile: TileShape) -> float:
    """Return how many steps one pass of the loop makes: a compiler unrolls."""
    products = (instruction.operation.split(".")[1] for instruction in loop.body if instruction.word in TENSOR_WORDS)
    of_pass = sum(math.prod(map(int, product.split("x"))) for product in products)
    return of_pass * (tile.num_warps // WARPGROUP_WARPS) / (tile.rows * tile.columns * tile.step)


def tile_of(constants: dict[str, Any], options: dict[str, Any], function: str) -> TileShape:
    """Return the tile of one of our launches."""
    is_wgrad = "BLOCK_T" in constants
    rows, columns, step = ("BLOCK_N", "BLOCK_K", "BLOCK_T") if is_wgrad else ("BLOCK_M", "BLOCK_N", "BLOCK_K")
    is_fp8 = constants.get("SCALING", "none") != "none" or "fp8" in function
    warps = (
        constants[rows] // WARPGROUP_ROWS * WARPGROUP_WARPS if constants.get("SPECIALIZED") else options["num_warps"]
    )
    return TileShape(
        rows=constants[rows], columns=constants[columns] + constants.get("MORE_N", 0), step=constants[step],
        element_bytes=1 if is_fp8 else 2, num_warps=warps,
    )  # fmt: skip


def prove(arch: int) -> Iterator[ProductRow | ElementRow]:
    """Yield a row per launch that is shipped for Hopper."""
    from moe_rl.testing.kernels.launches import one_per_name, shipped_launches

    for launch in sorted(one_per_name(shipped_launches(arch)), key=lambda launch: launch.name):
        found, kernel = verdict(launch), launch.compile()
        program = disassemble(kernel.asm["cubin"], bundled("nvdisasm"))
        facts: dict[str, Any] = {
            "registers": found.registers, "shared_bytes": found.shared_bytes, "problems": found.problems
        }  # fmt: skip
        if program.words.keys() & set(TENSOR_WORDS):
            yield product_row(launch.name, program, tile_of(launch.constants, launch.options, launch.name), **facts)
        elif row := element_row(launch, program, **facts):
            yield row


COUNTED_BY = ("rows_ptr", "out_ptr", "grad_out_ptr", "grad_ptr", "x_ptr")
"""Parameters whose elements an element-wise kernel goes over, the first that it has."""


def element_row(launch: Any, program: Program, **facts: Any) -> ElementRow | None:
    """Return the issue roof of a kernel that goes over a matrix; None for those of maps and counts."""
    counted = next((launch.tensors[name] for name in COUNTED_BY if name in launch.tensors), None)
    sides = [launch.constants[s] for s in ("BLOCK_ROWS", "ROWS", "SIDE") if s in launch.constants][:1]
    sides += [launch.constants[s] for s in ("BLOCK_COLS", "COLS", "SIDE") if s in launch.constants][:1]
    if counted is None or counted.dim() != 2 or len(sides) != 2:
        return None
    # A kernel that walks along its rows does its tile's elements in each pass of every loop that loads.
    loops = [loop for loop in program.loops() if loop.count("LDG")]
    executed = sum(program.executed(loop) for loop in loops) if loops else program.executed()
    threads = 32 * launch.options["num_warps"]
    per_element = executed * threads / (sides[0] * sides[1])
    moved = sum(tensor.numel() * tensor.element_size() for tensor in launch.tensors.values()) / counted.numel()
    rate = SMS * 4 * 32 * CLOCK_HZ / per_element * moved / 1e9
    return ElementRow(
        name=launch.name, instructions_per_element=per_element, bytes_per_element=moved, issue_gb_per_s=rate, **facts
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One DeepGEMM kernel (deepseek-ai/DeepGEMM) as its launcher instantiates it, on Qwen3-30B's sizes."""

    name: str
    header: str
    kernel: str
    tile: TileShape


_FP8, _BF16 = "cutlass::bfloat16_t, epilogue::transform::EpilogueIdentity", "cutlass::bfloat16_t"
_SQUARE = TileShape(rows=128, columns=128, step=128, element_bytes=1, num_warps=8, multicast=2)
PEERS = (
    Peer(name="DeepGEMM 1d2d, multicast 2", header="sm90_fp8_gemm_1d2d", tile=_SQUARE,
         kernel="sm90_fp8_gemm_1d2d_impl<cute::UMMA::Major::K, 0, 1536, 2048, 16, 128, 128, 128, 128, 128, 128, 5, "
                f"128, 256, 2, false, 132, GemmType::MGroupedContiguous, {_FP8}>"),
    Peer(name="DeepGEMM 1d2d, multicast 2", header="sm90_fp8_gemm_1d2d", tile=replace(_SQUARE, columns=160),
         kernel="sm90_fp8_gemm_1d2d_impl<cute::UMMA::Major::K, 0, 1600, 2048, 16, 128, 160, 128, 128, 128, 64, 5, 128, "
                f"256, 2, false, 132, GemmType::MGroupedContiguous, {_FP8}>"),
    Peer(name="DeepGEMM 1d1d (wgrad)", header="sm90_fp8_gemm_1d1d", tile=replace(_SQUARE, multicast=1),
         kernel="sm90_fp8_gemm_1d1d_impl<0, 1536, 2048, 16, 128, 128, 128, 128, 128, 5, 128, 256, 1, false, 132, "
                "GemmType::KGroupedContiguous, float>"),
    Peer(name="DeepGEMM bf16, multicast 2", header="sm90_bf16_gemm",
         tile=replace(_SQUARE, columns=256, step=64, element_bytes=2),
         kernel="sm90_bf16_gemm_impl<cute::UMMA::Major::K, cute::UMMA::Major::K, 0, 1536, 2048, 16, 128, 256, 64, 128, "
                f"128, 128, 4, 128, 256, 2, false, 132, GemmType::MGroupedContiguous, false, {_BF16}>"),
)  # fmt: skip


def prove_peers(include: Path, nvcc: str) -> Iterator[ProductRow]:
    """Compile DeepGEMM's kernels from its headers and yield their roofs."""
    for peer in PEERS:
        with tempfile.TemporaryDirectory() as folder:
            source, cubin = Path(folder) / "peer.cu", Path(folder) / "peer.cubin"
            source.write_text(
                f"#include <deep_gemm/impls/{peer.header}.cuh>\n#include <deep_gemm/epilogue/transform.cuh>\n"
                f"using namespace deep_gemm;\nvoid* kernel() {{ return (void*)&{peer.kernel}; }}\n"
            )
            options = ("-std=c++20", "-O3", "-arch=sm_90a", "--expt-relaxed-constexpr", "-w", "-cubin")
            subprocess.run([nvcc, *options, "-I", str(include), str(source), "-o", str(cubin)], check=True)
            program = disassemble(cubin.read_bytes(), bundled("nvdisasm"))
        # Its math warpgroups ask for their own registers at run time, and one program fills an SM.
        row = product_row(peer.name, program, peer.tile, registers=0, shared_bytes=SM_SHARED_BYTES)
        # Unrolled for several lengths of the sum, so that no part of the code is what a tile costs.
        yield replace(row, instructions_per_tile=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A timing that others published, in TFLOPS, and the tile that the kernel is assumed to have had."""

    name: str
    tile: TileShape
    tflops: float
    source: str


_WIDE = replace(_SQUARE, columns=256, multicast=1)
PUBLISHED = (
    Published(name="DeepGEMM 1d2d, grouped", tile=PEERS[1].tile, tflops=1381, source="deepseek-ai/DeepGEMM#74, H800"),
    Published(name="FBGEMM FP8 by rows", tile=_WIDE, tflops=1359, source="pytorch/FBGEMM#2546, H100"),
    Published(name="DeepGEMM 1d2d, grouped", tile=PEERS[0].tile, tflops=1346, source="deepseek-ai/DeepGEMM, H800"),
    Published(name="FBGEMM FP8 by blocks", tile=PEERS[2].tile, tflops=927, source="pytorch/FBGEMM#2546, H100"),
    Published(name="DeepGEMM 1d1d, wgrad", tile=PEERS[2].tile, tflops=873, source="deepseek-ai/DeepGEMM#107, H200"),
    Published(name="Triton bf16 through TMA", tile=replace(_WIDE, step=64, element_bytes=2), tflops=628,
              source="tile-ai/TileOPs#1567, H200"),
    Published(name="Triton bf16", tile=replace(_SQUARE, step=64, element_bytes=2, multicast=1), tflops=490,
              source="tile-ai/TileOPs#1567, H200"),
)  # fmt: skip
"""Nothing here is fitted: the roofs have the data sheet's peak and DeepGEMM's own constant."""


def page(products: Sequence[ProductRow], elements: Sequence[ElementRow], notes: Sequence[str], command: str) -> str:
    """Return the Markdown page."""
    lines = [
        "# What the kernels' machine code says about their speed", "",
        f"`{command}`: static, not measured. Roofs of one H100 in TFLOPS; what they mean stands in "
        "`moe_rl/testing/kernels/proof.py`. A roof is a bound that no run reaches.", "",
        *(f"{note}\n" for note in notes),
        "| kernel | tile | registers | instructions / barriers per step | T | E | lockstep | issue | shared | L2 | "
        "lowest | instructions per tile |",
        f"|---|---|{'--:|' * 10}",
    ]  # fmt: skip
    for row in sorted(products, key=lambda row: -row.ceiling_tflops):
        roofs = (row.lockstep_tflops, row.issue_tflops, row.shared_tflops, row.l2_tflops, row.ceiling_tflops)
        lines.append(
            f"| {row.name} | {row.tile} | {row.registers or ''} | {row.instructions_per_step:.0f} / "
            f"{row.cta_barriers_per_step:.0f} | {row.tensor_cycles:.0f} | {row.exposed_cycles} | "
            f"{' | '.join(f'{roof:.0f}' for roof in roofs)} | {row.instructions_per_tile or ''} |"
        )
    lines += ["", "| kernel | registers | instructions per element | bytes per element | issue roof, GB/s |",
              "|---|--:|--:|--:|--:|"]  # fmt: skip
    for element in sorted(elements, key=lambda row: row.issue_gb_per_s):
        lines.append(
            f"| {element.name} | {element.registers} | {element.instructions_per_element:.1f} | "
            f"{element.bytes_per_element:.2f} | {element.issue_gb_per_s:.0f} |"
        )
    lines += [
        "", "What others measured, beside the L2 roof of the tile that their kernel is assumed to have had; nothing is "
        "fitted to it:", "", "| kernel | tile | roof | published | of the roof | source |", "|---|---|--:|--:|--:|---|",
    ]  # fmt: skip
    for known in PUBLISHED:
        roof = known.tile.l2_tflops
        lines.append(
            f"| {known.name} | {known.tile.rows}x{known.tile.columns}x{known.tile.step} | {roof:.0f} | "
            f"{known.tflops:.0f} | {known.tflops / roof:.0%} | {known.source} |"
        )
    every: list[ProductRow | ElementRow] = [*products, *elements]
    wrong = [f"- {row.name}: {problem}" for row in every for problem in row.problems]
    return "\n".join([*lines, *(["", "## Problems", "", *wrong] if wrong else [])]) + "\n"


def main() -> int:
    """Write both files; exit code 1 where a shipped kernel has a problem."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--into", type=Path, default=Path("benchmarks/results/static"))
    parser.add_argument("--deep-gemm", type=Path, help="include folder of DeepGEMM, for its kernels beside ours")
    parser.add_argument("--nvcc", default="nvcc")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.stderr.write("TRITON_INTERPRET=1 is set: interpreted kernels cannot be compiled.\n")
        return 2
    import triton

    rows = list(prove(90))
    products = [row for row in rows if isinstance(row, ProductRow)]
    elements = [row for row in rows if isinstance(row, ElementRow)]
    notes = [f"Triton {triton.__version__}, sm_90a."]
    if arguments.deep_gemm is None or not arguments.deep_gemm.is_dir():
        notes.append("DeepGEMM's kernels are not beside ours: there is no folder of its headers (--deep-gemm).")
    else:
        try:
            products += prove_peers(arguments.deep_gemm, arguments.nvcc)
            notes.append("DeepGEMM: sgl-deep-gemm 0.1.5.post1, compiled from its headers.")
        except (OSError, subprocess.CalledProcessError) as error:
            notes.append(f"DeepGEMM's kernels are not beside ours: {type(error).__name__} of {arguments.nvcc}.")
    arguments.into.mkdir(parents=True, exist_ok=True)
    document = {
        "benchmark": "kernel_proof", "triton": triton.__version__, "notes": notes,
        "products": [asdict(row) | {"ceiling_tflops": row.ceiling_tflops} for row in products],
        "elements": [asdict(row) for row in elements],
    }  # fmt: skip
    (arguments.into / "kernel_proof.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (arguments.into / "kernel_proof.md").write_text(
        page(products, elements, notes, "make kernel-proof"), encoding="utf-8"
    )
    return int(any(row.problems for row in rows))


if __name__ == "__main__":
    sys.exit(main())
