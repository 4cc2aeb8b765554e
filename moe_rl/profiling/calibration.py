"""Constants of a cluster and of its software from measurements made on it: the posterior of known steps on more rows.

Times are compared on their logarithm, so that a microsecond kernel weighs as much as a millisecond one. A constant that
the measurements do not determine stays where it was, and its spread says so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.errors import require, require_known
from moe_rl.core.software import Software, SoftwareCosts
from moe_rl.core.topology import HardwareSpec
from moe_rl.profiling.posterior import Component, Knob, KnownStep, Posterior, Prior

CONSTANTS = (
    "gemm_tflops", "hbm_gb_per_s", "gemm_fixed_us", "nvlink_gb_per_s", "rdma_gb_per_s", "intra_node_latency_us",
    "inter_node_latency_us", "layer_fixed_forward_ms", "layer_fixed_backward_ms", "fp8_speedup", "gemm_half_width",
    "flat_rdma_gb_per_s", "attention_linear_tflops", "attention_forward_tflops", "attention_backward_tflops",
    "host_layer_ms", "host_expert_ms", "step_fixed_s",
)  # fmt: skip
SHIPPED_SOFTWARE = Software()
# Costs of the training software that whole steps determine.
SOFTWARE_CONSTANTS = ("host", "host_per_tensor_rank", "host_fp8", "overlap_host", "overlap_left", "everything")
# Standard deviation of the logarithm of a constant that is to be measured, before it was: a factor of 1.6 either way.
PRIOR_SPREAD = 0.5
# The same of one measurement about the model, first; then what the measurements themselves show, within these bounds.
NOISE, LEAST_NOISE, MOST_NOISE = 0.05, 1e-4, 0.5
# A constant counts as unseen if doubling it changes no measured time by more than about 1.4 %.
MIN_SENSITIVITY = 0.02
# A step of the search may move a constant by a factor of 2; one that is 30 times off needs five of them.
LARGEST_FACTOR = 8.0
# So many measurements more than constants show how far measurements scatter.
LEAST_FREEDOM = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstant:
    """One constant before and after the fit."""

    name: str
    before: float
    after: float
    uncertainty: float
    """Relative standard deviation of the posterior."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupError:
    """Mean absolute relative error of the predicted times of one group."""

    group: str
    num_measurements: int
    before: float
    """With the constants that the fit started from."""
    in_sample: float
    held_out: float | None
    """Predicted by a fit on the other groups; None with a single group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """Fitted constants, and their errors on measurements inside and outside the fit."""

    hardware: HardwareSpec
    software: Software
    constants: tuple[FittedConstant, ...]
    """Those that the measurements moved; the others are as before."""
    groups: tuple[GroupError, ...]

    @property
    def num_measurements(self) -> int:
        """Measurements that were fitted."""
        return sum(group.num_measurements for group in self.groups)

    def mean_error(self, figure: str) -> float | None:
        """Return the mean over measurements of the groups' `figure`: before, in_sample or held_out.

        Groups without the figure do not count; None where no group has it.
        """
        weighted_errors = [
            (error, group.num_measurements) for group in self.groups if (error := getattr(group, figure)) is not None
        ]
        if not weighted_errors:
            return None
        errors, counts = zip(*weighted_errors, strict=True)
        return float(np.average(errors, weights=counts))


class Timed(Protocol):
    """Anything that was timed: an operation, a layer, a whole step."""

    @property
    def time_ms(self) -> float:
        """Milliseconds that it took."""

    @property
    def group(self) -> str:
        """Measurements of one group are held out together."""


# (measurement, cluster, software) -> seconds, as `moe_rl.study.measured.predicted_seconds` of a `Measurement`.
Predict = Callable[[Any, HardwareSpec, SoftwareCosts], float]


def mean_error(measurements: Sequence[Timed], hardware: HardwareSpec, costs: SoftwareCosts, predict: Predict) -> float:
    """Return the mean absolute relative error of the predicted times."""
    measured_s = np.array([m.time_ms for m in measurements]) * 1e-3
    ratios = _predicted_s(measurements, hardware, costs, predict) / measured_s
    return float(np.abs(ratios - 1.0).mean())


def calibrate(
    measurements: Sequence[Timed],
    hardware: HardwareSpec,
    constants: Sequence[str] = (),
    *,
    source: str,
    predict: Predict,
    software: Software = SHIPPED_SOFTWARE,
) -> CalibrationResult:
    """Return the posterior of `constants` after the measurements; the other constants keep their values.

    Without `constants` all may move that the measurements depend on. `source` is written beside every constant that
    moved. One measurement is enough: what it does not determine stays where the prior has it, with the prior's spread.
    Raises `InvalidInputError` for an unknown constant, a named one that no measurement depends on, and wrong units.
    """
    names_of_constants = (*CONSTANTS, *SOFTWARE_CONSTANTS)
    for name in constants:
        require_known(name, names_of_constants, f"constant {name!r} cannot be calibrated.")
    require(len(set(constants)) == len(constants), "a constant to calibrate is named twice.")
    seen = _seen(measurements, hardware, software, predict)
    unseen = [name for name in constants if name not in seen]
    require(
        not unseen,
        f"the measurements do not depend on {', '.join(unseen)}: add measurements that do, or leave these "
        "constants out.",
    )
    moving = tuple(constants) or tuple(seen)
    require(len(moving) > 0, "the measurements do not depend on any constant.")
    fit = _Fit.of(measurements, hardware, software, moving, predict)

    def group_error(group: str) -> GroupError:
        inside_group: list[Timed] = []
        outside: list[Timed] = []
        for measurement in measurements:
            side = inside_group if measurement.group == group else outside
            side.append(measurement)
        held_out = None
        if outside:
            of_others = _Fit.of(outside, hardware, software, moving, predict)
            held_out = mean_error(inside_group, *of_others.constants, predict)
        before = mean_error(inside_group, hardware, software.costs, predict)
        in_sample = mean_error(inside_group, *fit.constants, predict)
        return GroupError(
            group=group, num_measurements=len(inside_group), before=before, in_sample=in_sample, held_out=held_out
        )

    groups = sorted({m.group for m in measurements})
    return CalibrationResult(
        hardware=_with_sources(hardware, fit, source),
        software=_software_with_sources(software, fit, source),
        constants=fit.moved(),
        groups=tuple(map(group_error, groups)),
    )


def _predicted_s(
    measurements: Sequence[Timed], hardware: HardwareSpec, costs: SoftwareCosts, predict: Predict
) -> NDArray[np.float64]:
    return np.array([predict(m, hardware, costs) for m in measurements])


def _seen(measurements: Sequence[Timed], hardware: HardwareSpec, software: Software, predict: Predict) -> list[str]:
    """Return the constants above 0 on which a measured time depends."""
    seen = []
    before = np.log(_predicted_s(measurements, hardware, software.costs, predict))
    for name in (*CONSTANTS, *SOFTWARE_CONSTANTS):
        holder: HardwareSpec | SoftwareCosts = software.costs
        if name in CONSTANTS:
            holder = hardware
        if not getattr(holder, name):
            continue
        moved = replace(holder, **{name: 2.0 * getattr(holder, name)})
        if isinstance(moved, HardwareSpec):
            cluster = moved
        else:
            cluster = hardware
        if isinstance(moved, SoftwareCosts):
            costs = moved
        else:
            costs = software.costs
        after = np.log(_predicted_s(measurements, cluster, costs, predict))
        if float(np.abs(after - before).max()) >= MIN_SENSITIVITY:
            seen.append(name)
    return seen


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    """The posterior over some constants, with one of `names` per knob."""

    names: tuple[str, ...]
    component: Component

    @classmethod
    def of(
        cls,
        measurements: Sequence[Timed],
        hardware: HardwareSpec,
        software: Software,
        names: tuple[str, ...],
        predict: Predict,
    ) -> "_Fit":
        """Return the posterior; the scatter of the measurements is what they show about the first fit."""
        known_steps = [_known_step(m, predict) for m in measurements]
        first_fit = cls._with_noise(known_steps, hardware, software, names, NOISE)
        left = np.array(list(first_fit.left.values()))
        # So few measurements say little of their scatter: as many as constants are met whatever it is.
        freedom = len(known_steps) - len(names)
        if freedom >= LEAST_FREEDOM:
            noise = float(np.sqrt(np.sum(left**2) / freedom))
        else:
            noise = NOISE
        noise = float(np.clip(noise, LEAST_NOISE, MOST_NOISE))
        fit = cls(names=names, component=cls._with_noise(known_steps, hardware, software, names, noise))
        far = np.array(names)[np.abs(fit.component.logs) > np.log(LARGEST_FACTOR)]
        require(
            len(far) == 0,
            f"the fit changes {', '.join(far)} by more than a factor of {LARGEST_FACTOR:.0f}: check the units of the "
            "measurements.",
        )
        return fit

    @staticmethod
    def _with_noise(
        known_steps: Sequence[KnownStep],
        hardware: HardwareSpec,
        software: Software,
        names: tuple[str, ...],
        noise: float,
    ) -> Component:
        cluster_spreads: dict[str, float] = {}
        software_spreads: dict[str, float] = {}
        knobs = []
        for name in names:
            if name in CONSTANTS:
                cluster_spreads[name] = PRIOR_SPREAD
                knobs.append(Knob(name=name, hardware=(name,)))
            else:
                software_spreads[name] = PRIOR_SPREAD
                knobs.append(Knob(name=name, software=(name,)))
        prior = Prior(
            hardware=replace(hardware, spreads=cluster_spreads, fabric_left_open=0.0),
            software=replace(software, spreads=software_spreads, cluster_spread=1.0, left_open=noise),
            table=tuple(knobs),
        )
        return Posterior.of([prior], known_steps).likeliest

    @property
    def constants(self) -> tuple[HardwareSpec, SoftwareCosts]:
        """The constants at the maximum."""
        return self.component.constants

    def moved(self) -> tuple[FittedConstant, ...]:
        """Return every constant before and after."""
        before, (hardware, costs) = self.component.prior, self.constants
        spreads = np.expm1(np.sqrt(np.diag(self.component.covariance))).tolist()
        constants = []
        for name, spread in zip(self.names, spreads, strict=True):
            old: object = before.software.costs
            if name in CONSTANTS:
                old = before.hardware
            new: object = costs
            if name in CONSTANTS:
                new = hardware
            value = getattr(old, name), getattr(new, name)
            constants.append(FittedConstant(name=name, before=value[0], after=value[1], uncertainty=spread))
        return tuple(constants)

    def spreads(self, of: Sequence[str]) -> dict[str, float]:
        """Return the posterior's standard deviations of the logarithms of those constants that moved."""
        deviations = np.sqrt(np.diag(self.component.covariance)).tolist()
        return {name: spread for name, spread in zip(self.names, deviations, strict=True) if name in of}


def _known_step(measurement: Timed, predict: Predict) -> KnownStep:
    def price(hardware: HardwareSpec, costs: SoftwareCosts) -> NDArray[np.float64]:
        return np.array([predict(measurement, hardware, costs)])

    # Names must differ: what is left of each measurement is kept by its name.
    return KnownStep(price=price, seconds=measurement.time_ms * 1e-3, name=f"{id(measurement)}")


def _with_sources(before: HardwareSpec, fit: _Fit, source: str) -> HardwareSpec:
    """Return the fitted constants; what was not fitted keeps the value, source and spread that it had."""
    spreads = fit.spreads(CONSTANTS)
    return replace(
        fit.constants[0],
        sources={**before.sources, **dict.fromkeys(spreads, source)},
        spreads={**before.spreads, **spreads},
        fabric_left_open=before.fabric_left_open,
    )


def _software_with_sources(software: Software, fit: _Fit, source: str) -> Software:
    spreads = fit.spreads(SOFTWARE_CONSTANTS)
    return replace(
        software,
        costs=fit.constants[1],
        spreads={**software.spreads, **spreads},
        sources={**software.sources, **dict.fromkeys(spreads, source)},
    )
