"""Expert maps as files of the engines, and read back from them."""

import json
from pathlib import Path

import numpy as np

from moe_rl.core.errors import InvalidInputError, located, require
from moe_rl.core.expert_map import ExpertMap
from moe_rl.rollout_engines.base import ROLLOUT_ENGINES, Document, RolloutEngine, RunShape


def encoded_map(engine: RolloutEngine, expert_map: ExpertMap) -> bytes:
    """Return the content of the JSON file that the engine loads.

    Raises `InvalidInputError` for a map that it would take and break on: an expert without a slot, a second copy on a
    rank.
    """
    expert_map.check()
    return (json.dumps(engine.document(expert_map)) + "\n").encode()


def read_expert_map(path: Path | str, shape: RunShape) -> tuple[RolloutEngine, ExpertMap]:
    """Return the engine that the file is for, by its content, and its map of `shape`, checked.

    Raises `InvalidInputError` for a file that is missing, damaged, of no engine or of another model, and for a map that
    an engine would take and break on.
    """
    path = Path(path)
    document = _decoded(path)
    with located(str(path)):
        # By content: an engine takes JSON under any name.
        for engine in ROLLOUT_ENGINES:
            rows = engine.rows(document, shape)
            if rows is not None:
                read = _checked(rows, shape)
                return engine, read
    raise InvalidInputError(
        f"{path} does not match the format of any known engine ({', '.join(ROLLOUT_ENGINES.names)})."
    )


def _checked(rows: dict[int, list[int]], shape: RunShape) -> ExpertMap:
    widths = {len(row) for row in rows.values()}
    require(len(widths) == 1, f"all rows must have the same number of slots, but they have {sorted(widths)}.")
    # `true` is an int to Python, and 3.0 is what a careless script writes.
    is_integral = all(type(expert) is int for row in rows.values() for expert in row)
    require(is_integral, "the rows of the expert map must contain only whole numbers.")
    slots = np.array([rows[layer] for layer in shape.moe_layer_ids], np.int64)
    require(
        not slots.size or (int(slots.min()) >= 0 and int(slots.max()) < shape.num_experts),
        f"expert ids must be 0 to {shape.num_experts - 1}, but the file has ids {slots.min()} to {slots.max()}.",
    )
    read = ExpertMap(
        slots=slots.astype(np.int32),
        moe_layer_ids=shape.moe_layer_ids,
        num_layers=shape.num_layers,
        num_experts=shape.num_experts,
        ep_size=shape.ep_size,
    )
    read.check()
    return read


def _decoded(path: Path) -> Document:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInputError(f"the expert map {path} does not exist.") from None
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path} cannot be read as an expert map: {error}.") from error
    require(isinstance(document, dict), f"{path} is not an expert map: it does not contain a JSON object.")
    return dict(document)
