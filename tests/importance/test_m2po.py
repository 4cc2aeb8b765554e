"""M2PO's mask: by hand, against the rule stated as a loop, and at the edges."""

import pytest
import torch
from torch import Tensor

from moe_rl.core.errors import InvalidInputError
from moe_rl.importance import m2po_mask
from tests.importance.test_compiled import Waits


def kept(ratios: list[float], threshold: float) -> list[bool]:
    rollout = torch.full((1, len(ratios)), -4.0)  # so that no log-probability lies above 0
    old = rollout + torch.tensor([ratios])
    return m2po_mask(old, rollout, torch.ones_like(old), threshold=threshold)[0].tolist()


def test_by_hand() -> None:
    # Squares 0.25, 0.01, 0.09, 0: their mean 0.0875; without the first 0.0333.
    assert kept([0.5, -0.1, 0.3, 0.0], 0.04) == [False, True, True, True]
    assert kept([0.5, -0.1, 0.3, 0.0], 0.09) == [True] * 4
    assert kept([0.5, -0.1, 0.3, 0.0], 0.02) == [False, True, False, True]
    assert kept([2.0, 3.0], 0.04) == [True, False]  # the last one stays


def loop(old: Tensor, rollout: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """The rule as AReaL states it: drop the largest until the mean of the rest is below the threshold."""
    kept = mask.clone()
    squares = (old - rollout).double().square()
    while int(kept.sum()) > 1 and squares[kept].mean() >= threshold:
        worst = torch.where(kept, squares, -1.0).flatten().argmax()
        kept.view(-1)[worst] = False
    return kept


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("threshold", [1e-4, 0.04, 0.5])
def test_equals_the_loop_and_does_not_wait(seed: int, threshold: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    old, rollout = -4.0 + torch.randn(2, 4, 7, generator=generator)
    mask = torch.rand(4, 7, generator=generator) < 0.7
    expected = loop(old, rollout, mask, threshold)
    with Waits() as waits:
        found = m2po_mask(torch.where(mask, old, torch.nan), rollout, mask, threshold=threshold)
    assert torch.equal(found, expected)
    assert waits.found == []


def test_edges() -> None:
    for shape in ((0,), (2, 0), (2, 3)):
        nothing = torch.zeros(shape)
        assert not m2po_mask(nothing, nothing, nothing).any()
    with pytest.raises(InvalidInputError, match="threshold must be > 0, got 0"):
        m2po_mask(nothing, nothing, nothing, threshold=0)
