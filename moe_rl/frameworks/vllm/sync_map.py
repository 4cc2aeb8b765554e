"""vLLM: an expert map that comes with the weights of a sync.

vLLM finds the slots of a named expert in a table that it makes of its start map, expert p % E in slot p. `take_map`
puts the sync's map in its place, in the table of every layer and, where there are redundant slots, in the router's own
maps, by vLLM's own code. It is called before the weights that the map is for are loaded.

Example: two experts, three slots, map [1, 0, 1].

    table of the start map          experts.0.gate_proj -> slot 0, experts.1.gate_proj -> slot 1, experts.0... -> slot 2
    table of the sync's map         experts.1.gate_proj -> slot 0, experts.0.gate_proj -> slot 1, experts.1... -> slot 2

Read in vllm 0.33.0: model_executor/layers/fused_moe/routed_experts.py, distributed/eplb/eplb_state.py.
"""

import functools
import re
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from moe_rl.core.errors import require

# Under this name the map travels among the weights, before those that it is for.
MAP_NAME = "moe_rl.expert_map"
EXPERT = re.compile(r"experts\.(\d+)\.")


class TableEntry(NamedTuple):
    """A line of vLLM's table: where a named matrix of an expert goes."""

    parameter: str
    weight: str
    """Its name among the weights, with the expert's number."""
    slot: int
    shard: str


def take_map(model_runner: Any, slots: NDArray[np.int32]) -> None:
    """Give the model the map [MoE layers, W] of the weights that come next.

    Raises `InvalidInputError` if layers or slots are others than the model's, or if the router has no map to change.
    """
    layers = [module for module in model_runner.model.modules() if hasattr(module, "build_expert_params_mapping")]
    require(
        len(layers) == len(slots),
        f"the weight sync sends an expert map of {len(slots)} MoE layers, but this vLLM worker has {len(layers)}. "
        "vLLM does not accept expert maps with pipeline parallelism.",
    )
    for number, (layer, row) in enumerate(zip(layers, slots, strict=True)):
        width = layer.moe_config.num_experts
        require(
            len(row) == width, f"the weight sync sends {len(row)} slots for MoE layer {number}, but vLLM has {width}."
        )
    num_experts = layers[0].moe_config.num_logical_experts if layers else 0
    _tell_routers(model_runner, slots, num_experts)
    for layer, row in zip(layers, slots, strict=True):
        layer.get_expert_mapping = functools.partial(table_of_layer, layer, row)


def table_of_layer(layer: Any, row: NDArray[np.int32], *args: Any, **names: Any) -> list[TableEntry]:
    """Return vLLM's table of a layer under another map [W]."""
    return table_of_map([TableEntry(*entry) for entry in type(layer).get_expert_mapping(layer, *args, **names)], row)


def table_of_map(start_table: list[TableEntry], row: NDArray[np.int32]) -> list[TableEntry]:
    """Return the table under the map `row` [W]; entries of no single expert stay as they are, in front."""
    of_expert: dict[int, list[TableEntry]] = defaultdict(list)
    common = []
    for entry in start_table:
        named = EXPERT.search(entry.weight)
        if named is None:
            common.append(entry)
        # A redundant slot of the start map has the same names again.
        elif all(entry[:2] != known[:2] or entry.shard != known.shard for known in of_expert[int(named[1])]):
            of_expert[int(named[1])].append(entry)
    table = common
    for slot, expert in enumerate(row.tolist()):
        require(
            expert in of_expert,
            f"slot {slot} holds expert {expert}, but vLLM's table of weight names lacks this expert.",
        )
        table += [entry._replace(slot=slot) for entry in of_expert[expert]]
    return table


def _tell_routers(model_runner: Any, slots: NDArray[np.int32], num_experts: int) -> None:
    """Change the maps by which routers find slots, in place. Without EPLB vLLM has none, and slot p is of expert p."""
    state = getattr(model_runner, "eplb_state", None)
    if state is None:
        start_map = np.arange(slots.shape[1])
        require(
            bool((slots == start_map).all()),
            "the weight sync sends an expert map, but the routers of vLLM cannot use it without enable_eplb. "
            "Remove expert_map, or set enable_eplb with a step_interval longer than the run, so that vLLM itself moves "
            "no expert.",
        )
        return
    from vllm.distributed.eplb.eplb_state import _commit_eplb_maps

    for model_state in state.model_states.values():
        if model_state.logical_to_physical_map.shape[1] == num_experts:
            _commit_eplb_maps(model_state, torch.as_tensor(np.array(slots), dtype=torch.int64))


def without_map(model_runner: Any, weights: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Take the map that is among some weights, if it is, and return the others."""
    others = []
    for name, tensor in weights:
        if name == MAP_NAME:
            take_map(model_runner, tensor.cpu().numpy())
        else:
            others.append((name, tensor))
    return others
