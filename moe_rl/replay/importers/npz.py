"""`.npz`: one `[tokens, layers, K]` id array per sequence, under the sequence's name.

The importer also reads a `.pt` file with such a tensor or a list of them, and a `.json` file with a list of nested
lists. It also reads your own records, as `.jsonl` or a `.json` list. A record is a nested list, or an object with one
field (of any name) that contains a nested list; its field `group_id` or `prompt_id` gives its prompt group. An array
`[tokens, K]` is one layer. If all keys of an `.npz` file contain layer numbers (`layer_0`, `layers.1`), its arrays are
the layers of one sequence. If `axes` is LTK, layers come before tokens. Every row counts as a route. Floats
`[tokens, layers, E]` are router logits: if K is given, the K experts with the highest logits become the route. A
warning states that this route is wrong for a router with expert groups or an expert bias. A key that starts with
`group<number>` or `prompt<number>` assigns its sequence to a prompt group.
"""

import logging
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, located, require
from moe_rl.replay.importers.json_files import SUFFIXES, json_head, json_values
from moe_rl.replay.importers.payloads import as_array, from_npy, of_kind
from moe_rl.replay.importers.records import Importer, ImportOptions, RecordedSequence
from moe_rl.replay.importers.torch_file import load_torch_file

logger = logging.getLogger(__name__)

# A key that numbers a layer: layer_3, layers.3, model.layers.3.mlp.gate, L3.
LAYER_KEY = re.compile(r"(?:.*[._-])?(?:layers?|l)[._-]?(\d+)(?!\d)", re.IGNORECASE)
GROUP_KEY = re.compile(r"(?:group|prompt)[-_]?(\d+)(?!\d)")
# Deflate cannot shrink data by more than about 1032; a larger claim is a lie about the size.
MAX_DEFLATE_RATIO = 1100
TORCH = (".pt", ".pth")
# A list of sequences, tokens and layers (of one layer: of sequences and tokens) of numbers.
NESTED_LISTS = re.compile(r"\s*(?:\[\s*){3,4}-?\d")
# A field of a record with the same of one sequence, as in {"prompt_id": 3, "experts": [[[0, 5], [2, 7]], ...]}.
FIELD_OF_LISTS = re.compile(r"[\[{,\s]\"[^\"]*\"\s*:\s*(?:\[\s*){3}-?\d")
# What the answers of vLLM and SGLang have, which their own importers read.
OF_ENGINES = ('"choices"', '"meta_info"')
GROUP_FIELDS = ("group_id", "prompt_id")


