"""From a trace and options to the planning problem of one step: every command and function starts here.

S sequences, L MoE layers, E experts.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.config import (
    LoadedModel,
    listed_model,
    load_cluster,
    load_model,
    model_from_trace,
    override_model,
)
from moe_rl.core.cost import LayerCostParams
from moe_rl.core.draw import DrawnSequences, StepPart
from moe_rl.core.errors import require
from moe_rl.core.load import StepLoad
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.software import Software
from moe_rl.core.topology import ClusterTopology, HardwareSpec
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.objective import OBJECTIVES
from moe_rl.planner.registry import POLICIES, make_planner
from moe_rl.profiling.posterior import Posterior
from moe_rl.replay import Trace, TraceSource
from moe_rl.report.units import counted, listed
from moe_rl.simulators.balanced import micro_batch_cost
from moe_rl.simulators.pricing import TrainingStep
from moe_rl.simulators.result import SimulationResult
from moe_rl.simulators.setting import StepSetting
from moe_rl.simulators.step import cost_params_for
from moe_rl.study.batch import Batch, cut_step, lengths_of
from moe_rl.study.expert_parts import PartsOfExperts, model_in_parts
from moe_rl.study.groups import KernelOptions, ParallelOptions, PlanningOptions, SequenceOptions
from moe_rl.study.known_steps import KnownMemory, OwnStep, priors_of
from moe_rl.study.lengths import FULL_BATCHES, FULL_SIZE_TOKENS, drawn_sequences, full_batch, sequences_of_number
from moe_rl.study.options import DRAWN, RECORDED, SCALED, SimulationOptions
from moe_rl.study.population import check_population
from moe_rl.study.ranks import num_ep_groups_of, topology_of, with_groups_of_gpus
from moe_rl.study.traces import SAYS_ITS_SHAPE, TraceLike, open_for_model
from moe_rl.yaml_files import FROM_TRACE

logger = logging.getLogger(__name__)

# Called with (what is done now, items done, items in all).
Progress = Callable[[str, int, int], None]


class Simulate(Protocol):
    """Prices the plans of a scenario under a setting, on its cluster or on one with other constants."""

    def __call__(self, setting: StepSetting, hardware: HardwareSpec | None = None) -> SimulationResult:
        """Return every policy's step."""


