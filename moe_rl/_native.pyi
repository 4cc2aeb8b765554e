"""
Hot loops of moe_rl in C++: counting and drawing routes, the searches of the planner, and the order of a weight sync.
"""

from collections.abc import Sequence
from typing import Annotated, overload

import numpy
from numpy.typing import NDArray


@overload
def add_routes(pairs: Annotated[NDArray[numpy.int32], dict(shape=(None, None, None, None), order='C', device='cpu')], routes: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], valid: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu', writable=False)], segment_start: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], segment_block: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], num_threads: int) -> int: ...

@overload
def add_routes(pairs: Annotated[NDArray[numpy.int32], dict(shape=(None, None, None, None), order='C', device='cpu')], routes: Annotated[NDArray[numpy.uint16], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], valid: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu', writable=False)], segment_start: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], segment_block: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], num_threads: int) -> int:
    """
    Add the token-expert pairs of the valid rows of routes [n, L, K] to pairs [G * M, L, P, E].

    Rows segment_start[i] .. segment_start[i + 1] - 1 belong to block segment_block[i] = (g * M + m) * P + p. num_threads 0 means all cores. Returns the first row with an id outside 0 .. E - 1, or -1; after such a row the counts are not to be used.
    """

def add_sequences(pairs: Annotated[NDArray[numpy.int32], dict(shape=(None, None, None, None), order='C', device='cpu')], sequence_load: Annotated[NDArray[numpy.int32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], row: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], sequence: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], block: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], stop: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
    """
    Add sequences to pairs [G * M, L, P, E]; sequence s has the counts row[s] of sequence_load [U, L, E].

    Piece i ends at token stop[i] of sequence[i], where its next piece starts, and belongs to block[i] = (g * M + m) * P + p. A piece takes its share of every count, rounded so that a sequence keeps its own.
    """

class Load:
    def __init__(self, pairs: Annotated[NDArray[numpy.int32], dict(shape=(None, None, None, None, None), order='C', device='cpu', writable=False)], tokens: Annotated[NDArray[numpy.int64], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], routes: tuple[Annotated[NDArray[numpy.uint16], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]] | None, ranks_per_domain: int) -> None:
        """
        Hold the loads of a step: pairs [G, M, L, P, E], tokens [G, M, P], and None or routes [L, n, K], token [n], source [n], cell_start [G * M + 1].
        """

def replicate(load: Load, home: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], residents: Annotated[NDArray[numpy.int32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], cost: object | None, replica_slots: int, cross_node_slots: int, spare_slots: int, search_nodes: int, tolerance_ppm: int, cross_gain_ppm: int, num_threads: int, thorough: bool, every: int = 1) -> dict[str, object]:
    """
    Return the instances of every cell by name: offsets [cells + 1]; expert, physical_id and kind (0: replica inside a node, 1: across nodes, 2: resident) [N]; source_quota [N, P]; and of every cell highest_load, that no rank exceeds, and seconds. cost is a core.cost.LayerCostParams, or None: copies are free.
    """

def count_visits(load: Load, home: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], expert: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], rank: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], quota: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], num_threads: int) -> tuple[Annotated[NDArray[numpy.float64], dict(shape=(None, None))], Annotated[NDArray[numpy.float64], dict(shape=(None, None))], Annotated[NDArray[numpy.float64], dict(shape=(None, None))]]:
    """
    Return [cells * L, P] tokens that visit each rank and [cells * L, N * N] copies from each node to each other one, counted in the load's routes; without routes rows over each rank's link, rows from node to node, and rows into and out of each rank's NIC, counted in its pairs.
    """

def choose_residents(load: Load, home: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], cost: object, bits: tuple[Annotated[NDArray[numpy.uint16], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], bool] | None, slots: int, current: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], move_cost: int, row_share: float, iterations: int, seed: int, num_threads: int) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None, None))], Annotated[NDArray[numpy.int32], dict(shape=(None, None))]]:
    """
    Return home ranks [L, E], as they are where `move_cost` is negative, and [L, P * slots] experts that each rank is to hold for the whole step, or -1.
    """