def npz_arrays(path: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield (key, array) of an .npz file, one in memory at a time; nothing is unpickled."""
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                require(
                    member.file_size <= MAX_DEFLATE_RATIO * max(1, member.compress_size),
                    f"{path}: the zip header gives an impossible size for {member.filename}.",
                )
                data = archive.read(member)
                with located(f"{path}, {member.filename}"):
                    array = from_npy(data)
                yield member.filename.removesuffix(".npy"), array
    except InvalidInputError:
        raise
    except Exception as error:  # zipfile and zlib answer damage with a dozen types
        raise InvalidInputError(f"{path} is damaged: it cannot be read as an .npz file.") from error


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
    if suffix in SUFFIXES:
        head = json_head(path)
        is_record = FIELD_OF_LISTS.search(head) is not None and not any(word in head for word in OF_ENGINES)
        return is_record or NESTED_LISTS.match(head) is not None
    return suffix in TORCH and path.is_file() and _is_tensors(load_torch_file(path, verify=False))


def _is_tensors(document: object) -> bool:
    """Return whether a torch file holds a tensor or a list of them."""
    if isinstance(document, list | tuple) and len(document) > 0:
        return isinstance(document[0], np.ndarray)
    return isinstance(document, np.ndarray)


@dataclass(frozen=True, slots=True, kw_only=True)
class _NamedArray:
    """The ids, or the router logits, of one sequence as the file holds them."""

    name: str
    values: NDArray[Any]
    group: str | int | None = None
    layer_ids: tuple[int, ...] | None = None
    """Model layer of each layer, where the file numbers them."""


def _arrays(path: Path) -> Iterator[_NamedArray]:
    """Yield the array of every sequence."""
    suffix = path.suffix.lower()
    if suffix == ".npz":
        layers = _numbered_layers(npz_keys(path))
        if layers:
            yield _of_layers(path, layers)
            return
        for key, values in npz_arrays(path):
            group = GROUP_KEY.match(key)
            yield _NamedArray(name=key, values=values, group=group and group.group(1))
    elif suffix in SUFFIXES:
        for index, (where, value) in enumerate(json_values(path)):
            with located(where):
                yield _of_record(value, index)
    else:
        document = load_torch_file(path)
        if isinstance(document, np.ndarray):
            document = [document]
        tensors = of_kind(document, list | tuple, f"{path} does not contain a tensor or a list of tensors.")  # type: ignore[arg-type]
        for index, value in enumerate(tensors):
            with located(f"{path}, sequence {index}"):
                yield _NamedArray(name=str(index), values=as_array(value))


def _numbered_layers(keys: Sequence[str]) -> dict[str, int]:
    """Return the layer that each key numbers; empty where a key numbers none, or two the same."""
    layers = dict[str, int]()
    for key in keys:
        match = LAYER_KEY.match(key)
        if match is None or int(match[1]) in layers.values():
            return {}
        layers[key] = int(match[1])
    return layers


def _of_layers(path: Path, layers: Mapping[str, int]) -> _NamedArray:
    """Return the sequence whose layers are the arrays of a file, [tokens, K] each."""
    arrays = dict(npz_arrays(path))
    ordered = sorted(layers, key=lambda key: layers[key])
    first = arrays[ordered[0]]
    for key in ordered:
        require(
            arrays[key].ndim == 2 and arrays[key].shape == first.shape,
            f"the arrays in {path} are named by layer number, so they must have the same shape [tokens, top-k], but "
            f"{key!r} has {list(arrays[key].shape)} and {ordered[0]!r} has {list(first.shape)}. If each array is a "
            "sequence, rename the arrays.",
        )
    logger.warning(
        "%s: moe_rl reads the %d arrays (%s to %s) as the layers of a single sequence of %d tokens.",
        path,
        len(ordered),
        ordered[0],
        ordered[-1],
        len(first),
    )
    return _NamedArray(
        name=path.stem,
        values=np.stack([arrays[key] for key in ordered], axis=1),
        layer_ids=tuple(layers[key] for key in ordered),
    )


def _of_record(value: object, index: int) -> _NamedArray:
    """Return the array of one JSON value: nested lists, or an object with one field of them."""
    if not isinstance(value, dict):
        return _NamedArray(name=str(index), values=as_array(value))
    nested = [name for name, item in value.items() if _depth(item) == 3]
    require(
        len(nested) == 1,
        f"exactly one field must contain nested lists [tokens][layers][top-k], got {', '.join(nested) or 'none'}.",
    )
    groups = [value[name] for name in GROUP_FIELDS if isinstance(value.get(name), int | str)]
    return _NamedArray(name=str(index), values=as_array(value[nested[0]]), group=groups[0] if groups else None)


def _depth(value: object) -> int:
    """Return how deep lists are nested, by their first items."""
    depth = 0
    while isinstance(value, list) and value:
        value, depth = value[0], depth + 1
    return depth


def _read(path: Path, options: ImportOptions) -> Iterator[RecordedSequence]:
    for index, array in enumerate(_arrays(path)):
        values = array.values
        if options.axes == "LTK" and values.ndim == 3 and array.layer_ids is None:
            values = values.swapaxes(0, 1)
        routes = _as_ids(values, options, f"{path}: {array.name!r}", first=index == 0)
        valid = None
        if options.prompt_lengths is not None:
            require(
                index < len(options.prompt_lengths),
                f"{path} has more sequences than there are prompt lengths ({len(options.prompt_lengths)}).",
            )
            prompt = np.zeros((options.prompt_lengths[index], *routes.shape[1:]), routes.dtype)
            valid = np.arange(len(prompt) + len(routes)) >= len(prompt)
            routes = np.concatenate([prompt, routes])
        yield RecordedSequence(
            routes=routes, valid=valid, name=array.name, group=array.group, layer_ids=array.layer_ids
        )


def _as_ids(values: NDArray[Any], options: ImportOptions, what: str, *, first: bool) -> NDArray[np.integer]:
    """Return [tokens, layers, K] ids of such an array, of one of one layer, or of router logits."""
    is_logits = values.dtype.kind == "f"
    if values.ndim == 2:
        values = values[:, None]  # of one layer
    require(
        values.ndim <= 3,
        f"{what} has dtype {values.dtype} and shape {list(values.shape)}. Store each sequence as a separate "
        "array [tokens, layers, top-k] without padding.",
    )
    if not is_logits:
        require(
            values.ndim == 3 and values.dtype.kind in "iu",
            f"{what} must contain integers of shape [tokens, layers, top-k], or [tokens, top-k] for one layer, got "
            f"{values.dtype} {list(values.shape)}.",
        )
        return values
    shape = list(values.shape)
    require(
        values.ndim == 3,
        f"{what} must contain router logits of shape [tokens, layers, experts], got {values.dtype} {shape}.",
    )
    top_k, experts = options.top_k, values.shape[2]
    if top_k is None or top_k > experts or not np.isfinite(values).all():
        raise InvalidInputError(
            f"{what} contains {values.dtype} router logits of shape [tokens, layers, experts] = {shape}. To read "
            f"router logits, set --moe-router-topk (1 to {experts}). All logits must be finite."
        )
    if first:
        logger.warning(
            "%s contains router logits. moe_rl routes each token to the %d experts (of %d) with the highest logits. "
            "These routes are wrong if the router has expert groups or an expert bias.",
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
