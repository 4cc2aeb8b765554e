"""Every objective against numbers worked out by hand on four tokens.

Two sequences of two tokens. Probabilities of the tokens under the old and the new policy, and the ratio rho:

    sequence 1, A = +2:   0.50 -> 0.75  rho 1.5      0.50 -> 0.45  rho 0.9
    sequence 2, A = -1:   0.20 -> 0.80  rho 4.0      0.25 -> 0.15  rho 0.6
"""

import math

import pytest
import torch

from moe_rl.core.errors import InvalidInputError
from moe_rl.importance import (
    BehaviorFilter,
    PolicyLossInputs,
    PolicyLossOutput,
    RouterShiftUse,
    opsm_mask,
    policy_loss,
)

NEW = torch.tensor([[0.75, 0.45], [0.80, 0.15]], dtype=torch.float64).log()
OLD = torch.tensor([[0.50, 0.50], [0.20, 0.25]], dtype=torch.float64).log()
ROLLOUT = torch.tensor([[0.40, 0.50], [0.10, 0.10]], dtype=torch.float64).log()
ADVANTAGES = torch.tensor([[2.0, 2.0], [-1.0, -1.0]], dtype=torch.float64)
ALL = torch.ones(2, 2, dtype=torch.bool)
WITHOUT_LAST = torch.tensor([[1, 1], [1, 0]])


def loss_of(objective: str, *, mask: torch.Tensor = ALL, **options: object) -> PolicyLossOutput:
    inputs = PolicyLossInputs(log_prob=NEW, old_log_prob=OLD, advantages=ADVANTAGES, response_mask=mask)
    return policy_loss(inputs, objective=objective, **options)


def test_ppo_clips_both_ways_and_caps_the_punished_token() -> None:
    # clip to [0.8, 1.2]: max(-3.0, -2.4) = -2.4;  -2*0.9 = -1.8;  max(4.0, 1.2) = 4.0, capped at 3;  max(0.6,
    # 0.8) = 0.8.
    output = loss_of("ppo")
    assert output.loss.item() == pytest.approx((-2.4 - 1.8 + 3.0 + 0.8) / 4)
    assert output.metrics["actor/pg_clipfrac"] == pytest.approx(2 / 4)  # tokens 1 and 4
    assert output.metrics["actor/pg_clipfrac_lower"] == pytest.approx(1 / 4)  # token 3
    # -(ln 1.5 + ln 0.9 + ln 4 + ln 0.6) / 4 = -ln(3.24) / 4
    assert output.metrics["actor/ppo_kl"] == pytest.approx(-0.2938933325)


def test_grpo_averages_each_sequence_first() -> None:
    # The last token is masked: (-2.4 - 1.8) / 2 = -2.1 and 3.0 / 1 = 3.0.
    assert loss_of("grpo", mask=WITHOUT_LAST).loss.item() == pytest.approx((-2.1 + 3.0) / 2)
    # Without the dual clip the third token keeps its 4.
    assert loss_of("grpo", clip_ratio_c=None).loss.item() == pytest.approx((-2.1 + (4.0 + 0.8) / 2) / 2)


def test_dapo_lets_the_rewarded_token_go_to_1_28() -> None:
    assert loss_of("dapo").loss.item() == pytest.approx((-2.56 - 1.8 + 3.0 + 0.8) / 4)


def test_gspo_uses_the_geometric_mean_of_the_sequence() -> None:
    # s = sqrt(1.5 * 0.9) = 1.161895, clipped to 1.05: -2.1.  s = sqrt(4 * 0.6) = 1.549193: max(1.549193, 1.05).
    output = loss_of("gspo", clip_ratio_low=0.05, clip_ratio_high=0.05)
    assert output.loss.item() == pytest.approx((-2.1 + 1.5491933385) / 2)
    assert output.metrics["actor/pg_clipfrac"] == pytest.approx(1 / 2)


