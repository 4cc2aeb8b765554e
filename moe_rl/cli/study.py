"""From a trace and options to a planning problem and its plans: what `simulate`, `plan` and `demo` share.

S sequences, M micro-batches, L MoE layers, E experts, K experts per token, P EP ranks.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_rl.cli.options import StudyOptions
from moe_rl.config import (
    FROM_TRACE,
    LoadedModel,
    cluster_num_nodes,
    load_cluster,
    load_model,
    model_from_trace,
    override_model,
)
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import ExpertLoad
from moe_rl.core.plan import Plan
from moe_rl.core.reduce import reduce_load
from moe_rl.core.topology import ClusterTopology, HardwareSpec
from moe_rl.core.trace import RoutingTrace, SequenceCounts
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.registry import POLICIES, make_planner
from moe_rl.replay import Trace, TraceSource, count_sequences, open_source
from moe_rl.replay.manifest import MANIFEST_NAME
from moe_rl.report.units import listed
from moe_rl.simulators.pricing import TrainingStep
from moe_rl.simulators.step import cost_params_for

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with (what is done now, items done, items in all)."""

TELLING_PAIRS_PER_EXPERT = 20
"""With so many token-expert pairs per expert, a model whose upper half of experts never occurs is the wrong one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step of the trace under a layout, as loads."""

    step: int
    parts: tuple[Trace, ...]
    lengths: NDArray[np.int64]
    """[S]"""
    layout: BatchLayout
    load: ExpertLoad
    recorded_tokens_per_rank: float
    """Mean tokens of a source rank in a micro-batch that has any, before scaling."""
    unrouted_tokens: int

    @property
    def num_tokens(self) -> int:
        """Rows of the step, rows without a route included."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The problem that every policy is given, and where it comes from."""

    options: StudyOptions
    source: TraceSource
    model: LoadedModel
    topology: ClusterTopology
    batch: Batch
    training_step: TrainingStep
    """What the simulator prices."""
    problem: PlanProblem
    history: str | None
    """Which loads forecasting policies know; None where no policy needs them."""


def open_study(path: Path, options: StudyOptions, progress: Progress) -> Study:
    """Read the trace, resolve model and cluster, and state the planning problem."""
    check_policies(options)
    hardware = load_cluster(options.cluster)
    named = (
        None if options.model == FROM_TRACE else override_model(load_model(options.model), options.model_overrides())
    )
    progress("reading the trace", 0, 1)
    source = open_trace(path, options, named)
    model = named or _model_of_trace(source, options)
    _check_model_fits(model, source)
    _check_stages(model, options)
    step = source.steps[-1] if options.step is None else options.step
    parts = tuple(source.parts(step))
    topology = topology_of(options, hardware, parts)
    topology.experts_per_rank(model.spec.num_experts)
    progress("counting tokens per expert", 0, 1)
    batch = read_batch(step, parts, options, topology)
    if source.format != "moetrace" and options.num_experts is None:
        _check_experts_occur(batch.load, model, source)
    options = _with_plannable_defaults(options, source, batch)
    history, history_kind = _history(source, batch, options, topology)
    repacks = not batch.layout.fixed and any(POLICIES[name].needs_sequences for name in options.policy)
    training_step = TrainingStep(
        load=batch.load,
        layout=batch.layout,
        lengths=batch.lengths,
        model=model.spec,
        topology=topology,
        setting=options.step_setting(),
    )
    problem = PlanProblem(
        load=batch.load,
        layout=batch.layout,
        model=model.spec,
        topology=topology,
        cost=cost_params_for(training_step),
        objective=options.objective,
        replica_slots=options.replica_slots,
        cross_node_slots=options.cross_node_slots,
        history=history,
        sequence_load=_sequence_load(parts) if repacks else None,
        sequence_tokens=batch.lengths if repacks else None,
        sequence_group=np.concatenate([part.group_id for part in parts]) if repacks else None,
        load_of_layout=lambda layout: _load(parts, layout, options, topology),
        seed=options.seed,
    )
    return Study(
        options=options,
        source=source,
        model=model,
        topology=topology,
        batch=batch,
        training_step=training_step,
        problem=problem,
        history=history_kind,
    )


def make_plans(study: Study, policies: Sequence[str], progress: Progress) -> dict[str, Plan]:
    """Return the plan of every policy, by name."""
    plans = {}
    for index, name in enumerate(policies):
        progress(f"planning {name}", index, len(policies))
        plans[name] = make_planner(name, **study.options.policy_parameters(name)).plan(study.problem)
    return plans


def repacked_loads(study: Study, plans: dict[str, Plan]) -> dict[str, ExpertLoad]:
    """Return the step's load under the layout of every plan that packs sequences its own way, by policy."""
    given = study.batch.layout
    repacked = {name: plan.layout for name, plan in plans.items() if not _same_cells(plan.layout, given)}
    return {name: _load(study.batch.parts, layout, study.options, study.topology) for name, layout in repacked.items()}


