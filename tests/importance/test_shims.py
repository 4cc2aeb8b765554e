"""The slime, prime-rl and NeMo-RL fronts, called as those frameworks call them, on hand-computed batches."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from moe_rl.core.errors import InvalidInputError
from moe_rl.importance.shims.nemo_rl import ClippedPGLossConfig, clipped_pg_loss
from moe_rl.importance.shims.prime_rl import custom_loss
from moe_rl.importance.shims.slime import icepop_function, mis_function, vanilla_tis_function


def logs(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


# slime: two samples of two and three tokens; w = 2, 0.5 | 4, 1.5, (masked).
TRAIN = [logs(0.6, 0.2), logs(0.8, 0.3, 0.9)]
ROLLOUT = [logs(0.3, 0.4), logs(0.2, 0.2, 0.001)]
MASKS = [torch.tensor([1, 1]), torch.tensor([1, 1, 0])]
PG_LOSS = torch.tensor([1.0, 10.0, 100.0, 1000.0, 5.0], dtype=torch.float64)
CALL = {"pg_loss": PG_LOSS, "train_log_probs": TRAIN, "rollout_log_probs": ROLLOUT, "loss_masks": MASKS}


def test_slime_vanilla_tis() -> None:
    args = SimpleNamespace(tis_clip=3.0, tis_clip_low=0.8)
    loss, masks, metrics = vanilla_tis_function(args, **CALL, total_lengths=[4, 5], response_lengths=[2, 3])
    assert loss[:4].tolist() == pytest.approx([2.0, 8.0, 300.0, 1500.0])
    assert all(a is b for a, b in zip(masks, MASKS, strict=True))
    assert metrics["tis"][:4].tolist() == pytest.approx([2.0, 0.5, 4.0, 1.5])
    assert metrics["tis_abs"][:4].tolist() == pytest.approx([1.0, 0.5, 3.0, 0.5])
    assert metrics["tis_clipfrac"][:4].tolist() == [0.0, 1.0, 1.0, 0.0]


def test_slime_icepop() -> None:
    loss, _, metrics = icepop_function(SimpleNamespace(tis_clip=3.0, tis_clip_low=0.8), **CALL)
    assert loss[:4].tolist() == pytest.approx([2.0, 0.0, 0.0, 1500.0])
    assert metrics["tis_clipfrac"][:4].tolist() == [0.0, 1.0, 1.0, 0.0]


def mis_args(**changes: object) -> SimpleNamespace:
    values: dict[str, object] = {
        "use_tis": True,
        "tis_level": "token",
        "tis_mode": "truncate",
        "tis_lower_bound": 0.6,
        "tis_upper_bound": 3.0,
        "tis_batch_normalize": False,
        "use_rs": False,
        "rs_level": "token",
        "rs_lower_bound": None,
        "rs_upper_bound": None,
        "rs_veto_threshold": None,
    }
    return SimpleNamespace(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "weights", "masks"),
    [
        ({}, [2.0, 0.5, 3.0, 1.5], [[1, 1], [1, 1, 0]]),
        ({"tis_mode": "clip"}, [2.0, 0.6, 3.0, 1.5], [[1, 1], [1, 1, 0]]),
        ({"tis_mode": "clip", "tis_lower_bound": None}, [2.0, 0.5, 3.0, 1.5], [[1, 1], [1, 1, 0]]),
        ({"tis_mode": "mask"}, [2.0, 0.5, 4.0, 1.5], [[1, 0], [0, 1, 0]]),
        ({"tis_level": "sequence"}, [1.0, 1.0, 3.0, 3.0], [[1, 1], [1, 1, 0]]),
        ({"tis_level": "geometric"}, [1.0, 1.0, 2.449489743, 2.449489743], [[1, 1], [1, 1, 0]]),
        ({"use_rs": True}, [2.0, 0.5, 3.0, 1.5], [[1, 0], [0, 1, 0]]),
        ({"use_rs": True, "rs_level": "sequence"}, [2.0, 0.5, 3.0, 1.5], [[1, 1], [0, 0, 0]]),
        (
            {"use_rs": True, "rs_lower_bound": 0.1, "rs_upper_bound": 9.0, "rs_veto_threshold": 0.6},
            [2.0, 0.5, 3.0, 1.5],
            [[0, 0], [1, 1, 0]],
        ),
        # Mean of 2, 0.5, 3, 1.5 is 1.75; of the sequence weights 1 and 3 it is 2.
        ({"tis_batch_normalize": True}, [2 / 1.75, 0.5 / 1.75, 3 / 1.75, 1.5 / 1.75], [[1, 1], [1, 1, 0]]),
        ({"tis_batch_normalize": True, "tis_level": "sequence"}, [0.5, 0.5, 1.5, 1.5], [[1, 1], [1, 1, 0]]),
    ],
)
def test_slime_mis(changes: dict[str, object], weights: list[float], masks: list[list[int]]) -> None:
    loss, modified, metrics = mis_function(mis_args(**changes), **CALL)
    assert (loss / PG_LOSS)[:4].tolist() == pytest.approx(weights)
    assert loss[4].item() == 0.0
    assert [mask.tolist() for mask in modified] == masks
    assert all(value.shape == PG_LOSS.shape for value in metrics.values())
    assert metrics["mis_kl"][:4].tolist() == pytest.approx([-math.log(w) for w in (2, 0.5, 4, 1.5)], rel=1e-5)


def test_slime_mis_only_measures_without_use_tis() -> None:
    loss, masks, metrics = mis_function(mis_args(use_tis=False), **CALL)
    assert loss is PG_LOSS
    assert all(a is b for a, b in zip(masks, MASKS, strict=True))
    # Sample 2: (0.8 * 0.3)^-0.5 and (0.2 * 0.2)^-0.5.
    assert metrics["mis_training_ppl"][2:].tolist() == pytest.approx([0.24**-0.5] * 3, rel=1e-5)
    assert metrics["mis_rollout_ppl"][2:].tolist() == pytest.approx([5.0] * 3, rel=1e-5)


def test_slime_mis_passes_the_gradient_of_the_loss_only() -> None:
    pg_loss = PG_LOSS.clone().requires_grad_()
    train = [values.clone().requires_grad_() for values in TRAIN]
    loss, _, _ = mis_function(mis_args(), **(CALL | {"pg_loss": pg_loss, "train_log_probs": train}))
    loss.sum().backward()
    assert pg_loss.grad is not None
    assert pg_loss.grad.tolist() == pytest.approx([2.0, 0.5, 3.0, 1.5, 0.0])
    assert all(values.grad is None for values in train)


def test_slime_errors_name_the_option() -> None:
    with pytest.raises(InvalidInputError, match=r"unknown tis_mode 'trunc'. Did you mean 'truncate'"):
        mis_function(mis_args(tis_mode="trunc"), **CALL)
    with pytest.raises(InvalidInputError, match=r"unknown level 'tokens'. Did you mean 'token'"):
        mis_function(mis_args(tis_level="tokens"), **CALL)
    with pytest.raises(InvalidInputError, match=r"under context parallelism gather"):
        mis_function(mis_args(), **(CALL | {"train_log_probs": [TRAIN[0], TRAIN[1][:2]]}))


@dataclass
class PrimeInputs:
    """The fields that prime-rl passes."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