def test_gmpo_clips_log_ratios_token_by_token() -> None:
    # A > 0: ln 1.5 -> 0.4 and ln 0.9 stays: R = e^0.2 sqrt(0.9) = 1.1587243969.
    # A < 0: ln 4 stays and ln 0.6 = -0.51 -> -0.4: R = sqrt(4 e^-0.4) = 2 e^-0.2 = 1.6374615062.
    output = loss_of("gmpo")
    assert output.loss.item() == pytest.approx((-2 * 1.1587243969 + 1.6374615062) / 2)
    assert output.metrics["actor/pg_clipfrac"] == pytest.approx(1 / 4)
    assert output.metrics["actor/pg_clipfrac_lower"] == pytest.approx(2 / 4)


def test_cispo_weights_the_log_likelihood() -> None:
    # weights 1.2, 0.9, 1.2, 0.8: -2.4 ln 0.75 = 0.6904369739; -1.8 ln 0.45 = 1.4373138532; 1.2 ln 0.8 =
    # -0.2677722616; 0.8 ln 0.15 = -1.5176959879.
    output = loss_of("cispo", clip_ratio_low=0.2, clip_ratio_high=0.2)
    expected = (0.6904369739 + 1.4373138532 - 0.2677722616 - 1.5176959879) / 4
    assert output.loss.item() == pytest.approx(expected)
    assert output.metrics["actor/pg_clipfrac"] == pytest.approx(3 / 4)


def test_sapo_gates_with_a_sigmoid() -> None:
    # tau 1: -8 sigmoid(0.5) = -4.9796746496, -8 sigmoid(-0.1) = -3.8001665002;
    # tau 1.05: (4 / 1.05) sigmoid(3.15) = 3.6529856069, (4 / 1.05) sigmoid(-0.42) = 1.5105400005.
    expected = ((-4.9796746496 - 3.8001665002) / 2 + (3.6529856069 + 1.5105400005) / 2) / 2
    assert loss_of("sapo").loss.item() == pytest.approx(expected)


def test_dppo_tv_drops_the_token_whose_probability_rose_too_far() -> None:
    # changes: +0.25 > 0.2 with A > 0 is dropped; -0.05; +0.6 with A < 0 is kept (it rose); -0.1 >= -0.2.
    # -1.8 ln 0.45 = 1.4373138532; 4 ln 0.8 = -0.8925742053; 0.6 ln 0.15 = -1.1382719910.
    output = loss_of("dppo_tv")
    assert output.loss.item() == pytest.approx((1.4373138532 - 0.8925742053 - 1.1382719910) / 4)
    assert output.metrics["actor/pg_clipfrac"] == pytest.approx(1 / 4)
    # A truncation of 2 halves the third token's weight.
    truncated = loss_of("dppo_tv", clip_ratio_c=2.0)
    assert truncated.loss.item() == pytest.approx((1.4373138532 - 0.8925742053 / 2 - 1.1382719910) / 4)
    assert truncated.metrics["actor/pg_clipfrac_lower"] == pytest.approx(1 / 4)


def test_dppo_kl_drops_by_bernoulli_divergence() -> None:
    # Token 1: 0.5 ln(0.5/0.75) + 0.5 ln(0.5/0.25) = 0.1438 > 0.05, dropped. Token 4: 0.25 ln(0.25/0.15) + 0.75
    # ln(0.75/0.85) = 0.0338: kept at 0.05, dropped at 0.03. Token 3 moved the other way.
    assert loss_of("dppo-kl").loss.item() == pytest.approx((1.4373138532 - 0.8925742053 - 1.1382719910) / 4)
    tight = loss_of("dppo_kl", clip_ratio_low=0.03)
    assert tight.loss.item() == pytest.approx((1.4373138532 - 0.8925742053) / 4)


