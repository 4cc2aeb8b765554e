"""A placement as a small JSON file: beside a checkpoint, or written by a planner for a run to follow.

The file appears whole or not at all, and carries its hash: a damaged one is refused.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.outputs import write_outputs
from moe_rl.core.placement import ExpertPlacement

SCHEMA = "moe_rl.placement/2"


def write_placement(placement: ExpertPlacement, path: Path) -> None:
    """Write every expert's home and the resident copies, replacing what is there in one rename.

    Raises `InvalidInputError` for a place that cannot be written.
    """
    body = {
        "schema": SCHEMA,
        "ep_size": placement.ep_size,
        "home_rank": placement.home_rank.tolist(),
        "resident_experts": placement.resident_experts.tolist(),
    }
    write_outputs({path: json.dumps(body | {"sha256": _hash(body)}).encode() + b"\n"})


def read_placement(path: Path) -> ExpertPlacement:
    """Return the placement in a file of `write_placement`, without spare slots.

    Raises `InvalidInputError` for a missing, damaged or foreign file.
    """
    try:
        body = json.loads(path.read_text())
        digest = body.pop("sha256")
        require(
            body["schema"] == SCHEMA,
            f"{path} has the schema {body['schema']!r}, but this version of moe_rl reads only {SCHEMA!r}.",
        )
        require(digest == _hash(body), f"{path} is damaged: its content does not match its checksum.")
        return ExpertPlacement.from_home_rank(
            np.array(body["home_rank"], np.int32),
            ep_size=body["ep_size"],
            resident_experts=np.array(body["resident_experts"], np.int32),
        )
    except InvalidInputError:
        raise
    # A file that somebody edited or a killed job left half-written: one sentence, whatever it broke.
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInputError(f"{path} is damaged, or is not a placement file: {error}.") from error


def _hash(body: dict[str, Any]) -> str:
    # Sorted keys: the hash must not depend on the order in which a dictionary was built.
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
