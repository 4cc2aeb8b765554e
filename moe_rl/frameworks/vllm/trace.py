"""vLLM: `routed_experts` of responses, or one array saved as .npy.

The array has shape `[rows, num_hidden_layers, K]` and dtype uint8 (up to 256 experts) or uint16. It is stored as a .npy
file, as nested lists, or as the base64 of .npy bytes. It has one row per prompt token from
`routed_experts_prompt_start` on, then one per generated token that was fed back to the model. In total, there are
`P + N - 1 - start` rows for P prompt and N generated tokens, because the last token is never fed back. Some versions
send the prompt's rows separately, as `prompt_routed_experts`. For dense layers and missing routes, the ids are zeros
(vllm-project/vllm:vllm/outputs.py, vllm/model_executor/layers/fused_moe/routed_experts_capturer.py,
vllm/entrypoints/openai/).
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.core.errors import located, require
from moe_rl.replay.importers.json_files import each_sequence, json_head
from moe_rl.replay.importers.payloads import NPY_BASE64_START, as_routes, from_npy, integer, objects, of_kind
from moe_rl.replay.importers.records import Importer, ImportOptions, RecordedSequence, prompt_key, sequence_of_tokens

NESTED_LISTS = re.compile(r"\[\s*\[\s*\[")


def _recognizes(path: Path) -> bool:
    if path.suffix.lower() == ".npy":
        return True
    head = json_head(path)
    if "routed_experts" not in head:
        return False
    return NPY_BASE64_START in head or ('"choices"' in head and NESTED_LISTS.search(head) is not None)


def _read(path: Path, options: ImportOptions) -> Iterator[RecordedSequence]:
    if path.suffix.lower() == ".npy":
        with located(path):
            array = from_npy(path.read_bytes())
            routes = as_routes(array[:, None] if array.ndim == 2 else array)  # [tokens, K] is of one layer
        yield RecordedSequence(routes=routes, name=path.stem)
    else:
        yield from each_sequence(path, _sequences)


def _sequences(record: dict[str, Any], where: str) -> Iterator[RecordedSequence]:
    choices = objects(record.get("choices", [record]), "choices must be objects.")
    usage = of_kind(record.get("usage") or {}, dict, "usage must be an object.")
    for choice in choices:
        routes = choice.get("routed_experts")
        prompt_routes = choice.get("prompt_routed_experts", record.get("prompt_routed_experts"))
        require(
            routes is not None or prompt_routes is not None,
            "routed_experts is missing: start vLLM with enable_return_routed_experts.",
        )
        # An empty list has no shape: a response of one token has no generated rows.
        parts = [as_routes(part) for part in (prompt_routes, routes) if part is not None and part != []]
        require(len(parts) > 0, "routed_experts is empty.")
        require(
            len({part.shape[1:] for part in parts}) == 1,
            "the routes of the prompt and of the generated tokens differ in the number of layers or in top-k.",
        )
        prompt_ids = choice.get("prompt_token_ids", record.get("prompt_token_ids"))
        prompt = _length(prompt_ids, usage.get("prompt_tokens"))
        # `usage` counts the tokens of all choices together.
        generated = _length(choice.get("token_ids"), usage.get("completion_tokens") if len(choices) == 1 else None)
        place: dict[str, Any] = {"name": str(record.get("id", where)), "group": _group(record, prompt_ids, where)}
        if prompt is None or generated is None:
            yield RecordedSequence(routes=np.concatenate(parts), prompt_tokens=prompt, **place)
            continue
        place["prompt_tokens"] = prompt
        start = integer(record.get("routed_experts_prompt_start", 0), "routed_experts_prompt_start")
        yield sequence_of_tokens(np.concatenate(parts), num_tokens=prompt + generated, first_row=start, **place)


def _length(token_ids: object, count: object) -> int | None:
    if isinstance(token_ids, list):
        return len(token_ids)
    if count is None:
        return None
    return integer(count, "a token count")


def _group(record: dict[str, Any], prompt_ids: object, where: str) -> str | int:
    """Return what marks the prompt: a given group, the prompt's tokens, or the response itself."""
    if "group_id" in record:
        return integer(record["group_id"], "group_id")
    if isinstance(prompt_ids, list):
        return prompt_key(prompt_ids)
    return where


IMPORTER = Importer(
    name="vllm",
    summary="responses with routed_experts as .npy bytes, or one .npy array",
    recognizes=_recognizes,
    read=_read,
)
