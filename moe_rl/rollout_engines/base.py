"""What an engine is to moe_rl. To add one: `expert_map.py` with an `ENGINE` in its framework's folder.

n tokens, L MoE layers, K experts per token, W slots, P ranks, E experts, X copies of the expert that has most.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.decode import DecodeBatches
from moe_rl.core.expert_map import ExpertMap
from moe_rl.core.registry import Registry

Ints = NDArray[np.int64]
# What the engine reads, before it is a file.
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaChoice:
    """How an engine chooses the copy that a token goes to."""

    name: str
    when: str
    """Settings of the engine under which it chooses so."""
    serve: Callable[[ExpertMap, DecodeBatches, int], Ints]
    """(map, tokens, ranks per node) -> [n, L, K] slot of every token-expert pair; equal arguments, equal slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEngine:
    """An engine that takes an expert map at start."""

    name: str
    summary: str
    choices: tuple[ReplicaChoice, ...]
    """Its default first."""
    document: Callable[[ExpertMap], Document]
    """Returns what it loads; raises `InvalidInputError` for a map that it would take and break on."""
    rows: Callable[[Document, "RunShape"], dict[int, list[int]] | None]
    """Returns the slots of every MoE layer in a document of this engine, by hidden layer; None where it is of another.
    Raises where it is damaged."""
    start_lines: Callable[[ExpertMap, Path], tuple[str, ...]]
    """Lines that say how to start the engine with the file."""


ROLLOUT_ENGINES: Registry[RolloutEngine] = Registry("rollout engine", part="expert_map:ENGINE")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """What a file does not say of the model and the run that it is for."""

    num_layers: int
    moe_layer_ids: tuple[int, ...]
    num_experts: int
    ep_size: int


def copies_of(slots: NDArray[np.int32], num_experts: int) -> tuple[Ints, Ints]:
    """Return ([E, X] slots of every expert in one row of a map, ascending, -1 behind the last, [E] how many)."""
    count = np.bincount(slots, minlength=num_experts)
    table = np.full((num_experts, int(count.max(initial=1))), -1, np.int64)
    # Stable: copies of an expert stay in the order of their slots, which engines number them by.
    order = np.argsort(slots, kind="stable")
    nth = np.arange(len(slots)) - (np.cumsum(count) - count)[slots[order]]
    table[slots[order], nth] = order
    return table, count


def layer_by_layer(
    expert_map: ExpertMap, batches: DecodeBatches, choose: Callable[[Ints, Ints], NDArray[np.integer]]
) -> Ints:
    """Return [n, L, K] slots: `choose` (experts [n, K], copies of every expert [E]) -> which of its copies [n, K]."""
    served = np.empty(batches.routes.shape, np.int64)
    for layer, row in enumerate(expert_map.slots):
        table, count = copies_of(row, expert_map.num_experts)
        # One layer at a time: [n, L, K] in int64 for all at once is eight times the routes.
        ids = batches.routes[:, layer].astype(np.int64)
        served[:, layer] = table[ids, choose(ids, count)]
    return served
