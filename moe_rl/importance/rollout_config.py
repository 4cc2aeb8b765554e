"""Options and presets of the train/rollout correction, under verl's names.

Which way the bounds point: the importance weight is w = pi_old / pi_rollout (trainer over engine).
`rollout_is_threshold` bounds w. The k1 options of `rollout_rs` test -log w, so their "lower_upper" thresholds
bound 1 / w = pi_rollout / pi_old: an asymmetric band must be turned round (`reciprocal_band`). k2, k3 and
binary_kl are one-sided upper bounds.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from moe_rl.core.errors import InvalidInputError, require, require_known
from moe_rl.importance.options import Options, option

# Statistics of x = log w: k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x, per token or as a sequence's sum, mean or max;
# binary_kl, which verl does not have, = the larger of the two Bernoulli KLs between the token's probabilities (KPop).
ROLLOUT_RS_OPTIONS = (
    *("token_k1", "token_k2", "token_k3", "binary_kl"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)

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
    for name in options:
        require_known(name, ROLLOUT_RS_OPTIONS, f"unknown rollout_rs option {name!r}.")
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
        f"rollout_rs_threshold must give one value, or one for each of the {len(options)} options, got {threshold!r}.",
    )
    if len(parts) == 1:
        parts = parts * len(options)
    return {name: _band(name, part) for name, part in zip(options, parts, strict=True)}


def _band(name: str, threshold: str) -> Band:
    lower, upper = _split(threshold, f"rollout_rs_threshold for {name}")
    require(upper > 0, f"rollout_rs_threshold for {name} must be positive, got {threshold!r}.")
    if name.endswith("k1"):
        # verl: a single value v of k1 is the band 1 / v .. v.
        low = 1.0 / upper if lower is None else lower
        require(
            0 < low <= upper,
            f"rollout_rs_threshold for {name} bounds pi_rollout / pi_old and needs 0 < lower <= upper, got "
            f"{threshold!r} (a single value v means 1/v to v).",
        )
        return Band(lower=math.log(low), upper=math.log(upper))
    require(lower is None, f"rollout_rs_threshold for {name} must be a single upper bound, got {threshold!r}.")
    return Band(lower=-math.inf, upper=upper)


def _split(threshold: Threshold, name: str) -> tuple[float | None, float]:
    # True is an int in Python and would be read as 1.
    if isinstance(threshold, bool) or not isinstance(threshold, int | float | str):
        raise InvalidInputError(f"{name} must be a number or a 'lower_upper' string, got {threshold!r}.")
    # "0.5_5.0" -> 0.5 and 5.0; a plain number has no separator.
    low, separator, high = str(threshold).strip().rpartition("_")
    try:
        lower = float(low) if separator else None
        upper = float(high)
    except ValueError:
        raise InvalidInputError(f"{name} must be a number or two numbers joined by _, got {threshold!r}.") from None
    require(
        math.isfinite(upper) and (lower is None or math.isfinite(lower)), f"{name} must be finite, got {threshold!r}."
    )
    return lower, upper


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrectionConfig(Options):
    """verl's `algorithm.rollout_correction`, field for field, plus the veto that verl's newest version dropped.

    Source: verl-project/verl:verl/trainer/config/algorithm.py; `preset` gives verl's presets. Background:
    richardli.xyz/rl-collapse.
    """

    rollout_is: Literal["token", "sequence"] | None = "sequence"
    """Level of the importance weight: `token`, `sequence` (product over the sequence), or None for metrics only."""
    rollout_is_threshold: Threshold = 2.0
    """Bound on w = pi_old / pi_rollout: a number truncates (TIS), "lower_upper" zeroes outside (IcePop)."""
    rollout_is_lower_bound: float | None = option(None, above=0)
    """Raise smaller w to this where a number truncates: slime's `tis_mode: clip`. verl has none."""
    rollout_is_batch_normalize: bool = False
    """Divide by the batch mean of w (over sequences at sequence level)."""
    rollout_is_count_empty: bool = False
    """At sequence level let that mean count sequences without a valid token, as 0: slime's, where verl's does not."""
    rollout_rs: str | None = None
    """Comma list of `ROLLOUT_RS_OPTIONS`; a token stays only if every option keeps it."""
    rollout_rs_threshold: Threshold | None = None
    """One value for all options or one each; k1 bands bound 1 / w, see the module."""
    bypass_mode: bool = False
    """Take the rollout log-probabilities as the old ones (two policies instead of three)."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """Bypass mode only: `ppo_clip` (its ratio already corrects) or `reinforce` (explicit weights)."""
    rollout_token_veto_threshold: float | None = option(None, above=0)
    """Drop a whole sequence when one of its tokens has w below this (slime's `rs_veto_threshold`)."""

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        # Parsed only to refuse a bad threshold now, not after the first rollout.
        lower, upper = parse_is_threshold(self.rollout_is_threshold)
        if self.rollout_is_lower_bound is not None:
            require(
                lower is None and self.rollout_is_lower_bound <= upper,
                f"with rollout_is_lower_bound {self.rollout_is_lower_bound:g}, rollout_is_threshold must be a single "
                f"number of at least {self.rollout_is_lower_bound:g}, got {self.rollout_is_threshold!r}. (A threshold "
                "'lower_upper' already sets weights below `lower` to 0.)",
            )
        if self.rollout_rs is not None:
            parse_rs_thresholds(parse_rs_options(self.rollout_rs), self.rollout_rs_threshold)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return a preset of `ROLLOUT_PRESETS`, with other values for the fields in `changes`."""
        require_known(name, ROLLOUT_PRESETS, f"unknown preset {name!r}.")
        field_names = [declared.name for declared in fields(cls)]
        for field_name in changes:
            require_known(field_name, field_names, f"a rollout correction has no field {field_name!r}.")
        return cls(**(ROLLOUT_PRESETS[name] | changes))


_METRICS: dict[str, Any] = {"rollout_is": None}
_TOKEN: dict[str, Any] = {"rollout_is": "token"}
_SEQUENCE: dict[str, Any] = {"rollout_is": "sequence"}
_ICEPOP = _TOKEN | {"rollout_is_threshold": "0.5_5.0"}
_KPOP: dict[str, Any] = {"rollout_is_threshold": 1e9, "rollout_rs": "binary_kl", "rollout_rs_threshold": 0.1}
_GEO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_CLIP = _METRICS | {"bypass_mode": True}
_REINFORCE = {"bypass_mode": True, "loss_type": "reinforce"}

# verl's presets and KPop's: name -> the fields that differ from the defaults. Weights are truncated at 2 (tis, is),
# zeroed outside 0.5 to 5 (icepop), or kept as they are where both Bernoulli KLs are at most 0.1 (kpop, its authors'
# value as prime-rl's pull request 3283 has it); rs rejects sequences by their product (`decoupled_seq_is_rs`), their
# geometric-mean ratio (geo) or their mean k3.
ROLLOUT_PRESETS: dict[str, dict[str, Any]] = {
    "disabled": _METRICS,
    # Three policies: rollout, old and current; the weight or the rejection stands between the first two.
    "decoupled_token_is": _TOKEN,
    "decoupled_seq_is": _SEQUENCE,
    "decoupled_token_icepop": _ICEPOP,
    "decoupled_token_kpop": _TOKEN | _KPOP,
    "decoupled_seq_is_rs": _SEQUENCE | {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "decoupled_geo_rs": _METRICS | _GEO,
    "decoupled_geo_rs_seq_tis": _SEQUENCE | _GEO,
    "decoupled_geo_rs_token_tis": _TOKEN | _GEO,
    "decoupled_k3_rs": _METRICS | _K3,
    "decoupled_k3_rs_seq_tis": _SEQUENCE | _K3,
    "decoupled_k3_rs_token_tis": _TOKEN | _K3,
    # Two policies: PPO's ratio to the rollout policy already corrects, or REINFORCE with explicit weights.
    "bypass_ppo_clip": _CLIP,
    "bypass_ppo_clip_geo_rs": _CLIP | _GEO,
    "bypass_ppo_clip_k3_rs": _CLIP | _K3,
    "bypass_pg_is": _REINFORCE | _SEQUENCE,
    "bypass_pg_token_icepop": _REINFORCE | _ICEPOP,
    "bypass_pg_geo_rs": _REINFORCE | _METRICS | _GEO,
    "bypass_pg_geo_rs_seq_tis": _REINFORCE | _SEQUENCE | _GEO,
    "bypass_pg_geo_rs_token_tis": _REINFORCE | _TOKEN | _GEO,
}
