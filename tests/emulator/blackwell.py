"""tcgen05: tensor memory, products of one CTA or of a pair, copies of scales, commits; section 9.7.16."""

import re
from typing import Any

import numpy as np

from emulator.arithmetic import Execute, address_of, values_of
from emulator.asynchronous import MatrixDescriptor, _must_know, nothing
from emulator.faults import Misuse, Unsupported
from emulator.formats import E8M0_VALUES
from emulator.movement import lanes_of
from emulator.program import Instruction, in_braces
from emulator.registers import Operands

KINDS = {"f16": (("f16", "bf16"), 16), "f8f6f4": (("e4m3", "e5m2"), 32), "mxf8f6f4": (("e4m3", "e5m2"), 32)}
"""(types by their number in the instruction descriptor, length of the sum)."""


class TensorWork:
    """Something that a tensor core does in order. Warps know that it is done through a commit's mbarrier."""

    def __init__(self, cta: Any) -> None:
        self.clocks = cta.cluster.clocks
        self.commits: list[tuple[int, int]] = []

    def is_known(self, warp: int) -> bool:
        return any(self.clocks.of[warp, agent] >= clock for agent, clock in self.commits)


def _issuer(bundle: Any, mask: np.ndarray | None) -> int:
    lanes = np.arange(bundle.num_lanes)[lanes_of(bundle, mask)]
    if len(lanes) != 1:
        raise Misuse(f"{len(lanes)} threads issue what one thread must issue")
    return int(lanes[0])


def _ctas(bundle: Any, opcode: str) -> list[Any]:
    """Return the CTAs that an instruction works for: one, or the pair of which the even one issues."""
    cta = bundle.cta
    if "cta_group::2" not in opcode:
        return [cta]
    return [cta.cluster.ctas[cta.rank & ~1], cta.cluster.ctas[cta.rank | 1]]


def allocate(operands: Operands, i: Instruction) -> Execute:
    address, columns = address_of(operands, i.arguments[0]), operands(i.arguments[1], "u32")

    def execute(bundle: Any, mask: np.ndarray | None) -> None:
        lanes = np.arange(bundle.num_lanes)[lanes_of(bundle, mask)]
        if len(lanes) != 32:
            raise Misuse("tcgen05.alloc is an instruction of one warp")
        at = values_of(bundle, address)[lanes[:1]] - bundle.cta.base
        first = bundle.cta.tensor_memory.allocate(int(bundle.views[columns[0]][columns[1]][lanes[0]]))
        bundle.cta.shared.store(at, 4, np.array([[first]], np.uint32), bundle.warp_of_lane[lanes[:1]])

    return execute


def release(operands: Operands, i: Instruction) -> Execute:
    address, columns = operands(i.arguments[0], "u32"), operands(i.arguments[1], "u32")

    def execute(bundle: Any, mask: np.ndarray | None) -> None:
        lane = int(np.arange(bundle.num_lanes)[lanes_of(bundle, mask)][0])
        if bundle.cta.queue:
            raise Misuse("tcgen05.dealloc while tensor cores work")
        first = int(bundle.views[address[0]][address[1]][lane]) & 0xFFFF
        bundle.cta.tensor_memory.free(first, int(bundle.views[columns[0]][columns[1]][lane]))

    return execute


def give_back_permit(_operands: Operands, _i: Instruction) -> Execute:
    def execute(bundle: Any, _mask: np.ndarray | None) -> None:
        bundle.cta.tensor_memory.may_allocate = False

    return execute


def _cells(opcode: str, warp: int, address: int, offset: int) -> tuple[np.ndarray, np.ndarray, range]:
    """Return (lane, column) of each register and thread of a warp, and all columns between the first and the last."""
    count = int(re.search(r"\.x(\d+)", opcode)[1])
    lane, column = address >> 16, address & 0xFFFF
    thread, register = np.arange(32)[None, :], np.arange(count)[:, None]
    if "32x32b" in opcode:
        if lane != 32 * (warp % 4):
            raise Misuse(f"warp {warp} reaches lane {lane} of tensor memory; lanes {32 * (warp % 4)}.. are its own")
        lanes, columns = lane + thread + 0 * register, column + register + 0 * thread
    elif "16x32bx2" in opcode:
        if lane not in (32 * (warp % 4), 32 * (warp % 4) + 16):
            raise Misuse(f"warp {warp} reaches lane {lane} of tensor memory")
        lanes, columns = lane + thread % 16 + 0 * register, column + register + thread // 16 * offset
    else:
        raise Unsupported(opcode)
    return lanes, columns, range(int(columns.min()), int(columns.max()) + 1)


