"""From the routes that a rank knows to the loads of all ranks, on which every rank makes the same plan.

Needs no torch; where routes are tensors, they are read as arrays. M micro-batches, L MoE layers of the whole model, K
choices, E experts, G EP groups, P EP ranks.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.load import StepLoad
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.reduce import count_rows
from moe_rl.core.routes import drawn_rows
from moe_rl.core.trace import route_dtype

Source = Literal["plan", "routes", "log-probs", "history", "nothing"]
SOURCES: dict[Source, str] = {
    "plan": "plans that the user passed to moe_rl",
    "routes": "the routes that were passed to moe_rl",
    "log-probs": "the experts that routers chose for the same tokens in the log-prob pass",
    "history": "the mean expert loads of the previous pass",
    "nothing": "nothing yet, because no pass has run",
}

if TYPE_CHECKING:
    import torch

# Expert ids of one micro-batch, [N, L, K]; adapters of padded batches take [B, S, L, K], too.
RouteArray: TypeAlias = "torch.Tensor | NDArray[np.integer]"


def as_array(values: Any) -> NDArray[Any]:
    """Return a tensor of any device, or anything that numpy reads, as an array."""
    array: NDArray[Any] = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    return array


class EarlierLoads:
    """The loads of the last `most` reorders, on which homes that serve several steps are learned."""

    def __init__(self, most: int) -> None:
        self._loads: deque[StepLoad] = deque(maxlen=most)

    def then(self, load: StepLoad) -> StepLoad | None:
        """Return the loads before this one as one, None if there are none, and remember this one."""
        earlier_load = StepLoad.joined(self._loads) if self._loads else None
        self._loads.append(load)
        return earlier_load


def count_routes(
    routes: Sequence[RouteArray], *, num_layers: int, num_experts: int, layers: Sequence[int] | None = None
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return ([M, l, E] pairs, [M] rows) of one rank from its routes, one [N, L, K] integer array per micro-batch.

    Rows are those that the rank really holds (its slice under tensor or context parallelism), in any order; -1 marks a
    choice that is not known, and a row of which nothing is known is not counted. `layers` are the l layers to count,
    all by default. Raises `InvalidInputError` for another shape and for an id outside -1 .. E - 1.
    """
    counted_layers = range(num_layers) if layers is None else layers
    pairs = np.zeros((len(routes), len(counted_layers), num_experts), np.int32)
    rows = np.zeros(len(routes), np.int64)
    for micro_batch, routes_of_batch in enumerate(routes):
        ids = as_array(routes_of_batch)
        require(
            ids.ndim == 3 and ids.shape[1] == num_layers and np.issubdtype(ids.dtype, np.integer),
            f"the routes of micro-batch {micro_batch} must be integers of shape [tokens, {num_layers} MoE layers, "
            f"top-k], got {ids.dtype} {list(ids.shape)}.",
        )
        ids = ids[:, _index(counted_layers)]
        if not ids.size:
            continue
        lowest_id, highest_id = int(ids.min()), int(ids.max())
        require(
            lowest_id >= -1 and highest_id < num_experts,
            f"the expert ids in the routes of micro-batch {micro_batch} must be -1 to {num_experts - 1}, but they "
            f"range from {lowest_id} to {highest_id}.",
        )
        unknown = int(lowest_id < 0)
        # Where some are not known, -1 becomes expert 0 and the others move up by one: the core takes unsigned ids.
        shifted_ids = np.add(ids, unknown, dtype=route_dtype(num_experts + unknown), casting="unsafe", order="C")
        # One thread: every rank of a node counts at the same time, beside the training loop.
        pairs[micro_batch] = count_rows(shifted_ids, num_experts=num_experts + unknown, num_threads=1)[0][:, unknown:]
        rows[micro_batch] = int((ids >= 0).any(axis=(1, 2)).sum()) if unknown else len(ids)
    return pairs, rows


