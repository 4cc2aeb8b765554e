"""Timings say which clock they are of, and their percentiles are those of the samples."""

import pytest

pytest.importorskip("torch", reason="the timer needs torch")

import torch

from benchmarks.operators.timer import METHODS, Timing, time_call
from moe_rl.core.errors import InvalidInputError


def test_percentiles_are_those_of_the_samples() -> None:
    timing = Timing(method="wall", samples_us=(5.0, 1.0, 3.0, 2.0, 4.0, 6.0), flushed_l2=False)
    assert timing.median_us == 3.5
    assert timing.percentile_us(20) == 2.0
    assert timing.percentile_us(80) == 5.0
    assert timing.as_dict()["time_us"] == {"p20": 2.0, "p50": 3.5, "p80": 5.0}


def test_a_cpu_timing_says_so() -> None:
    timing = time_call(lambda: sum(range(1000)), method="wall", num_samples=5)
    assert timing.as_dict()["clock"] == "perf_counter on the CPU"
    assert not timing.flushed_l2
    assert all(sample > 0 for sample in timing.samples_us)


def test_every_sample_is_one_call_after_one_warm_up() -> None:
    calls: list[int] = []
    timing = time_call(lambda: calls.append(1), method="wall", num_samples=7, budget_s=60.0)
    assert len(timing.samples_us) == 7
    assert len(calls) == 8


def test_a_spent_budget_still_gives_three_samples() -> None:
    assert len(time_call(lambda: None, method="wall", num_samples=50, budget_s=0.0).samples_us) == 3


@pytest.mark.parametrize("method", ["events", "graph"])
def test_gpu_clocks_need_a_gpu(method: str) -> None:
    if torch.cuda.is_available():
        x = torch.ones(1 << 20, device="cuda")
        assert time_call(lambda: x.mul_(1.0), method=method).median_us > 0  # type: ignore[arg-type]
        return
    with pytest.raises(InvalidInputError, match="needs a GPU"):
        time_call(lambda: None, method=method)  # type: ignore[arg-type]


def test_misuse_gets_a_sentence() -> None:
    with pytest.raises(InvalidInputError, match="is not one of events, graph, wall"):
        time_call(lambda: None, method="stopwatch")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="num_samples must be at least 3"):
        time_call(lambda: None, method="wall", num_samples=1)
    with pytest.raises(InvalidInputError, match="at least one sample"):
        Timing(method="wall", samples_us=(), flushed_l2=False)
    assert set(METHODS) == {"events", "graph", "wall"}
