"""Read machine code of Hopper and Blackwell: its instructions, loops, and the cycles that they need to be issued.

A 128-bit instruction carries its schedule in the upper word, shifted right by 41: the stall count (4 bits: issue cycles
until the warp's next instruction), then yield, barriers that it sets, and the mask of those that it waits for. The sum
of stalls over a loop body is the time in which one warp alone can issue it. An SM has four schedulers, so 8 warps are
two per scheduler, and a body of n instructions takes at least 2 n cycles.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

STALL_SHIFT, STALL_MASK = 41, 0xF
RARE_INSTRUCTIONS = 32
"""At most, between a branch and what it passes over when a number needs no special case."""
SCHEDULERS = 4
BLACKWELL_WORDS = ("UTCQMMA", "UTCHMMA")
TENSOR_WORDS = ("QGMMA", "HGMMA", *BLACKWELL_WORDS)
"""FP8 and bf16 products on Hopper (wgmma); FP8 and bf16 products on Blackwell (tcgen05)."""

_LABEL = re.compile(r"^(\.L_[\w$]+):")
_LOWER = re.compile(r"^/\*[0-9a-f]{4,}\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/")
_UPPER = re.compile(r"^/\* 0x([0-9a-f]{16}) \*/")
_TARGET = re.compile(r"`\((\.L_[\w$]+)\)")
_WIDTHS = {".128": 4, ".64": 2, ".4": 4, ".2": 2}
"""Words per thread of what moves more than one; .4 and .2 are 8 x 8 matrices."""
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction as the disassembler writes it."""

    text: str
    stall: int

    @property
    def operation(self) -> str:
        """Name with its modifiers: "BAR.SYNC.DEFER_BLOCKING"."""
        return _PREDICATE.sub("", self.text).split()[0]

    @property
    def word(self) -> str:
        """Name without modifiers."""
        return self.operation.partition(".")[0]

    @property
    def leaves(self) -> bool:
        """Whether the next instruction never follows."""
        return self.word in ("BRA", "EXIT", "RET") and not self.text.startswith("@")

    @property
    def is_cta_barrier(self) -> bool:
        """Whether every thread of the program waits here; barriers of one warpgroup name their number of threads."""
        return self.word == "BAR" and "," not in self.text and "ARV" not in self.operation

    @property
    def shared_cycles(self) -> int:
        """Cycles for which a warp's registers go to shared memory or come from it, without conflicts of banks."""
        if self.word not in ("LDS", "STS", "LDSM", "STSM"):
            return 0
        return next((words for size, words in _WIDTHS.items() if self.operation.endswith(size)), 1)

    @property
    def drains(self) -> bool:
        """Whether the warpgroup waits here until none of its products is in flight."""
        return self.operation.startswith("WARPGROUP.DEPBAR") and self.text.endswith("0x0")


WAITS = {
    "MEMBAR": re.compile(r"\bMEMBAR\b"), "FENCE": re.compile(r"\bFENCE\b"),
    "named barriers": re.compile(r"\bBAR\.SYNC\S* \S+, \S+"), "descriptors": re.compile(r"\bUTMACCTL\b"),
}  # fmt: skip
"""Where a thread waits though no roof counts it: memory fences, fences of proxies, barriers of some warps, and
rewritten descriptors, which TMA's cache has to forget."""