# With so many pairs per expert, a model whose upper half of experts never occurs is the wrong one.
TELLING_PAIRS_PER_EXPERT = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """What the trace holds of the step, before a batch is drawn from it."""

    num_sequences: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One step of a trace on a cluster: the problem that every policy is given, and where it comes from."""

    options: SimulationOptions
    source: TraceSource
    model: LoadedModel
    topology: ClusterTopology
    recorded: RecordedStep
    batch: Batch
    training_step: TrainingStep
    """The step as the simulator prices it."""
    problem: PlanProblem
    history: str | None
    """Which loads policies know beside the step's own; None where no policy needs them."""
    told: Batch
    """The batch as planners know it."""
    homes_chosen_at: PlanProblem | None
    """The earlier step at which homes were chosen, under `--reorder-interval`; None: they are chosen at this one."""
    posterior: Posterior
    """Over the constants: the prior where no step is known."""
    memory: KnownMemory
    """What a known peak says of forecast peaks."""
    own_step: OwnStep = field(default_factory=OwnStep)
    """What a known step of this very setting says of it beside the constants."""

    @property
    def resampled(self) -> bool:
        """Whether the step's sequences were drawn, with replacement, from the recorded ones."""
        return self.options.sequences.batch == DRAWN

    @property
    def knows_earlier_steps(self) -> bool:
        """True where `history` is of earlier steps, not a part of this one that stands in for them."""
        return self.history is not None and self.history.startswith("previous")

    def with_posterior(self, posterior: Posterior, own_step: OwnStep) -> Self:
        """Return the same step planned and priced with the constants that known steps show."""
        hardware, costs = posterior.likeliest.constants
        costs = replace(costs, everything=costs.everything * own_step.factor)
        topology = replace(self.topology, hardware=hardware)
        setting = replace(self.training_step.setting, software=costs)
        step = replace(self.training_step, topology=topology, setting=setting)
        cost = cost_params_for(step)
        earlier = self.homes_chosen_at and replace(self.homes_chosen_at, topology=topology, cost=cost)
        return replace(
            self,
            topology=topology,
            training_step=step,
            problem=_problem(self.told, step, cost, self.problem.history, self.options),
            homes_chosen_at=earlier,
            posterior=posterior,
            own_step=own_step,
        )

    @property
    def software(self) -> Software:
        """The training software whose costs the step is priced with."""
        return self.posterior.likeliest.prior.software

    @property
    def engine(self) -> str | None:
        """The engine that balances the ranks of a node in this run; None if nobody named it or a dispatcher with one.

        A launch script names the dispatcher, too.
        """
        if self.problem.has_domain_engine:
            return self.problem.domain_balance
        if self.options.states("moe_flex_dispatcher_backend"):
            return self.options.kernels.dispatcher.engine
        return None

    def over_engine(self, engine: str) -> Self:
        """Return the same step for planners above an engine that balances the ranks of a node."""
        earlier = self.homes_chosen_at and replace(self.homes_chosen_at, domain_balance=engine)
        return replace(self, problem=replace(self.problem, domain_balance=engine), homes_chosen_at=earlier)

    def with_slots(self, name: str, slots: int) -> Self:
        """Return the same step for planners that are given so many slots of a kind, called as in `PlanProblem`."""
        number: dict[str, Any] = {name: slots}
        return replace(
            self,
            options=self.options.with_words(**number),
            problem=replace(self.problem, **number),
            homes_chosen_at=self.homes_chosen_at and replace(self.homes_chosen_at, **number),
        )


def state_scenario(
    trace: TraceLike, options: SimulationOptions, progress: Progress, *, model: LoadedModel | None = None
) -> Scenario:
    """Read the trace, resolve model and cluster, and state the planning problem; slots still to be chosen are 0.

    `model` None: the model that the options name.
    """
    check_policies(options.planning, options.kernels)
    check_population(options.memory)
    options = with_groups_of_gpus(options)
    hardware = load_cluster(options.pricing.cluster)
    progress("reading the trace", 0, 1)
    source, model = open_trace_of_model(trace, options, model)
    parts_of_expert = options.parallel.expert_tensor_parallel_size or 1
    if parts_of_expert > 1:
        ep_size = options.parallel.expert_model_parallel_size
        source = PartsOfExperts.of(source, ep_size=ep_size, parts=parts_of_expert)
        model = replace(model, spec=model_in_parts(model.spec, parts_of_expert))
        # From here on an EP group holds parts, as many as it has ranks times experts.
        options = options.with_words(expert_model_parallel_size=ep_size * parts_of_expert)
    chunks = options.parallel.pipeline_model_parallel_size * options.parallel.num_virtual_stages_per_pipeline_rank
    layers = model.spec.num_layers
    require(
        chunks <= layers,
        f"{chunks} model chunks (pipeline stages x virtual stages) need at least as many layers, but model "
        f"{model.spec.name!r} has only {layers}.",
    )
    step = step_of(source, options)
    recorded_parts = tuple(source.parts(step))
    recorded_lengths = lengths_of(recorded_parts)
    recorded = RecordedStep(num_sequences=len(recorded_lengths), num_tokens=int(recorded_lengths.sum()))
    options = with_batch(options, recorded_parts)
    topology = topology_of(options, hardware, recorded_parts, num_experts=model.spec.num_experts)
    parts: tuple[StepPart, ...] = recorded_parts
    if options.sequences.batch == DRAWN:
        parts = _drawn(recorded_parts, options.sequences, seed=options.planning.seed)
    progress("counting tokens per expert", 0, 1)
    batch = cut_step(step, parts, options, topology, model.spec)
    if source.format not in SAYS_ITS_SHAPE and options.trace.num_experts is None:
        _check_experts_occur(batch.load, model, source)
    options = _with_plannable_defaults(options, source, batch)
    index = source.steps.index(step)
    # Homes are chosen at every interval-th step of the trace, from its first on.
    chosen_at = index - index % options.homes.reorder_interval

    def cut(earlier: int) -> Batch:
        return cut_step(earlier, tuple(source.parts(earlier)), options, topology, model.spec)

    history, history_kind = _history(source, chosen_at, batch, options, cut)
    training_step = TrainingStep(
        load=batch.load,
        layout=batch.layout,
        lengths=batch.lengths,
        model=model.spec,
        topology=topology,
        setting=options.step_setting(),
    )
    cost = cost_params_for(training_step)
    foreseen = batch
    if options.knowledge.unknown_routes or options.knowledge.unknown_pairs:
        foreseen = cut_step(step, parts, options, topology, model.spec, as_planners_know_it=True)
    moving = any(POLICIES[name].levers.move_homes and POLICIES[name].keeps_homes for name in options.planning.policy)
    homes_chosen_at = None
    if chosen_at < index and moving:
        homes_chosen_at = _problem(cut(source.steps[chosen_at]), training_step, cost, history, options)
    return Scenario(
        options=options,
        source=source,
        model=model,
        topology=topology,
        recorded=recorded,
        batch=batch,
        training_step=training_step,
        problem=_problem(foreseen, training_step, cost, history, options),
        history=history_kind,
        told=foreseen,
        homes_chosen_at=homes_chosen_at,
        posterior=Posterior.of(priors_of(options, hardware, steps_known=False)),
        memory=KnownMemory(),
    )


