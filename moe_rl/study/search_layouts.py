"""`moe-rl tune`: the parallel layout that trains most tokens per second on a given number of GPUs.

Every shape is estimated as if sequences could be cut. The settings of those that may be the fastest are priced with the
lengths of a batch, laid out by `planner.packing`, and balanced routing. With routes, the fastest setting of every EP
size and dispatcher is priced again, with an engine and with the levers of `moe-rl` (`shape_levers`). Ratios to forced
balance say nothing between shapes; tokens per second and GPU do.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_rl.config import load_cluster, load_software
from moe_rl.core.cost import Floats
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.interval import Interval
from moe_rl.core.layout import BatchLayout
from moe_rl.core.mappings import attributes, not_none
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.native import native_core
from moe_rl.core.schedules import verl_layout
from moe_rl.core.software import TUNED, TYPICAL, SoftwareCosts
from moe_rl.core.step_words import Dispatcher, Recompute
from moe_rl.core.topology import ClusterTopology, HardwareSpec
from moe_rl.core.trace import RoutingTrace
from moe_rl.option_groups import AUTO
from moe_rl.planner.packing import best_start
from moe_rl.profiling.posterior import NORMAL_80, Posterior
from moe_rl.replay import concatenate
from moe_rl.report.tuning import ALIKE, SIZES, ParallelLayout, ShapeLevers, Tuned, TunedSetting
from moe_rl.report.units import GIB, batch_words, counted, format_count
from moe_rl.simulators.balanced import BalancedBatch, BalancedStep, cost_of_lengths
from moe_rl.simulators.base_time import default_cp_comm_type
from moe_rl.simulators.memory import held_expert_bytes
from moe_rl.simulators.pipeline import stage_layers
from moe_rl.simulators.setting import StepSetting, TrainingRun
from moe_rl.study.conditions import chosen_by
from moe_rl.study.executors import Executor
from moe_rl.study.expert_parts import model_in_parts
from moe_rl.study.groups import SequenceOptions
from moe_rl.study.intervals import around
from moe_rl.study.known_steps import KnownMemory, posterior_of, priors_of, surprises
from moe_rl.study.lengths import FULL_SIZE_TOKENS, drawn_lengths, drawn_sequences, full_batch
from moe_rl.study.options import DRAWN, RECORDED, SCALED
from moe_rl.study.population import check_population, population_cautions, population_notes
from moe_rl.study.priced_setting import levers_on_all_layers
from moe_rl.study.ranks import check_ep_size
from moe_rl.study.resident_slots import SPARE_MEMORY
from moe_rl.study.rl_options import TunedParallel, TuneOptions
from moe_rl.study.scenario import Progress, named_model, open_trace_of_model
from moe_rl.study.shape_levers import SampledRoutes, compared_shapes, levers_of, routes_like
from moe_rl.study.sweep_file import finish_points
from moe_rl.study.traces import TraceLike, digest_of, open_for_model, routes_of_step
from moe_rl.version import __version__

# Tokens of a rank in a micro-batch: slime's and verl's MoE scripts have 8,192 to 32,768; one step more on either side.
BUDGETS = (4096, 8192, 16384, 32768, 65536)
RECOMPUTE = (
    Recompute.NONE,
    Recompute.MOE,
    Recompute.FULL,
)  # From the fastest to the smallest: more only where less does not fit.
VIRTUAL_STAGES = (1, 2, 4)
POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
EXPERT_TENSOR = (1, 2, 4, 8)
MOST_RESIDENT = 4  # Resident slots that `auto` makes room for: on the development trace a third saves nothing.

SHAPES_AT_ONCE = 16  # Estimated by one call of a worker: 0.2 CPU s.
ROUND = 32  # Shapes that are laid out before the fastest is looked at again.
OF_EVERY_SIZE = 4  # Shapes of an EP size that are laid out although others are faster: the report compares sizes.

# Fields of a shape that a `StepSetting` has.
PARALLEL = (
    "tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size", "num_virtual_stages",
    "dispatcher",
)  # fmt: skip
COMPARED = 40  # Settings whose interval is computed: the fastest, and the first of every EP size.

# Options that are searched where they are not given, and the part of a setting that each decides.
SEARCHED = {
    **{name: name for name in (*SIZES, "micro_batch_tokens")},
    "num_virtual_stages_per_pipeline_rank": "num_virtual_stages",
    "moe_token_dispatcher_type": "dispatcher",
    "moe_flex_dispatcher_backend": "dispatcher",
    "recompute_granularity": "recompute",
}


def shapes_of(
    model: MoeModelSpec, hardware: HardwareSpec, gpus: int, ranks_per_node: int, expert_tensor: int | None = None
) -> Iterator[ParallelLayout]:
    """Yield every way to share out the GPUs that Megatron could start and that fills whole nodes.

    Without a given `expert_tensor` size experts are cut only where no larger EP divides them.
    """
    for tp, cp, pp, ep, parts in itertools.product(POWERS, POWERS, POWERS, POWERS, EXPERT_TENSOR):
        ranks = gpus // pp
        if gpus % pp or ranks % (tp * cp) or ranks % (ep * parts) or pp > model.num_layers or tp > ranks_per_node:
            continue
        if model.num_attention_heads % tp or model.num_query_groups % min(tp, model.num_query_groups):
            continue
        if model.moe_ffn_hidden_size % parts or parts != (expert_tensor or parts):
            continue
        # EP16 holds what EP8 x expert TP 2 does, multiplies wider matrices, and sends a token to fewer ranks.
        if expert_tensor is None and parts > 1 and model.num_experts % (ep * parts) == 0:
            continue
        try:
            check_ep_size(ep * parts, model.num_experts * parts, ranks_per_node)
        except InvalidInputError:
            continue
        dispatchers = [Dispatcher.ALLTOALL]
        if ep * parts > 1:
            dispatchers = [Dispatcher.DEEPEP, Dispatcher.ALLTOALL]
        for virtual in VIRTUAL_STAGES if pp > 1 else (1,):
            if virtual == 1 or model.num_layers % (pp * virtual) == 0:
                for dispatcher in dispatchers:
                    yield ParallelLayout(
                        expert_model_parallel_size=ep, tensor_model_parallel_size=tp, context_parallel_size=cp,
                        pipeline_model_parallel_size=pp, num_virtual_stages=virtual, dispatcher=dispatcher,
                        expert_tensor_parallel_size=parts,
                    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeTask:
    """Prices the settings of one shape; can be pickled."""

    shapes: tuple[ParallelLayout, ...]
    model: MoeModelSpec
    hardware: HardwareSpec
    base: StepSetting
    lengths: NDArray[np.int64]
    gpus: int
    ranks_per_node: int
    recompute: tuple[Recompute, ...] = RECOMPUTE
    micro_batch_tokens: int | None = None
    """Of a data-parallel rank; None: `BUDGETS`."""
    buffers: int = 0
    """Experts of other ranks for which a rank keeps room."""
    resident_slots: int | None = 0
    """The same in every layer; None: as many as fit, where an EP group has several nodes."""

    def __call__(self, index: int) -> dict[str, object]:
        """Return the settings of a shape that fit into memory, as JSON values."""
        shape = self.shapes[index]
        settings = [asdict(self.priced(shape, setting, budget)) for budget, setting in self._fitting(shape)]
        return {"found": settings}

    def estimated(self, index: int) -> float:
        """Return about the most tokens/s/GPU of a shape, 0 where no setting fits: micro-batches as if sequences could
        be cut, as few as the budget allows."""
        shape, best = self.shapes[index], 0.0
        num_tokens = float(self.lengths.sum())
        for budget, setting in self._fitting(shape):
            run = self._run(shape, setting)
            together = 1
            if shape.num_virtual_stages > 1:
                together = shape.pipeline_model_parallel_size
            rounds = math.ceil(num_tokens / (budget * run.topology.num_dp_ranks * together))
            seconds = self._even_step(run, rounds * together).step_time_s
            best = max(best, num_tokens / seconds / self.gpus)
        return best

    def _budgets(self, shape: ParallelLayout) -> list[int]:
        """Return the token budgets of a data-parallel rank that are tried, ascending."""
        if self.micro_batch_tokens:
            return [self.micro_batch_tokens]
        return sorted({max(budget * shape.slices, int(self.lengths.max())) for budget in BUDGETS})

    def _even_step(self, run: TrainingRun, count: int) -> BalancedStep:
        """Return the step of `count` equal micro-batches of sequences with as much attention per token as these."""
        per_rank = float(self.lengths.sum()) / run.topology.num_ranks
        batch = BalancedBatch.of(
            run, tokens_per_rank=max(1, round(per_rank / count)), sequence_length=attended_length(self.lengths)
        )
        return batch.step(count)

    def _run(self, shape: ParallelLayout, setting: StepSetting) -> TrainingRun:
        ranks = self.gpus // shape.pipeline_model_parallel_size
        topology = ClusterTopology(
            hardware=self.hardware,
            ep_size=shape.expert_ranks,
            num_ep_groups=ranks // shape.expert_ranks,
            slices_per_dp_rank=shape.slices,
            ranks_per_node=min(self.ranks_per_node, shape.expert_ranks),
        )
        return TrainingRun(
            model=model_in_parts(self.model, shape.expert_tensor_parallel_size), topology=topology, setting=setting
        )

    def _fitting(self, shape: ParallelLayout) -> Iterator[tuple[int, StepSetting]]:
        """Yield every token budget that fits, ascending, with the setting of least recomputation that makes it fit.

        More tokens need more memory: a setting that does not fit is not tried again for a larger budget.
        """
        named = {name: value for name, value in asdict(shape).items() if not name.startswith("expert_")}
        settings = [replace(self.base, **named, recompute=recompute) for recompute in self.recompute]
        for budget in self._budgets(shape):
            tokens = min(budget, int(self.lengths.sum())) // shape.slices
            while settings and self._room(self._run(shape, settings[0]), tokens) < (self.resident_slots or 0):
                del settings[0]
            if not settings:
                return
            yield budget, settings[0]

    def _peak(self, run: TrainingRun, tokens: int) -> int:
        """Return the peak without resident slots."""
        batch = BalancedBatch.of(run, tokens_per_rank=max(1, tokens), sequence_length=1)
        return batch.memory(buffers=self.buffers, with_remedies=False).peak_bytes

    def _room(self, run: TrainingRun, tokens: int) -> float:
        """Return the resident slots for which memory is left; negative where the rest does not fit."""
        limit = (1 - SPARE_MEMORY) * self.hardware.hbm_gib * GIB
        return (limit - self._peak(run, tokens)) / _slot_bytes(run)

    def free_slots(self, row: TunedSetting) -> int:
        """Return the resident slots for which a setting leaves memory, at least those that it has."""
        limit = (1 - SPARE_MEMORY) * self.hardware.hbm_gib - row.peak_gib
        setting = replace(self.base, **attributes(row, PARALLEL), recompute=row.recompute)
        return row.resident_slots + max(0, int(limit * GIB / _slot_bytes(self._run(row, setting))))

    def repriced(self, row: TunedSetting, hardware: HardwareSpec, costs: SoftwareCosts) -> float:
        """Return the seconds of a priced setting's balanced micro-batches under other constants."""
        parallel = attributes(row, PARALLEL)
        setting = replace(self.base, **parallel, recompute=row.recompute, software=costs)
        run = replace(self, hardware=hardware)._run(row, setting)
        return self._even_step(run, row.num_micro_batches).step_time_s

    def priced(self, shape: ParallelLayout, setting: StepSetting, budget: int) -> TunedSetting:
        """Return the setting with its step: balanced micro-batches, plus the time that uneven lengths add."""
        run, lengths, slots = self._run(shape, setting), self.lengths, self.resident_slots
        topology, stages = run.topology, setting.pipeline_model_parallel_size
        ranks, core = topology.num_dp_ranks, native_core()
        per_rank = float(lengths.sum()) / topology.num_ranks
        most_tokens = min(budget / shape.slices, per_rank)
        cost = cost_of_lengths(run, lengths, tokens_per_rank=most_tokens)
        framework_layout = _verl_layout(lengths.tobytes(), ranks, budget, cost.multiple_of)
        if core is None:
            layout = framework_layout
        else:
            layout = best_start(framework_layout, cost, lengths, topology, core, searched=False)
        count = len(np.unique(layout.micro_batch))
        even_step = self._even_step(run, count)
        # Sequences cannot be cut, so the busiest rank of a micro-batch has more than the mean.
        uneven_s = cost.balanced_s(layout, topology) - cost.even_s(count, topology)
        # Micro-batches follow each other through the stage with most layers.
        slowest = max(stage_layers(self.model, setting)) / sum(stage_layers(self.model, setting))
        parts = {**even_step.breakdown_s, "uneven_sequences": max(0.0, uneven_s) * (slowest if stages > 1 else 1.0)}
        seconds = sum(parts.values())
        fullest_tokens = int(layout.rank_tokens(lengths).max()) // shape.slices
        # Inside one node no copy of a token crosses the network, and a resident copy has nothing to save.
        if slots is None:
            slots = 0
            if topology.num_nodes > 1:
                slots = min(MOST_RESIDENT, int(self._room(run, fullest_tokens)))
        return TunedSetting(
            **asdict(shape),
            micro_batch_tokens=budget,
            num_micro_batches=count,
            recompute=setting.recompute,
            tokens_per_s_per_gpu=float(lengths.sum()) / seconds / self.gpus,
            packing_gain=cost.balanced_s(framework_layout, topology) / cost.balanced_s(layout, topology),
            resident_slots=slots,
            cp_comm_type=_exchange(run),
            peak_gib=(self._peak(run, fullest_tokens) + slots * _slot_bytes(run)) / GIB,
            parts={name: value / seconds for name, value in parts.items()},
        )


