"""Mutants of synchronization: each wait, arrival, expectation, fence, parity, mask and pointer taken out or bent."""

import linecache
import multiprocessing
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from triton import knobs

from emulator.faults import Fault, Unsupported
from emulator.launch import emulated
from emulator.schedules import ORDERS, Schedule, schedules

WORK: list[tuple[int, Any]] = []
"""(architecture, check). Processes that are forked find it here; `__main__` under its own name is another module."""
_SKIP = "setp.eq.s32 {flag}, 0, 0;"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of the text of a kernel."""

    what: str
    line: int
    text: str
    is_compilers: bool = False
    """Whether Triton put the instruction there by itself: a barrier of a part's warps, a fence or an mbarrier that the
    loop does not name. Those may be redundant: between two of them often one warp alone touches shared memory."""


def mutants_of(text: str) -> Iterator[Mutant]:
    """Return every mutant of a kernel, one change each."""
    lines = text.splitlines()
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', text))
    source = ""
    has_products = True  # on their way, or perhaps: a jump to a label may come from where they are

    def changed(at: int, new: str, what: str) -> Mutant:
        named = "fence" in source or "make_tensor_descriptor" in source
        is_own_init = "mbarrier.init" in lines[at] and source.startswith("def ")
        return Mutant(f"line {at + 1}: {what}: {' '.join(lines[at].split())[:100]} of {source}", at + 1,
                      "\n".join([*lines[:at], new, *lines[at + 1 :]]),
                      is_compilers=what == "no barrier" or (what == "no fence" and not named)
                      or "acquire.cluster" in lines[at] or is_own_init)  # fmt: skip

    for at, whole in enumerate(lines):
        line = whole.partition("//")[0]  # what `lean_ptx` has taken out stands behind
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
        elif re.match(r"\$\S+:", line) or "wgmma.mma_async" in line:
            has_products = True
        elif match := re.search(r"wgmma\.wait_group\.sync\.aligned\s+(\d+);", line):
            # A wait right after a wait for all waits for nothing: the FP8 loop has two, which order the compiler alone.
            if has_products:
                yield changed(at, "", "no wait for products")
                yield changed(at, line.replace(f"{match[1]};", f"{int(match[1]) + 1};"), "one group more in flight")
            has_products = has_products and match[1] != "0"
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


REDUNDANT = (
    ("no init", "def _gluon_wide_kernel(", "the meeting of both SMs' loading warps, which this mbarrier was for, is "
     "taken out"),
    ("one arrival more", "def _gluon_wide_kernel(", "the meeting of both SMs' loading warps, which this mbarrier was "
     "for, is taken out"),
    ("no fence", "tcgen05_mma(", "TMA alone writes the operands"),
    ("no barrier", "barrier.cluster.wait", "at the end both halves of a CTA's warps wait for the cluster, and then for "
     "each other: either wait says it for both"),
    ("no barrier", "mbarrier.arrive(", "a barrier stands before each of two arrivals, and the loading warp waits for "
     "both arrivals"),
    ("no barrier", "", "one warp alone touches shared memory since the barrier before, or until the next one"),
    ("no fence", "tcgen05_mma_scaled", "the warps that write scales have fenced themselves"),
)  # fmt: skip
"""(what, part of the line or its source, why a mutant may live)."""
UNKNOWN = "NO REASON IS KNOWN"


def reason(what: str) -> str:
    """Return why a mutant that lives is redundant by construction, as far as it is known."""
    return next((why for how, part, why in REDUNDANT if how in what and part in what), UNKNOWN)


MOST = 60
"""Schedules that a mutant of a loop has to live through."""


def trial(processes: int) -> list[dict[str, Any]]:
    """Return what happens to every mutant of the specialized kernels, once for each loop.

    Checks of one name differ in what a loop reads and adds (a table, biases, the type of the result), and in none of
    its synchronization.
    """
    loops = {(arch, check.name): check for arch, check in reversed(WORK) if "specialized" in check.name}
    _trials[:] = [trial for (arch, _), check in loops.items() for trial in trials_of(arch, check)]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return list(pool.imap_unordered(_judge, range(len(_trials)), chunksize=4))


_trials: list[tuple[int, Any, str, Mutant]] = []
"""(architecture, check, launch, mutant), for processes that are forked."""


def trials_of(arch: int, check: Any) -> list[tuple[int, Any, str, Mutant]]:
    """Return the mutants of the specialized launch of a check, with what `judged` needs beside.

    It is compiled anew, for Triton's cache may hold what another checkout compiled of the same text on other lines.
    """
    with knobs.compilation.scope(), emulated(arch, Schedule(name="late")) as run:
        knobs.compilation.always_compile = True
        check.call()
    name = next(name for name in run.ptx if "specialized" in name)
    return [(arch, check, name, mutant) for mutant in mutants_of(run.ptx[name])]


def _judge(number: int) -> dict[str, Any]:
    return judged(*_trials[number])


def judged(arch: int, check: Any, name: str, mutant: Mutant) -> dict[str, Any]:
    """Run one mutant under schedule after schedule until one notices; what the compiler added, under a few."""
    killed_by, how = "", "nothing"
    # Without a barrier of one part's warps they race, which clocks find in every order. Some orders of copies are rare.
    for schedule in schedules([mutant.text], ORDERS if mutant.is_compilers else MOST):
        with emulated(arch, schedule, lambda of, plain: mutant.text if of == name else plain):
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
