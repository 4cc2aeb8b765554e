"""Compile what is carried: every form of every specialized loop, and what `benchmarks/first_call.py` launches.

    python -m benchmarks.kernels.carry [--arch 90]       writes moe_rl/kernels/machine_code/sm_90a.zip

On any CPU, with the Triton of constraints.txt; `make gpu-pack` runs it. Run without TRITON_INTERPRET.
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
# Else machine code holds the folder of whoever compiled it, and its archive differs from checkout to checkout.
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"

import torch
from triton.runtime.jit import JITFunction

from benchmarks.gpu.machine import Machine, as_hopper
from benchmarks.gpu.phases import PHASES
from benchmarks.kernels.cases import GemmCase, make_operands, rows_gemm, wgrad_gemm
from benchmarks.kernels.pool import in_pool
from benchmarks.kernels.recording import Launch, _launch, recorded
from moe_rl.kernels.carried import (
    MACHINE_CODE,
    Archive,
    CarriedKernel,
    launch_key,
    sources_digest,
    text_digest,
    tile_name,
)
from moe_rl.kernels.gemm import triton_kernel, triton_wgrad
from moe_rl.kernels.gemm.tiling import GemmProblem, Op, Scaling, candidates
from moe_rl.kernels.gemm.weights import ExpertGradients, ExpertWeights

RECORDED = ("loops", "roofs", "promise", "small groups", "memory-bound", "casts")
"""Phases whose kernels are ours."""
MOST_BYTES = 4 * 2**20


@dataclass
class Notes:
    """Launches by the key that carries them."""

    launches: dict[str, Launch] = field(default_factory=dict)
    tiles: dict[str, list[str]] = field(default_factory=dict)
    """Of specialized loops, by key."""
    tile: str = ""
    """That is launched now."""


def noted(arch: int, notes: Notes) -> Any:
    """Return what takes the place of `JITFunction.run` within `recorded`."""

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> None:
        key, _ = launch_key(self, args, settings)
        if key not in notes.launches:
            launch = _launch(self, arch, args, grid, settings)
            notes.launches[key] = Launch(
                name=launch.name, arch=arch, key=launch.key, source=launch.source, options=launch.options,
                constants=launch.constants, grid=(), tensors={},
            )  # fmt: skip
        if settings.get("SPECIALIZED") and notes.tile and notes.tile not in notes.tiles.setdefault(key, []):
            notes.tiles[key].append(notes.tile)

    return note


def record_forms(arch: int, notes: Notes) -> None:
    """Launch every specialized tile with a table and without, with every bias, in bf16 and fp32, written and added."""
    every: tuple[tuple[Op, Scaling], ...] = (
        ("forward", "none"), ("forward", "block"), ("forward", "mx"), ("dgrad", "none"), ("wgrad", "block")
    )  # fmt: skip
    for op, scaling in every:
        described = GemmProblem(
            op=op, scaling=scaling, num_rows=512, num_groups=2, n=256, k=256, capability=(arch // 10, arch % 10)
        )
        for tile in candidates(described):
            if not tile.specialized:
                continue
            notes.tile = tile_name(op, scaling, tile)
            made = make_operands(GemmCase(sizes=(256, 256), n=256, k=256, scaling=scaling), "cpu")
            for out_dtype in (torch.bfloat16, torch.float32):
                if op == "wgrad":
                    parts = [torch.empty(256, 256, dtype=out_dtype) for _ in range(2)]
                    into = (ExpertGradients.of(torch.stack(parts)), ExpertGradients.of_parts(parts))
                    for out, accumulate in itertools.product(into, (False, True)):
                        triton_wgrad.wgrad(wgrad_gemm(made, scaling, out, accumulate=accumulate), chosen=tile)
                    continue
                rows = made.x if op == "forward" else made.dy
                for weights in (made.weights, ExpertWeights.of_parts(made.weight_parts)):
                    for settings in biases() if op == "forward" else ({},):
                        gemm = rows_gemm(rows, weights, made.m_offsets, out_dtype=out_dtype, **settings)
                        getattr(triton_kernel, op)(gemm, chosen=tile)
    notes.tile = ""


def biases() -> Iterator[dict[str, Any]]:
    """Yield no bias, and each type of bias with a factor per row and without."""
    yield {}
    for dtype, factor in itertools.product((torch.bfloat16, torch.float32), (None, torch.empty(512))):
        yield {"bias": torch.empty(2, 256, dtype=dtype), "bias_factor": factor}


def record_phases() -> None:
    """Launch what the first call does, in real sizes and in those of its rehearsal."""
    for kind in ("recording", "small recording"):
        machine = Machine(device="cpu", kind=kind, out=Path(), compiled=[])
        for phase in PHASES:
            if phase.name in RECORDED:
                module = __import__(f"benchmarks.gpu.{phase.module}", fromlist=["run"])
                for step in phase.steps:
                    module.run(step, machine)


def launches(arch: int) -> Notes:
    """Return what is carried for an architecture."""
    torch.set_num_threads(1)
    notes = Notes()
    with recorded(arch):
        JITFunction.run = noted(arch, notes)
        record_forms(arch, notes)
        if arch == 90:
            with as_hopper():
                record_phases()
    return notes


def compiled(launch: Launch) -> tuple[CarriedKernel, bytes, str]:
    """Compile a launch: what is known of it but its tiles, its machine code, its PTX."""
    kernel = launch.compile()
    cubin, metadata = kernel.asm["cubin"], kernel.metadata
    facts = CarriedKernel(
        code=text_digest(cubin), name=launch.name, function=metadata.name,
        parameters=tuple(name for name, kind in launch.source.signature.items() if kind != "constexpr"),
        shared_bytes=metadata.shared, threads=metadata.num_warps * 32, num_ctas=metadata.num_ctas,
        scratch_bytes=getattr(metadata, "global_scratch_size", 0) or 0,
        scratch_align=getattr(metadata, "global_scratch_align", 0) or 128,
    )  # fmt: skip
    threads = threads_of(kernel.asm["ptx"])
    return CarriedKernel(**{**_fields(facts), "threads": threads}), cubin, kernel.asm["ptx"]


def threads_of(ptx: str) -> int:
    """Return the threads of a program: specialized loops have more warps than they ask for."""
    return int(ptx.partition(".reqntid ")[2].split()[0])


def _fields(kernel: CarriedKernel) -> dict[str, Any]:
    return {name: getattr(kernel, name) for name in CarriedKernel.__dataclass_fields__}


def archive_of(notes: Notes) -> Archive:
    """Compile all launches, on every core."""
    keys = list(notes.launches)
    made = in_pool(compiled, [notes.launches[key] for key in keys], os.cpu_count() or 1)
    kernels, content = {}, {}
    for key, (kernel, cubin, ptx) in zip(keys, made, strict=True):
        kernels[key] = CarriedKernel(**{**_fields(kernel), "tiles": tuple(notes.tiles.get(key, ()))})
        content |= {f"{kernel.image}.cubin": cubin, f"{kernel.image}.ptx": ptx.encode()}
    return Archive(kernels, sources_digest(), content)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the archive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--into", type=Path, default=MACHINE_CODE)
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.stderr.write("TRITON_INTERPRET=1 is set: interpreted kernels cannot be compiled.\n")
        return 2
    started = time.monotonic()
    notes = launches(options.arch)
    print(f"{len(notes.launches)} launches, {len(notes.tiles)} of specialized loops", flush=True)
    archive = archive_of(notes)
    path = options.into / f"sm_{options.arch}a.zip"
    archive.write(path)
    size = path.stat().st_size
    print(f"wrote {path}: {len(archive.kernels)} kernels, {size / 2**20:.2f} MiB, {time.monotonic() - started:.0f} s")
    return int(size > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
