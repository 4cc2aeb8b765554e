"""prime-rl: the batches that its filesystem transport writes under `step_<n>/`, and routes as JSON.

Files contain msgspec structs, encoded as MessagePack arrays: `rank_<r>.bin` contains a list of `MicroBatch`, and
`rollouts.bin` contains a `TrainingBatch`, whose first field is the list of `TrainingSample`. Fields differ between
versions, so the importer finds them by their contents. `RoutedExperts` is `[data, shape, dtype]`. `data` contains
uint8, uint16 or int16 ids (shape `[rows, layers, K]`), or int32 ids followed by their float32 combine weights (shape
`[rows, layers, 2 K]`). The first list of a struct holds its token ids; older samples start with prompt_ids, prompt_mask
and completion_ids. `position_ids` of a micro-batch restart at 0 in each packed sequence (PrimeIntellect-ai/prime-rl:
src/prime_rl/transport/types.py and trainer/batch.py).

The last token of a sequence has no route: its row is missing or all zeros. The importer leaves out the padding of a
micro-batch: the tokens with id 1 at its end.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, located, require
from moe_rl.replay.importers.json_files import each_sequence, json_head
from moe_rl.replay.importers.payloads import WIRE_DTYPES, from_base64, from_bytes, from_messagepack, integer, of_kind
from moe_rl.replay.importers.records import Importer, ImportOptions, RecordedSequence, prompt_key, sequence_of_tokens
from moe_rl.routes.weights import are_packed, split_packed

PADDING_TOKEN = 1
JSON_ROUTES = re.compile(r'"routed_experts"\s*:\s*\{')


def _recognizes(path: Path) -> bool:
    return bool(_files(path)) or JSON_ROUTES.search(json_head(path)) is not None


def _read(path: Path, options: ImportOptions) -> Iterator[RecordedSequence]:
    files = _files(path)
    for file in files:
        with located(file):
            yield from _read_batch(file)
    if not files:
        yield from each_sequence(path, _from_json)


def _files(path: Path) -> list[Path]:
    """Return the batch files under a path by (step, rank)."""
    if path.is_file():
        if path.suffix != ".bin":
            return []
        return [path]
    return sorted(
        (*path.glob("*.bin"), *path.glob("step_*/*.bin")), key=lambda file: (_number(file.parent), _number(file))
    )


def _number(path: Path) -> int:
    match = re.search(r"_(\d+)$", path.stem)
    if not match:
        return 0
    return int(match.group(1))


def _read_batch(file: Path) -> Iterator[RecordedSequence]:
    document = from_messagepack(file.read_bytes())
    require(isinstance(document, list), "the file contains neither a list of micro-batches nor a training batch.")
    step = _number(file.parent)
    if not file.stem.startswith("rank_") and len(document) > 0 and isinstance(document[0], list):
        for index, sample in enumerate(document[0]):
            yield _from_sample(sample, f"example {index}", step)
        return
    for number, micro_batch in enumerate(document):
        yield from _from_micro_batch(micro_batch, number, _number(file), step)


def _from_sample(sample: object, name: str, step: int) -> RecordedSequence:
    routes = _routes_of(sample, name)
    fields: list[Any] = sample  # type: ignore[assignment]
    old_form = len(fields) > 2 and _holds(fields[2], int) and _holds(fields[1], bool)
    num_tokens = len(fields[0]) + (len(fields[2]) if old_form else 0)
    group = prompt_key(fields[0]) if old_form else None
    return _sequence(routes, num_tokens=num_tokens, name=name, group=group, step=step)


def _from_micro_batch(fields: object, number: int, dp_rank: int, step: int) -> Iterator[RecordedSequence]:
    routes = _routes_of(fields, f"micro-batch {number}")
    token_ids, position_ids = fields[0], _position_ids(fields)  # type: ignore[index]
    require(position_ids is not None, f"micro-batch {number} lacks position_ids.")
    starts = [index for index, position in enumerate(position_ids or []) if position == 0]
    stops = [*starts[1:], len(token_ids)]
    # One sequence of padding tokens alone at the end is what fills the micro-batch.
    if len(starts) > 1 and set(token_ids[starts[-1] :]) == {PADDING_TOKEN}:
        starts, stops = starts[:-1], stops[:-1]
    for index, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        place = {"step": step, "micro_batch": number, "dp_rank": dp_rank}
        yield _sequence(routes[start:stop], num_tokens=stop - start, name=f"{number}.{index}", **place)


def _sequence(routes: NDArray[np.integer], **facts: Any) -> RecordedSequence:
    ids, weights = _split(routes)
    return sequence_of_tokens(ids, combine_weights=weights, **facts)


def _split(routes: NDArray[np.integer]) -> tuple[NDArray[np.integer], NDArray[np.floating] | None]:
    """Return (ids, combine weights or None) of routes as they were sent."""
    if are_packed(routes):
        return split_packed(routes)
    return (routes, None)


def _routes_of(fields: object, name: str) -> NDArray[np.integer]:
    require(
        isinstance(fields, list) and bool(fields) and _holds(fields[0], int),
        f"{name} does not start with token ids.",
    )
    for field in fields:  # type: ignore[attr-defined]
        match field:
            case [bytes() as data, [int(rows), int(layers), int(top_k)], str(dtype)] if dtype in WIRE_DTYPES:
                return from_bytes(data, dtype, (rows, layers, top_k))
            case {"data": bytes() as data, "shape": [int(rows), int(layers), int(top_k)], **rest}:
                return from_bytes(data, str(rest.get("dtype", "int16")), (rows, layers, top_k))
    raise InvalidInputError(f"{name} lacks routed_experts: set trainer.enable_router_replay.")


def _position_ids(fields: Any) -> list[int] | None:
    """Return the field with one position per token: 0, 1, 2, ... anew for every sequence."""
    length = len(fields[0])
    for field in fields[1:]:
        if _holds(field, int) and len(field) == length and length and field[0] == 0:
            # Positions rise by one or start anew at 0; a mask, or labels, do neither.
            steps = np.diff(np.asarray(field, np.int64))
            if bool(((steps == 1) | (np.asarray(field[1:]) == 0)).all()) and (length == 1 or bool((steps == 1).any())):
                return list(field)
    return None


def _holds(field: object, kind: type) -> bool:
    """Return whether a field is a list of numbers alone, or of flags alone (a flag is no number)."""
    return isinstance(field, list) and all(type(item) is kind for item in field)


def _from_json(record: dict[str, Any], where: str) -> Iterator[RecordedSequence]:
    """Yield one sequence: base64 `data`, `shape`, `dtype` and `start` of its routes, and its token ids."""
    fields = of_kind(record.get("routed_experts"), dict, "routed_experts is missing.")
    sentence = "the shape of routed_experts must have three dimensions."
    extents = tuple(integer(extent, "an extent") for extent in of_kind(fields.get("shape"), list, sentence))
    require(len(extents) == 3, sentence)
    routes = from_bytes(from_base64(fields.get("data")), str(fields.get("dtype", "int16")), extents)
    token_ids = record.get("token_ids")
    prompt_ids, completion_ids = record.get("prompt_ids"), record.get("completion_ids")
    group = None
    if isinstance(token_ids, list):
        num_tokens = len(token_ids)
    elif isinstance(prompt_ids, list) and isinstance(completion_ids, list):
        num_tokens, group = len(prompt_ids) + len(completion_ids), prompt_key(prompt_ids)
    else:
        ids, weights = _split(routes)
        yield RecordedSequence(routes=ids, combine_weights=weights, name=where)
        return
    start = integer(fields.get("start", 0), "start")
    yield _sequence(routes, num_tokens=num_tokens, first_row=start, name=where, group=group)


IMPORTER = Importer(
    name="prime-rl",
    summary="step_<n>/rank_<r>.bin or rollouts.bin, or JSON with data, shape and dtype",
    recognizes=_recognizes,
    read=_read,
)
