"""When a layer's copies are pushed, the layer's own and those of its neighbors from other nodes, in one process.

Plans, cells and exchanges are the runtime's; the transport notes what it is asked to push and moves nothing.
"""

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron says of what it does without TransformerEngine and Apex
    from moe_rl.megatron.activate import PassParts, activate, deactivate
    from moe_rl.megatron.replica_cells import ReplicaCells
    from moe_rl.megatron.transport import ReplicaCell

LAYERS = 5
IN_NODE = [1, 2]
"""Layers with copies from the rank's own node, in every micro-batch."""
ACROSS = [1, 3, 4]
"""Layers with copies from other nodes, in micro-batch 0 alone."""


def cells_of(micro_batch: int) -> ReplicaCells:
    """Return the cells of one micro-batch; its copies are between other ranks."""
    filled = np.zeros((LAYERS, 2), np.bool_)
    filled[IN_NODE, 0] = True
    filled[ACROSS, 1] = micro_batch == 0
    return ReplicaCells(
        num_micro_batches=1,
        num_layers=LAYERS,
        start=np.zeros(LAYERS + 1, np.int64),
        copies=np.zeros((0, 6), np.int64),
        filled=filled,
        any_across=bool(filled[:, 1].any()),
        has_copies=filled.any(axis=1),
        half=np.array([0, 0, 0, 1, 0]),
        rounds=np.zeros(LAYERS, np.int64),
    )


class Chunk:
    """A model chunk of LAYERS layers in a pass of two micro-batches, whose tables come in two parts."""

    def __init__(self) -> None:
        self.pushes: list[tuple[int, int, int]] = []
        """(micro-batch, layer, bank) in their order."""
        parts: Any = [
            SimpleNamespace(
                cells=cells_of(micro_batch),
                slots=SimpleNamespace(
                    terms=SimpleNamespace(device=torch.device("cpu")),
                    table=lambda index, layer, part=micro_batch: (part, index, layer),
                ),
            )
            for micro_batch in range(2)
        ]
        clock = SimpleNamespace()
        self.states: Any = [
            SimpleNamespace(layer=layer, clock=clock, experts=f"experts of {layer}", rows={}) for layer in range(LAYERS)
        ]
        self.resident = SimpleNamespace(start_push=lambda: None)
        activate(
            PassParts(num_micro_batches=2, device=torch.device("cpu"), ready=parts, later=[]),
            self.states,
            transport=SimpleNamespace(start_push=self._push),  # type: ignore[arg-type]
            residents=SimpleNamespace(layers={2: self.resident}),  # type: ignore[arg-type]
        )

    def _push(self, cell: ReplicaCell, bank: int, experts: str) -> None:
        if bank in cell.banks:
            micro_batch, layer = cell.key
            assert experts == f"experts of {layer}"
            self.pushes.append((micro_batch, layer, bank))

    def begun(self, layer: int, micro_batch: int, *, recomputing: bool = False) -> list[tuple[int, int, int]]:
        self.pushes.clear()
        plan = self.states[layer].plans.begin(micro_batch, recomputing=recomputing)
        assert plan is self.states[layer].plans.plan(micro_batch), "one object per micro-batch"
        return list(self.pushes)

    def ended(self, layer: int, micro_batch: int) -> list[tuple[int, int, int]]:
        """Return what the gradient of the layer's output pushes."""
        output = torch.ones(2, requires_grad=True)
        passed = self.states[layer].plans.end(micro_batch, output)
        self.pushes.clear()
        if passed is output:
            return []
        passed.sum().backward()
        assert output.grad is not None
        assert self.pushes, "a node of the graph that has nothing to do"
        return list(self.pushes)


def test_a_forward_pushes_its_own_copies_and_the_next_layers_from_other_nodes() -> None:
    chunk = Chunk()
    assert [chunk.begun(layer, 0) for layer in range(LAYERS)] == [
        [(0, 1, 1)],  # layer 1's half, while layer 0 has none
        [(0, 1, 0), (0, 1, 1), (0, 3, 2)],  # the next one across is two layers on, in the other half
        [(0, 2, 0), (0, 3, 2)],
        [(0, 3, 2), (0, 4, 1)],
        [(0, 4, 1)],
    ]
    assert [chunk.begun(layer, 1) for layer in range(LAYERS)] == [[], [(1, 1, 0)], [(1, 2, 0)], [], []]
    assert [chunk.begun(layer, 0, recomputing=True) for layer in range(LAYERS)] == [
        [],
        [(0, 1, 0), (0, 1, 1)],
        [(0, 2, 0)],
        [(0, 3, 2)],
        [(0, 4, 1)],
    ], "a backward follows, not the next layer"


def test_a_backward_pushes_its_own_copies_and_those_of_the_layer_before_from_other_nodes() -> None:
    chunk = Chunk()
    assert [chunk.ended(layer, 0) for layer in range(LAYERS)] == [
        [],
        [(0, 1, 0), (0, 1, 1)],
        [(0, 2, 0), (0, 1, 1)],
        [(0, 3, 2), (0, 1, 1)],
        [(0, 4, 1), (0, 3, 2)],
    ]
    assert [chunk.ended(layer, 1) for layer in range(LAYERS)] == [[], [(1, 1, 0)], [(1, 2, 0)], [], []]


def test_a_plan_is_of_its_micro_batch_and_layer_and_there_is_none_beyond_the_pass() -> None:
    chunk = Chunk()
    for micro_batch in range(2):
        for layer, state in enumerate(chunk.states):
            plan = state.plans.plan(micro_batch)
            if layer not in IN_NODE + (ACROSS if micro_batch == 0 else []):
                assert plan is None
                continue
            assert plan.table == (micro_batch, 0, layer), "each part has one micro-batch"
            assert plan.replicated.cell.key == (micro_batch, layer)
            assert plan.replicated.experts == f"experts of {layer}"
            assert plan.replicated.residents is (chunk.resident if layer == 2 else None)
    for micro_batch in (2, 3):
        assert [chunk.begun(layer, micro_batch) for layer in range(LAYERS)] == [[]] * LAYERS
        assert [chunk.ended(layer, micro_batch) for layer in range(LAYERS)] == [[]] * LAYERS
    deactivate(chunk.states)
    assert [state.plans for state in chunk.states] == [None] * LAYERS