def test_ctpo_clips_the_prefix_ratio_wider_with_position() -> None:
    # Prefix ratios 1.5, 1.35 and 4, 2.4. Bounds e^0.05 = 1.0512710964 at t = 1, e^(0.05 sqrt 2) = 1.0732706603
    # at t = 2; the punished tokens are capped at the same values by the dual clip.
    output = loss_of("ctpo")
    assert output.loss.item() == pytest.approx((-2 * 1.0512710964 - 2 * 1.0732706603 + 1.0512710964 + 1.0732706603) / 4)
    # Geometric mean: sqrt(1.35) = 1.1619 is clipped to e^(0.05 / sqrt 2) = 1.0359877703 at t = 2.
    geomean = loss_of("ctpo", ratio_mode="geomean")
    assert geomean.loss.item() == pytest.approx(
        (-2 * 1.0512710964 - 2 * 1.0359877703 + 1.0512710964 + 1.0359877703) / 4
    )


def test_aspo_flips_the_weights_of_rewarded_tokens() -> None:
    # A > 0: -2 / 1.2 and -2 / 0.9. A < 0: rho 4 > 3 gives 3 ln 0.8 = -0.6694306539; rho 0.6 -> 0.8.
    expected = (-2 / 1.2 - 2 / 0.9 - 0.6694306539 + 0.8) / 4
    assert loss_of("aspo").loss.item() == pytest.approx(expected)


def test_aspo_bounds_the_flipped_weight() -> None:
    # rho 0.25: 1 / 0.25 = 4 > 3, so x = -A 3 ln 0.1 = 6.907755279.
    inputs = PolicyLossInputs(
        log_prob=torch.tensor([[0.1]], dtype=torch.float64).log(),
        old_log_prob=torch.tensor([[0.4]], dtype=torch.float64).log(),
        advantages=torch.ones(1, 1, dtype=torch.float64),
        response_mask=torch.ones(1, 1),
    )
    assert policy_loss(inputs, objective="aspo").loss.item() == pytest.approx(6.907755279)


def test_dcpo_widens_the_clip_of_improbable_tokens() -> None:
    # q = 0.5: high = (1 + sqrt 2.6) / 2 = 1.3062257748 -> -2.6124515497. q = 0.5 lets 0.9 through -> -1.8.
    # q = 0.2: rho 4 is beyond high = (1 + sqrt 5) / 2, dual clip 3. q = 0.25: low = 0.5, so 0.6 stays.
    assert loss_of("dcpo").loss.item() == pytest.approx((-2.6124515497 - 1.8 + 3.0 + 0.6) / 4)


def test_opsm_drops_punished_sequences_that_drifted() -> None:
    # Sequence 2 now at rho 0.5 twice: mean(log old - log new) = ln 2 > delta, so its two tokens give 0 and stay
    # counted.
    new = torch.tensor([[0.75, 0.45], [0.10, 0.125]], dtype=torch.float64).log()
    inputs = PolicyLossInputs(log_prob=new, old_log_prob=OLD, advantages=ADVANTAGES, response_mask=ALL)
    dropped = policy_loss(inputs, objective="opsm")
    assert dropped.loss.item() == pytest.approx((-2.4 - 1.8) / 4)
    assert dropped.metrics["actor/opsm_clipfrac"] == pytest.approx(1 / 2)
    # With delta above ln 2 = 0.693 it stays: 0.5 is clipped to 0.8.
    kept = policy_loss(inputs, objective="opsm", opsm_delta=0.7)
    assert kept.loss.item() == pytest.approx((-2.4 - 1.8 + 0.8 + 0.8) / 4)
    assert opsm_mask(new, OLD, ADVANTAGES, ALL).tolist() == [[True, True], [False, False]]


