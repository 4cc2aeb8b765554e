"""Options and presets of the train/rollout correction, under verl's names.

Which way the bounds point: the importance weight is w = pi_old / pi_rollout (trainer over engine).
`rollout_is_threshold` bounds w. The k1 options of `rollout_rs` test -log w, so their "lower_upper" thresholds
bound 1 / w = pi_rollout / pi_old: an asymmetric band must be turned round (`reciprocal_band`). k2, k3 and
binary_kl are one-sided upper bounds.
"""

import math
from dataclasses import dataclass
from typing import Self

from moe_rl.core.errors import InvalidInputError, nearest_name, require

ROLLOUT_IS_LEVELS = ("token", "sequence")
LOSS_TYPES = ("ppo_clip", "reinforce")
ROLLOUT_RS_OPTIONS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "binary_kl",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)
"""Statistics of x = log w: k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x, per token or as a sequence's sum, mean or max;
binary_kl = the larger of the two Bernoulli KLs between the token's probabilities (KPop)."""

Threshold = float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Inclusive bounds on a statistic."""

    lower: float
    upper: float


def parse_is_threshold(threshold: Threshold) -> tuple[float | None, float]:
    """Read `rollout_is_threshold`: 2.0 -> (None, 2.0), truncate; "0.5_5.0" -> (0.5, 5.0), zero outside (IcePop)."""
    lower, upper = _split(threshold, "rollout_is_threshold")
    require(upper > 0, f"rollout_is_threshold must be positive, got {threshold!r}.")
    if lower is not None:
        require(0 < lower <= upper, f"rollout_is_threshold needs 0 < lower <= upper, got {threshold!r}.")
    return lower, upper


def parse_rs_options(rollout_rs: str) -> tuple[str, ...]:
    """Read the comma list of `rollout_rs`, without repetitions."""
    options = tuple(dict.fromkeys(part.strip() for part in rollout_rs.split(",") if part.strip()))
    require(bool(options), "rollout_rs must name at least one option.")
    for option in options:
        if option not in ROLLOUT_RS_OPTIONS:
            hint = nearest_name(option, ROLLOUT_RS_OPTIONS)
            raise InvalidInputError(f"unknown rollout_rs option {option!r}.{hint}")
    return options


def parse_rs_thresholds(options: tuple[str, ...], threshold: Threshold | None) -> dict[str, Band]:
    """Read one band per option, on its own statistic.

    One value serves all options, or a comma list gives one each. k1 takes "lower_upper" bounds on the ratio 1 /
    w (a single value means lower = 1 / upper), returned as logs; the others take one upper bound.
    """
    require(threshold is not None, "rollout_rs needs a rollout_rs_threshold.")
    parts = [part.strip() for part in str(threshold).split(",") if part.strip()]
    require(
        len(parts) in (1, len(options)),
        f"rollout_rs_threshold must give one value or {len(options)}, got {threshold!r}.",
    )
    if len(parts) == 1:
        parts = parts * len(options)
    return {option: _band(option, part) for option, part in zip(options, parts, strict=True)}


def _band(option: str, threshold: str) -> Band:
    lower, upper = _split(threshold, f"rollout_rs_threshold of {option}")
    require(upper > 0, f"rollout_rs_threshold of {option} must be positive, got {threshold!r}.")
    if option.endswith("k1"):
        low = 1.0 / upper if lower is None else lower
        require(
            0 < low <= upper,
            f"rollout_rs_threshold of {option} needs 0 < lower <= upper on pi_rollout / pi_old, got {threshold!r} "
            "(a single value v means 1/v to v).",
        )
        return Band(lower=math.log(low), upper=math.log(upper))
    require(lower is None, f"rollout_rs_threshold of {option} is a single upper bound, got {threshold!r}.")
    return Band(lower=-math.inf, upper=upper)


def _split(threshold: Threshold, name: str) -> tuple[float | None, float]:
    if isinstance(threshold, bool) or not isinstance(threshold, int | float | str):
        raise InvalidInputError(f"{name} must be a number or a 'lower_upper' string, got {threshold!r}.")
    low, separator, high = str(threshold).strip().rpartition("_")
    try:
        lower = float(low) if separator else None
        upper = float(high)
    except ValueError:
        raise InvalidInputError(f"{name} must be a number or 'lower_upper', got {threshold!r}.") from None
    require(
        math.isfinite(upper) and (lower is None or math.isfinite(lower)),
        f"{name} must be finite, got {threshold!r}.",
    )
    return lower, upper


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrectionConfig:
    """verl's `algorithm.rollout_correction`, field for field, plus the veto that verl's newest version dropped.

    Source: verl-project/verl:verl/trainer/config/algorithm.py; presets are the class methods, with verl's
    defaults. Background: richardli.xyz/rl-collapse.
    """

    rollout_is: str | None = "sequence"
    """Level of the importance weight: `token`, `sequence` (product over the sequence), or None for metrics only."""
    rollout_is_threshold: Threshold = 2.0
    """Bound on w = pi_old / pi_rollout: a number truncates (TIS), "lower_upper" zeroes outside (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide by the batch mean of w (over sequences at sequence level)."""
    rollout_rs: str | None = None
    """Comma list of `ROLLOUT_RS_OPTIONS`; a token stays only if every option keeps it."""
    rollout_rs_threshold: Threshold | None = None
    """One value for all options or one each; k1 bands bound 1 / w, see the module."""
    bypass_mode: bool = False
    """Take the rollout log-probabilities as the old ones (two policies instead of three)."""
    loss_type: str = "ppo_clip"
    """Bypass mode only: `ppo_clip` (its ratio already corrects) or `reinforce` (explicit weights)."""
    rollout_token_veto_threshold: float | None = None
    """Drop a whole sequence when one of its tokens has w below this (slime's `rs_veto_threshold`)."""

    def __post_init__(self) -> None:
        if self.rollout_is is not None and self.rollout_is not in ROLLOUT_IS_LEVELS:
            hint = nearest_name(self.rollout_is, ROLLOUT_IS_LEVELS)
            raise InvalidInputError(f"unknown rollout_is {self.rollout_is!r}.{hint}")
        if self.loss_type not in LOSS_TYPES:
            hint = nearest_name(self.loss_type, LOSS_TYPES)
            raise InvalidInputError(f"unknown loss_type {self.loss_type!r}.{hint}")
        parse_is_threshold(self.rollout_is_threshold)
        if self.rollout_rs is not None:
            parse_rs_thresholds(parse_rs_options(self.rollout_rs), self.rollout_rs_threshold)
        veto = self.rollout_token_veto_threshold
        if veto is not None:
            require(veto > 0, f"rollout_token_veto_threshold must be positive, got {veto}.")

    @classmethod
    def decoupled_token_is(cls, threshold: float = 2.0) -> Self:
        """Three policies; token weights truncated at `threshold` (TIS)."""
        return cls(rollout_is="token", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_seq_is(cls, threshold: float = 2.0) -> Self:
        """Three policies; sequence weights truncated at `threshold`."""
        return cls(rollout_is="sequence", rollout_is_threshold=threshold)

    @classmethod
    def decoupled_token_icepop(cls, threshold: float = 5.0, threshold_lower: float = 0.5) -> Self:
        """Three policies; token weights zeroed outside [threshold_lower, threshold] (IcePop)."""
        return cls(rollout_is="token", rollout_is_threshold=f"{threshold_lower}_{threshold}")

    @classmethod
    def decoupled_seq_is_rs(cls, is_threshold: float = 2.0, rs_threshold: Threshold | None = "0.5_2.0") -> Self:
        """Three policies; truncated sequence weights and rejection of sequences by the product ratio (Seq-MIS)."""
        return cls(rollout_is_threshold=is_threshold, rollout_rs="seq_sum_k1", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_geo_rs(cls, rs_threshold: Threshold | None = "0.999_1.001") -> Self:
        """Three policies; rejection of sequences by the geometric-mean ratio, no weights."""
        return cls(rollout_is=None, rollout_rs="seq_mean_k1", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_geo_rs_seq_tis(
        cls, is_threshold: float = 2.0, rs_threshold: Threshold | None = "0.999_1.001"
    ) -> Self:
        """Three policies; geometric rejection and truncated sequence weights."""
        return cls(rollout_is_threshold=is_threshold, rollout_rs="seq_mean_k1", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_geo_rs_token_tis(
        cls, is_threshold: float = 2.0, rs_threshold: Threshold | None = "0.999_1.001"
    ) -> Self:
        """Three policies; geometric rejection and truncated token weights."""
        return cls(
            rollout_is="token",
            rollout_is_threshold=is_threshold,
            rollout_rs="seq_mean_k1",
            rollout_rs_threshold=rs_threshold,
        )

    @classmethod
    def decoupled_k3_rs(cls, rs_threshold: float = 0.01) -> Self:
        """Three policies; rejection of sequences by their mean k3, no weights."""
        return cls(rollout_is=None, rollout_rs="seq_mean_k3", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_k3_rs_seq_tis(cls, is_threshold: float = 2.0, rs_threshold: float = 0.01) -> Self:
        """Three policies; k3 rejection and truncated sequence weights."""
        return cls(rollout_is_threshold=is_threshold, rollout_rs="seq_mean_k3", rollout_rs_threshold=rs_threshold)

    @classmethod
    def decoupled_k3_rs_token_tis(cls, is_threshold: float = 2.0, rs_threshold: float = 0.01) -> Self:
        """Three policies; k3 rejection and truncated token weights."""
        return cls(
            rollout_is="token",
            rollout_is_threshold=is_threshold,
            rollout_rs="seq_mean_k3",
            rollout_rs_threshold=rs_threshold,
        )

    @classmethod
    def bypass_ppo_clip(cls) -> Self:
        """Two policies; the PPO ratio against the rollout policy is the correction."""
        return cls(rollout_is=None, bypass_mode=True)

    @classmethod
    def bypass_ppo_clip_geo_rs(cls, rs_threshold: Threshold | None = "0.999_1.001") -> Self:
        """Two policies; PPO clip and geometric rejection."""
        return cls(rollout_is=None, rollout_rs="seq_mean_k1", rollout_rs_threshold=rs_threshold, bypass_mode=True)

    @classmethod
    def bypass_ppo_clip_k3_rs(cls, rs_threshold: float = 0.01) -> Self:
        """Two policies; PPO clip and k3 rejection."""
        return cls(rollout_is=None, rollout_rs="seq_mean_k3", rollout_rs_threshold=rs_threshold, bypass_mode=True)

    @classmethod
    def bypass_pg_is(cls, threshold: float = 2.0) -> Self:
        """Two policies; REINFORCE with truncated sequence weights."""
        return cls(rollout_is_threshold=threshold, bypass_mode=True, loss_type="reinforce")

    @classmethod
    def bypass_pg_token_icepop(cls, threshold: float = 5.0, threshold_lower: float = 0.5) -> Self:
        """Two policies; REINFORCE with IcePop token weights."""
        return cls(
            rollout_is="token",
            rollout_is_threshold=f"{threshold_lower}_{threshold}",
            bypass_mode=True,
            loss_type="reinforce",
        )

    @classmethod
    def bypass_pg_geo_rs(cls, rs_threshold: Threshold | None = "0.999_1.001") -> Self:
        """Two policies; REINFORCE with geometric rejection, no weights."""
        return cls(
            rollout_is=None,
            rollout_rs="seq_mean_k1",
            rollout_rs_threshold=rs_threshold,
            bypass_mode=True,
            loss_type="reinforce",
        )

    @classmethod
    def bypass_pg_geo_rs_seq_tis(
        cls, is_threshold: float = 2.0, rs_threshold: Threshold | None = "0.999_1.001"
    ) -> Self:
        """Two policies; REINFORCE with geometric rejection and truncated sequence weights."""
        return cls(
            rollout_is_threshold=is_threshold,
            rollout_rs="seq_mean_k1",
            rollout_rs_threshold=rs_threshold,
            bypass_mode=True,
            loss_type="reinforce",
        )

    @classmethod
    def bypass_pg_geo_rs_token_tis(
        cls, is_threshold: float = 2.0, rs_threshold: Threshold | None = "0.999_1.001"
    ) -> Self:
        """Two policies; REINFORCE with geometric rejection and truncated token weights."""
        return cls(
            rollout_is="token",
            rollout_is_threshold=is_threshold,
            rollout_rs="seq_mean_k1",
            rollout_rs_threshold=rs_threshold,
            bypass_mode=True,
            loss_type="reinforce",
        )

    @classmethod
    def disabled(cls) -> Self:
        """Metrics only."""
        return cls(rollout_is=None)
