"""What fusing the permutation into a product would cost and save, from machine code. Nothing is timed, nothing ships.

    python -m benchmarks.fusions          # one table; without TRITON_INTERPRET, on any CPU

A forward product whose rows are read through an index needs no permuted copy of the tokens. On Hopper TMA cannot
gather, so the rows come through pointers (cp.async); Blackwell's TMA can. Each prototype is a plain loop of one tile,
beside the specialized loop over rows that lie in order. The first table has what the machine code says, the second
what a row of the up projection would take: with the tile that ships, with gathered rows, and the bytes that gathering
saves, at 3.35 TB/s. The lowest of the roofs counts (`moe_rl.testing.kernels.roofs`), as if it were reached.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from moe_rl.bench.recording import Launch, recorded
from moe_rl.testing.kernels.aot import bundled, verdict
from moe_rl.testing.kernels.roofs import ProductRow, TileShape, product_row
from moe_rl.testing.kernels.sass import disassemble

HBM_BYTES_PER_S = 3.35e12
"""NVIDIA H100 SXM data sheet."""
ROWS, TOKENS, HIDDEN, COLUMNS = 4096, 1024, 2048, 1536


@triton.jit
def _up_kernel(
    x_ptr, index_ptr, x_scale_ptr, w_ptr, w_scale_ptr, out_ptr, num_tokens, num_columns, num_sums,
    HOW: tl.constexpr, SPECIALIZED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Tile (i, j) of out = x[index] w^T; FP8 with scales of 1 x 128 rows and 128 x 128 weights."""
    first, column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    rows, columns = first + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    FP8: tl.constexpr = x_ptr.dtype.element_ty == tl.float8e4nv
    weights = tl.make_tensor_descriptor(w_ptr, [num_columns, num_sums], [num_sums, 1], [BLOCK_N, BLOCK_K])
    BOX: tl.constexpr = 1 if HOW == "tma gather" else BLOCK_M
    described = tl.make_tensor_descriptor(x_ptr, [num_tokens, num_sums], [num_sums, 1], [BOX, BLOCK_K])
    tokens = rows if HOW == "tma" else tl.load(index_ptr + rows)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, num_sums, BLOCK_K, warp_specialize=SPECIALIZED):
        if HOW == "tma":
            x = described.load([first, k])
        elif HOW == "tma gather":
            x = described.gather(tokens, k)
        else:
            x = tl.load(x_ptr + tokens[:, None] * num_sums + (k + tl.arange(0, BLOCK_K))[None, :])
        if FP8:
            product = tl.dot(x, weights.load([column, k]).T)
            blocks = num_sums // BLOCK_K
            row_scale = tl.load(x_scale_ptr + tokens * blocks + k // BLOCK_K)
            total += product * (row_scale * tl.load(w_scale_ptr + (column // 128) * blocks + k // BLOCK_K))[:, None]
        else:
            total = tl.dot(x, weights.load([column, k]).T, total)
    tl.store(out_ptr + rows[:, None] * num_columns + columns[None, :], total.to(tl.bfloat16))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prototype:
    """How rows are read, and the tile."""

    how: str
    tile: TileShape
    stages: int
    specialized: bool = False

    @property
    def name(self) -> str:
        """For the table."""
        kind = "FP8" if self.tile.element_bytes == 1 else "bf16"
        return f"{kind} {self.how}{' specialized' if self.specialized else ''}"


_FP8 = TileShape(rows=128, columns=128, step=128, element_bytes=1, num_warps=8)
_BF16 = TileShape(rows=128, columns=256, step=64, element_bytes=2, num_warps=8)
PROTOTYPES = (
    Prototype(how="tma", tile=_FP8, stages=3, specialized=True),
    Prototype(how="pointers", tile=_FP8, stages=3),
    Prototype(how="pointers", tile=_FP8, stages=3, specialized=True),
    Prototype(how="tma gather", tile=_FP8, stages=3),
    Prototype(how="tma", tile=_BF16, stages=3, specialized=True),
    Prototype(how="pointers", tile=_BF16, stages=3),
    Prototype(how="pointers", tile=replace(_BF16, columns=128), stages=3),
    Prototype(how="pointers", tile=_BF16, stages=3, specialized=True),
    Prototype(how="tma gather", tile=_BF16, stages=3),
)


def compiled(prototype: Prototype, arch: int) -> Launch:
    """Return the launch of a prototype as a GPU of `arch` would compile it."""
    tile = prototype.tile
    dtype = torch.float8_e4m3fn if tile.element_bytes == 1 else torch.bfloat16
    x, w = torch.empty(TOKENS, HIDDEN, dtype=dtype), torch.empty(COLUMNS, HIDDEN, dtype=dtype)
    scale = torch.empty(TOKENS, HIDDEN // 128), torch.empty(COLUMNS // 128, HIDDEN // 128)
    with recorded(arch) as launches:
        _up_kernel[(ROWS // tile.rows, COLUMNS // tile.columns)](
            x, torch.zeros(ROWS, dtype=torch.int32), scale[0], w, scale[1],
            torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16), TOKENS, COLUMNS, HIDDEN,
            HOW=prototype.how, SPECIALIZED=prototype.specialized, BLOCK_M=tile.rows, BLOCK_N=tile.columns,
            BLOCK_K=tile.step, num_warps=4 if prototype.specialized else tile.num_warps, num_stages=prototype.stages,
        )  # fmt: skip
    return launches[0]


def row_of(prototype: Prototype, arch: int) -> tuple[ProductRow, bool]:
    """Return its roofs, and whether the compiler did specialize its warps."""
    launch = compiled(prototype, arch)
    found, kernel = verdict(launch), launch.compile()
    program = disassemble(kernel.asm["cubin"], bundled("nvdisasm"))
    row = product_row(
        prototype.name, program, prototype.tile, registers=found.registers, shared_bytes=found.shared_bytes,
        problems=found.problems,
    )  # fmt: skip
    return row, bool(program.words["USETMAXREG"])


def lines(arch: int) -> Iterator[str]:
    """Yield the first table's rows; what does not compile says so."""
    for prototype in PROTOTYPES:
        tile = f"{prototype.tile.rows}x{prototype.tile.columns}x{prototype.tile.step}"
        begin = f"| sm_{arch} | {prototype.name} | {tile} |"
        try:
            row, is_specialized = row_of(prototype, arch)
        except Exception as error:  # whatever a compiler raises is a result here
            yield f"{begin} does not compile ({type(error).__name__}) | | | |"
            continue
        said = (
            "wgmma is serialized" if any("serializ" in problem for problem in row.problems) else "; ".join(row.problems)
        )
        if prototype.specialized and not is_specialized:
            said = "plain loop, silently"
        # The constants of the roofs are an H100's.
        roofs = f"{row.exposed_cycles} | {row.ceiling_tflops:.0f}" if arch == 90 else "|"
        yield f"{begin} {row.instructions_per_step:.0f} / {row.cta_barriers_per_step:.0f} | {roofs} | {said} |"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """Gathering in one situation: roofs of the tile that ships and of the gathering one, bytes of H per row saved."""

    name: str
    shipped: float
    gathered: float
    saved: Callable[[int], float]
    """Bytes per row and hidden element, of the top-k."""


FUSIONS = (
    Fusion(name="bf16, forward alone: no permuted copy", shipped=683, gathered=512, saved=lambda _: 4),
    Fusion(
        name="FP8, training: row codes are not written for each row", shipped=1229, gathered=1024, saved=lambda _: 1
    ),
    Fusion(
        name="FP8, forward alone: a token is quantized once", shipped=1229, gathered=1024, saved=lambda k: 3 - 3 / k
    ),
)
"""Beside a pass that permutes and quantizes at once; 128 x 192 and 128 x 256 ship, pointers reach 128 x 128."""
MODELS = (("Qwen3-30B-A3B", 2048, 768, 8), ("gpt-oss-120b", 2880, 2880, 4))


def economics() -> Iterator[str]:
    """Yield the second table's rows, in nanoseconds per row."""
    for fusion in FUSIONS:
        for model, hidden, intermediate, top_k in MODELS:
            flops = 4 * hidden * intermediate
            shipped, gathered = (flops / (roof * 1e3) for roof in (fusion.shipped, fusion.gathered))
            saved = fusion.saved(top_k) * hidden / HBM_BYTES_PER_S * 1e9
            verdict_of = "wins" if gathered - saved < shipped else "loses"
            yield (f"| {fusion.name} | {model} | {shipped:.2f} | {gathered:.2f} | {saved:.2f} | {verdict_of} |")


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arch", type=int, choices=(90, 100), action="append")
    torch.set_num_threads(1)
    print("| GPU | rows | tile | instructions / barriers | E | lowest roof | |\n|---|---|---|---|---|--:|---|")
    for arch in parser.parse_args().arch or (90,):
        for line in lines(arch):
            print(line, flush=True)
    print("\n| | model | ships, ns a row | gathers | saved | |\n|---|---|--:|--:|--:|---|")
    print("\n".join(economics()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