def step_of(source: TraceSource, options: SimulationOptions) -> int:
    """Return the step of the trace that the options name; the last one if they name none."""
    if options.sequences.step is None:
        return source.steps[-1]
    return options.sequences.step


def with_batch(options: SimulationOptions, parts: Sequence[Trace]) -> SimulationOptions:
    """Return the options with the kind and the sizes of the batch in them, which `parts` of the trace may decide.

    Options that state the default change nothing: of a trace without a layout, on 16 ranks,
        (nothing)                                   draws 4 micro-batches of at most 8,192 tokens a rank
        --micro-batch-tokens 8192                   the same; cuts a recording that holds as many tokens itself
        --ep-group-tokens 2048                      cuts the recorded sequences into micro-batches of 2,048 tokens
        --ep-group-tokens 2048 --tokens-per-rank N  scales those to N tokens a rank; with --batch drawn, draws
                                                    micro-batches of at most N tokens a rank
    """
    laid_out = all(bool((part.micro_batch >= 0).all() and (part.dp_rank >= 0).all()) for part in parts)
    parallel, sequences = options.parallel, options.sequences
    kind = sequences.batch or _kind_of_batch(parallel, sequences, parts, laid_out=laid_out)
    if kind == DRAWN:
        sizes = _drawn_sizes(parallel, sequences, parts)
        if sequences.global_batch_size is not None:
            lengths = lengths_of(parts)
            sizes["global_batch_tokens"] = int(lengths[_drawn_ids(lengths, sequences, options.planning.seed)].sum())
    else:
        sizes = _recorded_sizes(parallel, sequences, parts, kind, laid_out=laid_out)
    return options.with_words(batch=kind, **sizes)