# pi_prox / pi_behav = 0.5/0.4, 0.5/0.5, 0.2/0.1, 0.25/0.1 = 1.25, 1, 2, 2.5; PPO terms without dual clip -2.4,
# -1.8, 4, 0.8.
@pytest.mark.parametrize(
    ("behavior_filter", "expected"),
    [
        (None, (-3.0 - 1.8 + 8.0 + 2.0) / 4),
        (BehaviorFilter(upper=2.2), (-3.0 - 1.8 + 8.0) / 4),  # token 4 dropped, still counted
        (BehaviorFilter(upper=2.2, action="clamp"), (-3.0 - 1.8 + 8.0 + 2.2 * 0.8) / 4),
        (BehaviorFilter(upper=2.2, lower=1.1), (-3.0 + 8.0) / 4),
        # Sequence ratio: sqrt(1.25) = 1.118034 and sqrt(5) = 2.236068, the weight of both tokens.
        (BehaviorFilter(level="sequence", upper=2.0), 1.118033989 * (-2.4 - 1.8) / 4),
        (BehaviorFilter(level="sequence", upper=2.0, action="clamp"), (1.118033989 * -4.2 + 2.0 * 4.8) / 4),
        # k2 = (log w)^2 / 2: 0.0249, 0, 0.2402, 0.4198.
        (BehaviorFilter(metric="kl_k2", upper=0.3), (-3.0 - 1.8 + 8.0) / 4),
        # The larger Bernoulli KL of (0.5, 0.4), (0.5, 0.5), (0.2, 0.1), (0.25, 0.1): 0.0204, 0, 0.0444, 0.0921.
        (BehaviorFilter(metric="binary_kl", upper=0.05), (-3.0 - 1.8 + 8.0) / 4),
        # k1 = log w: 0.2231, 0, 0.6931, 0.9163. k3 = 1/w - 1 + log w: 0.0231, 0, 0.1931, 0.3163.
        (BehaviorFilter(metric="kl_k1", upper=0.5), (-3.0 - 1.8) / 4),
        (BehaviorFilter(metric="kl_k3", upper=0.1), (-3.0 - 1.8) / 4),
        # Sequence maxima of k2: 0.0249 and 0.4198; means 0.0124 and 0.3300; sums 0.0249 and 0.6600.
        (BehaviorFilter(level="sequence", metric="kl_k2", agg="max", upper=0.4), (-3.0 - 1.8) / 4),
        (BehaviorFilter(level="sequence", metric="kl_k2", agg="mean", upper=0.4), (-3.0 - 1.8 + 8.0 + 2.0) / 4),
        (BehaviorFilter(level="sequence", metric="kl_k2", agg="sum", upper=0.5), (-3.0 - 1.8) / 4),
    ],
)
def test_decoupled_ppo_weights_by_the_behavior_policy(behavior_filter: BehaviorFilter | None, expected: float) -> None:
    inputs = PolicyLossInputs(
        log_prob=NEW, old_log_prob=OLD, advantages=ADVANTAGES, response_mask=ALL, rollout_log_prob=ROLLOUT
    )
    output = policy_loss(inputs, objective="decoupled_ppo", behavior_filter=behavior_filter)
    assert output.loss.item() == pytest.approx(expected)


def test_decoupled_ppo_reports_and_bounds_staleness() -> None:
    inputs = PolicyLossInputs(
        log_prob=NEW,
        old_log_prob=OLD,
        advantages=ADVANTAGES,
        response_mask=ALL,
        rollout_log_prob=ROLLOUT,
        policy_version=torch.tensor([[7, 9], [4, 4]]),
        current_version=10,
    )
    output = policy_loss(inputs, objective="decoupled_ppo", max_staleness=3)
    assert output.loss.item() == pytest.approx((-3.0 - 1.8) / 4)  # sequence 2 is 6 versions old
    assert output.metrics["staleness/mean"] == pytest.approx((3 + 1 + 6 + 6) / 4)
    assert output.metrics["staleness/max"] == 6
    assert output.metrics["staleness/mixed_version_seq_fraction"] == pytest.approx(1 / 2)


LOGS = (math.log(0.75), math.log(0.45), math.log(0.80), math.log(0.15))


def test_dro_pulls_back_to_the_old_policy() -> None:
    penalty = sum(math.log(rho) ** 2 for rho in (1.5, 0.9, 4.0, 0.6))
    expected = (-2 * LOGS[0] - 2 * LOGS[1] + LOGS[2] + LOGS[3] + 0.5 * 0.3 * penalty) / 4
    assert loss_of("dro", beta=0.3).loss.item() == pytest.approx(expected)


