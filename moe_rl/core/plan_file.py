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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.layout import BatchLayout
from moe_rl.core.outputs import check_outputs, write_outputs
from moe_rl.core.placement import ExpertMigration, ExpertPlacement
from moe_rl.core.plan import Plan, ReplicaPlan

SCHEMA = "moe_rl.plan/2"
DESCRIPTION = "description"


_PARTS = {"layout": BatchLayout, "placement": ExpertPlacement, "replicas": ReplicaPlan, "migration": ExpertMigration}
_FIELDS = tuple(item.name for item in fields(Plan) if item.name not in (*_PARTS, "capacity"))
# Exceptions of zipfile and numpy for a file whose bytes are wrong.
_DAMAGE = (
    ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, OSError, RuntimeError, TypeError,
    ValueError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def write_plan(plan: Plan, path: Path | str) -> None:
    """Do what `Plan.save` says."""
    path = Path(path)
    require(path.suffix == ".npz", f"{path} must end in .npz.")
    check_outputs({"": path})
    arrays: dict[str, NDArray[Any]] = {}
    numbers: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
    for part, kind in _PARTS.items():
        for item in fields(kind):
            value = getattr(getattr(plan, part), item.name)
            if isinstance(value, np.ndarray):
                arrays[f"{part}.{item.name}"] = value
            else:
                numbers[part][item.name] = value
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
    """Return the plan in a file that `Plan.save` wrote.

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
    parts: dict[str, Any] = {}
    for part, kind in _PARTS.items():
        columns = {
            name.removeprefix(f"{part}."): array for name, array in arrays.items() if name.startswith(f"{part}.")
        }
        parts[part] = kind(**columns, **description["parts"][part])
    values = {name: description[name] for name in _FIELDS}
    return Plan(**parts, **values | {"notes": tuple(values["notes"])})
