"""Compile kernels for GPUs that are not there, and read off the machine code what can go wrong on them.

Run as `python -m moe_rl.testing.kernels.aot [--arch 90] [--only NAME]` without TRITON_INTERPRET: one JSON object per
variant on stdout. A kernel passes when it has no stack and no spills, fits shared memory, uses the tensor cores of its
type, and every TMA box has the shape of the buffer it lands in. This proves nothing about speed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SHARED_LIMIT = 232_448
"""Bytes of shared memory that one program may use on sm_90 and sm_100."""

COUNTED = ("QGMMA", "HGMMA", "LDL", "STL", "UTMALDG", "LDGSTS", "UTCQMMA", "UTCHMMA", "USETMAXREG")
TENSOR_CORE = {
    (90, "fp8"): "QGMMA",
    (90, "wide"): "HGMMA",
    (100, "fp8"): "UTCQMMA",
    (100, "wide"): "UTCHMMA",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One kernel with the constants of one launch."""

    name: str
    function: Any
    """The `triton.jit` function."""
    types: dict[str, str]
    """Triton type of every argument that is not a constant: "*fp8e4nv", "i32", ..."""
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 3
    aligned: tuple[str, ...] = ()
    """Integer arguments that a launch finds divisible by 16. Pointers always are."""
    tensor_core: str = ""
    """"fp8", "wide" (bf16) or "" for a kernel without dots."""
    quantizes: bool = False
    uses_tma: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the compiler made of a variant."""

    name: str
    arch: int
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    instructions: dict[str, int]
    fp8_mma_in_ptx: int
    saturating_casts: int
    box_mismatches: tuple[str, ...]
    warnings: tuple[str, ...]
    problems: tuple[str, ...]
    """Sentences; none if the variant may be shipped."""


def compile_variant(variant: Variant, arch: int) -> Verdict:
    """Compile for compute capability `arch` (90 or 100) and judge."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.function.arg_names
    signature = {name: "constexpr" if name in variant.constants else variant.types[name] for name in names}
    index = {name: position for position, name in enumerate(names)}
    source = ASTSource(
        variant.function,
        signature,
        constexprs={(index[name],): value for name, value in variant.constants.items()},
        attrs={
            (index[name],): [["tt.divisibility", 16]]
            for name, kind in signature.items()
            if kind.startswith("*") or name in variant.aligned
        },
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return judge(variant, arch, kernel)


def judge(variant: Variant, arch: int, kernel: Any) -> Verdict:
    """Read the compiled kernel."""
    # Which assembler serves an architecture differs between releases of Triton: ask the one that compiled.
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder) / "kernel.cubin", Path(folder) / "kernel.ptx"
        cubin.write_bytes(kernel.asm["cubin"])
        ptx.write_text(kernel.asm["ptx"])
        usage = _run(_bundled("cuobjdump"), "-res-usage", str(cubin))
        assembly = _run(_bundled("nvdisasm"), "-c", str(cubin))
        # Only kernels with dots can have wgmma serialized, and assembling again is half of the time.
        again = ("-v", f"--gpu-name=sm_{arch}a", str(ptx), "-o", str(Path(folder) / "again.cubin"))
        report = _run(get_ptxas(arch).path, *again) if variant.tensor_core else ""
    words = Counter(re.findall(r"[A-Z][A-Z0-9]+", assembly))
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    facts: dict[str, Any] = {
        "registers": _usage(usage, "REG"),
        "stack_bytes": _usage(usage, "STACK"),
        "local_bytes": _usage(usage, "LOCAL"),
        "shared_bytes": kernel.metadata.shared,
        "spill_store_bytes": int(spills[1]) if spills else 0,
        "spill_load_bytes": int(spills[2]) if spills else 0,
        "instructions": {word: words[word] for word in COUNTED},
        "fp8_mma_in_ptx": len(re.findall(r"wgmma\.mma_async\S*e4m3|tcgen05\.mma\S*f8f6f4", kernel.asm["ptx"])),
        "saturating_casts": len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2", kernel.asm["ptx"])),
        "box_mismatches": box_mismatches(kernel.asm["ttgir"]),
        "warnings": tuple(line.strip() for line in report.splitlines() if "serializ" in line.lower()),
    }
    problems = tuple(_problems(variant, arch, facts))
    return Verdict(name=variant.name, arch=arch, problems=problems, **facts)


def _problems(variant: Variant, arch: int, facts: dict[str, Any]) -> list[str]:
    counts = facts["instructions"]
    found = []
    if facts["stack_bytes"] or facts["local_bytes"] or counts["LDL"] or counts["STL"]:
        found.append(
            f"spills: stack {facts['stack_bytes']} B, local {facts['local_bytes']} B, "
            f"{counts['LDL']} LDL, {counts['STL']} STL"
        )
    if facts["spill_store_bytes"] or facts["spill_load_bytes"]:
        found.append(f"ptxas spills {facts['spill_store_bytes']} B stores, {facts['spill_load_bytes']} B loads")
    if facts["shared_bytes"] > SHARED_LIMIT:
        found.append(f"{facts['shared_bytes']} B of shared memory, the limit is {SHARED_LIMIT} B")
    found += [f"TMA box differs from its buffer: {line}" for line in facts["box_mismatches"]]
    found += [f"ptxas: {line}" for line in facts["warnings"]]
    if variant.tensor_core:
        instruction = TENSOR_CORE[arch, variant.tensor_core]
        if not counts[instruction]:
            found.append(f"no {instruction}: the tensor cores are not used")
        if variant.tensor_core == "fp8" and not facts["fp8_mma_in_ptx"]:
            found.append("no FP8 tensor-core instruction in PTX")
    if variant.uses_tma and not counts["UTMALDG"]:
        found.append("no UTMALDG: TMA is not used")
    if variant.quantizes and not facts["saturating_casts"]:
        found.append("no saturating cast to E4M3")
    return found


def box_mismatches(ttgir: str) -> tuple[str, ...]:
    """Return what differs on each TMA load whose box is not the trailing shape of the buffer it fills."""
    found = []
    for line in ttgir.splitlines():
        if "async_tma_copy_global_to_local" not in line:
            continue
        box = re.search(r"tensordesc<(?:tensor<)?((?:\d+x)+)", line)
        buffers = re.findall(r"memdesc<((?:\d+x)+)", line)
        if not box or not buffers:
            found.append(f"unreadable: {line.strip()}")
            continue
        wanted, got = box[1].split("x")[:-1], buffers[-1].split("x")[:-1]
        if got[-len(wanted) :] != wanted:
            found.append(f"box {box[1]} into buffer {buffers[-1]}")
    return tuple(found)


def _bundled(tool: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool)


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool} {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def _usage(report: str, what: str) -> int:
    found = re.search(rf"\b{what}:(\d+)", report)
    if found is None:
        raise ValueError(f"cuobjdump does not report {what}: {report}")
    return int(found[1])


def main() -> int:
    """Compile the listed variants and print one verdict per line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arch", type=int, choices=(90, 100), default=90)
    parser.add_argument("--only", default="", help="compile variants whose name contains this")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.stderr.write("TRITON_INTERPRET=1 is set: interpreted kernels cannot be compiled.\n")
        return 2
    from moe_rl.testing.kernels.aot_cases import variants

    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for variant in variants(arguments.arch):
            if arguments.only in variant.name:
                print(json.dumps(asdict(compile_variant(variant, arguments.arch))), flush=True)  # noqa: T201  # read by the parent
    return 0


if __name__ == "__main__":
    sys.exit(main())
