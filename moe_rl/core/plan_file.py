"""Save a plan as one file and load it again: a `.npz` of its arrays and a JSON description, no pickles.

The file appears whole or not at all, and carries the plan's hash: a damaged file is refused.
"""

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.outputs import check_outputs, write_outputs
from moe_rl.core.placement import ExpertMigration, ExpertPlacement
from moe_rl.core.plan import Plan, ReplicaPlan

SCHEMA = "moe_rl.plan/2"
DESCRIPTION = "description"


def _columns(kind: Any) -> tuple[dict[str, type[np.generic]], tuple[str, ...]]:
    """Return the arrays of a dataclass with their dtypes, and the names of its other fields."""
    hints = get_type_hints(kind)
    arrays = {name: get_args(get_args(hint)[1])[0] for name, hint in hints.items() if get_origin(hint) is np.ndarray}
    return arrays, tuple(item.name for item in fields(kind) if item.name not in arrays)


_KINDS = {"layout": BatchLayout, "placement": ExpertPlacement, "replicas": ReplicaPlan, "migration": ExpertMigration}
_PARTS: Mapping[str, tuple[type, dict[str, type[np.generic]], tuple[str, ...]]] = {
    part: (kind, *_columns(kind)) for part, kind in _KINDS.items()
}
"""Part of the plan -> (type, dtypes of its arrays, names of its numbers)."""
_FIELDS = tuple(item.name for item in fields(Plan) if item.name not in (*_PARTS, "capacity"))
_DAMAGE = (
    ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, OSError, RuntimeError, TypeError,
    ValueError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What zipfile and numpy raise on a file whose bytes are wrong."""


def save_plan(plan: Plan, path: Path | str) -> None:
    """Write the plan to `path` (`.npz`), replacing what is there in one rename; folders on the way are made.

    Raises `InvalidInputError` for another suffix and for a place that cannot be written.
    """
    path = Path(path)
    require(path.suffix == ".npz", f"{path} must end in .npz.")
    check_outputs({"": path})
    arrays: dict[str, NDArray[Any]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for part, (_, dtypes, names) in _PARTS.items():
        value = getattr(plan, part)
        arrays |= {f"{part}.{name}": getattr(value, name) for name in dtypes}
        numbers[part] = {name: getattr(value, name) for name in names}
    description = {name: getattr(plan, name) for name in _FIELDS} | {
        "schema": SCHEMA,
        "hash": plan.hash,
        "parameters": dict(plan.parameters),
        "notes": list(plan.notes),
        "parts": numbers,
    }
    # JSON as bytes: a file of numbers alone loads without pickle.
    arrays[DESCRIPTION] = np.frombuffer(json.dumps(description).encode(), np.uint8)
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # mypy tries the arrays on the keyword allow_pickle too
    write_outputs({path: file.getvalue()})


def load_plan(path: Path | str) -> Plan:
    """Return the plan in a file that `save_plan` wrote.

    Raises `InvalidInputError` where the file is missing, damaged, of another schema version, or not a plan.
    """
    path = Path(path)
    require(path.is_file(), f"there is no plan file {path}.")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        description = json.loads(arrays.pop(DESCRIPTION).tobytes())
        require(
            description["schema"] == SCHEMA,
            f"{path} has schema {description['schema']!r}, this version reads {SCHEMA!r}.",
        )
        plan = _plan(arrays, description)
    except InvalidInputError:
        raise
    except _DAMAGE as error:
        raise InvalidInputError(f"{path} is damaged or not a plan file.") from error
    # The hash covers what decides where a token runs; zip's own CRC-32 covers the bytes.
    require(plan.hash == description["hash"], f"{path} is damaged: its content does not match its hash.")
    return plan


def _plan(arrays: Mapping[str, NDArray[Any]], description: Mapping[str, Any]) -> Plan:
    parts = {}
    for part, (kind, dtypes, names) in _PARTS.items():
        columns = {name: arrays[f"{part}.{name}"] for name in dtypes}
        for name, dtype in dtypes.items():
            have = columns[name].dtype
            require(have == dtype, f"plan file: {part}.{name} must be {np.dtype(dtype)}, got {have}.")
        parts[part] = kind(**columns, **{name: description["parts"][part][name] for name in names})
    values = {name: description[name] for name in _FIELDS}
    return Plan(**parts, **values | {"notes": tuple(values["notes"])})
