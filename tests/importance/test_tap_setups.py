"""RouterTap's gamma is the brute force's within 1e-6 in the set-ups that people train in.

`tests/frameworks/transformers/test_tap_under_lora.py` has the other four of the eighteen.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.importance import tap_setups as setups

pytestmark = pytest.mark.lengthy
pytest.importorskip("transformers", reason="needs transformers")

MODELS = ("Qwen3Moe", "Olmoe")
EVERY_SAMPLE = ([0, 1, 2], [3, 4, 5])
every_model = pytest.mark.parametrize("name", MODELS)


@every_model
def test_padded(name: str) -> None:
    assert setups.worst_error(setups.built(name), setups.batches(setups.padded, *EVERY_SAMPLE)) <= setups.TOLERANCE


@every_model
def test_packed(name: str) -> None:
    runs = setups.batches(setups.packed, *EVERY_SAMPLE)
    assert setups.worst_error(setups.built(name), runs) <= setups.TOLERANCE


@every_model
def test_shuffled(name: str) -> None:
    runs = setups.batches(setups.padded, [5, 0, 3], [2, 4, 1])
    assert setups.worst_error(setups.built(name), runs) <= setups.TOLERANCE


@every_model
def test_accumulated_over_micro_batches_of_one_and_two(name: str) -> None:
    runs = setups.batches(setups.packed, [4], [0, 2], [1], [5, 3])
    assert setups.worst_error(setups.built(name), runs) <= setups.TOLERANCE


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of reentrant checkpointing without it
@pytest.mark.parametrize("reentrant", [False, True])
@every_model
def test_recomputed(name: str, reentrant: bool) -> None:
    model = setups.built(name)
    with setups.recomputed(model, reentrant=reentrant):
        assert setups.worst_error(model, setups.batches(setups.padded, *EVERY_SAMPLE)) <= setups.TOLERANCE


@pytest.mark.multi_rank(world_size=2, case="tap_ddp_cases.under_ddp")
def test_under_ddp_of_two_ranks(outcome: list[Any]) -> None:
    assert max(outcome) <= setups.TOLERANCE


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own tracing behind a graph break
def test_compiled_inside_the_old_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")  # tests/conftest.py switches compilation off
    torch.compiler.reset()
    plain = setups.built("Qwen3Moe")
    model = copy.deepcopy(plain)
    for layer in model.model.layers:
        layer.compile(backend="eager")

    def both(_: nn.Module) -> None:
        setups.drifted(plain)
        setups.drifted(model)

    try:
        with torch._dynamo.config.patch(disable=False):
            runs = setups.batches(setups.padded, *EVERY_SAMPLE)
            assert setups.worst_error(model, runs, plain=plain, drift=both) <= setups.TOLERANCE
    finally:
        torch.compiler.reset()
