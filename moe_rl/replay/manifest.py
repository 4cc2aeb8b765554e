"""`manifest.json` of a `*.moetrace/` directory: what the trace is and which shards it has.

The manifest names every shard with its size and CRC-32 and carries a CRC-32 of itself, so that a damaged trace is told
from a whole one. It is replaced in one rename after each shard: a shard counts once the manifest names it.
"""

import json
import math
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from moe_rl.core.errors import InvalidInputError, require, require_least, require_words
from moe_rl.core.trace import PROVENANCES, route_dtype

# Shards with plain ids have the first, shards with a stream of `moe_rl.routes` the second.
SCHEMA, CODED_SCHEMA = "moe_rl.trace/1", "moe_rl.trace/2"
MANIFEST_NAME = "manifest.json"
OPTIONAL_COLUMNS = ("policy_version", "router_logprobs")
SHARD_NAME = re.compile(r"shard-(\d{6,9})\.safetensors")
# For reading: "8" is no number, and an unknown key is an error.
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """One file of the trace: some sequences of one step."""

    file: str
    step: int
    first_sequence: int
    """Position of its first sequence in the whole trace."""
    num_sequences: int
    num_tokens: int
    size_bytes: int
    crc32: str
    """CRC-32 of the whole file, 8 hex digits."""
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        require(
            SHARD_NAME.fullmatch(self.file) is not None,
            f"the file name of a shard must be shard-<number>, got {self.file!r}.",
        )
        least = {"first_sequence": 0, "num_sequences": 0, "num_tokens": 0, "size_bytes": 0}
        require_least(self, whose=f"{self.file}: ", **least)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of a trace directory."""

    num_experts: int
    top_k: int
    moe_layer_ids: tuple[int, ...]
    model: str = ""
    provenance: str = "unknown"
    counts_only: bool = False
    """True when the shards hold `SequenceCounts`, False when they hold routes."""
    coded: bool = False
    """True when the routes are stored coded, ids of a row ascending."""
    optional_columns: tuple[str, ...] = ()
    """Those of `OPTIONAL_COLUMNS` that every shard has."""
    origin: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """Facts about the run that made the trace (framework, commit, parallel sizes, ...); free-form, for people."""
    shards: tuple[ShardRecord, ...] = ()
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        route_dtype(self.num_experts)
        require(1 <= self.top_k <= self.num_experts, f"top_k must be 1 to {self.num_experts}, got {self.top_k}.")
        ids = self.moe_layer_ids
        require(
            len(ids) > 0 and ids[0] >= 0 and all(a < b for a, b in pairwise(ids)),
            f"moe_layer_ids must be ascending layer numbers, got {list(ids)}.",
        )
        require_words(self, provenance=PROVENANCES, optional_columns=OPTIONAL_COLUMNS)
        for name, value in self.origin.items():
            finite = not isinstance(value, float) or math.isfinite(value)
            require(
                isinstance(value, str | int | float | bool) and finite,
                f"the entry {name!r} in the origin of a trace must be a string, a number or a Boolean, got {value!r}.",
            )
        first_sequence = 0
        for shard in self.shards:
            require(
                shard.first_sequence == first_sequence,
                f"{shard.file} starts at sequence {shard.first_sequence}, but must start at {first_sequence}.",
            )
            first_sequence += shard.num_sequences
        require(len({shard.file for shard in self.shards}) == len(self.shards), "two shards have the same file name.")

    @property
    def dtype(self) -> str:
        """dtype of the ids on disk."""
        return route_dtype(self.num_experts).__name__

    @property
    def num_layers(self) -> int:
        """L, MoE layers."""
        return len(self.moe_layer_ids)

    @property
    def num_sequences(self) -> int:
        """Sequences of all shards."""
        return sum(shard.num_sequences for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Rows of all shards, filler rows included."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps, in the order in which they first appear."""
        return tuple(dict.fromkeys(shard.step for shard in self.shards))

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read and check the manifest of a trace directory."""
        path = directory / MANIFEST_NAME
        if not path.is_file():
            absence = "there is no such directory" if not directory.exists() else f"it has no {MANIFEST_NAME}"
            raise InvalidInputError(f"{directory} is not a trace: {absence}.")
        try:
            document = json.loads(path.read_bytes())
        except OSError as error:
            raise InvalidInputError(f"{path} cannot be read: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"{path} is corrupt: it is not JSON.") from error
        schema = document.get("schema") if isinstance(document, dict) else None
        require(isinstance(schema, str), f"{path} is not the manifest of a trace: it has no schema.")
        schemas = (SCHEMA, CODED_SCHEMA)
        require(
            schema in schemas,
            f"{path} has the schema {schema!r}, but this version of moe_rl reads only {' and '.join(schemas)}.",
        )
        crc = document.pop("crc32", None)
        require(crc == _crc32(document), f"{path} is corrupt: its checksum does not match.")
        document["coded"] = document.pop("schema") == CODED_SCHEMA
        dtype = document.pop("dtype", None)
        try:
            # Through JSON again: in JSON a list is a tuple's only form, in Python a strict check tells them apart.
            manifest = _schema().validate_json(json.dumps(document))
        except ValidationError as error:
            raise InvalidInputError(f"{path} is malformed: {_sentence(error)}.") from error
        fits = f"{path} is malformed: a trace with {manifest.num_experts} experts cannot have the dtype {dtype!r}."
        require(dtype == manifest.dtype, fits)
        return manifest

    def write(self, directory: Path) -> None:
        """Replace the manifest of the directory in one rename, on disk before this returns."""
        document = asdict(self) | {"dtype": self.dtype}
        schema = CODED_SCHEMA if document.pop("coded") else SCHEMA
        # Once through JSON before the checksum: tuples become lists, as a reader gets them.
        document = json.loads(json.dumps({"schema": schema} | document))
        document["crc32"] = _crc32(document)
        temporary = directory / f".{MANIFEST_NAME}.tmp"
        try:
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(document, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            # Content first, then the name: a power cut leaves the old manifest or the new one.
            temporary.replace(directory / MANIFEST_NAME)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Flush the directory's entries, so that a rename in it survives a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _crc32(document: dict[str, Any]) -> str:
    # Sorted and without blanks: the checksum is of the content, not of how a file lays it out.
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(canonical.encode()):08x}"


@cache
def _schema() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def _sentence(error: ValidationError) -> str:
    """Return what is wrong with the first value that does not fit."""
    detail = error.errors()[0]
    place = ".".join(map(str, detail["loc"]))
    message = detail["msg"].removeprefix("Value error, ").rstrip(".")
    if place:
        return f"{place}: {message}"
    return message