def reorder(load: Annotated[NDArray[numpy.int32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], row_cost: int, move_cost: int, move_inside_cost: int, start: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], current: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], nodes: int, ranks_per_node: int, by_rank: bool, moving_is_free: bool, peak: bool, power: int, iterations: int, iterations_inside: int, seed: int, num_threads: int, tokens: tuple[Annotated[NDArray[numpy.uint16], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], bool] | None) -> Annotated[NDArray[numpy.int32], dict(shape=(None, None))]:
    """
    Return home ranks [L, E] that lower the sum over cells of the busiest node (or rank) of each layer, or with `peak` the fullest one of all cells.
    """

def travel_passes() -> list[str]:
    """
    Return the kinds of vectors in which this machine can count copies of tokens between nodes, the fastest first, which is taken.
    """

def use_travel_passes(name: str) -> None:
    """
    Count in vectors of that kind from now on, for tests: all count the same.
    """

def bin_loads(sequence_load: Annotated[NDArray[numpy.int32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], bin_of: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], bins: int, num_threads: int) -> Annotated[NDArray[numpy.int32], dict(shape=(None, None))]:
    """Return [S, bins * L] rows of every sequence in each bin of each layer."""

def pack(bin_load: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], row: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], bins: int, tokens: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], work: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], place: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], batch_of_place: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], num_batches: int, num_groups: int, budget: int, iterations: int, heat_shift: int, seed: int, travel: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)] | None, node_of_place: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], limit: int = 2147483647, power: int = 1, slowest_group: bool = True, ranks: int = 0, most: int = 0) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,))], int]:
    """
    Return the place of every sequence, and the cost: the sum over batches and layers of the busiest bin. Sequence s has the rows row[s] of bin_load [U, bins * L].
    """

def staircase(work: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], tokens: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], ranks: int, budget: int, count: int) -> object | None:
    """
    Return [S] places micro_batch * ranks + rank, long sequences together; None where one has no room.
    """

def arrange(tokens: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], travel: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], place: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], first_node: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], num_nodes: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], seed: int) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
    """
    Return [S] the order of the sequences in their places that lowers the cost of their tokens' travel.
    """

def sequence_travel(routes: Annotated[NDArray[numpy.uint16], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], sequence: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], node_of: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], present: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], num_sequences: int, deduplicated: bool, num_threads: int) -> Annotated[NDArray[numpy.int64], dict(shape=(None, None))]:
    """
    Return [S, nodes] copies that leave each node if the sequence stands there, over all layers.
    """

@overload
def draw_routes(routes: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu')], logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], keys: Annotated[NDArray[numpy.uint64], dict(shape=(None, None), order='C', device='cpu', writable=False)], first_row: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], process: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], num_threads: int) -> None: ...

@overload
def draw_routes(routes: Annotated[NDArray[numpy.uint16], dict(shape=(None, None, None), order='C', device='cpu')], logits: Annotated[NDArray[numpy.float32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], keys: Annotated[NDArray[numpy.uint64], dict(shape=(None, None), order='C', device='cpu', writable=False)], first_row: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], process: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], num_threads: int) -> None:
    """
    Fill routes [T, L, K] for sequences with logits [n, L, E], keys [n, L] of their noise, first_row [n] and lengths [n].

    process: persistence, fresh share, 1 / deviation of the sum of uniforms, linear and cubic factor of a draw, limit of the noise, then 9 coefficients of the Gumbel noise. num_threads 0 means all cores.
    """

