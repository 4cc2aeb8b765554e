"""Gradients of every objective: finite differences, closed forms, and the limit of equal policies."""

import pytest
import torch
from torch import Tensor

from moe_rl.importance import OBJECTIVES, PolicyLossInputs, RouterShiftUse, policy_loss

NAMES = sorted(OBJECTIVES.names)
SCORE_FUNCTION = {
    "cispo",
    "scale_rl",
    "dppo_tv",
    "dppo_kl",
    "reinforce",
    "aspo",
    "gspo",
    "ctpo",
    "topr",
    "vespo",
}
"""Objectives with a stop-gradient inside the ratio: their value is not an antiderivative of their gradient."""


def batch(seed: int = 0, rows: int = 3, width: int = 5, spread: float = 0.3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)

    old = -1.0 + normal(0.3)
    return {
        "old_log_prob": old,
        "rollout_log_prob": old + normal(0.1),
        "log_prob": (old + normal(spread)).requires_grad_(),
        "advantages": torch.tensor([[1.5], [-0.7], [0.4]], dtype=torch.float64)[:rows].expand(rows, width),
        "response_mask": torch.rand(rows, width, generator=generator) > 0.2,
        "draw": torch.rand(rows, width, generator=generator),
    }


def gradient(loss: Tensor, log_prob: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss, log_prob)
    return grad


@pytest.mark.parametrize("objective", [name for name in NAMES if name not in SCORE_FUNCTION])
def test_gradients_match_finite_differences(objective: str) -> None:
    tensors = batch()

    def loss(log_prob: Tensor) -> Tensor:
        inputs = PolicyLossInputs(**(tensors | {"log_prob": log_prob}))
        return policy_loss(inputs, objective=objective).loss

    assert torch.autograd.gradcheck(loss, (tensors["log_prob"],), eps=1e-7, atol=1e-6)


def closed_form(objective: str, tensors: dict[str, Tensor]) -> Tensor:
    """d loss / d log pi per token before aggregation, from the definitions: sg() terms count as constants."""
    d = (tensors["log_prob"] - tensors["old_log_prob"]).detach()
    mask, advantages = tensors["response_mask"], tensors["advantages"]
    rho = d.exp()
    if objective == "reinforce":
        return -advantages
    if objective == "cispo":
        return -advantages * rho.clamp(max=1.2)
    if objective in ("dppo_tv", "dppo_kl"):  # this batch moves no probability far enough to be masked: checked below
        return -advantages * rho
    if objective == "aspo":
        inside = torch.where(advantages < 0, rho >= 0.8, rho <= 1.2)
        return torch.where(advantages < 0, -advantages * rho, -advantages / rho) * inside
    if objective == "gspo":
        s = ((d * mask).sum(1) / mask.sum(1)).exp().unsqueeze(1)
        clipped = torch.where(advantages > 0, s > 1.05, s < 0.95)
        return -advantages * s * ~clipped
    c = (d * mask).cumsum(1)
    t = mask.cumsum(1).clamp(min=1).double()
    clipped = torch.where(advantages > 0, c > 2.0 * t.sqrt(), c < -2.0 * t.sqrt())
    return -advantages * c.exp() * ~clipped


@pytest.mark.parametrize(
    ("objective", "options"),
    [
        ("reinforce", {}),
        ("cispo", {}),
        ("dppo_tv", {"clip_ratio_low": 1.0, "clip_ratio_high": 1.0}),
        ("dppo_kl", {"clip_ratio_low": 9.0, "clip_ratio_high": 9.0}),
        ("aspo", {}),
        ("gspo", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05}),
        ("ctpo", {"la_clip_low": 2.0, "la_clip_high": 2.0, "la_clip_c": 19.0}),
    ],
)
def test_score_function_gradients_match_their_closed_form(objective: str, options: dict[str, float]) -> None:
    tensors = batch()
    output = policy_loss(PolicyLossInputs(**tensors), objective=objective, loss_agg_mode="token-sum", **options)
    if objective.startswith("dppo"):
        assert output.metrics["actor/pg_clipfrac"] == 0.0
    expected = closed_form(objective, tensors) * tensors["response_mask"]
    torch.testing.assert_close(gradient(output.loss, tensors["log_prob"]), expected, rtol=1e-12, atol=0.0)


def test_gspo_has_the_gradient_of_the_sequence_mean() -> None:
    # slime differentiates exp(mean d) itself; under seq-mean-token-mean the two gradients agree.
    tensors = batch()
    mask, advantages = tensors["response_mask"], tensors["advantages"][:, 0]
    output = policy_loss(PolicyLossInputs(**tensors), objective="gspo", clip_ratio_low=0.05, clip_ratio_high=0.05)
    d = tensors["log_prob"] - tensors["old_log_prob"]
    s = ((d * mask).sum(1) / mask.sum(1)).exp()
    direct = torch.maximum(-advantages * s, -advantages * s.clamp(0.95, 1.05)).mean()
    torch.testing.assert_close(output.loss, direct, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        gradient(output.loss, tensors["log_prob"]), gradient(direct, tensors["log_prob"]), rtol=1e-10, atol=1e-14
    )