def check_policies(options: StudyOptions) -> None:
    """Raise for an unknown policy or parameter, before any work is done."""
    for name in options.policy:
        make_planner(name, **options.policy_parameters(name))
    for given in options.policy_option:
        options.policy_parameters(given.partition(".")[0])
    require(len(set(options.policy)) == len(options.policy), f"--policy names a policy twice: {options.policy}.")


def open_trace(path: Path, options: StudyOptions, model: LoadedModel | None) -> TraceSource:
    """Open the trace; a foreign format is told the shape of the model, which it may not hold itself."""
    known: dict[str, object] = {}
    if model is not None and not (path / MANIFEST_NAME).is_file():
        spec = model.spec
        known = {"num_experts": spec.num_experts, "top_k": spec.top_k, "num_layers": spec.num_layers}
        if spec.num_moe_layers < spec.num_layers:
            known["moe_layer_ids"] = spec.moe_layer_ids
    try:
        return open_source(path, format=options.format, options=options.import_options(**known))
    except InvalidInputError as error:
        if model is None or not known:
            raise
        spec = model.spec
        raise InvalidInputError(
            f"{error} (Read for model {spec.name!r}: {spec.num_moe_layers} MoE layers, {spec.num_experts} experts, "
            f"top-{spec.top_k}.)"
        ) from error


def read_batch(step: int, parts: tuple[Trace, ...], options: StudyOptions, topology: ClusterTopology) -> Batch:
    """Lay out the sequences of one step and count its loads."""
    lengths = np.concatenate([part.sequence_lengths for part in parts]).astype(np.int64)
    layout = _layout(lengths, parts, options, topology)
    recorded = _load(parts, layout, options.model_copy(update={"tokens_per_rank": None}), topology)
    running = recorded.tokens[recorded.tokens.sum(axis=2) > 0]
    require(running.size > 0, f"step {step} of the trace is empty: no row holds a route.")
    load = recorded if options.tokens_per_rank is None else recorded.scaled_to(options.tokens_per_rank)
    return Batch(
        step=step,
        parts=parts,
        lengths=lengths,
        layout=layout,
        load=load,
        recorded_tokens_per_rank=float(running.mean()),
        unrouted_tokens=sum(_unrouted(part) for part in parts),
    )


def _sequence_load(parts: Sequence[Trace]) -> NDArray[np.int32]:
    """Return [S, L, E] token-expert pairs of every sequence."""
    counts = [part if isinstance(part, SequenceCounts) else count_sequences(part) for part in parts]
    return np.concatenate([part.tokens_per_expert for part in counts]).astype(np.int32)


def _unrouted(part: Trace) -> int:
    if isinstance(part, RoutingTrace):
        return int((~part.valid).sum())
    return int((part.num_tokens - part.num_valid_tokens).sum())


def _load(parts: Sequence[Trace], layout: BatchLayout, options: StudyOptions, topology: ClusterTopology) -> ExpertLoad:
    load = reduce_load(parts, layout=layout, topology=topology, filler=options.filler)
    return load if options.tokens_per_rank is None else load.scaled_to(options.tokens_per_rank)


def _layout(
    lengths: NDArray[np.int64], parts: Sequence[Trace], options: StudyOptions, topology: ClusterTopology
) -> BatchLayout:
    if options.ep_group_tokens is not None:
        return BatchLayout.ep_group(lengths, token_budget=options.ep_group_tokens, seed=options.seed)
    if options.micro_batch_tokens is not None:
        return BatchLayout.in_order(
            lengths, num_dp_ranks=topology.num_dp_ranks, token_budget=options.micro_batch_tokens
        )
    return BatchLayout.recorded(
        np.concatenate([part.micro_batch for part in parts]),
        np.concatenate([part.dp_rank for part in parts]),
        num_dp_ranks=topology.num_dp_ranks,
    )


