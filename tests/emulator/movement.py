"""Loads, stores, matrices between registers and shared memory, copies by threads; section 9.7.9 of the PTX ISA."""

import re
from typing import Any

import numpy as np

from emulator.arithmetic import Execute, address_of, put, values_of
from emulator.faults import Misuse, Race, Unsupported
from emulator.memory import NEVER, UNSIGNED
from emulator.program import TYPES, Instruction, in_braces
from emulator.registers import Operands

BYTES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4,
         "b64": 8, "u64": 8, "s64": 8, "f64": 8}  # fmt: skip


def access_bytes(i: Instruction) -> int:
    """Return the bytes of a load or store, of all elements together, at most four: the grain of ownership."""
    return min(4, BYTES[i.words[-1]] * _count(i))


def _count(i: Instruction) -> int:
    return next((int(word[1:]) for word in i.words if re.fullmatch(r"v[248]", word)), 1)


def lanes_of(bundle: Any, mask: np.ndarray | None) -> Any:
    """Return the lanes of a mask as an index."""
    return slice(None) if mask is None else np.flatnonzero(mask)


def _shared(bundle: Any, addresses: np.ndarray, *, cluster: bool) -> list[tuple[Any, np.ndarray, np.ndarray]]:
    """Return (shared memory, offsets, positions) for each CTA that is accessed."""
    cta = bundle.cta
    ranks = addresses >> 24
    if (ranks == cta.rank).all():
        return [(cta.shared, addresses & 0xFFFFFF, np.arange(len(addresses)))]
    if not cluster:
        raise Misuse(f"CTA {cta.rank} reaches into CTA {int(ranks[ranks != cta.rank][0])} without shared::cluster")
    return [
        (cta.cluster.at(int(rank) << 24)[0].shared, addresses[ranks == rank] & 0xFFFFFF, np.flatnonzero(ranks == rank))
        for rank in np.unique(ranks)
    ]


def load(operands: Operands, i: Instruction) -> Execute:
    """ld.param, ld.global, ld.shared, with vectors."""
    kind, count = i.words[-1], _count(i)
    if i.words[1] == "param":
        name = i.arguments[1].strip("[] ")
        result, bits = operands.any_width(i.arguments[0], kind), 8 * BYTES[kind]

        def parameter(bundle: Any, mask: np.ndarray | None) -> None:
            view = bundle.views[result[0]][result[1]]
            value = bundle.cta.cluster.parameters[name] % (1 << bits)
            if kind[0] == "s" and value >> (bits - 1):
                value -= 1 << bits
            put(view, np.array(value % (1 << 8 * view.itemsize), view.dtype), mask)

        return parameter
    size, address = BYTES[kind], address_of(operands, i.arguments[1])
    results = [operands.any_width(name, kind) for name in in_braces(i.arguments[0])]
    signed = kind[0] == "s"
    space, cluster = i.words[1], "shared::cluster" in i.opcode
    if space not in ("global", "shared", "shared::cta", "shared::cluster") and "global" not in i.words:
        raise Unsupported(i.opcode)
    is_global = "global" in i.words

    def execute(bundle: Any, mask: np.ndarray | None) -> None:
        lanes = lanes_of(bundle, mask)
        addresses = values_of(bundle, address)[lanes]
        if is_global:
            words = bundle.cta.cluster.memory.read(addresses.view(np.uint64), size, count)
        else:
            words = np.empty((count, len(addresses)), UNSIGNED[size])
            warps = bundle.warp_of_lane[lanes]
            for memory, offsets, at in _shared(bundle, addresses, cluster=cluster):
                words[:, at] = memory.load(offsets, size, count, warps[at])
        for (row_kind, row), values in zip(results, words, strict=True):
            view = bundle.views[row_kind][row]
            wide = values.view(f"i{size}").astype(f"i{view.itemsize}").view(view.dtype) if signed else values
            view[lanes] = wide

    return execute


def store(operands: Operands, i: Instruction) -> Execute:
    """st.global, st.shared, with vectors."""
    kind, count = i.words[-1], _count(i)
    size, address = BYTES[kind], address_of(operands, i.arguments[0])
    sources = [operands.any_width(name, kind) for name in in_braces(i.arguments[1])]
    if len(sources) != count:
        raise Unsupported(i.text)
    is_global, cluster = "global" in i.words, "shared::cluster" in i.opcode
    if not is_global and not any(word.startswith("shared") for word in i.words):
        raise Unsupported(i.opcode)

    def execute(bundle: Any, mask: np.ndarray | None) -> None:
        lanes = lanes_of(bundle, mask)
        addresses = values_of(bundle, address)[lanes]
        values = np.stack([bundle.views[k][row][lanes] for k, row in sources]).astype(UNSIGNED[size])
        if is_global:
            bundle.cta.cluster.memory.write(addresses.view(np.uint64), size, values)
            return
        warps = bundle.warp_of_lane[lanes]
        for memory, offsets, at in _shared(bundle, addresses, cluster=cluster):
            memory.store(offsets, size, values[:, at], warps[at])
            overwrites(bundle.cta, offsets, size * count)

    return execute


