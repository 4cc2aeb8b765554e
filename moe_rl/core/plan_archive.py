"""A plan as one file: a `.npz` of its arrays and a JSON description, no pickles.

Example: the part `layout` has the array `layout.micro_batch` in the archive and the number `num_micro_batches` in the
description, under `parts`. `plan_file.load_plan` puts both together again.
"""

import io
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.core.outputs import check_outputs, write_outputs

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCHEMA = "moe_rl.plan/2"
DESCRIPTION = "description"


def write_archive(path: Path, parts: "Mapping[str, DataclassInstance]", facts: Mapping[str, Any]) -> None:
    """Write the `parts`, dataclasses of arrays and numbers, and `facts` of the whole to `path`, whole or not at all."""
    require(path.suffix == ".npz", f"the name of a plan file must end in .npz, got {path}.")
    check_outputs({"": path})
    arrays: dict[str, NDArray[Any]] = {}
    numbers: dict[str, dict[str, Any]] = {name: {} for name in parts}
    for name, part in parts.items():
        for item in fields(part):
            value = getattr(part, item.name)
            if isinstance(value, np.ndarray):
                arrays[f"{name}.{item.name}"] = value
            else:
                numbers[name][item.name] = value
    description = {**facts, "schema": SCHEMA, "parts": numbers}
    # JSON as bytes: a file of numbers alone loads without pickle.
    arrays[DESCRIPTION] = np.frombuffer(json.dumps(description).encode(), np.uint8)
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # mypy tries the arrays on the keyword allow_pickle too
    write_outputs({path: file.getvalue()})
