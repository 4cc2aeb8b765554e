"""Barriers, fences, TMA and the products of Hopper; sections 9.7.9.25 to 9.7.15 of the PTX ISA."""

import re
from functools import cache
from typing import Any, ClassVar

import numpy as np

from emulator.arithmetic import Execute, address_of, put, values_of
from emulator.barriers import NamedBarrier
from emulator.faults import Misuse, OutOfBounds, Race, Unsupported
from emulator.formats import E4M3_VALUES, E5M2_VALUES, bf16_values
from emulator.memory import POISON
from emulator.movement import lanes_of, open_group
from emulator.program import Instruction, in_braces
from emulator.registers import Operands

STALLED = "stalled"
SWIZZLE_ROWS = {"none": 0, "32": 1, "64": 3, "128": 7}
"""How many bits of the row within a pattern are mixed into the 16-byte chunk, as a mask."""


def nothing(_operands: Operands, i: Instruction) -> Execute:
    """What has no effect here: setmaxnreg, griddepcontrol, prefetches, warp barriers, and fences among threads."""
    return lambda bundle, mask: None


def barrier(operands: Operands, i: Instruction) -> Execute:
    """bar.sync, bar.arrive, barrier.sync; bar.warp.sync; barrier.cluster."""
    words = i.words
    if words[1] == "warp":
        return nothing(operands, i)
    if words[1] == "cluster":
        return _cluster_arrive if words[2] == "arrive" else _cluster_wait
    how = next(word for word in words[1:] if word in ("sync", "arrive"))
    number = operands(i.arguments[0], "u32")
    threads = operands(i.arguments[1], "u32") if len(i.arguments) > 1 else None

    def execute(bundle: Any, mask: np.ndarray | None) -> Any:
        if bundle.ticket:
            named, lap = bundle.ticket
            if named.lap == lap:
                return STALLED
            bundle.ticket = None
            return None
        if mask is not None:
            raise Misuse("lanes of a warp come to a barrier without the others")
        cta = bundle.cta
        at = int(bundle.views[number[0]][number[1]][0])
        count = int(bundle.views[threads[0]][threads[1]][0]) if threads else 32 * cta.num_warps
        named = cta.named.setdefault(at, NamedBarrier(cta.cluster.clocks))
        named.arrive(bundle, count, waits=how == "sync")
        return STALLED if how == "sync" else None

    return execute


def _cluster_arrive(bundle: Any, mask: np.ndarray | None) -> None:
    cluster = bundle.cta.cluster
    if mask is not None:
        raise Misuse("lanes of a warp come to the cluster's barrier without the others")
    for warp in bundle.warps:
        if warp in cluster.at_barrier or warp in cluster.tickets:
            raise Misuse("barrier.cluster.arrive twice without a wait")
        cluster.at_barrier[warp] = cluster.clocks.release(slice(warp, warp + 1))
        cluster.tickets[warp] = cluster.generation
    cluster.settle()


def _cluster_wait(bundle: Any, _mask: np.ndarray | None) -> Any:
    cluster = bundle.cta.cluster
    if any(warp not in cluster.tickets for warp in bundle.warps):
        raise Misuse("barrier.cluster.wait without an arrive")
    if any(cluster.tickets[warp] == cluster.generation for warp in bundle.warps):
        return STALLED
    for warp in bundle.warps:
        del cluster.tickets[warp]
    cluster.clocks.acquire(bundle.own, cluster.known)
    return None


