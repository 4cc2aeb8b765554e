"""The router-shift ratio: by hand, in limits, streamed, staged over a pipeline, and stored."""

import math
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_rl.core.errors import InvalidInputError
from moe_rl.importance import (
    PolicyLossInputs,
    RouterShiftAccumulator,
    RouterShiftUse,
    policy_loss,
    router_log_probs,
    router_shift_ratio,
    store_router_log_probs,
)


def test_gamma_by_hand() -> None:
    # Two layers, two experts. Token 1: |ln(0.5/0.25)|, 0 and 0, |ln(0.2/0.4)|: mean ln 2 / 2, gamma = 2^-0.5 =
    # 0.70710678. Token 2: no change, gamma 1. Token 3: 4 times |ln 16|: exp(-ln 16) = 1/16, floored at 0.5.
    old = [torch.tensor([[0.25, 0.5], [0.5, 0.5], [0.01, 0.01]]), torch.tensor([[0.5, 0.4], [0.9, 0.1], [0.8, 0.8]])]
    new = [torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.16, 0.16]]), torch.tensor([[0.5, 0.2], [0.9, 0.1], [0.05, 0.05]])]
    layers = [(n.log(), o.log()) for n, o in zip(new, old, strict=True)]
    shift = router_shift_ratio(layers, floor=0.5, num_tokens=3, per_layer_metrics=True)
    assert shift.ratio.tolist() == pytest.approx([0.70710678, 1.0, 0.5])
    assert shift.shift.tolist() == pytest.approx([0.34657359, 0.0, 2.77258872])
    assert shift.metrics == pytest.approx(
        {
            # Layer 0: (ln 2 + 2 ln 16) / 6 entries; layer 1: the same.
            "router_corr/layer_0/shift": (0.69314718 + 2 * 2.77258872) / 6,
            "router_corr/layer_1/shift": (0.69314718 + 2 * 2.77258872) / 6,
            "router_corr/gamma_mean": (0.70710678 + 1.0 + 0.5) / 3,
            "router_corr/gamma_min": 0.5,
            "router_corr/gamma_floor_frac": 1 / 3,
            "router_corr/shift_abs_mean": (0.34657359 + 2.77258872) / 3,
            "router_corr/clipfrac_gamma_0_8": 2 / 3,
            "router_corr/gamma_raw_p50": 0.70710678,  # nearest rank of 1/16, 0.707 and 1
            "router_corr/gamma_raw_p10": 1 / 16,
            "router_corr/gamma_raw_p01": 1 / 16,
        }
    )
    assert shift.shift_p99.item() == pytest.approx(2.77258872)
    free = router_shift_ratio(layers, floor=0.0, num_tokens=3)
    assert free.ratio.tolist() == pytest.approx([0.70710678, 1.0, 1 / 16])


def test_equal_routers_give_one_and_no_gradient_flows() -> None:
    log_probs = torch.randn(5, 4, requires_grad=True)
    shift = router_shift_ratio([(log_probs, log_probs.detach())], floor=0.5, num_tokens=5)
    assert torch.equal(shift.ratio, torch.ones(5))
    assert not shift.ratio.requires_grad


def test_rows_without_a_route_give_one_whatever_they_hold() -> None:
    new, old = torch.zeros(3, 2), torch.tensor([[math.nan, math.inf], [-1.0, math.nan], [-1.0, -3.0]])
    by_row = router_shift_ratio([(new[::2], old[::2])], floor=0.0, num_tokens=2, valid=torch.tensor([False, True]))
    assert by_row.ratio.tolist() == pytest.approx([1.0, math.exp(-2.0)])
    valid = torch.tensor([[False, False], [True, False], [True, True]])
    by_entry = router_shift_ratio([(new, old)], floor=0.0, num_tokens=3, valid=valid)
    assert by_entry.ratio.tolist() == pytest.approx([1.0, math.exp(-1.0), math.exp(-2.0)])


