"""Loss, gradient and metrics never wait for the device, and every objective compiles into one graph."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_rl.importance import (
    OBJECTIVES,
    ROLLOUT_PRESETS,
    PolicyLossInputs,
    RolloutCorrectionConfig,
    RouterShiftAccumulator,
    apply_rollout_correction,
    policy_loss,
)

LENGTHS = (4, 1, 6, 3)
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "item", "equal", "unique_dim", "_unique2"}


class Waits(TorchDispatchMode):
    """Collects the operators that read a value on the host, or whose shape depends on one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indices = [each for arg in args if isinstance(arg, list | tuple) for each in arg]
        by_mask = any(isinstance(each, Tensor) and each.dtype == torch.bool for each in indices) and (
            func.overloadpacket.__name__ in ("index", "index_put", "index_put_")
        )
        if func.overloadpacket.__name__ in WAITS or by_mask:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_counter_counts() -> None:
    values = torch.arange(3.0)
    for wait in (lambda: float(values[0]), lambda: bool(values.any()), lambda: values[values > 1], values.nonzero):
        with Waits() as waits:
            wait()
        assert len(waits.found) == 1


def batch(packed: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows, width = len(LENGTHS), max(LENGTHS)
    old = -1.0 - torch.rand(rows, width, generator=generator)
    inside = torch.arange(width) < torch.tensor(LENGTHS).unsqueeze(1)
    tensors = {
        "old_log_prob": old,
        "log_prob": old + 0.1 * torch.randn(rows, width, generator=generator),
        "rollout_log_prob": old + 0.1 * torch.randn(rows, width, generator=generator),
        "advantages": torch.randn(rows, 1, generator=generator).repeat(1, width),
        "rollout_is_weights": torch.rand(rows, width, generator=generator),
        "router_shift_ratio": 0.9 + 0.1 * torch.rand(rows, width, generator=generator),
        "policy_version": torch.randint(3, (rows, width), generator=generator),
        "response_mask": inside.float(),
        "draw": torch.rand(rows, width, generator=generator),
    }
    if packed:
        tensors = {name: value[inside] for name, value in tensors.items()}
        tensors["cu_seqlens"] = torch.tensor([0, *LENGTHS]).cumsum(0)
    return tensors


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("objective", OBJECTIVES.names)
def test_no_objective_waits(objective: str, packed: bool) -> None:
    tensors = batch(packed)
    tensors["log_prob"].requires_grad_()
    with Waits() as waits:
        output = policy_loss(PolicyLossInputs(**tensors, current_version=3), objective=objective)
        output.loss.backward()
    assert waits.found == []
    assert all(value.ndim == 0 and not value.requires_grad for value in output.metrics.values())


@pytest.mark.parametrize("packed", [False, True])
def test_no_correction_waits_nor_the_router_shift(packed: bool) -> None:
    tensors = batch(packed)
    triple = [tensors[name] for name in ("old_log_prob", "rollout_log_prob", "response_mask")]
    with Waits() as waits:
        for preset in ROLLOUT_PRESETS:
            config = RolloutCorrectionConfig.preset(preset, rollout_token_veto_threshold=0.1)
            apply_rollout_correction(config, *triple, cu_seqlens=tensors.get("cu_seqlens"))
        accumulator = RouterShiftAccumulator(5)
        accumulator.add_layer(torch.rand(5, 2), torch.rand(5, 2), valid=torch.ones(5, 2, dtype=torch.bool), layer=3)
        accumulator.finish(noise=0.1)
    assert waits.found == []


GRADIENTS = ("ppo", "reinforce", "gmpo", "ctpo", "kl_cov")
"""One objective of each way in which gradients are made: of a ratio, a likelihood, a mean, packed prefixes, a pull."""


@pytest.mark.lengthy
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*:DeprecationWarning")  # raised by the tracing itself
@pytest.mark.parametrize("objective", OBJECTIVES.names)
def test_every_objective_compiles_into_one_graph(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")  # tests/conftest.py switches compilation off
    torch._dynamo.reset()

    def loss_of(log_prob: Tensor, tensors: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        inputs = PolicyLossInputs(log_prob=log_prob, current_version=3, **tensors)
        output = policy_loss(inputs, objective=rule)
        return output.loss, output.metrics

    # A name is enough, but where an option is an object itself: tracing does not make those.
    rule = OBJECTIVES[objective]() if objective == "decoupled_ppo" else objective

    tensors = batch(packed=objective == "ctpo")
    log_prob = tensors.pop("log_prob")
    found = []
    torch._dynamo.utils.counters.clear()
    # aot_eager traces the backward pass too, without a code generator behind it.
    backend = "aot_eager" if objective in GRADIENTS else "eager"
    with torch._dynamo.config.patch(disable=False):
        for function in (loss_of, torch.compile(loss_of, fullgraph=True, backend=backend)):
            leaf = log_prob.clone().requires_grad_()
            loss, metrics = function(leaf, tensors)
            loss.backward()
            found.append((loss.detach(), leaf.grad, metrics))
    torch.testing.assert_close(found[1], found[0])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
