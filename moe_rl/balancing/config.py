"""What a user sets when attaching to a Megatron run: flat words outside, one group per subject inside."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from moe_rl.core.errors import InvalidInputError, nearest_name, require
from moe_rl.option_groups import HomeOptions, OptionGroup, PriceOptions, SlotOptions
from moe_rl.planner.domain_engine import engine_of
from moe_rl.planner.objective import OBJECTIVES
from moe_rl.simulators.setting import DISPATCHERS
from moe_rl.yaml_files import sentence_of

MEGATRON, GROUPED = "megatron", "grouped"  # Values of `experts`.
EXPERTS = (MEGATRON, GROUPED)


class RunSlots(SlotOptions):
    """Slots of a rank for replicas of experts; always numbers, because buffers are allocated for them."""

    cross_node_slots: int = 0
    """C, slots per rank for replicas from other nodes. Each takes the memory of two slots, because its replica
    arrives one layer early."""
    resident_slots: int = 0
    """S, slots per rank and layer for replicas that are kept for a whole optimizer step. Each takes memory in every
    layer."""
    ranks_per_node: int = 8
    """Maximum number of EP ranks in one NVLink domain, or the EP size if that is smaller. Under expert tensor
    parallelism, each EP rank has several GPUs."""

    @model_validator(mode="after")
    def _are_counts(self) -> Self:
        for name in ("replica_slots", "cross_node_slots", "resident_slots"):
            require(getattr(self, name) >= 0, f"{name} must be at least 0, got {getattr(self, name)}.")
        require(self.ranks_per_node >= 1, f"ranks_per_node must be at least 1, got {self.ranks_per_node}.")
        return self

    @property
    def spare(self) -> int:
        """R + C, replica slots of a rank."""
        return self.replica_slots + self.cross_node_slots

    @property
    def foreign(self) -> int:
        """S + R + C, slots of a rank beside its homes."""
        return self.resident_slots + self.spare


class RunPrices(PriceOptions):
    """Objective by which the plans of a run are compared, and the rates that price them."""

    dispatcher: str | None = None
    """Token dispatcher for which plans are priced, one of `DISPATCHERS`. None: the framework's own, or deepep if a
    driver plans, because it cannot ask the framework."""

    @model_validator(mode="after")
    def _are_known(self) -> Self:
        OBJECTIVES[self.objective]  # Raises for an unknown name now, not in the first pass.
        if self.dispatcher not in (None, *DISPATCHERS):
            raise InvalidInputError(
                f"dispatcher {self.dispatcher!r} is unknown.{nearest_name(str(self.dispatcher), DISPATCHERS)}"
            )
        return self


class RunHomes(HomeOptions):
    """When experts move to other home ranks, and which loads decide it."""

    steps_served: int = 1
    """Optimizer steps from one reorder to the next, over which the cost of a move is spread. With more than one,
    `plan_reorder` also uses the loads of earlier calls, so that home ranks settle if the task stays the same."""
    history_steps: int = 1
    """Number of earlier calls whose loads decide home ranks. If `steps_served` is above 1, each call keeps
    [G, M, L, P, E] int32 on the host."""
    reorders: bool = False
    """True: choose home ranks and resident replicas in every rollout, for the loads of its log-prob pass or, without
    such a pass, of the last update. They change at the start of the next update pass, when gradients must be zero.
    Adapters of frameworks set this to True unless you set it to False."""
    reorder_scratch_bytes: int = 2**30
    """Maximum bytes that a rank may use for experts in transit during a reorder; two experts are always allowed."""

    @model_validator(mode="after")
    def _have_effect(self) -> Self:
        require(
            self.history_steps <= 1 or self.steps_served > 1,
            f"history_steps={self.history_steps} has no effect, because earlier steps influence the placement of "
            "experts only if steps_served is above 1.",
        )
        for name in ("steps_served", "history_steps"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}.")
        scratch = self.reorder_scratch_bytes
        require(scratch >= 0, f"reorder_scratch_bytes must be at least 0, got {scratch}.")
        return self


class ExpertKernels(OptionGroup):
    """Which code computes the experts, and how."""

    experts: str = MEGATRON
    """Code that computes the experts: "megatron" is the existing module. "grouped" computes a rank's own experts and
    its replicas with GroupedExperts of `moe_rl.kernels`, on the module's own parameters."""
    recipe: str = "bf16"
    """Precision of experts="grouped", a name in `moe_rl.kernels.recipes`. "bf16" multiplies in the parameters' own
    type."""
    backend: str = "auto"
    """Backend of the kernels of experts="grouped"."""
    transposed_codes: bool = False
    """For FP8 recipes. True: also keep transposed codes (one more byte per weight), so that dgrad is as fast as the
    forward product. False: dgrad reads the codes in place."""
    placement_bitwise: bool = False
    """True: sum the outputs of a token's experts in the order of expert ids, so that moved experts change no bit of the
    loss. This costs a gather of all combined rows. False: sum them in the order of slots, as Megatron's combine
    does."""
    static_rows: bool = False
    """True: run the experts of a pass with replayed routes on buffers of one size, the plan's load of the fullest rank.
    No shape then depends on routing, and no layer waits for counts. Needs experts="grouped". If token-expert pairs
    exceed the buffer, `end_pass` raises before the optimizer step. A pass without a bound uses dynamic sizes and says
    so."""
    capacity_risk: float | None = None
    """For static_rows: maximum probability that tokens without a route exceed the buffers of a pass, by the bound of
    `core.certificate`; 0 assumes the worst case. None: a pass with such tokens uses dynamic sizes."""

    @property
    def are_ours(self) -> bool:
        """Whether `moe_rl.kernels` compute the experts, not the module that Megatron made."""
        return self.experts == GROUPED

    @model_validator(mode="after")
    def _fit_each_other(self) -> Self:
        require(self.experts in EXPERTS, f"experts must be one of {', '.join(EXPERTS)}, got {self.experts!r}.")
        require(
            self.are_ours or (self.recipe, self.backend) == ("bf16", "auto"),
            f"recipe {self.recipe!r} and backend {self.backend!r} need experts='grouped', got "
            f"experts={self.experts!r}.",
        )
        require(
            not self.static_rows or self.are_ours,
            f"static_rows needs experts='grouped', got experts={self.experts!r}: only 'grouped' reads token counts "
            "on the GPU.",
        )
        require(
            self.capacity_risk is None or (self.static_rows and 0.0 <= self.capacity_risk < 1.0),
            "capacity_risk needs static_rows and must lie in [0, 1), got capacity_risk="
            f"{self.capacity_risk} and static_rows={self.static_rows}.",
        )
        require(
            not self.transposed_codes or self.recipe != "bf16",
            f"transposed_codes needs an FP8 or FP4 recipe, got recipe={self.recipe!r}.",
        )
        return self


