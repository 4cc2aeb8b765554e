"""Compile every launch for GPUs that are not there, and read off the machine code what can go wrong on them.

Run as `python -m benchmarks.kernels.aot [--arch 90] [--only NAME]` without TRITON_INTERPRET: one JSON object per
launch on stdout. A kernel passes when it has no stack and no spills, fits shared memory, uses the tensor cores of its
type, and every TMA box has the shape of the buffer it lands in. This proves nothing about speed.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.kernels.pool import in_pool
from benchmarks.kernels.sass import disassemble, run_tool

if TYPE_CHECKING:
    from benchmarks.kernels.recording import Launch

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
class Verdict:
    """What the compiler made of a launch."""

    name: str
    arch: int
    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    instructions: dict[str, int]
    fp8_mma_in_ptx: int
    block_scaled_in_ptx: int
    saturating_casts: int
    box_mismatches: tuple[str, ...]
    doubled_offsets: tuple[str, ...]
    warnings: tuple[str, ...]
    problems: tuple[str, ...]
    """Sentences; none if the kernel may be shipped."""


def verdict(launch: "Launch") -> Verdict:
    """Compile a launch and judge; the same machine code is read once, then kept beside Triton's own cache."""
    from triton import knobs

    kernel = launch.compile()
    content = hashlib.sha256(kernel.asm["cubin"] + kernel.asm["ttgir"].encode() + Path(__file__).read_bytes())
    kept = Path(knobs.cache.dir) / "moe_rl" / f"{content.hexdigest()}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        half_written = kept.with_suffix(f".{os.getpid()}")
        half_written.write_text(json.dumps(_facts(kernel, launch.arch)), encoding="utf-8")
        half_written.rename(kept)
    facts = json.loads(kept.read_text(encoding="utf-8"))
    return Verdict(
        name=launch.name,
        arch=launch.arch,
        problems=tuple(problems_of(kernel, launch.arch, facts, launch.name)),
        **facts,
    )


def _facts(kernel: Any, arch: int) -> dict[str, Any]:
    # Which assembler serves an architecture differs between releases of Triton: ask the one that compiled.
    from triton.backends.nvidia.compiler import get_ptxas

    ptx = kernel.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        cubin, text = Path(folder) / "kernel.cubin", Path(folder) / "kernel.ptx"
        cubin.write_bytes(kernel.asm["cubin"])
        text.write_text(ptx)
        usage = run_tool(bundled("cuobjdump"), "-res-usage", str(cubin))
        # Only wgmma can be serialized, which Hopper has alone, and assembling again is half of the time.
        again = ("-v", f"--gpu-name=sm_{arch}a", str(text), "-o", str(Path(folder) / "again.cubin"))
        report = run_tool(get_ptxas(arch).path, *again) if arch == 90 and dots_of(kernel) else ""
    words = disassemble(kernel.asm["cubin"], bundled("nvdisasm")).words
    return {
        "registers": _usage(usage, "REG"),
        "stack_bytes": _usage(usage, "STACK"),
        "local_bytes": _usage(usage, "LOCAL"),
        "shared_bytes": kernel.metadata.shared,
        "instructions": {word: words[word] for word in COUNTED},
        "fp8_mma_in_ptx": len(re.findall(r"wgmma\.mma_async\S*e4m3|tcgen05\.mma\S*f8f6f4", ptx)),
        "block_scaled_in_ptx": len(re.findall(r"tcgen05\.mma\S*block_scale", ptx)),
        "saturating_casts": len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2", ptx)),
        "box_mismatches": box_mismatches(kernel.asm["ttgir"]),
        "doubled_offsets": doubled_offsets(kernel.asm["ttgir"]),
        "warnings": [line.strip() for line in report.splitlines() if "serializ" in line.lower()],
    }


def dots_of(kernel: Any) -> list[str]:
    """Return the lines that multiply in a kernel's first intermediate code; Gluon starts with that of a GPU."""
    code = kernel.asm.get("ttir") or kernel.asm["ttgir"]
    return [line for line in code.splitlines() if re.search(r"tt\.dot|warp_group_dot |tc_gen5_mma", line)]


SPILL_OF_A_TILE = "gemm gluon_wide .* weighted "
"""A weighted bias, turned rows and 128 sums need more registers than a thread has: bf16 products with such a bias spill
174 words, once per tile and outside the loop. This is the code that an H200 has proven; without the spill it would have
to be proven anew."""