def attended_length(lengths: NDArray[np.int64]) -> int:
    """Return the length of equal sequences with as much attention per token: it grows with the square of a length."""
    return max(1, round(float((lengths.astype(np.float64) ** 2).sum() / lengths.sum())))


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateTask:
    """Estimates shapes in portions of `SHAPES_AT_ONCE`; can be pickled."""

    task: ShapeTask

    def __call__(self, index: int) -> list[float]:
        """Return `ShapeTask.estimated` of a portion."""
        first = index * SHAPES_AT_ONCE
        return [self.task.estimated(shape) for shape in range(len(self.task.shapes))[first : first + SHAPES_AT_ONCE]]


def estimated_speeds(task: ShapeTask, executor: Executor, progress: Progress) -> NDArray[np.float64]:
    """Return [shapes] estimated tokens/s/GPU of all shapes, 0 where none of a shape's settings fits."""
    portions = range(-(-len(task.shapes) // SHAPES_AT_ONCE))
    speeds = dict[int, list[float]]()
    with closing(executor(EstimateTask(task=task), portions)) as results:
        for index, portion in results:
            speeds[index] = portion
            progress("estimating layouts", min(len(speeds) * SHAPES_AT_ONCE, len(task.shapes)), len(task.shapes))
    return np.array([speed for index in sorted(speeds) for speed in speeds[index]])


def next_shapes(
    shapes: Sequence[ParallelLayout], estimates: NDArray[np.float64], laid_out: Mapping[int, Sequence[TunedSetting]]
) -> list[int]:
    """Return the shapes to lay out next, at most `ROUND`; none are left: the search is done.

    These are the `OF_EVERY_SIZE` that promise most of every EP size, then all whose estimate is no worse than the best
    setting that is laid out.
    An estimate takes sequences as divisible, so a shape is as a rule slower than its estimate.
    """
    order = [index for index in np.argsort(-estimates, kind="stable").tolist() if estimates[index] > 0]
    of_size = Counter[int]()
    priced_tokens_per_s = [row.tokens_per_s_per_gpu for rows in laid_out.values() for row in rows]
    least_tokens_per_s = (1 - ALIKE) * max(priced_tokens_per_s, default=0.0)
    chosen_shapes = []
    for index in order:
        size = shapes[index].expert_ranks
        of_size[size] += 1
        is_wanted = of_size[size] <= OF_EVERY_SIZE or (
            bool(priced_tokens_per_s) and estimates[index] >= least_tokens_per_s
        )
        if is_wanted and index not in laid_out:
            chosen_shapes.append(index)
    return chosen_shapes[:ROUND]


def _exchange(run: TrainingRun) -> str | None:
    """Return how the CP ranks of a run exchange keys and values; None without context parallelism."""
    if run.setting.context_parallel_size == 1:
        return None
    return run.setting.cp_comm_type or default_cp_comm_type(run.model, run.topology.hardware, run.setting)


def _slot_bytes(run: TrainingRun) -> float:
    """Return the bytes of one resident slot in every layer of a stage."""
    model, setting = run.model, run.setting
    return held_expert_bytes(model, setting) * model.num_moe_layers / setting.pipeline_model_parallel_size


# Shapes with as many data-parallel ranks share a layout: the lengths as bytes, which can be a key.
@lru_cache(maxsize=256)
def _verl_layout(lengths: bytes, ranks: int, budget: int, multiple_of: int) -> BatchLayout:
    """Return verl's layout of int64 lengths."""
    of_bytes = np.frombuffer(lengths, np.int64)
    return verl_layout(of_bytes, num_dp_ranks=ranks, token_budget=budget, multiple_of=multiple_of)


def tune(
    trace: TraceLike | None,
    options: TuneOptions,
    *,
    executor: Executor,
    progress: Progress,
    out: Path | None = None,
    tell: Callable[[str], None] = lambda sentence: None,
) -> Tuned:
    """Price every setting of every shape on `options.gpus` GPUs, but for shapes that stand in the file `out`.

    Settings as fast as the fastest (`ALIKE`) come first, those with fewer kinds of parallelism before the others.
    Raises `InvalidInputError` where no setting fits into memory.
    """
    model, batch = TunedBatch.of(trace, options)
    parallel, slots = options.parallel, options.slots
    lengths = batch.lengths
    hardware = load_cluster(options.pricing.cluster)
    per_node = parallel.ranks_per_node or hardware.ranks_per_node
    check_population(options.memory)
    posterior = _posterior(options, hardware, lengths)
    hardware, costs = posterior.likeliest.constants
    base, budget = replace(options.step_setting(), software=costs), options.sequences.micro_batch_tokens
    if budget is not None and budget < lengths.max():
        tell(
            f"micro-batches have up to {lengths.max():,} tokens instead of {budget:,}, because the longest sequence "
            "is not split."
        )
        budget = int(lengths.max())
    decided = {SEARCHED[name] for name in SEARCHED if options.states(name)}
    shaping = [name for name in ParallelLayout.__slots__ if name in decided]
    values = {name: getattr(base, name, None) if hasattr(base, name) else options.value_of(name) for name in shaping}
    flags = not_none(values)
    shapes = tuple(
        shape
        for shape in shapes_of(model, hardware, parallel.gpus, per_node, parallel.expert_tensor_parallel_size)
        if all(value == getattr(shape, name) for name, value in flags.items())
        and (not base.cuda_graph.spares_all_launches or shape.dispatcher.can_be_captured)
    )
    listed = "".join(f", {name} {value}" for name, value in flags.items())
    require(len(shapes) > 0, f"no parallel layout of {model.name!r} uses exactly --gpus {parallel.gpus}{listed}.")
    task = ShapeTask(
        shapes=shapes, model=model, hardware=hardware, base=base, lengths=lengths, gpus=parallel.gpus,
        ranks_per_node=per_node,
        buffers=slots.replica_slots + 2 * slots.number_of("cross_node_slots", "tune"),
        recompute=(base.recompute,) if "recompute" in decided else RECOMPUTE,
        micro_batch_tokens=budget,
        resident_slots=None if slots.resident_slots == AUTO else int(slots.resident_slots),
    )  # fmt: skip
    settings = {
        "moe_rl_version": __version__,
        "trace_sha256": None if trace is None else digest_of(trace),
        "options": options.words(),
    }
    estimates = estimated_speeds(task, executor, progress)
    num_fitting = int((estimates > 0).sum())
    tell(
        f"{len(shapes):,} parallel layouts use {parallel.gpus} GPUs, and {num_fitting:,} of them fit "
        "into memory. Only those that may be the fastest are simulated in full."
    )
    laid_out = dict[int, list[TunedSetting]]()
    while chosen := next_shapes(shapes, estimates, laid_out):
        shapes_task = replace(task, shapes=tuple(shapes[index] for index in chosen))
        points, named = [asdict(shape) for shape in shapes_task.shapes], "EP{expert_model_parallel_size}".format_map
        lines = finish_points(out, settings, points, shapes_task, executor, name=named, progress=progress, tell=tell)
        for index, line in zip(chosen, lines, strict=True):
            laid_out[index] = [TunedSetting(**row) for row in line["found"]]
    tell(
        f"{len(laid_out):,} layouts were simulated in full; {num_fitting - len(laid_out):,} were skipped, because even "
        "their estimate with divisible sequences is slower than the best setting."
    )
    rows = [row for index in sorted(laid_out) for row in laid_out[index]]
    if not rows:
        raise InvalidInputError(
            f"{model.name!r} does not fit on {parallel.gpus} GPUs of {hardware.name} in any of {len(shapes)} "
            f"parallel layouts{listed}, even with full recomputation. Set a higher --gpus, or set "
            "--optimizer-offload-fraction."
        )
    rows.sort(key=lambda row: -row.tokens_per_s_per_gpu)
    # A simpler layout has less to go wrong, and not all of what it saves is priced: the launches of a tensor-parallel
    # group are not (GPT-OSS-20B: 5 x 24 collectives of some 25 us in a micro-batch, 0.5 % of a step of 3 s).
    num_tied = sum(row.tokens_per_s_per_gpu >= (1 - ALIKE) * rows[0].tokens_per_s_per_gpu for row in rows)
    rows = _with_intervals(rows, task, posterior, KnownMemory.of(None, 1.0))
    told_alike = sum(row.behind_fastest is not None and not row.told_apart for row in rows)
    rows[:num_tied] = sorted(rows[:num_tied], key=lambda row: row.num_kinds)
    sampled = _sampled_routes(trace, options, model, lengths)
    whole = None
    if not (trace is None or options.routes_like is not None):
        whole = partial(
            levers_on_all_layers, trace=trace, options=options, num_tokens=int(lengths.sum()), batch=batch.kind
        )
    return Tuned(
        model=model.name, cluster=hardware.name, gpus=parallel.gpus, num_tokens=int(lengths.sum()),
        num_sequences=len(lengths), batch=batch.words, num_shapes=len(shapes), num_laid_out=len(laid_out),
        num_alike=told_alike, settings=tuple(rows),
        levers=() if sampled is None else _levers(rows, sampled, task, options, progress, whole),
        notes=tuple(_notes(options, rows, task, posterior)),
    )  # fmt: skip


def _sampled_routes(
    trace: TraceLike | None, options: TuneOptions, model: MoeModelSpec, lengths: NDArray[np.int64]
) -> SampledRoutes | None:
    """Return the routes that levers are priced with; None without a trace, or where it holds counts alone."""
    if options.routes_like is not None:
        like = routes_of_step(open_for_model(options.routes_like, options.trace.with_words(format=None), None))
        return SampledRoutes.of(routes_like(like, model, lengths, seed=options.planning.seed), model)
    if trace is None:
        return None
    source, _ = open_trace_of_model(trace, options)
    routes = concatenate(
        tuple(source.parts(source.steps[-1] if options.sequences.step is None else options.sequences.step))
    )
    if not isinstance(routes, RoutingTrace):
        return None
    return SampledRoutes.of(routes, model)


def _levers(
    rows: list[TunedSetting],
    sampled: SampledRoutes,
    task: ShapeTask,
    options: TuneOptions,
    progress: Progress,
    whole: Callable[[ShapeLevers], ShapeLevers] | None,
) -> tuple[ShapeLevers, ...]:
    """Return what an engine and the levers bring at the shapes that they may bring in front, the fastest first.

    All are priced on a sample of layers; the one in front, by `whole`, on all of them. If that brings another one in
    front, it is priced so, too.
    """
    settings, shapes = compared_shapes(rows), list[ShapeLevers]()
    for index, row in enumerate(settings):
        progress(f"levers of {row.name}", index, len(settings))
        shapes.append(levers_of(row, sampled, options, lengths=task.lengths, room=task.free_slots(row)))
    shapes.sort(key=lambda shape: -shape.fastest)
    while whole is not None and not shapes[0].command:
        progress(f"{shapes[0].setting.name} on all layers", 0, 1)
        shapes[0] = whole(shapes[0])
        shapes.sort(key=lambda shape: -shape.fastest)
    return tuple(shapes)


def _posterior(options: TuneOptions, hardware: HardwareSpec, lengths: NDArray[np.int64]) -> Posterior:
    """Return the constants after the known steps, whose settings `--known-step-config` has to say."""
    if not options.pricing.known_step:
        return Posterior.of(priors_of(options, hardware, steps_known=False))
    return posterior_of(options, hardware, {}, lengths)[0]


def _with_intervals(
    rows: list[TunedSetting], task: ShapeTask, posterior: Posterior, memory: KnownMemory
) -> list[TunedSetting]:
    """Return the settings, fastest first, with intervals beside those that compare with the fastest."""
    first_of_size = {row.expert_model_parallel_size: index for index, row in reversed(list(enumerate(rows)))}
    compared = sorted({*range(min(COMPARED, len(rows))), *first_of_size.values()})

    def price(hardware: HardwareSpec, costs: SoftwareCosts) -> Floats:
        return np.array([task.repriced(rows[index], hardware, costs) for index in compared])

    figures, settings = posterior.figures(price), list(rows)
    half = float(np.exp(NORMAL_80 * memory.spread))
    for place, index in enumerate(compared):
        row, step = rows[index], figures.interval(place)
        behind = rows[0].tokens_per_s_per_gpu / row.tokens_per_s_per_gpu
        if index:
            ratio = figures.ratio(place, 0)
        else:
            ratio = Interval(value=1.0, low=1.0, high=1.0)
        speed, times = around(row.tokens_per_s_per_gpu, step.inverse), around(behind, ratio)
        settings[index] = replace(
            row,
            tokens_per_s_interval=(speed[0], speed[1]),
            behind_fastest=(times[0], times[1]),
            peak_interval_gib=(row.peak_gib / half, row.peak_gib * half),
        )
    return settings


def _notes(options: TuneOptions, rows: list[TunedSetting], task: ShapeTask, posterior: Posterior) -> list[str]:
    """Say which software was priced, what the other kind would give, and what lies outside the fitted runs."""
    software = posterior.likeliest.prior.software.name
    if options.pricing.known_step:
        sentences = [posterior.sentence(), *surprises(posterior)]
    else:
        other = load_software(TYPICAL if software == TUNED else TUNED)
        compared_rows = rows[:COMPARED]
        other_seconds = [task.repriced(row, task.hardware, other.costs) for row in compared_rows]
        own_seconds = [task.repriced(row, task.hardware, task.base.software) for row in compared_rows]
        speeds = [
            row.tokens_per_s_per_gpu * own_s / other_s
            for row, own_s, other_s in zip(compared_rows, own_seconds, other_seconds, strict=True)
        ]
        best, reason = int(np.argmax(speeds)), chosen_by(options.pricing, options.kernels)
        sentences = [
            f"software: {software} ({reason}). With --software {other.name}, {compared_rows[best].name} would be the "
            f"fastest, at {speeds[best]:,.0f} tokens/s/GPU."
        ]
    sentences += population_notes(task.model, task.hardware, software)
    best_cp = options.parallel.with_words(context_parallel_size=rows[0].context_parallel_size)
    sentences += population_cautions(best_cp, options.passes.seq_length, packed=True)
    return [*sentences, *filter(None, [task.hardware.assumption()])]


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedBatch:
    """The sequences of an optimizer step on all GPUs, of which `simulate` has an EP group's share."""

    lengths: NDArray[np.int64]
    """Tokens of every sequence, prompts included."""
    words: str
    """What was done to get them, as `simulate` says it."""
    kind: str = ""
    """A value of `--batch`; empty without a trace."""

    @classmethod
    def of(cls, trace: TraceLike | None, options: TuneOptions) -> tuple[MoeModelSpec, "TunedBatch"]:
        """Return the model and the batch: drawn or recorded as `simulate` does it, or of lengths that options describe.

        Raises `InvalidInputError` for loads that are scaled: a layout search lays out sequences.
        """
        _check_batch(options.sequences)
        if trace is None:
            lengths = drawn_lengths(options)
            words = f"batch of {counted(len(lengths), 'sample', 'samples')}, {format_count(lengths.sum())} tokens"
            return named_model(options, "tune"), cls(lengths=lengths, words=words)
        source, model = open_trace_of_model(trace, options)
        sequences = options.sequences
        parts = tuple(source.parts(source.steps[-1] if sequences.step is None else sequences.step))
        recorded = np.concatenate([part.sequence_lengths for part in parts]).astype(np.int64)
        tokens = _drawn_tokens(sequences, options.parallel, recorded)
        laid_out = all(bool((part.micro_batch >= 0).all() and (part.dp_rank >= 0).all()) for part in parts)
        kind = sequences.batch or _kind_of_batch(sequences, tokens, recorded, laid_out=laid_out)
        lengths = recorded
        if kind == DRAWN:
            lengths = recorded[drawn_sequences(recorded, tokens, seed=options.planning.seed)]
        facts = {
            "num_tokens": lengths.sum(), "num_sequences": len(lengths), "num_recorded_sequences": len(recorded),
            "num_recorded_tokens": recorded.sum(),
        }  # fmt: skip
        return model.spec, cls(lengths=lengths, words=batch_words(facts, {"batch": kind}), kind=kind)


def _check_batch(sequences: SequenceOptions) -> None:
    """Raise for options that describe loads, not sequences."""
    scaled = sequences.batch == SCALED or sequences.tokens_per_rank is not None
    require(
        not scaled and sequences.ep_group_tokens is None,
        "tune packs sequences into the micro-batches of a data-parallel rank. Set --micro-batch-tokens instead of "
        "--batch scaled, --tokens-per-rank and --ep-group-tokens.",
    )


def _kind_of_batch(sequences: SequenceOptions, full_tokens: int, recorded: NDArray[np.int64], *, laid_out: bool) -> str:
    """Return the kind of batch that options without `--batch` ask for, as in `scenario`.

    `full_tokens` are those of a batch that is drawn.
    """
    if sequences.global_batch_tokens is not None or sequences.global_batch_size is not None:
        return DRAWN
    if sequences.micro_batch_tokens is None:
        return RECORDED if laid_out else DRAWN
    if int(recorded.sum()) >= full_tokens:
        return RECORDED
    return DRAWN


def _drawn_tokens(sequences: SequenceOptions, parallel: TunedParallel, recorded: NDArray[np.int64]) -> int:
    """Return the tokens of a batch that is drawn: given, else as many full micro-batches as `simulate` draws."""
    if sequences.global_batch_size is not None:
        return max(1, round(sequences.global_batch_size * float(recorded.mean())))
    slices = parallel.slices
    ranks = max(1, parallel.gpus // (slices * parallel.pipeline_model_parallel_size))
    budget = max(sequences.micro_batch_tokens or FULL_SIZE_TOKENS * slices, int(recorded.max(initial=0)))
    return sequences.global_batch_tokens or full_batch(budget * ranks)