def topology_of(options: StudyOptions, hardware: HardwareSpec, parts: Sequence[Trace]) -> ClusterTopology:
    """Return the ranks that the options ask for; the recorded layout of `parts` may need more EP groups."""
    ep_size = options.expert_model_parallel_size
    slices = options.tensor_model_parallel_size * options.context_parallel_size
    groups = options.num_ep_groups or 1
    if options.ep_group_tokens is not None:
        slices = ep_size  # the EP group as a whole holds the sequences of a micro-batch
    elif options.micro_batch_tokens is None and options.num_ep_groups is None:
        ranks = slices * (1 + max((int(part.dp_rank.max(initial=-1)) for part in parts), default=-1))
        require(
            ranks % max(ep_size, 1) == 0,
            f"the recorded layout has {ranks} ranks (data-parallel ranks x TP x CP), which do not fill EP groups of "
            f"{ep_size}: give --micro-batch-tokens or --ep-group-tokens.",
        )
        groups = max(1, ranks // ep_size)
    topology = ClusterTopology(
        hardware=hardware,
        ep_size=ep_size,
        num_ep_groups=groups,
        slices_per_dp_rank=slices,
        ranks_per_node=options.ranks_per_node or hardware.ranks_per_node,
    )
    _check_nodes(options, topology)
    return topology


def _check_nodes(options: StudyOptions, topology: ClusterTopology) -> None:
    """Raise where the job needs more nodes than there are; a cluster that does not say its size has enough."""
    available = cluster_num_nodes(options.cluster) if options.num_nodes is None else options.num_nodes
    require(available is None or available >= 1, f"--num-nodes must be at least 1, got {available}.")
    stages, per_node = options.pipeline_model_parallel_size, topology.ranks_per_node
    ranks = topology.num_ranks * stages
    needed = -(-ranks // per_node)
    require(
        available is None or needed <= available,
        f"EP {topology.ep_size} x {topology.num_ep_groups} EP groups x PP {stages} are {ranks} ranks on {needed} nodes "
        f"of {per_node}, but {topology.hardware.name!r} has {available} nodes (num_nodes).",
    )


def _model_of_trace(source: TraceSource, options: StudyOptions) -> LoadedModel:
    return model_from_trace(
        name=source.model,
        moe_layer_ids=source.moe_layer_ids,
        num_experts=source.num_experts,
        top_k=source.top_k,
        given=options.model_overrides(),
    )


def _check_model_fits(model: LoadedModel, source: TraceSource) -> None:
    spec = model.spec
    have = (len(source.moe_layer_ids), source.num_experts, source.top_k)
    want = (spec.num_moe_layers, spec.num_experts, spec.top_k)
    for (name, plural), in_trace, in_model in zip(
        (("MoE layer", "MoE layers"), ("expert", "experts"), ("expert per token", "experts per token")),
        have,
        want,
        strict=True,
    ):
        require(
            in_trace == in_model,
            f"{source.path} has {in_trace} {name if in_trace == 1 else plural}, model {spec.name!r} has {in_model}: "
            "the model is not the one of the trace.",
        )
    counted_from_zero = source.moe_layer_ids == tuple(range(len(source.moe_layer_ids)))
    require(
        counted_from_zero or source.moe_layer_ids == spec.moe_layer_ids,
        f"{source.path} covers layers {listed(source.moe_layer_ids)}, the MoE layers of model {spec.name!r} are "
        f"{listed(spec.moe_layer_ids)}.",
    )


def _check_stages(model: LoadedModel, options: StudyOptions) -> None:
    chunks = options.pipeline_model_parallel_size * options.num_virtual_stages_per_pipeline_rank
    require(
        chunks <= model.spec.num_layers,
        f"{chunks} pipeline stages and model chunks are more than the {model.spec.num_layers} layers of model "
        f"{model.spec.name!r}.",
    )


def _check_experts_occur(load: ExpertLoad, model: LoadedModel, source: TraceSource) -> None:
    """Raise where a file that does not say its number of experts uses only the lower half of the model's."""
    per_expert = load.per_expert().sum(axis=(0, 1, 2))
    highest = int(np.flatnonzero(per_expert).max(initial=0))
    telling = int(per_expert.sum()) >= TELLING_PAIRS_PER_EXPERT * load.num_experts
    require(
        not telling or 2 * (highest + 1) > load.num_experts,
        f"{source.path} never names an expert above {highest}, model {model.spec.name!r} has {load.num_experts} "
        f"experts: the model is not the one of the trace (if it is, give --num-experts {load.num_experts}).",
    )


def _with_plannable_defaults(options: StudyOptions, source: TraceSource, batch: Batch) -> StudyOptions:
    """Return the options without policies that lack an earlier step, where the user did not name policies himself."""
    has_history = source.steps.index(batch.step) > 0 or batch.load.num_micro_batches > 1
    if has_history or "policy" in options.model_fields_set:
        return options
    for name in _forecasting(options):
        logger.warning(
            "%s is left out: it plans on an earlier step, and the trace has one step of one micro-batch.", name
        )
    return options.model_copy(update={"policy": [name for name in options.policy if not POLICIES[name].needs_history]})


def _forecasting(options: StudyOptions) -> list[str]:
    return [name for name in options.policy if POLICIES[name].needs_history]


def _history(
    source: TraceSource, batch: Batch, options: StudyOptions, topology: ClusterTopology
) -> tuple[ExpertLoad | None, str | None]:
    """Return the loads that forecasting policies know, and what they are."""
    forecasting = _forecasting(options)
    if not forecasting:
        return None, None
    index = source.steps.index(batch.step)
    if index > 0:
        step = source.steps[index - 1]
        earlier = read_batch(step, tuple(source.parts(step)), options, topology)
        return earlier.load, f"previous step ({step})"
    half = batch.load.num_micro_batches // 2
    require(
        half >= 1,
        f"policy {forecasting[0]!r} needs an earlier step, and the trace has one step of one micro-batch: "
        "use eplb-oracle.",
    )
    return batch.load.micro_batch_slice(0, half), "first half of this step's micro-batches"


def _same_cells(one: BatchLayout, other: BatchLayout) -> bool:
    return one is other or (
        (one.num_micro_batches, one.num_dp_ranks) == (other.num_micro_batches, other.num_dp_ranks)
        and all(
            np.array_equal(getattr(one, name), getattr(other, name)) for name in ("micro_batch", "dp_rank", "order")
        )
    )
