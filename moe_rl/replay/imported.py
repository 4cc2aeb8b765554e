"""A foreign file as a trace: one pass to learn its shape and check it, then `RoutingTrace` parts on demand.

Layers are picked, -1 rows and capture holes masked, ids narrowed and checked here, once for all formats.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, located, require
from moe_rl.core.trace import RoutingTrace, require_captured_layers, require_token_axis_first
from moe_rl.replay.importers.records import Importer, ImportOptions, RecordedSequence
from moe_rl.replay.traces import MEAN_PROMPT_TOKENS, Progress, TraceSource

logger = logging.getLogger(__name__)

# Bytes of ids after which a part ends.
PART_BYTES = 64 << 20
# uint16 ids reach no further.
MAX_EXPERTS = 65_536
SAMPLED_ROWS = 20_000
# A first-layer row that fills more of a trace than this is reported: some engines return rows of their profile run.
REPEATED_ROW_SHARE = 0.25
# So many equal rows one after the other, over all layers: a token's position alone changes some of its choices.
REPEATED_RUN = 16
# Rows at the head of a sequence that tell its prompt.
HEAD_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedTrace(TraceSource):
    """Routes that a framework or engine wrote, read in place."""

    importer: Importer
    options: ImportOptions
    group_numbers: dict[str | int, int] = field(default_factory=dict)
    """group_id of every prompt group that the file names."""

    def parts(self, step: int | None = None) -> Iterator[RoutingTrace]:
        """Yield the sequences of one step (default: of all), about 64 MiB of ids at a time, every id checked."""
        self.require_step(step)
        batch: list[tuple[int, RecordedSequence]] = []
        size = 0
        for index, record in enumerate(self.importer.read(self.path, self.options)):
            if step not in (None, record.step):
                continue
            batch.append((index, record))
            size += len(record.routes) * len(self.moe_layer_ids) * self.top_k
            if size >= PART_BYTES:
                yield self._part(batch)
                batch, size = [], 0
        if batch:
            yield self._part(batch)

    def validate(self, progress: Progress | None = None) -> None:
        """Check every row once more; `progress` gets tokens done and in all."""
        done = 0
        for part in self.parts():
            done += part.num_tokens
            if progress is not None:
                progress(done, self.num_tokens)

    def _part(self, batch: list[tuple[int, RecordedSequence]]) -> RoutingTrace:
        known_groups = {None, *self.group_numbers}
        routes, valid = [], []
        for index, record in batch:
            ids, valid_rows = select_rows(record, self.options, record.at(self.path, index))
            same_shape = ids.shape[1:] == (len(self.moe_layer_ids), self.top_k)
            require(same_shape and record.group in known_groups, f"{self.path} has changed since it was opened.")
            routes.append(ids)
            valid.append(valid_rows)
        with located(self.path):
            return RoutingTrace.from_sequences(
                routes,
                valid=valid,
                num_experts=self.num_experts,
                moe_layer_ids=self.moe_layer_ids,
                provenance=self.provenance,
                model=self.model,
                whole=False,
                **self._columns(batch),
            )

    def _columns(self, batch: list[tuple[int, RecordedSequence]]) -> dict[str, NDArray[np.integer]]:
        columns: dict[str, NDArray[np.integer]] = {}
        for name in ("step", "micro_batch", "dp_rank"):
            columns[name] = np.array([getattr(record, name) for _, record in batch])
        samples, groups = [], []
        for index, record in batch:
            samples.append(index)
            if record.group is not None:
                groups.append(self.group_numbers[record.group])
            else:
                # A sequence without a named group stands alone: its number lies above those of all named groups.
                groups.append(len(self.group_numbers) + index)
        return {"sample_id": np.array(samples), "group_id": np.array(groups), **columns}


def import_trace(path: Path, importer: Importer, options: ImportOptions) -> ImportedTrace:
    """Read the file once and return it as a trace.

    Raises `InvalidInputError` for what does not parse, layers or top-k that differ between sequences, ids out of
    range, dense layers that hold routes, layers that were not captured, and a file without a route. An id that stands
    twice in a row is found when the part that holds it is read.
    """
    survey = _Survey()
    for index, record in enumerate(importer.read(path, options)):
        survey.add(record, options, record.at(path, index))
    require(survey.layer_ids is not None, f"{path} is empty: it has no sequences.")
    require(survey.num_routed > 0, f"{path} is empty: no token has a recorded route.")
    require(
        survey.highest_id < MAX_EXPERTS,
        f"{path} has expert id {survey.highest_id}, but expert ids must be 0 to {MAX_EXPERTS - 1}.",
    )
    num_experts = options.num_experts
    inferred: tuple[str, ...] = ()
    if num_experts is None:
        # At least top-k experts, even where only low ids occur.
        num_experts = 1 << (max(survey.highest_id, survey.top_k - 1)).bit_length()
        # Remembered: a copy would keep the guess, so `convert_trace` refuses to make one.
        inferred = ("num_experts",)
        logger.warning(
            "%s does not give the model's number of experts. moe_rl assumes %d, the power of two above the highest "
            "expert id (%d).",
            path,
            num_experts,
            survey.highest_id,
        )
    require(
        survey.highest_id < num_experts,
        f"{path} has expert id {survey.highest_id}, but expert ids must be 0 to {num_experts - 1}.",
    )
    layer_ids = survey.layer_ids or ()
    require_captured_layers(survey.captured, layer_ids, num_experts)
    survey.warn_of_repeated_rows(path)
    survey.warn_of_shared_heads(path)
    return ImportedTrace(
        path=path,
        format=importer.name,
        importer=importer,
        options=options,
        num_experts=num_experts,
        top_k=survey.top_k,
        moe_layer_ids=layer_ids,
        steps=tuple(survey.steps),
        num_sequences=survey.num_sequences,
        num_tokens=survey.num_tokens,
        model=options.model,
        provenance=options.provenance or importer.provenance,
        inferred_fields=inferred,
        origin=survey.origin(),
        group_numbers=survey.groups,
    )


class _Survey:
    """Facts that one pass over all sequences collects."""

    def __init__(self) -> None:
        self.layer_ids: tuple[int, ...] | None = None
        self.first_axis = 0  # Rows of the first sequence.
        self.top_k = 0
        self.highest_id = 0
        self.num_sequences = self.num_tokens = self.num_routed = 0
        self.prompt_tokens: int | None = 0  # Of all sequences; None: a sequence does not say it.
        self.captured: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.steps: dict[int, None] = {}
        self.groups: dict[str | int, int] = {}
        self._rows: Counter[bytes] = Counter()
        self._stuck: list[int] = []  # Sequences with `REPEATED_RUN` equal rows.
        self._heads: Counter[bytes] = Counter()  # The first `HEAD_ROWS` rows of sequences without a group.

    def add(self, record: RecordedSequence, options: ImportOptions, where: str) -> None:
        """Take in one sequence; raise where it does not fit to the ones before or holds impossible ids."""
        require(not record.misfit, f"{where}: {record.misfit}")
        require_token_axis_first(record.routes.shape, num_layers=options.num_layers, what=f"{where}: routes")
        layer_ids = picked_layers(record, options, where)[1]
        _check_dense_layers(record, options, where)
        top_k = record.routes.shape[2]
        if self.layer_ids is None:
            self.layer_ids, self.top_k, self.first_axis = layer_ids, top_k, len(record.routes)
            self.captured = np.zeros(len(layer_ids), np.bool_)
        # Sequences of one length each, whose numbers of layers differ: those are the tokens.
        swapped = top_k == self.top_k and len(record.routes) == self.first_axis
        hint = " If the axes are [layers, tokens, top-k], swap the first two (array.swapaxes(0, 1))."
        require(
            (self.layer_ids, self.top_k) == (layer_ids, top_k),
            f"{where} has {len(layer_ids)} layers and top-{top_k}, but earlier sequences of the file have "
            f"{len(self.layer_ids)} layers and top-{self.top_k}.{hint if swapped else ''}",
        )
        ids, valid = select_rows(record, options, where)
        routed = ids[valid]
        if routed.size:
            self.highest_id = max(self.highest_id, int(routed.max()))
            self.captured |= routed.any(axis=(0, 2))
            self._count_rows(routed)
            self._compare_rows(routed, in_group=record.group is not None)
        self.num_routed += len(routed)
        self.num_tokens += len(ids)
        if record.prompt_tokens is None or self.prompt_tokens is None:
            self.prompt_tokens = None
        else:
            self.prompt_tokens += record.prompt_tokens
        # A dictionary keeps the recorded order, which a set would lose.
        self.steps[record.step] = None
        self.num_sequences += 1
        if record.group is not None:
            self.groups.setdefault(record.group, len(self.groups))

    def origin(self) -> dict[str, str | int | float | bool]:
        """Return facts that a trace keeps beside its arrays."""
        if self.prompt_tokens is None:
            return {}
        return {MEAN_PROMPT_TOKENS: self.prompt_tokens / self.num_sequences}

    def _count_rows(self, routed: NDArray[np.integer]) -> None:
        room = SAMPLED_ROWS - self._rows.total()
        # With top-1 a hot expert repeats rows by itself.
        if room > 0 and self.top_k > 1:
            first_layer = np.ascontiguousarray(routed[:room, 0].astype(np.int32))
            self._rows.update(row.tobytes() for row in first_layer)

    def _compare_rows(self, routed: NDArray[np.integer], *, in_group: bool) -> None:
        """Look for a run of equal rows in this sequence, and for its head among the sequences before it."""
        # Top-1 of one layer repeats by itself.
        if self.top_k == 1 or len(routed) < REPEATED_RUN:
            return
        is_new = np.flatnonzero((routed[1:] != routed[:-1]).any(axis=(1, 2)))
        runs = np.diff(np.concatenate([[-1], is_new, [len(routed) - 1]]))
        if runs.max() >= REPEATED_RUN:
            self._stuck.append(self.num_sequences)
        if not in_group:
            self._heads[np.ascontiguousarray(routed[:HEAD_ROWS], np.int32).tobytes()] += 1

    def warn_of_shared_heads(self, path: Path) -> None:
        """Say so if sequences without a prompt group begin alike: samples of one prompt, which belong together."""
        shared = [count for count in self._heads.values() if count > 1]
        if shared:
            logger.warning(
                "%s: %d of %d sequences share the routes of their first %d tokens with another sequence. They appear "
                "to be samples of %d %s and to include the routes of the prompt tokens. Put the samples of each prompt "
                "into one group: set keys group<number> in an .npz file, or group_id in a record.",
                path,
                sum(shared),
                self.num_sequences,
                HEAD_ROWS,
                len(shared),
                "prompt" if len(shared) == 1 else "prompts",
            )

    def warn_of_repeated_rows(self, path: Path) -> None:
        """Say so if one row of ids makes up a large share of the first layer, or stands many times in a row."""
        if self._stuck:
            logger.warning(
                "%s: in %d of %d sequences (the first is sequence %d), at least %d consecutive tokens have the "
                "same routes in all layers. No router produces such routes: find the cause with `moe-rl replay check`.",
                path,
                len(self._stuck),
                self.num_sequences,
                self._stuck[0],
                REPEATED_RUN,
            )
        counted = self._rows.total()
        # A share of a few rows says nothing.
        if counted < 64:
            return
        row, count = self._rows.most_common(1)[0]
        if count > REPEATED_ROW_SHARE * counted:
            logger.warning(
                "%s: %d %% of the tokens have the same expert ids %s in the first MoE layer. Some rollout engines "
                "mistakenly return the routes of their profiling run. Expert loads from such a trace are wrong.",
                path,
                round(100 * count / counted),
                np.frombuffer(row, np.int32).tolist(),
            )


def picked_layers(
    record: RecordedSequence, options: ImportOptions, where: str
) -> tuple[list[int] | slice, tuple[int, ...]]:
    """Return (which recorded layers are MoE layers, their model layer numbers)."""
    recorded = record.routes.shape[1]
    ids = options.moe_layer_ids
    if options.first_k_dense is not None:
        moe = tuple(layer for layer in record.layers if layer >= options.first_k_dense)
        require(
            len(moe) > 0,
            f"all {recorded} recorded layers of {where} are dense according to first_k_dense = "
            f"{options.first_k_dense}.",
        )
        # Dense layers lead, so the MoE layers are a slice: a view, where a list of layers would copy.
        return slice(recorded - len(moe), None), moe
    if ids is None:
        return slice(None), record.layers
    if len(ids) == recorded:
        return slice(None), ids
    missing = sorted(set(ids) - set(record.layers))
    require(
        not missing,
        f"{where} has {recorded} recorded layers, but lacks {missing} of the {len(ids)} layers in moe_layer_ids.",
    )
    return [record.layers.index(layer) for layer in ids], ids


def _check_dense_layers(record: RecordedSequence, options: ImportOptions, where: str) -> None:
    """Raise where a layer that is dense by `first_k_dense` holds routes: engines leave zeros (or -1) there."""
    if options.first_k_dense is None:
        return
    valid: NDArray[np.bool_] | slice = slice(None) if record.valid is None else record.valid
    for position, layer in enumerate(record.layers):
        routed = layer < options.first_k_dense and int(record.routes[valid, position].max(initial=0)) > 0
        require(
            not routed,
            f"{where} has routes in layer {layer}, but first_k_dense = {options.first_k_dense} says that this layer "
            "is dense. Recorded layers are counted from 0.",
        )


def select_rows(
    record: RecordedSequence, options: ImportOptions, where: str
) -> tuple[NDArray[np.integer], NDArray[np.bool_]]:
    """Return (ids of the MoE layers, which rows hold a route); rows of -1 and known filler do not."""
    ids = record.routes[:, picked_layers(record, options, where)[0]]
    valid = np.ones(len(ids), np.bool_) if record.valid is None else record.valid
    if ids.dtype.kind == "i" and ids.size and int(ids.min()) < 0:
        missing = (ids == -1).all(axis=(1, 2))
        valid = valid & ~missing
        negative = (ids < 0).any(axis=(1, 2)) & valid
        if negative.any():
            row = int(np.argmax(negative))
            raise InvalidInputError(f"{where} has the negative expert id {int(ids[row].min())} at token {row}.")
    if ids.shape[2] > 1 and ids.size:
        # Experts of a token differ: with K > 1 a row of zeros in every layer cannot be a route.
        holes = valid & ~ids.any(axis=(1, 2))
        if holes.any() and options.mask_capture_holes:
            valid = valid & ~holes
        # All rows zero is a layer that was not captured, which has a better sentence.
        elif holes.any() and not holes[valid].all():
            raise InvalidInputError(
                f"{where}: the rollout engine did not record the routes of {int(holes.sum())} of {int(valid.sum())} "
                f"tokens (first: token {int(np.argmax(holes))}). Their expert ids are all 0. Exclude these tokens "
                "(--mask-capture-holes) or record the rollout again."
            )
    return ids, valid