def prime_inputs(loss_weights: Tensor | None = None) -> PrimeInputs:
    # 0.50 -> 0.75 with A = 2 is masked (+0.25); 0.25 -> 0.15 with A = -1 stays; the last token is not trained.
    return PrimeInputs(
        trainer_logprobs=logs(0.75, 0.15, 0.5).requires_grad_(),
        inference_logprobs=logs(0.50, 0.25, 0.1),
        ref_logprobs=None,
        advantages=torch.tensor([2.0, -1.0, 7.0], dtype=torch.float64),
        loss_mask=torch.tensor([True, True, False]),
        loss_weights=loss_weights,
    )


def test_prime_rl_default_loss() -> None:
    inputs = prime_inputs()
    output = custom_loss(inputs, kl_tau=0.1)
    first, second = 0.1 * math.log(1.5) ** 2, 0.6 + 0.1 * math.log(0.6) ** 2
    assert output.loss.item() == pytest.approx(first + second)
    assert output.metrics["is_masked"].item() == pytest.approx(1 / 2)
    output.loss.backward()
    # d/dlp: 0.2 ln 1.5 where masked; 0.6 + 0.2 ln 0.6 where kept.
    grad = inputs.trainer_logprobs.grad
    assert grad is not None
    assert grad.tolist() == pytest.approx([0.2 * math.log(1.5), 0.6 + 0.2 * math.log(0.6), 0.0])
    weighted = custom_loss(prime_inputs(torch.tensor([3.0, 0.5, 1.0])), kl_tau=0.1)
    assert weighted.loss.item() == pytest.approx(3 * first + 0.5 * second)


