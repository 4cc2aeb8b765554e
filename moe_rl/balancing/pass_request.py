"""What is asked of a pass before it is planned (`PassRequest`), and what is known of it afterwards (`PlannedPass`).

G EP groups, M micro-batches, L MoE layers of the model, l of them of this pipeline stage, P ranks of an EP group.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.loads import RankRows
from moe_rl.balancing.pass_metrics import Misfit
from moe_rl.balancing.schedule import home_experts
from moe_rl.core.errors import require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan, ReplicaPlan
from moe_rl.planner.base import COPIES, Levers
from moe_rl.simulators.memory import MemoryForecast

Ints = NDArray[np.int64]
# What a plan and a run must have in common, whatever batch comes.
SIZES_OF_PLACEMENT = ("ep_size", "num_layers", "num_experts", "slots_per_rank", "resident_slots")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRequest:
    """What a pass is asked to be; the same on all ranks."""

    config: BalancerConfig
    placement: ExpertPlacement
    """Where the experts are."""
    plan: Plan | None = None
    """Made elsewhere: for all G EP groups, or for this rank's alone."""
    layout: BatchLayout | None = None
    forward_only: bool = False
    may: Levers = COPIES
    """Which levers are free, where no plan is given."""
    num_micro_batches: int | None = None
    """M of the whole pass, where these are some of its micro-batches."""
    updates: int = 1
    """Optimizer steps in which what was counted will run."""
    of_stage: bool = False
    """Whether ranks know the layers of their own pipeline stage alone, though experts may move."""
    whole_plan: bool = False
    """Whether the plan is handed out: then it has the columns of all source ranks, of all EP groups where they share
    what is planned. Else a rank gets what it needs to send its own tokens."""

    @property
    def of_all_groups(self) -> bool:
        """Whether all EP groups share what is planned: homes, and copies that stay."""
        return self.may.move_homes or self.may.choose_residents

    def check(self, num_ep_groups: int) -> None:
        """Raise where the given plan is for another model, or another number of ranks, slots or EP groups."""
        if self.plan is None:
            return
        self.plan.replicas.require_all_sources()
        for name in SIZES_OF_PLACEMENT:
            of_plan, of_run = getattr(self.plan.placement, name), getattr(self.placement, name)
            require(of_plan == of_run, f"the plan has {name} = {of_plan}, but this run has {of_run}.")
        groups = self.plan.replicas.num_ep_groups
        require(groups in (1, num_ep_groups), f"the plan is for {groups} EP groups, but this run has {num_ep_groups}.")

    @property
    def digest(self) -> str:
        """Hex digest by which the ranks of an EP group know that they ask for the same."""
        plan_hash = self.plan and self.plan.hash
        digest = hashlib.sha256(repr((self.config, self.forward_only, self.may, self.whole_plan, plan_hash)).encode())
        arrays = [self.placement.physical_to_logical_map, self.placement.home_rank]
        if self.layout is not None:
            arrays += [self.layout.micro_batch, self.layout.dp_rank, self.layout.order]
        for array in arrays:
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def misfit(self, num_micro_batches: int | None) -> Misfit | None:
        """Return why the given plan is not for this batch (None: not known) or placement; None when it is."""
        plan, layout = self.plan, self.layout
        if plan is None:
            return None
        if not same_places(plan.placement, self.placement):
            sentence = "the plan was made for another expert placement: call reorder() with the plan first"
            return Misfit(kind="placement", sentence=sentence)
        count = plan.replicas.num_micro_batches
        if num_micro_batches not in (None, count):
            sentence = f"the plan is for {count} micro-batches, but there are routes for {num_micro_batches}"
            return Misfit(kind="micro-batches", sentence=sentence)
        if layout is not None and not _same_layout(plan.layout, layout):
            return Misfit(kind="layout", sentence="the plan was made for another batch layout")
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPass:
    """A plan, and what is known of the pass that will follow it."""

    plan: Plan
    """As it was given, or made here: with the replicas of the EP group and the pipeline stage of this rank alone, of
    all stages where homes may move, and of all EP groups and source ranks where the plan is handed out."""
    local_plan: Plan
    """Its replicas in this EP group and the layers of this stage, with this rank's own column
    (`ReplicaPlan.of_source`): one EP group, L layers, of other stages empty."""
    own_share: ReplicaPlan | None = None
    """Replicas in the layers that this rank planned, with the columns of all source ranks: what a pass that is only
    observed is priced by. None in other passes, and for a given plan."""
    replicated_ML: NDArray[np.bool_]
    """Whether some EP group has replicas there: then all groups take part in the exchange of their weights."""
    misfit: Misfit | None = None
    """Why the pass must do without the plan; the same on all ranks."""
    predicted_rows: Ints | None = None
    """[M, l, P] rows that the plan expects of every rank; None where the loads are not known."""
    static_rows: Ints | None = None
    """[M, l, P] the same where Megatron puts the experts."""
    most_rows: Ints | None = None
    """[M, l, P] what every rank gets at most, but for `BalancerConfig.capacity_risk`; None: no such bound is known."""
    tokens: Ints | None = None
    """[M, P] tokens of every rank of the EP group; None where the loads are not known."""
    counted: RankRows | None = None
    """What this rank told of its rows; None where it told nothing."""
    memory: MemoryForecast | None = None
    """Of these micro-batches; None where nobody asks or the loads are not known."""
    plan_time_s: float = 0.0
    plan_cpu_s: float = 0.0
    """What of it this rank computed, tables included."""


