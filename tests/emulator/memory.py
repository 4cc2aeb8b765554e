"""Global memory: the tensors of a launch, at their own addresses. Shared memory, with who touched each word last.

Vector clocks say what happened before what: a warp knows another's clock if a barrier, at which that one arrived, let
it pass. An access races if the last write to its words, or for writes also a read, is by another warp and not known.
So a missing barrier is found in whatever order the warps happen to run.
"""

import bisect
from collections.abc import Callable
from typing import Any

import numpy as np

from emulator.faults import Misuse, OutOfBounds, Race

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
POISON = 0xFF
"""NaN in every floating-point format, of whatever width."""
NEVER = np.uint32(0xFFFFFFFF)
"""The clock of a write that has not arrived."""


class GlobalMemory:
    """Segments of bytes. An access must lie in one of them."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.segments: list[np.ndarray] = []
        self.tensor_maps: dict[int, Any] = {}
        self._keep: list[Any] = []

    def add(self, address: int, data: np.ndarray, keep: Any = None) -> None:
        """Make the bytes `data` addressable from `address`; the same segment twice is one."""
        at = bisect.bisect_left(self.starts, address)
        self._keep.append(keep)
        if at < len(self.starts) and self.starts[at] == address and len(self.segments[at]) >= len(data):
            return
        self.starts.insert(at, address)
        self.segments.insert(at, data)

    def allocate(self, num_bytes: int) -> int:
        """Return the address of new bytes, aligned to 1,024."""
        data = np.full(num_bytes + 1024, POISON, np.uint8)
        skip = -data.ctypes.data % 1024
        self.add(data.ctypes.data + skip, data[skip : skip + num_bytes], data)
        return data.ctypes.data + skip

    def find(self, address: int) -> tuple[int, np.ndarray]:
        """Return (start, bytes) of the segment that holds an address."""
        at = bisect.bisect_right(self.starts, address) - 1
        if at < 0 or address - self.starts[at] >= len(self.segments[at]):
            raise OutOfBounds(f"address {address:#x} is in no tensor of the launch")
        return self.starts[at], self.segments[at]

    def _parts(self, addresses: np.ndarray, size: int, align: int) -> list[tuple[Any, np.ndarray, np.ndarray]]:
        """Return (lanes, segment as words of `size`, word of each lane) for each segment that is touched."""
        if (beside := addresses & np.uint64(align - 1)).any():
            raise OutOfBounds(f"address {int(addresses[beside > 0][0]):#x} not at {align} B")
        found: list[tuple[Any, np.ndarray, np.ndarray]] = []
        left = np.ones(len(addresses), bool)
        while left.any():
            start, data = self.find(int(addresses[np.argmax(left)]))
            offset = addresses.astype(np.int64) - start
            inside = left & (offset >= 0) & (offset < len(data))
            lanes: Any = slice(None) if inside.all() else np.flatnonzero(inside)
            if int(offset[lanes].max()) + align > len(data):
                raise OutOfBounds(f"{align} bytes at {start + int(offset[lanes].max()):#x} cross a tensor's end")
            words = data[: len(data) // size * size].view(UNSIGNED[size])
            found.append((lanes, words, offset[lanes] // size))
            left &= ~inside
        return found

    def read(self, addresses: np.ndarray, size: int, count: int) -> np.ndarray:
        """Return [count, lanes] words of `size` bytes, side by side from each address."""
        found = np.empty((count, len(addresses)), UNSIGNED[size])
        if len(addresses):
            for lanes, words, at in self._parts(addresses, size, size * count):
                for k in range(count):
                    found[k, lanes] = words[at + k]
        return found

    def write(self, addresses: np.ndarray, size: int, values: np.ndarray) -> None:
        """Write [count, lanes]."""
        if len(addresses):
            for lanes, words, at in self._parts(addresses, size, size * len(values)):
                for k in range(len(values)):
                    words[at + k] = values[k, lanes]


class Clocks:
    """A vector clock per warp of a cluster; the last columns belong to what works for mbarriers, such as TMA."""

    AGENTS = 320

    def __init__(self, num_warps: int) -> None:
        self.num_warps = num_warps
        self.of = np.zeros((num_warps, num_warps + self.AGENTS), np.uint32)
        self.of[np.arange(num_warps), np.arange(num_warps)] = 1
        self.num_agents = 0

    def new_agent(self) -> int:
        """Return a column for someone who works beside the warps."""
        if self.num_agents == self.AGENTS:
            raise Misuse(f"more than {self.AGENTS} mbarriers in a cluster")
        self.num_agents += 1
        return self.num_warps + self.num_agents - 1

    def empty(self) -> np.ndarray:
        """Return the clock of somebody who knows nothing."""
        return np.zeros(self.of.shape[1], np.uint32)

    def release(self, warps: slice) -> np.ndarray:
        """Return what the warps know together, and step on: what they do from now on is not part of it."""
        if warps.stop - warps.start == 1:
            alone = self.of[warps.start].copy()
            self.of[warps.start, warps.start] += 1
            return alone
        known: np.ndarray = self.of[warps].max(axis=0)
        own = np.arange(warps.start, warps.stop)
        self.of[own, own] += 1
        return known

    def acquire(self, warps: slice, known: np.ndarray) -> None:
        """The warps know this from now on."""
        np.maximum(self.of[warps], known, out=self.of[warps])


class SharedMemory:
    """Shared memory of one CTA. `grain`: the bytes that have one owner, the smallest access of the program."""

    def __init__(self, num_bytes: int, grain: int, clocks: Clocks) -> None:
        self.bytes = np.full(-(-num_bytes // 1024) * 1024, POISON, np.uint8)
        self.grain, self.clocks = grain, clocks
        words = len(self.bytes) // grain
        self.writer = np.zeros(words, np.int16)
        self.written = np.zeros(words, np.uint32)
        self.read_at = np.zeros((clocks.num_warps, words), np.uint32)
        self.unfenced = np.zeros(words, bool)
        """Written by loads and stores, and no proxy fence since: what TMA and tensor cores read may be older."""
        self.touched_low, self.touched_high = words, 0
        self.unfenced_reads = np.zeros(words, bool)
        """Loaded by threads, and no proxy fence since: TMA may overwrite it before the load has its value."""
        self.changes = np.zeros(len(self.bytes) >> 10, np.int64)
        """How often each KiB was written."""
        self.operands: dict[Any, tuple[int, np.ndarray]] = {}
        """What tensor cores have read, by its place and form: (changes of its KiBs until then, values)."""
        self.reads_in_flight: list[tuple[int, int, Any]] = []
        """(first, last + 1, of what) in bytes: TMA and tensor cores read these at any time until they are done."""

    def _units(self, offsets: np.ndarray, num_bytes: int) -> np.ndarray:
        """Return [lanes, units] of an access."""
        if len(offsets) and (int(offsets.min()) < 0 or int(offsets.max()) + num_bytes > len(self.bytes)):
            raise OutOfBounds(f"shared memory at {int(offsets.max())}: the CTA has {len(self.bytes)} B")
        if (offsets % min(num_bytes, 16)).any():
            raise OutOfBounds(f"shared memory at {int(offsets.max())}: {num_bytes} B are not aligned")
        first = offsets // self.grain
        return first[:, None] + np.arange(max(1, num_bytes // self.grain))

    def load(self, offsets: np.ndarray, size: int, count: int, warps: np.ndarray) -> np.ndarray:
        """Return [count, lanes] words; `warps` are those of the lanes."""
        units = self._units(offsets, size * count)
        self._check_writer(units, warps[:, None], "reads")
        own = self.clocks.of[warps, warps]
        self.read_at[warps[:, None], units] = own[:, None]
        self.unfenced_reads[units] = True
        words = self.bytes.view(UNSIGNED[size])
        return words[(offsets // size)[None, :] + np.arange(count)[:, None]]

    def store(self, offsets: np.ndarray, size: int, values: np.ndarray, warps: np.ndarray) -> None:
        """Write [count, lanes]. Warps that write what is there already, as copies of one value do, harm nobody."""
        units = self._units(offsets, size * len(values))
        words = self.bytes.view(UNSIGNED[size])
        at = (offsets // size)[None, :] + np.arange(len(values))[:, None]
        differs = (words[at] != values).any(axis=0)
        by_warps = (self.writer[units] < self.clocks.num_warps) & (self.written[units] != NEVER)
        changes = np.flatnonzero(differs | ~by_warps.all(axis=1) | (self.written[units] == 0).any(axis=1))
        if len(changes):
            self.claim(units[changes], warps[changes, None])
        words[at] = values
        low, high = int(units.min()), int(units.max()) + 1
        self.changed(low * self.grain, high * self.grain)
        self.unfenced[units] = True
        self.touched_low = min(self.touched_low, low)
        self.touched_high = max(self.touched_high, high)

    def changed(self, low: int, high: int) -> None:
        """Some of these bytes are others now."""
        self.changes[low >> 10 : ((high - 1) >> 10) + 1] += 1

    def operand(self, key: Any, low: int, high: int, read: Callable[[], np.ndarray]) -> np.ndarray:
        """Return an operand of tensor cores between two bytes, as read before if nothing has changed."""
        now = int(self.changes[low >> 10 : ((high - 1) >> 10) + 1].sum())
        before = self.operands.get(key)
        if before is None or before[0] != now:
            self.operands[key] = before = now, read()
        return before[1]

    def claim(self, units: Any, warps: Any) -> None:
        """Make `warps` the last writers of units that nobody else uses."""
        self._check_writer(units, warps, "overwrites")
        seen = self.read_at[:, units]  # [reader, ...]
        if isinstance(units, slice):  # of one warp
            late = seen.max(axis=1) > self.clocks.of[warps, : self.clocks.num_warps]
        else:
            late = seen > np.moveaxis(np.atleast_2d(self.clocks.of[warps, : self.clocks.num_warps]), -1, 0)
        if late.any():
            raise Race(f"warp {_one(warps)} overwrites shared memory that warp {int(np.nonzero(late)[0][0])} reads")
        self._check_flight(units, _one(warps))
        self.read_at[:, units] = 0
        self.writer[units] = warps
        self.written[units] = self.clocks.of[warps, warps]

    def _check_writer(self, units: Any, warps: Any, what: str) -> None:
        written = self.written[units]
        unknown = written > self.clocks.of[warps, self.writer[units]]
        if unknown.any():
            at = np.unravel_index(np.argmax(unknown), unknown.shape)
            by = int(self.writer[units][at])
            who = f"warp {by}" if by < self.clocks.num_warps else "TMA or a copy"
            raise Race(f"warp {_one(warps)} {what} shared memory that {who} writes, and does not wait for it")

    def _check_flight(self, units: Any, warp: int) -> None:
        if not self.reads_in_flight:
            return
        if isinstance(units, slice):
            low, high = units.start * self.grain, units.stop * self.grain
        else:
            low, high = int(units.min()) * self.grain, (int(units.max()) + 1) * self.grain
        self.reads_in_flight = [
            entry
            for entry in self.reads_in_flight
            if not (low <= entry[0] and entry[1] <= high and entry[2].is_known(warp))
        ]
        for first, last, who in self.reads_in_flight:
            if low < last and first < high and not who.is_known(warp):
                raise Race(f"bytes {low}..{high} are overwritten while {who} reads {first}..{last}")

    def check_async_read(self, low: int, high: int, warps: range) -> slice:
        """Check that TMA or tensor cores may read a range for `warps`; return its units."""
        if low < 0 or high > len(self.bytes):
            raise OutOfBounds(f"an operand at {low}..{high}: the CTA has {len(self.bytes)} B of shared memory")
        units = slice(low // self.grain, -(-high // self.grain))
        all_know = self.clocks.of[warps.start : warps.stop].min(axis=0)
        if (self.written[units] > all_know[self.writer[units]]).any():
            for warp in warps:
                self._check_writer(units, warp, "lets tensor cores or TMA read")
        if self.unfenced[units].any():
            raise Race(f"tensor cores or TMA read {low}..{high}, which stores have written, without fence.proxy.async")
        return units

    def has_read(self, units: slice, warps: range) -> None:
        """Warps have waited for a product that read these."""
        self.read_at[warps.start : warps.stop, units] = self.clocks.of[warps, warps][:, None]

    def check_async_write(self, units: slice) -> None:
        """Check that TMA may overwrite units: a wait orders it behind loads of threads only with a fence of proxies."""
        if self.unfenced_reads[units].any():
            low = units.start * self.grain
            raise Race(f"TMA overwrites what threads have loaded from {low} on, without fence.proxy.async")

    def fence_proxy(self, warps: range) -> None:
        """What these warps wrote or loaded, or know of, TMA and tensor cores may read and overwrite from now on."""
        read = np.flatnonzero(self.unfenced_reads)
        if len(read):
            known_reads = self.clocks.of[warps.start : warps.stop, : self.clocks.num_warps].max(axis=0)
            self.unfenced_reads[read[(self.read_at[:, read] <= known_reads[:, None]).all(axis=0)]] = False
        if self.touched_low >= self.touched_high:
            return
        units = np.flatnonzero(self.unfenced[self.touched_low : self.touched_high]) + self.touched_low
        known = self.clocks.of[warps.start : warps.stop, self.writer[units]].max(axis=0)
        self.unfenced[units[self.written[units] <= known]] = False
        if not self.unfenced[self.touched_low : self.touched_high].any():
            self.touched_low, self.touched_high = len(self.unfenced), 0


def _one(warps: Any) -> int:
    return int(np.ravel(warps)[0])
