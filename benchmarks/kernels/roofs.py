"""The roofs of a product's main loop, in TFLOPS of one H100 (SXM), from its machine code and its tile:

    lockstep   all warpgroups wait at one barrier, promote or shuffle while tensor cores idle: T / (T + E) of the peak
    issue      four schedulers issue the instructions of all warps of a step in no fewer cycles than it multiplies
    shared     bytes that TMA writes and products read per step, at 128 bytes per cycle, and what registers exchange
    L2         a tile's operations per byte that it reads, at 8 TB/s (the constant of DeepGEMM's own heuristics)

T: tensor cycles of a step. E: cycles to issue what no product can hide, from `Loop.exposed`, or what is too long for
the other warpgroup's products where no barrier holds both together; nothing where a second program shares the SM.
Barrier latency and the drain of products are not in E, so a roof is never reached.

What a tile costs once is hidden as far as others multiply meanwhile: `fixed_shares`.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.kernels.sass import (
    BLACKWELL_WORDS,
    SCHEDULERS,
    TENSOR_WORDS,
    Instruction,
    Loop,
    Program,
    issue_cycles,
    waits_of,
)

SMS, CLOCK_HZ, SM_REGISTERS, SM_SHARED_BYTES = 132, 1.755e9, 65_536, 233_472
PEAK_TFLOPS: dict[float, float] = {1: 1979.0, 2: 989.5}
"""By bytes per element: NVIDIA H100 SXM data sheet, dense."""
FLOPS_PER_CYCLE: dict[float, float] = {1: 8192, 2: 4096}
"""Of one SM: 64 x 128 x 32 FP8 products take 64 cycles."""
L2_BYTES_PER_S = 8e12
SHARED_BYTES_PER_CYCLE = 128
WARPGROUP_ROWS, WARPGROUP_WARPS = 64, 4
BLACKWELL_PRODUCT = {"rows": 128, "columns": 256, "step_bytes": 32}
"""Of one instruction of sm_100, at most; its text does not say."""
SPILL_WORDS = ("LDL", "STL")
HBM_BYTES_PER_S = 3.35e12
"""NVIDIA H100 SXM data sheet."""
BLACKWELL_PEAK_TFLOPS: dict[float, float] = {1: 4500.0, 2: 2250.0}
BLACKWELL_HBM_BYTES_PER_S = 8e12
"""Of one of the eight GPUs of a DGX B200, dense: half of the 72 and 36 PFLOPS of its data sheet, and 64 TB/s."""
FEW_ROWS = (64, 128, 256, 512)
"""Rows of a group; of a GEMM with as many columns and as long a sum as the gate/up projection of Qwen3-30B."""
FEW_COLUMNS, FEW_SUM = 1536, 2048
SUMS = (768, 2048, 4096)
"""Lengths of the sum: the down and gate/up projections of Qwen3-30B, the gate/up projection of Qwen3-235B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """The output tile of one program and its step along the sum."""

    rows: int
    columns: int
    step: int
    element_bytes: float
    num_warps: int
    """That multiply; a producer warp does not count."""
    multicast: int = 1
    """Programs that share one read of the columns' operand."""
    row_multicast: int = 1
    """SMs of a cluster that share one read of the rows; `columns` are those of one SM."""

    @property
    def tensor_cycles(self) -> float:
        """Cycles for which tensor cores are busy in a step."""
        return 2 * self.rows * self.columns * self.step / FLOPS_PER_CYCLE[self.element_bytes]

    @property
    def shared_cycles(self) -> float:
        """Cycles for which shared memory is busy in a step: written once, read once per warpgroup."""
        step_bytes = self.step * self.element_bytes
        read = self.rows // WARPGROUP_ROWS * (WARPGROUP_ROWS + self.columns)
        return (self.rows + self.columns + read) * step_bytes / SHARED_BYTES_PER_CYCLE

    @property
    def l2_tflops(self) -> float:
        """Rate at which operands come from L2 as fast as it gives them."""
        read = self.rows / self.row_multicast + self.columns / self.multicast
        return 2 * self.rows * self.columns / read / self.element_bytes * L2_BYTES_PER_S / 1e12

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns * self.row_multicast}x{self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedRow:
    """What can be counted of a kernel that multiplies, on any GPU."""

    name: str
    tile: str
    registers: int
    shared_bytes: int
    spills: int
    """Instructions that move registers to memory and back."""
    instructions_per_step: float
    cta_barriers_per_step: float
    instructions_per_tile: int
    """Outside the main loop; 0 where a program has one tile."""
    problems: tuple[str, ...]
    waits_per_step: tuple[float, ...] = ()
    """Of each kind of `sass.WAITS`, in the loop that multiplies."""
    loader_waits_per_step: tuple[float, ...] = ()
    """The same of the warp that loads; nothing where none does by itself."""
    waits_per_tile: tuple[int, ...] = ()
    """Of both, beside their steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRow(CountedRow):
    """A kernel that multiplies on Hopper, with its roofs."""

    tensor_cycles: float
    exposed_cycles: int
    programs_per_sm: int
    lockstep_tflops: float
    issue_tflops: float
    shared_tflops: float
    l2_tflops: float
    fixed_shares: tuple[float, ...]
    """Of a tile's time, for `SUMS`; none where a program has one tile."""
    load_latency_cycles: float | None = None
    """At which latency of a load in the loop (scales) the kernel leaves its lowest roof; None where TMA alone loads."""
    few_rows_tflops: tuple[float, ...] = ()
    """The lowest roof, HBM's among them, of groups of `FEW_ROWS` rows; none for weight gradients."""

    @property
    def ceiling_tflops(self) -> float:
        """The lowest roof."""
        return min(self.lockstep_tflops, self.issue_tflops, self.shared_tflops, self.l2_tflops)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlackwellRow(CountedRow):
    """A kernel that multiplies on Blackwell: what its memory has to give, as nobody says what L2 gives."""

    needed_l2_tb_per_s: float
    """For the peak of the tensor cores; operands alone, without scales."""
    few_rows_tflops: tuple[float, ...]
    """The lower of that peak, by how far tiles are filled, and HBM's roof, of groups of `FEW_ROWS` rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementRow:
    """A kernel that goes over elements."""

    name: str
    registers: int
    shared_bytes: int
    spills: int
    instructions_per_element: float
    bytes_per_element: float
    issue_gb_per_s: float
    """Of an H100, whichever GPU the machine code is for."""
    problems: tuple[str, ...]


def counted_row(
    name: str, program: Program, tile: TileShape, *, registers: int, shared_bytes: int, problems: Sequence[str] = ()
) -> CountedRow:
    """Return what the machine code of a product says by itself."""
    loop = _main_loop(name, program)
    steps = _steps(loop, tile)
    return CountedRow(
        name=name, tile=str(tile), registers=registers, shared_bytes=shared_bytes,
        spills=sum(program.words[word] for word in SPILL_WORDS), instructions_per_step=len(loop.body) / steps,
        cta_barriers_per_step=loop.cta_barriers / steps, instructions_per_tile=len(program.of_tile(loop)),
        problems=tuple(problems), **_waits(program, loop, steps),
    )  # fmt: skip


def _waits(program: Program, main: Loop, steps: float) -> dict[str, tuple[float, ...]]:
    """Return the waits of a row."""
    loader = program.loading_loop()
    of_tile = program.of_tile(main) + (program.of_loaded_tile(loader) if loader is not None else ())
    return {
        "waits_per_step": tuple(count / steps for count in waits_of(main.body)),
        "loader_waits_per_step": tuple(map(float, waits_of(loader.body))) if loader is not None else (),
        "waits_per_tile": waits_of(of_tile),
    }


def product_row(
    name: str, program: Program, tile: TileShape, *, registers: int, shared_bytes: int, problems: Sequence[str] = ()
) -> ProductRow:
    """Return the same with the roofs of Hopper."""
    counted = counted_row(name, program, tile, registers=registers, shared_bytes=shared_bytes, problems=problems)
    loop = _main_loop(name, program)
    per_sm = min(
        SM_REGISTERS // (registers * 32 * tile.num_warps) if registers else 1, SM_SHARED_BYTES // max(1, shared_bytes)
    )
    exposed = _exposed(loop, tile) if per_sm < 2 else 0.0
    busy, peak = tile.tensor_cycles, PEAK_TFLOPS[tile.element_bytes]
    issued = max(1, tile.num_warps // WARPGROUP_WARPS) * counted.instructions_per_step
    roofs = {
        "lockstep_tflops": peak * busy / (busy + exposed), "issue_tflops": peak * min(1.0, busy / issued),
        "l2_tflops": min(peak, tile.l2_tflops),
    }  # fmt: skip
    exchanged = tile.num_warps * sum(instruction.shared_cycles for instruction in loop.body) / _steps(loop, tile)
    roofs["shared_tflops"] = peak * min(1.0, busy / (tile.shared_cycles + exchanged))
    lowest = min(roofs.values())
    return ProductRow(
        **asdict(counted), **roofs, tensor_cycles=busy, exposed_cycles=round(exposed), programs_per_sm=max(1, per_sm),
        fixed_shares=fixed_shares(loop, program.of_tile(loop), tile, programs_per_sm=max(1, per_sm)),
        load_latency_cycles=load_latency(loop, tile, step_cycles=busy * peak / lowest),
        few_rows_tflops=() if is_weight_gradient(name) else few_rows(tile, lowest, HBM_BYTES_PER_S),
    )  # fmt: skip


def blackwell_row(
    name: str, program: Program, tile: TileShape, *, registers: int, shared_bytes: int, problems: Sequence[str] = ()
) -> BlackwellRow:
    """Return the same with what Blackwell's memory has to give."""
    counted = counted_row(name, program, tile, registers=registers, shared_bytes=shared_bytes, problems=problems)
    peak = BLACKWELL_PEAK_TFLOPS[tile.element_bytes]
    few = () if is_weight_gradient(name) else few_rows(tile, peak, BLACKWELL_HBM_BYTES_PER_S)
    needed = peak / tile.l2_tflops * L2_BYTES_PER_S / 1e12
    return BlackwellRow(**asdict(counted), needed_l2_tb_per_s=needed, few_rows_tflops=few)


def is_weight_gradient(name: str) -> bool:
    """Return whether a launch of that name sums over rows."""
    return "wgrad" in name or not {"fp8", "wide"}.isdisjoint(name.split()[:2])


def load_latency(loop: Loop, tile: TileShape, *, step_cycles: float) -> float | None:
    """Return the latency of the loop's loads that a step at the lowest roof has time for.

    A load whose value the next step needs has a step. One that its own step needs has what the warpgroup's product and
    what it issues alone leave of the step; in the plain loop, whose warps meet, nothing else hides it.
    """
    if loop.loads_in_step is None:
        return None
    if not loop.loads_in_step:
        return step_cycles
    own = tile.tensor_cycles / (1 if loop.cta_barriers else max(1, tile.num_warps // WARPGROUP_WARPS))
    return max(0.0, step_cycles - own - issue_cycles(loop.alone, WARPGROUP_WARPS) / _steps(loop, tile))


def few_rows(tile: TileShape, lowest: float, hbm: float) -> tuple[float, ...]:
    """Return the roof of small groups: tiles are partly empty, and every weight is read from HBM for its rows alone."""
    found = []
    for rows in FEW_ROWS:
        of_tile = tile.rows * tile.multicast
        filled = rows / (math.ceil(rows / of_tile) * of_tile)
        read = (FEW_COLUMNS + rows) * FEW_SUM * tile.element_bytes + 2 * rows * FEW_COLUMNS
        found.append(min(lowest * filled, 2 * rows * FEW_COLUMNS * FEW_SUM / read * hbm / 1e12))
    return tuple(found)


def _exposed(loop: Loop, tile: TileShape) -> float:
    """Return E of a program that has an SM for itself."""
    if loop.cta_barriers:
        return issue_cycles(loop.exposed, tile.num_warps) / _steps(loop, tile)
    # Warpgroups at their own pace: each multiplies for its part of T, and then issues alone.
    of_one = tile.tensor_cycles / (tile.num_warps // WARPGROUP_WARPS)
    return max(0.0, of_one + issue_cycles(loop.alone, WARPGROUP_WARPS) / _steps(loop, tile) - tile.tensor_cycles)


def fixed_shares(
    loop: Loop, outside: Sequence[Instruction], tile: TileShape, *, programs_per_sm: int
) -> tuple[float, ...]:
    """Return which part of a tile's time goes to the instructions outside its main loop, for `SUMS`.

    Warpgroups that no barrier holds together, and the programs of an SM, go at their own pace. Each multiplies for t
    cycles of a step and issues p cycles alone, n times, and e cycles once per tile; s of them take turns on the tensor
    cores. A round takes max(s n t, n (t + p) + e), and no less than all instructions take to be issued.
    """
    if not outside:
        return ()
    apart = programs_per_sm == 1 and not loop.cta_barriers
    streams = tile.num_warps // WARPGROUP_WARPS if apart else programs_per_sm
    warps = WARPGROUP_WARPS if apart else tile.num_warps
    per_step = tile.tensor_cycles / streams if apart else tile.tensor_cycles
    in_pass = _steps(loop, tile)
    alone = issue_cycles(loop.alone, warps) / in_pass

    def cycles(steps: int, once: Sequence[Instruction]) -> float:
        issued = streams * warps // SCHEDULERS * (steps * len(loop.body) / in_pass + len(once))
        return max(streams * steps * per_step, steps * (per_step + alone) + issue_cycles(once, warps), issued)

    counts = [math.ceil(length / tile.step) for length in SUMS]
    return tuple(1 - cycles(steps, ()) / cycles(steps, outside) for steps in counts)


def _main_loop(name: str, program: Program) -> Loop:
    loop = program.main_loop()
    if loop is None:
        raise ValueError(f"{name} has no loop that multiplies")
    return loop


def _steps(loop: Loop, tile: TileShape) -> float:
    """Return how many steps one pass of the loop makes: a compiler unrolls."""
    products = [instruction for instruction in loop.body if instruction.word in TENSOR_WORDS]
    if all(product.word in BLACKWELL_WORDS for product in products):
        most = BLACKWELL_PRODUCT
        of_step = math.ceil(tile.rows / most["rows"]) * math.ceil(tile.columns / most["columns"])
        return len(products) / (of_step * tile.step * tile.element_bytes / most["step_bytes"])
    shapes = (product.operation.split(".")[1] for product in products)
    of_pass = sum(math.prod(map(int, shape.split("x"))) for shape in shapes)
    return of_pass * (tile.num_warps // WARPGROUP_WARPS) / (tile.rows * tile.columns * tile.step)
