"""What a planner decides, and the one rule that turns the decision into a destination for every token.

Plans are hints: tokens beyond a quota, tokens of an expert without replicas and tokens of rows without a route go to
the expert's home, so any routing gives right results and the predicted routing gives fast ones.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.placement import ExpertMigration, ExpertPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """Instances beside the home, per (EP group, micro-batch, layer), and how many tokens each takes from each source.

    The N replicas of all groups, micro-batches and layers stand one after the other; those of (g, m, l) are
    `offsets[i] .. offsets[i + 1] - 1` with i = (g * M + m) * L + l. An instance that the placement already holds
    (EPLB's redundancy) is *resident*: it has a quota here but costs no weight copy.
    """

    offsets: NDArray[np.int64]
    """[G * M * L + 1] first replica of every cell, and after the last cell the number of replicas."""
    expert: NDArray[np.int32]
    """[N] logical expert."""
    physical_id: NDArray[np.int32]
    """[N] slot that serves it: rank * slots_per_rank + slot."""
    source_quota: NDArray[np.int32]
    """[N, P] token-expert pairs taken from each source rank, in the order of the tokens on that rank."""
    resident: NDArray[np.bool_]
    """[N] True where the placement holds the expert in this slot for the whole step."""
    num_ep_groups: int
    num_micro_batches: int
    num_layers: int

    def __post_init__(self) -> None:
        cells = self.num_ep_groups * self.num_micro_batches * self.num_layers
        count = len(self.expert)
        require(
            self.offsets.shape == (cells + 1,) and int(self.offsets[0]) == 0 and int(self.offsets[-1]) == count,
            f"replica plan: offsets must run from 0 to {count} over {cells} (group, micro-batch, layer) cells.",
        )
        require(bool((np.diff(self.offsets) >= 0).all()), "replica plan: offsets must not decrease.")
        for name in ("physical_id", "resident"):
            require(getattr(self, name).shape == (count,), f"replica plan: {name} must be [N] = [{count}].")
        require(
            self.source_quota.ndim == 2 and self.source_quota.shape[0] == count,
            f"replica plan: source_quota must be [N, P], got {self.source_quota.shape}.",
        )
        require(not count or int(self.source_quota.min()) >= 0, "replica plan: a quota is negative.")

    @classmethod
    def empty(cls, *, num_ep_groups: int, num_micro_batches: int, num_layers: int, ep_size: int) -> Self:
        """Return the plan without replicas."""
        return cls(
            offsets=np.zeros(num_ep_groups * num_micro_batches * num_layers + 1, np.int64),
            expert=np.zeros(0, np.int32),
            physical_id=np.zeros(0, np.int32),
            source_quota=np.zeros((0, ep_size), np.int32),
            resident=np.zeros(0, np.bool_),
            num_ep_groups=num_ep_groups,
            num_micro_batches=num_micro_batches,
            num_layers=num_layers,
        )

    def cell(self, group: int, micro_batch: int, layer: int) -> slice:
        """Return the slice of the replica columns that belongs to (group, micro-batch, layer)."""
        index = (group * self.num_micro_batches + micro_batch) * self.num_layers + layer
        return slice(int(self.offsets[index]), int(self.offsets[index + 1]))

    def cell_of_replica(self) -> NDArray[np.int64]:
        """Return [N] index (g * M + m) * L + l of each replica."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    @property
    def quota(self) -> NDArray[np.int64]:
        """[N] token-expert pairs each replica takes from all sources."""
        quota: NDArray[np.int64] = self.source_quota.sum(axis=1, dtype=np.int64)
        return quota

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
    reproducible: bool = True
    """False when a wall-clock budget cut the search."""
    notes: tuple[str, ...] = ()
    """Sentences for the user, for example where a yardstick had to be approximated."""

    def __post_init__(self) -> None:
        require(
            self.layout.num_micro_batches == self.replicas.num_micro_batches,
            f"plan: the layout has {self.layout.num_micro_batches} micro-batches, the replica plan "
            f"{self.replicas.num_micro_batches}.",
        )
        require(
            self.placement.num_layers == self.replicas.num_layers,
            f"plan: the placement has {self.placement.num_layers} layers, the replica plan {self.replicas.num_layers}.",
        )
        num_slots = self.placement.physical_to_logical_map.shape[1]
        ids = self.replicas.physical_id
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < num_slots):
            raise InvalidInputError(f"plan: a replica names a slot outside 0 .. {num_slots - 1}.")

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
        )
        for column in columns:
            digest.update(repr((column.dtype.str, column.shape)).encode())
            digest.update(np.ascontiguousarray(column).tobytes())
        return digest.hexdigest()

    def save(self, path: Path | str) -> None:
        """Write the plan to `path` (`.npz`) for a trainer; `moe_rl.load_plan` reads it back."""
        from moe_rl.core.plan_file import save_plan

        save_plan(self, path)

    @property
    def replicas_per_plan(self) -> float:
        """Mean copied replicas per (EP group, micro-batch, layer)."""
        return self.replicas.copies / max(1, len(self.replicas.offsets) - 1)

    def cross_node_replicas_per_plan(self, node_of_rank: NDArray[np.int64]) -> float:
        """Return the mean number of copied replicas whose home is on another node."""
        layer = self.replicas.cell_of_replica() % max(1, self.replicas.num_layers)
        home = self.placement.home_rank[layer, self.replicas.expert]
        rank = self.replicas.physical_id // self.placement.slots_per_rank
        cross = (node_of_rank[home] != node_of_rank[rank]) & ~self.replicas.resident
        return int(cross.sum()) / max(1, len(self.replicas.offsets) - 1)