def test_topr_tapers_what_is_punished() -> None:
    # Weights 1, 1 where A > 0; min(4, 1) and 0.6 elsewhere; of the sequence min(4 * 0.6, 1) = 1 twice.
    output = loss_of("topr")
    assert output.loss.item() == pytest.approx((-2 * LOGS[0] - 2 * LOGS[1] + LOGS[2] + 0.6 * LOGS[3]) / 4)
    assert output.metrics["actor/pg_clipfrac"] == pytest.approx(1 / 4)
    expected = (-2 * LOGS[0] - 2 * LOGS[1] + LOGS[2] + LOGS[3]) / 4
    assert loss_of("topr", level="sequence").loss.item() == pytest.approx(expected)


def test_luspo_weights_gspo_by_length() -> None:
    # The terms of gspo, -2.1 and 1.549, times the lengths 2 and, with the last token masked, 1 (s = 4 there).
    options = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05}
    assert loss_of("luspo", **options).loss.item() == pytest.approx((2 * -2.1 + 2 * 1.5491933385) / 2)
    assert loss_of("luspo", mask=WITHOUT_LAST, **options).loss.item() == pytest.approx((2 * -2.1 + 4.0) / 2)


def test_vespo_weights_by_the_sequence_ratio() -> None:
    # w = 1.35 with k 2, lambda 3; w = 2.4 with k 3, lambda 2.
    first, second = 1.35**2 * math.exp(3 * (1 - 1.35)), 2.4**3 * math.exp(2 * (1 - 2.4))
    expected = (-2 * first * (LOGS[0] + LOGS[1]) + second * (LOGS[2] + LOGS[3])) / 4
    assert loss_of("vespo").loss.item() == pytest.approx(expected)


def test_opsm_can_measure_the_drift_from_the_rollout_policy() -> None:
    # No update since the old policy; but sequence 2 has mean(log rollout - log new) = ln(0.01 / 0.0072) / 2 > delta.
    new = torch.tensor([[0.75, 0.45], [0.08, 0.09]], dtype=torch.float64).log()
    inputs = PolicyLossInputs(
        log_prob=new, old_log_prob=new, advantages=ADVANTAGES, response_mask=ALL, rollout_log_prob=ROLLOUT
    )
    assert policy_loss(inputs, objective="opsm").metrics["actor/opsm_clipfrac"] == 0.0
    dropped = policy_loss(inputs, objective="opsm", against="rollout")
    assert dropped.metrics["actor/opsm_clipfrac"] == pytest.approx(1 / 2)
    assert dropped.loss.item() == pytest.approx((-2.0 - 2.0) / 4)
    with pytest.raises(InvalidInputError, match=r"objective 'opsm' needs rollout_log_prob"):
        loss_of("opsm", against="rollout")


def test_a_clamp_needs_the_ratio() -> None:
    with pytest.raises(InvalidInputError, match=r"only with metric 'ratio': for metric 'kl_k2', use action 'mask'"):
        BehaviorFilter(metric="kl_k2", action="clamp")


def test_reinforce_is_the_weighted_log_likelihood() -> None:
    # -2 ln 0.75 = 0.5753641449, -2 ln 0.45 = 1.5970153924, ln 0.8 = -0.2231435513, ln 0.15 = -1.8971199849.
    terms = (0.5753641449, 1.5970153924, -0.2231435513, -1.8971199849)
    assert loss_of("reinforce").loss.item() == pytest.approx(sum(terms) / 4)
    inputs = PolicyLossInputs(
        log_prob=NEW,
        old_log_prob=OLD,
        advantages=ADVANTAGES,
        response_mask=ALL,
        rollout_is_weights=torch.tensor([[2.0, 1.0], [0.5, 0.0]]),
    )
    weighted = policy_loss(inputs, objective="reinforce").loss.item()
    assert weighted == pytest.approx((2 * terms[0] + terms[1] + 0.5 * terms[2]) / 4)


