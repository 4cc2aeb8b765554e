"""Hopper's specialized loops without waits that the compiler adds and nobody needs, edited as PTX before assembly.

    fence.proxy.async before each step's first product
        Orders loads and stores of threads before what tensor cores read. Here TMA alone writes what they read, and a
        wait for its mbarrier orders that. ptxas makes MEMBAR.ALL.CTA of the fence, which waits for every load of the
        thread: the next step's scales, which were to hide behind the product.
    fence.proxy.async between two copies of a step
        Orders loads of threads before what TMA overwrites. In forward and dgrad no thread loads from the ring. In
        weight gradients threads load scales from it, so the loading warp keeps its fence: it stands behind the waits
        for both empty barriers and before the copies of scales.
    a meeting of both SMs' loading warps before a multicast (bf16)
        Both have waited for `both_empty`, at which the warpgroups of both SMs arrive: nobody reads any more what the
        multicast overwrites, and the other SM's mbarrier of the step is past its phase before. Bytes may arrive there
        before they are expected.
    bar.sync before the second of two arrivals
        All warps of the warpgroup have met for the first one, and nothing stands between the two.

`emulated` runs what this leaves, and its mutants take out what this keeps.
"""

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from triton import knobs

_FENCE = re.compile(r"^\s*fence\.proxy\.async\.shared::(cta|cluster);")
_MEETING = re.compile(r"^\s*(bar\.sync\s+\d+, 128;)")
_ARRIVAL = re.compile(r"^\s*@%p\d+ mbarrier\.arrive\.shared::")
_MEETING_OF_SMS = re.compile(r"^\s*@%p\d+ mbarrier\.arrive\.release\.cluster\.shared::cluster")
_WAIT_FOR_SM = re.compile(r"^\s*mbarrier\.try_wait\.parity\.acquire\.cluster\.shared::cta\.b64 (\w+),")
_NOTHING = "// taken out: {}"
SOURCES = ("gluon_hopper",)
"""Modules whose kernels are edited."""


def lean(ptx: str) -> str:
    """Return a specialized loop of Hopper without needless fences and meetings; every line keeps its number."""
    lines = ptx.splitlines()
    loads_from_ring = ".entry _gluon_wgrad_kernel" in ptx
    for at, line in enumerate(lines):
        is_before_copies = _next(lines, at, r"wgmma\.|cp\.async\.bulk\.tensor") == "cp.async.bulk.tensor"
        if (_FENCE.match(line) and not (loads_from_ring and is_before_copies)) or _MEETING_OF_SMS.match(line):
            lines[at] = _NOTHING.format(line.strip())
        elif wait := _WAIT_FOR_SM.match(line):
            lines[at] = f"setp.eq.s32 {wait[1]}, 0, 0; " + _NOTHING.format(line.strip())
    for at, line in enumerate(lines):
        if (meeting := _MEETING.match(line)) and meeting[1] == _last_meeting_of_arrival(lines, at):
            lines[at] = _NOTHING.format(line.strip())
    return "\n".join(lines) + "\n"


def _next(lines: list[str], at: int, pattern: str) -> str:
    """Return the first match of a pattern in the lines below."""
    return next((match[0] for line in lines[at + 1 :] if (match := re.search(pattern, line))), "")


def _last_meeting_of_arrival(lines: list[str], at: int) -> str | None:
    """Return the meeting before the arrival right above a line; None where something else happens between."""
    above = (line for line in reversed(lines[:at]) if not re.match(r"\s*($|//|\.loc|\{|\})", line))
    has_arrived = False
    for line in above:
        if meeting := _MEETING.match(line):
            return meeting[1] if has_arrived else None
        if _ARRIVAL.match(line):
            has_arrived = True
        elif re.search(r"mbarrier|bar\.|barrier|wgmma|\bld\.|\bst\.|fence|bra|^\$L", line):
            return None
    return None


@contextlib.contextmanager
def edited(module: str) -> Iterator[None]:
    """Compile launches of a module with its edit, if it has one; Triton's cache keeps them apart."""
    if module.rpartition(".")[2] not in SOURCES or not hasattr(knobs.runtime, "add_stages_inspection_hook"):
        yield
        return
    text = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()

    def hook(backend: Any = None, stages: Any = None, *_rest: Any, **_named: Any) -> tuple[str, str] | None:
        if stages is None:  # asked for what the cache depends on
            return text, text
        make: Callable[[Any, Any], Any] = stages["ptx"]
        stages["ptx"] = lambda source, metadata: lean(make(source, metadata))
        return None

    before = knobs.runtime.add_stages_inspection_hook
    knobs.runtime.add_stages_inspection_hook = hook
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook = before
