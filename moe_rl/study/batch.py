"""One step of a trace, cut into micro-batches and counted: the loads that every policy has to balance.

S sequences, L MoE layers, E experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.draw import DrawnSequences, StepPart
from moe_rl.core.errors import require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad, expected_pairs
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.reduce import Filler, reduce_load
from moe_rl.core.routes import RouteSample
from moe_rl.core.schedules import framework_layout, may_be_padded, with_rule
from moe_rl.core.sequence_load import SequenceLoad, known_tokens, load_of_sequences, sums_per_cell
from moe_rl.core.topology import ClusterTopology
from moe_rl.core.trace import RoutingTrace, SequenceCounts
from moe_rl.replay import count_sequences
from moe_rl.study.groups import KnowledgeOptions
from moe_rl.study.options import SimulationOptions

MOST_KEPT_BYTES = 1 << 27
"""Of the loads of layouts, for searches and prices that ask for few, and often: counting 235B (94 layers, 1.3 M
tokens) takes 0.8 s. With all of them kept, all policies of the DAPO recipe (122,880 sequences, 16 layers) took 885 MB
instead of 744."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step of the trace under a layout, as loads."""

    step: int
    parts: tuple[StepPart, ...]
    lengths: NDArray[np.int64]
    """[S] rows of every sequence."""
    layout: BatchLayout
    load: StepLoad
    recorded_tokens_per_rank: float
    """Mean tokens of a source rank in a micro-batch that has any, before scaling."""
    unrouted_tokens: int
    load_of_layout: Callable[[BatchLayout], StepLoad]
    """Counts the same sequences again under another layout."""
    known: tuple[StepPart, ...]
    """`parts` without the routes that are not known: the loads of these are expected ones."""
    known_of_layout: Callable[[BatchLayout], tuple[StepLoad, NDArray[np.int64]]]
    """The load of the known routes alone under a layout, and [G, M, P] all tokens, rows without a route included."""

    @property
    def num_tokens(self) -> int:
        """Rows of the step, rows without a route included."""
        return int(self.lengths.sum())

    def sequence_load(self) -> SequenceLoad:
        """Return the token-expert pairs of every sequence; refuse a batch whose counts need more than 4 GB."""
        known_load = load_of_sequences(self.known)
        if self.known is self.parts:
            return known_load
        told_tokens = known_tokens(self.known)
        missing_tokens = known_tokens(self.parts) - told_tokens
        # Sequences that share a row of counts are told alike: the first one of a row speaks for all of them.
        _, first_of_row = np.unique(known_load.row, return_index=True)
        all_pairs = sums_per_cell(known_load.counts, known_load.row, np.zeros_like(known_load.row), 1)
        # A sequence of which something is known goes on as it does.
        total = np.where(known_load.counts.any(axis=2, keepdims=True), known_load.counts, all_pairs)
        expected = expected_pairs(missing_tokens[first_of_row][:, None, None], total, self.load.top_k)[:, :, 0]
        return replace(known_load, counts=known_load.counts + expected)


