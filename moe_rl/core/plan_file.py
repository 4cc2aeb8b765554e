"""Load a plan that `Plan.save` wrote. A file carries the plan's hash: a damaged one is refused."""

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
from moe_rl.core.mappings import subset
from moe_rl.core.placement import ExpertMigration, ExpertPlacement
from moe_rl.core.plan import Plan, ReplicaPlan
from moe_rl.core.plan_archive import DESCRIPTION, SCHEMA

_PARTS = {"layout": BatchLayout, "placement": ExpertPlacement, "replicas": ReplicaPlan, "migration": ExpertMigration}
_FIELDS = tuple(item.name for item in fields(Plan) if item.name not in (*_PARTS, "capacity"))
# Exceptions of zipfile and numpy for a file whose bytes are wrong.
_DAMAGE = (
    ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, OSError, RuntimeError, TypeError,
    ValueError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def load_plan(path: Path | str) -> Plan:
    """Read a plan from a file that `Plan.save` wrote.

    Raises `InvalidInputError` where the file is missing, damaged, of another schema version, or not a plan.
    """
    path = Path(path)
    require(path.is_file(), f"there is no plan file {path}.")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = subset(archive, archive.files)
        description = json.loads(arrays.pop(DESCRIPTION).tobytes())
        require(
            description["schema"] == SCHEMA,
            f"{path} has the schema {description['schema']!r}, but this version of moe_rl reads only {SCHEMA!r}.",
        )
        plan = _plan(arrays, description)
    except InvalidInputError:
        raise
    except _DAMAGE as error:
        raise InvalidInputError(f"{path} is damaged, or is not a plan file.") from error
    # The hash covers what decides where a token runs; zip's own CRC-32 covers the bytes.
    require(plan.hash == description["hash"], f"{path} is damaged: its content does not match its checksum.")
    return plan


def _plan(arrays: Mapping[str, NDArray[Any]], description: Mapping[str, Any]) -> Plan:
    parts: dict[str, Any] = {}
    for part, kind in _PARTS.items():
        columns = {
            name.removeprefix(f"{part}."): array for name, array in arrays.items() if name.startswith(f"{part}.")
        }
        parts[part] = kind(**columns, **description["parts"][part])
    values = subset(description, _FIELDS)
    return Plan(**parts, **values | {"notes": tuple(values["notes"])})
