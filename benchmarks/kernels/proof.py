"""What the machine code of every kernel says about its speed, beside that of others: `make kernel-proof`.

Nothing is timed. Run without TRITON_INTERPRET; on any CPU. Products have the roofs of `roofs`, on Hopper; on Blackwell,
whose tensor cores run beside all warps and whose rates of L2 nobody has published, what can be counted. Kernels that go
over elements have the bandwidth at which issuing their instructions takes as long as moving their bytes.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.kernels.aot import bundled, verdicts
from benchmarks.kernels.peers import (
    HOPPER,
    TRITON_PEERS,
    MissingPeerError,
    prove_deep_gemm,
    prove_triton_peer,
)
from benchmarks.kernels.proof_page import page
from benchmarks.kernels.roofs import (
    CLOCK_HZ,
    SMS,
    SPILL_WORDS,
    WARPGROUP_ROWS,
    WARPGROUP_WARPS,
    BlackwellRow,
    ElementRow,
    ProductRow,
    TileShape,
    blackwell_row,
    product_row,
)
from benchmarks.kernels.sass import TENSOR_WORDS, Program, disassemble

BLACKWELL = 100


def tile_of(constants: dict[str, Any], options: dict[str, Any], function: str) -> TileShape:
    """Return the tile of one of our launches."""
    is_wgrad = "BLOCK_T" in constants
    rows, columns, step = ("BLOCK_N", "BLOCK_K", "BLOCK_T") if is_wgrad else ("BLOCK_M", "BLOCK_N", "BLOCK_K")
    is_fp8 = constants.get("SCALING", "none") != "none" or "fp8" in function
    element_bytes = 1 if is_fp8 else 2
    # Two SMs of a cluster have the same rows in FP8, and the same columns in bf16.
    sms = options["num_ctas"]
    of_rows, of_columns = (sms, 1) if is_fp8 else (1, sms)
    of_sm = constants[rows] // of_columns
    warps = of_sm // WARPGROUP_ROWS * WARPGROUP_WARPS if constants.get("SPECIALIZED") else options["num_warps"]
    return TileShape(
        rows=of_sm, columns=(constants[columns] + constants.get("MORE_N", 0)) // of_rows, step=constants[step],
        element_bytes=element_bytes, num_warps=warps, multicast=of_columns, row_multicast=of_rows,
    )  # fmt: skip


def prove(arch: int) -> Iterator[BlackwellRow | ProductRow | ElementRow]:
    """Yield a row per launch that is shipped for an architecture; products of Hopper have roofs."""
    from benchmarks.kernels.launches import one_per_name, shipped_launches

    launches = sorted(one_per_name(shipped_launches(arch)), key=lambda launch: launch.name)
    for launch, found in zip(launches, verdicts(launches), strict=True):
        kernel = launch.compile()
        program = disassemble(kernel.asm["cubin"], bundled("nvdisasm"))
        facts: dict[str, Any] = {
            "registers": found.registers, "shared_bytes": found.shared_bytes, "problems": found.problems
        }  # fmt: skip
        if program.words.keys() & set(TENSOR_WORDS):
            row_of = product_row if arch == HOPPER else blackwell_row
            yield row_of(launch.name, program, tile_of(launch.constants, launch.options, launch.name), **facts)
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
    # A kernel that walks along its rows, or over a token's experts, does its tile's elements in each pass of every loop
    # that loads; what stands outside is done once. A loop over experts may be unrolled, and then stands there as well.
    per_token = launch.constants.get("TOP_K", 1)
    in_loops = sum(program.executed(loop) for loop in program.loops() if loop.count("LDG"))
    passes = per_token
    if in_loops and passes == 1:
        passes = math.ceil(counted.shape[1] / sides[1])
    executed = in_loops + (program.executed() - in_loops) / passes
    threads = 32 * launch.options["num_warps"]
    per_element = executed * threads / (sides[0] * sides[1])
    moved = sum(tensor.numel() * tensor.element_size() for tensor in launch.tensors.values()) / counted.numel()
    rate = SMS * 4 * 32 * CLOCK_HZ / per_element * moved / 1e9
    return ElementRow(
        name=launch.name,
        spills=sum(program.words[word] for word in SPILL_WORDS),
        instructions_per_element=per_element,
        bytes_per_element=moved,
        issue_gb_per_s=rate,
        **facts,
    )


def beside(wheels: Path, nvcc: str) -> tuple[list[ProductRow], list[str]]:
    """Return the rows of others' kernels, and a sentence on what there is of each and what is missing."""
    rows: list[ProductRow] = []
    notes: dict[str, None] = {}
    try:
        rows += prove_deep_gemm(wheels, nvcc)
        notes["DeepGEMM: compiled from the headers in the wheel of sgl-deep-gemm."] = None
    except MissingPeerError as error:
        notes[f"DeepGEMM's kernels are not beside ours: {error}"] = None
    for peer in TRITON_PEERS:
        try:
            rows.append(prove_triton_peer(peer, wheels))
        except MissingPeerError as error:
            notes[f"{peer.name.split()[0]}'s kernels are not beside ours: {error}"] = None
    return rows, list(notes)


def main() -> int:
    """Write both files; exit code 1 where a shipped kernel has a problem."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--into", type=Path, default=Path("benchmarks/results/static"))
    parser.add_argument("--peers", type=Path, default=Path("out/kernel-peers"), help="folder of the wheels of others")
    parser.add_argument("--nvcc", default="nvcc")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.stderr.write("TRITON_INTERPRET=1 is set: interpreted kernels cannot be compiled.\n")
        return 2
    import triton

    hopper, blackwell = (list(prove(arch)) for arch in (HOPPER, BLACKWELL))
    others, notes = beside(arguments.peers, arguments.nvcc)
    products = [row for row in hopper if isinstance(row, ProductRow)] + others
    elements, on_blackwell = ([row for row in rows if isinstance(row, ElementRow)] for rows in (hopper, blackwell))
    counted = [row for row in blackwell if isinstance(row, BlackwellRow)]
    notes = [f"Triton {triton.__version__}.", *notes]
    arguments.into.mkdir(parents=True, exist_ok=True)
    document = {
        "benchmark": "kernel_proof", "triton": triton.__version__, "notes": notes,
        "products": [asdict(row) | {"ceiling_tflops": row.ceiling_tflops} for row in products],
        "elements": [asdict(row) for row in elements],
        "sm_100a": {"products": [asdict(row) for row in counted], "elements": [asdict(row) for row in on_blackwell]},
    }  # fmt: skip
    (arguments.into / "kernel_proof.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    text = page(products, elements, counted, on_blackwell, notes)
    (arguments.into / "kernel_proof.md").write_text(text, encoding="utf-8")
    return int(any(row.problems for row in (*hopper, *blackwell)))


if __name__ == "__main__":
    sys.exit(main())
