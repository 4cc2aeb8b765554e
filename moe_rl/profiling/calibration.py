"""Refit the constants of a cluster from measurements made on it.

The constants are fitted by least squares on log(time), so that a microsecond kernel weighs as much as a millisecond
one. A constant that the measurements do not determine is refused by name instead of being returned as if it were known.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import InvalidInputError, require, require_known
from moe_rl.core.topology import HardwareSpec

CONSTANTS = (
    "gemm_tflops", "hbm_gb_per_s", "gemm_fixed_us", "nvlink_gb_per_s", "rdma_gb_per_s", "intra_node_latency_us",
    "inter_node_latency_us", "layer_fixed_forward_ms", "layer_fixed_backward_ms", "fp8_speedup", "gemm_half_width",
    "flat_rdma_gb_per_s", "attention_linear_tflops", "attention_forward_tflops", "attention_backward_tflops",
    "host_layer_ms", "host_expert_ms", "host_chunk_ms", "step_fixed_s",
)  # fmt: skip
# A constant may move by this factor either way from its starting value.
SEARCH_FACTOR = 30.0
# A constant counts as unseen when doubling it changes no measured time by more than about 1.4 %.
MIN_SENSITIVITY = 0.02
# Smallest ratio of singular values of the scaled Jacobian at which two constants count as told apart.
MIN_SEPARATION = 0.02
# Largest relative standard error at which a constant counts as known.
MAX_UNCERTAINTY = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstant:
    """One constant before and after the fit."""

    name: str
    before: float
    after: float
    uncertainty: float
    """Relative standard error, from the scatter of the measurements about the fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupError:
    """Mean absolute relative error of the predicted times of one group."""

    group: str
    num_measurements: int
    before: float
    """With the constants that the fit started from."""
    in_sample: float
    held_out: float | None
    """Predicted by a fit on the other groups; None with a single group or where that fit was refused."""
    refused: str = ""
    """Why the other groups cannot identify the constants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """Fitted constants, and their errors on measurements inside and outside the fit."""

    hardware: HardwareSpec
    constants: tuple[FittedConstant, ...]
    groups: tuple[GroupError, ...]

    @property
    def num_measurements(self) -> int:
        """Measurements that were fitted."""
        return sum(group.num_measurements for group in self.groups)

    def mean_error(self, figure: str) -> float | None:
        """Return the mean over measurements of the groups' `figure`: before, in_sample or held_out.

        Groups without the figure do not count; None where no group has it.
        """
        known = [(error, one.num_measurements) for one in self.groups if (error := getattr(one, figure)) is not None]
        return sum(error * count for error, count in known) / sum(count for _, count in known) if known else None


class Timed(Protocol):
    """Anything that was timed: an operation, a layer, a whole step."""

    @property
    def time_ms(self) -> float:
        """Milliseconds that it took."""

    @property
    def group(self) -> str:
        """Measurements of one group are held out together."""


# (measurement, cluster) -> seconds, as `moe_rl.study.measured.predicted_seconds` of a `Measurement`.
Predict = Callable[[Any, HardwareSpec], float]


def mean_error(measurements: Sequence[Timed], hardware: HardwareSpec, predict: Predict) -> float:
    """Return the mean absolute relative error of the predicted times."""
    return float(np.mean([abs(predict(m, hardware) / (m.time_ms * 1e-3) - 1.0) for m in measurements]))


def calibrate(
    measurements: Sequence[Timed],
    hardware: HardwareSpec,
    constants: Sequence[str],
    *,
    source: str,
    predict: Predict,
) -> CalibrationResult:
    """Fit `constants` of `hardware` to what `predict` says of the measurements; the other constants keep their values.

    `source` is written beside every fitted constant. Raises `InvalidInputError` where the measurements do not determine
    a constant, or cannot tell constants apart, naming them, and where scipy is not installed.
    """
    for name in constants:
        require_known(name, CONSTANTS, f"constant {name!r} cannot be calibrated.")
    require(len(set(constants)) == len(constants) and len(constants) > 0, "name each constant to calibrate once.")
    fitted, uncertainty = _fit(measurements, hardware, constants, predict)

    def group_error(group: str) -> GroupError:
        mine, others = ([m for m in measurements if (m.group == group) is own] for own in (True, False))
        held_out, refused = None, ""
        if others:
            try:
                held_out = mean_error(mine, _fit(others, hardware, constants, predict)[0], predict)
            except InvalidInputError as error:
                refused = str(error)
        return GroupError(
            group=group,
            num_measurements=len(mine),
            before=mean_error(mine, hardware, predict),
            in_sample=mean_error(mine, fitted, predict),
            held_out=held_out,
            refused=refused,
        )

    return CalibrationResult(
        hardware=replace(fitted, sources={**hardware.sources, **dict.fromkeys(constants, source)}),
        constants=tuple(
            FittedConstant(
                name=name, before=getattr(hardware, name), after=getattr(fitted, name), uncertainty=uncertainty[name]
            )
            for name in constants
        ),
        groups=tuple(group_error(group) for group in sorted({m.group for m in measurements})),
    )


def _fit(
    measurements: Sequence[Timed], hardware: HardwareSpec, constants: Sequence[str], predict: Predict
) -> tuple[HardwareSpec, dict[str, float]]:
    """Return the fitted hardware and the relative standard error of each constant."""
    try:
        from scipy.optimize import least_squares
    except ImportError as error:
        raise InvalidInputError(f"calibration needs scipy (pip install 'moe-rl[calibrate]'): {error}.") from None
    require(
        len(measurements) > len(constants),
        f"{len(measurements)} measurements cannot determine {len(constants)} constants: give at least "
        f"{len(constants) + 1}.",
    )
    start = np.array([getattr(hardware, name) for name in constants])
    measured = np.log([m.time_ms * 1e-3 for m in measurements])

    def at(log_factors: NDArray[np.float64]) -> HardwareSpec:
        values = dict(zip(constants, (start * np.exp(log_factors)).tolist(), strict=True))
        return replace(hardware, **values)

    def residuals(log_factors: NDArray[np.float64]) -> NDArray[np.float64]:
        candidate = at(log_factors)
        predicted = [predict(m, candidate) for m in measurements]
        distance: NDArray[np.float64] = np.log(predicted) - measured
        return distance

    # Logarithms of factors: constants of any unit take steps of the same size, and none turns negative.
    bound = float(np.log(SEARCH_FACTOR))
    solution = least_squares(residuals, np.zeros(len(start)), bounds=(-bound, bound), x_scale=1.0)
    jacobian = np.asarray(solution.jac)
    _require_identified(jacobian, solution.x, constants, bound)
    scatter = float(np.sqrt(np.sum(solution.fun**2) / (len(measurements) - len(constants))))
    return at(solution.x), _uncertainty(jacobian, scatter, constants)


def _require_identified(
    jacobian: NDArray[np.float64], solution: NDArray[np.float64], constants: Sequence[str], bound: float
) -> None:
    def where(flags: NDArray[np.bool_]) -> list[str]:
        return [name for name, flag in zip(constants, flags.tolist(), strict=True) if flag]

    unseen = where(np.abs(jacobian).max(axis=0) < MIN_SENSITIVITY)
    require(
        not unseen,
        f"the measurements do not depend on {', '.join(unseen)}: add measurements where it matters, or leave it out.",
    )
    # Columns of length 1: the singular values then compare directions, not units.
    scaled = jacobian / np.linalg.norm(jacobian, axis=0)
    _, singular, directions = np.linalg.svd(scaled, full_matrices=False)
    if singular[-1] < MIN_SEPARATION * singular[0]:
        # The weakest direction mixes the constants that can stand in for each other.
        weights = np.abs(directions[-1])
        confused = where(weights > 0.3 * weights.max())
        raise InvalidInputError(
            f"the measurements cannot tell {' and '.join(confused)} apart: add measurements that separate them, or fix "
            "one of them."
        )
    # A solution on the bound is no minimum.
    stuck = where(np.abs(solution) > bound - 1e-3)
    require(
        not stuck,
        f"the fit pushes {', '.join(stuck)} beyond a factor of {SEARCH_FACTOR:.0f} from its starting value: check the "
        "units of the measurements.",
    )


def _uncertainty(jacobian: NDArray[np.float64], scatter: float, constants: Sequence[str]) -> dict[str, float]:
    """Return relative standard errors; raise where the measurements scatter too much for a constant to be known."""
    covariance = np.linalg.inv(jacobian.T @ jacobian) * scatter**2
    # Logarithms were fitted: a standard error of 0.1 there is exp(0.1) - 1 = 10.5 % of the constant.
    errors = np.expm1(np.sqrt(np.diag(covariance))).tolist()
    unsure = [f"{name} (±{e:.0%})" for name, e in zip(constants, errors, strict=True) if e > MAX_UNCERTAINTY]
    require(
        not unsure,
        f"the measurements scatter by {scatter:.0%} about the fit and leave {', '.join(unsure)} uncertain: add "
        "measurements where it matters, or leave it out.",
    )
    return dict(zip(constants, errors, strict=True))
