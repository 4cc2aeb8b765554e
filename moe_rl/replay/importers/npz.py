"""`.npz`: one `[tokens, layers, K]` id array per sequence, its key the sequence's name.

An array `[tokens, K]` is of one layer; `axes` LTK has layers before tokens. Rows are taken as they are: every row holds
a route. Keys that start with `group<number>` or `prompt<number>` put sequences into prompt groups.
"""

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, located, require
from moe_rl.replay.importers.payloads import from_npy
from moe_rl.replay.importers.records import Importer, ImportOptions, RecordedSequence

GROUP_KEY = re.compile(r"(?:group|prompt)[-_]?(\d+)(?!\d)")
# Deflate cannot shrink data by more than about 1032; a larger claim is a lie about the size.
MAX_DEFLATE_RATIO = 1100


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
    return path.suffix.lower() == ".npz" and "routed_experts" not in npz_keys(path)


def _read(path: Path, options: ImportOptions) -> Iterator[RecordedSequence]:
    for index, (key, routes) in enumerate(npz_arrays(path)):
        if routes.ndim == 2:
            routes = routes[:, None]  # of one layer
        if options.axes == "LTK" and routes.ndim == 3:
            routes = routes.swapaxes(0, 1)
        require(
            routes.ndim == 3 and routes.dtype.kind in "iu",
            f"{path}: {key!r} must be integers [tokens, layers, top-k], or [tokens, top-k] of one layer, got "
            f"{routes.dtype} {list(routes.shape)}.",
        )
        valid = None
        if options.prompt_lengths is not None:
            require(index < len(options.prompt_lengths), f"{path} has more sequences than prompt lengths were given.")
            prompt = np.zeros((options.prompt_lengths[index], *routes.shape[1:]), routes.dtype)
            valid = np.arange(len(prompt) + len(routes)) >= len(prompt)
            routes = np.concatenate([prompt, routes])
        group = GROUP_KEY.match(key)
        yield RecordedSequence(routes=routes, valid=valid, name=key, group=group.group(1) if group else None)


IMPORTER = Importer(
    name="npz",
    summary="one [tokens, layers, top-k] array per sequence",
    provenance="unknown",
    recognizes=_recognizes,
    read=_read,
    reads=("prompt_lengths", "axes"),
)
