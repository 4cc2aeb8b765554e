"""The test backend does what gloo does, in every mode, and a fault in it would be seen."""

import sys
from pathlib import Path
from typing import Any

import pytest
from local_ranks import run_cases

CASES = Path(__file__).parent
sys.path.insert(0, str(CASES))
TIMEOUT_S = 120.0
MUTANTS = ("without_join", "up_before_gloo", "no_wait_for_arrival", "undivided_mean", "wrong_root", "lost_message")
LATE_MUTANTS = ("undivided_mean", "wrong_root", "lost_message", "without_join")
"""In late mode there are no copies on their way: what a lane does is not run."""


def staged_case(case: str, backend: str) -> pytest.MarkDecorator:
    return pytest.mark.multi_rank(world_size=4, case=f"conformance_cases.{case}", backend=backend)


@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=staged_case("conformance", name), id=name) for name in ("prompt", "late")]
)
def test_every_operation_is_gloos(backend: str, outcome: list[Any]) -> None:
    assert min(outcome) > 300


@staged_case("played", "prompt")
def test_the_cuda_path_is_gloos_on_streams_that_are_threads(outcome: list[Any]) -> None:
    assert min(outcome) > 150


@staged_case("late_reads_and_writes", "late")
def test_late_mode_hides_outputs_sees_changed_inputs_and_refuses_what_nccl_refuses(outcome: list[Any]) -> None:
    for found in outcome:
        assert found["before"]
        assert found["after"] == [4.0] * 4
        assert found["said"] == "a tensor that an operation reads was written before its wait()."
        assert "not supported for NCCL" in found["refused"]


@pytest.mark.multi_rank
@pytest.mark.parametrize(
    ("mode", "mutant"),
    [*(("prompt", name) for name in MUTANTS), *(("late", name) for name in LATE_MUTANTS)],
)
def test_a_fault_in_the_backend_is_seen(mode: str, mutant: str, tmp_path: Path) -> None:
    case = f"conformance_cases.mutant_{mutant}"
    launch = run_cases(CASES, [case], world_size=4, folder=tmp_path, timeout_s=TIMEOUT_S, backend=mode)
    assert not launch.results
    assert "Error" in launch.failure
