"""Numerics must not silence anybody: gamma under router-logit jitter and bfloat16, before and after a true drift.

48 layers x top-8 of 128 experts, 34 sequences of 16 tokens, half with a negative advantage. The policies differ by a
quarter of GSPO's clip width, so that without gamma no sequence is clipped.
"""

import functools

import pytest
import torch
from torch import Tensor

from moe_rl.importance import (
    PolicyLossInputs,
    RouterShift,
    RouterShiftAccumulator,
    RouterShiftUse,
    policy_loss,
    router_log_probs,
)

LAYERS, EXPERTS, TOP_K, SEQUENCES, LENGTH = 48, 128, 8, 34, 16
TOKENS = SEQUENCES * LENGTH
ADVANTAGES = torch.where(torch.arange(SEQUENCES) % 2 == 0, 1.0, -1.0).unsqueeze(1).expand(SEQUENCES, LENGTH)
NUMERICS = ("jitter", "bfloat16")


def moved(logits: Tensor, numerics: str, drift: Tensor, generator: torch.Generator) -> Tensor:
    """Logits of the update's pass: numerics, and a drift per token."""
    noise = torch.randn(logits.shape, generator=generator)
    logits = logits + drift.unsqueeze(1) * torch.randn(logits.shape, generator=generator)
    return logits.bfloat16().float() if numerics == "bfloat16" else logits + 1e-3 * noise


DRIFT = torch.where(torch.arange(SEQUENCES) < SEQUENCES // 2, 0.2, 0.0).repeat_interleave(LENGTH)
"""Per token: half of the sequences drift by 0.2 per logit."""


def router_shift(numerics: str, *, drifted: bool = False, noise: float | Tensor = 0.0, seed: int = 0) -> RouterShift:
    return accumulated(numerics, drifted, seed).finish(noise=noise)


@functools.cache
def accumulated(numerics: str, drifted: bool, seed: int) -> RouterShiftAccumulator:
    generator = torch.Generator().manual_seed(seed)
    accumulator = RouterShiftAccumulator(TOKENS)
    for _ in range(LAYERS):
        logits = torch.randn(TOKENS, EXPERTS, generator=generator)
        ids = logits.topk(TOP_K, dim=1).indices
        new = moved(logits, numerics, DRIFT if drifted else torch.zeros(TOKENS), generator)
        accumulator.add_layer(router_log_probs(new, ids), router_log_probs(logits, ids))
    return accumulator


def sequence_gradients(objective: str, gamma: Tensor | None, use: RouterShiftUse | None) -> tuple[Tensor, float]:
    """[N] largest |gradient| of each sequence, and the metric."""
    generator = torch.Generator().manual_seed(1)
    old = -1.0 - torch.rand(SEQUENCES, LENGTH, generator=generator, dtype=torch.float64)
    drift = 7.5e-5 * torch.randn(SEQUENCES, 1, generator=generator, dtype=torch.float64).clamp(-1, 1)
    log_prob = (old + drift).requires_grad_()
    inputs = PolicyLossInputs(
        log_prob=log_prob,
        old_log_prob=old,
        advantages=ADVANTAGES,
        response_mask=torch.ones_like(old),
        router_shift_ratio=None if gamma is None else gamma.reshape(SEQUENCES, LENGTH),
    )
    output = policy_loss(inputs, objective=objective, router_shift=use)
    output.loss.backward()
    assert log_prob.grad is not None
    return log_prob.grad.abs().amax(dim=1), float(output.metrics["actor/frac_negative_zero_grad"])


def silenced(gradients: Tensor) -> float:
    """Share of the sequences with A < 0 that get no gradient at all."""
    return float((gradients[1::2] == 0).double().mean())


@pytest.mark.parametrize("numerics", NUMERICS)
def test_numerics_silence_no_punished_sequence(numerics: str) -> None:
    shift = router_shift(numerics)
    for objective in ("gspo", "gmpo", "grpo"):
        assert silenced(sequence_gradients(objective, None, None)[0]) == 0.0
        gradients, metric = sequence_gradients(objective, shift.ratio, RouterShiftUse())
        assert silenced(gradients) <= 0.01
        assert metric <= 0.01


@pytest.mark.parametrize("numerics", NUMERICS)
def test_before_the_clip_gspo_is_silenced_and_says_so(numerics: str) -> None:
    """What calibration and centring repair: without them every punished sequence loses its gradient."""
    shift = router_shift(numerics)
    with pytest.warns(UserWarning, match=r"of gspo is less than the numerical noise in the router shift \(0.004"):
        gradients, metric = sequence_gradients("gspo", shift.ratio, RouterShiftUse(order="before-clip"))
    assert silenced(gradients) == metric == 1.0

    quiet = RouterShiftUse(order="before-clip", noise=1e-4)
    calibrated = router_shift(numerics, noise=router_shift(numerics, seed=7).shift_p99)
    gradients, metric = sequence_gradients("gspo", calibrated.ratio, quiet)
    assert max(silenced(gradients), metric) <= 0.01

    gradients, metric = sequence_gradients("gspo", shift.ratio, RouterShiftUse(order="before-clip", center=True))
    assert max(silenced(gradients), metric) <= 0.01


@pytest.mark.parametrize("objective", ["gspo", "gmpo", "grpo"])
def test_a_router_that_drifted_is_still_damped(objective: str) -> None:
    """The gradient of the sequences that drifted shrinks by their gamma, the others' does not."""
    shift = router_shift("jitter", drifted=True, noise=router_shift("jitter", seed=7).shift_p99)
    of_sequence = shift.ratio.reshape(SEQUENCES, LENGTH).mean(dim=1)
    assert float(of_sequence[: SEQUENCES // 2].max()) < 0.9
    assert float(of_sequence[SEQUENCES // 2 :].min()) > 0.999
    plain, _ = sequence_gradients(objective, None, None)
    damped, _ = sequence_gradients(objective, shift.ratio, RouterShiftUse(order="after-clip"))
    if objective != "gmpo":  # a weight per token: the largest gradient is that of the least drifted one
        of_sequence = shift.ratio.reshape(SEQUENCES, LENGTH).amax(dim=1)
    torch.testing.assert_close(damped / plain, of_sequence.double(), rtol=2e-3, atol=0.0)


def test_noise_is_subtracted_and_the_raw_percentiles_are_not_touched_by_it() -> None:
    accumulator = RouterShiftAccumulator(3)
    accumulator.add_layer(torch.tensor([[-1.0], [-1.1], [-2.0]]), torch.full((3, 1), -1.0))
    shift = accumulator.finish(noise=0.1, floor=0.8)
    # Shifts 0, 0.1, 1.0: after the noise 0, 0, 0.9; exp(-0.9) = 0.4066 is floored.
    assert shift.ratio.tolist() == pytest.approx([1.0, 1.0, 0.8])
    assert shift.metrics["router_corr/gamma_raw_p01"].item() == pytest.approx(0.36787944)
    assert shift.metrics["router_corr/clipfrac_gamma_0_8"].item() == pytest.approx(1 / 3)
    assert shift.metrics["router_corr/gamma_floor_frac"].item() == pytest.approx(1 / 3)
