"""SGLang: `meta_info["routed_experts"]` of responses, or `sglext.routed_experts` of its OpenAI-compatible server.

The routes are base64-encoded int32 ids in C order. Their shape is
`[prompt + generated - 1 - routed_experts_start_len, num_hidden_layers, K]`. The response does not contain it: set
`num_layers`, `top_k` or both. The ids of dense layers are zeros, and the last token has no row
(sgl-project/sglang:python/sglang/srt/state_capturer/routed_experts.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from moe_rl.core.errors import InvalidInputError, located, require
from moe_rl.replay.importers.json_files import each_sequence, json_head, json_records
from moe_rl.replay.importers.payloads import from_base64, from_bytes, integer, objects
from moe_rl.replay.importers.records import Importer, ImportOptions, RecordedSequence, sequence_of_tokens


def _recognizes(path: Path) -> bool:
    head = json_head(path)
    return ('"meta_info"' in head or '"sglext"' in head) and '"routed_experts"' in head


def _read(path: Path, options: ImportOptions) -> Iterator[RecordedSequence]:
    shape_of_file = cache(partial(_with_shape_of_rows, path, options))

    def sequences(record: dict[str, Any], where: str) -> Iterator[RecordedSequence]:
        for choice in _choices(record):
            yield _sequence(choice, record, options, shape_of_file, where)

    yield from each_sequence(path, sequences)


def _choices(record: dict[str, Any]) -> list[dict[str, Any]]:
    return objects(record.get("choices", [record]), "choices must be objects.")


def _with_shape_of_rows(path: Path, options: ImportOptions) -> ImportOptions:
    """Return the options with the numbers of layers and choices of the file's first response that has rows."""
    for where, record in json_records(path):
        with located(where):
            for choice in _choices(record):
                sequence = _sequence(choice, record, options, lambda: options, where)
                if sequence.valid is not None and sequence.valid.any():
                    return replace(options, num_layers=sequence.routes.shape[1], top_k=sequence.routes.shape[2])
    return options


def _sequence(
    choice: dict[str, Any],
    record: dict[str, Any],
    options: ImportOptions,
    shape_of_file: Callable[[], ImportOptions],
    where: str,
) -> RecordedSequence:
    meta = _meta(choice, record)
    require(
        meta.get("routed_experts") is not None,
        "routed_experts is missing: start SGLang with --enable-return-routed-experts, and set "
        "return_routed_experts in the requests.",
    )
    prompt_tokens = integer(meta.get("prompt_tokens"), "prompt_tokens")
    num_tokens = prompt_tokens + integer(meta.get("completion_tokens"), "completion_tokens")
    name = "routed_experts_start_len"
    start = integer(meta.get(name, record.get(name, 0)), name)
    data = from_base64(meta["routed_experts"])
    rows = num_tokens - 1 - start
    require(
        start >= 0 and rows >= 0, f"the routes begin at token {start}, but the request has only {num_tokens} tokens."
    )
    if not data:
        rows = 0
    if rows == 0 and (options.num_layers is None) != (options.top_k is None):
        options = shape_of_file()  # without rows, this response does not show the number that no option states
    if options.num_layers is not None and options.top_k is not None:
        num_layers, top_k = options.num_layers, options.top_k
        num_rows = len(data) // (4 * num_layers * top_k)  # rows that do not fit the tokens are a misfit of the sequence
        if 4 * num_rows * num_layers * top_k == len(data):
            rows = num_rows
    num_layers, top_k = _layers_and_choices(len(data) // 4, rows, options)
    routes = from_bytes(data, "int32", (rows, num_layers, top_k))
    group = record.get("group_id", record.get("group_index"))
    return sequence_of_tokens(
        routes,
        num_tokens=num_tokens,
        prompt_tokens=prompt_tokens,
        first_row=start,
        name=str(meta.get("id", where)),
        group=None if group is None else integer(group, "group_id"),
    )


def _meta(choice: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Return what the engine says of one response: its `meta_info`, or `sglext` and `usage` of the OpenAI server."""
    meta, extension, usage = choice.get("meta_info", record.get("meta_info")), record.get("sglext"), record.get("usage")
    if isinstance(meta, dict):
        return meta
    if isinstance(extension, dict) and isinstance(usage, dict):
        return usage | extension
    raise InvalidInputError("the response must contain either meta_info, or both sglext and usage.")


def _layers_and_choices(num_ids: int, rows: int, options: ImportOptions) -> tuple[int, int]:
    """Return (L, K) from the options and the number of ids per row."""
    num_layers, top_k = options.num_layers, options.top_k
    require(
        num_layers is not None or top_k is not None,
        "SGLang's routes do not contain their shape: set --num-layers (all hidden layers) or --moe-router-topk.",
    )
    if rows:
        per_row = num_ids // rows
    else:
        per_row = (num_layers or 1) * (top_k or 1)
    num_layers = num_layers or max(1, per_row // (top_k or 1))
    top_k = top_k or max(1, per_row // num_layers)
    require(
        rows * num_layers * top_k == num_ids,
        f"{num_ids} expert ids cannot be the routes of {rows} tokens x {num_layers} layers x top-{top_k}: "
        "--num-layers or --moe-router-topk is wrong.",
    )
    return num_layers, top_k


IMPORTER = Importer(
    name="sglang",
    summary="responses with meta_info.routed_experts (base64 int32)",
    recognizes=_recognizes,
    read=_read,
)