def overwrites(cta: Any, offsets: np.ndarray, num_bytes: int) -> None:
    """Data takes the place of mbarriers and descriptors that were there; none may be in use."""
    for at in [at for at in cta.mbarriers if ((offsets < at + 8) & (offsets + num_bytes > at)).any()]:
        if cta.mbarriers[at].is_used and not cta.mbarriers[at].is_idle:
            raise Race(f"data overwrites the mbarrier at {at}, which is in use")
        cta.retire(at)
    for at in [at for at in cta.tensor_maps if ((offsets < at + 128) & (offsets + num_bytes > at)).any()]:
        del cta.tensor_maps[at]


def matrix_load(operands: Operands, i: Instruction) -> Execute:
    """ldmatrix m8n8.b16: lane 8 k + r says where row r of matrix k is; lane l gets elements 2 (l % 4) of row l / 4."""
    count = int(next(word for word in i.words if re.fullmatch(r"x[124]", word))[1:])
    transposed = "trans" in i.words
    results = [operands(name, "b32") for name in in_braces(i.arguments[0])]
    address = address_of(operands, i.arguments[1])

    def execute(bundle: Any, mask: np.ndarray | None) -> None:
        _whole(mask)
        rows = _matrix_rows(bundle, address, count)  # [warps, count, 8]
        first = rows.reshape(-1)
        warps = np.repeat(bundle.warp_of_lane[::32], 8 * count)
        memory, offsets, _ = _shared(bundle, first, cluster=False)[0]
        words = memory.load(offsets, 4, 4, warps).T.copy().view(np.uint16).reshape(-1, count, 8, 8)
        if transposed:
            words = words.swapaxes(2, 3)
        of_lane = np.ascontiguousarray(words).view(np.uint32).reshape(-1, count, 32)
        for k, (kind, row) in enumerate(results):
            bundle.views[kind][row][:] = of_lane[:, k].reshape(-1)

    return execute


def matrix_store(operands: Operands, i: Instruction) -> Execute:
    """stmatrix m8n8.b16, the way back."""
    count = int(next(word for word in i.words if re.fullmatch(r"x[124]", word))[1:])
    transposed = "trans" in i.words
    sources = [operands(name, "b32") for name in in_braces(i.arguments[1])]
    address = address_of(operands, i.arguments[0])

    def execute(bundle: Any, mask: np.ndarray | None) -> None:
        _whole(mask)
        rows = _matrix_rows(bundle, address, count).reshape(-1)
        of_lane = np.stack([bundle.views[kind][row].reshape(-1, 32) for kind, row in sources], axis=1)
        words = np.ascontiguousarray(of_lane).view(np.uint16).reshape(-1, count, 8, 8)
        if transposed:
            words = words.swapaxes(2, 3)
        flat = np.ascontiguousarray(words).view(np.uint32).reshape(-1, 4)
        memory, offsets, _ = _shared(bundle, rows, cluster=False)[0]
        memory.store(offsets, 4, flat.T, np.repeat(bundle.warp_of_lane[::32], 8 * count))
        overwrites(bundle.cta, offsets, 16)

    return execute


def _whole(mask: np.ndarray | None) -> None:
    if mask is not None:
        raise Misuse("an instruction of whole warps, and some lanes are not there")


def _matrix_rows(bundle: Any, address: Any, count: int) -> np.ndarray:
    return values_of(bundle, address).reshape(-1, 32)[:, : 8 * count].reshape(-1, count, 8)


