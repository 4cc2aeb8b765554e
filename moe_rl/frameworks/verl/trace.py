"""verl: the tensors of a `DataProto` batch in a `.pt` (`torch.save(dict(data.batch), path)`) or `.npz` file.

`routed_experts` is `[batch, prompt + response, layers, K]` with the prompt left-padded, so `attention_mask`
`[batch, prompt + response]` says which rows belong to the sequence. The rows of padding and of the final token, which
has no route, are zeros. Jagged data is a list of `[tokens, layers, K]` arrays. Each array ends with the final token's
row of zeros, unless `input_ids` has one more token than the array
(verl-project/verl:verl/experimental/agent_loop/agent_loop.py, verl/utils/megatron/router_replay_utils.py). Optional
tensors: `uid` (prompt group) and `global_steps`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, located, require
from moe_rl.core.pages import drop_pages
from moe_rl.replay.importers.npz import npz_arrays, npz_keys
from moe_rl.replay.importers.payloads import as_routes, integer
from moe_rl.replay.importers.records import Importer, ImportOptions, RecordedSequence, sequence_of_tokens
from moe_rl.replay.importers.torch_file import Opaque, load_torch_file

# Position in the batch, routes of the sequence, its tokens.
Row = tuple[int, NDArray[np.integer], int]


def _recognizes(path: Path) -> bool:
    if path.suffix.lower() == ".npz":
        return "routed_experts" in npz_keys(path)
    return path.is_file() and path.suffix.lower() in (".pt", ".pth") and _batch(load_torch_file(path, verify=False))


def _batch(document: object) -> bool:
    return isinstance(document, dict) and "routed_experts" in document


def _read(path: Path, options: ImportOptions) -> Iterator[RecordedSequence]:
    batch: Any = dict(npz_arrays(path)) if path.suffix.lower() == ".npz" else load_torch_file(path)
    require(_batch(batch), f"{path} is not a verl batch: it has no routed_experts.")
    routes = batch["routed_experts"]
    if isinstance(routes, Opaque):
        raise InvalidInputError(
            f"{path}: routed_experts is a nested tensor. Save the list of its parts instead: [part for part in "
            "routed_experts.unbind()]."
        )
    step = integer(batch.get("global_steps", 0), "global_steps")
    groups = _groups(batch)
    with located(path):
        if isinstance(routes, np.ndarray):
            rows = _padded(batch, routes)
        else:
            rows = _jagged(batch, routes)
        for index, ids, num_tokens in rows:
            if groups is not None and index < len(groups):
                group = groups[index]
            else:
                group = None
            yield sequence_of_tokens(ids, num_tokens=num_tokens, name=str(index), group=group, step=step)


def _groups(batch: dict[str, Any]) -> list[str] | None:
    uid = batch.get("uid")
    if not isinstance(uid, list | np.ndarray):
        return None
    return [str(value) for value in uid]


def _padded(batch: dict[str, Any], routes: NDArray[Any]) -> Iterator[Row]:
    mask = batch.get("attention_mask")
    require(
        routes.ndim == 4 and routes.dtype.kind in "iu",
        f"routed_experts must be integers of shape [batch, tokens, layers, top-k], got {routes.dtype} "
        f"{list(routes.shape)}.",
    )
    if not isinstance(mask, np.ndarray) or mask.shape != routes.shape[:2]:
        raise InvalidInputError(
            "routed_experts needs an attention_mask of shape [batch, tokens] that marks the padding."
        )
    for index, (ids, is_token) in enumerate(zip(routes, mask.astype(np.bool_), strict=True)):
        positions = np.flatnonzero(is_token)
        if not len(positions):
            continue
        require(
            len(positions) == positions[-1] - positions[0] + 1,
            "attention_mask has a gap inside a sequence.",
        )
        yield index, ids[positions], len(positions)
        drop_pages(ids)


def _jagged(batch: dict[str, Any], routes: object) -> Iterator[Row]:
    require(isinstance(routes, list | tuple), "routed_experts must be a tensor or a list of tensors.")
    input_ids = batch.get("input_ids")
    if not isinstance(input_ids, list | tuple):
        input_ids = None
    for index, part in enumerate(routes):  # type: ignore[arg-type, var-annotated]
        ids = as_routes(part)
        if input_ids is not None:
            require(
                index < len(input_ids) and isinstance(input_ids[index], list | np.ndarray),
                "input_ids must contain the tokens of every sequence in routed_experts.",
            )
        num_tokens = len(ids) if input_ids is None else len(input_ids[index])
        yield index, ids, num_tokens
        drop_pages(ids)


IMPORTER = Importer(
    name="verl",
    summary="batch tensors with routed_experts and attention_mask (.pt or .npz)",
    provenance="R3",
    recognizes=_recognizes,
    read=_read,
)
