"""Rollout correction by hand: two sequences of two valid tokens and one of padding that holds NaN.

old / rollout probability     w = pi_old / pi_rollout
0.6 / 0.3    0.2 / 0.4        2      0.5      product 1, geometric mean 1
0.8 / 0.2    0.3 / 0.2        4      1.5      product 6, geometric mean 2.4495
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_rl.core.errors import InvalidInputError
from moe_rl.importance import (
    ROLLOUT_PRESETS,
    ROLLOUT_RS_OPTIONS,
    PolicyLossInputs,
    RolloutCorrectionConfig,
    apply_rollout_correction,
    as_floats,
    bypass_policy_loss,
    importance_weights,
    off_policy_metrics,
    reciprocal_band,
    rollout_correction,
)

NAN = math.nan
OLD = torch.tensor([[0.6, 0.2, NAN], [0.8, 0.3, NAN]], dtype=torch.float64).log()
ROLLOUT = torch.tensor([[0.3, 0.4, 0.1], [0.2, 0.2, NAN]], dtype=torch.float64).log()
MASK = torch.tensor([[1, 1, 0], [1, 1, 0]])


def weights_of(**options: object) -> tuple[list[list[float]], dict[str, float]]:
    weights, mask, metrics = rollout_correction(OLD, ROLLOUT, MASK, **options)
    assert weights is not None
    assert torch.equal(mask, MASK)
    return weights.tolist(), metrics


def test_token_truncation_and_its_metrics() -> None:
    weights, metrics = weights_of(rollout_is="token", rollout_is_threshold=2.5)
    assert weights == [pytest.approx([2.0, 0.5, 0.0]), pytest.approx([2.5, 1.5, 0.0])]
    # Applied weights 2, 0.5, 2.5, 1.5: mean 1.625, mean square 12.75 / 4 = 3.1875. Per sequence 1.25 and 2.0.
    expected = {
        "mean": 1.625,
        "max": 2.5,
        "min": 0.5,
        "std": math.sqrt(3.1875 - 2.640625),
        "eff_sample_size": 2.640625 / 3.1875,
        "ratio_fraction_high": 1 / 4,
        "ratio_fraction_low": 0.0,
        "seq_mean": 1.625,
        "seq_std": math.sqrt(2 * 0.375**2),
        "seq_max": 2.0,
        "seq_min": 1.25,
        "seq_max_deviation": 1.0,
        "seq_fraction_high": 1 / 2,  # the raw mean of sequence 2 is 2.75
        "seq_fraction_low": 0.0,
    }
    for name, value in expected.items():
        assert metrics[f"rollout_corr/rollout_is_{name}"] == pytest.approx(value), name


def test_sequence_truncation_and_its_metrics() -> None:
    weights, metrics = weights_of(rollout_is="sequence", rollout_is_threshold=2.5)
    assert weights == [pytest.approx([1.0, 1.0, 0.0]), pytest.approx([2.5, 2.5, 0.0])]
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(6.0)
    assert metrics["rollout_corr/rollout_is_min"] == pytest.approx(1.0)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.75)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 2)


def test_icepop_zeroes_outside_its_band() -> None:
    weights, metrics = weights_of(rollout_is="token", rollout_is_threshold="0.6_3.0")
    assert weights == [pytest.approx([2.0, 0.0, 0.0]), pytest.approx([0.0, 1.5, 0.0])]
    assert metrics["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(2 / 4)
    sequence, _ = weights_of(rollout_is="sequence", rollout_is_threshold="0.6_3.0")
    assert sequence == [pytest.approx([1.0, 1.0, 0.0]), [0.0, 0.0, 0.0]]


def test_batch_normalization_divides_by_the_mean_weight() -> None:
    token, metrics = weights_of(rollout_is="token", rollout_is_threshold=2.5, rollout_is_batch_normalize=True)
    assert token[0] == pytest.approx([2 / 1.625, 0.5 / 1.625, 0.0])
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(1.625)
    # One weight per sequence: (1 + 2.5) / 2.
    sequence, metrics = weights_of(rollout_is="sequence", rollout_is_threshold=2.5, rollout_is_batch_normalize=True)
    assert sequence == [pytest.approx([1 / 1.75, 1 / 1.75, 0.0]), pytest.approx([2.5 / 1.75, 2.5 / 1.75, 0.0])]
    # Another rank with sum 3.0 over 2 sequences: (3.5 + 3) / 4.
    _, _, metrics = rollout_correction(
        OLD,
        ROLLOUT,
        MASK,
        "sequence",
        2.5,
        rollout_is_batch_normalize=True,
        sum_over_ranks=lambda sums: sums + torch.tensor([3.0, 2.0]),
    )
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(6.5 / 4)


# Statistics per token, x = log w: k2 = x^2/2 = 0.2402, 0.2402 | 0.9609, 0.0822; k3 = w - 1 - x = 0.3069, 0.1931
# | 1.6137, 0.0945; Bernoulli KL, larger direction: 0.1920, 0.1046 | 0.8318, 0.0282. k1 bounds 1/w = 0.5, 2 |
# 0.25, 0.6667; products 1 | 1/6.
@pytest.mark.parametrize(
    ("option", "threshold", "kept"),
    [
        ("token_k1", "0.4_1.5", [[1, 0], [0, 1]]),
        ("token_k1", 2.5, [[1, 1], [0, 1]]),  # one value v is 1/v to v: 0.4 to 2.5
        ("token_k2", 0.5, [[1, 1], [0, 1]]),
        ("token_k3", 0.25, [[0, 1], [0, 1]]),
        ("binary_kl", 0.15, [[0, 1], [0, 1]]),
        ("seq_sum_k1", "0.5_2.0", [[1, 1], [0, 0]]),
        ("seq_sum_k1", "0.1_2.0", [[1, 1], [1, 1]]),
        ("seq_sum_k2", 0.5, [[1, 1], [0, 0]]),
        ("seq_sum_k3", 0.6, [[1, 1], [0, 0]]),
        ("seq_mean_k1", "0.5_2.0", [[1, 1], [0, 0]]),
        ("seq_mean_k1", "0.4_2.0", [[1, 1], [1, 1]]),  # 6^-0.5 = 0.4082
        ("seq_mean_k2", 0.5, [[1, 1], [0, 0]]),
        ("seq_mean_k3", 0.3, [[1, 1], [0, 0]]),
        ("seq_max_k2", 0.5, [[1, 1], [0, 0]]),
        ("seq_max_k3", 0.25, [[0, 0], [0, 0]]),
        ("token_k1,seq_max_k2", "0.4_1.5,0.5", [[1, 0], [0, 0]]),
        ("token_k2, token_k3", 0.25, [[0, 1], [0, 1]]),
    ],
)
def test_rejection_keeps_what_every_option_keeps(option: str, threshold: object, kept: list[list[int]]) -> None:
    weights, mask, metrics = rollout_correction(OLD, ROLLOUT, MASK, rollout_rs=option, rollout_rs_threshold=threshold)
    assert weights is None
    assert mask.dtype == MASK.dtype
    assert mask[:, :2].tolist() == kept
    assert mask[:, 2].tolist() == [0, 0]
    rejected = 4 - sum(map(sum, kept))
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(rejected / 4)
    touched = sum(sum(row) < 2 for row in kept)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(touched / 2)


def test_the_metrics_of_one_rejection_option() -> None:
    _, _, metrics = rollout_correction(OLD, ROLLOUT, MASK, rollout_rs="token_k2", rollout_rs_threshold=0.5)
    values = {k.removeprefix("rollout_corr/rollout_rs_token_k2_"): v for k, v in metrics.items() if "token_k2" in k}
    # 0.2402265, 0.2402265, 0.9609060, 0.0822010; clamped at 0.5 for the spread; sequence means 0.2402265,
    # 0.5215535.
    clamped = (0.2402265 + 0.2402265 + 0.5 + 0.0822010) / 4
    squares = (2 * 0.2402265**2 + 0.25 + 0.0822010**2) / 4
    assert values == pytest.approx(
        {
            "mean": 0.3808900,
            "max": 0.9609060,
            "min": 0.0822010,
            "fraction_high": 1 / 4,
            "fraction_low": 0.0,
            "std": math.sqrt(squares - clamped**2),
            "seq_mean": 0.3808900,
            "seq_std": (0.5215535 - 0.2402265) / math.sqrt(2),
            "seq_max": 0.5215535,
            "seq_min": 0.2402265,
            "seq_max_deviation": 0.5215535,
            "seq_fraction_high": 1 / 2,
            "masked_fraction": 1 / 4,
            "seq_masked_fraction": 1 / 2,
        },
        rel=1e-5,
    )


def test_the_veto_drops_the_sequence_of_a_catastrophic_token() -> None:
    _, mask, metrics = rollout_correction(OLD, ROLLOUT, MASK, rollout_token_veto_threshold=0.6)
    assert mask.tolist() == [[0, 0, 0], [1, 1, 0]]  # w = 0.5 in sequence 1
    assert metrics["rollout_corr/rollout_is_catastrophic_token_fraction"] == pytest.approx(1 / 4)
    assert metrics["rollout_corr/rollout_is_veto_fraction"] == pytest.approx(1 / 2)


def test_off_policy_metrics_by_hand() -> None:
    metrics = off_policy_metrics(OLD, ROLLOUT, MASK)
    # Perplexities (0.6*0.2)^-0.5, (0.8*0.3)^-0.5 and (0.3*0.4)^-0.5, (0.2*0.2)^-0.5; log w sums 0 and ln 6 =
    # 1.791759.
    assert metrics == pytest.approx(
        {
            "training_ppl": (0.12**-0.5 + 0.24**-0.5) / 2,
            "training_log_ppl": (-math.log(0.12) - math.log(0.24)) / 4,
            "kl": -1.791759 / 4,
            "k3_kl": (6.5 + 1.5 - 4 - 1.791759) / 4 - 0.0,
            "rollout_ppl": (0.12**-0.5 + 5.0) / 2,
            "rollout_log_ppl": (-math.log(0.12) - math.log(0.04)) / 4,
            "log_ppl_diff": -1.791759 / 4,
            "log_ppl_abs_diff": 1.791759 / 4,
            "log_ppl_diff_max": 0.0,
            "log_ppl_diff_min": -1.791759 / 2,
            "ppl_ratio": (1 + 6**-0.5) / 2,
            "chi2_token": (4 + 0.25 + 16 + 2.25) / 4 - 1,
            "chi2_seq": (1 + 36) / 2 - 1,
        },
        rel=1e-6,
        abs=1e-12,
    )


@pytest.mark.parametrize(
    ("level", "mode", "bounds", "expected"),
    [
        ("token", "truncate", (None, 3.0), [2.0, 0.5, 3.0, 1.5]),
        ("token", "truncate", (1.0, 3.0), [2.0, 1.0, 3.0, 1.5]),
        ("token", "clip", (None, 1.6), [1.6, 0.625, 1.6, 1.5]),  # 1 / 1.6 below
        ("token", "mask", (0.6, 3.0), [2.0, 0.0, 0.0, 1.5]),
        ("token", "none", (None, 1.0), [2.0, 0.5, 4.0, 1.5]),
        ("sequence", "truncate", (None, 3.0), [1.0, 1.0, 3.0, 3.0]),
        ("geometric", "none", (None, 1.0), [1.0, 1.0, 2.449489743, 2.449489743]),
        ("geometric", "mask", (0.5, 2.0), [1.0, 1.0, 0.0, 0.0]),
    ],
)
def test_levels_and_modes(level: str, mode: str, bounds: tuple[float | None, float], expected: list[float]) -> None:
    lower, upper = bounds
    result = importance_weights(OLD, ROLLOUT, MASK, level=level, mode=mode, lower=lower, upper=upper)
    assert result.weights[:, :2].reshape(-1).tolist() == pytest.approx(expected)
    assert result.weights[:, 2].tolist() == [0.0, 0.0]
    assert not bool(result.kept[:, 2].any())


def test_k1_bands_are_on_the_reciprocal_ratio() -> None:
    # Keeping w in [0.4, 3] is verl's band 1/3 to 2.5 on 1 / w: tokens with w = 2, 0.5, 1.5 stay, 4 goes.
    band = reciprocal_band(0.4, 3.0)
    _, mask, _ = rollout_correction(OLD, ROLLOUT, MASK, rollout_rs="token_k1", rollout_rs_threshold=band)
    kept = importance_weights(OLD, ROLLOUT, MASK, mode="mask", lower=0.4, upper=3.0).kept
    assert mask.bool().tolist() == kept.tolist() == [[True, True, False], [False, True, False]]


VERL_PRESETS = {  # name: (rollout_is, threshold, rollout_rs, rs threshold, bypass, loss type), verl's defaults
    "decoupled_token_is": ("token", 2.0, None, None, False, "ppo_clip"),
    "decoupled_seq_is": ("sequence", 2.0, None, None, False, "ppo_clip"),
    "decoupled_token_icepop": ("token", "0.5_5.0", None, None, False, "ppo_clip"),
    "decoupled_seq_is_rs": ("sequence", 2.0, "seq_sum_k1", "0.5_2.0", False, "ppo_clip"),
    "decoupled_geo_rs": (None, 2.0, "seq_mean_k1", "0.999_1.001", False, "ppo_clip"),
    "decoupled_geo_rs_seq_tis": ("sequence", 2.0, "seq_mean_k1", "0.999_1.001", False, "ppo_clip"),
    "decoupled_geo_rs_token_tis": ("token", 2.0, "seq_mean_k1", "0.999_1.001", False, "ppo_clip"),
    "decoupled_k3_rs": (None, 2.0, "seq_mean_k3", 0.01, False, "ppo_clip"),
    "decoupled_k3_rs_seq_tis": ("sequence", 2.0, "seq_mean_k3", 0.01, False, "ppo_clip"),
    "decoupled_k3_rs_token_tis": ("token", 2.0, "seq_mean_k3", 0.01, False, "ppo_clip"),
    "bypass_ppo_clip": (None, 2.0, None, None, True, "ppo_clip"),
    "bypass_ppo_clip_geo_rs": (None, 2.0, "seq_mean_k1", "0.999_1.001", True, "ppo_clip"),
    "bypass_ppo_clip_k3_rs": (None, 2.0, "seq_mean_k3", 0.01, True, "ppo_clip"),
    "bypass_pg_is": ("sequence", 2.0, None, None, True, "reinforce"),
    "bypass_pg_token_icepop": ("token", "0.5_5.0", None, None, True, "reinforce"),
    "bypass_pg_geo_rs": (None, 2.0, "seq_mean_k1", "0.999_1.001", True, "reinforce"),
    "bypass_pg_geo_rs_seq_tis": ("sequence", 2.0, "seq_mean_k1", "0.999_1.001", True, "reinforce"),
    "bypass_pg_geo_rs_token_tis": ("token", 2.0, "seq_mean_k1", "0.999_1.001", True, "reinforce"),
    "disabled": (None, 2.0, None, None, False, "ppo_clip"),
}


@pytest.mark.parametrize("name", VERL_PRESETS)
def test_presets_are_verls(name: str) -> None:
    config = RolloutCorrectionConfig.preset(name)
    assert (
        config.rollout_is,
        config.rollout_is_threshold,
        config.rollout_rs,
        config.rollout_rs_threshold,
        config.bypass_mode,
        config.loss_type,
    ) == VERL_PRESETS[name]
    assert not config.rollout_is_batch_normalize
    weights, mask, metrics = apply_rollout_correction(config, OLD, ROLLOUT, MASK)
    assert (weights is None) == (config.rollout_is is None)
    assert mask.shape == MASK.shape
    assert "rollout_corr/kl" in metrics


def test_kpop_keeps_raw_weights_where_both_binary_kls_are_at_most_a_tenth() -> None:
    """p and q by hand: 0.5 and 0.3 have KLs of 0.087 and 0.084; 0.5 and 0.28, 0.106 and 0.101."""
    trainer, engine = torch.tensor([[0.5, 0.5, 1e-3]]).log(), torch.tensor([[0.3, 0.28, 1e-5]]).log()
    config = RolloutCorrectionConfig.preset("decoupled_token_kpop")
    weights, mask, _ = apply_rollout_correction(config, trainer, engine, torch.ones(1, 3))
    assert mask.tolist() == [[1.0, 0.0, 1.0]]
    assert weights is not None
    assert weights[0, [0, 2]].tolist() == pytest.approx([5 / 3, 100.0], rel=1e-5)


def test_every_preset_is_in_the_table_and_takes_other_values() -> None:
    assert set(ROLLOUT_PRESETS) == {*VERL_PRESETS, "decoupled_token_kpop"}
    config = RolloutCorrectionConfig.preset("decoupled_token_icepop", rollout_is_threshold="0.1_9.0")
    assert (config.rollout_is, config.rollout_is_threshold) == ("token", "0.1_9.0")
    with pytest.raises(InvalidInputError, match=r"unknown preset 'bypass_pg_iss'. Did you mean 'bypass_pg_is'"):
        RolloutCorrectionConfig.preset("bypass_pg_iss")
    with pytest.raises(InvalidInputError, match=r"no field 'rollout_treshold'. Did you mean"):
        RolloutCorrectionConfig.preset("disabled", rollout_treshold=3.0)


def random_batch(lengths: list[int], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(lengths), max(lengths, default=0)
    old = -1.0 - torch.rand(rows, width, generator=generator, dtype=torch.float64)
    inside = torch.arange(width).unsqueeze(0) < torch.tensor(lengths).reshape(-1, 1)
    return {
        "old_log_prob": old,
        "rollout_log_prob": old + 0.5 * torch.randn(rows, width, generator=generator, dtype=torch.float64),
        "response_mask": inside & (torch.rand(rows, width, generator=generator) > 0.2),
    }


@pytest.mark.lengthy
@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    level=st.sampled_from([None, "token", "sequence"]),
    threshold=st.sampled_from([1.5, "0.5_1.5"]),
    normalize=st.booleans(),
    option=st.sampled_from([None, *ROLLOUT_RS_OPTIONS]),
    veto=st.sampled_from([None, 0.5]),
    seed=st.integers(0, 10_000),
)
def test_packed_equals_padded(
    lengths: list[int],
    level: str | None,
    threshold: float | str,
    normalize: bool,
    option: str | None,
    veto: float | None,
    seed: int,
) -> None:
    batch = random_batch(lengths, seed)
    options = {
        "rollout_is": level,
        "rollout_is_threshold": threshold,
        "rollout_is_batch_normalize": normalize,
        "rollout_rs": option,
        "rollout_rs_threshold": 1.4,
        "rollout_token_veto_threshold": veto,
    }

    def pack(values: Tensor) -> Tensor:
        return torch.cat([values[row, :n] for row, n in enumerate(lengths)])

    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    weights, mask, metrics = rollout_correction(**batch, **options)
    packed = {name: pack(value) for name, value in batch.items()}
    packed_weights, packed_mask, packed_metrics = rollout_correction(**packed, **options, cu_seqlens=cu_seqlens)
    assert torch.equal(packed_mask, pack(mask))
    assert as_floats(packed_metrics) == pytest.approx(as_floats(metrics), rel=1e-9, abs=1e-9)
    if weights is not None and packed_weights is not None:
        torch.testing.assert_close(packed_weights, pack(weights), rtol=1e-12, atol=1e-14)
        if not normalize:
            assert bool((weights <= 1.5).all())


@pytest.mark.filterwarnings("ignore:.* at more than 1% of the valid tokens")
@pytest.mark.parametrize("option", [None, *ROLLOUT_RS_OPTIONS])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_extreme_log_ratios_stay_finite(option: str | None, level: str, dtype: torch.dtype) -> None:
    old = torch.tensor([[-1e4, -1.0, -math.inf], [0.0, -math.inf, -1.0]], dtype=dtype)
    rollout = torch.tensor([[-1.0, -1e4, -1.0], [0.0, -math.inf, -math.inf]], dtype=dtype)
    weights, mask, metrics = rollout_correction(
        old, rollout, torch.ones(2, 3), level, 2.0, True, option, 2.0, rollout_token_veto_threshold=1e-4
    )
    assert weights is not None
    assert weights.isfinite().all()
    assert mask.isfinite().all()
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 2)])
@pytest.mark.parametrize("option", [None, *ROLLOUT_RS_OPTIONS])
def test_a_batch_without_valid_tokens_has_zero_weights_and_finite_metrics(
    shape: tuple[int, int], option: str | None
) -> None:
    values, mask = torch.full(shape, NAN), torch.zeros(shape, dtype=torch.bool)
    for level in ("token", "sequence"):
        weights, modified, metrics = rollout_correction(
            values, values, mask, level, 2.0, True, option, 2.0, rollout_token_veto_threshold=0.1
        )
        assert weights is not None
        assert torch.equal(weights, torch.zeros(shape))
        assert torch.equal(modified, mask)
        assert all(math.isfinite(value) for value in metrics.values())


def test_equal_policies_are_left_alone() -> None:
    weights, mask, metrics = rollout_correction(
        OLD, OLD, MASK, "sequence", 2.0, True, ",".join(ROLLOUT_RS_OPTIONS), 1.001
    )
    assert weights is not None
    assert torch.equal(weights, MASK.double())
    assert torch.equal(mask, MASK)
    for name in ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_diff", "rollout_rs_masked_fraction"):
        assert metrics[f"rollout_corr/{name}"] == 0.0
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 1.0


def test_weights_carry_no_gradient() -> None:
    old = OLD.nan_to_num(0.0).requires_grad_()
    weights, _, _ = rollout_correction(old, ROLLOUT, MASK, "token")
    assert weights is not None
    assert not weights.requires_grad


def bypass_inputs(log_prob: Tensor) -> PolicyLossInputs:
    advantages = torch.tensor([[2.0] * 3, [-1.0] * 3], dtype=torch.float64)
    return PolicyLossInputs(log_prob=log_prob, old_log_prob=ROLLOUT, advantages=advantages, response_mask=MASK)


def test_bypass_reinforce_multiplies_its_weights_in() -> None:
    # w = 2, 0.5 | 4, 1.5 truncated at 3: -(2*2 ln 0.6 + 0.5*2 ln 0.2 - 3 ln 0.8 - 1.5 ln 0.3) / 4.
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_threshold=3.0, bypass_mode=True, loss_type="reinforce"
    )
    log_prob = OLD.clone().requires_grad_()
    output = bypass_policy_loss(bypass_inputs(log_prob), config)
    expected = -(4 * math.log(0.6) + math.log(0.2) - 3 * math.log(0.8) - 1.5 * math.log(0.3)) / 4
    assert output.loss.item() == pytest.approx(expected)
    output.loss.backward()
    assert log_prob.grad is not None
    assert log_prob.grad[:, :2].reshape(-1).tolist() == pytest.approx([-4 / 4, -1 / 4, 3 / 4, 1.5 / 4])
    assert "rollout_corr/rollout_is_mean" in output.metrics


def test_bypass_ppo_clip_rejects_but_does_not_weight() -> None:
    # Sequence 2 is rejected by its product ratio 6; -2 * 1.2 and -2 * 0.5 over two tokens.
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2.0", bypass_mode=True
    )
    output = bypass_policy_loss(bypass_inputs(OLD), config)
    assert output.loss.item() == pytest.approx((-2.4 - 1.0) / 2)


def test_bypass_mode_refuses_what_it_cannot_have() -> None:
    with pytest.raises(InvalidInputError, match=r"bypass_mode=True"):
        bypass_policy_loss(bypass_inputs(OLD), RolloutCorrectionConfig())
    config = RolloutCorrectionConfig.preset("bypass_ppo_clip")
    inputs = PolicyLossInputs(
        log_prob=OLD, old_log_prob=OLD, advantages=OLD, response_mask=MASK, router_shift_ratio=torch.ones(2, 3)
    )
    with pytest.raises(InvalidInputError, match=r"router_shift_ratio must be None in bypass mode"):
        bypass_policy_loss(inputs, config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_is": "sequnce"}, "unknown rollout_is 'sequnce'. Did you mean 'sequence'"),
        ({"rollout_is_threshold": "2.0_0.5"}, "0 < lower <= upper, got '2.0_0.5'"),
        ({"rollout_is_threshold": "two"}, "must be a number or two numbers joined by _, got 'two'"),
        ({"rollout_is_threshold": True}, "must be a number"),
        ({"rollout_is_threshold": 0.0}, "must be positive"),
        ({"rollout_is_threshold": math.inf}, "must be finite"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1.0}, "unknown rollout_rs option 'token_k4'. Did you mean"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 1.0}, "unknown rollout_rs option 'seq_max_k1'"),
        ({"rollout_rs": "token_k1"}, "needs a rollout_rs_threshold"),
        (
            {"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "1,2,3"},
            "must give one value, or one for each of the 2 options",
        ),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.2"}, "single upper bound"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "needs 0 < lower <= upper"),
        ({"loss_type": "ppo_clp"}, "unknown loss_type 'ppo_clp'. Did you mean 'ppo_clip'"),
        ({"rollout_token_veto_threshold": 0.0}, "must be > 0, got 0.0"),
    ],
)
def test_bad_options_are_refused_with_the_value(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        RolloutCorrectionConfig(**options)
