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
    """Room on a rank for copies of experts: numbers, because buffers are made for them."""

    cross_node_slots: int = 0
    """C, replicas from other nodes; each takes the memory of two, because they arrive one layer ahead."""
    resident_slots: int = 0
    """S, copies that a rank may hold in every layer for a whole optimizer step; each takes memory in every layer."""
    ranks_per_node: int = 8
    """EP ranks in one NVLink domain, at most; the EP size if that is smaller. Under expert tensor parallelism each has
    several GPUs."""

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
    """By what the plans of a run are compared, and the rates that price them."""

    dispatcher: str | None = None
    """How tokens travel, one of `DISPATCHERS`, by which a plan is priced; None: as the framework does, and deepep where
    a driver plans, who cannot ask it."""

    @model_validator(mode="after")
    def _are_known(self) -> Self:
        OBJECTIVES[self.objective]  # Raises for an unknown name now, not in the first pass.
        if self.dispatcher not in (None, *DISPATCHERS):
            raise InvalidInputError(
                f"dispatcher {self.dispatcher!r} is unknown.{nearest_name(str(self.dispatcher), DISPATCHERS)}"
            )
        return self


class RunHomes(HomeOptions):
    """When experts move, and on what."""

    steps_served: int = 1
    """Optimizer steps from one reorder to the next: what a move costs is spread over them, and with more than one
    `plan_reorder` learns homes on the loads of earlier calls too, so that they settle where the task stays the same."""
    history_steps: int = 1
    """How many earlier calls; each keeps [G, M, L, P, E] int32 on the host, where `steps_served` is above 1."""
    reorders: bool = False
    """Choose homes and resident copies anew by itself: in every rollout for the loads of its log-prob pass, without
    one for those of the last update. They change at the begin of the next update pass, which must find gradients of
    zero. In a framework that is what happens unless it is set to false."""
    reorder_scratch_bytes: int = 2**30
    """Most memory that a rank may use for experts on their way during a reorder; never less than two experts."""

    @model_validator(mode="after")
    def _have_effect(self) -> Self:
        require(
            self.history_steps <= 1 or self.steps_served > 1,
            f"history_steps={self.history_steps} has no effect: homes learn from earlier steps only if steps_served is "
            "above 1.",
        )
        for name in ("steps_served", "history_steps"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}.")
        scratch = self.reorder_scratch_bytes
        require(scratch >= 0, f"reorder_scratch_bytes must be at least 0, got {scratch}.")
        return self


class ExpertKernels(OptionGroup):
    """Who computes the experts, and how."""

    experts: str = MEGATRON
    """Who computes the experts: "megatron" leaves it to the module that is there; "grouped" runs home and replica
    slots through `moe_rl.kernels`' GroupedExperts, on the module's own parameters."""
    recipe: str = "bf16"
    """Of experts="grouped": a name in `moe_rl.kernels.recipes`; "bf16" multiplies in the parameters' own type."""
    backend: str = "auto"
    """Of experts="grouped": backend of its kernels."""
    transposed_codes: bool = False
    """Of an FP8 recipe: keep the codes transposed too, one byte more per weight, so that dgrad is a product as fast as
    forward's; else it reads them in place."""
    placement_bitwise: bool = False
    """Sum what a token's experts return in the order of the logical experts, so that moved homes change no bit of the
    loss; else in the order of the slots, as Megatron's combine finds them. Costs a gather of all combined rows."""
    static_rows: bool = False
    """Run the experts of a pass whose routes are replayed on buffers of one size, the fullest rank's rows by the plan:
    no shape depends on the routing, and no layer waits for counts. Needs experts="grouped". Rows beyond the buffer
    raise in `end_pass`, before an optimizer step. A pass without a bound takes rows as they come, and says so."""
    capacity_risk: float | None = None
    """Of static_rows: probability, at most, that rows without a route exceed the buffers of a pass, as
    `core.certificate` bounds them; 0 is the worst case. None: a pass that has such rows takes rows as they come."""

    @property
    def are_ours(self) -> bool:
        """Whether `moe_rl.kernels` compute the experts, not the module that Megatron made."""
        return self.experts == GROUPED

    @model_validator(mode="after")
    def _fit_each_other(self) -> Self:
        require(self.experts in EXPERTS, f"experts must be one of {', '.join(EXPERTS)}, got {self.experts!r}.")
        require(
            self.are_ours or (self.recipe, self.backend) == ("bf16", "auto"),
            f"recipe {self.recipe!r} and backend {self.backend!r} need experts='grouped', not {self.experts!r}.",
        )
        require(
            not self.static_rows or self.are_ours,
            f"static_rows needs experts='grouped', which reads counts on the device, not {self.experts!r}.",
        )
        require(
            self.capacity_risk is None or (self.static_rows and 0.0 <= self.capacity_risk < 1.0),
            f"capacity_risk {self.capacity_risk} must lie in [0, 1), and needs static_rows.",
        )
        require(
            not self.transposed_codes or self.recipe != "bf16",
            f"transposed_codes needs a recipe with codes, not {self.recipe!r}.",
        )
        return self


class MicroBatchOptions(OptionGroup):
    """Which sequences run together, where the framework lets the run decide."""

    pack: bool = True
    """Exchange sequences between a rank's micro-batches where these are dynamic (verl, slime, miles), within the
    framework's limits, so that the loads of the micro-batches that run at once on all ranks complement each other."""
    padding_samples: int = 0
    """Of verl's trainer v1: how many padding samples the driver may give to a rank in every mini-batch, so that all
    have equally many where packing gives some more sequences than others. They have two tokens that no loss counts. A
    run whose settings would count them is packed without, and its log says why."""
    fit_micro_batches: bool = True
    """Where a framework lets the run cut its micro-batches (verl's dynamic ones), never above its own limit: cut them
    to what the forecast of the last pass says will fit, where the limit will not."""

    @model_validator(mode="after")
    def _is_a_count(self) -> Self:
        require(self.padding_samples >= 0, f"padding_samples must be at least 0, got {self.padding_samples}.")
        return self


class BalancerConfig(OptionGroup):
    """Policy and slots of a balancer; model and group sizes come from Megatron.

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
    """Plan beside the run and carry nothing out: no expert moves, nothing is copied or packed, and losses are those of
    the run without moe_rl, to the bit. `PassMetrics.would_be` says what the plans would have made of every pass."""
    experimental: bool = False
    """Allow what has never been run with what it is for: `never_run` in `refusals.py` and `expert_views`."""

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
                not (self.observe and getattr(kernels, name)), f"{name} has no effect: observe does not change the run."
            )
        require(
            not (self.observe and kernels.are_ours),
            f"experts={kernels.experts!r} has no effect: observe leaves the experts to the framework.",
        )
        require(
            engine_of(slots.domain_balance) is None or (slots.replica_slots, self.policy) == (0, "moe-rl"),
            f"domain_balance {slots.domain_balance!r} copies experts inside a node by itself, and only policy 'moe-rl' "
            f"plans with it: set replica_slots to 0, not {slots.replica_slots}, and leave the policy at 'moe-rl'.",
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