def _kind_of_batch(
    parallel: ParallelOptions, sequences: SequenceOptions, parts: Sequence[Trace], *, laid_out: bool
) -> str:
    """Return the kind of batch that options without `--batch` ask for; `laid_out`: the trace names every cell."""
    if sequences.global_batch_tokens is not None or sequences.global_batch_size is not None:
        return DRAWN
    # Micro-batches of an EP group are cut from a recording: docs/planner.md compares policies on them.
    if sequences.ep_group_tokens is not None or (laid_out and sequences.micro_batch_tokens is None):
        if sequences.tokens_per_rank is None:
            return RECORDED
        return SCALED
    if sequences.micro_batch_tokens is not None and sequences.tokens_per_rank is None:
        # Whoever says how a recording of full size is cut means that recording.
        full = _drawn_sizes(parallel, sequences, parts)["global_batch_tokens"] or 0
        if int(lengths_of(parts).sum()) >= full:
            return RECORDED
        return DRAWN
    return DRAWN


def _drawn_sizes(
    parallel: ParallelOptions, sequences: SequenceOptions, parts: Sequence[Trace]
) -> dict[str, int | None]:
    """Return the sizes of a batch that is drawn, by option: of a micro-batch, and of a batch of no stated size."""
    slices = parallel.slices
    require(
        sequences.micro_batch_tokens is None or sequences.tokens_per_rank is None,
        "--micro-batch-tokens and --tokens-per-rank both set the size of a sampled micro-batch: give only one.",
    )
    ranks = max(1, parallel.expert_model_parallel_size * num_ep_groups_of(parallel) // slices)
    if sequences.ep_group_tokens is not None and sequences.tokens_per_rank is None:
        return {"global_batch_tokens": sequences.global_batch_tokens or full_batch(sequences.ep_group_tokens)}
    longest = _longest(parts)
    tokens_asked = sequences.micro_batch_tokens or (sequences.tokens_per_rank or FULL_SIZE_TOKENS) * slices
    budget = max(tokens_asked, longest)
    if sequences.micro_batch_tokens is not None and tokens_asked < longest:
        logger.warning(
            "micro-batches have up to %d tokens instead of %d, because slime does not split the longest sequence.",
            longest,
            tokens_asked,
        )
    batch = sequences.global_batch_tokens or full_batch(budget * ranks)
    sizes: dict[str, int | None] = {"micro_batch_tokens": budget, "global_batch_tokens": batch}
    return {**sizes, "ep_group_tokens": None, "tokens_per_rank": None}


def _recorded_sizes(
    parallel: ParallelOptions, sequences: SequenceOptions, parts: Sequence[Trace], kind: str, *, laid_out: bool
) -> dict[str, int | None]:
    """Return the sizes of micro-batches that are cut from the recorded sequences, by option."""
    cut = sequences.micro_batch_tokens is not None or sequences.ep_group_tokens is not None or laid_out
    if kind == RECORDED:
        if cut:
            return {}
        return {"micro_batch_tokens": max(FULL_SIZE_TOKENS * parallel.slices, _longest(parts))}
    scaled: dict[str, int | None] = {"tokens_per_rank": sequences.tokens_per_rank or FULL_SIZE_TOKENS}
    if not cut:
        recorded = int(lengths_of(parts).sum())
        scaled["ep_group_tokens"] = max(-(-recorded // FULL_BATCHES), _longest(parts), 1)
    return scaled


def _longest(parts: Sequence[Trace]) -> int:
    """Return the tokens of the longest sequence, which a micro-batch takes whole: a sequence cannot be cut."""
    return int(lengths_of(parts).max(initial=0))


def _drawn_ids(lengths: NDArray[np.int64], sequences: SequenceOptions, seed: int) -> NDArray[np.int64]:
    """Return the ids of the sequences that are drawn: as many as stated, else as many as fit into stated tokens."""
    if sequences.global_batch_size is not None:
        return sequences_of_number(lengths, sequences.global_batch_size, seed=seed)
    return drawn_sequences(lengths, int(sequences.global_batch_tokens or 0), seed=seed)


def _drawn(parts: Sequence[Trace], sequences: SequenceOptions, *, seed: int) -> tuple[DrawnSequences, ...]:
    """Return sequences drawn with replacement, grouped by part."""
    drawn_ids = _drawn_ids(lengths_of(parts), sequences, seed)
    ends = np.cumsum([len(part.sequence_lengths) for part in parts])
    of_part = np.searchsorted(ends, drawn_ids, side="right")
    drawn = []
    for index in np.unique(of_part).tolist():
        first = ends[index] - len(parts[index].sequence_lengths)
        drawn.append(DrawnSequences(recorded=parts[index], numbers=drawn_ids[of_part == index] - first))
    return tuple(drawn)


def open_trace_of_model(
    trace: TraceLike, options: SimulationOptions, known: LoadedModel | None = None
) -> tuple[TraceSource, LoadedModel]:
    """Return the trace and the model that it is of; raise where `known`, or the options, name another."""
    named = known or (None if options.shape.model == FROM_TRACE else _named(options))
    source = open_for_model(trace, options.trace, named)
    model = named or _model_of_trace(source, options)
    _check_model_fits(model, source)
    return source, model


def _model_of_trace(source: TraceSource, options: SimulationOptions) -> LoadedModel:
    """Return the model that the trace names; if it is not listed, one of the trace's shape with assumed widths."""
    shape: dict[str, Any] = {
        "moe_layer_ids": source.moe_layer_ids,
        "num_experts": source.num_experts,
        "top_k": source.top_k,
        "overrides": options.model_overrides(),
    }
    asked_for = options.states("model")
    listed = None if asked_for else listed_model(source.model, **shape)
    return listed or model_from_trace(name=source.model, **shape)


def named_model(options: SimulationOptions, of: str) -> MoeModelSpec:
    """Return the model of `--model` where there is no trace; `of` names the command in the error."""
    require(options.shape.model != FROM_TRACE, f"{of} needs --model when no trace is given.")
    return _named(options).spec


def _named(options: SimulationOptions) -> LoadedModel:
    return override_model(load_model(options.shape.model), options.model_overrides())


def _problem(
    batch: Batch, step: TrainingStep, cost: LayerCostParams, history: StepLoad | None, options: SimulationOptions
) -> PlanProblem:
    of_batch = replace(step, load=batch.load, layout=batch.layout, lengths=batch.lengths)
    repacks = not batch.layout.fixed and any(POLICIES[name].levers.pack for name in options.planning.policy)
    return PlanProblem(
        load=batch.load,
        layout=batch.layout,
        model=step.model,
        topology=step.topology,
        cost=cost,
        objective=OBJECTIVES[options.pricing.objective],
        replica_slots=options.slots.replica_slots,
        # auto starts from none: resident_slots.py adds one after the other.
        cross_node_slots=options.slots.cross_node_slots if isinstance(options.slots.cross_node_slots, int) else 0,
        resident_slots=options.slots.resident_slots if isinstance(options.slots.resident_slots, int) else 0,
        history=history,
        steps_served=options.homes.steps_served or options.homes.reorder_interval,
        sequence_load=batch.sequence_load() if repacks else None,
        sequence_tokens=batch.lengths if repacks else None,
        micro_batch_cost=micro_batch_cost(of_batch),
        load_of_layout=batch.load_of_layout,
        domain_balance=options.slots.domain_balance,
        seed=options.planning.seed,
    )


def check_policies(planning: PlanningOptions, kernels: KernelOptions) -> None:
    """Raise for an unknown policy or parameter, before any work is done."""
    for name in planning.policy:
        planner = make_planner(name, **planning.parameters_of(name))
        unmet = planner.unmet_dispatchers.get(kernels.moe_token_dispatcher_type)
        require(
            unmet is None,
            f"the time of --policy {name} with --moe-token-dispatcher-type {kernels.moe_token_dispatcher_type} "
            f"cannot be predicted: {unmet} (see python -m benchmarks.validate_model).",
        )
    for option in planning.policy_option:
        planning.parameters_of(option.partition(".")[0])
    require(
        len(set(planning.policy)) == len(planning.policy),
        f"--policy names a policy twice: {', '.join(planning.policy)}.",
    )


def _check_model_fits(model: LoadedModel, source: TraceSource) -> None:
    spec = model.spec
    for singular, several, in_trace, in_model in (
        ("MoE layer", "MoE layers", len(source.moe_layer_ids), spec.num_moe_layers),
        ("expert", "experts", source.num_experts, spec.num_experts),
        ("expert per token", "experts per token", source.top_k, spec.top_k),
    ):
        require(
            in_trace == in_model,
            f"{source.path} is not a trace of model {spec.name!r}: the trace has "
            f"{counted(in_trace, singular, several)}, the model has {in_model}.",
        )
    # A trace that numbers its layers 0, 1, ... may count MoE layers alone: then their number is all there is to check.
    counted_from_zero = source.moe_layer_ids == tuple(range(len(source.moe_layer_ids)))
    require(
        counted_from_zero or source.moe_layer_ids == spec.moe_layer_ids,
        f"{source.path} has layers {listed(source.moe_layer_ids)}, but the MoE layers of model {spec.name!r} are "
        f"{listed(spec.moe_layer_ids)}.",
    )


def _check_experts_occur(load: StepLoad, model: LoadedModel, source: TraceSource) -> None:
    """Raise where a file that does not say its number of experts uses only the lower half of the model's."""
    per_expert = load.per_expert().sum(axis=(0, 1, 2))
    highest = int(np.flatnonzero(per_expert).max(initial=0))
    telling = int(per_expert.sum()) >= TELLING_PAIRS_PER_EXPERT * load.num_experts
    require(
        not telling or 2 * (highest + 1) > load.num_experts,
        f"{source.path} has no expert id above {highest}, so it is probably not a trace of model "
        f"{model.spec.name!r}, which has {load.num_experts} experts. If it is, set --num-experts {load.num_experts}.",
    )


def _with_plannable_defaults(options: SimulationOptions, source: TraceSource, batch: Batch) -> SimulationOptions:
    """Return the options without policies that lack an earlier step, where the user named no policies."""
    has_earlier = source.steps.index(batch.step) > 0 or batch.load.num_micro_batches > 1
    if has_earlier or options.states("policy"):
        return options
    left_out = _forecasting(options.planning)
    for name in left_out:
        logger.warning(
            "%s is left out: it plans from an earlier step, but the trace has only one step of one micro-batch.",
            name,
        )
    return options.with_words(policy=[name for name in options.planning.policy if name not in left_out])


def _forecasting(planning: PlanningOptions) -> list[str]:
    return [name for name in planning.policy if POLICIES[name].needs_history]


def _history(
    source: TraceSource, chosen_at: int, batch: Batch, options: SimulationOptions, cut: Callable[[int], Batch]
) -> tuple[StepLoad | None, str | None]:
    """Return the loads that were known when homes were chosen, at the `chosen_at`-th step, and their name."""
    forecasting = _forecasting(options.planning)
    serves_several = (options.homes.steps_served or options.homes.reorder_interval) > 1
    if not forecasting and not serves_several:
        return None, None
    steps = source.steps[max(0, chosen_at - options.homes.history_steps) : chosen_at]
    if steps:
        return StepLoad.joined(
            [cut(step).load for step in steps]
        ), f"previous step{'s' * (len(steps) > 1)} ({listed(steps)})"
    if not forecasting:
        return None, None
    # A trace of one step: half of its micro-batches stand in for the step before.
    half = batch.load.num_micro_batches // 2
    require(
        half >= 1,
        f"policy {forecasting[0]!r} plans from an earlier step, but the trace has only one step of one micro-batch: "
        "use eplb-oracle.",
    )
    return batch.load.micro_batches(np.arange(half)), "first half of this step's micro-batches"