def cut_step(
    step: int,
    parts: Sequence[StepPart],
    options: SimulationOptions,
    topology: ClusterTopology,
    model: MoeModelSpec,
    *,
    as_planners_know_it: bool = False,
) -> Batch:
    """Lay out the sequences of one step and count its loads; raises where no row of the step holds a route.

    As planners know it, the routes of some sequences or tokens, drawn by the options' seed, are hidden: their loads are
    the ones to expect (`StepLoad.completed`).
    """

    def recorded(layout: BatchLayout) -> StepLoad:
        load = reduce_load(visible, layout=layout, topology=topology, filler=options.sequences.filler)
        if visible is not every:
            reduced = reduce_load(parts, layout=layout, topology=topology, filler=options.sequences.filler)
            load = load.completed(reduced.tokens, of_known_sequences=not options.knowledge.unknown_routes)
        # The same drawn tokens under every layout: layouts differ in cells alone, not in the sample.
        if drawn is None:
            return load
        return replace(load, routes=drawn.under(layout, lengths, topology))

    def scaled(load: StepLoad) -> StepLoad:
        if options.sequences.tokens_per_rank is None:
            return load
        return load.scaled_to(options.sequences.tokens_per_rank)

    def known_alone(layout: BatchLayout) -> tuple[StepLoad, NDArray[np.int64]]:
        if not unrouted and visible is every:
            return load_of(layout), load_of(layout).tokens
        load = scaled(reduce_load(visible, layout=layout, topology=topology, filler=options.sequences.filler))
        # A certificate bounds what unknown routes may do, so it needs every row as a token, with or without a route.
        return load, reduce_load(parts, layout=layout, topology=topology, filler=Filler.EXPERT_ZERO).tokens

    loads: dict[bytes, StepLoad] = {}
    """Of the layouts that were asked for last, the latest at the end."""

    def load_of(layout: BatchLayout) -> StepLoad:
        key = np.stack([layout.micro_batch, layout.dp_rank, layout.order]).tobytes()
        load = loads.pop(key, None)
        if load is None:
            while loads and (len(loads) + 1) * next(iter(loads.values())).pairs.nbytes > MOST_KEPT_BYTES:
                del loads[next(iter(loads))]
            load = scaled(recorded(layout))
        loads[key] = load
        return load

    lengths = lengths_of(parts)
    every = tuple(parts)
    if as_planners_know_it:
        visible = _known(every, lengths, options.knowledge, seed=options.planning.seed)
    else:
        visible = every
    unrouted = sum(map(_unrouted, parts))
    layout = _layout(lengths, parts, options, topology, model)
    drawn = RouteSample.drawn(visible, layout=layout, topology=topology)
    load = recorded(layout)
    running_tokens = load.tokens[load.tokens.sum(axis=2) > 0]
    require(running_tokens.size > 0, f"step {step} of the trace is empty: no token has a recorded route.")
    return Batch(
        step=step,
        parts=every,
        lengths=lengths,
        layout=layout,
        load=scaled(load),
        recorded_tokens_per_rank=float(running_tokens.mean()),
        unrouted_tokens=unrouted,
        load_of_layout=load_of,
        known=visible,
        known_of_layout=known_alone,
    )


def lengths_of(parts: Sequence[StepPart]) -> NDArray[np.int64]:
    """Return [S] tokens of every sequence of a step."""
    return np.concatenate([part.sequence_lengths for part in parts]).astype(np.int64)


def counts_of(part: RoutingTrace | SequenceCounts) -> SequenceCounts:
    """Return the counts of every sequence of a recorded part, which may hold nothing else."""
    if isinstance(part, SequenceCounts):
        return part
    return count_sequences(part)


def _known(
    parts: tuple[StepPart, ...], lengths: NDArray[np.int64], knowledge: KnowledgeOptions, *, seed: int
) -> tuple[StepPart, ...]:
    """Return the parts without the routes that `--unknown-routes` and `--unknown-pairs` hide."""
    rng, parts_kept = np.random.default_rng(seed), list[StepPart]()
    hidden = np.zeros(len(lengths), np.bool_)
    hidden[rng.permutation(len(lengths))[: round(knowledge.unknown_routes * len(lengths))]] = True
    start = 0
    for part in parts:
        is_hidden = hidden[start : start + len(part.sequence_lengths)]
        start += len(is_hidden)
        # The same sequences and tokens for the same seed, whatever the layout: a plan may ask again under its own.
        if _has_routes(part):
            is_hidden_row = np.repeat(is_hidden, part.sequence_lengths)
            if knowledge.unknown_pairs:
                is_hidden_row |= rng.random(len(is_hidden_row)) < knowledge.unknown_pairs
            parts_kept.append(_without_rows(part, is_hidden_row))
        else:
            require(
                knowledge.unknown_pairs == 0,
                "--unknown-pairs hides the routes of tokens, but the trace contains only counts.",
            )
            parts_kept.append(_without_sequences(part, is_hidden))
    return tuple(parts_kept)


