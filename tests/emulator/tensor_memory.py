"""Tensor memory of Blackwell: 128 lanes of 512 columns of 32 bits, and who touched each column last."""

from typing import Any

import numpy as np

from emulator.faults import Misuse, Race
from emulator.memory import NEVER, Clocks

LANES, COLUMNS = 128, 512


class TensorMemory:
    """Of one CTA."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self.data = np.full((LANES, COLUMNS), 0xFFFFFFFF, np.uint32)
        self.blocks: list[tuple[int, int]] = []
        self.may_allocate = True
        self.writer: list[Any] = [None] * COLUMNS
        """A `TensorWork`, or the clocks of the warps that have stored to their lanes."""
        self.read_at = np.zeros((clocks.num_warps, COLUMNS), np.uint32)
        self.reads_in_flight: list[tuple[int, int, Any]] = []

    def allocate(self, columns: int) -> int:
        if columns not in (32, 64, 128, 256, 512):
            raise Misuse(f"tcgen05.alloc of {columns} columns")
        if not self.may_allocate:
            raise Misuse("tcgen05.alloc after the permit was given back")
        taken = np.zeros(COLUMNS, bool)
        for first, count in self.blocks:
            taken[first : first + count] = True
        free = [first for first in range(0, COLUMNS, columns) if not taken[first : first + columns].any()]
        if not free:
            raise Misuse(f"no {columns} columns of tensor memory are left: the kernel waits for ever")
        self.blocks.append((free[0], columns))
        return free[0]

    def free(self, first: int, columns: int) -> None:
        if (first, columns) not in self.blocks:
            raise Misuse(f"tcgen05.dealloc of {columns} columns at {first}, which were not allocated so")
        self.blocks.remove((first, columns))
        self.data[:, first : first + columns] = 0xFFFFFFFF

    def inside(self, first: int, last: int) -> range:
        if not any(low <= first and last <= low + count for low, count in self.blocks):
            raise Misuse(f"columns {first}..{last - 1} of tensor memory are not allocated")
        return range(first, last)

    def check_writer(self, columns: range, warp: int, what: str, *, by_tensor_core: bool = False) -> None:
        for column in columns:
            writer = self.writer[column]
            if writer is None:
                continue
            if isinstance(writer, dict):
                known = all(when <= self.clocks.of[warp, who] for who, when in writer.items()
                            if by_tensor_core or who == warp)  # fmt: skip
            else:
                # The tensor core works in order: what it wrote before, it knows.
                known = by_tensor_core or writer.is_known(warp)
            if not known:
                raise Race(f"warp {warp} {what} column {column} of tensor memory, and does not wait for its writer")

    def check_readers(self, columns: range, warp: int) -> None:
        """Check that all warps have read these columns, as far as `warp` knows."""
        at = slice(columns.start, columns.stop)
        late = self.read_at[:, at] > self.clocks.of[warp, : self.clocks.num_warps, None]
        if late.any():
            reader = int(np.nonzero(late)[0][0])
            raise Race(f"warp {warp} overwrites tensor memory that warp {reader} reads, and does not wait for it")

    def check_readers_of_products(self, columns: range, warp: int) -> None:
        """A warp stores: products that read or write these columns must be known to be done."""
        for low, high, work in self.reads_in_flight:
            if low < columns.stop and columns.start < high and not work.is_known(warp):
                raise Race(f"warp {warp} overwrites columns of tensor memory that a product reads")
        for column in columns:
            writer = self.writer[column]
            if writer is not None and not isinstance(writer, int | dict) and not writer.is_known(warp):
                raise Race(f"warp {warp} overwrites column {column}, which a product writes")

    def stored(self, columns: range, warp: int) -> None:
        """Each warp writes lanes of its own: a column has a clock per warp."""
        for column in columns:
            if not isinstance(self.writer[column], dict):
                self.writer[column] = {}
            self.writer[column][warp] = int(NEVER)

    def store_done(self, columns: range, warp: int) -> None:
        for column in columns:
            if isinstance(self.writer[column], dict):
                self.writer[column][warp] = int(self.clocks.of[warp, warp])

    def begin_read(self, columns: range, warp: int) -> None:
        self.read_at[warp, columns.start : columns.stop] = NEVER

    def end_read(self, columns: range, warp: int) -> None:
        self.read_at[warp, columns.start : columns.stop] = self.clocks.of[warp, warp]

    def write(self, columns: range, writer: Any) -> None:
        for column in columns:
            self.writer[column] = writer