def _index(layers: Sequence[int]) -> slice | list[int]:
    """Return consecutive layers as a slice, which copies nothing."""
    indices = list(layers)
    if not indices or indices != list(range(indices[0], indices[-1] + 1)):
        return indices
    return slice(indices[0], indices[-1] + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRows:
    """What a rank knows of its own rows in a pass: counts, and the rows from which it draws tokens for the others."""

    pairs: NDArray[np.int32]
    """[M, l, E] token-expert pairs."""
    rows: NDArray[np.int64]
    """[M]"""
    routes: tuple[NDArray[np.integer], ...] = ()
    """[N, l, K] of every micro-batch, rows whose choices are all known alone; empty where only counts are known."""
    known: float = 1.0
    """Share of the rows of which it is known, and not guessed from those of earlier passes."""
    sizes: NDArray[np.int64] | None = None
    """[2, M] rows that the rank holds, and those of which every choice is known; None: `rows` are both."""
    source: Source = "routes"
    """Who says so."""
    among: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    """[M] where `routes` begin among those of all ranks with parts of the same experts, and [M] how many those are."""

    @classmethod
    def of(cls, routes: Sequence[RouteArray], *, model: MoeModelSpec, layers: Sequence[int]) -> Self:
        """Return what `count_routes` counts in these layers, beside the routes."""
        arrays = [as_array(ids) for ids in routes]
        pairs, rows = count_routes(
            arrays, num_layers=model.num_moe_layers, num_experts=model.num_experts, layers=layers
        )
        of_layers = [ids[:, _index(layers)] for ids in arrays]
        num_known = pairs.sum(axis=(1, 2), dtype=np.int64).tolist()
        rows_of_parts = [
            ids if ids.size == count else ids[(ids >= 0).all(axis=(1, 2))]
            for ids, count in zip(of_layers, num_known, strict=True)
        ]
        sizes = np.array([[len(ids) for ids in batch_ids] for batch_ids in (of_layers, rows_of_parts)], np.int64)
        num_rows, num_known_rows = sizes.sum(axis=1).tolist()
        return cls(
            pairs=pairs,
            rows=rows,
            routes=tuple(ids for ids in rows_of_parts if ids.shape[2] == model.top_k),
            known=num_known_rows / num_rows if num_rows else 1.0,
            sizes=sizes,
        )

    @property
    def sizes_of_rank(self) -> NDArray[np.int64]:
        """[2, M] rows that the rank holds, and those of which every choice is known: none where they are foretold."""
        return np.stack([self.rows, self.rows * (self.source == "routes")]) if self.sizes is None else self.sizes

    def micro_batches(self, part: slice) -> Self:
        """Return what is known of some micro-batches."""
        sizes = self.sizes_of_rank[:, part]
        return replace(self, pairs=self.pairs[part], rows=self.rows[part], routes=self.routes[part], sizes=sizes)

    def of_all_parts(self, everyone: Sequence[Self], part: int) -> Self:
        """Return the counts of all ranks with parts of the same experts, beside the routes of this one's own rows."""
        drawable = np.stack([part_rows.drawable for part_rows in everyone])
        return replace(
            self,
            pairs=np.sum([part_rows.pairs for part_rows in everyone], axis=0, dtype=np.int32),
            rows=np.sum([part_rows.rows for part_rows in everyone], axis=0),
            sizes=np.sum([part_rows.sizes_of_rank for part_rows in everyone], axis=0),
            among=(drawable[:part].sum(axis=0), drawable.sum(axis=0)),
        )

    @property
    def drawable(self) -> NDArray[np.int64]:
        """[M] rows from which it can draw, with the ranks of the other parts."""
        if self.among is not None:
            return self.among[1]
        lengths = [len(ids) for ids in self.routes]
        return np.array(lengths, np.int64) if len(lengths) == len(self.rows) else np.zeros_like(self.rows)

    def drawn(self, row_counts: NDArray[np.int64], rank: int) -> list[NDArray[np.uint16]]:
        """Return [n, l, K] drawn rows by micro-batch; the EP ranks have `row_counts` [P, M], this one is `rank`."""
        rows_drawn = []
        for index, (ids, of_all) in enumerate(zip(self.routes, row_counts.T, strict=False)):
            rows = drawn_rows(of_all)[rank] - (0 if self.among is None else self.among[0][index])
            rows_drawn.append(ids[rows[(rows >= 0) & (rows < len(ids))]].astype(np.uint16))
        return rows_drawn


def narrow(counts: NDArray[np.integer], most: int) -> NDArray[np.integer]:
    """Return counts up to `most` in the narrowest type that travels, uint16 or int32."""
    return counts.astype(np.uint16 if most < 2**16 else np.int32)
