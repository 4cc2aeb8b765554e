"""Clusters, CTAs and bundles: warps that run in lockstep, with one scheduler that is as unkind as its schedule says.

A bundle is a range of warps at one instruction. It splits where a branch takes some of its warps elsewhere, and joins
others at a barrier. Inside a warp, lanes that part go on one after the other, the earliest instruction first, and meet
again where the others wait. What a bundle's lockstep hides is found by the clocks of `memory`.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from emulator import arithmetic, asynchronous, blackwell, movement
from emulator.barriers import Mbarrier, NamedBarrier
from emulator.blocks import Block
from emulator.faults import Deadlock, Fault, Misuse, OutOfBounds, Unsupported
from emulator.memory import Clocks, GlobalMemory, SharedMemory
from emulator.program import Instruction, Program
from emulator.registers import Operands, Registers
from emulator.schedules import Schedule
from emulator.tensor_memory import TensorMemory

CONTROL = ("bra", "brx", "ret", "exit", "trap")
STALLED, JUMPED = "stalled", "jumped"
DECODERS = {**arithmetic.DECODERS, **movement.DECODERS, **asynchronous.DECODERS}
RANK_BITS = 24
"""Shared addresses of a cluster: the CTA's rank above, the offset below, as CUTLASS and Triton use them."""


class Code:
    """A program decoded, with the register files of a cluster."""

    def __init__(self, program: Program) -> None:
        self.program = program
        operands = Operands(program)
        self.pieces: list[Any] = []
        """Of each instruction, if it computes on registers alone and for every lane."""
        self.steps = [self._decode(operands, i) for i in program.instructions]
        self.blocks: list[Block | None] = [None] * len(self.steps)
        self._ends = {0, *program.labels.values()}
        accesses = [i for i in program.instructions if i.words[0] in ("ld", "st") and "shared" in i.opcode]
        self.grain = min((movement.access_bytes(i) for i in accesses), default=4)
        self.registers = [Registers(program) for _ in range(program.cluster)]

    def _decode(self, operands: Operands, i: Instruction) -> Callable[[Any], Any]:
        execute = _decoded(self.program, operands, i)
        self.pieces.append(None)
        if i.words[0] in CONTROL:
            return execute
        if i.predicate is None:
            self.pieces[-1] = getattr(execute, "pieces", None)
            return lambda bundle: execute(bundle, bundle.mask)
        return _predicated(operands, i, execute)

    def block(self, at: int) -> Block | None:
        """Return the block that begins at an instruction, of two or more."""
        if found := self.blocks[at]:
            return found
        last = at + 1
        while last not in self._ends and self.pieces[last] is not None:
            last += 1
        if last == at + 1:
            self.pieces[at] = None
            return None
        pieces = [
            (_name(i), piece) for i, of in zip(self.program.instructions[at:last], self.pieces[at:last], strict=True)
            for piece in of
        ]  # fmt: skip
        self.blocks[at] = Block(pieces, last - at)
        return self.blocks[at]


def _name(i: Instruction) -> str:
    """Return what tells functions of registers apart, beside the registers and their types."""
    return f"{i.opcode} {i.arguments[4] if i.words[0] == 'lop3' else ''}{'!' in i.text}"


def _decoded(program: Program, operands: Operands, i: Instruction) -> Any:
    try:
        if i.words[0] in CONTROL:
            return _control(program, operands, i)
        return _decoder(i)(operands, i)
    except (Fault, KeyError, StopIteration, AttributeError) as error:
        why = Unsupported(f"{i.opcode} ({type(error).__name__}: {error})")

        def refuse(_bundle: Any, _mask: Any = None) -> None:  # a kernel may hold what it never reaches
            raise why

        return refuse