def load(operands: Operands, i: Instruction) -> Execute:
    """tcgen05.ld: nobody may write what it reads until tcgen05.wait::ld.

    The ISA gives its registers no value before that wait either, and Triton 3.9 has their first uses before it. ptxas
    makes the first use wait for the load all the same (LDTM sets a scoreboard: `tensor_loads.py` looks at the SASS), so
    registers are filled at once here.
    """
    if "pack" in i.opcode or "red" in i.words:
        raise Unsupported(i.opcode)
    rows = [operands(name, "b32")[1] for name in in_braces(i.arguments[0])]
    address = address_of(operands, i.arguments[1])
    offset = int(i.arguments[2], 0) if len(i.arguments) > 2 else 0

    def execute(bundle: Any, mask: np.ndarray | None) -> None:
        _full(mask)
        cta = bundle.cta
        memory = cta.tensor_memory
        for warp in range(bundle.low, bundle.high):
            at = int(values_of(bundle, address)[32 * (warp - bundle.low)])
            lanes, columns, touched = _cells(i.opcode, warp, at, offset)
            own = cta.rank * cta.num_warps + warp
            memory.inside(touched.start, touched.stop)
            memory.check_writer(touched, own, "reads")
            memory.begin_read(touched, own)
            cta.registers.files["w"][rows, 32 * warp : 32 * warp + 32] = memory.data[lanes, columns]
            cta.loads[warp].append((touched, own))

    return execute


def store(operands: Operands, i: Instruction) -> Execute:
    """tcgen05.st: done at tcgen05.wait::st."""
    if "unpack" in i.opcode:
        raise Unsupported(i.opcode)
    address, values = address_of(operands, i.arguments[0]), i.arguments[-1]
    rows = [operands(name, "b32")[1] for name in in_braces(values)]
    offset = int(i.arguments[1], 0) if len(i.arguments) > 2 else 0

    def execute(bundle: Any, mask: np.ndarray | None) -> None:
        _full(mask)
        cta = bundle.cta
        memory = cta.tensor_memory
        for warp in range(bundle.low, bundle.high):
            at = int(values_of(bundle, address)[32 * (warp - bundle.low)])
            lanes, columns, touched = _cells(i.opcode, warp, at, offset)
            own = cta.rank * cta.num_warps + warp
            memory.inside(touched.start, touched.stop)
            # Warps have lanes of their own: what another one writes to the same column meets nothing of this one.
            memory.check_readers_of_products(touched, own)
            memory.stored(touched, own)
            memory.data[lanes, columns] = cta.registers.files["w"][rows, 32 * warp : 32 * warp + 32]
            cta.stores[warp].append((touched, own))

    return execute


def _full(mask: np.ndarray | None) -> None:
    if mask is not None and not (mask.reshape(-1, 32).all(axis=1) | ~mask.reshape(-1, 32).any(axis=1)).all():
        raise Misuse("an instruction of whole warps, and some lanes are not there")
    if mask is not None:
        raise Unsupported("tcgen05.ld or .st of some warps of a bundle")


def wait(operands: Operands, i: Instruction) -> Execute:
    """tcgen05.wait::ld, ::st."""
    loads = "::ld" in i.opcode

    def execute(bundle: Any, _mask: np.ndarray | None) -> None:
        cta = bundle.cta
        for warp in range(bundle.low, bundle.high):
            if loads:
                for touched, own in cta.loads[warp]:
                    cta.tensor_memory.end_read(touched, own)
                cta.loads[warp] = []
            else:
                for touched, own in cta.stores[warp]:
                    cta.tensor_memory.store_done(touched, own)
                cta.stores[warp] = []

    return execute