def waits_of(body: Sequence[Instruction]) -> tuple[int, ...]:
    """Return how many waits of each kind of `WAITS` some instructions have."""
    return tuple(sum(bool(pattern.search(instruction.text)) for instruction in body) for pattern in WAITS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Instructions first .. last of a program, the last of which branches back."""

    first: int
    last: int
    body: tuple[Instruction, ...]

    def count(self, *words: str) -> int:
        """Return how many of these instructions it has."""
        return sum(instruction.word in words for instruction in self.body)

    @property
    def cta_barriers(self) -> int:
        """Barriers of all threads in one pass."""
        return sum(instruction.is_cta_barrier for instruction in self.body)

    @property
    def loads_in_step(self) -> bool | None:
        """Whether a load's value is used before the products of its own pass have drained; None where none loads."""
        drain = max((at for at, instruction in enumerate(self.body) if instruction.drains), default=len(self.body))
        found = []
        for at, load in enumerate(self.body):
            if load.word == "LDG" and (register := re.search(r"\bR\d+\b", load.text)):
                uses = re.compile(rf",.*\b{register[0]}\b")
                found.append(any(uses.search(instruction.text) for instruction in self.body[at + 1 : drain]))
        return any(found) if found else None

    @property
    def exposed(self) -> tuple[Instruction, ...]:
        """What is issued while no product can be in flight: from the first drain to the next pass's first product.

        Where no barrier of all threads lies between, the other warpgroup's products fill the time: then nothing.
        """
        drain = next((at for at, instruction in enumerate(self.body) if instruction.drains), None)
        if drain is None:
            return ()
        product = next(at for at, instruction in enumerate(self.body) if instruction.word in TENSOR_WORDS)
        between = (*self.body[drain:], *self.body[:product])
        return between if any(instruction.is_cta_barrier for instruction in between) else ()

    @property
    def alone(self) -> tuple[Instruction, ...]:
        """What a warpgroup issues in a pass while none of its own products is in flight; another's may be."""
        product = next(at for at, instruction in enumerate(self.body) if instruction.word in TENSOR_WORDS)
        found, in_flight = [], False
        for instruction in (*self.body[product:], *self.body[:product]):
            in_flight = (in_flight or instruction.word in TENSOR_WORDS) and not instruction.drains
            if not in_flight:
                found.append(instruction)
        return tuple(found)


@dataclass(frozen=True)
class Program:
    """The machine code of one kernel."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    @classmethod
    def of(cls, text: str) -> "Program":
        """Read what `nvdisasm -c -hex` prints."""
        instructions: list[Instruction] = []
        labels: dict[str, int] = {}
        pending = ""
        for line in map(str.strip, text.splitlines()):
            if found := _LABEL.match(line):
                labels[found[1]] = len(instructions)
            elif found := _LOWER.match(line):
                pending = found[1].strip()
            elif pending and (found := _UPPER.match(line)):
                stall = int(found[1], 16) >> STALL_SHIFT & STALL_MASK
                instructions.append(Instruction(text=pending, stall=stall))
                pending = ""
        return cls(tuple(instructions), labels)

    @cached_property
    def words(self) -> Counter[str]:
        """How often each instruction occurs."""
        return Counter(instruction.word for instruction in self.instructions)

    def target(self, at: int) -> int | None:
        """Return where the branch at `at` leads, None for what is no branch."""
        instruction = self.instructions[at]
        found = _TARGET.search(instruction.text) if instruction.word == "BRA" else None
        return self.labels.get(found[1]) if found else None

    @cached_property
    def _targets(self) -> tuple[int | None, ...]:
        return tuple(self.target(at) for at in range(len(self.instructions)))

    def loops(self) -> tuple[Loop, ...]:
        """Return every backward branch with what it encloses, smallest first.

        Code that lies behind the rest and goes back, as a second try of a barrier does, closes no loop: it is reached
        without the instruction that it goes back to.
        """
        found = []
        for last, first in enumerate(self._targets):
            if first is not None and first <= last and not self._reaches(last, without=first):
                found.append(Loop(first=first, last=last, body=self.instructions[first : last + 1]))
        return tuple(sorted(found, key=lambda loop: len(loop.body)))

    def main_loop(self) -> Loop | None:
        """Return the innermost loop that multiplies on tensor cores."""
        return next((loop for loop in self.loops() if loop.count(*TENSOR_WORDS)), None)

    def loading_loop(self) -> Loop | None:
        """Return the innermost loop that only loads: of the warp that fills the ring of a specialized kernel."""
        return next((loop for loop in self.loops() if loop.count("UTMALDG") and not loop.count(*TENSOR_WORDS)), None)

    def of_loaded_tile(self, step: Loop) -> tuple[Instruction, ...]:
        """Return what the loading warp issues per tile beside its steps."""
        around = (loop for loop in self.loops() if loop.first <= step.first and loop.last > step.last)
        tiles = next((loop for loop in around if not loop.count("USETMAXREG")), None)
        if tiles is None:
            return ()
        return self.instructions[tiles.first : step.first] + self.instructions[step.last + 1 : tiles.last + 1]

    def of_tile(self, main: Loop) -> tuple[Instruction, ...]:
        """Return what a warp issues per tile outside its main loop, every branch; nothing where no loop has tiles.

        Specialized warps each have their own loop over tiles, inside one in which all wait for work. A main loop that
        was unrolled for several lengths of the sum stands there several times.
        """
        loops = self.loops()
        around = (loop for loop in loops if loop.first < main.first and loop.last > main.last)
        tiles = next((loop for loop in around if not loop.count("USETMAXREG")), None)
        if tiles is None:
            return ()
        inside = set(range(tiles.first, tiles.last + 1))
        for loop in loops:
            if loop.count(*TENSOR_WORDS) and tiles.first <= loop.first <= loop.last < tiles.last:
                inside -= set(range(loop.first, loop.last + 1))
        return tuple(self.instructions[at] for at in sorted(inside))

    def _reaches(self, goal: int, *, without: int) -> bool:
        """Whether a program that starts can come to instruction `goal` and not pass `without`."""
        waiting, seen = [0], {without}
        while waiting:
            at = waiting.pop()
            while at < len(self.instructions) and at not in seen:
                if at == goal:
                    return True
                seen.add(at)
                if (target := self._targets[at]) is not None:
                    waiting.append(target)
                if self.instructions[at].leaves:
                    break
                at += 1
        return False

    def executed(self, loop: Loop | None = None) -> int:
        """Return the instructions of one pass, without what a rare case would add: calls, such as of exact division.

        Every loop inside counts once, and both sides of a branch: parts of a tile that programs share are one kernel.
        """
        first, last = (0, len(self.instructions) - 1) if loop is None else (loop.first, loop.last)
        reached: set[int] = set()
        waiting = [first]
        while waiting:
            at = waiting.pop()
            while first <= at <= last and at not in reached:
                reached.add(at)
                instruction, target = self.instructions[at], self.target(at)
                is_certain = not instruction.text.startswith("@")
                if is_certain and instruction.word in ("EXIT", "RET"):
                    break
                if target is not None and (is_certain or self._is_rare(at + 1, target)):
                    at = target
                    continue
                if target is not None:
                    waiting.append(target)
                at += 1
        return len(reached)

    def _is_rare(self, first: int, end: int) -> bool:
        """Whether a few instructions that a branch passes over call a function."""
        between = self.instructions[first:end]
        return len(between) <= RARE_INSTRUCTIONS and any(instruction.word == "CALL" for instruction in between)


def disassemble(cubin: bytes, tool: str) -> Program:
    """Return the program in a cubin, read by `tool`, a path of nvdisasm."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        return Program.of(run_tool(tool, "-c", "-hex", file.name))


def run_tool(tool: str, *arguments: str) -> str:
    """Return what a tool prints; raise with it where the tool fails."""
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool} {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def issue_cycles(instructions: Sequence[Instruction], warps: int) -> int:
    """Return the fewest cycles in which `warps` warps of one SM can issue these instructions."""
    per_scheduler = max(1, warps // SCHEDULERS)
    return max(per_scheduler * len(instructions), sum(instruction.stall for instruction in instructions))