def problems_of(kernel: Any, arch: int, facts: dict[str, Any], name: str = "") -> list[str]:
    """Return what speaks against a kernel; what it must have follows from its own intermediate code."""
    counts, ttir = facts["instructions"], kernel.asm.get("ttir", "")
    found = []
    has_spills = facts["stack_bytes"] or facts["local_bytes"] or counts["LDL"] or counts["STL"]
    if has_spills and not re.match(SPILL_OF_A_TILE, name):
        found.append(
            f"spills: stack {facts['stack_bytes']} B, local {facts['local_bytes']} B, "
            f"{counts['LDL']} LDL, {counts['STL']} STL"
        )
    if facts["shared_bytes"] > SHARED_LIMIT:
        found.append(f"{facts['shared_bytes']} B of shared memory, the limit is {SHARED_LIMIT} B")
    found += [f"TMA box differs from its buffer: {line}" for line in facts["box_mismatches"]]
    found += [f"a warpgroup's offset counts twice: {line}" for line in facts["doubled_offsets"]]
    found += [f"ptxas: {line}" for line in facts["warnings"]]
    if dots := dots_of(kernel):
        kind = "fp8" if all("f8E4M3FN" in line for line in dots) else "wide"
        if not counts[TENSOR_CORE[arch, kind]]:
            found.append(f"no {TENSOR_CORE[arch, kind]}: the tensor cores are not used")
        if kind == "fp8" and not facts["fp8_mma_in_ptx"]:
            found.append("no FP8 tensor-core instruction in PTX")
        if any("tt.dot_scaled" in line for line in dots) and not facts["block_scaled_in_ptx"]:
            found.append("no block_scale in PTX: the scales are not applied by the tensor cores")
    if "descriptor" in kernel.asm["ttgir"] and not counts["UTMALDG"]:
        found.append("no UTMALDG: TMA is not used")
    casts = [line for line in ttir.splitlines() if "tt.fp_to_fp" in line and line.split("->")[-1].count("f8E4M3FN")]
    if casts and not facts["saturating_casts"]:
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
        # A box of one matrix of several lands in a buffer without that axis.
        wanted, got = box[1].removeprefix("1x").split("x")[:-1], buffers[-1].split("x")[:-1]
        if got[-len(wanted) :] != wanted:
            found.append(f"box {box[1]} into buffer {buffers[-1]}")
    return tuple(found)


_STAYS_A_PLACE = (
    "arith.addi", "arith.subi", "arith.muli", "arith.extsi", "arith.extui", "arith.trunci", "arith.maxsi",
    "arith.minsi", "arith.select", "tt.addptr", "tt.splat", "tt.expand_dims", "tt.broadcast", "ttg.convert_layout",
)  # fmt: skip
"""Operations whose result is an index or an address if an operand is one."""
_LINE = re.compile(
    r"^ +(?P<name>%\w+) = (?P<op>[\w.]+) (?P<operands>[^:{\n]*)(?P<rest>.*?)(?P<source>loc\(.*\))?$", re.MULTILINE
)


def doubled_offsets(ttgir: str) -> tuple[str, ...]:
    """Return the lines of a specialized kernel in which the offset of a warpgroup is added to itself.

    The compiler splits a tile of 128 rows between two warpgroups. The second one has ranges from 64 to 128, and 64 is
    added to the row coordinate of TMA. Triton 3.6 to 3.9 put that sum wherever the coordinate was used, so a coordinate
    plus a range becomes rows 128 to 192. The interpreter does not split tiles and cannot show it.
    """
    first, *others = re.split(r"^ +partition\d+\(", ttgir, flags=re.MULTILINE)[1:] or [""]
    # What the program itself adds is there for the first warpgroup too, from the same place of the source.
    of_program = {line["source"] for line in _LINE.finditer(first) if line["op"] == "arith.addi"}
    return tuple(line for partition in others for line in _doubled_in(partition, of_program))


def _doubled_in(partition: str, of_program: set[str | Any]) -> Iterator[str]:
    ranges, shifted = set[str](), set[str]()
    starts = set(re.findall(r"tt\.make_range {.*start = ([1-9]\d*) ", partition))
    offset = re.compile(rf"%c(?:{'|'.join(starts)})_i\d+")
    for line in _LINE.finditer(partition):
        operands = set(re.findall(r"%\w+", line["operands"]))
        stays = line["op"] in _STAYS_A_PLACE
        is_range = stays and bool(operands & ranges)
        is_shifted = stays and bool(operands & shifted)
        if is_range and is_shifted and not operands & ranges & shifted:
            yield line[0].strip()
        if is_range or (line["op"] == "tt.make_range" and "start = 0 " not in line["rest"]):
            ranges.add(line["name"])
        added = line["op"] == "arith.addi" and line["source"] not in of_program
        if is_shifted or (starts and added and offset.search(line["operands"])):
            shifted.add(line["name"])


def bundled(tool: str) -> str:
    """Return the path of a tool that lies in Triton's wheel."""
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool)


def _usage(report: str, what: str) -> int:
    found = re.search(rf"\b{what}:(\d+)", report)
    if found is None:
        raise ValueError(f"cuobjdump does not report {what}: {report}")
    return int(found[1])


def verdicts(launches: "list[Launch]") -> list[Verdict]:
    """Judge every launch, half of the machine's cores at a time."""
    return in_pool(verdict, launches, (os.cpu_count() or 1) // 2)


def main() -> int:
    """Compile every launch and print one verdict per line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arch", type=int, choices=(90, 100), default=90)
    parser.add_argument("--only", default="", help="compile launches whose name contains this")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.stderr.write("TRITON_INTERPRET=1 is set: interpreted kernels cannot be compiled.\n")
        return 2
    from benchmarks.kernels.launches import known_bad_launches, one_per_name, shipped_launches

    launches = one_per_name(shipped_launches(arguments.arch) + (known_bad_launches() if arguments.arch == 90 else []))
    for found in verdicts([launch for launch in launches if arguments.only in launch.name]):
        print(json.dumps(asdict(found)), flush=True)  # read by the parent
    return 0


if __name__ == "__main__":
    sys.exit(main())
