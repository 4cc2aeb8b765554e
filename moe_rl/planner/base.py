"""What a planner is given and what it must offer. To add one: a module with a `Planner`, a line in `registry.py`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import LayerCostParams
from moe_rl.core.errors import require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.core.topology import ClusterTopology

Parameters = Mapping[str, int | float | str | bool]
"""A policy's parameters by name, as they can be given on the command line."""

OBJECTIVES = ("time", "imbalance")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProblem:
    """One step to plan: its loads, the cluster, and what may be spent.

    `objective` "time" prices replicas, moves and all-to-all with `cost`; "imbalance" balances token-expert pairs,
    copies being free within the slot limits.
    """

    load: StepLoad
    """The step's own loads (replay makes them known before the step)."""
    layout: BatchLayout
    model: MoeModelSpec
    topology: ClusterTopology
    cost: LayerCostParams
    objective: str = "time"
    replica_slots: int = 1
    """R, foreign experts that each rank may hold for a micro-batch, from its own node."""
    cross_node_slots: int = 0
    """C, the same from other nodes, one layer ahead."""
    resident_slots: int = 0
    """S, foreign experts that each rank may hold in a layer for the whole step, from any node."""
    history: StepLoad | None = None
    """Loads of earlier steps, their micro-batches one after the other; None when there were none."""
    steps_served: int = 1
    """Optimizer steps that homes will serve: a move is paid once for all of them."""
    current_placement: ExpertPlacement | None = None
    """Placement before the step; None means Megatron's contiguous one."""
    sequence_load: NDArray[np.int32] | None = None
    """[S, L, E] token-expert pairs of every sequence, for policies that repack a layout that is not fixed."""
    sequence_tokens: NDArray[np.int64] | None = None
    """[S] tokens of every sequence, which count against the layout's budget."""
    load_of_layout: Callable[[BatchLayout], StepLoad] | None = None
    """Re-reads the trace under another layout. Without it `planner.relayout.load_for_layout` shares each sequence's
    pairs over its source ranks, which is exact per micro-batch and approximate per source rank."""
    seed: int = 0

    def __post_init__(self) -> None:
        require(
            self.objective in OBJECTIVES,
            f"objective {self.objective!r} is not one of {', '.join(OBJECTIVES)}.",
        )
        for name in ("replica_slots", "cross_node_slots", "resident_slots"):
            require(getattr(self, name) >= 0, f"{name} must be at least 0, got {getattr(self, name)}.")
        require(self.steps_served >= 1, f"steps_served must be at least 1, got {self.steps_served}.")
        require(self.seed >= 0, f"the seed must be at least 0, got {self.seed}.")
        load, topology = self.load, self.topology
        require(
            load.num_experts == self.model.num_experts and load.num_layers == self.model.num_moe_layers,
            f"the load has {load.num_layers} MoE layers of {load.num_experts} experts, model {self.model.name!r} has "
            f"{self.model.num_moe_layers} of {self.model.num_experts}.",
        )
        require(
            load.ep_size == topology.ep_size and load.num_ep_groups == topology.num_ep_groups,
            f"the load is for {load.num_ep_groups} EP groups of {load.ep_size} ranks, the topology for "
            f"{topology.num_ep_groups} of {topology.ep_size}.",
        )
        topology.experts_per_rank(self.model.num_experts)
        self._check_sequences()

    def _check_sequences(self) -> None:
        num_sequences = self.layout.num_sequences
        if self.sequence_load is not None:
            want = (num_sequences, self.load.num_layers, self.load.num_experts)
            require(
                self.sequence_load.shape == want,
                f"sequence_load must be [S, L, E] = {list(want)}, got {list(self.sequence_load.shape)}.",
            )
            require(self.sequence_tokens is not None, "sequence_load needs sequence_tokens beside it.")
            negative = self.sequence_load.size and int(self.sequence_load.min()) < 0
            require(not negative, "sequence_load holds a negative count.")
        require(
            self.sequence_tokens is None or self.sequence_tokens.shape == (num_sequences,),
            f"sequence_tokens must have one entry per sequence ({num_sequences}).",
        )

    @property
    def spare_slots(self) -> int:
        """R + C, slots of each rank beside its E/P home slots."""
        return self.replica_slots + self.cross_node_slots

    def without_routes(self) -> Self:
        """Return the problem with loads that do not say which experts meet in a token."""

        def blind(load: StepLoad) -> StepLoad:
            return replace(load, routes=None)

        reduce = self.load_of_layout
        return replace(
            self,
            load=blind(self.load),
            history=None if self.history is None else blind(self.history),
            load_of_layout=None if reduce is None else lambda layout: blind(reduce(layout)),
        )

    def starting_placement(self, spare_slots: int | None = None, *, resident_slots: int = 0) -> ExpertPlacement:
        """Return the homes in force before the step, with this problem's spare slots (or so many) left empty.

        Resident slots are empty too: every step fills them anew, whatever the step before had in them.
        """
        spare_slots = self.spare_slots if spare_slots is None else spare_slots
        num_layers, ranks = self.load.num_layers, self.load.ep_size
        if self.current_placement is None:
            home = ExpertPlacement.contiguous(
                num_layers=num_layers, num_experts=self.load.num_experts, ep_size=ranks
            ).home_rank
        else:
            home = self.current_placement.home_rank
        empty = np.full((num_layers, ranks, resident_slots), -1, np.int32)
        return ExpertPlacement.from_home_rank(home, ep_size=ranks, spare_slots=spare_slots, resident_experts=empty)


class Planner(ABC):
    """A policy: a frozen dataclass of its parameters that declares what there is to know about it.

    Every parameter has a default and is a whole number, a number, a word or a truth value, so that it can be given on
    the command line. Everything else (the table, the sweep, Megatron, the doctor) asks these facts and keeps no list
    of policies of its own.
    """

    __slots__ = ()

    name: ClassVar[str]
    """Name in the registry and in every output."""
    summary: ClassVar[str]
    """One line for people who choose."""
    in_place: ClassVar[Parameters | None] = None
    """Parameters with which no expert's home moves: {} where none ever does, None where that cannot be had."""
    needs_history: ClassVar[bool] = False
    """Plans on `PlanProblem.history` and raises where there is none."""
    needs_sequences: ClassVar[bool] = False
    """Repacks the sequences of a layout that is not fixed, where `PlanProblem.sequence_load` is known."""
    fills_slots_for_a_step: ClassVar[bool] = False
    """Copies stay for a step in all its slots: compared with others it gets resident slots as replica slots, too."""
    fills_resident_slots: ClassVar[bool] = False
    """Holds copies for a step in `PlanProblem.resident_slots` beside those of single micro-batches."""
    slot_limits: ClassVar[bool] = True
    """Keeps to the problem's slots; False for a policy that takes as many as it likes, which no buffer can hold."""
    never_worse_than_static: ClassVar[bool] = True
    """Under objective "imbalance" its busiest ranks take no more of the known rows than under static placement."""
    by_default: ClassVar[bool] = False
    """Stands in the table of somebody who named no policies."""
    variant_of: ClassVar[str | None] = None
    """The policy of which this one is the part without packing, or packing alone: it takes that policy's parameters,
    and stands in the table of somebody who named no policies only where sequences can be packed."""

    @classmethod
    def moves_experts(cls) -> bool:
        """Return whether the policy's plans may change the homes of experts."""
        return cls.in_place != {}

    @abstractmethod
    def plan(self, problem: PlanProblem) -> Plan:
        """Return the plan for the step; deterministic for the problem and the policy's own parameters."""
