"""What remains to be planned above the dispatcher's own engine leads the table wherever the run has such an engine."""

from pathlib import Path
from typing import Any

import pytest
from cli_runner import write_npz

import moe_rl
from moe_rl.core.native import native_core
from moe_rl.core.step_words import Dispatcher
from moe_rl.planner.domain_engine import ENGINES

pytestmark = pytest.mark.skipif(native_core() is None, reason="the C++ core is not built")
SMALL: dict[str, Any] = {
    "cluster": "h100", "num_experts": 8, "ep_group_tokens": 200, "expert_model_parallel_size": 4, "ranks_per_node": 2,
    "tokens_per_rank": 4096, "policy": ["static", "moonep", "moe-rl"],
}  # fmt: skip
HYBRIDEP = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A trace of 3 MoE layers of 8 experts, top-2."""
    return write_npz(tmp_path / "run.npz")


def test_a_dispatcher_with_an_engine_adds_the_row_and_it_comes_first(path: Path) -> None:
    report = moe_rl.simulate(path, **SMALL, **HYBRIDEP)
    assert report.policy_names == ["moe-rl+hybridep", "static", "moonep", "moe-rl"]
    assert report.table().index("\n moe-rl+hybridep") < report.table().index("\n static")
    assert report.before_and_after[0].policy == "static"
    named = moe_rl.simulate(path, **SMALL, **HYBRIDEP, domain_balance="engine:hybridep")
    assert named.policy_names == ["moe-rl", "static", "moonep"]
    rows = report.as_json()["policies"], named.as_json()["policies"]
    for figure in ("step_time_s", "imbalance", "replicas_per_plan", "vs_best_engine", "peak_memory_bytes"):
        assert rows[0]["moe-rl+hybridep"][figure] == rows[1]["moe-rl"][figure]
    assert report.plans["moe-rl+hybridep"].capacity is not None
    said = "\n".join(report.notes)
    assert "engine:hybridep balances every node at dispatch. moe-rl+hybridep adds what the engine does not do" in said
    assert "moe-rl+hybridep, capacity" in said


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"},
        {"moe_token_dispatcher_type": "alltoall"},
        {**HYBRIDEP, "policy": ["static", "moonep"]},
    ],
    ids=["nobody says", "deepep", "alltoall", "no moe-rl"],
)
def test_without_an_engine_the_table_is_as_it_was(path: Path, changed: dict[str, Any]) -> None:
    options = {**SMALL, **changed}
    report = moe_rl.simulate(path, **options)
    assert report.policy_names == options["policy"]
    assert report.above_engine == ""


def test_an_engine_of_a_dispatcher_is_one_that_plans_know() -> None:
    engines = {dispatcher: dispatcher.engine for dispatcher in Dispatcher}
    assert engines == {
        Dispatcher.DEEPEP: None, Dispatcher.HYBRIDEP: "engine:hybridep", Dispatcher.ALLTOALL: None,
    }  # fmt: skip
    assert set(filter(None, engines.values())) <= set(ENGINES)
