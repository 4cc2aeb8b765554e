"""Range names are readable both ways, and ranges reach torch.profiler when they are on."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.core.errors import InvalidInputError
from moe_rl.profiling import ranges
from moe_rl.profiling.ranges import CATEGORIES, PHASES, RangeName

numbers = st.none() | st.integers(0, 10_000)


@given(st.sampled_from(CATEGORIES), numbers, numbers, st.none() | st.sampled_from(PHASES))
def test_a_range_name_reads_back(category: str, layer: int | None, micro_batch: int | None, phase: str | None) -> None:
    name = RangeName(category=category, layer=layer, micro_batch=micro_batch, phase=phase)
    assert RangeName.parse(str(name)) == name


@pytest.mark.parametrize(
    "text", ["", "moe_rl", "moe_rl/lunch/L0", "dispatch/L3", "moe_rl/dispatch/L3/sideways", "aten::mm"]
)
def test_other_names_are_not_ours(text: str) -> None:
    assert RangeName.parse(text) is None


def test_an_unknown_category_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidInputError, match="Did you mean 'dispatch'"):
        RangeName(category="dispach")


def test_ranges_do_nothing_until_enabled() -> None:
    """Even an unknown category passes: a disabled range does not look at its arguments."""
    with ranges.range("no such category"):
        pass


@pytest.mark.lengthy
@pytest.mark.parametrize(("asked", "enabled"), [("1", "True"), ("0", "False")])
def test_a_variable_of_the_environment_switches_ranges_on(asked: str, enabled: str) -> None:
    pytest.importorskip("nvtx")
    code = "from moe_rl.profiling import ranges; print(ranges.is_enabled())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "MOE_RL_NVTX": asked},
    )  # fmt: skip
    assert done.stdout.strip() == enabled


def test_enabled_ranges_reach_torch_profiler_and_nvtx() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    ranges.enable(nvtx=True, record_function=True)
    try:
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        with profile, ranges.range("dispatch", layer=2, micro_batch=1, phase="backward"):
            torch.ones(4).sum()
        with pytest.raises(InvalidInputError, match="range category"), ranges.range("lunch"):
            pass
    finally:
        ranges.disable()
    assert "moe_rl/dispatch/L2/mb1/backward" in {event.key for event in profile.key_averages()}