def test_a_layer_may_route_only_some_tokens() -> None:
    accumulator = RouterShiftAccumulator(2)
    accumulator.add_layer(torch.full((2, 1), -1.0), torch.zeros(2, 1))
    accumulator.add_layer(torch.full((2, 1), -3.0), torch.zeros(2, 1), valid=torch.tensor([True, False]))
    # Token 1: (1 + 3) / 2; token 2: 1 / 1.
    assert accumulator.finish(floor=0.0).shift.tolist() == pytest.approx([2.0, 1.0])


@settings(deadline=None, max_examples=30)
@given(
    num_layers=st.integers(0, 5),
    num_tokens=st.integers(0, 6),
    top_k=st.integers(1, 4),
    stages=st.integers(1, 3),
    floor=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_streaming_over_pipeline_stages_equals_the_whole_formula(
    num_layers: int, num_tokens: int, top_k: int, stages: int, floor: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_layers, num_tokens, top_k)
    new, old = (torch.randn(shape, generator=generator) for _ in range(2))
    valid = torch.rand(num_tokens, generator=generator) > 0.3

    partials: list[Tensor] = []
    for stage in range(stages):
        accumulator = RouterShiftAccumulator(num_tokens)
        for layer in range(stage, num_layers, stages):
            accumulator.add_layer(new[layer], old[layer], valid=valid)

        def keep(sums: Tensor) -> Tensor:
            partials.append(sums)
            return sums

        accumulator.finish(floor=0.0, sum_over_ranks=keep)
    empty = RouterShiftAccumulator(num_tokens)
    gamma = empty.finish(floor=floor, sum_over_ranks=lambda sums: sums + torch.stack(partials).sum(0)).ratio

    expected = torch.ones(num_tokens)
    if num_layers:
        drift = (new.double() - old.double()).abs().mean(dim=(0, 2))
        expected = torch.where(valid, torch.exp(-drift).clamp(min=floor).float(), expected)
    torch.testing.assert_close(gamma, expected, rtol=1e-5, atol=1e-6)
    assert bool(((gamma >= min(floor, 1.0)) & (gamma <= 1.0)).all())


def test_the_sum_over_stages_comes_before_the_exponential() -> None:
    # Two stages of one layer each with drift 1 and 3: exp(-(1 + 3) / 2), not the mean of exp(-1) and exp(-3).
    first, second = RouterShiftAccumulator(1), RouterShiftAccumulator(1)
    first.add_layer(torch.tensor([[-1.0]]), torch.tensor([[0.0]]))
    second.add_layer(torch.tensor([[-3.0]]), torch.tensor([[0.0]]))
    other: list[Tensor] = []
    second.finish(floor=0.0, sum_over_ranks=lambda sums: other.append(sums) or sums)
    gamma = first.finish(floor=0.0, sum_over_ranks=lambda sums: sums + other[0]).ratio
    assert gamma.item() == pytest.approx(math.exp(-2.0))


def test_one_layer_of_log_probs_is_alive_at_a_time() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def layers() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(6):
            new, old = torch.randn(10, 3), torch.randn(10, 3)
            alive.extend((weakref.ref(new), weakref.ref(old)))
            yield new, old
            held = sum(tensor() is not None for tensor in alive)
            assert held <= 2, f"{held} tensors of log-probabilities are alive"
            del new, old

    # The generator, not the accumulator, may hold the layer it has just handed over.
    router_shift_ratio(layers(), floor=0.5, num_tokens=10)
    assert len(alive) == 12
    assert all(tensor() is None for tensor in alive)


def test_infinite_drift_hits_the_floor_and_two_impossible_experts_are_no_drift() -> None:
    impossible = torch.tensor([[-math.inf], [-math.inf]])
    shift = router_shift_ratio([(torch.tensor([[-1.0], [-math.inf]]), impossible)], floor=0.7, num_tokens=2)
    assert shift.ratio.tolist() == pytest.approx([0.7, 1.0])
    assert all(math.isfinite(value) for value in shift.metrics.values())


def test_nan_on_a_routed_token_costs_that_token_only() -> None:
    layers = [(torch.tensor([[math.nan], [-1.0]]), torch.zeros(2, 1))]
    shift = router_shift_ratio(layers, floor=0.1, num_tokens=2)
    assert shift.ratio.isnan().tolist() == [True, False]
    assert shift.metrics["router_corr/gamma_mean"] == pytest.approx(math.exp(-1.0))
    values = torch.zeros(1, 2)
    inputs = PolicyLossInputs(
        log_prob=values,
        old_log_prob=values,
        advantages=torch.tensor([[5.0, 2.0]]),
        response_mask=torch.ones(1, 2),
        router_shift_ratio=shift.ratio.reshape(1, 2),
    )
    output = policy_loss(inputs, router_shift=RouterShiftUse(order="after-clip"))
    assert output.metrics["actor/non_finite_tokens"] == 1
    assert output.loss.item() == pytest.approx(-2.0 * math.exp(-1.0))


def test_router_log_probs_of_given_experts() -> None:
    # exp(logits) = 1, 2, 5: softmax 1/8, 2/8, 5/8. Sigmoids of 0 and ln 3: 1/2 and 3/4.
    logits = torch.tensor([[1.0, 2.0, 5.0]]).log()
    ids = torch.tensor([[2, 0]])
    assert router_log_probs(logits, ids).exp().tolist()[0] == pytest.approx([5 / 8, 1 / 8])
    logits = torch.tensor([[0.0, math.log(3.0)]])
    ids = torch.tensor([[0, 1]])
    assert router_log_probs(logits, ids, score_function="sigmoid").exp().tolist()[0] == pytest.approx([0.5, 0.75])
    normalized = router_log_probs(logits, ids, score_function="sigmoid-normalized")
    assert normalized.exp().tolist()[0] == pytest.approx([0.4, 0.6])
    assert router_log_probs(logits, torch.tensor([[-1, -1]])).tolist() == [[0.0, 0.0]]
    half = router_log_probs(logits.bfloat16(), ids)
    assert half.dtype == torch.float32


def test_router_log_probs_refuses_what_it_cannot_read() -> None:
    logits = torch.zeros(2, 4)
    with pytest.raises(InvalidInputError, match=r"unknown score_function 'sigmoids'. Did you mean 'sigmoid'"):
        router_log_probs(logits, torch.zeros(2, 1, dtype=torch.int64), score_function="sigmoids")
    with pytest.raises(InvalidInputError, match=r"expert id 4 is out of range for 4 experts"):
        router_log_probs(logits, torch.tensor([[0], [4]]))
    with pytest.raises(InvalidInputError, match=r"logits must have shape"):
        router_log_probs(logits, torch.zeros(3, 1, dtype=torch.int64))
    with pytest.raises(InvalidInputError, match=r"floor must be between 0 and 1, got 1.5"):
        router_shift_ratio([], floor=1.5, num_tokens=1)
    with pytest.raises(InvalidInputError, match=r"shape \[3, K\]"):
        router_shift_ratio([(torch.zeros(2, 1), torch.zeros(2, 1))], floor=0.5, num_tokens=3)
    with pytest.raises(InvalidInputError, match=r"`valid` must be a bool tensor"):
        router_shift_ratio([(torch.zeros(2, 1),) * 2], floor=0.5, num_tokens=2, valid=torch.ones(2))


def test_the_use_options_check_themselves() -> None:
    with pytest.raises(InvalidInputError, match=r"unknown order 'before'. Did you mean 'before-clip'"):
        RouterShiftUse(order="before")
    with pytest.raises(InvalidInputError, match=r"is only available with order 'after-clip'"):
        RouterShiftUse(sign_power="inside")


@pytest.mark.parametrize(("word", "bytes_each"), [(torch.int16, 2), (torch.int32, 4)])
def test_storage_keeps_ids_exactly_and_counts_its_bytes(word: torch.dtype, bytes_each: int) -> None:
    ids = torch.tensor([[0, 255], [-1, 7]])
    given = torch.tensor([[-1.0, -math.inf], [math.nan, -2.0]])
    stored = store_router_log_probs(ids, given, num_experts=256, word=word)
    assert stored.expert_ids.tolist() == ids.tolist()
    assert stored.valid.tolist() == [[True, True], [False, True]]
    expected = [-1.0, -16.0, -2.0]  # below the grid: its lowest; without a route: NaN
    assert stored.log_probs[stored.valid].tolist() == pytest.approx(expected, abs=stored.step / 2)
    assert stored.log_probs[~stored.valid].isnan().all()
    assert stored.num_bytes == 4 * bytes_each
    wide = store_router_log_probs(ids + 300, torch.full((2, 2), -0.5), num_experts=1000, word=word)
    assert wide.expert_ids.tolist() == [[300, 555], [299, 307]]
    assert torch.equal(wide.rounded(torch.full((2, 2), -0.5)), wide.log_probs)
    assert store_router_log_probs(ids[:0], given[:0], num_experts=1, word=word).expert_ids.shape == (0, 2)


def test_storage_refuses_what_it_cannot_keep() -> None:
    ids, zeros = torch.tensor([[0, 255]]), torch.zeros(1, 2)
    with pytest.raises(InvalidInputError, match=r"out of range for 200 experts"):
        store_router_log_probs(ids, zeros, num_experts=200)
    with pytest.raises(InvalidInputError, match=r"words, not torch\.bfloat16"):
        store_router_log_probs(ids, zeros, num_experts=256, word=torch.bfloat16)
    with pytest.raises(
        InvalidInputError,
        match=r"2048 experts leave only 5 bits of a torch\.int16 word for a log-probability: use torch\.int32",
    ):
        store_router_log_probs(ids, zeros, num_experts=2048)


def test_48_layers_of_top_8_take_768_bytes_a_token() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(10, 128, generator=generator)
    ids = logits.topk(8, dim=1).indices
    layers = [store_router_log_probs(ids, router_log_probs(logits, ids), num_experts=128) for _ in range(48)]
    assert sum(each.num_bytes for each in layers) == 10 * 768


def test_a_coarse_grid_on_both_sides_does_not_bias_the_shift() -> None:
    """Grid lines between two values, times the step, are |delta| on average; N of them vary by step |delta| / N."""
    generator = torch.Generator().manual_seed(0)
    for move in (1e-3, 1e-2, 0.1):
        old = -1.0 - 6.0 * torch.rand(20_000, 8, generator=generator)
        new = old + move * torch.randn(old.shape, generator=generator)
        stored = store_router_log_probs(torch.zeros_like(old, dtype=torch.int64), old, num_experts=128)
        assert torch.equal(stored.rounded(old), stored.log_probs)  # what has not moved reads as exactly that
        found = (stored.rounded(new) - stored.log_probs).abs().double().mean()
        true = (new - old).abs().double().mean()
        assert found.item() == pytest.approx(true.item(), abs=5 * math.sqrt(stored.step * true.item() / old.numel()))


def no_shift_gamma(*, round_new_too: bool) -> float:
    """Mean gamma of 500 tokens x 8 layers x top-8 of 128 experts, old ones in float16, when nothing has moved."""
    generator = torch.Generator().manual_seed(0)
    accumulator = RouterShiftAccumulator(500)
    for _ in range(8):
        logits = 2.0 * torch.randn(500, 128, generator=generator)
        log_probs = router_log_probs(logits, logits.topk(8, dim=1).indices)
        stored = log_probs.half()
        accumulator.add_layer(log_probs, stored if round_new_too else stored.float())
    return accumulator.finish(floor=0.0).ratio.mean().item()


def test_rounding_both_sides_alike_removes_the_storage_bias() -> None:
    assert no_shift_gamma(round_new_too=True) == 1.0
    # One side only: |lp| < 8 has a float16 step of at most 2^-8, so the mean rounding error is at most 2^-10.
    biased = no_shift_gamma(round_new_too=False)
    assert math.exp(-(2**-10)) <= biased < 1.0
