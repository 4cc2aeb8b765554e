"""Expert maps as files of the engines, and read back from them."""

import io
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from moe_rl.core.errors import InvalidInputError, located, require
from moe_rl.core.expert_map import ExpertMap
from moe_rl.rollout_engines.base import ROLLOUT_ENGINES, Document, RolloutEngine, Shape


def encoded_map(engine: RolloutEngine, expert_map: ExpertMap, path: Path) -> bytes:
    """Return the content of the file `path` that the engine loads.

    Raises `InvalidInputError` for a suffix that the engine does not read, and for a map that it would take and break
    on: an expert without a slot, a second copy on a rank, copies where there may be none.
    """
    check_suffix(engine, path)
    expert_map.check()
    require(
        engine.copies or expert_map.num_copies == 0,
        f"{engine.name} holds every expert once, and the map has {expert_map.num_copies} more slots per layer.",
    )
    document = engine.document(expert_map)
    if path.suffix == ".json":
        return (json.dumps(document) + "\n").encode()
    if path.suffix == ".pt":
        torch, content = _torch(path), io.BytesIO()
        torch.save({name: torch.tensor(value) for name, value in document.items()}, content)
        return content.getvalue()
    return yaml.safe_dump(document, default_flow_style=None, sort_keys=False, width=120).encode()


def check_suffix(engine: RolloutEngine, path: Path) -> None:
    """Raise unless the engine reads such files, and they can be written here."""
    known = " or ".join(engine.suffixes)
    require(path.suffix in engine.suffixes, f"{engine.name} reads {known}, and {path.name} ends otherwise.")
    if path.suffix == ".pt":
        _torch(path)


def read_expert_map(path: Path | str, shape: Shape) -> tuple[RolloutEngine, ExpertMap]:
    """Return the engine that the file is for, by its content, and its map of `shape`, checked.

    Raises `InvalidInputError` for a file that is missing, damaged, of no engine or of another model, and for a map that
    an engine would take and break on.
    """
    path = Path(path)
    document = _decoded(path)
    with located(str(path)):
        for engine in ROLLOUT_ENGINES:
            rows = engine.rows(document, shape)
            if rows is not None:
                read = _checked(rows, shape)
                return engine, read
    raise InvalidInputError(f"{path} is of no known engine: {', '.join(ROLLOUT_ENGINES.names)}.")


def _checked(rows: dict[int, list[int]], shape: Shape) -> ExpertMap:
    widths = {len(row) for row in rows.values()}
    require(len(widths) == 1, f"the rows have {sorted(widths)} slots: all must have as many.")
    whole = all(type(expert) is int for row in rows.values() for expert in row)
    require(whole, "the rows must hold whole numbers alone.")
    slots = np.array([rows[layer] for layer in shape.moe_layer_ids], np.int64)
    require(
        not slots.size or (int(slots.min()) >= 0 and int(slots.max()) < shape.num_experts),
        f"experts must lie in 0 .. {shape.num_experts - 1}, the file names {slots.min()} .. {slots.max()}.",
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
        if path.suffix == ".pt":
            torch = _torch(path)
            loaded = torch.load(path, weights_only=True, map_location="cpu")
            document: Any = {name: value.tolist() for name, value in loaded.items()}
        else:
            text = path.read_text(encoding="utf-8")
            document = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except FileNotFoundError:
        raise InvalidInputError(f"there is no expert map {path}.") from None
    except InvalidInputError:
        raise
    except Exception as error:  # torch.load raises what it likes on damaged bytes
        raise InvalidInputError(f"{path} cannot be read as an expert map: {error}.") from error
    require(isinstance(document, dict), f"{path} is no expert map: it holds no names with values.")
    return dict(document)


def _torch(path: Path) -> Any:
    try:
        return import_module("torch")
    except ImportError:
        raise InvalidInputError(f"{path.name} needs torch, which is not installed: take .json.") from None