def test_prime_rl_adds_a_squared_log_ratio_to_the_masked_gradient() -> None:
    # Token 1 is masked (0.25 > 0.2). kl_tau 0.1: 0.1 ln(1.5)^2 = 0.0164401954; -1.8 + 0.1 ln(0.9)^2 =
    # -1.7988899162; 4 + 0.1 ln(4)^2 = 4.1921812056; 0.6 + 0.1 ln(0.6)^2 = 0.6260942818. Summed, not averaged.
    output = loss_of("prime_rl", kl_tau=0.1)
    assert output.loss.item() == pytest.approx(0.0164401954 - 1.7988899162 + 4.1921812056 + 0.6260942818)
    assert output.metrics["is_masked"] == output.metrics["is_masked_high"] == pytest.approx(1 / 4)
    # mismatch KL rho - 1 - ln rho: 1.5 - 1 - 0.4054651081 = 0.0945348919 for the masked token.
    assert output.metrics["masked_mismatch_kl"] == pytest.approx(0.0945348919)
    # IPO masks changes beyond 0.1 of either sign of A: +0.25 and +0.6 (-0.1 rounds to either side, so 0.11).
    ipo = loss_of("prime_rl_ipo", kl_tau=0.0, ipo_threshold=0.11)
    assert ipo.loss.item() == pytest.approx(-1.8 + 0.6)


class TestRouterShift:
    """gamma = 0.5 at tokens 1 and 3, 1 elsewhere: RSPO on PPO and GMPO."""

    GAMMA = torch.tensor([[0.5, 1.0], [0.5, 1.0]], dtype=torch.float64)

    def loss(self, objective: str, use: RouterShiftUse, **options: object) -> float:
        inputs = PolicyLossInputs(
            log_prob=NEW, old_log_prob=OLD, advantages=ADVANTAGES, response_mask=ALL, router_shift_ratio=self.GAMMA
        )
        return policy_loss(inputs, objective=objective, router_shift=use, **options).loss.item()

    def test_before_the_clip_it_scales_the_ratio(self) -> None:
        # rho gamma = 0.75, 0.9, 2.0, 0.6: -2 * 0.75 = -1.5; -1.8; max(2, 1.2) = 2; 0.8.
        loss = self.loss("ppo", RouterShiftUse(order="before-clip"))
        assert loss == pytest.approx((-1.5 - 1.8 + 2.0 + 0.8) / 4)

    def test_after_the_clip_it_scales_the_loss(self) -> None:
        loss = self.loss("ppo", RouterShiftUse(order="after-clip"))
        assert loss == pytest.approx((-2.4 * 0.5 - 1.8 + 3.0 * 0.5 + 0.8) / 4)

    def test_gmpo_before_the_clip(self) -> None:
        # d' = ln 0.75 = -0.2877 and ln 0.9: R = sqrt(0.675). d' = ln 2 = 0.6931 stays for A < 0, ln 0.6 -> -0.4:
        # R = sqrt(2 e^-0.4) = 1.1578601336.
        loss = self.loss("gmpo", RouterShiftUse())
        assert loss == pytest.approx((-2 * math.sqrt(0.675) + 1.1578601336) / 2)

    def test_gmpo_after_the_clip_with_the_sign_power_outside(self) -> None:
        # Both sequences are damped by the geometric mean of gamma, sqrt(0.5) = 0.7071067812 (to verl's 1e-10
        # guard).
        loss = self.loss("gmpo", RouterShiftUse(order="after-clip"))
        assert loss == pytest.approx(0.7071067812 * (-2 * 1.1587243969 + 1.6374615062) / 2)

    def test_gmpo_after_the_clip_with_the_sign_power_inside_upweights_the_punished_sequence(self) -> None:
        # gamma^sign(A): sqrt(0.5) for A > 0, sqrt(2) = 1.4142135624 for A < 0.
        loss = self.loss("gmpo", RouterShiftUse(order="after-clip", sign_power="inside"))
        assert loss == pytest.approx((-2 * 1.1587243969 * 0.7071067812 + 1.6374615062 * 1.4142135624) / 2)

    def test_gspo_before_a_clip_that_is_open(self) -> None:
        # s = sqrt(1.35 * 0.5) = 0.8215838363; sqrt(2.4 * 0.5) = 1.0954451150.
        loss = self.loss("gspo", RouterShiftUse(order="before-clip"), clip_ratio_low=math.inf, clip_ratio_high=math.inf)
        assert loss == pytest.approx((-2 * 0.8215838363 + 1.0954451150) / 2)


