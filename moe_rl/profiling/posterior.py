"""From steps that were measured to the constants of this cluster and software, and to forecasts with an interval.

The constants that differ between clusters and between software stacks (`KNOBS`) have a prior: the shipped value, and a
spread, the standard deviation of its logarithm (`spread` in configs/clusters and configs/software). A measured step
moves them as far as it must and the priors allow: the maximum of the posterior, by damped Gauss-Newton on the simulator
itself, so that large moves stay right. Where it is open which software runs, both kinds are weighed by how likely they
make the measured steps.

A forecast is a mixture of normal distributions of the logarithm of seconds, one for each kind of software: the spread
of the constants through the simulator's slopes, and what is left to the setting alone (`Prior.left_open`).

K knobs, N figures that are forecast together, for example the steps of several policies.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import erf, exp, hypot, log, sqrt

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.interval import Interval
from moe_rl.core.software import Software, SoftwareCosts
from moe_rl.core.topology import HardwareSpec

Floats = NDArray[np.float64]
# [N] seconds under these constants.
Price = Callable[[HardwareSpec, SoftwareCosts], Floats]

NUDGE = 0.02
# Standard deviations within which 80 % of a normal distribution lie.
NORMAL_80 = 1.2816
# Gauss-Newton on logarithms: a step may move a knob by a factor of 2, and six rounds settle.
LARGEST_MOVE, ROUNDS = 0.7, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """Constants that move together, because the same thing would make all of them wrong."""

    name: str
    hardware: tuple[str, ...] = ()
    software: tuple[str, ...] = ()

    def spread(self, hardware: HardwareSpec, software: Software) -> float:
        """Return the prior's standard deviation of the logarithm; 0 where nothing says how far it differs."""
        if self.hardware:
            return software.cluster_spread * hardware.spreads.get(self.hardware[0], 0.0)
        return software.spreads.get(self.software[0], 0.0)


