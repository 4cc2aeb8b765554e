"""What a comparison of published measurements with predictions says, and how one fits constants of its own."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

FIT_ROUNDS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationPoint:
    """One published figure beside the predicted one."""

    name: str
    unit: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted / published - 1."""
        return self.predicted / self.published - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """A comparison: points that were predicted with the same constants."""

    name: str
    title: str
    source: str
    fitted: str
    """What was fitted, and on what."""
    points: tuple[ValidationPoint, ...]
    limit_mean_error: float | None = None
    limit_error: float | None = None
    """Limit of every single error."""
    limit_median_error: float | None = None
    constants: Mapping[str, float] = field(default_factory=dict)
    """Constants that the comparison fitted."""

    @property
    def mean_error(self) -> float:
        """Mean of the absolute errors."""
        return sum(abs(point.error) for point in self.points) / len(self.points)

    @property
    def largest_error(self) -> float:
        """Largest absolute error."""
        return max(abs(point.error) for point in self.points)

    @property
    def median_error(self) -> float:
        """Median of the absolute errors."""
        return float(np.median([abs(point.error) for point in self.points]))

    @property
    def passed(self) -> bool | None:
        """Whether the limits hold; None without limits."""
        limits = (
            (self.mean_error, self.limit_mean_error),
            (self.median_error, self.limit_median_error),
            (self.largest_error, self.limit_error),
        )
        holds = [error <= limit for error, limit in limits if limit is not None]
        return all(holds) if holds else None

    def as_json(self) -> dict[str, object]:
        """Return the comparison as plain values; limits that do not exist are absent."""
        values: dict[str, object] = asdict(self) | {
            "mean_error": self.mean_error,
            "median_error": self.median_error,
            "largest_error": self.largest_error,
            "passed": self.passed,
            "points": [asdict(point) | {"error": point.error} for point in self.points],
        }
        return {name: value for name, value in values.items() if value is not None}


def compared(published: Mapping[str, Any], points: Iterable[ValidationPoint], **values: Any) -> ValidationResult:
    """Return the comparison of a published set; `values` stand in the place of what the set says."""
    defaults = {name: published.get(name) for name in ("name", "title", "source", "fitted", "limit_mean_error")}
    return ValidationResult(points=tuple(points), **{**defaults, **values})


def fit_logs(residuals: Callable[[Sequence[float]], np.ndarray[Any, Any]], start: Sequence[float]) -> list[float]:
    """Return the positive values that minimize the sum of squares of `residuals`: damped Gauss-Newton on logarithms."""
    logs = np.log(np.asarray(start, np.float64))
    damping = 1e-3
    current = residuals(np.exp(logs).tolist())
    for _ in range(FIT_ROUNDS):
        nudge = 1e-5 * np.eye(len(logs))
        jacobian = np.stack([(residuals(np.exp(logs + one).tolist()) - current) / 1e-5 for one in nudge], axis=1)
        normal = jacobian.T @ jacobian
        step = np.linalg.solve(normal + damping * np.eye(len(logs)), -jacobian.T @ current)
        tried = residuals(np.exp(logs + step).tolist())
        if tried @ tried < current @ current:
            logs, current, damping = logs + step, tried, damping / 3
        else:
            damping *= 10
    return [float(value) for value in np.exp(logs)]
