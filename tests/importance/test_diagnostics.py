"""Diagnostics, by hand and by property."""

import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.importance import (
    kl_estimate,
    router_agreement,
)


def test_kl_estimators_by_hand() -> None:
    # pi = 0.5, reference = 0.25: x = -ln 2.
    log_prob, reference = torch.tensor(0.5).log(), torch.tensor(0.25).log()
    assert kl_estimate(log_prob, reference, "k1").item() == pytest.approx(0.69314718)
    assert kl_estimate(log_prob, reference, "k2").item() == pytest.approx(0.24022651)
    assert kl_estimate(log_prob, reference, "k3").item() == pytest.approx(0.5 - 1 + 0.69314718)
    assert kl_estimate(torch.tensor(-1e4), torch.tensor(0.0), "k3").isfinite()
    with pytest.raises(InvalidInputError, match=r"unknown KL estimator 'k4'"):
        kl_estimate(log_prob, reference, "k4")


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_differentiate(estimator: str) -> None:
    log_prob = torch.tensor([-0.3, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.5, -0.6], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda lp: kl_estimate(lp, reference, estimator), (log_prob,))


def test_router_agreement_by_hand() -> None:
    ours = torch.tensor([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[-1, -1], [8, -1]]])
    theirs = torch.tensor([[[1, 0], [3, 9]], [[9, 8], [6, 7]], [[3, 4], [8, 5]]])
    # Token 1: both of two, one of two. Token 2: none, both. Token 3: no route counts as agreement; one of one.
    assert router_agreement(ours, theirs).tolist() == [0.75, 0.5, 1.0]
    assert router_agreement(ours, theirs, per_layer=True).tolist() == [[1.0, 0.5], [0.0, 1.0], [1.0, 1.0]]
    assert router_agreement(ours[:0], theirs[:0]).shape == (0,)
    compact = router_agreement(ours[:2].to(torch.uint8), theirs[:2].to(torch.uint8))
    assert compact.tolist() == [0.75, 0.5]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_straight_through_estimators_have_the_value_of_one_and_the_gradient_of_k2(estimator: str) -> None:
    reference = torch.tensor([-0.5, -2.0], dtype=torch.float64)
    log_prob = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    value = kl_estimate(log_prob, reference, f"{estimator}+")
    torch.testing.assert_close(value, kl_estimate(log_prob, reference, estimator))
    (grad,) = torch.autograd.grad(value.sum(), log_prob)
    torch.testing.assert_close(grad, (log_prob - reference).detach())


def test_the_weighted_estimate_is_the_divergence_whoever_drew_the_samples() -> None:
    """Over all tokens of a small vocabulary: sum_y q(y) (p / q) k3(y) = KL(p || r), in value and in gradient."""
    logits = torch.tensor([0.3, -0.2, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    p, q = logits.log_softmax(0), torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    reference = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64).log()
    divergence = (p.exp() * (p - reference)).sum()
    estimate = (q.exp() * kl_estimate(p, reference, "k3", importance_ratio=(p - q).exp())).sum()
    torch.testing.assert_close(estimate, divergence)
    torch.testing.assert_close(
        torch.autograd.grad(estimate, logits, retain_graph=True), torch.autograd.grad(divergence, logits)
    )
