"""Batches with names inside: what each rank loads where SGLang pairs batches by position. The loader itself is run in
tests/sync/test_engine_loaders.py."""

import pytest
import torch

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