class _Copy:
    """cp.async of some lanes: writes shared memory at any time until it is waited for."""

    def __init__(self, bundle: Any, offsets: np.ndarray, words: np.ndarray, warps: np.ndarray) -> None:
        self.memory = bundle.cta.shared
        self.offsets, self.words, self.warps = offsets, words, warps
        self.units = self.memory._units(offsets, 4 * len(words))
        self.memory.claim(self.units, warps[:, None])
        self.memory.written[self.units] = NEVER
        self.is_done = False
        if bundle.cta.cluster.schedule.late_copies:
            self._put(np.full_like(words, 0xFFFFFFFF))
        else:
            self._put(words)

    def _put(self, words: np.ndarray) -> None:
        into = self.memory.bytes.view(np.uint32)
        into[(self.offsets // 4)[None, :] + np.arange(len(words))[:, None]] = words
        if len(self.offsets):
            self.memory.changed(int(self.offsets.min()), int(self.offsets.max()) + 4 * len(words))

    def finish(self) -> None:
        if not self.is_done:
            self.is_done = True
            self._put(self.words)
            self.memory.written[self.units] = self.memory.clocks.of[self.warps, self.warps][:, None]


def copy(operands: Operands, i: Instruction) -> Execute:
    """cp.async [shared], [global], bytes, bytes that exist: the rest are zeros."""
    if i.words[2] in ("commit_group", "wait_group", "wait_all"):
        keep = int(i.arguments[0]) if i.words[2] == "wait_group" else 0
        return lambda bundle, _mask: _commit(bundle) if i.words[2] == "commit_group" else _wait(bundle, keep)
    size = int(i.arguments[2], 0)
    to, of = address_of(operands, i.arguments[0]), address_of(operands, i.arguments[1])
    exists = operands(i.arguments[3], "u32") if len(i.arguments) > 3 else None

    def execute(bundle: Any, mask: np.ndarray | None) -> None:
        lanes = lanes_of(bundle, mask)
        sources = values_of(bundle, of)[lanes].view(np.uint64)
        words = np.zeros((size // 4, len(sources)), np.uint32)
        there = np.full(len(sources), size) if exists is None else bundle.views[exists[0]][exists[1]][lanes]
        if not np.isin(there, (0, size)).all():
            raise Unsupported("cp.async of a part")
        full = np.flatnonzero(there == size)
        words[:, full] = bundle.cta.cluster.memory.read(sources[full], 4, size // 4)
        offsets = values_of(bundle, to)[lanes] - bundle.cta.base
        made = _Copy(bundle, offsets, words, bundle.warp_of_lane[lanes])
        for warp in range(bundle.low, bundle.high):
            open_group(bundle.cta.copies[warp]).append(made)

    return execute


def open_group(groups: list[Any]) -> list[Any]:
    """Return the group that is not committed."""
    if not groups:
        groups.append([])
    last: list[Any] = groups[-1]
    return last


def _commit(bundle: Any) -> None:
    for warp in range(bundle.low, bundle.high):
        open_group(bundle.cta.copies[warp])
        bundle.cta.copies[warp].append([])


def _wait(bundle: Any, keep: int) -> None:
    for warp in range(bundle.low, bundle.high):
        groups = bundle.cta.copies[warp]
        while len(groups) - 1 > keep:
            for made in groups.pop(0):
                made.finish()


def atomic(operands: Operands, i: Instruction) -> Execute:
    """atom and red on global memory: add, min, max, and, or, exch, cas."""
    words = i.words
    how = next(word for word in words if word in ("add", "min", "max", "and", "or", "xor", "exch", "cas"))
    if "global" not in words:
        raise Unsupported(i.opcode)
    kind = words[-1]
    has_result = words[0] == "atom"
    result = operands(i.arguments[0], kind) if has_result else None
    address = address_of(operands, i.arguments[int(has_result)])
    sources = [operands(name, kind) for name in i.arguments[int(has_result) + 1 :]]
    size = BYTES[kind]

    def execute(bundle: Any, mask: np.ndarray | None) -> None:
        memory, addresses = bundle.cta.cluster.memory, values_of(bundle, address)
        for lane in np.arange(bundle.num_lanes)[lanes_of(bundle, mask)]:
            at = addresses[lane : lane + 1].view(np.uint64)
            old = memory.read(at, size, 1).view(TYPES[kind])[0, 0]
            given = [bundle.views[k][row][lane] for k, row in sources]
            if how == "cas":
                new = given[1] if old == given[0] else old
            else:
                new = {"add": lambda a, b: a + b, "min": min, "max": max, "exch": lambda _, b: b,
                       "and": lambda a, b: a & b, "or": lambda a, b: a | b,
                       "xor": lambda a, b: a ^ b}[how](old, given[0])  # fmt: skip
            memory.write(at, size, np.array([[new]], TYPES[kind]).view(UNSIGNED[size]))
            if result:
                bundle.views[result[0]][result[1]][lane] = old

    return execute


def copy_or_bulk(operands: Operands, i: Instruction) -> Execute:
    """cp.async by threads, or by TMA."""
    from emulator.asynchronous import bulk

    return bulk(operands, i) if i.words[2] == "bulk" else copy(operands, i)


DECODERS = {"ld": load, "st": store, "ldmatrix": matrix_load, "stmatrix": matrix_store, "atom": atomic, "red": atomic,
            "cp": copy_or_bulk}  # fmt: skip
