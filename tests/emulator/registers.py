"""The registers of one CTA: a row per register, a column per thread, seen as every type of its width."""

import re

import numpy as np

from emulator.faults import Unsupported
from emulator.program import STORAGE, TYPES, Program, constant, width_of

SEEN_AS = {"p": (np.bool_,), "h": (np.uint16, np.int16, np.float16), "w": (np.uint32, np.int32, np.float32),
           "d": (np.uint64, np.int64, np.float64)}  # fmt: skip
INDEX = {kind: at for at, kind in enumerate(kind for kinds in SEEN_AS.values() for kind in kinds)}
WIDTH = {INDEX[kind]: width for width, kinds in SEEN_AS.items() for kind in kinds}
POISONED = {"p": False, "h": 0x7FFF, "w": 0x7FC0DEAD, "d": 0x7FF8DEADDEADDEAD}
"""What registers hold before anything is written: NaN."""
_PREFIXES = (("%rd", "d"), ("%fd", "d"), ("%rs", "h"), ("%rh", "h"), ("%h", "h"), ("%r", "w"), ("%f", "w"), ("%p", "p"))
SPECIAL = ("%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%ntid.x",
           "%cluster_ctarank", "%cluster_nctarank", "%laneid", "%warpid", "%clusterid.x", "%nclusterid.x",
           "%cluster_ctaid.x", "%tid.y", "%tid.z")  # fmt: skip


def declared_width(name: str) -> str | None:
    """Return the width of a register by its name, None for what is no register."""
    if name in SPECIAL:
        return "w"
    if name.startswith("%"):
        return next((width for prefix, width in _PREFIXES if re.fullmatch(rf"{prefix}\d+", name)), "p")
    scoped = re.fullmatch(r"[a-zA-Z_]\w*@\d+([phwd])", name)
    return scoped[1] if scoped else None


class Operands:
    """Turns names into (type index, row) while a program is decoded."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __call__(self, name: str, type_name: str) -> tuple[int, int]:
        width = width_of(type_name)
        declared = declared_width(name)
        if declared is not None and declared != width:
            raise Unsupported(f"register {name} as .{type_name}")
        return INDEX[TYPES[type_name]], self.program.row(width, name)

    def any_width(self, name: str, like: str) -> tuple[int, int]:
        """Return the operand as unsigned integers of its own width; of `like` for a constant."""
        width = declared_width(name) or width_of(like)
        return INDEX[SEEN_AS[width][0]], self.program.row(width, name)


class Registers:
    """The file of one CTA, used again by the next one that stands in the same place of its cluster."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.files: dict[str, np.ndarray] = {}
        self._templates: dict[str, np.ndarray] = {}
        for width, rows in program.rows.items():
            template = np.full((len(rows), 1), POISONED[width], STORAGE[width])
            for name, row in rows.items():
                value = constant(name, width)
                if value is not None:
                    template[row] = value
            self._templates[width] = template
            self.files[width] = np.repeat(template, program.num_threads, axis=1)
        self._views: dict[tuple[int, int], tuple[list[list[np.ndarray]], list[np.ndarray]]] = {}

    def reset(self, special: dict[str, np.ndarray | int]) -> None:
        """Forget all but constants; set special registers and symbols."""
        for width, file in self.files.items():
            file[:] = self._templates[width]
            for name, value in special.items():
                row = self.program.rows[width].get(name)
                if row is not None:
                    file[row] = value

    def views(self, low: int, high: int) -> tuple[list[list[np.ndarray]], list[np.ndarray]]:
        """Return, by type index, a list with the row of every register for warps low .. high - 1, and all of them."""
        if (low, high) not in self._views:
            threads = slice(32 * low, 32 * high)
            grids = [self.files[width].view(kind)[:, threads] for width, kinds in SEEN_AS.items() for kind in kinds]
            self._views[low, high] = [list(grid) for grid in grids], grids
        return self._views[low, high]
