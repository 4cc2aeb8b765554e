"""A map that comes with the weights: the table of names that it makes, and what is refused. The loader itself is run in
tests/sync/test_engine_loaders.py."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.frameworks.vllm.sync_map import MAP_NAME, TableEntry, table_of_map, take_map, without_map


def start_table(num_experts: int, num_slots: int) -> list[TableEntry]:
    """vLLM's of slots p % E, after an entry that is of no expert."""
    entries = [TableEntry("experts.w13_weight", "experts.gate_up_proj", 0, "w1")]
    for slot in range(num_slots):
        for matrix, shard in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
            parameter = "experts.w2_" if shard == "w2" else "experts.w13_"
            entries.append(TableEntry(parameter, f"experts.{slot % num_experts}.{matrix}.", slot, shard))
    return entries


@pytest.mark.parametrize("row", [[0, 1, 0], [1, 0, 1], [1, 1, 0]])
def test_every_slot_gets_the_matrices_of_its_expert_once(row: list[int]) -> None:
    table = table_of_map(start_table(2, 3), np.array(row, np.int32))
    assert table[0].weight == "experts.gate_up_proj"
    slots = {(entry.slot, entry.shard): entry for entry in table[1:]}
    assert len(slots) == len(table) - 1 == 9
    for (slot, shard), entry in slots.items():
        assert entry.weight.startswith(f"experts.{row[slot]}.")
        assert entry.parameter == ("experts.w2_" if shard == "w2" else "experts.w13_")


def test_an_expert_that_the_table_does_not_know_is_refused() -> None:
    with pytest.raises(
        InvalidInputError, match="slot 1 holds expert 2, but vLLM's table of weight names lacks this expert"
    ):
        table_of_map(start_table(2, 2), np.array([0, 2], np.int32))


class Layer:
    def __init__(self, slots: int) -> None:
        self.moe_config = SimpleNamespace(num_experts=slots, num_logical_experts=2)

    def build_expert_params_mapping(self) -> None: ...

    def get_expert_mapping(self) -> list[TableEntry]:
        return start_table(2, self.moe_config.num_experts)


def runner(layers: int, slots: int = 3) -> Any:
    modules = [object(), *(Layer(slots) for _ in range(layers))]
    return SimpleNamespace(model=SimpleNamespace(modules=lambda: modules))


@pytest.mark.parametrize(("slots", "sentence"), [
    ([[0, 1, 2]] * 2, "an expert map of 2 MoE layers, but this vLLM worker has 1"),
    ([[0, 1]], "the weight sync sends 2 slots for MoE layer"),
    ([[1, 0, 1]], "the routers of vLLM cannot use it without enable_eplb"),
])  # fmt: skip
def test_a_map_that_the_model_cannot_have_is_refused(slots: list[list[int]], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        take_map(runner(1), np.array(slots, np.int32))


def test_a_map_is_taken_off_the_weights_and_the_second_replaces_the_first() -> None:
    """Without redundant slots the start map is the only one that routers know."""
    weights = [("norm", torch.ones(2)), (MAP_NAME, torch.arange(2, dtype=torch.int32)[None])]
    model = runner(1, slots=2)
    for _ in range(2):
        others = without_map(model, weights)
        assert [name for name, _ in others] == ["norm"]
        assert len(model.model.modules()[1].get_expert_mapping()) == 1 + 3 * 2


def test_with_eplb_names_and_routers_follow_the_map_of_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own function is a stand-in that writes the map of a model's routers, as vLLM 0.33.0's does.

    A second model of the worker, such as a drafter with one expert, keeps its map.
    """

    def commit(model_state: Any, new_physical_to_logical_map: torch.Tensor) -> None:
        model_state.physical_to_logical_map.copy_(new_physical_to_logical_map)

    eplb_state: Any = ModuleType("vllm.distributed.eplb.eplb_state")
    eplb_state._commit_eplb_maps = commit
    for name in ("vllm", "vllm.distributed", "vllm.distributed.eplb"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, eplb_state.__name__, eplb_state)

    def state(num_experts: int) -> Any:
        return SimpleNamespace(
            logical_to_physical_map=torch.zeros(2, num_experts, 2, dtype=torch.int64),
            physical_to_logical_map=torch.full((2, 3), -1),
        )

    model = runner(2)
    trained, drafter = state(2), state(1)
    model.eplb_state = SimpleNamespace(model_states={"trained": trained, "drafter": drafter})
    for slots in ([[1, 0, 1], [0, 1, 1]], [[0, 1, 0], [1, 1, 0]]):
        take_map(model, np.array(slots, np.int32))
        assert trained.physical_to_logical_map.tolist() == slots
        assert drafter.physical_to_logical_map.tolist() == [[-1] * 3] * 2
        for layer, row in zip(model.model.modules()[1:], slots, strict=True):
            gates = [entry for entry in layer.get_expert_mapping() if "gate_proj." in entry.weight]
            assert [(entry.slot, entry.weight) for entry in gates] == [
                (slot, f"experts.{expert}.gate_proj.") for slot, expert in enumerate(row)
            ]