def _has_routes(part: StepPart) -> bool:
    recorded = part.recorded if isinstance(part, DrawnSequences) else part
    return isinstance(recorded, RoutingTrace)


def _without_rows(part: StepPart, is_hidden: NDArray[np.bool_]) -> StepPart:
    """Return a part with routes of which planners are not told the rows `is_hidden` [T]."""
    if isinstance(part, DrawnSequences):
        return replace(part, visible=~is_hidden)
    assert isinstance(part, RoutingTrace)
    return replace(part, valid=part.valid & ~is_hidden)


def _without_sequences(part: StepPart, is_hidden: NDArray[np.bool_]) -> StepPart:
    """Return a part with counts of which planners are not told the sequences `is_hidden` [S]."""
    if isinstance(part, DrawnSequences):
        assert isinstance(part.recorded, SequenceCounts)
        recorded_numbers = np.arange(part.recorded.num_sequences)
        # Every recorded sequence once as it is and once hidden, so that drawn ones still share their counts.
        twice = part.recorded.select(np.concatenate([recorded_numbers, recorded_numbers]))
        hidden_twin = np.repeat([False, True], len(recorded_numbers))
        numbers = part.numbers + len(recorded_numbers) * is_hidden
        return DrawnSequences(recorded=_hidden(twice, hidden_twin), numbers=numbers)
    assert isinstance(part, SequenceCounts)
    return _hidden(part, is_hidden)


def _hidden(part: SequenceCounts, is_hidden: NDArray[np.bool_]) -> SequenceCounts:
    """Return counts without those of the sequences `is_hidden` [S], whose tokens stay."""
    counts = np.where(is_hidden[:, None, None], 0, part.tokens_per_expert).astype(part.tokens_per_expert.dtype)
    visible = np.where(is_hidden, 0, part.num_valid_tokens)
    return replace(part, tokens_per_expert=counts, num_valid_tokens=visible)


def _unrouted(part: StepPart) -> int:
    if isinstance(part, SequenceCounts):
        return int((part.num_tokens - part.num_valid_tokens).sum())
    if isinstance(part, RoutingTrace):
        return int((~part.valid).sum())
    return int((part.sequence_lengths - part.num_valid_tokens()).sum())


def _layout(
    lengths: NDArray[np.int64],
    parts: Sequence[StepPart],
    options: SimulationOptions,
    topology: ClusterTopology,
    model: MoeModelSpec,
) -> BatchLayout:
    sequences = options.sequences
    laid_out = sequences.micro_batch_tokens is not None and sequences.ep_group_tokens is None
    require(
        not sequences.padding_samples or (laid_out and may_be_padded(sequences.layout, sequences.packing)),
        f"--padding-samples {sequences.padding_samples} has no effect: padding samples are used only with "
        "`--layout verl --packing run`.",
    )
    if options.sequences.ep_group_tokens is not None:
        return BatchLayout.ep_group(lengths, token_budget=options.sequences.ep_group_tokens, seed=options.planning.seed)
    if options.sequences.micro_batch_tokens is not None:
        virtual = options.parallel.num_virtual_stages_per_pipeline_rank > 1
        layout = framework_layout(
            options.sequences.layout,
            lengths,
            num_dp_ranks=topology.num_dp_ranks,
            token_budget=options.sequences.micro_batch_tokens,
            multiple_of=options.parallel.pipeline_model_parallel_size if virtual else 1,
            model=model,
        )
        return with_rule(layout, sequences.layout, sequences.packing, padding_samples=sequences.padding_samples)
    return BatchLayout.recorded(
        np.concatenate([part.micro_batch for part in parts]),
        np.concatenate([part.dp_rank for part in parts]),
        num_dp_ranks=topology.num_dp_ranks,
    )
