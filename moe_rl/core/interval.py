"""A figure with the interval that holds the true one in 80 of 100 cases."""

from dataclasses import dataclass

from moe_rl.core.errors import require

COVERAGE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure above 0 and the ends of its 80 % interval: one case in ten lies below, one above."""

    value: float
    low: float
    high: float

    def __post_init__(self) -> None:
        is_inside = self.low <= self.value * (1 + 1e-9) and self.value <= self.high * (1 + 1e-9)
        require(
            is_inside,
            f"an interval must contain its value, but {self.value:g} is not between {self.low:g} and {self.high:g}.",
        )

    @property
    def tells_apart(self) -> bool:
        """Of a ratio: True where the interval does not hold 1, so that one side is called faster."""
        return self.low > 1.0 or self.high < 1.0

    @property
    def inverse(self) -> "Interval":
        """The interval of 1 / figure: of tokens per second from one of seconds."""
        return Interval(value=1.0 / self.value, low=1.0 / self.high, high=1.0 / self.low)

    def times(self, factor: float) -> "Interval":
        """Return the interval in another unit, or of another amount."""
        return Interval(value=self.value * factor, low=self.low * factor, high=self.high * factor)

    def as_json(self) -> list[float]:
        """Return both ends."""
        return [self.low, self.high]