def _predicated(operands: Operands, i: Instruction, execute: Any) -> Callable[[Any], Any]:
    kind, row = operands(i.predicate, "pred")
    negated = i.is_negated
    collective = i.words[0] in ("wgmma", "bar", "barrier") or "sync.aligned" in i.opcode
    together = i.words[0] in ("wgmma", "bar", "barrier", "ldmatrix", "stmatrix") or i.words[:2] == ["tcgen05", "ld"]

    def predicated(bundle: Any) -> Any:
        value = bundle.views[kind][row]
        mask = ~value if negated else value
        if bundle.mask is not None:
            mask = mask & bundle.mask
        count = np.count_nonzero(mask)
        if not count:
            return None
        if count == len(mask):
            return execute(bundle, None)
        if collective:
            here = mask.reshape(-1, 32)
            if (here.any(axis=1) != here.all(axis=1)).any():
                raise Misuse("an instruction of whole warps, and some lanes are not there")
            if together:
                bundle.split_by(mask.copy())
                return STALLED
        return execute(bundle, mask.copy())

    return predicated


def _decoder(i: Instruction) -> Any:
    name = i.words[0]
    if name == "tcgen05":
        return blackwell.DECODERS[i.words[1]]
    return DECODERS[name]


def _control(program: Program, operands: Operands, i: Instruction) -> Callable[[Any], Any]:
    name = i.words[0]
    if name == "trap":

        def trap(_bundle: Any) -> Any:
            raise Misuse("trap: the kernel gives up")

        return trap
    condition = operands(i.predicate, "pred") if i.predicate else None

    def taken(bundle: Any) -> np.ndarray | None:
        if condition is None:
            return bundle.mask
        value = bundle.views[condition[0]][condition[1]]
        chosen = ~value if i.is_negated else value.copy()
        return chosen if bundle.mask is None else chosen & bundle.mask

    if name in ("ret", "exit"):
        return lambda bundle: bundle.leave(taken(bundle))
    if name == "bra":
        target = program.labels[i.arguments[0]]
        if condition is None:

            def jump(bundle: Any) -> Any:
                bundle.pc = target
                return JUMPED

            return jump
        return lambda bundle: bundle.branch(taken(bundle), target)
    at = operands(i.arguments[0], "u32")
    targets = [program.labels[label] for label in program.tables[i.arguments[1]]]

    def indirect(bundle: Any) -> Any:
        chosen = bundle.views[at[0]][at[1]]
        if bundle.mask is not None or (chosen != chosen[0]).any():
            return bundle.split_by(chosen) or STALLED
        bundle.pc = targets[int(chosen[0])]
        return JUMPED

    return indirect


