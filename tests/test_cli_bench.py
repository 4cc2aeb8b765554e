"""`moe-rl bench planner`: the checkout's benchmark behind the command line."""

import json
from pathlib import Path

import numpy as np
import pytest
from cli_runner import moe_rl, routes

from moe_rl.cli import bench
from moe_rl.planner.registry import POLICIES


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A small trace of 32 experts, the shape that section `trace` expects."""
    arrays = {f"s{index}": routes(900, seed=index, layers=1, experts=32, top_k=4) for index in range(12)}
    np.savez(tmp_path / "small.npz", **arrays)
    return tmp_path / "small.npz"


@pytest.mark.lengthy
def test_every_policy_is_measured_on_a_trace(trace: Path) -> None:
    ran = moe_rl("bench", "planner", "--sections", "trace", "--trace", trace, "--json", "-")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    assert document["command"].startswith("moe-rl bench planner")
    assert {row["policy"] for row in document["trace"]} == set(POLICIES.names)
    for row in document["trace"]:
        assert 1.0 <= row["bound"] <= row["imbalance"] + 1e-9
        assert f"{row['imbalance']:.4f}" in ran.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--sections", "sped"), "'sped' is unknown. Did you mean 'speed'?"),
        (("--trace", "none.npz"), "there is no trace at none.npz."),
    ],
)
def test_wrong_values_are_refused(options: tuple[str, ...], said: str) -> None:
    ran = moe_rl("bench", "planner", *options)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_without_a_checkout_the_command_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BENCHMARKS", tmp_path)
    ran = moe_rl("bench", "planner")
    assert (ran.code, ran.out) == (2, "")
    assert "benchmarks need a checkout" in ran.err
    assert "run `pip install -e .` in the checkout" in ran.err
