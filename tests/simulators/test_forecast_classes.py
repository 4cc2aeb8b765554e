"""Classes of forecasts that say how often intervals hold: large ones by themselves, small ones together."""

import pytest

from benchmarks.validate_model.compare import PUBLISHED
from benchmarks.validate_model.forecasts import SMALLEST_CLASS, Forecast, by_class, figures, pooled, user_runs
from moe_rl.core.interval import Interval

RUN, _ = user_runs(PUBLISHED)[0]
MEASURED = 1.0 / RUN.tokens_per_s


def forecast(kind: str, *, off: float = 1.0, width: float = 1.1) -> Forecast:
    """A forecast `off` times what was measured, whose interval reaches from 1 / width of it to width times it."""
    value = off * MEASURED
    return Forecast(run=RUN, kind=kind, interval=Interval(value=value, low=value / width, high=value * width))


def test_a_class_too_small_to_be_cut_says_no_coverage_of_parts_left_out() -> None:
    small, large = ([forecast("a", off=1.05)] * count for count in (SMALLEST_CLASS - 1, SMALLEST_CLASS))
    assert figures("a", small).coverage_left_out is None
    assert figures("a", large).coverage_left_out == 1.0
    assert figures("a", small).coverage == 1.0


def test_small_classes_are_judged_together_whichever_way_they_were_forecast() -> None:
    """The widths of both hold what is 5 % off and not what is 20 % off."""
    rows = [forecast("large")] * SMALLEST_CLASS
    rows += [forecast("few", off=1.05)] * 15 + [forecast("one known step", off=1.2)] * 5
    both = pooled(rows)
    assert (both.count, both.coverage) == (20, 0.75)
    assert both.coverage_left_out is not None
    assert [(one.name, one.count) for one in by_class(rows)] == [("large", SMALLEST_CLASS), ("few, one known step", 20)]


@pytest.mark.parametrize("off", [0.5, 2.0])
def test_an_interval_holds_by_its_width_in_logarithms(off: float) -> None:
    assert not forecast("a", off=off, width=1.9).holds(1.0)
    assert forecast("a", off=off, width=2.1).holds(1.0)
    assert forecast("a", off=off, width=1.5).holds(2.0)