class Bundle:
    """Warps low .. high - 1 of a CTA at one instruction."""

    def __init__(self, cta: "Cta", low: int, high: int, pc: int = 0, mask: np.ndarray | None = None) -> None:
        self.cta, self.low, self.high, self.pc, self.mask = cta, low, high, pc, mask
        self.views, self.grids = cta.registers.views(low, high)
        self.num_lanes = 32 * (high - low)
        first = cta.rank * cta.num_warps
        self.warps = range(first + low, first + high)
        """Of the cluster."""
        self.warp_of_lane = np.repeat(np.arange(self.warps.start, self.warps.stop), 32)
        self.waiting: list[tuple[int, np.ndarray]] = []
        self.ticket: Any = None
        self.done = False

    @property
    def own(self) -> slice:
        return slice(self.warps.start, self.warps.stop)

    def lane_masks(self, mask: np.ndarray | None) -> np.ndarray:
        return np.ones(self.num_lanes, bool) if mask is None else mask

    def branch(self, taken: np.ndarray | None, target: int) -> Any:
        """Send the lanes of `taken` to `target`."""
        count = self.num_lanes if taken is None else np.count_nonzero(taken)
        if count == (self.num_lanes if self.mask is None else np.count_nonzero(self.mask)):
            self.pc = target
            return JUMPED
        if not count:
            return None
        here = self.lane_masks(self.mask)
        by_warp = taken.reshape(-1, 32), here.reshape(-1, 32)
        some, every = by_warp[0].any(axis=1), (by_warp[0] == by_warp[1]).all(axis=1)
        kinds = np.where(every, 2, some.astype(int))
        if self.high - self.low > 1 and (kinds != kinds[0]).any():
            self.split_by(np.repeat(kinds, 32))
            return STALLED
        self.waiting.append((target, taken))
        self.mask = here & ~taken
        self.pc += 1
        self.meet()
        return JUMPED

    def split_by(self, key: np.ndarray) -> None:
        """Split into bundles of side-by-side warps with one key each; all are at this instruction again."""
        if self.waiting and self.high - self.low == 1:
            raise Unsupported("lanes of a warp part in a way that is not emulated")
        of_warp = key.reshape(-1, 32)[:, 0]
        cuts = [0, *(np.flatnonzero(of_warp[1:] != of_warp[:-1]) + 1), len(of_warp)]
        for first, last in itertools.pairwise(cuts[1:]):
            self.cta.bundles.append(self._part(first, last))
        own = self._part(0, cuts[1])
        self.__dict__.update(own.__dict__)

    def _part(self, first: int, last: int) -> "Bundle":
        lanes = slice(32 * first, 32 * last)
        mask = None if self.mask is None else self.mask[lanes]
        part = Bundle(
            self.cta, self.low + first, self.low + last, self.pc, None if mask is None or mask.all() else mask
        )
        part.waiting = [(pc, away[lanes]) for pc, away in self.waiting if away[lanes].any()]
        return part

    def leave(self, leaving: np.ndarray | None) -> Any:
        """Lanes return from the kernel."""
        here = self.lane_masks(self.mask)
        leaving = here if leaving is None else leaving
        if not leaving.any():
            return None
        by_warp = leaving.reshape(-1, 32).any(axis=1)
        if self.high - self.low > 1 and (by_warp != by_warp[0]).any():
            self.split_by(np.repeat(by_warp, 32))
            return STALLED
        rest = here & ~leaving
        if rest.any():
            self.mask = rest
            self.cta.exited[self.low : self.high] |= leaving.reshape(-1, 32)
            self.pc += 1
            return JUMPED
        if self.waiting:
            self.cta.exited[self.low : self.high] |= leaving.reshape(-1, 32)
            self.pc, self.mask = self.waiting.pop()
            self.meet()
            return JUMPED
        self.done = True
        self.cta.leave(self)
        return STALLED

    def meet(self) -> None:
        """Of lanes that parted let the earliest instruction run, and join those that have met."""
        while self.waiting:
            at = min(range(len(self.waiting)), key=lambda k: self.waiting[k][0])
            pc, mask = self.waiting[at]
            if pc > self.pc:
                return
            here = self.lane_masks(self.mask)
            if pc == self.pc:
                self.waiting.pop(at)
                self.mask = here | mask
            else:
                self.waiting[at] = (self.pc, here)
                self.pc, self.mask = pc, mask
        if self.mask is not None and self.mask.all():
            self.mask = None

    def run(self, steps: int) -> bool:
        """Run up to so many instructions; return whether anything was done."""
        code, moved = self.cta.cluster.code, False
        try:
            while steps > 0 and not self.done:
                if (
                    self.mask is None
                    and code.pieces[self.pc]
                    and (block := code.blocks[self.pc] or code.block(self.pc))
                ):
                    block.execute(self)
                    self.pc += block.length
                    steps -= block.length
                    moved = True
                    continue
                result = code.steps[self.pc](self)
                if result is STALLED:
                    return moved
                moved = True
                steps -= 1
                if result is not JUMPED:
                    self.pc += 1
                if self.waiting:
                    self.meet()
        except Fault as fault:
            if not getattr(fault, "is_placed", False):
                at = self.cta.cluster.code.program.instructions[self.pc]
                fault.args = (f"{fault.args[0]}; {at}",)
                fault.is_placed = True  # type: ignore[attr-defined]
            raise
        return moved


