"""Batches with names inside: what each rank loads where SGLang pairs batches by position. The loader itself is run in
tests/sync/test_engine_loaders.py."""

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.frameworks.sglang.weight_loader import is_packed, load, packed


class Model:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: object) -> None:
        self.tensors.update(weights)  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_ranks_load_their_own_names_though_batches_are_paired_by_position(dtype: torch.dtype) -> None:
    own = [
        [("experts.5", torch.arange(7).to(dtype))],
        [("experts.6", torch.arange(3).to(dtype)), ("empty", torch.empty(0, 3, dtype=dtype)),
         ("experts.7", torch.arange(12).to(dtype).view(3, 4).T)],
    ]  # fmt: skip
    batches = [packed(tensors) for tensors in own]
    for rank, model in enumerate((Model(), Model())):
        # SGLang takes the first rank's name for each position, and the rank's own tensor.
        zipped = [(pairs[0][0], pairs[rank][1]) for pairs in zip(*batches, strict=True)]
        assert is_packed(zipped)
        load(model, zipped)
        assert list(model.tensors) == [name for name, _ in own[rank]]
        assert all(torch.equal(model.tensors[name], tensor) for name, tensor in own[rank])


def test_a_batch_of_nothing_and_other_batches() -> None:
    model = Model()
    load(model, packed(()))
    assert model.tensors == {}
    assert not is_packed([("__delta_spec__", torch.empty(0)), ("__values__", torch.empty(0))])


class LocationMetadata:
    """A stand-in of SGLang 0.5.23's `ExpertLocationMetadata`, as far as a loader uses it."""

    num_logical_experts = 2

    def __init__(self, ep_size: int, physical_to_logical_map: torch.Tensor, every_slot: list[Any]) -> None:
        self.ep_size, self.physical_to_logical_map, self.every_slot = ep_size, physical_to_logical_map, every_slot

    @classmethod
    def _init_raw(
        cls, ep_size: int, physical_to_logical_map: torch.Tensor, logical_to_all_physical_map: list[Any]
    ) -> "LocationMetadata":
        return cls(ep_size, physical_to_logical_map, logical_to_all_physical_map)

    def update(self, other: "LocationMetadata", update_layer_ids: list[int]) -> None:
        assert self.ep_size == other.ep_size
        for layer in update_layer_ids:
            self.physical_to_logical_map[layer] = other.physical_to_logical_map[layer]
            self.every_slot[layer] = other.every_slot[layer]


def slots_of_experts(physical: torch.Tensor, num_experts: int, ep_size: int, moe_ep_rank: int | None) -> list[Any]:
    """The slots of every expert of every layer."""
    return [[(row == expert).nonzero().flatten().tolist() for expert in range(num_experts)] for row in physical]


@pytest.fixture
def location(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in of SGLang's module of its expert map: three layers, the first dense, and four slots."""
    module: Any = ModuleType("sglang.srt.eplb.expert_location")
    start = torch.tensor([[0, 1, 0, 1]]).repeat(3, 1)
    current = LocationMetadata(2, start, slots_of_experts(start, 2, 2, None))
    module.get_global_expert_location_metadata = lambda: module.current
    module.current, module.ExpertLocationMetadata = current, LocationMetadata
    module._compute_logical_to_all_physical_map = slots_of_experts
    parent: Any = ModuleType("sglang.srt.eplb")
    parent.expert_location = module
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, parent.__name__, parent)
    return module


def test_a_map_that_comes_with_weights_is_the_engines_in_every_layer(location: Any) -> None:
    kept, slots = location.current.physical_to_logical_map, [[0, 1, 0, 1], [1, 1, 1, 0], [0, 0, 1, 0]]
    model = Model()
    load(model, packed([("norm", torch.ones(2))], np.array(slots, np.int32)))
    assert list(model.tensors) == ["norm"]
    assert location.current.physical_to_logical_map is kept, "routers hold the tensor itself"
    assert (kept.tolist(), kept.dtype) == (slots, torch.int64)
    assert location.current.every_slot[1:] == [[[3], [0, 1, 2]], [[0, 1, 3], [2]]]
    load(model, packed([("norm", torch.zeros(2))]))
    assert kept.tolist() == slots, "a batch without a map changes none"


def test_a_map_that_the_engine_cannot_have_is_refused(location: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"of shape \(2, 4\) \(layers, slots\), but SGLang's map has \(3, 4\)"):
        load(Model(), packed((), np.zeros((2, 4), np.int32)))
    location.current = None
    with pytest.raises(InvalidInputError, match="this model has no expert map in SGLang"):
        load(Model(), packed((), np.zeros((3, 4), np.int32)))
