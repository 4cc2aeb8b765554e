"""The head in float32: of PyTorch here, of Megatron in tests/megatron/test_tap.py."""

import copy

import pytest
import torch
from torch import nn

from moe_rl.core.errors import InvalidInputError
from moe_rl.importance import float32_head


class Model(nn.Module):
    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.body, self.lm_head = nn.Linear(64, 64), nn.Linear(64, 50, bias=bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.body(hidden))
        return logits


@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_those_of_float32_and_weights_keep_their_type(bias: bool) -> None:
    model = Model(bias=bias).bfloat16()
    names = list(model.state_dict())
    hidden = torch.randn(7, 64).bfloat16()
    rounded = model(hidden)
    float32_head(model)
    head, copied = model.lm_head, copy.deepcopy(model)
    logits = model(hidden)
    exact = model.body(hidden).double() @ head.weight.double().T + (0.0 if head.bias is None else head.bias.double())
    assert logits.dtype == torch.float32
    assert rounded.dtype == torch.bfloat16
    # 64 products of numbers around 1: float32 rounds to 1e-7 of them, bfloat16 the sum to 2^-9.
    assert float((logits - exact).detach().abs().max()) < 1e-5
    assert float((rounded.double() - exact).detach().abs().max()) > 1e-4
    logits.sum().backward()
    assert head.weight.grad is not None
    assert head.weight.grad.dtype == torch.bfloat16
    assert list(model.state_dict()) == names
    with torch.no_grad():
        head.weight.zero_()
    assert torch.equal(copied(hidden), logits), "a copy has a head of its own"


def test_a_model_without_head_is_refused_but_an_earlier_stage_is_not() -> None:
    with pytest.raises(InvalidInputError, match="no layer named lm_head or output_layer"):
        float32_head(nn.Sequential(nn.Linear(4, 4)))
    stage = nn.Sequential(nn.Linear(4, 4))
    stage.post_process = False  # type: ignore[assignment]  # of Megatron's GPTModel
    float32_head(stage)


def test_a_head_that_adds_its_gradient_elsewhere_is_refused() -> None:
    model = Model()
    model.lm_head.gradient_accumulation_fusion = True  # type: ignore[assignment]  # of Megatron's ColumnParallelLinear
    with pytest.raises(InvalidInputError, match="gradient_accumulation_fusion must be False"):
        float32_head(model)