class Cta:
    """A thread block: its warps, shared memory, barriers, and what works beside the warps."""

    def __init__(self, cluster: "Cluster", rank: int, index: tuple[int, int, int]) -> None:
        self.cluster, self.rank, self.base = cluster, rank, rank << RANK_BITS
        program = cluster.code.program
        self.num_warps = program.num_threads // 32
        self.registers = cluster.code.registers[rank]
        threads = np.arange(program.num_threads, dtype=np.uint32)
        symbols = {name: self.base + int(name.partition("+")[2] or 0) for name in program.rows["w"]
                   if name.startswith("global_smem")}  # fmt: skip
        x, y, z = cluster.grid
        self.registers.reset({
            "%tid.x": threads, "%tid.y": 0, "%tid.z": 0, "%laneid": threads % 32, "%warpid": threads // 32,
            "%ntid.x": program.num_threads, "%ctaid.x": index[0], "%ctaid.y": index[1], "%ctaid.z": index[2],
            "%nctaid.x": x, "%nctaid.y": y, "%nctaid.z": z, "%cluster_ctarank": rank, "%cluster_ctaid.x": rank,
            "%cluster_nctarank": program.cluster, "%clusterid.x": index[0] // program.cluster,
            "%nclusterid.x": x // program.cluster, **symbols,
        })  # fmt: skip
        self.shared = SharedMemory(cluster.shared_bytes, cluster.code.grain, cluster.clocks)
        self.mbarriers: dict[int, Mbarrier] = {}
        self.agents: dict[int, tuple[int, int]] = {}
        """(column of the clocks, phases so far) of the mbarriers at each place."""
        self.named: dict[int, NamedBarrier] = {}
        self.tensor_maps: dict[int, dict[str, Any]] = {}
        self.tensor_memory = TensorMemory(cluster.clocks)
        self.queue: list[Any] = []
        """Work for the tensor core of Blackwell, in order."""
        self.products: list[list[Any]] = [[] for _ in range(self.num_warps)]
        """Groups of Hopper's products in flight, by warp; the last one is not committed."""
        self.copies: list[list[Any]] = [[] for _ in range(self.num_warps)]
        """Groups of cp.async in flight, likewise."""
        self.loads: list[list[Any]] = [[] for _ in range(self.num_warps)]
        self.stores: list[list[Any]] = [[] for _ in range(self.num_warps)]
        """Of tensor memory, by warp."""
        self.uncommitted: list[Any] = []
        """Work of the tensor core that a commit will wait for."""
        self.exited = np.zeros((self.num_warps, 32), bool)
        grain = min(cluster.schedule.grain, self.num_warps)
        self.bundles = [Bundle(self, low, min(low + grain, self.num_warps)) for low in range(0, self.num_warps, grain)]

    @property
    def is_done(self) -> bool:
        return all(bundle.done for bundle in self.bundles)

    def leave(self, bundle: Bundle) -> None:
        """A bundle has returned."""
        for warp in range(bundle.low, bundle.high):
            if any(self.products[warp]) or any(self.copies[warp]):
                raise Misuse(f"warp {warp} exits with products or copies in flight")
        self.exited[bundle.low : bundle.high] = True
        self.cluster.settle()

    def make_mbarrier(self, offset: int, count: int, warp: int) -> None:
        """mbarrier.init, which takes the place of one that nobody uses."""
        if offset % 8 or offset + 8 > len(self.shared.bytes):
            raise OutOfBounds(f"an mbarrier at {offset}")
        before = self.mbarriers.get(offset)
        if before is not None and before.is_used:
            raise Misuse(f"the mbarrier at {offset} is initialized again, without mbarrier.inval")
        if offset not in self.agents:
            self.agents[offset] = self.cluster.clocks.new_agent(), 0
        agent, laps = self.agents[offset]
        clock = int(self.cluster.clocks.of[warp, warp])
        self.mbarriers[offset] = Mbarrier(count, self.cluster.clocks, agent, laps, made_by=(warp, clock))

    def retire(self, offset: int) -> None:
        """mbarrier.inval, or data in its place."""
        gone = self.mbarriers.pop(offset)
        self.agents[offset] = gone.agent, gone.laps + gone.phase

    def mbarrier(self, offset: int) -> Mbarrier:
        if offset not in self.mbarriers:
            raise Misuse(f"no mbarrier was initialized at {offset} of CTA {self.rank}")
        return self.mbarriers[offset]

    def join(self, bundles: Sequence[Bundle]) -> None:
        """Join bundles that a barrier has let go at the same instruction, as far as the schedule's grain allows."""
        grain = self.cluster.schedule.grain
        ready = sorted((b for b in bundles if b.mask is None and not b.waiting and not b.done), key=lambda b: b.low)
        for left, right in itertools.pairwise(ready):
            if left.pc == right.pc and left.high == right.low and left.low // grain == (right.high - 1) // grain:
                merged = Bundle(self, left.low, right.high, right.pc)
                merged.ticket = right.ticket
                right.__dict__.update(merged.__dict__)
                self.bundles.remove(left)