def _scales(cta: Any, column: int, rows: int, byte: int) -> np.ndarray:
    """Return the scale of each row: lane r % 32, column r // 32, one byte of the word."""
    row = np.arange(rows)
    words = cta.tensor_memory.data[row % 32, column + row // 32]
    return E8M0_VALUES[words >> np.uint32(8 * byte) & np.uint32(255)]


def multiply(operands: Operands, i: Instruction) -> Execute:
    """tcgen05.mma of kinds f16, f8f6f4 and mxf8f6f4 with A in shared memory; sums in fp32."""
    kind = next(word for word in i.words if word.startswith("kind::"))[6:]
    if kind not in KINDS or "ws" in i.words or "sp" in i.words or i.arguments[1].startswith("["):
        raise Unsupported(i.opcode)
    scaled = kind == "mxf8f6f4"
    if scaled and "scale_vec::1X" not in i.opcode and "block32" not in i.opcode:
        raise Unsupported(i.opcode)
    d = address_of(operands, i.arguments[0])
    a, b = (operands(name, "b64") for name in i.arguments[1:3])
    described = operands(i.arguments[3], "b32")
    scales = [address_of(operands, name) for name in i.arguments[4:6]] if scaled else []
    rest = i.arguments[6:] if scaled else i.arguments[4:]
    if len(rest) != 1:
        raise Unsupported(i.text)
    adds = operands(rest[0], "pred")

    def execute(bundle: Any, mask: np.ndarray | None) -> None:
        lane = _issuer(bundle, mask)
        ctas = _ctas(bundle, i.opcode)
        if bundle.cta is not ctas[0]:
            raise Misuse("the odd CTA of a pair issues the product of both")
        warp = int(bundle.warp_of_lane[lane])
        first = int(values_of(bundle, d)[lane])
        if first >> 16:
            raise Unsupported("a product that begins at another lane than 0")
        made = _Multiplication(
            ctas, kind, int(bundle.views[described[0]][described[1]][lane]), first & 0xFFFF,
            MatrixDescriptor(int(bundle.views[a[0]][a[1]][lane]), blackwell=True),
            MatrixDescriptor(int(bundle.views[b[0]][b[1]][lane]), blackwell=True),
            [int(values_of(bundle, place)[lane]) & 0xFFFF for place in scales],
            adds=bool(bundle.views[adds[0]][adds[1]][lane]),
        )  # fmt: skip
        made.claim(warp)
        bundle.cta.queue.append(made.execute)
        bundle.cta.uncommitted.append(made)

    return execute


class _Multiplication(TensorWork):
    def __init__(
        self, ctas: list[Any], kind: str, descriptor: int, column: int, a: Any, b: Any, scales: list[int], *, adds: bool
    ) -> None:
        super().__init__(ctas[0])
        self.ctas, self.column, self.a, self.b, self.scales, self.adds = ctas, column, a, b, scales, adds
        names, self.k = KINDS[kind]
        self.n = (descriptor >> 17 & 63) << 3
        self.m = (descriptor >> 27 & 3) << 7 if scales else (descriptor >> 24 & 31) << 4
        a_kind, b_kind = descriptor >> 7 & 7, descriptor >> 10 & 7
        if a_kind > 1 or b_kind > 1 or descriptor >> 13 & 3 or descriptor & 0xF:
            raise Unsupported(f"instruction descriptor {descriptor:#x}")
        if not scales and descriptor >> 4 & 3 != 1:
            raise Unsupported("tcgen05 sums in fp16")
        if scales and not descriptor >> 23 & 1:
            raise Unsupported("scales that are not UE8M0")
        self.bytes = (descriptor >> 29 & 3, descriptor >> 4 & 3) if scales else (0, 0)
        self.kinds = names[a_kind], names[b_kind]
        self.transposed = bool(descriptor >> 15 & 1), bool(descriptor >> 16 & 1)
        allowed = (64, 128) if len(ctas) == 1 else (128, 256)
        if self.m not in allowed or not 8 <= self.n <= 256 or self.n % (8 if self.m == 64 else 16):
            raise Misuse(f"a product of {self.m} x {self.n} on {len(ctas)} CTAs")
        if len(ctas) == 2 and self.m != 256:
            raise Unsupported("a product of 128 rows on two CTAs")
        self.rows = self.m // len(ctas)

    def __str__(self) -> str:
        return f"a product of CTA {self.ctas[0].rank}"

    def claim(self, warp: int) -> None:
        """Check that all operands are there, and keep others from them until a commit."""
        element = 2 if self.k == 16 else 1
        for cta in self.ctas:
            for side, rows, flipped in (
                (self.a, self.rows, self.transposed[0]), (self.b, self.n // len(self.ctas), self.transposed[1])
            ):  # fmt: skip
                low, high = side.span(rows, self.k, element, transposed=flipped)
                cta.shared.check_async_read(low, high, range(warp, warp + 1))
                cta.shared.reads_in_flight.append((low, high, self))
            memory = cta.tensor_memory
            columns = memory.inside(self.column, self.column + self.n)
            memory.check_writer(columns, warp, "adds to", by_tensor_core=True)
            memory.check_readers(columns, warp)
            for column, rows in zip(self.scales, (self.rows, self.n), strict=False):
                used = memory.inside(column, column + -(-rows // 32))
                memory.check_writer(used, warp, "scales by", by_tensor_core=True)
                memory.reads_in_flight.append((used.start, used.stop, self))
            memory.write(columns, self)

    def execute(self) -> None:
        share = self.n // len(self.ctas)
        b = np.concatenate(
            [self.b.read(c.shared, share, self.k, self.kinds[1], transposed=self.transposed[1]) for c in self.ctas]
        )
        for cta in self.ctas:
            a = self.a.read(cta.shared, self.rows, self.k, self.kinds[0], transposed=self.transposed[0])
            right = b
            if self.scales:
                a = a * _scales(cta, self.scales[0], self.rows, self.bytes[0])[:, None]
                right = b * _scales(cta, self.scales[1], self.n, self.bytes[1])[:, None]
            found = a @ right.T
            row = np.arange(self.rows)
            # 64 rows lie in lanes 0 .. 15 of each quarter.
            lanes = row if self.rows == 128 else row // 16 * 32 + row % 16
            data = cta.tensor_memory.data[:, self.column : self.column + self.n]
            if self.adds:
                found = found + data[lanes].view(np.float32)
            data[lanes] = found.astype(np.float32).view(np.uint32)


class _ScaleCopy(TensorWork):
    """tcgen05.cp 32x128b.warpx4: 32 rows of 16 bytes into four columns, the same for each quarter of the lanes."""

    def __init__(self, ctas: list[Any], column: int, described: Any) -> None:
        super().__init__(ctas[0])
        self.ctas, self.column = ctas, column
        row, byte = np.arange(32)[:, None], np.arange(16)[None, :]
        self.offsets = described.start + row // 8 * described.stride + row % 8 * 16 + byte
        if described.mode != "none":
            raise Unsupported("tcgen05.cp of swizzled rows")

    def __str__(self) -> str:
        return f"a copy of scales of CTA {self.ctas[0].rank}"

    def claim(self, warp: int) -> None:
        low, high = int(self.offsets.min()), int(self.offsets.max()) + 1
        for cta in self.ctas:
            cta.shared.check_async_read(low, high, range(warp, warp + 1))
            cta.shared.reads_in_flight.append((low, high, self))
            columns = cta.tensor_memory.inside(self.column, self.column + 4)
            cta.tensor_memory.check_readers(columns, warp)
            cta.tensor_memory.write(columns, self)

    def execute(self) -> None:
        for cta in self.ctas:
            words = np.ascontiguousarray(cta.shared.bytes[self.offsets]).view(np.uint32)
            cta.tensor_memory.data[:, self.column : self.column + 4] = np.tile(words, (4, 1))


def copy(operands: Operands, i: Instruction) -> Execute:
    if "32x128b" not in i.opcode or "warpx4" not in i.opcode or "b8x16" in i.opcode:
        raise Unsupported(i.opcode)
    to, of = address_of(operands, i.arguments[0]), operands(i.arguments[1], "b64")

    def execute(bundle: Any, mask: np.ndarray | None) -> None:
        lane = _issuer(bundle, mask)
        described = MatrixDescriptor(int(bundle.views[of[0]][of[1]][lane]), blackwell=True)
        made = _ScaleCopy(_ctas(bundle, i.opcode), int(values_of(bundle, to)[lane]) & 0xFFFF, described)
        made.claim(int(bundle.warp_of_lane[lane]))
        bundle.cta.queue.append(made.execute)
        bundle.cta.uncommitted.append(made)

    return execute


def commit(operands: Operands, i: Instruction) -> Execute:
    """tcgen05.commit: an mbarrier, of several CTAs with multicast, gets an arrival when all work before is done."""
    address = address_of(operands, i.arguments[0])
    receivers = operands(i.arguments[1], "b16") if len(i.arguments) > 1 else None

    def execute(bundle: Any, mask: np.ndarray | None) -> None:
        lane = _issuer(bundle, mask)
        cta, cluster = bundle.cta, bundle.cta.cluster
        home, at = cluster.at(int(values_of(bundle, address)[lane]))
        ranks = [home.rank]
        if receivers:
            chosen = int(bundle.views[receivers[0]][receivers[1]][lane])
            ranks = [rank for rank in range(16) if chosen >> rank & 1]
        barriers = [cluster.at(rank << 24)[0].mbarrier(at) for rank in ranks]
        for found in barriers:
            _must_know(bundle, int(bundle.warp_of_lane[lane]), found)
        done, cta.uncommitted = list(cta.uncommitted), cta.uncommitted[-64:]
        # Copies that the work before had waited for are done when it is.
        known_before = cluster.clocks.empty()
        first = cluster.clocks.num_warps
        known_before[first:] = cluster.clocks.of[int(bundle.warp_of_lane[lane]), first:]

        def arrive() -> None:
            for found in barriers:
                for work in done:
                    work.commits.append((found.agent, found.clock))
                known = known_before.copy()
                known[found.agent] = max(known[found.agent], found.clock)
                found.arrive(1, known)

        cta.queue.append(arrive)

    return execute


DECODERS = {
    "alloc": allocate, "dealloc": release, "relinquish_alloc_permit": give_back_permit, "ld": load, "st": store,
    "wait::ld": wait, "wait::st": wait, "mma": multiply, "cp": copy, "commit": commit,
    **dict.fromkeys(("fence::before_thread_sync", "fence::after_thread_sync", "fence"), nothing),
}  # fmt: skip
