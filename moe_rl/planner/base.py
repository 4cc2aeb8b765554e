"""What a planner is given and what it must offer. To add one: a module with a `Planner`, a line in `registry.py`."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.cost import LayerCostParams
from moe_rl.core.errors import require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.micro_batch_cost import MicroBatchCost
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertPlacement
from moe_rl.core.plan import Plan
from moe_rl.core.sequence_load import SequenceLoad
from moe_rl.core.step_words import OURS as OURS
from moe_rl.core.topology import ClusterTopology
from moe_rl.planner.objective import TIME, PlanObjective, objective_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Levers:
    """What a plan may decide, or what a policy can; everything else stays as the problem has it."""

    pack: bool = False
    """In which micro-batch and on which rank a sequence runs; else as `PlanProblem.layout` says."""
    move_homes: bool = False
    """Where experts live; else as in `PlanProblem.current_placement`."""
    choose_residents: bool = False
    """Which copies stay for the whole step; else those of `PlanProblem.current_placement`."""
    replicate: bool = False
    """Which copies a rank gets from its own node for one micro-batch; else none."""
    cross_node: bool = False
    """The same from other nodes."""

    def __and__(self, other: "Levers") -> "Levers":
        """Return the levers that both have."""
        return Levers(
            **{lever.name: getattr(self, lever.name) and getattr(other, lever.name) for lever in fields(Levers)}
        )


ALL_LEVERS = Levers(pack=True, move_homes=True, choose_residents=True, replicate=True, cross_node=True)
COPIES = Levers(replicate=True, cross_node=True)
"""A pass that is about to run: no expert moves, and every sequence stays in its micro-batch."""
PLACEMENT = replace(ALL_LEVERS, pack=False)
"""Between two steps whose batches somebody else lays out: homes and copies that stay may change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProblem:
    """One step to plan: its loads, the cluster and the resources that a plan may use.

    `objective` says by what plans are compared (its name is taken, too). One in seconds, as "time", prices replicas,
    moves and all-to-all with `cost`; one in rows, as "imbalance", balances token-expert pairs, and copies are free
    within the slot limits.
    """

    load: StepLoad
    """The step's own loads (replay makes them known before the step)."""
    layout: BatchLayout
    model: MoeModelSpec
    topology: ClusterTopology
    cost: LayerCostParams
    objective: PlanObjective = TIME
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
    updates: float = 1
    """Optimizer steps that the load is of, in each of which copies that stay are pushed and returned; below 1 where it
    is a part of one."""
    current_placement: ExpertPlacement | None = None
    """Placement before the step; None means Megatron's contiguous one."""
    sequence_load: SequenceLoad | None = None
    """Token-expert pairs of every sequence, for policies that repack a layout that is not fixed."""
    sequence_tokens: NDArray[np.int64] | None = None
    """[S] tokens of every sequence, which count against the layout's budget."""
    micro_batch_cost: MicroBatchCost | None = None
    """What sequences and micro-batches cost beside their routed experts, and their host; None: plans are compared by
    their routed experts alone."""
    load_of_layout: Callable[[BatchLayout], StepLoad] | None = None
    """Re-reads the trace under another layout. Without it `planner.relayout.load_for_layout` shares each sequence's
    pairs over its source ranks, which is exact per micro-batch and approximate per source rank."""
    domain_balance: str = OURS
    """Who balances the ranks of a node: `OURS`, or an engine of `planner.domain_engine` over which `moe-rl` plans."""
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "objective", objective_of(self.objective))
        for name in ("replica_slots", "cross_node_slots", "resident_slots"):
            require(getattr(self, name) >= 0, f"{name} must be at least 0, got {getattr(self, name)}.")
        require(self.steps_served >= 1, f"steps_served must be at least 1, got {self.steps_served}.")
        require(self.seed >= 0, f"the seed must be at least 0, got {self.seed}.")
        load, topology = self.load, self.topology
        require(
            load.num_experts == self.model.num_experts and load.num_layers == self.model.num_moe_layers,
            f"the expert loads and model {self.model.name!r} do not match: the loads have {load.num_layers} MoE "
            f"layers with {load.num_experts} experts each, but the model has {self.model.num_moe_layers} with "
            f"{self.model.num_experts} each.",
        )
        require(
            load.ep_size == topology.ep_size and load.num_ep_groups == topology.num_ep_groups,
            "the expert loads and the topology do not match: EP groups x ranks per group are "
            f"{load.num_ep_groups} x {load.ep_size} in the loads, but {topology.num_ep_groups} x {topology.ep_size} in "
            "the topology.",
        )
        topology.experts_per_rank(self.model.num_experts)
        self._check_sequences()

    def _check_sequences(self) -> None:
        num_sequences = self.layout.num_sequences
        if self.sequence_load is not None:
            sequence_load = self.sequence_load
            expected_shape = [num_sequences, self.load.num_layers, self.load.num_experts]
            got = [sequence_load.num_sequences, sequence_load.num_layers, sequence_load.num_experts]
            require(
                got == expected_shape,
                f"sequence_load must have shape [sequences, layers, experts] = {expected_shape}, got {got}.",
            )
            require(self.sequence_tokens is not None, "sequence_load needs sequence_tokens: set both.")
        require(
            self.sequence_tokens is None or self.sequence_tokens.shape == (num_sequences,),
            f"sequence_tokens must have one entry per sequence ({num_sequences}).",
        )

    @property
    def spare_slots(self) -> int:
        """R + C, slots of each rank beside its E/P home slots."""
        return self.replica_slots + self.cross_node_slots

    @property
    def has_domain_engine(self) -> bool:
        """Whether the dispatcher's own engine balances the ranks of a node."""
        return self.domain_balance != OURS

    @property
    def prices_layouts(self) -> bool:
        """Whether layouts can be compared by whole micro-batches: scaled loads keep theirs, whatever sequences cost."""
        return self.objective.in_seconds and self.micro_batch_cost is not None and not self.load.scaled

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
        no_residents = np.full((num_layers, ranks, resident_slots), -1, np.int32)
        return ExpertPlacement.from_home_rank(
            home, ep_size=ranks, spare_slots=spare_slots, resident_experts=no_residents
        )