def least_max_rank_loads(most: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')], fixed: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], cells: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], pairs: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], first: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], holder: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], num_threads: int) -> None:
    """
    Write to most [C] the least possible greatest rank load of every cell whose ranks hold fixed [C, P] pairs.

    Experts cells[c] .. cells[c + 1] of a cell have pairs [X], split over the ranks holder[first[x] .. first[x + 1]]. num_threads 0 means all cores.
    """

class RouteShape:
    def __init__(self, arg0: int, arg1: int, arg2: int, arg3: int, arg4: int, arg5: int, /) -> None: ...

    @overload
    def read(self, body: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], start: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)], crc: Annotated[NDArray[numpy.uint32], dict(shape=(None, None), order='C', device='cpu', writable=False)], checked: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu')], layers: Sequence[int], codes: list[object], block_rows: int, num_routed: int, first: int, out: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), device='cpu')]) -> tuple[int, int, int]: ...

    @overload
    def read(self, body: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], start: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order='C', device='cpu', writable=False)], crc: Annotated[NDArray[numpy.uint32], dict(shape=(None, None), order='C', device='cpu', writable=False)], checked: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu')], layers: Sequence[int], codes: list[object], block_rows: int, num_routed: int, first: int, out: Annotated[NDArray[numpy.uint16], dict(shape=(None, None, None), device='cpu')]) -> tuple[int, int, int]:
        """
        Read the routed rows from `first` on of some layers of a chunk into `out` [n, l, K]; return (fault, place among the layers, block): 0 none, 1 a wrong checksum, 2 a corrupt block.
        """

    @overload
    def encode(self, ids: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], block_rows: int) -> tuple[list[bytes], list[bytes], bytes, bytes]: ...

    @overload
    def encode(self, ids: Annotated[NDArray[numpy.uint16], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], block_rows: int) -> tuple[list[bytes], list[bytes], bytes, bytes]:
        """
        Return (codebooks, blocks, sizes, checksums) of the layers of ids [N, L, K], every row ascending.
        """

    @overload
    def sorted(self, ids: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], known: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu')]) -> tuple[int, int]: ...

    @overload
    def sorted(self, ids: Annotated[NDArray[numpy.uint16], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], known: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu')]) -> tuple[int, int]: ...

    @overload
    def sorted(self, ids: Annotated[NDArray[numpy.int16], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], known: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu')]) -> tuple[int, int]: ...

    @overload
    def sorted(self, ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], known: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu')]) -> tuple[int, int]: ...

    @overload
    def sorted(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], known: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu')]) -> tuple[int, int]: ...

    @overload
    def sorted(self, ids: Annotated[NDArray[numpy.uint8], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], known: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.uint16], dict(shape=(None, None, None), order='C', device='cpu')]) -> tuple[int, int]:
        """
        Write rows of ids [T, L, K] in ascending order into `out`, zeros where not `known` [T]; return the flat [T, L] places of the first id outside 0 .. E - 1 and of the first expert named twice, -1: none.
        """

    @overload
    def sorted(self, ids: Annotated[NDArray[numpy.uint16], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], known: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.uint16], dict(shape=(None, None, None), order='C', device='cpu')]) -> tuple[int, int]: ...

    @overload
    def sorted(self, ids: Annotated[NDArray[numpy.int16], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], known: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.uint16], dict(shape=(None, None, None), order='C', device='cpu')]) -> tuple[int, int]: ...

    @overload
    def sorted(self, ids: Annotated[NDArray[numpy.int32], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], known: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.uint16], dict(shape=(None, None, None), order='C', device='cpu')]) -> tuple[int, int]: ...

    @overload
    def sorted(self, ids: Annotated[NDArray[numpy.int64], dict(shape=(None, None, None), order='C', device='cpu', writable=False)], known: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.uint16], dict(shape=(None, None, None), order='C', device='cpu')]) -> tuple[int, int]: ...

class RouteCodes:
    def __init__(self, arg0: RouteShape, arg1: bytes, /) -> None: ...

    @property
    def is_sound(self) -> bool: ...

    @property
    def num_bytes(self) -> int: ...

def crc32(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """Return zlib's CRC-32."""

def fill_calendars(node_of: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], num_trainers: int, holders: Annotated[NDArray[numpy.int32], dict(shape=(None, None), order='C', device='cpu', writable=False)], sender: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], spare_sends: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], wanted_start: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], wanted_atom: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], steps_per_round: int, relays: bool) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))]]:
    """
    Return atom, source, ingress and step [D] of the deliveries of a weight sync, in the order of steps.
    """

def sources_digest() -> str:
    """Return the SHA-256 of the sources of this core."""
