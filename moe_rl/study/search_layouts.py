"""`moe-rl tune`: the parallel layout that trains most tokens per second on a given number of GPUs.

Every shape is estimated as if sequences could be cut. The settings of those that may be the fastest are priced with the
lengths of a batch, laid out by `planner.packing`, and balanced routing (`shape_task`). With routes, the fastest setting
of every EP size and dispatcher is priced again, with an engine and with the levers of `moe-rl` (`shape_levers`). Ratios
to forced balance say nothing between shapes; tokens per second and GPU do.

Layouts with context parallelism (CP) are searched only if CP is needed. Published runs that pack sequences of several
lengths with CP took 5 to 16 times as long as predicted, so a few per cent that CP gains in the forecast are no reason
to use it. CP is needed if a sequence is longer than a full micro-batch of one GPU (`FULL_SIZE_TOKENS`), as all GPUs
would wait for that sequence; and if no layout without CP fits into memory. It is searched, too, if the user states its
size. If a layout with CP comes first, a warning stands above the table, with the fastest layout without CP.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_rl.config import load_cluster, load_software
from moe_rl.core.cost import Floats
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.interval import Interval
from moe_rl.core.mappings import not_none
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.software import TUNED, TYPICAL, SoftwareCosts
from moe_rl.core.topology import HardwareSpec
from moe_rl.core.trace import RoutingTrace
from moe_rl.option_groups import AUTO
from moe_rl.profiling.posterior import NORMAL_80, Posterior
from moe_rl.replay import concatenate
from moe_rl.report.size_comparison import with_moe_rl
from moe_rl.report.tuned_settings import ALIKE, SIZES, ParallelLayout, ShapeLevers, TunedSetting, fastest_lever
from moe_rl.report.tuning import Tuned
from moe_rl.simulators.setting import StepSetting
from moe_rl.study.conditions import chosen_by
from moe_rl.study.current_setting import SizeComparer, current_setting
from moe_rl.study.executors import Executor
from moe_rl.study.intervals import around
from moe_rl.study.known_steps import KnownMemory, posterior_of, priors_of, surprises
from moe_rl.study.lengths import FULL_SIZE_TOKENS
from moe_rl.study.options import RECORDED
from moe_rl.study.parallel_shapes import OF_EVERY_SIZE, estimated_speeds, next_shapes, shapes_of
from moe_rl.study.population import check_population, population_cautions, population_notes, sink_cautions
from moe_rl.study.priced_setting import levers_on_all_layers
from moe_rl.study.rl_options import TuneOptions
from moe_rl.study.scenario import Progress, open_trace_of_model
from moe_rl.study.shape_levers import SampledRoutes, ShapeSample, compared_shapes, routes_like
from moe_rl.study.shape_task import RECOMPUTE, ShapeTask
from moe_rl.study.sweep_file import finish_points
from moe_rl.study.traces import TraceLike, digest_of, open_for_model, routes_of_step
from moe_rl.study.tuned_batch import TunedBatch
from moe_rl.version import __version__

COMPARED = 40  # Settings whose interval is computed: the fastest, and the first of every EP size.

# Options that are searched where they are not given, and the part of a setting that each decides.
SEARCHED = {
    **{name: name for name in (*SIZES, "micro_batch_tokens")},
    "num_virtual_stages_per_pipeline_rank": "num_virtual_stages",
    "moe_token_dispatcher_type": "dispatcher",
    "moe_flex_dispatcher_backend": "dispatcher",
    "recompute_granularity": "recompute",
}

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedLayouts:
    """What the search has priced: settings, the fastest first."""

    rows: list[TunedSetting]
    num_layouts: int
    """Layouts that were simulated in full; the others cannot be the fastest."""
    estimates: NDArray[np.float64]
    """[shapes] estimated tokens/s/GPU, 0 where nothing fits."""

    @property
    def num_tied(self) -> int:
        """Settings that are as fast as the fastest, which counts itself."""
        least_tokens_per_s = (1 - ALIKE) * self.rows[0].tokens_per_s_per_gpu
        return sum(row.tokens_per_s_per_gpu >= least_tokens_per_s for row in self.rows)


def tune(
    trace: TraceLike | None,
    options: TuneOptions,
    *,
    executor: Executor,
    progress: Progress,
    out: Path | None = None,
    tell: Tell = lambda sentence: None,
) -> Tuned:
    """Price every setting of every shape on `options.gpus` GPUs, but for shapes that stand in the file `out`.

    Settings as fast as the fastest (`ALIKE`) come first, those with fewer kinds of parallelism before the others.
    Raises `InvalidInputError` where no setting fits into memory.
    """
    require(
        not options.current or trace is not None or options.routes_like is not None,
        "--current compares settings by routes: give a trace, or --routes-like.",
    )
    model, batch = TunedBatch.of(trace, options)
    hardware = load_cluster(options.pricing.cluster)
    check_population(options.memory)
    posterior = _posterior(options, hardware, batch.lengths)
    hardware, costs = posterior.likeliest.constants
    base = replace(options.step_setting(), software=costs)
    given = _given_parallelism(options, base)
    listed = f" with {', '.join(f'{name} {value}' for name, value in given.items())}" if given else ""
    shapes = _shapes_to_search(options, model, hardware, base, given)
    require(len(shapes) > 0, f"no parallel layout of {model.name!r} uses exactly {options.parallel.gpus} GPUs{listed}.")
    task = _shape_task(options, shapes, model, hardware, base, batch, tell)
    today = current_setting(options, task) if options.current else None

    settings = {
        "moe_rl_version": __version__,
        "trace_sha256": None if trace is None else digest_of(trace),
        "options": options.words(),
    }
    price = partial(_price_layouts, settings=settings, out=out, executor=executor, progress=progress, tell=tell)
    task, priced = _price_needed_cp(task, options, price, tell)
    if not priced.rows:
        raise InvalidInputError(
            f"{model.name!r} does not fit on {task.gpus} GPUs of {hardware.name} in any of {len(shapes)} "
            f"parallel layouts{listed}, even with full recomputation. Increase --gpus, or set "
            "--optimizer-offload-fraction."
        )

    rows, num_tied = _with_intervals(priced.rows, task, posterior, KnownMemory.of(None, 1.0)), priced.num_tied
    num_alike = sum(row.behind_fastest is not None and not row.told_apart for row in rows)
    # A simpler layout has less to go wrong, and not all of what it saves is priced: the launches of a tensor-parallel
    # group are not (GPT-OSS-20B: 5 x 24 collectives of some 25 us in a micro-batch, 0.5 % of a step of 3 s).
    rows[:num_tied] = sorted(rows[:num_tied], key=lambda row: row.num_kinds)
    sampled = _sampled_routes(trace, options, model, batch.lengths)
    levers = _levers(rows, trace, options, sampled, task, batch, progress)
    best = levers[0].setting if levers else rows[0]
    comparison = None
    if today is not None:
        if sampled is None:
            raise InvalidInputError("--current compares settings by routes, but the trace contains only counts.")
        progress("comparing with today's setting", 0, 1)
        comparer = SizeComparer(options=options, task=task, posterior=posterior, sampled=sampled, lengths=batch.lengths)
        levers_today = comparer.sample_of(today.row).levers()
        if trace is not None and options.routes_like is None:
            levers_today = _on_all_layers(levers_today, trace, options, batch, lever_of=with_moe_rl)
        comparison = comparer.compare(levers_today, levers, unstated=today.unstated)
    return Tuned(
        model=model.name, cluster=hardware.name, gpus=task.gpus, num_tokens=int(batch.lengths.sum()),
        num_sequences=len(batch.lengths), batch=batch.words, num_shapes=len(task.shapes),
        num_laid_out=priced.num_layouts, num_alike=num_alike, settings=tuple(rows), levers=levers,
        comparison=comparison,
        cautions=tuple(_cautions(options, best, task, priced)),
        notes=tuple(_notes(options, rows, task, posterior)),
    )  # fmt: skip


def _decided(options: TuneOptions) -> set[str]:
    """Return the parts of a setting that options state, so that they are not searched."""
    return {SEARCHED[name] for name in SEARCHED if options.states(name)}


def _given_parallelism(options: TuneOptions, base: StepSetting) -> dict[str, object]:
    """Return the fields of a shape that options state, with their values."""
    decided = _decided(options)
    stated = [name for name in ParallelLayout.__slots__ if name in decided]
    values = {name: getattr(base, name, None) if hasattr(base, name) else options.value_of(name) for name in stated}
    return not_none(values)


def _shapes_to_search(
    options: TuneOptions,
    model: MoeModelSpec,
    hardware: HardwareSpec,
    base: StepSetting,
    given: Mapping[str, object],
) -> tuple[ParallelLayout, ...]:
    """Return the shapes that agree with what is given, and whose dispatcher CUDA graphs can capture where they must."""
    parallel = options.parallel
    per_node = parallel.ranks_per_node or hardware.ranks_per_node
    all_shapes = shapes_of(model, hardware, parallel.gpus, per_node, parallel.expert_tensor_parallel_size)
    return tuple(
        shape
        for shape in all_shapes
        if all(value == getattr(shape, name) for name, value in given.items())
        and (not base.cuda_graph.spares_all_launches or shape.dispatcher.can_be_captured)
    )


def _shape_task(
    options: TuneOptions,
    shapes: tuple[ParallelLayout, ...],
    model: MoeModelSpec,
    hardware: HardwareSpec,
    base: StepSetting,
    batch: TunedBatch,
    tell: Tell,
) -> ShapeTask:
    """Return the work of the search; a token budget below the longest sequence is raised to it, with a sentence."""
    budget, lengths = options.sequences.micro_batch_tokens, batch.lengths
    if budget is not None and budget < lengths.max():
        tell(
            f"micro-batches have up to {lengths.max():,} tokens instead of {budget:,}, because the longest sequence "
            "is not split."
        )
        budget = int(lengths.max())
    parallel, slots = options.parallel, options.slots
    return ShapeTask(
        shapes=shapes, model=model, hardware=hardware, base=base, lengths=lengths, gpus=parallel.gpus,
        ranks_per_node=parallel.ranks_per_node or hardware.ranks_per_node,
        buffers=slots.replica_slots + 2 * slots.number_of("cross_node_slots", "moe-rl tune"),
        recompute=(base.recompute,) if "recompute" in _decided(options) else RECOMPUTE,
        layout=options.sequences.layout, packing=options.sequences.packing, micro_batch_tokens=budget,
        is_recorded=batch.kind == RECORDED,
        resident_slots=None if slots.resident_slots == AUTO else int(slots.resident_slots),
    )  # fmt: skip


def _price_needed_cp(
    task: ShapeTask, options: TuneOptions, price: Callable[[ShapeTask], PricedLayouts], tell: Tell
) -> tuple[ShapeTask, PricedLayouts]:
    """Return the task and what it priced: without layouts with CP where CP is not needed."""
    longest = int(task.lengths.max())
    is_searched = longest > FULL_SIZE_TOKENS or options.states("context_parallel_size")
    without_cp = tuple(shape for shape in task.shapes if shape.context_parallel_size == 1)
    # With a stated --seq-length lengths are not packed in the forecast, which then meets the runs with CP.
    if is_searched or options.passes.seq_length is not None or not without_cp:
        return task, price(task)
    if len(without_cp) < len(task.shapes):
        tell(
            f"layouts with context parallelism are left out, because the longest sequence has only {longest:,} tokens. "
            "To price them, set --context-parallel-size."
        )
    smaller = replace(task, shapes=without_cp)
    priced = price(smaller)
    if priced.rows:
        return smaller, priced
    return task, price(task)


def _price_layouts(
    task: ShapeTask,
    settings: Mapping[str, object],
    out: Path | None,
    *,
    executor: Executor,
    progress: Progress,
    tell: Tell,
) -> PricedLayouts:
    """Estimate all shapes, and price those in full whose estimate is not slower than the best price.

    `settings` head the file `out`; raises where it was made with others.
    """
    shapes = task.shapes
    estimates = estimated_speeds(task, executor, progress)
    num_fitting = int((estimates > 0).sum())
    tell(
        f"{len(shapes):,} parallel layouts use {task.gpus} GPUs, and {num_fitting:,} of them fit "
        "into memory. Only those that may be the fastest are simulated in full."
    )
    laid_out = dict[int, list[TunedSetting]]()
    name_of = "EP{expert_model_parallel_size}".format_map
    while chosen := next_shapes(shapes, estimates, laid_out):
        chosen_task = replace(task, shapes=tuple(shapes[index] for index in chosen))
        points = [asdict(shape) for shape in chosen_task.shapes]
        lines = finish_points(out, settings, points, chosen_task, executor, name=name_of, progress=progress, tell=tell)
        for index, line in zip(chosen, lines, strict=True):
            laid_out[index] = [TunedSetting(**row) for row in line["found"]]
    tell(
        f"{len(laid_out):,} layouts were simulated in full; {num_fitting - len(laid_out):,} were skipped, because even "
        "their estimate with divisible sequences is slower than the best setting."
    )
    rows = [row for index in sorted(laid_out) for row in laid_out[index]]
    # Of equally fast settings the one first that loses least where the framework's layout is not packed anew.
    rows.sort(key=lambda row: (-row.tokens_per_s_per_gpu, row.packing_gain))
    return PricedLayouts(rows=rows, num_layouts=len(laid_out), estimates=estimates)


def _levers(
    rows: list[TunedSetting],
    trace: TraceLike | None,
    options: TuneOptions,
    sampled: SampledRoutes | None,
    task: ShapeTask,
    batch: TunedBatch,
    progress: Progress,
) -> tuple[ShapeLevers, ...]:
    """Return what an engine and the levers bring at the shapes that they may bring in front, the fastest first.

    All are priced on a sample of layers. The one in front is priced on all of them where a trace has its own routes;
    if that brings another one in front, it is priced so, too. Empty without routes.
    """
    if sampled is None:
        return ()
    compared, shapes = compared_shapes(rows), list[ShapeLevers]()
    for index, row in enumerate(compared):
        progress(f"levers of {row.name}", index, len(compared))
        sample = ShapeSample.of(row, sampled, options, lengths=task.lengths, room=task.free_slots(row))
        shapes.append(sample.levers())
    shapes.sort(key=lambda shape: -shape.fastest)
    if trace is None or options.routes_like is not None:
        return tuple(shapes)
    while not shapes[0].command:
        progress(f"{shapes[0].setting.name} on all layers", 0, 1)
        shapes[0] = _on_all_layers(shapes[0], trace, options, batch)
        shapes.sort(key=lambda shape: -shape.fastest)
    return tuple(shapes)


def _on_all_layers(
    shape: ShapeLevers,
    trace: TraceLike,
    options: TuneOptions,
    batch: TunedBatch,
    lever_of: Callable[[Mapping[str, float]], str] = fastest_lever,
) -> ShapeLevers:
    """Return a setting's levers as `simulate` prices them, with the command that prints one of them."""
    num_tokens = int(batch.lengths.sum())
    return levers_on_all_layers(
        shape, trace=trace, options=options, num_tokens=num_tokens, batch=batch.kind, lever_of=lever_of
    )


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
    """Say which software was priced, what the other kind would give, and whether cluster and model were fitted."""
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
    if task.is_recorded:
        sentences.append(
            "peak memory is that of the recorded batch: a batch with fuller micro-batches may need more recomputation."
        )
    sentences += population_notes(task.model, task.hardware, software)
    return [*sentences, *filter(None, [task.hardware.assumption()])]