class Cluster:
    """CTAs that run together."""

    def __init__(
        self, code: Code, memory: GlobalMemory, parameters: dict[str, int], *, index: tuple[int, int, int],
        grid: tuple[int, int, int], shared_bytes: int, schedule: Schedule, seed: int,
    ) -> None:  # fmt: skip
        self.code, self.memory, self.parameters = code, memory, parameters
        self.grid, self.shared_bytes, self.schedule = grid, shared_bytes, schedule
        self.random = random.Random(seed)
        size = code.program.cluster
        self.clocks = Clocks(size * (code.program.num_threads // 32))
        self.arrivals: list[Any] = []
        """TMA copies in flight."""
        self.at_barrier: dict[int, np.ndarray] = {}
        self.tickets: dict[int, int] = {}
        self.generation = 0
        self.known = self.clocks.empty()
        self.ctas = [Cta(self, rank, (index[0] + rank, index[1], index[2])) for rank in range(size)]

    def at(self, address: int) -> tuple[Cta, int]:
        """Return (CTA, offset) of a shared address of the cluster."""
        rank = address >> RANK_BITS
        if not 0 <= rank < len(self.ctas):
            raise Misuse(f"shared address {address:#x} is of no CTA of the cluster")
        if self.ctas[rank].is_done:
            raise Misuse(f"access to the shared memory of CTA {rank}, which has exited")
        return self.ctas[rank], address & ((1 << RANK_BITS) - 1)

    def settle(self) -> None:
        """Let go those who wait at the barrier of the cluster, if all have come or exited."""
        all_warps = {w for cta in self.ctas for b in cta.bundles if not b.done for w in b.warps}
        if self.at_barrier and all_warps <= self.at_barrier.keys():
            self.known = np.max(list(self.at_barrier.values()), axis=0)
            self.at_barrier = {}
            self.generation += 1

    def run(self) -> None:
        """Run to the end."""
        schedule, choose, idle = self.schedule, self.random, 0
        while not all(cta.is_done for cta in self.ctas):
            moved = self._arrive_early()
            live = [bundle for cta in self.ctas for bundle in cta.bundles if not bundle.done]
            choose.shuffle(live)
            starved = [bundle for bundle in live if schedule.is_starved(bundle)]
            for bundle in live:
                if bundle not in starved and not bundle.done and bundle in bundle.cta.bundles:
                    moved |= bundle.run(schedule.steps(choose))
            if not moved or (not starved and choose.random() < schedule.stray):
                moved |= self._arrive_one()
            if not moved:
                for bundle in starved:
                    if not bundle.done and bundle in bundle.cta.bundles:
                        moved |= bundle.run(schedule.steps(choose))
            idle = 0 if moved else idle + 1
            if idle > 2:
                raise Deadlock(self._where())
        if self.arrivals or any(cta.queue for cta in self.ctas):
            raise Misuse("the cluster exits while TMA or tensor cores still work for it")

    def _arrive_early(self) -> bool:
        early = [copy for copy in self.arrivals if not self.schedule.is_late(copy.cta.rank)]
        for copy in early:
            self.arrivals.remove(copy)
            copy.arrive()
        moved = bool(early)
        if not self.schedule.late_products:
            for cta in self.ctas:
                while cta.queue:
                    cta.queue.pop(0)()
                    moved = True
        return moved

    def _arrive_one(self) -> bool:
        late: list[Any] = [*self.arrivals, *(cta for cta in self.ctas if cta.queue)]
        if not late:
            return False
        others = [work for work in late if not self.schedule.is_last(work)]
        chosen = self.random.choice(others or late)
        if isinstance(chosen, Cta):
            chosen.queue.pop(0)()
        else:
            self.arrivals.remove(chosen)
            chosen.arrive()
        return True

    def _where(self) -> str:
        code = self.code.program.instructions
        waits = [f"CTA {b.cta.rank} warps {b.low}..{b.high - 1} at {code[b.pc]}"
                 for cta in self.ctas for b in cta.bundles if not b.done]  # fmt: skip
        return "nothing can go on: " + "; ".join(waits)
