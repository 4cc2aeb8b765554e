"""SGLang: `--init-expert-location FILE`, a map of all hidden layers.

Read in sglang 0.5.23: srt/eplb/expert_location.py, expert_location_dispatch.py, srt/arg_groups/parallel_hook.py.
"""

import random
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.decode import DecodeBatches
from moe_rl.core.errors import require
from moe_rl.core.expert_map import ExpertMap
from moe_rl.core.mappings import subset
from moe_rl.core.plan import token_ordinals
from moe_rl.rollout_engines.base import (
    Document,
    Ints,
    ReplicaChoice,
    RolloutEngine,
    RunShape,
    copies_of,
    layer_by_layer,
)

# No other key may stand beside it.
KEY = "physical_to_logical_map"
# Of the draws of the static choice.
SEED = 42


def all_layers(expert_map: ExpertMap) -> NDArray[np.int64]:
    """Return [H, W]: dense layers, whose rows nothing reads, as SGLang fills them itself."""
    rows = np.tile(np.arange(expert_map.num_slots) % expert_map.num_experts, (expert_map.num_layers, 1))
    rows[list(expert_map.moe_layer_ids)] = expert_map.slots
    return rows


def nearest_copies(slots: Ints, *, ep_size: int, slots_per_rank: int, ranks_per_node: int) -> Ints:
    """Return [P] the copy among `slots` that each rank prefers, -1 where it prefers none.

    The only one; else the first on the rank itself; else the first on its node, where not all copies are there.
    """
    if len(slots) == 1:
        return np.full(ep_size, slots[0])
    rank = np.arange(ep_size)
    of_slot = slots // slots_per_rank
    is_on_rank = of_slot[None, :] == rank[:, None]
    near = (of_slot // ranks_per_node)[None, :] == (rank // ranks_per_node)[:, None]
    # With all copies on one node the node decides nothing, and SGLang draws among them.
    near[near.all(axis=1)] = False
    nearest = np.where(
        is_on_rank.any(axis=1), is_on_rank.argmax(axis=1), np.where(near.any(axis=1), near.argmax(axis=1), -1)
    )
    return np.where(nearest >= 0, slots[nearest], -1)


def preferred_slots(
    row: NDArray[np.int32], *, num_experts: int, ep_size: int, ranks_per_node: int
) -> tuple[Ints, Ints, Ints]:
    """Return ([P, E] the slot of one row that every rank prefers or -1, and what `copies_of` returns)."""
    table, count = copies_of(row, num_experts)
    near = [
        nearest_copies(slots[:many], ep_size=ep_size, slots_per_rank=len(row) // ep_size, ranks_per_node=ranks_per_node)
        for slots, many in zip(table, count.tolist(), strict=True)
    ]
    return np.stack(near, axis=1), table, count


def static_slots(expert_map: ExpertMap, ranks_per_node: int) -> Ints:
    """Return [P, L, E] the slot that every rank sends its tokens to.

    A rank without a preferred copy draws. Every rank draws for all ranks from the same seed, layer by layer, dense ones
    too, and takes its own; but it draws only for the experts of which it prefers no copy itself, which differ from rank
    to rank, so that their draws do not share tokens evenly.
    """
    ranks, experts = expert_map.ep_size, expert_map.num_experts
    rows = all_layers(expert_map).astype(np.int32)
    slots_chosen = np.empty((ranks, len(rows), experts), np.int64)
    draws: list[tuple[int, int, list[int], list[int]]] = []
    for layer, row in enumerate(rows):
        slots_chosen[:, layer], table, count = preferred_slots(
            row, num_experts=experts, ep_size=ranks, ranks_per_node=ranks_per_node
        )
        for expert in np.flatnonzero((slots_chosen[:, layer] < 0).any(axis=0)).tolist():
            undecided = np.flatnonzero(slots_chosen[:, layer, expert] < 0).tolist()
            draws.append((layer, expert, table[expert, : count[expert]].tolist(), undecided))
    for rank in range(ranks):
        # Python's own generator, as SGLang uses it: another one would draw other copies.
        draw = random.Random(SEED)
        for layer, expert, slots, undecided in draws:
            if rank in undecided:
                even, remainder = divmod(len(undecided), len(slots))
                dealt = slots * even + draw.sample(slots, k=remainder)
                draw.shuffle(dealt)
                slots_chosen[rank, layer, expert] = dealt[undecided.index(rank)]
    of_moe_layers: Ints = slots_chosen[:, list(expert_map.moe_layer_ids)]
    return of_moe_layers


def _static(expert_map: ExpertMap, batches: DecodeBatches, ranks_per_node: int) -> Ints:
    layer = np.arange(batches.num_layers)[None, :, None]
    served: Ints = static_slots(expert_map, ranks_per_node)[batches.source[:, None, None], layer, batches.routes]
    return served


def _random(expert_map: ExpertMap, batches: DecodeBatches, ranks_per_node: int) -> Ints:
    # SGLang draws on the GPU, anew in every forward: other draws of the same kind stand in for them.
    rng = np.random.default_rng(SEED)
    drawn = layer_by_layer(expert_map, batches, lambda ids, count: rng.integers(0, 1 << 16, ids.shape) % count[ids])
    for layer, row in enumerate(expert_map.slots):
        preferred, _, _ = preferred_slots(
            row, num_experts=expert_map.num_experts, ep_size=expert_map.ep_size, ranks_per_node=ranks_per_node
        )
        preferred_copy = preferred[batches.source[:, None], batches.routes[:, layer].astype(np.int64)]
        drawn[:, layer] = np.where(preferred_copy >= 0, preferred_copy, drawn[:, layer])
    return drawn


def _by_row(expert_map: ExpertMap, batches: DecodeBatches, ranks_per_node: int) -> Ints:
    ordinal_in_batch = token_ordinals(batches.batch)[:, None]
    return layer_by_layer(expert_map, batches, lambda ids, count: ordinal_in_batch % count[ids])


def _document(expert_map: ExpertMap) -> Document:
    return {KEY: all_layers(expert_map).tolist()}


def _rows(document: Document, shape: RunShape) -> dict[int, list[int]] | None:
    if KEY not in document:
        return None
    require(len(document) == 1, f"SGLang accepts only the key {KEY}, but the file has {', '.join(document)}.")
    rows = document[KEY]
    require(
        isinstance(rows, list) and len(rows) == shape.num_layers,
        f"{KEY} must have one row per hidden layer ({shape.num_layers}), but has "
        f"{len(rows) if isinstance(rows, list) else 'none'}.",
    )
    return subset(rows, shape.moe_layer_ids)


def _start_lines(expert_map: ExpertMap, path: Path) -> tuple[str, ...]:
    return (
        f"--init-expert-location {path} --ep-num-redundant-experts {expert_map.num_copies} "
        f"--ep-size {expert_map.ep_size}",
        "leave --enable-eplb off, because EPLB would replace the map; weight updates from tensors, process groups "
        'and disk keep the map, but load_format="direct" does not',
    )


ENGINE = RolloutEngine(
    name="sglang",
    summary="SGLang's --init-expert-location: a map of all hidden layers.",
    choices=(
        ReplicaChoice(name="static", when="an all-to-all backend; the default there", serve=_static),
        ReplicaChoice(name="dynamic", when="an all-to-all backend, --ep-dispatch-algorithm dynamic", serve=_random),
        ReplicaChoice(name="by row", when="--moe-a2a-backend none", serve=_by_row),
    ),
    document=_document,
    rows=_rows,
    start_lines=_start_lines,
)
