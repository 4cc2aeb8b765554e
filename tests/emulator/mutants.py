"""Mutants of synchronization: each wait, arrival, expectation, fence, parity, mask and pointer taken out or bent."""

import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from emulator.faults import Fault, Unsupported
from emulator.launch import emulated
from emulator.schedules import ORDERS, Schedule, schedules

_SKIP = "setp.eq.s32 {flag}, 0, 0;"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of the text of a kernel."""

    what: str
    line: int
    text: str
    is_compilers: bool = False
    """Whether Triton put the instruction there by itself: a barrier of a part's warps, a fence that the loop does not
    name. Those may be redundant: between two of them often one warp alone touches shared memory."""


def mutants_of(text: str) -> Iterator[Mutant]:
    """Return every mutant of a kernel, one change each."""
    lines = text.splitlines()
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', text))
    source = ""

    def changed(at: int, new: str, what: str) -> Mutant:
        named = "fence" in source or "make_tensor_descriptor" in source
        return Mutant(f"line {at + 1}: {what}: {' '.join(lines[at].split())[:100]} of {source}", at + 1,
                      "\n".join([*lines[:at], new, *lines[at + 1 :]]),
                      is_compilers=what == "no barrier" or (what == "no fence" and not named)
                      or "acquire.cluster" in lines[at])  # fmt: skip

    for at, line in enumerate(lines):
        if match := re.match(r"\s*\.loc\s+(\d+) (\d+)", line):
            source = linecache.getline(files.get(match[1], ""), int(match[2])).strip()
        elif "mbarrier.try_wait" in line:
            flag = re.search(r"(?:b64|u64)\s+([%\w]+)", line)[1]
            yield changed(at, _SKIP.format(flag=flag), "no wait")
            parity = re.search(r", ([%\w]+);", line)[1]
            yield changed(
                at, f"xor.b32 %r90000, {parity}, 1;\n" + line.replace(f", {parity};", ", %r90000;"), "other parity"
            )
        elif "mbarrier.arrive" in line:
            yield changed(at, "", "no arrival")
            if match := re.search(r"expect_tx[^;]*, (\d+);", line):
                yield changed(at, line.replace(f", {match[1]};", f", {int(match[1]) // 2};"), "half the bytes")
        elif match := re.search(r"mbarrier\.init[^;]*, (\d+);", line):
            yield changed(at, "", "no init")
            yield changed(at, line.replace(f", {match[1]};", f", {int(match[1]) + 1};"), "one arrival more")
        elif re.search(r"\b(bar|barrier)\.(sync|cluster)", line):
            yield changed(at, "", "no barrier")
        elif "fence.proxy" in line:
            yield changed(at, "", "no fence")
        elif "tensormap.cp_fenceproxy" in line or ("tensormap.replace" in line and "global_address" in line):
            yield changed(at, "", "no new pointer")
        elif match := re.search(r"wgmma\.wait_group\.sync\.aligned\s+(\d+);", line):
            yield changed(at, "", "no wait for products")
            yield changed(at, line.replace(f"{match[1]};", f"{int(match[1]) + 1};"), "one group more in flight")
        elif match := re.search(r"cp\.async\.wait_group\s+(\d+);", line):
            yield changed(at, line.replace(f"{match[1]};", f"{int(match[1]) + 1};"), "one group more in flight")
        elif re.search(r"tcgen05\.(commit|wait)", line):
            yield changed(at, "", "no commit or wait")
        elif "multicast::cluster" in line:
            mask = re.search(r", ([%\w]+);", line)[1]
            yield changed(
                at, f"and.b16 %rs9000, {mask}, 1;\n" + line.replace(f", {mask};", ", %rs9000;"), "multicast to one"
            )
        elif re.search(r"cp\.async\.bulk\.tensor.*global", line):
            yield changed(at, "", "no copy")


def of_specialized(work: list[tuple[int, Any]]) -> list[int]:
    """Return the checks whose kernels have warps of several roles, or tensor cores that signal barriers."""
    return [at for at, (_, check) in enumerate(work) if any(
        word in name for name in check.launches for word in ("specialized", "gluon"))]  # fmt: skip


REDUNDANT = (
    ("no wait", "acquire.cluster", "Triton lets the loading warps of a cluster meet before each multicast, after both "
     "have waited for `both_empty`, which says as much"),
    ("no fence", "warpgroup_mma", "TMA alone writes the operands"),
    ("no fence", "tcgen05_mma(", "TMA alone writes the operands"),
    ("no fence", "async_load", "TMA alone writes and products alone read what a copy overwrites"),
    ("no barrier", "", "one warp alone touches shared memory since the barrier before, or until the next one"),
    ("no fence", "tcgen05_mma_scaled", "the warps that write scales have fenced themselves"),
)  # fmt: skip
"""(what, part of the line or its source, why a mutant may live)."""


def reason(what: str) -> str:
    """Return why a mutant that lives is redundant by construction, as far as it is known."""
    return next((why for how, part, why in REDUNDANT if how in what and part in what), "NO REASON IS KNOWN")


VARIANTS = {"table", "weighted", "plain", "accumulate", "bf16", "fp32", "i64"}
"""Words of a launch's name that change what a loop reads and adds, and none of its synchronization."""


MOST = 60
"""Schedules that a mutant of a loop has to live through."""


def trial(pool: Any, work: list[tuple[int, Any]]) -> list[dict[str, Any]]:
    """Return what happens to every mutant of the specialized kernels, once for each loop."""
    tasks = []
    seen: set[str] = set()
    for at in of_specialized(work):
        arch, check = work[at]
        with emulated(arch, Schedule(name="late")) as run:
            check.call()
        for name, text in run.ptx.items():
            loop = f"{arch} {' '.join(word for word in name.split() if word not in VARIANTS)}"
            if ("specialized" in name or "gluon" in name) and loop not in seen:
                seen.add(loop)
                tasks += [(at, name, number) for number in range(len(list(mutants_of(text))))]
    return list(pool.imap_unordered(_judge, tasks, chunksize=4))


_texts: dict[tuple[int, str], tuple[str, list[Mutant]]] = {}


def _judge(task: tuple[int, str, int]) -> dict[str, Any]:
    from emulator.__main__ import _WORK

    return judged(*_WORK[task[0]], task[1], task[2])


def judged(arch: int, check: Any, name: str, number: int) -> dict[str, Any]:
    """Run one mutant under schedule after schedule until one notices; what the compiler added, under a few."""
    key = (arch, name)
    if key not in _texts:
        with emulated(arch, Schedule(name="late")) as run:
            check.call()
        _texts[key] = run.ptx[name], list(mutants_of(run.ptx[name]))
    text, found = _texts[key]
    mutant = found[number]
    killed_by, how = "", "nothing"
    # Without a barrier of one part's warps they race, which clocks find in every order. Some orders of copies are rare.
    for schedule in schedules([text], ORDERS if mutant.is_compilers else MOST):
        with emulated(arch, schedule, lambda of, plain: mutant.text if of == name else plain) as run:
            try:
                got = check.call()
                check.verify(got)
            except Unsupported:
                raise
            except Fault as fault:
                killed_by, how = schedule.name, fault.kind
            except AssertionError:
                killed_by, how = schedule.name, "wrong"
        if killed_by:
            break
    return {
        "launch": name, "what": mutant.what, "is_compilers": mutant.is_compilers, "killed_by": killed_by, "how": how
    }  # fmt: skip