class Planner(ABC):
    """A balancing policy: a frozen dataclass that contains its parameters and declares its properties.

    Every parameter has a default and is a whole number, a number, a word or a truth value, so that it can be given on
    the command line. Everything else (the table, the sweep, Megatron, the doctor) asks these facts and keeps no list
    of policies of its own.
    """

    __slots__ = ()

    name: ClassVar[str]
    """Name in the registry and in every output."""
    summary: ClassVar[str]
    """One line for people who choose."""
    levers: ClassVar[Levers] = Levers(move_homes=True)
    """What it decides where it may. `pack` needs `PlanProblem.sequence_load` and a layout that is not fixed,
    `choose_residents` fills `PlanProblem.resident_slots`."""
    keeps_homes: ClassVar[bool] = False
    """Can plan for homes that stay where they are."""
    needs_history: ClassVar[bool] = False
    """Plans on `PlanProblem.history` and raises where there is none."""
    fills_slots_for_a_step: ClassVar[bool] = False
    """Copies stay for a step in all its slots: compared with others it gets resident slots as replica slots, too."""
    slot_limits: ClassVar[bool] = True
    """Keeps to the problem's slots; False for a policy that takes as many as it likes, which no buffer can hold."""
    unmet_dispatchers: ClassVar[Mapping[str, str]] = {}
    """Dispatchers under which the simulator does not meet the policy's published gains, each with the reason: there the
    policy is not forecast."""
    never_worse_than_static: ClassVar[bool] = True
    """Under an objective in rows its busiest ranks take no more of the known rows than under static placement."""
    by_default: ClassVar[bool] = False
    """Stands in the table of somebody who named no policies."""
    is_engine: ClassVar[bool] = False
    """A flag of the dispatcher (or on its way to one), with which users need no planner: what moe_rl has to beat."""
    variant_of: ClassVar[str | None] = None
    """The policy of which this one is the part without packing, or packing alone: it takes that policy's parameters."""

    def plan(self, problem: PlanProblem, may: Levers = ALL_LEVERS) -> Plan:
        """Return the plan for the step: what is not free in `may` stays as it is.

        Every plan of a simulation, of a driver and of a run is made here. It is deterministic for the problem, `may`
        and the policy's own parameters. Raises `InvalidInputError` where the policy cannot leave homes where they are,
        and where homes may move under resident copies that stay.
        """
        require(
            may.move_homes or self.keeps_homes,
            f"policy {self.name!r} moves experts to other home ranks in every plan, but in this plan home ranks must "
            "not change.",
        )
        current = problem.current_placement
        residents = current is not None and bool((current.resident_experts >= 0).any())
        require(
            may.choose_residents or not (may.move_homes and residents),
            "home ranks cannot change while resident copies (replicas for a whole step) keep their slots. Let the "
            "plan choose the resident copies, too.",
        )
        if not self.levers.choose_residents:
            problem = replace(problem, resident_slots=0)
        if not (may.replicate or self.keeps_homes):  # its copies are part of its placement
            problem = replace(problem, replica_slots=0)
        started = time.perf_counter()
        plan = self.make(problem, may & self.levers)
        return replace(plan, solve_time_s=time.perf_counter() - started)

    @abstractmethod
    def make(self, problem: PlanProblem, may: Levers) -> Plan:
        """Return the plan of `plan`, where `may` has only levers that the policy has."""