def joined(parts: Sequence[PlannedPass]) -> PlannedPass:
    """Return what is known of consecutive micro-batches as one pass; its plans are those of the first part."""
    if len(parts) == 1:
        return parts[0]
    counts_of_parts = [part.counted for part in parts if part.counted is not None]
    forecasts = [part.memory for part in parts if part.memory is not None]
    counted_rows = None
    if counts_of_parts:
        counted_rows = replace(counts_of_parts[0], pairs=np.concatenate([part.pairs for part in counts_of_parts]))
    return replace(
        parts[0],
        predicted_rows=_concatenated([part.predicted_rows for part in parts]),
        static_rows=_concatenated([part.static_rows for part in parts]),
        most_rows=_concatenated([part.most_rows for part in parts]),
        tokens=_concatenated([part.tokens for part in parts]),
        counted=counted_rows,
        memory=max(forecasts, key=lambda forecast: forecast.peak_bytes, default=None),
        plan_time_s=sum(part.plan_time_s for part in parts),
    )


def _concatenated(parts: Sequence[Ints | None]) -> Ints | None:
    """Return the arrays of all micro-batches; None if one is not known."""
    arrays = [part for part in parts if part is not None]
    return np.concatenate(arrays) if len(arrays) == len(parts) else None


def moved_since(planned: PlannedPass, placement: ExpertPlacement, layers: Sequence[int]) -> Misfit | None:
    """Return a misfit where experts of these layers are elsewhere than where the pass was planned for."""
    if same_places(planned.local_plan.placement.of_layers(layers), placement.of_layers(layers)):
        return None
    return Misfit(kind="placement", sentence="experts have moved to other ranks since the pass was prepared")


def same_places(placement: ExpertPlacement, other: ExpertPlacement) -> bool:
    """Return whether two placements have the same experts in home and resident slots."""
    return np.array_equal(home_experts(placement), home_experts(other)) and np.array_equal(
        placement.resident_experts, other.resident_experts
    )


def _same_layout(layout: BatchLayout, other: BatchLayout) -> bool:
    return (
        np.array_equal(layout.micro_batch, other.micro_batch)
        and np.array_equal(layout.dp_rank, other.dp_rank)
        and np.array_equal(layout.order, other.order)
    )
