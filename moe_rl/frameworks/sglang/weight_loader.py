"""SGLang: weights of a sync whose names differ from rank to rank, and the expert map that comes with them.

SGLang gathers the batches of an engine's ranks, pairs them by position, and loads all under the names of the first.
So names travel inside: a batch is two tensors, one of names and one of bytes, whatever a rank has in it. SGLang hands
them to a loader of its option `--custom-weight-loader`, in the process of every rank.

Example: rank 0 has expert 5, rank 1 experts 6 and 7.

    position 0      moe_rl.names     rank 0: "experts.5..."      rank 1: "experts.6...", "experts.7..."
    position 1      moe_rl.bytes     rank 0: 1 expert            rank 1: 2 experts

Read in sglang 0.5.23: srt/model_executor/model_runner_components/weight_updater.py, srt/eplb/expert_location.py.
"""

import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moe_rl.core.errors import require
from moe_rl.sync.dense import ALIGNMENT

NAMES, BYTES = "moe_rl.names", "moe_rl.bytes"
NamedTensors = Iterable[tuple[str, torch.Tensor]]


def packed(tensors: NamedTensors, slots: NDArray[np.int32] | None = None) -> list[tuple[str, torch.Tensor]]:
    """Return a batch of some tensors, with the map [hidden layers, W] for them and what comes after, if it is new."""
    names: list[tuple[str, list[int], str]] = []
    bodies = [torch.empty(0, dtype=torch.uint8)]
    for name, tensor in tensors:
        names.append((name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")))
        body = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        bodies.append(torch.nn.functional.pad(body, (0, -body.numel() % ALIGNMENT)))
    table = json.dumps({"tensors": names, "slots": None if slots is None else slots.tolist()}).encode()
    return [(NAMES, torch.frombuffer(bytearray(table), dtype=torch.uint8)), (BYTES, torch.cat(bodies))]


def is_packed(named_tensors: NamedTensors) -> bool:
    """Return whether tensors are a batch of `packed`."""
    return {name for name, _ in named_tensors} == {NAMES, BYTES}


def load(model: Any, named_tensors: NamedTensors) -> None:
    """Load a batch into this rank's model: a function for `--custom-weight-loader`."""
    batch = dict(named_tensors)
    table = json.loads(batch[NAMES].cpu().numpy().tobytes())
    if table["slots"] is not None:
        take_map(np.array(table["slots"], np.int32))
    model.load_weights(unpacked(table["tensors"], batch[BYTES]))


def unpacked(names: list[tuple[str, list[int], str]], body: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a batch."""
    start = 0
    for name, shape, dtype_name in names:
        dtype: torch.dtype = getattr(torch, dtype_name)
        size = math.prod(shape) * dtype.itemsize
        yield name, body[start : start + size].view(dtype).view(shape)
        start += size + -size % ALIGNMENT


def take_map(slots: NDArray[np.int32]) -> None:
    """Update SGLang's own map in place, by its own code, as its rebalancing does.

    Raises `InvalidInputError` if the engine keeps no map, or one of another size.
    """
    from sglang.srt.eplb import expert_location

    current = expert_location.get_global_expert_location_metadata()
    require(current is not None, "the weight sync sends an expert map, but this model has no expert map in SGLang.")
    shape = tuple(current.physical_to_logical_map.shape)
    require(
        slots.shape == shape,
        f"the weight sync sends an expert map of shape {slots.shape} (layers, slots), but SGLang's map has {shape}.",
    )
    physical = torch.as_tensor(slots, dtype=current.physical_to_logical_map.dtype)
    physical = physical.to(current.physical_to_logical_map.device)
    every_slot = expert_location._compute_logical_to_all_physical_map(
        physical, current.num_logical_experts, current.ep_size, None
    )
    coming = expert_location.ExpertLocationMetadata._init_raw(
        ep_size=current.ep_size, physical_to_logical_map=physical, logical_to_all_physical_map=every_slot
    )
    current.update(coming, list(range(shape[0])))