def test_prime_rl_can_use_any_objective() -> None:
    # CISPO: -(1.2 * 2 ln 0.75 - 0.6 ln 0.15), summed over the two trained tokens.
    output = custom_loss(prime_inputs(), objective="cispo")
    assert output.loss.item() == pytest.approx(-2.4 * math.log(0.75) + 0.6 * math.log(0.15))
    with pytest.raises(InvalidInputError, match=r"unknown objective"):
        custom_loss(prime_inputs(), objective="cisp0")


# NeMo-RL: two samples, first column dropped; the numbers of test_objectives_by_hand: rho 1.5, 0.9 | 4, 0.6; A =
# 2 | -1; w = prev / generation = 1.25, 1 | 2, 2.5. A third sample is switched off.
NEMO = {
    "advantages": torch.tensor([[0.0, 2.0, 2.0], [0.0, -1.0, -1.0], [0.0, 5.0, 5.0]], dtype=torch.float64),
    "prev_logprobs": torch.tensor([[1.0, 0.50, 0.50], [1.0, 0.20, 0.25], [1.0, 0.5, 0.5]], dtype=torch.float64).log(),
    "generation_logprobs": torch.tensor(
        [[1.0, 0.40, 0.50], [1.0, 0.10, 0.10], [1.0, 0.5, 0.5]], dtype=torch.float64
    ).log(),
    "token_mask": torch.tensor([[0, 1, 1], [0, 1, 1], [0, 1, 1]]),
    "sample_mask": torch.tensor([1, 1, 0]),
}
CURR = torch.tensor([[0.75, 0.45], [0.80, 0.15], [0.9, 0.9]], dtype=torch.float64).log()
IS = {"use_importance_sampling_correction": True}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (-2.4 - 1.8 + 4.0 + 0.8) / 4),
        ({"ratio_clip_c": 3.0}, (-2.4 - 1.8 + 3.0 + 0.8) / 4),
        ({"token_level_loss": False}, (-4.2 / 2 + 4.8 / 2) / 2),
        (IS, (-3.0 - 1.8 + 8.0 + 2.0) / 4),
        (
            IS | {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 1.1},
            (-2.4 * 1.1 - 1.8 + 1.1 * 4.8) / 4,
        ),
        (
            IS
            | {
                "truncated_importance_sampling_type": "icepop",
                "truncated_importance_sampling_ratio": 2.2,
                "truncated_importance_sampling_ratio_min": 0.5,
            },
            (-3.0 - 1.8 + 8.0) / 4,
        ),
        (  # geometric means sqrt(1.25) and sqrt(5): sequence 2 goes, sequence 1 keeps its untruncated token weights
            IS
            | {
                "truncated_importance_sampling_type": "seq-mask-tis",
                "truncated_importance_sampling_ratio": 2.0,
                "truncated_importance_sampling_ratio_min": 0.5,
            },
            (-3.0 - 1.8) / 4,
        ),
        (  # GSPO: s = sqrt(1.35), sqrt(2.4), clipped to 1.2; w = 1.25 and 5 per sequence
            IS | {"sequence_level_importance_ratios": True, "token_level_loss": False},
            (1.25 * -2 * 1.1618950039 + 5 * 1.5491933385) / 2,
        ),
        ({"use_cispo": True}, (0.6904369739 + 1.4373138532 - 0.2677722616 - 1.5176959879) / 4),
        ({"force_on_policy_ratio": True}, (-2 - 2 + 1 + 1) / 4),
        ({"disable_ppo_ratio": True}, (0.5753641449 + 1.5970153924 - 0.2231435513 - 1.8971199849) / 4),
    ],
)
def test_nemo_rl_options(options: dict[str, object], expected: float) -> None:
    loss, metrics = clipped_pg_loss(CURR, NEMO, 2, 4, ClippedPGLossConfig(**options))
    assert loss.item() == pytest.approx(expected)
    assert metrics["loss"] == pytest.approx(expected)
    assert metrics["num_valid_samples"] == 2