def mbarrier(operands: Operands, i: Instruction) -> Execute:
    """init, inval, arrive, expect_tx, arrive.expect_tx, try_wait.parity, test_wait.parity."""
    words = i.words
    how, remote = words[1], "shared::cluster" in i.opcode
    if how in ("try_wait", "test_wait"):
        if "parity" not in words:
            raise Unsupported(i.opcode)
        return _mbarrier_wait(operands, i, blocks=how == "try_wait")
    names = i.arguments if how in ("init", "inval", "expect_tx") else i.arguments[1:]
    if how == "arrive" and not i.arguments[0].startswith("_"):
        raise Unsupported("a state token of mbarrier.arrive")
    address = address_of(operands, names[0])
    number = operands(names[1], "u32") if len(names) > 1 else None

    def execute(bundle: Any, mask: np.ndarray | None) -> None:
        addresses = values_of(bundle, address)
        for lane in np.arange(bundle.num_lanes)[lanes_of(bundle, mask)]:
            value = int(bundle.views[number[0]][number[1]][lane]) if number else 1
            warp = int(bundle.warp_of_lane[lane])
            cta, at = bundle.cta.cluster.at(int(addresses[lane]))
            if cta is not bundle.cta and not remote:
                raise Misuse(f"CTA {bundle.cta.rank} names an mbarrier of CTA {cta.rank} without shared::cluster")
            if how == "init":
                cta.make_mbarrier(at, value, warp)
            elif how == "inval":
                cta.mbarrier(at)
                cta.retire(at)
            else:
                found = cta.mbarrier(at)
                _must_know(bundle, warp, found)
                if "expect_tx" in words:
                    found.expect(value)
                if how == "arrive":
                    known = bundle.cta.cluster.clocks.release(slice(warp, warp + 1))
                    found.arrive(1 if "expect_tx" in words else value, known)

    return execute


def _must_know(bundle: Any, warp: int, barrier: Any) -> None:
    who, when = barrier.made_by
    if bundle.cta.cluster.clocks.of[warp, who] < when:
        raise Race(f"warp {warp} uses an mbarrier that warp {who} initializes, and does not wait for it")


def _mbarrier_wait(operands: Operands, i: Instruction, *, blocks: bool) -> Execute:
    result = operands(i.arguments[0], "pred")
    address, parity = address_of(operands, i.arguments[1]), operands(i.arguments[2], "u32")

    def execute(bundle: Any, mask: np.ndarray | None) -> Any:
        lanes = np.arange(bundle.num_lanes)[lanes_of(bundle, mask)]
        addresses = values_of(bundle, address)[lanes]
        parities = bundle.views[parity[0]][parity[1]][lanes]
        if (addresses != addresses[0]).any() or (parities != parities[0]).any():
            by_warp = (values_of(bundle, address) * 2 + bundle.views[parity[0]][parity[1]]).reshape(-1, 32)
            if mask is None and bundle.mask is None and (by_warp == by_warp[:, :1]).all():
                bundle.split_by(by_warp.reshape(-1))
                return STALLED
            raise Unsupported("lanes of a warp wait for different mbarriers")
        cta, at = bundle.cta.cluster.at(int(addresses[0]))
        if cta is not bundle.cta:
            raise Misuse("a wait for an mbarrier of another CTA")
        found = cta.mbarrier(at)
        for warp in bundle.warps:
            _must_know(bundle, warp, found)
        passed = found.has_passed(int(parities[0]))
        if passed:
            cta.cluster.clocks.acquire(bundle.own, found.known)
        elif blocks:
            return STALLED
        put(bundle.views[result[0]][result[1]], passed, mask)
        return None

    return execute


def fence(operands: Operands, i: Instruction) -> Execute:
    """fence.proxy.async and fence.proxy.tensormap; clocks already order what fences among threads do."""
    if "proxy" not in i.words:
        return nothing(operands, i)
    if any("async" in word for word in i.words):
        return lambda bundle, _mask: bundle.cta.shared.fence_proxy(bundle.warps)
    if not any("tensormap" in word for word in i.words):
        raise Unsupported(i.opcode)
    if "release" in i.words:
        return nothing(operands, i)
    address = address_of(operands, i.arguments[0])

    def acquire(bundle: Any, mask: np.ndarray | None) -> None:
        clocks = bundle.cta.cluster.clocks
        for lane in np.arange(bundle.num_lanes)[lanes_of(bundle, mask)]:
            at, warp = int(values_of(bundle, address)[lane]), int(bundle.warp_of_lane[lane])
            described = bundle.cta.cluster.memory.tensor_maps.get(at)
            if described is None:
                raise Misuse(f"fence.proxy.tensormap of {at:#x}, where no descriptor was written")
            described.acquired[id(bundle.cta.cluster), warp] = int(clocks.of[warp, warp])

    return acquire