@pytest.mark.parametrize("use_router_shift", [False, True])
@pytest.mark.parametrize("objective", NAMES)
def test_equal_policies_give_the_plain_policy_gradient(objective: str, use_router_shift: bool) -> None:
    tensors = batch(spread=0.0)
    tensors["rollout_log_prob"] = tensors["old_log_prob"]
    if use_router_shift:
        tensors["router_shift_ratio"] = torch.ones_like(tensors["old_log_prob"])
    output = policy_loss(PolicyLossInputs(**tensors), objective=objective, loss_agg_mode="seq-mean-token-mean")
    mask = tensors["response_mask"].double()
    expected = -tensors["advantages"] * mask / mask.sum(1, keepdim=True) / mask.shape[0]
    torch.testing.assert_close(gradient(output.loss, tensors["log_prob"]), expected, rtol=1e-12, atol=1e-15)
    assert output.metrics["actor/pg_clipfrac"] == 0.0


@pytest.mark.filterwarnings("ignore:clip_ratio_low .* of (gs|lus)po is less")
@pytest.mark.parametrize("order", ["before-clip", "after-clip"])
@pytest.mark.parametrize("objective", NAMES)
def test_no_gradient_flows_through_weights_or_router_shift(objective: str, order: str) -> None:
    tensors = batch()
    leaves = {
        name: torch.full_like(tensors["old_log_prob"], 0.9, requires_grad=True)
        for name in ("rollout_is_weights", "router_shift_ratio")
    }
    constants = {
        name: tensors[name].clone().requires_grad_() for name in ("old_log_prob", "rollout_log_prob", "advantages")
    }
    output = policy_loss(
        PolicyLossInputs(**(tensors | leaves | constants)),
        objective=objective,
        router_shift=RouterShiftUse(order=order),
    )
    output.loss.backward()
    assert tensors["log_prob"].grad is not None
    assert all(leaf.grad is None for leaf in (leaves | constants).values())


def weighted_gradient(objective: str, tensors: dict[str, Tensor], weight: float) -> Tensor:
    weights = torch.full_like(tensors["old_log_prob"], weight)
    output = policy_loss(PolicyLossInputs(**tensors, rollout_is_weights=weights), objective=objective)
    return gradient(output.loss, tensors["log_prob"])


@pytest.mark.parametrize("objective", NAMES)
def test_a_constant_rollout_weight_scales_the_gradient(objective: str) -> None:
    tensors = batch()
    half, whole = weighted_gradient(objective, tensors, 0.5), weighted_gradient(objective, tensors, 1.0)
    torch.testing.assert_close(half, 0.5 * whole, rtol=1e-8, atol=1e-12)


def test_a_drifted_router_damps_every_objective_that_has_a_ratio_to_damp() -> None:
    # Policies equal and widths wide open, so that no clip interferes: the gradient is gamma times the plain one.
    tensors = batch(spread=0.0)
    tensors["rollout_log_prob"] = tensors["old_log_prob"]
    tensors["router_shift_ratio"] = torch.full_like(tensors["old_log_prob"], 0.5)
    wide = {"clip_ratio_low": 0.9, "clip_ratio_high": 0.9}
    plain = gradient(
        policy_loss(PolicyLossInputs(**(tensors | {"router_shift_ratio": None})), objective="ppo").loss,
        tensors["log_prob"],
    )
    for objective in ("ppo", "dapo", "opsm", "decoupled_ppo", "cispo", "dppo_tv", "reinforce"):
        options = {} if objective in ("cispo", "reinforce", "dppo_tv") else wide
        output = policy_loss(PolicyLossInputs(**tensors), objective=objective, **options)
        torch.testing.assert_close(gradient(output.loss, tensors["log_prob"]), 0.5 * plain)


@pytest.mark.filterwarnings("ignore:clip_ratio_low .* of gspo is less")
def test_the_shortcut_of_the_page_equals_gamma_before_the_clip() -> None:
    """Old log-probabilities less log(gamma), for frameworks whose loss cannot be changed."""
    tensors = batch()
    gamma = 0.8 + 0.2 * torch.linspace(0, 1, 15, dtype=torch.float64).view(3, 5)
    for objective in ("ppo", "grpo", "dapo", "gspo", "gmpo", "cispo", "sapo", "ctpo", "aspo"):
        use = RouterShiftUse(order="before-clip")
        inside = PolicyLossInputs(**tensors, router_shift_ratio=gamma)
        outside = PolicyLossInputs(**(tensors | {"old_log_prob": tensors["old_log_prob"] - gamma.log()}))
        found = policy_loss(inside, objective=objective, router_shift=use).loss
        expected = policy_loss(outside, objective=objective).loss
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(
            gradient(found, tensors["log_prob"]), gradient(expected, tensors["log_prob"]), rtol=1e-12, atol=1e-14
        )