def test_nemo_rl_metrics_by_hand() -> None:
    config = ClippedPGLossConfig(
        **IS, truncated_importance_sampling_type="tis", truncated_importance_sampling_ratio=2.2
    )
    _, metrics = clipped_pg_loss(CURR, NEMO, 2, 4, config)
    # w = 1.25, 1, 2, 2.5 (one above 2.2); JS with mixture (p + q) / 2: ratios m / p and m / q.
    js = 0.0
    for p, q in ((0.5, 0.4), (0.5, 0.5), (0.2, 0.1), (0.25, 0.1)):
        m = (p + q) / 2
        js += 0.5 * (p / m - math.log(p / m) - 1) + 0.5 * (q / m - math.log(q / m) - 1)
    assert {
        name: metrics[name]
        for name in (
            "is_oob_ratio",
            "sampling_importance_ratio",
            "token_mult_prob_error",
            "probs_ratio",
            "probs_ratio_clamped",
            "gen_kl_error",
            "policy_kl_error",
            "js_divergence_error",
        )
    } == pytest.approx(
        {
            "is_oob_ratio": 1 / 4,
            "sampling_importance_ratio": (1.25 + 1 + 2 + 2.2) / 4,
            "token_mult_prob_error": (1.25 + 1 + 2 + 2.5) / 4,
            "probs_ratio": (1.5 + 0.9 + 4 + 0.6) / 4,
            "probs_ratio_clamped": (1.2 + 0.9 + 1.2 + 0.8) / 4,
            # k3 of generation against prev: w - 1 - ln w; and of 1 / w the other way.
            "gen_kl_error": (6.75 - 4 - math.log(1.25 * 2 * 2.5)) / 4,
            "policy_kl_error": (0.8 + 1 + 0.5 + 0.4 - 4 + math.log(1.25 * 2 * 2.5)) / 4,
            "js_divergence_error": js / 4,
        }
    )


def test_nemo_rl_micro_batches_add_up_and_masked_samples_are_silent() -> None:
    config = ClippedPGLossConfig(token_level_loss=False)
    poisoned = NEMO | {"advantages": NEMO["advantages"].clone()}
    poisoned["advantages"][2] = math.nan
    curr = CURR.clone().requires_grad_()
    whole, _ = clipped_pg_loss(curr, poisoned, 2, 4, config)
    whole.backward()
    parts = [
        clipped_pg_loss(CURR[i : i + 1], {k: v[i : i + 1] for k, v in poisoned.items()}, 2, 4, config)[0]
        for i in range(3)
    ]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item())
    assert curr.grad is not None
    assert curr.grad[2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"truncated_importance_sampling_type": "tis"}, "needs use_importance_sampling_correction"),
        (IS | {"truncated_importance_sampling_type": "tis"}, "'tis' needs truncated_importance_sampling_ratio"),
        (
            IS | {"truncated_importance_sampling_type": "icepop", "truncated_importance_sampling_ratio": 2.0},
            "needs truncated_importance_sampling_ratio_min",
        ),
        (IS | {"truncated_importance_sampling_type": "seq_mask_tis"}, "Did you mean 'seq-mask-tis'"),
        ({"sequence_level_importance_ratios": True}, "needs token_level_loss=False"),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, "use_cispo excludes ratio_clip_c"),
        ({"use_cispo": True, "disable_ppo_ratio": True}, "use_cispo excludes disable_ppo_ratio"),
        ({"ratio_clip_c": 0.9}, "must be > 1, got 0.9"),
    ],
)
def test_nemo_rl_refuses_contradictions(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        ClippedPGLossConfig(**options)