WIDE_VALUES = {"e4m3": E4M3_VALUES.astype(np.float64), "e5m2": E5M2_VALUES.astype(np.float64)}


class TensorMap:
    """A descriptor in global memory."""

    FIELDS: ClassVar = {"global_address": "address", "rank": "rank", "elemtype": "element", "swizzle_mode": "swizzle",
              "fill_mode": "fill", "interleave_layout": "interleave"}  # fmt: skip
    AXES: ClassVar = {
        "box_dim": "box",
        "global_dim": "size",
        "global_stride": "stride",
        "element_stride": "element_stride",
    }
    ELEMENT_BYTES: ClassVar = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 4, 9: 8, 10: 2}
    """By elemtype of tensormap.replace: u8, u16, u32, s32, u64, s64, f16, f32, f32.ftz, f64, bf16."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self.acquired: dict[tuple[int, int], int] = {}
        self.rank = fields["rank"] + 1
        self.box, self.size = (tuple(fields[name][k] for k in range(self.rank)) for name in ("box", "size"))
        self.element = self.ELEMENT_BYTES[fields["element"]]
        self.strides = (self.element, *(fields["stride"][k] for k in range(self.rank - 1)))
        self.swizzle = ("none", "32", "64", "128")[fields["swizzle"]]
        if fields["interleave"] or any(fields["element_stride"][k] != 1 for k in range(self.rank)):
            raise Unsupported("a descriptor with interleaving or element strides")
        if fields["address"] % 16 or any(stride % 16 for stride in self.strides[1:]):
            raise Misuse("a descriptor's address and strides must be multiples of 16 bytes")
        if any(not 1 <= side <= 256 for side in self.box) or self.box[0] * self.element % 16:
            raise Misuse(f"a box of {self.box}: at most 256 per side, rows of 16 bytes")
        if self.swizzle != "none" and self.box[0] * self.element > int(self.swizzle):
            raise Misuse(f"rows of {self.box[0] * self.element} B in a box of swizzle {self.swizzle}")
        self.num_bytes = int(np.prod(self.box)) * self.element

    def offsets(self) -> np.ndarray:
        """Return where each 16 bytes of the box lie in shared memory, before swizzling."""
        return np.arange(0, self.num_bytes, 16)

    def read(self, memory: Any, coordinates: tuple[int, ...]) -> np.ndarray:
        """Return the bytes of the box at some coordinates, first axis innermost, zeros outside the tensor."""
        start, data = memory.find(self.fields["address"])
        within = self.fields["address"] - start
        shape = self.box[::-1]
        found = np.zeros((*shape[:-1], shape[-1] * self.element), np.uint8)
        low = [max(0, c) for c in coordinates]
        high = [min(n, c + b) for n, c, b in zip(self.size, coordinates, self.box, strict=True)]
        if any(h <= lo for lo, h in zip(low, high, strict=True)):
            return found.reshape(-1)
        counts = [h - lo for lo, h in zip(low, high, strict=True)]
        first = within + sum(lo * stride for lo, stride in zip(low, self.strides, strict=True))
        last = first + sum((n - 1) * stride for n, stride in zip(counts, self.strides, strict=True)) + self.element
        if first < 0 or last > len(data):
            raise OutOfBounds(f"a box reads {first}..{last} of a tensor of {len(data)} bytes: the descriptor is wrong")
        view = np.lib.stride_tricks.as_strided(
            data[first:], (*counts[:0:-1], counts[0] * self.element), (*self.strides[:0:-1], 1)
        )
        places = [slice(lo - c, h - c) for lo, h, c in zip(low, high, coordinates, strict=True)]
        inner = slice(places[0].start * self.element, places[0].stop * self.element)
        found[(*places[:0:-1], inner)] = view
        return found.reshape(-1)


def tensor_map(operands: Operands, i: Instruction) -> Execute:
    """tensormap.replace of a descriptor in shared memory, and its copy to global memory with a release."""
    if i.words[1] == "cp_fenceproxy":
        to, of = address_of(operands, i.arguments[0]), address_of(operands, i.arguments[1])

        def publish(bundle: Any, mask: np.ndarray | None) -> None:
            lanes = np.arange(bundle.num_lanes)[lanes_of(bundle, mask)]
            if len(lanes) != 32 or lanes[0] % 32:
                raise Misuse("tensormap.cp_fenceproxy is an instruction of one whole warp")
            at = int(values_of(bundle, of)[lanes[0]]) - bundle.cta.base
            if at not in bundle.cta.tensor_maps:
                raise Misuse(f"no descriptor at {at} of shared memory")
            fields = {name: list(v) if isinstance(v, list) else v for name, v in bundle.cta.tensor_maps[at].items()}
            memory, address = bundle.cta.cluster.memory, int(values_of(bundle, to)[lanes[0]])
            if address % 64:
                raise Misuse("a descriptor must lie at a multiple of 64 bytes")
            memory.find(address)
            memory.tensor_maps[address] = TensorMap(fields)

        return publish
    field = i.words[3]
    address = address_of(operands, i.arguments[0])
    axis = int(i.arguments[1], 0) if field in TensorMap.AXES else None
    value = operands(i.arguments[-1], i.words[-1])

    def replace(bundle: Any, mask: np.ndarray | None) -> None:
        lane = int(np.arange(bundle.num_lanes)[lanes_of(bundle, mask)][0])
        at = int(values_of(bundle, address)[lane]) - bundle.cta.base
        empty: dict[str, Any] = {
            **dict.fromkeys(TensorMap.FIELDS.values(), 0), **{name: [0] * 5 for name in TensorMap.AXES.values()}
        }  # fmt: skip
        fields = bundle.cta.tensor_maps.setdefault(at, empty)
        given = int(bundle.views[value[0]][value[1]][lane])
        if axis is None:
            fields[TensorMap.FIELDS[field]] = given
        else:
            fields[TensorMap.AXES[field]][axis] = given

    return replace


class TmaCopy:
    """A tile on its way into one CTA; a multicast is one of these per destination."""

    def __init__(self, cta: Any, low: int, described: TensorMap, coordinates: Any, barrier: Any, warp: int) -> None:
        self.cta, self.low, self.described, self.coordinates, self.barrier = cta, low, described, coordinates, barrier
        memory = cta.shared
        self.high = low + described.num_bytes
        align = 128 if described.swizzle in ("none", "32", "64", "128") else 16
        if low % align or self.high > len(memory.bytes):
            raise OutOfBounds(f"a TMA copy to {low}..{self.high} of {len(memory.bytes)} B, aligned to {align}")
        self.units = slice(low // memory.grain, self.high // memory.grain)
        memory.claim(self.units, warp)
        memory.check_async_write(self.units)
        memory.writer[self.units] = barrier.agent
        memory.written[self.units] = barrier.clock
        memory.unfenced[self.units] = False
        memory.bytes[low : self.high] = POISON
        memory.changed(low, self.high)

    def arrive(self) -> None:
        """Deliver."""
        if self.cta.is_done:
            raise Misuse(f"TMA delivers to CTA {self.cta.rank}, which has exited")
        cluster = self.cta.cluster
        current = self.described is self.source(cluster)
        if not current:
            raise Race("a descriptor was rewritten while a copy with it was in flight")
        data = self.described.read(cluster.memory, self.coordinates).reshape(-1, 16)
        offsets = swizzled(self.low + self.described.offsets(), self.described.swizzle)
        self.cta.shared.bytes.reshape(-1, 16)[offsets // 16] = data
        self.cta.shared.changed(self.low, self.high)
        self.barrier.complete(self.described.num_bytes)

    def source(self, cluster: Any) -> Any:
        return cluster.memory.tensor_maps.get(self.address)

    address = 0


def swizzled(offsets: np.ndarray, mode: str) -> np.ndarray:
    """Mix the row within a pattern of 8 x 128 B (4 x 128, 2 x 128) into the 16-byte chunk."""
    return offsets ^ (((offsets >> 7) & SWIZZLE_ROWS[mode]) << 4)


def bulk(operands: Operands, i: Instruction) -> Execute:
    """cp.async.bulk.tensor from global to shared memory, with multicast; commit and wait of stores, of which none."""
    words = i.words
    if words[3] in ("commit_group", "wait_group"):
        return nothing(operands, i)
    if words[3] != "tensor" or words[5] not in ("shared::cluster", "shared::cta") or "global" not in words:
        raise Unsupported(i.opcode)
    if "im2col" in i.opcode or "gather4" in i.opcode:
        raise Unsupported(i.opcode)
    to, barrier_at = address_of(operands, i.arguments[0]), address_of(operands, i.arguments[2])
    match = re.fullmatch(r"\[\s*([%\w]+)\s*,\s*\{(.*)\}\s*\]", i.arguments[1])
    described_at = operands(match[1], "b64")
    coordinates = [operands(name.strip(), "s32") for name in match[2].split(",")]
    receivers = operands(i.arguments[3], "b16") if "multicast::cluster" in i.opcode else None
    pair = "cta_group::2" in i.opcode

    def execute(bundle: Any, mask: np.ndarray | None) -> None:
        cta, cluster = bundle.cta, bundle.cta.cluster
        for lane in np.arange(bundle.num_lanes)[lanes_of(bundle, mask)]:
            warp = int(bundle.warp_of_lane[lane])
            address = int(bundle.views[described_at[0]][described_at[1]][lane])
            described = cluster.memory.tensor_maps.get(address)
            if described is None:
                raise Misuse(f"no descriptor at {address:#x}")
            acquired = {who: when for (of, who), when in described.acquired.items() if of == id(cluster)}
            if not any(cluster.clocks.of[warp, who] >= when for who, when in acquired.items()):
                raise Race("a descriptor is used, and no fence.proxy.tensormap acquire of it came before")
            if described.rank != len(coordinates):
                raise Misuse(f"{len(coordinates)} coordinates for a descriptor of {described.rank} axes")
            target, low = cluster.at(int(values_of(bundle, to)[lane]))
            home, offset = cluster.at(int(values_of(bundle, barrier_at)[lane]))
            if home is not cta and not pair:
                raise Misuse("a TMA copy signals the mbarrier of another CTA")
            ranks = [target.rank]
            if receivers:
                chosen = int(bundle.views[receivers[0]][receivers[1]][lane])
                ranks = [rank for rank in range(16) if chosen >> rank & 1]
            where = tuple(int(bundle.views[k][row][lane]) for k, row in coordinates)
            for rank in ranks:
                into, _ = cluster.at(rank << 24)
                # cta_group::2: the barrier may be that of the other CTA of the receiver's pair.
                signals = cluster.at((rank & ~1 | home.rank & 1) << 24)[0] if pair else into
                found = signals.mbarrier(offset)
                _must_know(bundle, warp, found)
                made = TmaCopy(into, low, described, where, found, warp)
                made.address = address
                cluster.arrivals.append(made)

    return execute


@cache
def operand_offsets(
    rows: int, row_bytes: int, mode: str, leading: int, stride: int, phase: int, k_rows: int = 0
) -> np.ndarray:
    """Return where the bytes of an operand lie from a start that is `phase` beyond a multiple of 1,024.

    With the summed axis dense: [rows, row_bytes], in cores of 8 rows. Otherwise (k_rows) [k_rows, bytes of `rows`]:
    the rows of the operand are dense. Section "Matrix descriptor", canonical layouts.
    """
    pitch = 16 if mode == "none" else int(mode)
    if k_rows:
        k, byte = np.arange(k_rows)[:, None], np.arange(row_bytes)[None, :]
        linear = byte % pitch + byte // pitch * leading + k % 8 * pitch + k // 8 * stride
    else:
        row, byte = np.arange(rows)[:, None], np.arange(row_bytes)[None, :]
        beyond = byte // 16 * leading if mode == "none" else 0
        linear = row // 8 * stride + row % 8 * pitch + (byte % 16 if mode == "none" else byte) + beyond
    offsets = swizzled(phase + linear, mode) - phase
    offsets.setflags(write=False)
    return offsets


@cache
def _ends(*shape: Any) -> tuple[int, int]:
    offsets = operand_offsets(*shape)
    return int(offsets.min()), int(offsets.max())


class MatrixDescriptor:
    """An operand in shared memory, of 64 bits."""

    def __init__(self, bits: int, *, blackwell: bool = False) -> None:
        self.start = (bits & 0x3FFF) << 4
        self.leading, self.stride = (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4
        if blackwell:
            if bits >> 46 & 7 != 1:
                raise Misuse("bits 46 to 48 of a tcgen05 descriptor must be 1")
            self.mode = {0: "none", 2: "128", 4: "64", 6: "32"}.get(bits >> 61 & 7, "")
        else:
            self.mode = ("none", "128", "64", "32")[bits >> 62]
        if not self.mode:
            raise Unsupported("128-byte swizzling of 32-byte atoms")
        if self.mode != "none" and bits >> 49 & 7:  # without swizzling it says nothing
            raise Unsupported("a base offset in a matrix descriptor")

    def _shape(self, rows: int, k: int, element: int, *, transposed: bool) -> tuple[Any, ...]:
        row_bytes, k_rows = (rows * element, k) if transposed else (k * element, 0)
        return rows, row_bytes, self.mode, self.leading, self.stride, self.start % 1024, k_rows

    def offsets(self, rows: int, k: int, element: int, *, transposed: bool) -> np.ndarray:
        return operand_offsets(*self._shape(rows, k, element, transposed=transposed))

    def span(self, rows: int, k: int, element: int, *, transposed: bool) -> tuple[int, int]:
        """Return the bytes that lie between the operand's first and last."""
        first, last = _ends(*self._shape(rows, k, element, transposed=transposed))
        return self.start + first, self.start + last + 1

    def read(self, memory: Any, rows: int, k: int, kind: str, *, transposed: bool = False) -> np.ndarray:
        """Return the operand [rows, k] in fp64."""
        element = {"e4m3": 1, "e5m2": 1, "bf16": 2, "f16": 2}[kind]
        offsets = self.offsets(rows, k, element, transposed=transposed)

        def values() -> np.ndarray:
            raw = memory.bytes[self.start + offsets]
            if element == 1:
                found = WIDE_VALUES[kind][raw]
            else:
                codes = np.ascontiguousarray(raw).view(np.uint16)
                found = (bf16_values(codes) if kind == "bf16" else codes.view(np.float16)).astype(np.float64)
            return found.T if transposed else found

        key = self.start, self.mode, self.leading, self.stride, rows, k, kind, transposed
        return memory.operand(key, *self.span(rows, k, element, transposed=transposed), values)


