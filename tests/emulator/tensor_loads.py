"""Whether machine code waits for loads of tensor memory before it uses them: a row per launch as JSON.

Triton 3.9 puts uses of what tcgen05.ld loads before tcgen05.wait::ld in the PTX. In the SASS an instruction has 21 bits
of control above bit 105 of its 128: the scoreboard that a load sets when it is done (7: none; loads end in order, so
that of the next load counts), and the scoreboards that an instruction waits for.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch  # noqa: F401  before Triton
import triton

from benchmarks.kernels.launches import one_per_name, shipped_launches

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);\s*/\* 0x[0-9a-f]{16} \*/\n\s*/\* 0x([0-9a-f]{16}) \*/")


def first_uses(cubin: bytes) -> tuple[int, list[str]]:
    """Return (loads of tensor memory, first uses of theirs that wait for none)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([TOOL, "-c", "-hex", file.name], check=True, capture_output=True, text=True).stdout
    code = [(words, int(high, 16) >> 41) for words, high in INSTRUCTION.findall(text)]
    loads = [at for at, (words, _) in enumerate(code) if "LDTM" in words]
    unguarded = []
    for at in loads:
        words, _ = code[at]
        first, count = int(re.search(r" R(\d+),", words)[1]), int((re.search(r"\.x(\d+)", words) or "11")[1])
        own = {f"R{first + each}" for each in range(count)}
        scoreboard = next(control >> 5 & 7 for words, control in code[at:] if "LDTM" in words and control >> 5 & 7 != 7)
        for use, control in code[at + 1 :]:
            if control >> 11 >> scoreboard & 1:
                break
            if "LDTM" not in use and own & set(re.findall(r"\bR\d+\b", use)):
                unguarded.append(use)
                break
    return len(loads), unguarded


if __name__ == "__main__":
    launches = [launch for launch in one_per_name(shipped_launches(100)) if launch.name.startswith("gemm")][::6]
    json.dump({launch.name: first_uses(launch.compile().asm["cubin"]) for launch in launches}, sys.stdout)
