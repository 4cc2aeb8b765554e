"""`.npz`: one `[tokens, layers, K]` id array per sequence, under the sequence's name.

A `.pt` file with a list of such tensors, or a `.json` file with a list of nested lists, is also read. An array
`[tokens, K]` holds one layer; `axes` LTK means that layers come before tokens. Every row counts as a route. Floats
`[tokens, layers, E]` are router logits: if K is given, the K highest become routes. This is wrong for a router with
groups or an expert bias, so a warning says so. Keys that start with `group<number>` or `prompt<number>` put sequences
into prompt groups.
"""

import logging
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, located, require
from moe_rl.replay.importers.json_files import json_head, parsed
from moe_rl.replay.importers.payloads import as_array, from_npy, of_kind
from moe_rl.replay.importers.records import Importer, ImportOptions, RecordedSequence
from moe_rl.replay.importers.torch_file import load_torch_file

logger = logging.getLogger(__name__)

GROUP_KEY = re.compile(r"(?:group|prompt)[-_]?(\d+)(?!\d)")
# Deflate cannot shrink data by more than about 1032; a larger claim is a lie about the size.
MAX_DEFLATE_RATIO = 1100
TORCH = (".pt", ".pth")
# A list of sequences, tokens and layers (of one layer: of sequences and tokens) of numbers.
NESTED_LISTS = re.compile(r"\s*(?:\[\s*){3,4}-?\d")


def npz_arrays(path: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield (key, array) of an .npz file, one in memory at a time; nothing is unpickled."""
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                require(
                    member.file_size <= MAX_DEFLATE_RATIO * max(1, member.compress_size),
                    f"{path}: {member.filename} claims an impossible size.",
                )
                data = archive.read(member)
                with located(f"{path}, {member.filename}"):
                    array = from_npy(data)
                yield member.filename.removesuffix(".npy"), array
    except InvalidInputError:
        raise
    except Exception as error:  # zipfile and zlib answer damage with a dozen types
        raise InvalidInputError(f"{path} is not a readable .npz file: it is damaged.") from error


def npz_keys(path: Path) -> list[str]:
    """Return the keys of an .npz file without reading an array; none for anything else."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except Exception:  # as above; the reader says what is wrong
        return []


def _recognizes(path: Path) -> bool:
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return "routed_experts" not in npz_keys(path)
    if suffix == ".json":
        return NESTED_LISTS.match(json_head(path)) is not None
    return suffix in TORCH and path.is_file() and _is_list(load_torch_file(path, verify=False))


def _is_list(document: object) -> bool:
    """Return whether a torch file holds a list of tensors."""
    return isinstance(document, list | tuple) and len(document) > 0 and isinstance(document[0], np.ndarray)


def _arrays(path: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield (name, array) of every sequence."""
    suffix = path.suffix.lower()
    if suffix == ".npz":
        yield from npz_arrays(path)
        return
    document = parsed(path.read_bytes(), str(path)) if suffix == ".json" else load_torch_file(path)
    sentence = f"{path} is not a list of arrays."
    for index, value in enumerate(of_kind(document, list | tuple, sentence)):  # type: ignore[arg-type]
        with located(f"{path}, sequence {index}"):
            yield str(index), as_array(value)


def _read(path: Path, options: ImportOptions) -> Iterator[RecordedSequence]:
    for index, (key, values) in enumerate(_arrays(path)):
        routes = _as_ids(values, options, f"{path}: {key!r}", first=index == 0)
        valid = None
        if options.prompt_lengths is not None:
            require(index < len(options.prompt_lengths), f"{path} has more sequences than there are prompt lengths.")
            prompt = np.zeros((options.prompt_lengths[index], *routes.shape[1:]), routes.dtype)
            valid = np.arange(len(prompt) + len(routes)) >= len(prompt)
            routes = np.concatenate([prompt, routes])
        group = GROUP_KEY.match(key)
        yield RecordedSequence(routes=routes, valid=valid, name=key, group=group.group(1) if group else None)


def _as_ids(values: NDArray[Any], options: ImportOptions, what: str, *, first: bool) -> NDArray[np.integer]:
    """Return [tokens, layers, K] ids of an array in another order, of one layer, or of router logits."""
    is_logits = values.dtype.kind == "f"
    if values.ndim == 2:
        values = values[:, None]  # of one layer
    if options.axes == "LTK" and values.ndim == 3:
        values = values.swapaxes(0, 1)
    if not is_logits:
        require(
            values.ndim == 3 and values.dtype.kind in "iu",
            f"{what} must be integers [tokens, layers, top-k], or [tokens, top-k] of one layer, got "
            f"{values.dtype} {list(values.shape)}.",
        )
        return values
    shape = list(values.shape)
    require(values.ndim == 3, f"{what} must be router logits [tokens, layers, experts], got {values.dtype} {shape}.")
    top_k, experts = options.top_k, values.shape[2]
    if top_k is None or top_k > experts or not np.isfinite(values).all():
        raise InvalidInputError(
            f"{what} holds {values.dtype} {shape}: router logits [tokens, layers, experts] need --moe-router-topk, "
            f"1 to {experts}, and finite values."
        )
    if first:
        logger.warning(
            "%s holds router logits; the %d highest of %d become routes, which is wrong for a router with groups or "
            "an expert bias.",
            what,
            top_k,
            experts,
        )
    ids: NDArray[np.integer] = np.argsort(-values, axis=2, kind="stable")[..., :top_k].astype(np.int32)
    return ids


IMPORTER = Importer(
    name="npz",
    summary="one [tokens, layers, top-k] array per sequence",
    provenance="unknown",
    recognizes=_recognizes,
    read=_read,
    reads=("prompt_lengths", "axes"),
)