def _cautions(options: TuneOptions, best: TunedSetting, task: ShapeTask, priced: PricedLayouts) -> list[str]:
    """Return what published runs contradict of the best layout; if it has CP, also the fastest layout without."""
    parallel = options.parallel.with_words(
        context_parallel_size=best.context_parallel_size,
        expert_model_parallel_size=best.expert_model_parallel_size,
    )
    sentences = population_cautions(parallel, options.passes.seq_length, packed=True)
    is_chosen = not options.states("context_parallel_size")
    if best.context_parallel_size > 1 and is_chosen and options.passes.seq_length is None:
        other = _fastest_without_cp(task, priced)
        if other is None:
            sentences.append("no layout without context parallelism fits into memory.")
        else:
            longer = best.tokens_per_s_per_gpu / other.tokens_per_s_per_gpu - 1.0
            sentences.append(
                f"the fastest layout without context parallelism, {other.name} with {other.dispatcher} and "
                f"micro-batches of {other.micro_batch_tokens:,} tokens, changes the step time by {longer:+.1%} in the "
                "forecast with balanced routing."
            )
    return [*sentences, *sink_cautions(task.model, packed_sequences=options.kernels.packed_sequences)]


def _fastest_without_cp(task: ShapeTask, priced: PricedLayouts) -> TunedSetting | None:
    """Return the fastest setting without CP, of the `OF_EVERY_SIZE` best by estimate too; None where none fits."""
    without_cp = [
        index
        for index in np.argsort(-priced.estimates, kind="stable").tolist()
        if priced.estimates[index] > 0 and task.shapes[index].context_parallel_size == 1
    ]
    rows = [row for row in priced.rows if row.context_parallel_size == 1]
    for index in without_cp[:OF_EVERY_SIZE]:
        rows += task.settings_of(index)
    return max(rows, key=lambda row: row.tokens_per_s_per_gpu, default=None)
