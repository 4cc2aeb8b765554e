"""Megatron-LM: `router_trace_rank<r>.jsonl` files from `--moe-routing-trace-path`, with one record per router call.

A record is `{"step", "stage", "block", "layer", "rank", "num_tokens", "topk", "top_indices"}` without a micro-batch or
sequence id (NVIDIA/Megatron-LM:megatron/core/transformer/moe/router_trace.py). The k-th record of a layer within a step
belongs to micro-batch k. The tokens of one micro-batch on one rank become one sequence. With activation recomputation,
every call is recorded twice. If every record of a layer occurs exactly twice in its step, the importer drops the
repeats and logs a message; any other repetition is an error. Multi-token-prediction blocks are left out. `layer` is
numbered within a pipeline stage, so runs with pipeline parallelism need `pipeline_size`.
"""

import hashlib
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.replay.importers.json_files import json_head, json_records
from moe_rl.replay.importers.payloads import integer
from moe_rl.replay.importers.records import Importer, ImportOptions, RecordedSequence

logger = logging.getLogger(__name__)

FILE_NAME = re.compile(r"router_trace_rank(\d+)\.jsonl")
# By layer, in order of micro-batches: `[tokens, K]`.
Tables = dict[int, list[NDArray[np.integer]]]


def _recognizes(path: Path) -> bool:
    files = _files(path)
    return bool(files) and '"top_indices"' in json_head(files[0])


def _files(path: Path) -> list[Path]:
    """Return the trace files by rank."""
    if path.is_file():
        if path.suffix != ".jsonl":
            return []
        return [path]
    files = path.glob("router_trace_rank*.jsonl")
    ranks = [(int(match.group(1)), file) for file in files if (match := FILE_NAME.fullmatch(file.name))]
    return [file for _, file in sorted(ranks)]


def _read(path: Path, options: ImportOptions) -> Iterator[RecordedSequence]:
    files = _files(path)
    require(bool(files), f"{path} does not contain any file named router_trace_rank<r>.jsonl.")
    stages = options.pipeline_size
    require(
        len(files) % stages == 0,
        f"{path} has files of {len(files)} ranks, but the number of ranks must be a multiple of the number of pipeline "
        f"stages ({stages}).",
    )
    per_stage = len(files) // stages
    readers = [_steps(file) for file in files]
    # All ranks in step: one step of every rank in memory, whatever the length of the run.
    while True:
        steps: set[int] = set()
        tables: list[Tables] = []
        for reader in readers:
            for step, tables_of_rank in islice(reader, 1):
                steps.add(step)
                tables.append(tables_of_rank)
        if not tables:
            return
        require(
            len(tables) == len(readers) and len(steps) == 1,
            f"{path} is truncated: at least one of its files lacks step {min(steps)}.",
        )
        for dp_rank in range(per_stage):
            yield from _sequences(tables[dp_rank::per_stage], min(steps), dp_rank, path)


def _steps(file: Path) -> Iterator[tuple[int, Tables]]:
    """Yield (step, tables) of one rank; one step in memory at a time."""
    last_step = -1
    for step, group in groupby(_decoder_records(file), key=lambda record: integer(record["step"], "step")):
        require(
            step > last_step, f"{file} has step {step} after step {last_step}, but steps must be in ascending order."
        )
        last_step = step
        tables: Tables = defaultdict(list)
        for record in group:
            tables[integer(record["layer"], "layer")].append(record["top_indices"])
        yield step, _without_recompute(dict(tables), file, step)


def _decoder_records(file: Path) -> Iterator[dict[str, Any]]:
    for where, unchecked in json_records(file):
        record = _checked(unchecked, where)
        if record["block"] == "decoder":
            yield record


def _checked(record: dict[str, Any], where: str) -> dict[str, Any]:
    missing = {"step", "block", "layer", "num_tokens", "topk", "top_indices"} - record.keys()
    require(not missing, f"{where} lacks {', '.join(sorted(missing))}.")
    try:
        ids = np.asarray(record["top_indices"])
    except ValueError as error:
        raise InvalidInputError(f"{where}: the lists in top_indices have unequal lengths.") from error
    shape = (integer(record["num_tokens"], "num_tokens"), integer(record["topk"], "topk"))
    if shape[0] == 0 and ids.size == 0 and 0 < shape[1] < 1 << 16:
        ids = np.zeros(shape, np.int64)
    require(
        ids.shape == shape and ids.dtype.kind in "iu",
        f"{where}: top_indices must be integers of shape {list(shape)}, got {ids.dtype} {list(ids.shape)}.",
    )
    return record | {"top_indices": ids.astype(np.int32)}


def _without_recompute(tables: Tables, file: Path, step: int) -> Tables:
    """Drop the second copy of every table where a layer ran its forward pass twice."""
    tables_kept: Tables = {}
    repeated = False
    for layer, calls in tables.items():
        # A call without a token tells nothing: two of them are equal by nature.
        digests = [hashlib.blake2b(call.tobytes(), digest_size=16).digest() if len(call) else b"" for call in calls]
        times = set(Counter(digest for digest in digests if digest).values())
        require(
            times <= {1} or times == {2},
            f"{file}, step {step}, layer {layer}: some micro-batches were recorded twice and others once, so "
            "moe_rl cannot tell which records came from recomputation. Record without activation recomputation.",
        )
        seen: Counter[bytes] = Counter()
        tables_kept[layer] = []
        for call, digest in zip(calls, digests, strict=True):
            # The second of two equal tables is recompute's; with none twice every one is the first.
            if seen[digest] % 2 == 0 or times != {2}:
                tables_kept[layer].append(call)
            seen[digest] += 1
        repeated |= times == {2}
    counts_by_layer = {layer: len(calls) for layer, calls in tables_kept.items()}
    require(
        len(set(counts_by_layer.values())) <= 1,
        f"{file}, step {step}: layers have different numbers of micro-batches ({counts_by_layer}).",
    )
    if repeated:
        logger.warning(
            "%s, step %d: records repeated by activation recomputation were left out.",
            file,
            step,
        )
    return tables_kept


def _sequences(stages: list[Tables], step: int, dp_rank: int, path: Path) -> Iterator[RecordedSequence]:
    """Yield one sequence per micro-batch from the tables of all pipeline stages of one data-parallel rank."""
    columns: list[list[NDArray[np.integer]]] = []
    layer_ids: list[int] = []
    offset = 0
    for tables in stages:
        layers = sorted(tables)
        layer_ids += [offset + layer for layer in layers]
        columns += [tables[layer] for layer in layers]
        # A stage counts its layers from 0: those of the next one follow the highest that this one named.
        offset += layers[-1] + 1 if layers else 0
    require(
        len({len(calls) for calls in columns}) == 1,
        f"{path}, step {step}: the pipeline stages recorded different numbers of micro-batches.",
    )
    for number, tables_of_layers in enumerate(zip(*columns, strict=True)):
        require(
            len({table.shape for table in tables_of_layers}) == 1,
            f"{path}, step {step}, micro-batch {number}: the layers differ in the number of tokens or in top-k.",
        )
        yield RecordedSequence(
            routes=np.stack(tables_of_layers, axis=1),
            name=f"step {step}, rank {dp_rank}, micro-batch {number}",
            step=step,
            micro_batch=number,
            dp_rank=dp_rank,
            layer_ids=tuple(layer_ids),
        )


IMPORTER = Importer(
    name="megatron",
    summary="router_trace_rank<r>.jsonl of --moe-routing-trace-path",
    provenance="live",
    recognizes=_recognizes,
    read=_read,
    reads=("pipeline_size",),
)