def test_rollout_weights_multiply_the_clipped_loss() -> None:
    inputs = PolicyLossInputs(
        log_prob=NEW,
        old_log_prob=OLD,
        advantages=ADVANTAGES,
        response_mask=ALL,
        rollout_is_weights=torch.tensor([[2.0, 0.0], [0.5, 1.0]]),
    )
    assert policy_loss(inputs, objective="ppo").loss.item() == pytest.approx((-4.8 + 0.0 + 1.5 + 0.8) / 4)


def test_gmpo_takes_the_geometric_mean_of_rollout_weights() -> None:
    # Weights 4, 1 -> 2 and 0.25, 1 -> 0.5.
    inputs = PolicyLossInputs(
        log_prob=NEW,
        old_log_prob=OLD,
        advantages=ADVANTAGES,
        response_mask=ALL,
        rollout_is_weights=torch.tensor([[4.0, 1.0], [0.25, 1.0]], dtype=torch.float64),
    )
    loss = policy_loss(inputs, objective="gmpo").loss.item()
    assert loss == pytest.approx((2 * -2 * 1.1587243969 + 0.5 * 1.6374615062) / 2)


@pytest.mark.parametrize(
    ("objective", "options", "expected"),
    [
        # Uniform bounds e^0.05 and e^-0.025 at every position.
        ("ctpo", {"clip_ratio_la_power": 0.0}, (-4 * 1.0512710964 + 2 * 1.0512710964) / 4),
        # Dual clip at e^0.5 = 1.6487212707: prefix ratios 4 and 2.4 are beyond it at t = 1 and e^(0.5 sqrt 2) =
        # 2.0281149816.
        ("ctpo", {"la_clip_c": 0.5}, (-2 * 1.0512710964 - 2 * 1.0732706603 + 1.6487212707 + 2.0281149816) / 4),
        # A wider upper clip of 0.5: rho 1.35 < e^0.5 passes, rho 1.5 < e^0.5 too.
        ("ctpo", {"la_clip_high": 0.5}, (-2 * 1.5 - 2 * 1.35 + 1.0512710964 + 1.0732706603) / 4),
        # tau 2 for A > 0: (4/2) sigmoid(2 * 0.5) = 1.4621171573, (4/2) sigmoid(-0.2) = 0.9003320054.
        (
            "sapo",
            {"tau_pos": 2.0, "loss_agg_mode": "token-mean"},
            (-2 * 1.4621171573 - 2 * 0.9003320054 + 3.6529856069 + 1.5105400005) / 4,
        ),
        ("dcpo", {"clip_ratio_c": None}, (-2.6124515497 - 1.8 + 4.0 + 0.6) / 4),
        ("prime_rl", {"adv_tau": 0.5, "kl_tau": 0.0, "dppo_mask_high": 0.3}, 0.5 * (-3.0 - 1.8 + 4.0 + 0.6)),
        ("prime_rl", {"kl_tau": 0.0, "dppo_mask_low": 0.05}, -1.8 + 4.0),  # -0.1 is now too far down
        ("dppo_tv", {"clip_ratio_low": 0.05}, (1.4373138532 - 0.8925742053) / 4),
        ("aspo", {"clip_ratio_c": 1.1}, (-2 / 1.2 + 1.1 * 2 * -math.log(0.45) - 1.1 * -math.log(0.8) + 0.8) / 4),
    ],
)
def test_each_option_matters(objective: str, options: dict[str, object], expected: float) -> None:
    assert loss_of(objective, **options).loss.item() == pytest.approx(expected)