KNOBS = (
    Knob(name="GEMM", hardware=("gemm_tflops", "attention_linear_tflops")),
    Knob(name="attention", hardware=("attention_forward_tflops", "attention_backward_tflops")),
    Knob(name="HBM", hardware=("hbm_gb_per_s",)),
    Knob(name="NIC", hardware=("flat_rdma_gb_per_s", "rdma_gb_per_s")),
    Knob(name="NIC of deduplicating kernels", hardware=("rdma_gb_per_s",)),
    Knob(name="latency between nodes", hardware=("inter_node_latency_us",)),
    Knob(name="small kernels", hardware=("layer_fixed_forward_ms", "layer_fixed_backward_ms")),
    Knob(name="host per expert", hardware=("host_expert_ms",)),
    Knob(name="once per step", hardware=("step_fixed_s",)),
    Knob(name="host", software=("host",)),
    Knob(name="host per TP rank", software=("host_per_tensor_rank",)),
    Knob(name="host under overlap", software=("overlap_host",)),
    Knob(name="left by overlap", software=("overlap_left",)),
    Knob(name="activation", software=("clamped_activation_bytes",)),
    Knob(name="optimizer on the host", software=("host_adam_gb_per_s",)),
    Knob(name="RL framework", software=("framework_share",)),
    Knob(name="everything", software=("everything",)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """The constants before anything was measured: those of a cluster under one kind of software."""

    hardware: HardwareSpec
    software: Software
    weight: float = 1.0
    """How likely this kind of software is, before anything was measured."""
    table: tuple[Knob, ...] = KNOBS
    """Knobs of which those with a spread may move."""

    @property
    def left_open(self) -> float:
        """Standard deviation of the logarithm of a step that no constant explains: the software's, the network's."""
        return hypot(self.software.left_open, self.hardware.fabric_left_open)

    @property
    def knobs(self) -> tuple[Knob, ...]:
        """Those that may move."""
        return tuple(knob for knob in self.table if knob.spread(self.hardware, self.software) > 0)

    @property
    def spreads(self) -> Floats:
        """[K] standard deviations."""
        return np.array([knob.spread(self.hardware, self.software) for knob in self.knobs])

    def constants(self, logs: Floats) -> tuple[HardwareSpec, SoftwareCosts]:
        """Return the constants with every knob [K] moved by its logarithm."""
        hardware: dict[str, float] = {}
        costs: dict[str, float] = {}
        for knob, factor in zip(self.knobs, np.exp(logs).tolist(), strict=True):
            for name in knob.hardware:
                hardware[name] = hardware.get(name, getattr(self.hardware, name)) * factor
            for name in knob.software:
                costs[name] = costs.get(name, getattr(self.software.costs, name)) * factor
        moved_hardware = replace(self.hardware, **hardware)  # type: ignore[arg-type]  # all of these fields are floats
        return moved_hardware, replace(self.software.costs, **costs)

    def log_seconds(self, price: Price, logs: Floats) -> Floats:
        """Return [N] logarithms of seconds with the knobs moved."""
        logarithms: Floats = np.log(np.maximum(price(*self.constants(logs)), 1e-12))
        return logarithms

    def slopes(self, price: Price, logs: Floats) -> tuple[Floats, Floats]:
        """Return [N] logarithms of seconds, and [N, K] how each of them moves with the knobs."""
        base = self.log_seconds(price, logs)
        moved_log_seconds = [self.log_seconds(price, logs + NUDGE * unit) for unit in np.eye(len(logs))]
        return base, (np.array(moved_log_seconds).reshape(len(logs), len(base)) - base).T / NUDGE


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownStep:
    """A step that was measured: how the simulator prices it, and its seconds."""

    price: Price
    seconds: float
    name: str = "known step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """The posterior under one kind of software."""

    prior: Prior
    logs: Floats
    """[K] where the knobs are."""
    covariance: Floats
    """[K, K]."""
    weight: float
    left: Mapping[str, float]
    """Logarithm of measured / forecast of every known step, after the fit."""

    @property
    def constants(self) -> tuple[HardwareSpec, SoftwareCosts]:
        """The constants at the maximum."""
        return self.prior.constants(self.logs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """What known steps say of the constants; without any it is the prior."""

    components: tuple[Component, ...]

    @classmethod
    def of(cls, priors: Sequence[Prior], known_steps: Sequence[KnownStep] = ()) -> "Posterior":
        """Return the posterior over the constants, and over which of the priors' software runs."""
        components, log_evidence = [], []
        for prior in priors:
            component, evidence = _maximum(prior, known_steps)
            components.append(component)
            log_evidence.append(evidence + log(prior.weight))
        weights = np.exp(np.array(log_evidence) - max(log_evidence))
        weights /= weights.sum()
        pairs = zip(components, weights.tolist(), strict=True)
        return cls(components=tuple(replace(component, weight=weight) for component, weight in pairs))

    @property
    def likeliest(self) -> Component:
        """The component with most weight: plans and figures are made with its constants."""
        return max(self.components, key=lambda component: component.weight)

    def figures(self, price: Price) -> "Figures":
        """Return the N figures of `price` with all that their intervals and ratios need."""
        parts = []
        for component in self.components:
            base, slopes = component.prior.slopes(price, component.logs)
            parts.append(ComponentFigures(component=component, base=base, slopes=slopes))
        return Figures(parts=tuple(parts))

    def forecasts(self, price: Price) -> list[Interval]:
        """Return the N figures with their 80 % intervals."""
        figures = self.figures(price)
        return [figures.interval(index) for index in range(len(figures))]

    def ratio(self, price: Price, other_price: Price) -> Interval:
        """Return the ratio of seconds of two settings (each N = 1): what they share cancels."""

        def both(hardware: HardwareSpec, costs: SoftwareCosts) -> Floats:
            return np.concatenate([price(hardware, costs), other_price(hardware, costs)])

        return self.figures(both).ratio(0, 1)

    def sentence(self) -> str:
        """Say which software the known steps show, and which constants they moved most."""
        component, count = self.likeliest, len(self.likeliest.left)
        knobs, moves = component.prior.knobs, np.abs(component.logs)
        farthest = np.argsort(-moves, kind="stable")[:MOVED]
        moved_knobs = farthest[moves[farthest] >= NUDGE].tolist()
        factors = [f"{knobs[index].name} x{exp(component.logs[index]):.2f}" for index in moved_knobs]
        if len(self.components) > 1:
            weight = f" (probability {component.weight:.0%})"
        else:
            weight = ""
        return (
            f"{count} known step{'s' * (count > 1)}: {component.prior.software.name} software{weight}"
            f"{'; largest changes: ' if factors else ', with constants unchanged'}{', '.join(factors)}."
        )


# Constants that a sentence about known steps names.
MOVED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentFigures:
    """N figures under one kind of software."""

    component: Component
    base: Floats
    """[N] logarithms of seconds."""
    slopes: Floats
    """[N, K] how each moves with the knobs."""

    def spread(self, direction: Floats, unexplained: float) -> float:
        """Return the standard deviation of a sum of logarithms that moves by `direction` [K] with the knobs."""
        return sqrt(float(direction @ self.component.covariance @ direction) + unexplained**2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """N forecast figures: their intervals, and those of their ratios."""

    parts: tuple[ComponentFigures, ...]

    def __len__(self) -> int:
        return len(self.parts[0].base)

    @property
    def _weights(self) -> tuple[float, ...]:
        return tuple(part.component.weight for part in self.parts)

    def interval(self, index: int, *, unexplained: float | None = None, constants_share: float = 1.0) -> Interval:
        """Return one figure with its interval.

        `unexplained`: standard deviation of what no constant explains; None: the software's. `constants_share`: share
        of the constants' spread that counts; 0 where the setting itself was timed, which is then known whatever they
        are.
        """
        normals = []
        for part in self.parts:
            left_open = part.component.prior.left_open if unexplained is None else unexplained
            normals.append((float(part.base[index]), part.spread(constants_share * part.slopes[index], left_open)))
        return Mixture(weights=self._weights, parts=tuple(normals)).interval()

    def ratio(self, index: int, other: int, *, unexplained: float | None = None) -> Interval:
        """Return the ratio of two figures: what they share cancels.

        `unexplained`: standard deviation of what the constants do not explain of it. By default that of two settings,
        each of which is off by itself.
        """
        normals = []
        for part in self.parts:
            left_open = sqrt(2.0) * part.component.prior.left_open if unexplained is None else unexplained
            spread = part.spread(part.slopes[index] - part.slopes[other], left_open)
            normals.append((float(part.base[index] - part.base[other]), spread))
        return Mixture(weights=self._weights, parts=tuple(normals)).interval()


def _maximum(prior: Prior, known_steps: Sequence[KnownStep]) -> tuple[Component, float]:
    """Return the posterior under one kind of software, of weight 1, and its log-evidence (Laplace)."""
    spreads, unexplained = prior.spreads, prior.left_open
    precision = np.diag(spreads**-2.0)
    logs: Floats = np.zeros(len(spreads))
    if not known_steps:
        return Component(prior=prior, logs=logs, covariance=np.diag(spreads**2), weight=1.0, left={}), 0.0
    measured_logs = np.log([step.seconds for step in known_steps])

    def linear(logs_of_knobs: Floats) -> tuple[Floats, Floats]:
        forecasts, slopes_of_steps = [], []
        for step in known_steps:
            step_forecast, step_slopes = prior.slopes(step.price, logs_of_knobs)
            forecasts.append(step_forecast[0])
            slopes_of_steps.append(step_slopes[0])
        return np.array(forecasts), np.array(slopes_of_steps)

    for _ in range(ROUNDS):
        forecast, slopes = linear(logs)
        normal = precision + slopes.T @ slopes / unexplained**2
        move = np.linalg.solve(normal, slopes.T @ (measured_logs - forecast) / unexplained**2 - precision @ logs)
        logs = logs + np.clip(move, -LARGEST_MOVE, LARGEST_MOVE)
        if float(np.abs(move).max(initial=0.0)) < NUDGE / 4:
            break
    forecast, slopes = linear(logs)
    covariance: Floats = np.asarray(np.linalg.inv(precision + slopes.T @ slopes / unexplained**2), np.float64)
    # How far the measured steps lie from what the prior expects, and how far they may.
    offset = measured_logs - forecast + slopes @ logs
    expected_covariance = slopes @ np.diag(spreads**2) @ slopes.T + np.diag(np.full(len(known_steps), unexplained**2))
    misfit = float(offset @ np.linalg.solve(expected_covariance, offset))
    log_determinant = float(np.linalg.slogdet(expected_covariance)[1])
    residuals = {
        step.name: float(residual) for step, residual in zip(known_steps, measured_logs - forecast, strict=True)
    }
    component = Component(prior=prior, logs=logs, covariance=covariance, weight=1.0, left=residuals)
    return component, -0.5 * (misfit + log_determinant)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Normal distributions of a logarithm."""

    weights: tuple[float, ...]
    parts: tuple[tuple[float, float], ...]
    """Mean and standard deviation."""

    def below(self, value: float) -> float:
        """Return the probability of a logarithm below `value`."""
        probability = 0.0
        for weight, (mean, spread) in zip(self.weights, self.parts, strict=True):
            deviations = (value - mean) / spread
            probability += weight * 0.5 * (1.0 + erf(deviations / sqrt(2.0)))
        return probability

    def quantile(self, share: float) -> float:
        """Return the logarithm below which `share` of the probability lies, by bisection."""
        means, spreads = np.array(self.parts).T
        low, high = float((means - 8.0 * spreads).min()), float((means + 8.0 * spreads).max())
        for _ in range(60):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self.below(middle) < share else (low, middle)
        return 0.5 * (low + high)

    def interval(self) -> Interval:
        """Return the median and the 80 % interval, no longer as logarithms."""
        return Interval(value=exp(self.quantile(0.5)), low=exp(self.quantile(0.1)), high=exp(self.quantile(0.9)))
