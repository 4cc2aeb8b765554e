"""For every objective: masked tokens are silent, packed equals padded, micro-batches add up, extremes stay finite."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_rl.core.errors import InvalidInputError
from moe_rl.importance import (
    LOSS_AGG_MODES,
    OBJECTIVES,
    BatchTotals,
    PolicyLossInputs,
    PolicyLossOutput,
    RouterShiftUse,
    as_floats,
    policy_loss,
)

REGISTRY = OBJECTIVES
NAMES = OBJECTIVES.names
FLOATS = ("log_prob", "old_log_prob", "rollout_log_prob", "advantages", "rollout_is_weights", "router_shift_ratio")


def padded_batch(lengths: list[int], seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A padded batch with holes inside the responses; padding is masked."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(lengths), max(lengths, default=0)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)

    old = -1.5 + normal(0.4)
    inside = torch.arange(width).unsqueeze(0) < torch.tensor(lengths).reshape(-1, 1)
    advantage = torch.randn(rows, 1, generator=generator, dtype=torch.float64)
    return {
        "log_prob": (old + normal(0.3)).to(dtype).requires_grad_(),
        "old_log_prob": old.to(dtype),
        "rollout_log_prob": (old + normal(0.2)).to(dtype),
        "advantages": advantage.expand(rows, width).to(dtype),
        "rollout_is_weights": torch.rand(rows, width, generator=generator, dtype=torch.float64).to(dtype),
        "router_shift_ratio": (0.5 + 0.5 * torch.rand(rows, width, generator=generator)).to(dtype),
        "response_mask": inside & (torch.rand(rows, width, generator=generator) > 0.2),
        "draw": torch.rand(rows, width, generator=generator),
    }


def marks(shape: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.ones(shape, dtype=torch.bool) for name in ("draw",)}


def run(tensors: dict[str, Tensor], objective: str, **arguments: object) -> tuple[PolicyLossOutput, Tensor]:
    leaf = tensors["log_prob"].detach().clone().requires_grad_()
    output = policy_loss(PolicyLossInputs(**(tensors | {"log_prob": leaf})), objective=objective, **arguments)
    output.loss.backward()
    assert leaf.grad is not None
    return output, leaf.grad


POISONS = torch.tensor([math.nan, math.inf, -math.inf, 1e30], dtype=torch.float64)
NARROW_ON_PURPOSE = pytest.mark.filterwarnings("ignore:clip_ratio_low .* of (gs|lus)po is less")
WITHOUT_NORM = [mode for mode in LOSS_AGG_MODES if not mode.endswith("norm")]


@pytest.mark.parametrize("objective", NAMES)
def test_what_is_masked_or_empty_adds_exactly_nothing(objective: str) -> None:
    """Poison at every masked token, each kind in every tensor; an empty row; batches without a valid token."""
    clean = padded_batch([4, 2, 5, 3, 5])
    mask = clean["response_mask"]
    assert int((~mask).sum()) >= len(POISONS)
    turn = torch.arange(mask.numel()).reshape(mask.shape)
    dirty = {
        name: torch.where(mask, value.detach(), POISONS[(turn + FLOATS.index(name)) % len(POISONS)])
        if name in FLOATS
        else value
        for name, value in clean.items()
    }
    expected, expected_grad = run(clean, objective)
    output, grad = run(dirty, objective)
    assert torch.equal(output.loss, expected.loss)
    assert torch.equal(grad, expected_grad)
    assert torch.equal(grad[~mask], torch.zeros_like(grad[~mask]))
    assert output.metrics == expected.metrics

    longer = {
        name: torch.cat([value, torch.full_like(value[:1], math.nan if value.dtype.is_floating_point else 0)])
        for name, value in clean.items()
    }
    output, grad = run(longer, objective)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(grad[:-1], expected_grad, rtol=1e-13, atol=1e-15)

    for shape in ((0, 5), (3, 0), (0, 0), (2, 3)):
        filled = torch.full(shape, math.nan)
        tensors = dict.fromkeys(FLOATS, filled) | {"response_mask": torch.zeros(shape)} | marks(shape)
        for mode in LOSS_AGG_MODES:
            output, grad = run(tensors, objective, loss_agg_mode=mode)
            assert output.loss.item() == 0.0
            assert not any(map(float, output.metrics.values()))
            assert torch.equal(grad, torch.zeros(shape))


def pack(tensors: dict[str, Tensor], lengths: list[int]) -> dict[str, Tensor]:
    packed = {
        name: torch.cat([value[row, :n] for row, n in enumerate(lengths)]) if lengths else value.reshape(-1)
        for name, value in tensors.items()
    }
    packed["cu_seqlens"] = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])
    return packed


@pytest.mark.lengthy
@NARROW_ON_PURPOSE
@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    objective=st.sampled_from(NAMES),
    mode=st.sampled_from(WITHOUT_NORM),
    order=st.sampled_from(["before-clip", "after-clip"]),
    seed=st.integers(0, 10_000),
)
def test_packed_equals_padded(lengths: list[int], objective: str, mode: str, order: str, seed: int) -> None:
    tensors = padded_batch(lengths, seed)
    use = RouterShiftUse(order=order)
    padded, padded_grad = run(tensors, objective, loss_agg_mode=mode, router_shift=use)
    packed, packed_grad = run(pack(tensors, lengths), objective, loss_agg_mode=mode, router_shift=use)
    torch.testing.assert_close(packed.loss, padded.loss, rtol=1e-12, atol=1e-14)
    expected = torch.cat([padded_grad[row, :n] for row, n in enumerate(lengths)])
    torch.testing.assert_close(packed_grad, expected, rtol=1e-10, atol=1e-14)
    assert as_floats(packed.metrics) == pytest.approx(as_floats(padded.metrics), rel=1e-10, abs=1e-12)


def test_micro_batches_add_up_to_the_full_batch() -> None:
    """Every objective that says so, in two modes, so that every mode meets a third of the objectives."""
    tensors = padded_batch([4, 1, 6, 3, 0], seed=3)
    totals = BatchTotals.from_mask(tensors["response_mask"], loss_scale_factor=6.0)
    for index, objective in enumerate(name for name in NAMES if OBJECTIVES[name].additive):
        for mode in (LOSS_AGG_MODES[index % 5], LOSS_AGG_MODES[(index + 2) % 5]):
            full, full_grad = run(tensors, objective, loss_agg_mode=mode, totals=totals)
            alone, _ = run(tensors, objective, loss_agg_mode=mode)
            close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-14, msg=f"{objective} in {mode}")
            close(full.loss, alone.loss)  # a batch's own counts are its totals

            loss, grad = torch.zeros_like(full.loss), torch.zeros_like(full_grad)
            for rows in (slice(0, 2), slice(2, 3), slice(3, 5)):
                part, grad[rows] = run(
                    {k: v[rows] for k, v in tensors.items()}, objective, loss_agg_mode=mode, totals=totals
                )
                loss = loss + part.loss.detach()
            close(loss, full.loss.detach())
            close(grad, full_grad)


EXTREMES = [
    *((-1.0, -1e4), (-1e4, -1.0), (-math.inf, -1.0), (-1.0, -math.inf), (-math.inf, -math.inf)),
    *((0.0, 0.0), (0.0, -20.0)),
]
"""log pi, log pi_old"""


LOST_ON_PURPOSE = pytest.mark.filterwarnings("ignore:.* at more than 1% of the valid tokens")


@LOST_ON_PURPOSE
@NARROW_ON_PURPOSE
@pytest.mark.parametrize("objective", NAMES)
def test_extreme_numbers_and_low_precision(objective: str) -> None:
    """Every extreme under every sign of A, one row each, stays finite; float16 and bfloat16 compute in float32."""
    cases = [(new, old, advantage) for new, old in EXTREMES for advantage in (1.0, -1.0, 0.0)]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tensors = {
            "log_prob": torch.tensor([[new, -1.0] for new, _, _ in cases], dtype=dtype),
            "old_log_prob": torch.tensor([[old, -1.0] for _, old, _ in cases], dtype=dtype),
            "rollout_log_prob": torch.tensor([[-1.0, old] for _, old, _ in cases], dtype=dtype),
            "advantages": torch.tensor([[advantage] * 2 for _, _, advantage in cases], dtype=dtype),
            "router_shift_ratio": torch.tensor([[0.0, 1.0]] * len(cases), dtype=dtype),
            "response_mask": torch.ones(len(cases), 2),
            **marks((len(cases), 2)),
        }
        for order in ("before-clip", "after-clip"):
            output, grad = run(tensors, objective, router_shift=RouterShiftUse(order=order), loss_agg_mode="token-sum")
            assert output.loss.isfinite()
            assert grad.isfinite().all()
            assert all(math.isfinite(value) for value in output.metrics.values())
    for dtype in (torch.float16, torch.bfloat16):
        low = padded_batch([4, 3], dtype=dtype)
        output, _ = run(low, objective)
        assert output.loss.dtype == torch.float32
        same = {k: v.detach().float() if v.dtype.is_floating_point else v for k, v in low.items()}
        expected, _ = run(same, objective)
        assert torch.equal(output.loss, expected.loss)
    output, grad = run(padded_batch([1], seed=2) | {"response_mask": torch.ones(1, 1)}, objective)
    assert output.loss.isfinite()
    assert grad.isfinite().all()


WIDTHS = ("clip_ratio_low", "clip_ratio_high", "dppo_mask_low", "dppo_mask_high")


@NARROW_ON_PURPOSE
@pytest.mark.parametrize("objective", NAMES)
def test_an_infinite_width_is_no_clip(objective: str) -> None:
    """One side at a time, so that no formula may multiply a width by the 0 of the other side."""
    tensors = padded_batch([4, 2, 5])
    for width in WIDTHS:
        if width in OBJECTIVES[objective].options:
            output, grad = run(tensors, objective, **{width: math.inf})
            assert output.loss.isfinite()
            assert grad.isfinite().all()
            assert all(math.isfinite(value) for value in as_floats(output.metrics).values())


def small(**changes: object) -> PolicyLossInputs:
    values = {name: torch.full((2, 2), -0.5) for name in ("log_prob", "old_log_prob", "advantages")}
    return PolicyLossInputs(**(values | {"response_mask": torch.ones(2, 2)} | changes))


@LOST_ON_PURPOSE
def test_errors_name_the_value_and_the_nearest_option() -> None:
    with pytest.raises(InvalidInputError, match=r"unknown objective 'gpso'. Did you mean 'gspo'"):
        policy_loss(small(), objective="gpso")
    with pytest.raises(InvalidInputError, match=r"no option 'clip_ratio_hi'. Did you mean 'clip_ratio_high'"):
        policy_loss(small(), objective="ppo", clip_ratio_hi=0.3)
    with pytest.raises(InvalidInputError, match=r"unknown loss_agg_mode 'token_mean'. Did you mean 'token-mean'"):
        policy_loss(small(), loss_agg_mode="token_mean")
    for sequence in ("gspo", "luspo"):
        for width in (0.1, 0.2, 10.0):
            wrong = rf"clip_ratio_high {width:g} is a clip width for token ratios, but '{sequence}' clips the mean"
            with pytest.raises(InvalidInputError, match=wrong):
                policy_loss(small(), objective=sequence, clip_ratio_high=width)
        for width in (0.0, 3e-4, 0.07, math.inf):
            policy_loss(small(), objective=sequence, clip_ratio_low=width, clip_ratio_high=width)
    with pytest.raises(
        InvalidInputError, match=r"la_clip_low 0.0003 is a clip width for sequence means, but 'ctpo' clips each"
    ):
        policy_loss(small(), objective="ctpo", la_clip_low=3e-4)
    for token, what in (("ppo", "ratio"), ("cispo", "ratio"), ("gmpo", "log ratio")):
        wrong = rf"clip_ratio_low 0.0003 is a clip width for sequence means, but '{token}' clips each token's {what}"
        with pytest.raises(InvalidInputError, match=wrong):
            policy_loss(small(), objective=token, clip_ratio_low=3e-4)
        for width in (0.0, 0.01, 10.0, math.inf):
            policy_loss(small(), objective=token, clip_ratio_low=width, clip_ratio_high=width)
    with pytest.raises(InvalidInputError, match=r"clip_ratio_c must be > 1, got 0.5"):
        policy_loss(small(), clip_ratio_c=0.5)
    with pytest.raises(InvalidInputError, match=r"needs rollout_log_prob"):
        policy_loss(small(), objective="decoupled_ppo")
    with pytest.raises(InvalidInputError, match=r"advantages has shape \(2, 1\), but log_prob has \(2, 2\)"):
        small(advantages=torch.ones(2, 1))
    for changes, message in (
        ({"log_prob": torch.tensor([[math.nan, 0.0], [0.0, 0.0]])}, r"log_prob is not finite at 1 valid"),
        ({"advantages": torch.full((2, 2), math.inf)}, r"advantages is not finite at 4 valid"),
        ({"response_mask": torch.full((2, 2), 0.5)}, r"response_mask holds values other than 0 and 1 at 4 valid"),
        ({"rollout_is_weights": -torch.ones(2, 2)}, r"rollout_is_weights is negative or not finite at 4 valid"),
        ({"router_shift_ratio": torch.full((2, 2), 1.5)}, r"router_shift_ratio is outside \[0, 1\] at 4 valid"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            policy_loss(small(**changes), non_finite="raise")
        left_out = policy_loss(small(**changes))
        assert left_out.loss.isfinite()
        assert left_out.metrics["actor/non_finite_tokens"] == (1 if "log_prob" in changes else 4)
    with pytest.raises(InvalidInputError, match=r"inputs have no router_shift_ratio"):
        policy_loss(small(), router_shift=RouterShiftUse())
    with pytest.raises(InvalidInputError, match=r"is only available for gmpo, not 'ppo'"):
        policy_loss(
            small(router_shift_ratio=torch.ones(2, 2)),
            router_shift=RouterShiftUse(order="after-clip", sign_power="inside"),
        )
    with pytest.raises(InvalidInputError, match=r"objective must be a name or an Objective, got None"):
        policy_loss(small(), objective=None)
    flat = {name: torch.zeros(3) for name in ("log_prob", "old_log_prob", "advantages", "response_mask")}
    with pytest.raises(InvalidInputError, match=r"packed \[T\] tensors need cu_seqlens"):
        policy_loss(PolicyLossInputs(**flat))
    with pytest.raises(InvalidInputError, match=r"cu_seqlens must run from 0 to the number of tokens \(3\)"):
        policy_loss(PolicyLossInputs(**flat, cu_seqlens=torch.tensor([0, 2])))