def test_a_router_that_lost_every_expert_silences_the_token() -> None:
    inputs = PolicyLossInputs(
        log_prob=NEW,
        old_log_prob=OLD,
        advantages=ADVANTAGES,
        response_mask=ALL,
        router_shift_ratio=torch.tensor([[0.0, 1.0], [1.0, 1.0]]),
    )
    loss = policy_loss(inputs, objective="ppo", router_shift=RouterShiftUse(order="after-clip")).loss
    assert loss.item() == pytest.approx((0.0 - 1.8 + 3.0 + 0.8) / 4)


def test_clip_cov_drops_drawn_tokens_of_high_covariance() -> None:
    # Means: A 0.5, log pi ln(0.75 0.45 0.8 0.15) / 4 = -0.801. (A - 0.5) (log pi + 0.801): 0.770, 0.004, -0.867, 1.644.
    # PPO takes tokens 1 and 4, whose covariances no longer count; between the bounds lie 2 and 3.
    inputs = PolicyLossInputs(
        log_prob=NEW.clone().requires_grad_(),
        old_log_prob=OLD,
        advantages=ADVANTAGES,
        response_mask=ALL,
        draw=torch.tensor([[0.9, 0.3], [0.2, 0.8]]),
    )
    wide = {"clip_cov_lb": -1.0, "clip_cov_ub": 2.0}
    output = policy_loss(inputs, objective="clip_cov", **wide)  # one token, the drawn one: 2
    assert output.loss.item() == pytest.approx((-2.4 + 4.0 + 0.8) / 4)
    assert output.metrics["actor/pg_clipfrac"] == pytest.approx(1 / 4)
    assert output.metrics["actor/frac_negative_zero_grad"] == pytest.approx(1 / 2)  # token 4, which PPO clips
    (grad,) = torch.autograd.grad(output.loss, inputs.log_prob)
    assert grad.tolist() == [[0.0, 0.0], [pytest.approx(4.0 / 4), 0.0]]
    # Half of four: both candidates. Above 0 only token 2 is left of them, and above 0.1 none.
    both = policy_loss(inputs, objective="clip_cov", clip_cov_ratio=0.5, **wide)
    assert both.loss.item() == pytest.approx((-2.4 + 0.8) / 4)
    for bound, loss in ((0.0, -2.4 + 4.0 + 0.8), (0.1, -2.4 - 1.8 + 4.0 + 0.8)):
        found = policy_loss(inputs, objective="clip_cov", clip_cov_ratio=0.5, clip_cov_lb=bound)
        assert found.loss.item() == pytest.approx(loss / 4)
    with pytest.raises(InvalidInputError, match=r"clip_cov_lb \(6\) must be less than clip_cov_ub \(5\)"):
        policy_loss(inputs, objective="clip_cov", clip_cov_lb=6.0)


def test_kl_cov_pulls_at_the_tokens_of_highest_covariance() -> None:
    # Covariances as above: token 4, then token 1. -A rho: -3.0, -1.8, 4.0, 0.6.
    inputs = PolicyLossInputs(
        log_prob=NEW.clone().requires_grad_(), old_log_prob=OLD, advantages=ADVANTAGES, response_mask=ALL
    )
    output = policy_loss(inputs, objective="kl_cov")
    assert output.loss.item() == pytest.approx((-3.0 - 1.8 + 4.0 + 0.6 - math.log(0.6)) / 4)
    (grad,) = torch.autograd.grad(output.loss, inputs.log_prob)
    expected = [[-3.0, -1.8], [4.0, 0.6 - 1.0]]
    assert grad.tolist() == [[pytest.approx(each / 4) for each in row] for row in expected]
    two = policy_loss(inputs, objective="kl_cov", kl_cov_ratio=0.7, ppo_kl_coef=2.0)  # floor(0.7 * 4) tokens
    assert two.loss.item() == pytest.approx((-0.2 - 2.0 * math.log(0.6) + 2.0 * math.log(1.5)) / 4)