class Product:
    """wgmma of some warps of a warpgroup: D [64, N] += A [64, K] B [N, K].T, in fp32, each sum rounded once."""

    def __init__(self, bundle: Any, shape: tuple[int, int], kind: str, rows: list[int]) -> None:
        self.cta, self.warps, self.low, self.high = bundle.cta, bundle.warps, bundle.low, bundle.high
        (self.n, self.k), self.kind, self.rows = shape, kind, rows
        self.a: Any = None
        self.b: Any = None
        self.transposed = (False, False)
        self.adds = True
        self.sign = 1.0
        self.units: list[slice] = []
        self.done: set[int] = set()

    def claim(self, flight: bool) -> None:
        element = 1 if self.kind[0] == "e" else 2
        memory = self.cta.shared
        for side, rows, flipped in ((self.a, 64, self.transposed[0]), (self.b, self.n, self.transposed[1])):
            if isinstance(side, MatrixDescriptor):
                low, high = side.span(rows, self.k, element, transposed=flipped)
                self.units.append(memory.check_async_read(low, high, self.warps))
                if flight:
                    memory.reads_in_flight.append((low, high, self))

    def is_known(self, _warp: int) -> bool:
        """Of products in flight nobody knows that they are done; those that were waited for are not in flight."""
        return False

    def __str__(self) -> str:
        return f"a product of warps {self.low}..{self.high - 1} of CTA {self.cta.rank}"

    def execute(self) -> None:
        """Multiply and put the sums into registers."""
        cta, lanes = self.cta, slice(32 * self.low, 32 * self.high)
        b = self.b.read(cta.shared, self.n, self.k, self.kind, transposed=self.transposed[1])
        parts = [warp % 4 for warp in range(self.low, self.high)]
        if isinstance(self.a, MatrixDescriptor):
            a = self.a.read(cta.shared, 64, self.k, self.kind, transposed=self.transposed[0])
            a = a.reshape(4, 16, self.k)[parts]
        else:
            a = self.a
        file = cta.registers.files["w"]
        found = self.sign * (a @ b.T)  # [warps, 16, n]
        # Lane 4 r + c has columns 8 j + 2 c, + 1 of rows r and r + 8, in registers 4 j .. 4 j + 3.
        found = found.reshape(len(parts), 2, 8, self.n // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4)
        found = found.reshape(self.n // 2, -1)
        if self.adds:
            found = found + file[self.rows, lanes].view(np.float32)
        file[self.rows, lanes] = found.astype(np.float32).view(np.uint32)

    def finish(self, warps: range, *, late: bool) -> None:
        """Some warps have waited; all warps of a bundle wait together."""
        self.done |= set(warps)
        if late and len(self.done) == len(self.warps):
            self.execute()
        memory = self.cta.shared
        if len(self.done) == len(self.warps):
            memory.reads_in_flight = [entry for entry in memory.reads_in_flight if entry[2] is not self]
        for units in self.units:
            memory.has_read(units, warps)


def product(operands: Operands, i: Instruction) -> Execute:
    """wgmma: mma_async, fence, commit_group, wait_group."""
    how = i.words[1]
    if how == "fence":
        return nothing(operands, i)
    if how == "commit_group":
        return _commit_products
    if how == "wait_group":
        keep = int(i.arguments[0])
        return lambda bundle, _mask: _wait_products(bundle, keep)
    match = re.search(r"m64n(\d+)k(\d+)\.f32\.(\w+)\.(\w+)$", i.opcode)
    if not match or match[3] != match[4] or match[3] not in ("e4m3", "e5m2", "bf16", "f16"):
        raise Unsupported(i.opcode)
    n, k, kind = int(match[1]), int(match[2]), match[3]
    rows = [operands(name, "b32")[1] for name in in_braces(i.arguments[0])]
    if len(rows) != n // 2:
        raise Misuse(f"{len(rows)} registers for {n} columns")
    in_registers = i.arguments[1].startswith("{")
    a: Any = operands(i.arguments[1], "b64") if not in_registers else None
    if in_registers:
        a = [operands(name, "b32") for name in in_braces(i.arguments[1])]
    b, adds = operands(i.arguments[2], "b64"), operands(i.arguments[3], "pred") if i.arguments[3][0] == "%" else None
    always = adds is None and int(i.arguments[3], 0) != 0
    flags = [int(flag, 0) for flag in i.arguments[4:]]
    if flags[1] != 1:
        raise Unsupported("wgmma with a negated operand")
    turned = [flag == 1 for flag in flags[2:]]
    transposed = (False, turned[0]) if in_registers and turned else tuple(turned) if turned else (False, False)

    def execute(bundle: Any, mask: np.ndarray | None) -> None:
        if mask is not None:
            raise Misuse("wgmma by a part of a warp")
        late = bundle.cta.cluster.schedule.late_products
        for low in range(bundle.low, bundle.high, 4 - bundle.low % 4 if bundle.low % 4 else 4):
            part = bundle if bundle.high - bundle.low <= 4 else _warpgroup(bundle, low)
            made = Product(part, (n, k), kind, rows)
            lane = 32 * (part.low - bundle.low)
            made.b = MatrixDescriptor(int(bundle.views[b[0]][b[1]][lane]))
            made.adds = bool(bundle.views[adds[0]][adds[1]][lane]) if adds else always
            made.sign, made.transposed = float(flags[0] or 1), transposed
            if in_registers:
                made.a = _a_of_registers(bundle, a, kind, k)[part.low - bundle.low : part.high - bundle.low]
            else:
                made.a = MatrixDescriptor(int(bundle.views[a[0]][a[1]][lane]))
            made.claim(flight=True)
            if late:
                bundle.cta.registers.files["w"][rows, 32 * part.low : 32 * part.high] |= (
                    np.uint32(0) if made.adds else np.uint32(0x7FC00000)
                )
            else:
                made.execute()
            for warp in range(part.low, part.high):
                open_group(bundle.cta.products[warp]).append(made)

    return execute


def _warpgroup(bundle: Any, low: int) -> Any:
    return type(bundle)(bundle.cta, low, min(low + 4, bundle.high), bundle.pc)


def _a_of_registers(bundle: Any, places: Any, kind: str, k: int) -> np.ndarray:
    """Return A [warps, 16, k]: of rows r, r + 8 a lane 4 r + c has words c and, in the second half, c + 4."""
    words = np.stack([bundle.views[t][row].reshape(-1, 8, 4) for t, row in places])  # [4, warps, 8, 4]
    both = words.reshape(2, 2, -1, 8, 4).transpose(2, 1, 3, 0, 4)  # [warps, half of rows, 8, half of k, 4]
    raw = np.ascontiguousarray(both).reshape(-1, 16, 8).view(np.uint8).reshape(-1, 16, 32)
    if kind[0] == "e":
        return WIDE_VALUES[kind][raw]
    codes = np.ascontiguousarray(raw).view(np.uint16)
    return (bf16_values(codes) if kind == "bf16" else codes.view(np.float16)).astype(np.float64)


def _product_fence(bundle: Any, _mask: np.ndarray | None) -> None:
    for warp in range(bundle.low, bundle.high):
        bundle.cta.fenced[warp] = True


def _commit_products(bundle: Any, _mask: np.ndarray | None) -> None:
    for warp in range(bundle.low, bundle.high):
        open_group(bundle.cta.products[warp])
        bundle.cta.products[warp].append([])


def _wait_products(bundle: Any, keep: int) -> None:
    late = bundle.cta.cluster.schedule.late_products
    finished: dict[int, tuple[Any, list[int]]] = {}
    first = bundle.cta.rank * bundle.cta.num_warps
    for warp in range(bundle.low, bundle.high):
        groups = bundle.cta.products[warp]
        while len(groups) - 1 > keep:
            for made in groups.pop(0):
                finished.setdefault(id(made), (made, []))[1].append(first + warp)
    for made, warps in finished.values():
        made.finish(range(min(warps), max(warps) + 1), late=late)


def map_address(operands: Operands, i: Instruction) -> Execute:
    """mapa: the same offset in another CTA of the cluster."""
    result, rank = operands(i.arguments[0], "u32"), operands(i.arguments[2], "u32")
    source = operands(i.arguments[1], "u32")

    def execute(bundle: Any, mask: np.ndarray | None) -> None:
        offset = bundle.views[source[0]][source[1]] & np.uint32(0xFFFFFF)
        put(bundle.views[result[0]][result[1]], offset | (bundle.views[rank[0]][rank[1]] << np.uint32(24)), mask)

    return execute


DECODERS = {
    "bar": barrier, "barrier": barrier, "mbarrier": mbarrier, "fence": fence, "tensormap": tensor_map,
    "wgmma": product, "mapa": map_address,
    **dict.fromkeys(("setmaxnreg", "griddepcontrol", "prefetch", "membar", "nanosleep"), nothing),
}  # fmt: skip
