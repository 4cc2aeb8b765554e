"""The sequences of a step that `moe-rl tune` lays out: recorded, drawn from a trace, or as long as options say."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.model import MoeModelSpec
from moe_rl.report.units import batch_words, counted, format_count
from moe_rl.study.groups import SequenceOptions
from moe_rl.study.lengths import FULL_SIZE_TOKENS, drawn_lengths, drawn_sequences, full_batch, sequences_of_number
from moe_rl.study.options import DRAWN, RECORDED, SCALED
from moe_rl.study.rl_options import TunedParallel, TuneOptions
from moe_rl.study.scenario import named_model, open_trace_of_model
from moe_rl.study.traces import TraceLike


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
            return named_model(options, "moe-rl tune"), cls(lengths=lengths, words=words)
        source, model = open_trace_of_model(trace, options)
        sequences = options.sequences
        parts = tuple(source.parts(source.steps[-1] if sequences.step is None else sequences.step))
        recorded = np.concatenate([part.sequence_lengths for part in parts]).astype(np.int64)
        tokens = _drawn_tokens(sequences, options.parallel, recorded)
        laid_out = all(bool((part.micro_batch >= 0).all() and (part.dp_rank >= 0).all()) for part in parts)
        kind = sequences.batch or _kind_of_batch(sequences, tokens, recorded, laid_out=laid_out)
        lengths, seed = recorded, options.planning.seed
        if kind == DRAWN and sequences.global_batch_size is not None:
            lengths = recorded[sequences_of_number(recorded, sequences.global_batch_size, seed=seed)]
        elif kind == DRAWN:
            lengths = recorded[drawn_sequences(recorded, tokens, seed=seed)]
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
        "tune packs sequences into the micro-batches of a data-parallel rank. Set --micro-batch-tokens and leave "
        "out `--batch scaled`, --tokens-per-rank and --ep-group-tokens.",
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
    slices = parallel.slices
    ranks = max(1, parallel.gpus // (slices * parallel.pipeline_model_parallel_size))
    budget = max(sequences.micro_batch_tokens or FULL_SIZE_TOKENS * slices, int(recorded.max(initial=0)))
    return sequences.global_batch_tokens or full_batch(budget * ranks)