def token_ordinals(routed_experts: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return [T, K]: how many earlier tokens of this source rank chose the same expert.

    Example: tokens [[0, 1], [1, 2], [1, 0]] -> [[0, 0], [1, 0], [2, 1]].
    """
    flat = np.asarray(routed_experts, np.int64).ravel()
    order = np.argsort(flat, kind="stable")
    ranked = flat[order]
    new_run = np.concatenate([[True], ranked[1:] != ranked[:-1]]) if len(flat) else np.zeros(0, np.bool_)
    run_start = np.maximum.accumulate(np.where(new_run, np.arange(len(flat)), 0))
    ordinals = np.empty(len(flat), np.int64)
    ordinals[order] = np.arange(len(flat)) - run_start
    return ordinals.reshape(np.shape(routed_experts))


def slot_map(
    plan: Plan,
    *,
    group: int,
    micro_batch: int,
    layer: int,
    source_rank: int,
    routed_experts: NDArray[np.integer],
    valid: NDArray[np.bool_] | None = None,
) -> NDArray[np.int32]:
    """Return [T, K] physical ids: the instance that takes each (token, expert) pair of one source rank.

    `routed_experts` [T, K] are the ids that really occur, in the order of the tokens on the source rank; -1 marks a
    dropped pair and stays -1. An expert's pairs are dealt to its replicas in plan order, each up to its quota for this
    source; what is left goes to the home, and so do the rows that `valid` marks as without route. Forward,
    recompute and backward call this with the same arguments and so agree without communication.
    """
    home = plan.placement.home_slot()[layer]
    experts = np.asarray(routed_experts, np.int64)
    result = np.where(experts >= 0, home[experts], -1).astype(np.int32)
    cell = plan.replicas.cell(group, micro_batch, layer)
    replicated = plan.replicas.expert[cell]
    if not len(replicated):
        return result
    counted = experts >= 0
    if valid is not None:
        counted &= np.asarray(valid)[:, None]
    ordinals = token_ordinals(np.where(counted, experts, -1))
    taken = np.zeros(plan.placement.num_experts, np.int64)
    for expert, slot, quota in zip(
        replicated.tolist(),
        plan.replicas.physical_id[cell].tolist(),
        plan.replicas.source_quota[cell, source_rank].tolist(),
        strict=True,
    ):
        start, stop = taken[expert], taken[expert] + quota
        result[counted & (experts == expert) & (ordinals >= start) & (ordinals < stop)] = slot
        taken[expert] = stop
    return result
