"""A planner's decision, and the one rule that turns it into a destination for every token.

Plans are hints: quotas are shares of what occurs, and tokens of an expert without replicas go to its home, so any
routing gives right results and the predicted routing gives fast ones.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.capacity import Capacity
from moe_rl.core.errors import require, require_shapes
from moe_rl.core.layout import BatchLayout
from moe_rl.core.mappings import attributes
from moe_rl.core.placement import ExpertMigration, ExpertPlacement
from moe_rl.core.plan_archive import write_archive

# Fields of `ReplicaPlan` with one entry per replica.
REPLICA_COLUMNS = ("expert", "physical_id", "source_quota", "source_pairs", "resident")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """Instances beside the home, per (EP group, micro-batch, layer), and how many tokens each takes from each source.

    The N replicas of all groups, micro-batches and layers stand one after the other; those of (g, m, l) are
    `offsets[i] .. offsets[i + 1] - 1` with i = (g * M + m) * L + l. An instance that the placement already holds
    (EPLB's redundancy) is *resident*: it has a quota here but costs no weight copy.
    """

    offsets: NDArray[np.int64]
    """[G * M * L + 1] first replica of every (EP group, micro-batch, layer), then the number of replicas."""
    expert: NDArray[np.int32]
    """[N] logical expert."""
    physical_id: NDArray[np.int32]
    """[N] slot that serves it: rank * slots_per_rank + slot."""
    source_quota: NDArray[np.int32]
    """[N, P] token-expert pairs taken from each source rank, in the order of the tokens on that rank."""
    source_pairs: NDArray[np.int32]
    """[N, P] pairs of the replica's expert that the plan expects on each source rank, whoever takes them: of other
    pairs than these an instance takes its share (`split_point`). What replicas leave of them is the home's."""
    resident: NDArray[np.bool_]
    """[N] True where the placement holds the expert in this slot for the whole step."""
    num_ep_groups: int
    num_micro_batches: int
    num_layers: int
    own_source: int | None = None
    """None: every source rank has its column, as above. Else the columns are [N, 2], those of `of_source`: of this
    source rank, and of all others together."""

    def __post_init__(self) -> None:
        places = self.num_ep_groups * self.num_micro_batches * self.num_layers
        count = len(self.expert)
        has_ends = self.offsets.shape == (places + 1,) and self.offsets[[0, -1]].tolist() == [0, count]
        require(
            has_ends,
            f"replica plan: the offsets must start at 0, end at {count} and define {places} ranges, one per EP "
            "group, micro-batch and layer.",
        )
        require(bool((np.diff(self.offsets) >= 0).all()), "replica plan: the offsets must not decrease.")
        sizes = {"N": count, "P": self.source_quota.shape[-1]}
        columns = {"physical_id": "N", "resident": "N", "source_quota": "NP", "source_pairs": "NP"}
        require_shapes(self, sizes, whose="replica plan: ", **columns)
        require(
            not count or int(self.source_quota.min()) >= 0,
            "replica plan: the number of token-expert pairs that a replica takes (source_quota) is negative.",
        )
        require(
            bool((self.source_quota <= self.source_pairs).all()),
            "replica plan: a replica takes more token-expert pairs from a source rank than the rank has.",
        )

    @classmethod
    def empty(cls, num_ep_groups: int, num_micro_batches: int, num_layers: int, ep_size: int) -> Self:
        """Return the plan without replicas."""
        return cls(
            offsets=np.zeros(num_ep_groups * num_micro_batches * num_layers + 1, np.int64),
            expert=np.zeros(0, np.int32),
            physical_id=np.zeros(0, np.int32),
            source_quota=np.zeros((0, ep_size), np.int32),
            source_pairs=np.zeros((0, ep_size), np.int32),
            resident=np.zeros(0, np.bool_),
            num_ep_groups=num_ep_groups,
            num_micro_batches=num_micro_batches,
            num_layers=num_layers,
        )

    def slice_of(self, group: int, micro_batch: int, layer: int) -> slice:
        """Return the slice of the replica columns that belongs to (group, micro-batch, layer)."""
        index = (group * self.num_micro_batches + micro_batch) * self.num_layers + layer
        return slice(int(self.offsets[index]), int(self.offsets[index + 1]))

    def of_layers(self, layers: Sequence[int], *, group: int) -> Self:
        """Return the replicas of some layers of one EP group, as a plan for these layers and this group alone."""
        cells = np.arange(self.num_micro_batches)[:, None] * self.num_layers + np.asarray(layers, np.int64)
        places = (group * self.num_micro_batches * self.num_layers + cells).ravel()
        count = np.diff(self.offsets)[places]
        offsets = np.append(0, np.cumsum(count))
        # Start of each place in the old columns less its start in the new ones, then counted up: no loop over places.
        rows = np.repeat(self.offsets[places] - offsets[:-1], count) + np.arange(int(offsets[-1]))
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in REPLICA_COLUMNS}
        return replace(self, **columns, offsets=offsets, num_ep_groups=1, num_layers=len(layers))

    @classmethod
    def mixed(cls, plans: Sequence[Self], choice_L: NDArray[np.int64]) -> Self:
        """Return the plan whose layer l has the replicas of `plans[choice_L[l]]`. The plans have the same shape.

        Example: one cell per layer, choice [1 0] -> layer 0 has those of the second plan, layer 1 of the first.
        """
        like = plans[0]
        num_cells = like.num_ep_groups * like.num_micro_batches
        choice_of_place = np.tile(choice_L, num_cells)
        counts_by_plan = np.stack([np.diff(plan.offsets) for plan in plans])
        counts = counts_by_plan[choice_of_place, np.arange(len(choice_of_place))]
        choice_of_row = np.repeat(choice_of_place, counts)
        columns: dict[str, Any] = {}
        for name in REPLICA_COLUMNS:
            column = getattr(like, name)
            columns[name] = np.empty((len(choice_of_row), *column.shape[1:]), column.dtype)
        for index, plan in enumerate(plans):
            is_taken = np.repeat(choice_of_place == index, np.diff(plan.offsets))
            for name, column in columns.items():
                column[choice_of_row == index] = getattr(plan, name)[is_taken]
        return replace(like, **columns, offsets=np.append(0, np.cumsum(counts)))

    def of_source(self, rank: int) -> Self:
        """Return what source rank `rank` must know to send its own tokens: 25 bytes a replica, whatever P is.

        A split of its pairs needs its own column, and of the others their sums alone (`split_point`).

        Example: of 4 source ranks, quotas [[3, 0, 2, 5]] -> rank 2 keeps [[2, 8]].
        """
        self.require_all_sources()

        def own_and_others(columns: NDArray[np.int32]) -> NDArray[np.int32]:
            own_pairs = columns[:, rank].astype(np.int64)
            return np.stack([own_pairs, columns.sum(axis=1, dtype=np.int64) - own_pairs], axis=1).astype(np.int32)

        return replace(
            self,
            source_quota=own_and_others(self.source_quota),
            source_pairs=own_and_others(self.source_pairs),
            own_source=rank,
        )

    def column_of(self, rank: int) -> int:
        """Return the column of a source rank; raise where the plan has only another one's."""
        if self.own_source is None:
            return rank
        require(
            self.own_source == rank,
            f"this plan has only the part of EP rank {self.own_source}, not that of EP rank {rank}.",
        )
        return 0

    def require_all_sources(self) -> None:
        """Raise where the plan is the part of one source rank."""
        require(
            self.own_source is None,
            f"expected a whole plan, but this plan has only the part of EP rank {self.own_source}. Use the plan that "
            "balancer.plan(routes) returns.",
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns."""
        columns: list[NDArray[Any]] = [self.offsets, *(getattr(self, name) for name in REPLICA_COLUMNS)]
        return sum(column.nbytes for column in columns)

    @classmethod
    def joined(cls, parts: Sequence[tuple[Sequence[int], "ReplicaPlan"]], *, num_layers: int, like: Self) -> Self:
        """Return one plan of `num_layers` layers from (layers, their plan); other layers have none.

        `like` says how many EP groups and micro-batches there are, in the parts, too, and which source ranks have
        columns.
        """
        place = [np.zeros(0, np.int64)]
        for layers, part in parts:
            micro_batch, layer = np.divmod(part.index_of_replica(), max(1, part.num_layers))
            place.append(micro_batch * num_layers + np.asarray(layers, np.int64)[layer])
        places = np.concatenate(place)
        # Stable: replicas of one expert keep their order, by which `slot_map` deals out tokens.
        order = np.argsort(places, kind="stable")
        columns = {
            name: np.concatenate([getattr(like, name)[:0], *(getattr(part, name) for _, part in parts)])[order]
            for name in REPLICA_COLUMNS
        }
        counts = np.bincount(places, minlength=like.num_ep_groups * like.num_micro_batches * num_layers)
        offsets = np.append(0, np.cumsum(counts))
        return replace(like, **columns, offsets=offsets, num_layers=num_layers)

    def index_of_replica(self) -> NDArray[np.int64]:
        """Return [N] index (g * M + m) * L + l of each replica."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    @property
    def quota(self) -> NDArray[np.int64]:
        """[N] token-expert pairs each replica takes from all sources."""
        return np.asarray(self.source_quota.sum(axis=1, dtype=np.int64))

    @property
    def copies(self) -> int:
        """Replicas whose weights must be copied for their micro-batch."""
        return int((~self.resident).sum())


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that an executor needs for one step, and what the planner expects of it."""

    policy: str
    layout: BatchLayout
    placement: ExpertPlacement
    replicas: ReplicaPlan
    migration: ExpertMigration
    """Moves from the placement that was current when the plan was made."""
    objective: str = "time"
    parameters: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    predicted_cost_s: float | None = None
    """Predicted time of the MoE layers of the step by `core.cost`; None where copies were taken to be free."""
    solve_time_s: float = 0.0
    notes: tuple[str, ...] = ()
    """Sentences for the user, for example where a yardstick had to be approximated."""
    capacity: Capacity | None = None
    """The most rows that a rank can get; None where nobody certified it. Plan files leave it out."""

    def __post_init__(self) -> None:
        require(
            self.layout.num_micro_batches == self.replicas.num_micro_batches,
            f"the plan's batch layout has {self.layout.num_micro_batches} micro-batches, but its replica plan "
            f"has {self.replicas.num_micro_batches}.",
        )
        require(
            self.placement.num_layers == self.replicas.num_layers,
            f"the plan's placement has {self.placement.num_layers} MoE layers, but its replica plan has "
            f"{self.replicas.num_layers}.",
        )
        num_slots = self.placement.physical_to_logical_map.shape[1]
        ids = self.replicas.physical_id
        # Slots are checked here, where placement and replicas meet: neither knows the other alone.
        is_slot = bool(((ids >= 0) & (ids < num_slots)).all())
        require(
            is_slot, f"the plan puts a replica in a slot that does not exist: slots are numbered 0 to {num_slots - 1}."
        )

    @cached_property
    def hash(self) -> str:
        """Hex digest of everything that decides where a token runs; ranks compare it before a pass."""
        digest = hashlib.sha256()
        columns = (
            self.layout.micro_batch,
            self.layout.dp_rank,
            self.layout.order,
            self.placement.physical_to_logical_map,
            self.placement.home_rank,
            self.replicas.offsets,
            self.replicas.expert,
            self.replicas.physical_id,
            self.replicas.source_quota,
            self.replicas.source_pairs,
        )
        # Dtype and shape as well: the same bytes may be another array.
        for column in columns:
            digest.update(repr((column.dtype.str, column.shape)).encode())
            digest.update(np.ascontiguousarray(column).tobytes())
        return digest.hexdigest()

    def save(self, path: Path | str) -> None:
        """Write the plan to `path` (`.npz`), replacing what is there in one rename; folders on the way are made.

        `moe_rl.load_plan` reads it. Raises `InvalidInputError` for another suffix, for the part of a plan that one rank
        keeps, and where nothing can be written.
        """
        self.replicas.require_all_sources()
        parts = attributes(self, ("layout", "placement", "replicas", "migration"))
        plain_fields = [item.name for item in fields(self) if item.name not in (*parts, "capacity")]
        facts: dict[str, Any] = attributes(self, plain_fields)
        lists = {"parameters": dict(self.parameters), "notes": list(self.notes)}
        write_archive(Path(path), parts, {**facts, **lists, "hash": self.hash})

    @property
    def replica_rank(self) -> NDArray[np.int32]:
        """[N] rank that holds each replica."""
        return self.replicas.physical_id // np.int32(self.placement.slots_per_rank)

    @property
    def replica_home_rank(self) -> NDArray[np.int32]:
        """[N] rank that is home of each replica's expert."""
        layer = self.replicas.index_of_replica() % max(1, self.replicas.num_layers)
        return self.placement.home_rank[layer, self.replicas.expert]

    @property
    def replicas_per_plan(self) -> float:
        """Mean copied replicas per (EP group, micro-batch, layer)."""
        return self.replicas.copies / max(1, len(self.replicas.offsets) - 1)

    def cross_node_replicas_per_plan(self, node_of_rank: NDArray[np.int64]) -> float:
        """Return the mean number of copied replicas whose home is on another node."""
        crosses_nodes = node_of_rank[self.replica_home_rank] != node_of_rank[self.replica_rank]
        return int((crosses_nodes & ~self.replicas.resident).sum()) / max(1, len(self.replicas.offsets) - 1)


def token_ordinals(routed_experts: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return [T, K]: how many earlier tokens of this source rank chose the same expert.

    Example: tokens [[0, 1], [1, 2], [1, 0]] -> [[0, 0], [1, 0], [2, 1]].
    """
    # Ordinals count within one source rank, which needs no word from any other rank.
    flat_experts = np.asarray(routed_experts, np.int64).ravel()
    # Stable, so that equal experts stay in the order of the tokens.
    order = np.argsort(flat_experts, kind="stable")
    ranked = flat_experts[order]
    new_run = np.concatenate([[True], ranked[1:] != ranked[:-1]]) if len(flat_experts) else np.zeros(0, np.bool_)
    run_start = np.maximum.accumulate(np.where(new_run, np.arange(len(flat_experts)), 0))
    ordinals = np.empty(len(flat_experts), np.int64)
    ordinals[order] = np.arange(len(flat_experts)) - run_start
    return ordinals.reshape(np.shape(routed_experts))


def split_point(quota: Any, share: Any, *, planned: Any, total: Any, actual: Any, source: Any, num_sources: int) -> Any:
    """Return how many of the `actual` pairs of an expert on one source rank the first instances of it take together.

    Of the `planned` pairs of this source they are to take `quota`, and `share` of the `total` that the plan expects on
    all sources. As many pairs as planned are split by the source's own quotas, which an exact route meets exactly;
    fewer in proportion to them; and those beyond by the shares in all, because that a source sends everything to one
    instance, as a plan likes it for those nearby, says nothing about pairs that it did not expect. So over all sources
    every instance gets its planned share of what occurs, without asking any other rank.

    Example: an expert with 6 pairs planned on rank 0 and 6 on rank 1 of two, where a replica takes the 6 of rank 1.
    Rank 1 has 4 of them: all 4. It has 10: 6, and 2 of the 4 more, since the replica's share in all is one half.

    Whole numbers, arrays of numpy or tensors, alike in shape or to be broadcast. Source ranks round at different
    points, spread evenly, or the small differences of many ranks would all be rounded to the same instance.
    """
    # Source p of P rounds up from the fraction 1 - (2 p + 1) / 2 P on: the thresholds are spread evenly.
    steps, step = 2 * num_sources, 2 * source + 1
    planned_rows = actual.clip(max=planned)
    planned, total = planned.clip(min=1), total.clip(min=1)
    # Integer floor division alone: floats would round differently on GPU and CPU, and ranks would disagree.
    rows_within_plan = (steps * quota * planned_rows + step * planned) // (steps * planned)
    return rows_within_plan + (steps * share * (actual - planned_rows) + step * total) // (steps * total)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSplit:
    """The terms of `split_point` for n replicas: what they and the replicas of their expert before them are to take."""

    before: NDArray[np.int64]
    """[n, P] quotas of the earlier replicas."""
    upto: NDArray[np.int64]
    """[n, P] those and its own."""
    share_before: NDArray[np.int64]
    """[n, 1] the earlier replicas' pairs of all sources."""
    share_upto: NDArray[np.int64]
    """[n, 1] those and its own."""
    planned: NDArray[np.int64]
    """[n, P] pairs of the expert that are planned on each source."""
    total: NDArray[np.int64]
    """[n, 1] on all sources."""

    @classmethod
    def of(cls, replicas: ReplicaPlan, part: slice, key: NDArray[np.integer], sources: slice = slice(None)) -> Self:
        """Return the terms of the replicas in `part`; equal `key`s [n]: one expert in one layer of a micro-batch."""
        quota, planned = replicas.source_quota[part], replicas.source_pairs[part]
        share = quota.sum(axis=1, dtype=np.int64)[:, None]
        # The sums over all sources ride along as column 0, so that one cumulative sum serves both.
        shares_and_quota = np.concatenate([share, quota[:, sources]], axis=1)
        order = np.argsort(key, kind="stable")
        # Exclusive running sums, less their value where the expert's replicas begin: they restart at every expert.
        sums_before = np.cumsum(shares_and_quota[order], axis=0) - shares_and_quota[order]
        before = np.empty_like(shares_and_quota)
        before[order] = sums_before - sums_before[np.searchsorted(key[order], key[order])]
        return cls(
            before=before[:, 1:],
            upto=before[:, 1:] + shares_and_quota[:, 1:],
            share_before=before[:, :1],
            share_upto=before[:, :1] + share,
            planned=planned[:, sources].astype(np.int64),
            total=planned.sum(axis=1, dtype=np.int64)[:, None],
        )

    def ranges(self, actual_pairs: NDArray[np.integer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first ordinal that each replica takes of each source, and the one after the last, both [n, P].

        `actual_pairs` [n, P] are the pairs of the replica's expert that occur on each source.
        """
        sources, counts = actual_pairs.shape[1], actual_pairs.astype(np.int64)
        split = partial(split_point, planned=self.planned, total=self.total, actual=counts, num_sources=sources)
        source = np.arange(sources)
        return split(self.before, self.share_before, source=source), split(self.upto, self.share_upto, source=source)


def slot_map(
    plan: Plan, *, group: int, micro_batch: int, layer: int, source_rank: int, routed_experts: NDArray[np.integer]
) -> NDArray[np.int32]:
    """Return [T, K] physical ids: the instance that takes each (token, expert) pair of one source rank.

    `routed_experts` [T, K] are the ids that really occur, in the order of the tokens on the source rank; -1 marks a
    dropped pair and stays -1. An expert's pairs are dealt to its replicas in plan order, to each its share
    (`split_point`); what is left goes to the home. Forward, recompute and backward call this with the same arguments
    and so agree without communication.
    """
    plan.replicas.require_all_sources()
    home = plan.placement.home_slot()[layer]
    experts = np.asarray(routed_experts, np.int64)
    # home[-1] of a dropped pair reads the last expert: the mask throws it away again.
    result = np.where(experts >= 0, home[experts], -1).astype(np.int32)
    replicas_here = plan.replicas.slice_of(group, micro_batch, layer)
    replicated = plan.replicas.expert[replicas_here]
    if not len(replicated):
        return result
    ordinals = token_ordinals(experts)
    actual_pairs = np.bincount(experts[experts >= 0], minlength=plan.placement.num_experts)[replicated]
    # Only this rank's column is read below; the other sources' pairs do not matter to it.
    actual_pairs_of_sources = np.broadcast_to(actual_pairs[:, None], plan.replicas.source_quota[replicas_here].shape)
    start, stop = PlannedSplit.of(plan.replicas, replicas_here, replicated).ranges(actual_pairs_of_sources)
    columns = (replicated, plan.replicas.physical_id[replicas_here], start[:, source_rank], stop[:, source_rank])
    for expert, slot, first_ordinal, end_ordinal in zip(*(column.tolist() for column in columns), strict=True):
        result[(experts == expert) & (ordinals >= first_ordinal) & (ordinals < end_ordinal)] = slot
    return result
