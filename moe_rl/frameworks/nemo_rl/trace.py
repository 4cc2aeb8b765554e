"""NeMo-RL: `routed_experts` envelopes `nrlre1:<dtype>:<S>x<L>x<K>:<base64>` in responses or message logs.

The dtype is int8, int16 or int32. An envelope has one row per token of the padded sequence. Rows 0 .. valid_length - 2
are routes. If one of these rows contains -1, its route was not captured, and the trainer's router chooses the experts.
All later rows contain 0 .. K-1 (NVIDIA-NeMo/RL:nemo_rl/utils/routed_experts_codec.py,
nemo_rl/models/generation/vllm/utils.py). This filler looks like a route, so the importer determines its first row from
`valid_length`, else from the record's token counts, else from the rows themselves. In a message log, nothing after the
last assistant message was fed to the model.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.replay.importers.json_files import each_sequence, json_head
from moe_rl.replay.importers.payloads import as_routes, from_base64, from_bytes, integer, objects, of_kind
from moe_rl.replay.importers.records import Importer, ImportOptions, RecordedSequence

MAGIC = "nrlre1"


def decode_envelope(text: object) -> NDArray[np.integer]:
    """Return the `[S, L, K]` array of one envelope (or of the older nested lists)."""
    if isinstance(text, list):
        return as_routes(text)
    fields = text.split(":", 3) if isinstance(text, str) else []
    require(
        len(fields) == 4 and fields[0] == MAGIC,
        f"routed_experts must be a string {MAGIC}:<dtype>:<S>x<L>x<K>:<base64>.",
    )
    extents = fields[2].split("x")
    require(
        len(extents) == 3 and all(extent.isdecimal() and len(extent) < 12 for extent in extents),
        f"the shape in routed_experts must be <S>x<L>x<K>, got {fields[2]!r}.",
    )
    return from_bytes(from_base64(fields[3]), fields[1], tuple(map(int, extents)))


def _recognizes(path: Path) -> bool:
    return f'"{MAGIC}:' in json_head(path)


def _read(path: Path, options: ImportOptions) -> Iterator[RecordedSequence]:
    yield from each_sequence(path, _sequences)


def _sequences(record: dict[str, Any], where: str) -> Iterator[RecordedSequence]:
    group = record.get("group_id", record.get("idx"))
    group = where if group is None else integer(group, "group_id")
    if "message_log" in record:
        routes, valid_length = _from_message_log(record["message_log"])
        yield _sequence(routes, valid_length, group, where)
        return
    for choice in objects(record.get("choices", [record]), "choices must be objects."):
        message = of_kind(choice.get("message", choice), dict, "message must be an object.")
        routes = decode_envelope(message.get("routed_experts"))
        yield _sequence(routes, _valid_length(record, message, len(routes)), group, where)


def _sequence(routes: NDArray[np.integer], valid_length: int, group: str | int, where: str) -> RecordedSequence:
    require(
        0 <= valid_length <= len(routes),
        f"valid_length is {valid_length}, but there are routes for {len(routes)} tokens.",
    )
    used = routes[:valid_length]
    valid = np.arange(len(used)) < valid_length - 1
    return RecordedSequence(routes=used, valid=valid, name=where, group=group)


def _valid_length(record: dict[str, Any], message: dict[str, Any], rows: int) -> int:
    # In the order of how sure they are; rows alone may count padding.
    for name in ("valid_length", "unpadded_sequence_length"):
        for holder in (message, record):
            if name in holder:
                return integer(holder[name], name)
    token_ids = [message.get("prompt_token_ids"), message.get("generation_token_ids")]
    if all(isinstance(ids, list) for ids in token_ids):
        return sum(len(ids) for ids in token_ids if isinstance(ids, list))
    return rows


def _from_message_log(messages: object) -> tuple[NDArray[np.integer], int]:
    """Return all rows of the conversation and how many tokens were part of the last generation."""
    log = objects(messages, "message_log must be a list of messages.")
    parts: list[NDArray[np.integer] | int] = []
    shape: tuple[int, ...] | None = None
    position = valid_length = 0
    for message in log:
        if message.get("routed_experts") is not None:
            routes = decode_envelope(message["routed_experts"])
            require(shape in (None, routes.shape[1:]), "the messages differ in the number of layers or in top-k.")
            shape = routes.shape[1:]
            parts.append(routes)
            position += len(routes)
        else:
            require(isinstance(message.get("token_ids"), list), "a message has neither routed_experts nor token_ids.")
            parts.append(len(message["token_ids"]))
            position += len(message["token_ids"])
        if message.get("role") == "assistant":
            valid_length = position
    require(shape is not None, "none of the messages has routed_experts.")
    # Messages without routes, such as a tool's answer, have tokens all the same: their rows are unknown.
    missing = [np.full((part, *(shape or ())), -1) if isinstance(part, int) else part for part in parts]
    return np.concatenate(missing), valid_length


IMPORTER = Importer(
    name="nemo-rl",
    summary="responses or message logs with nrlre1 envelopes",
    recognizes=_recognizes,
    read=_read,
)