class MicroBatchOptions(OptionGroup):
    """Which sequences run together, if the framework lets moe_rl decide."""

    pack: bool = True
    """True: exchange sequences between a rank's micro-batches if the framework forms them dynamically (verl, slime,
    miles), within its limits. The loads of micro-batches that run at once on all ranks then complement each other."""
    padding_samples: int = 0
    """Maximum number of padding samples per rank and mini-batch, for verl's trainer v1. They let packing give some
    ranks more sequences than others. A padding sample has two tokens, which no loss counts. If a run's settings would
    count them, moe_rl packs without padding samples, and the log says why."""
    fit_micro_batches: bool = True
    """True: make micro-batches smaller than the framework's limit if the last pass's memory forecast says that the
    limit does not fit. The framework must allow this, as verl does with dynamic micro-batches."""

    @model_validator(mode="after")
    def _is_a_count(self) -> Self:
        require(self.padding_samples >= 0, f"padding_samples must be at least 0, got {self.padding_samples}.")
        return self


class BalancerConfig(OptionGroup):
    """Settings of a balancer; model and group sizes come from Megatron.

    >>> config = BalancerConfig(replica_slots=2, cross_node_slots=1, objective="imbalance")
    >>> config.slots.spare, config.pricing.objective
    (3, 'imbalance')
    """

    policy: str = "moe-rl"
    """Name in `moe_rl.planner.registry`; "static" turns balancing off."""
    parameters: Mapping[str, int | float | str | bool] = Field(default_factory=dict)
    """The policy's own parameters."""
    slots: RunSlots = RunSlots()
    pricing: RunPrices = RunPrices()
    homes: RunHomes = RunHomes()
    kernels: ExpertKernels = ExpertKernels()
    micro_batches: MicroBatchOptions = MicroBatchOptions()
    observe: bool = False
    """True: plan without changing the run. No expert moves, nothing is copied or packed, and losses are bitwise those
    of a run without moe_rl. `PassMetrics.would_be` says what the plan would have achieved in every pass."""
    experimental: bool = False
    """True: allow settings that have never run with the real software (`never_run` in `refusals.py` and
    `expert_views`)."""

    def __init__(self, **words: Any) -> None:
        """Take the words of any group, as a file and the environment give them, or whole groups.

        Raises `InvalidInputError`, with the nearest word for one that is unknown.
        """
        try:
            super().__init__(**words)
        except ValidationError as error:
            raise InvalidInputError(sentence_of(error, type(self), spelled="{}".format)) from None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        slots, kernels = self.slots, self.kernels
        for name in ("static_rows", "placement_bitwise"):
            require(
                not (self.observe and getattr(kernels, name)),
                f"{name} has no effect with observe=True, which does not change the run.",
            )
        require(
            not (self.observe and kernels.are_ours),
            f"experts={kernels.experts!r} has no effect with observe=True, which leaves the experts to the framework.",
        )
        require(
            engine_of(slots.domain_balance) is None or (slots.replica_slots, self.policy) == (0, "moe-rl"),
            f"with domain_balance={slots.domain_balance!r}, the engine makes its own replicas inside a node, and only "
            "the policy 'moe-rl' takes these replicas into account. Set policy='moe-rl' and replica_slots=0 "
            f"(now policy={self.policy!r} and replica_slots={slots.replica_slots}).",
        )
        return self

    @property
    def moves_sequences(self) -> bool:
        """Whether sequences may change their micro-batch, if the policy has that lever."""
        return self.micro_batches.pack and not self.observe

    @property
    def cuts_micro_batches(self) -> bool:
        """Whether micro-batches may become smaller than the framework's limit."""
        return self.micro_batches.fit_micro_batches and not self.observe

    def with_words(self, **values: Any) -> Self:
        """Return a configuration in which these words have other values, checked as a new one is."""
        return type(self)(**{**self.stated_words(), **values})
