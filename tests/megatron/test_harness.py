"""The CPU harness runs real Megatron, and the launcher never hangs."""

import math
from pathlib import Path

import pytest
import torch
from local_ranks import RankFailureError, run_cases

from moe_rl.megatron.on_cpu import cpu_megatron

CASES = Path(__file__).parent

pytestmark = pytest.mark.multi_rank


@pytest.mark.filterwarnings("ignore")  # Megatron warns when it is imported
def test_the_harness_leaves_torch_as_it_was() -> None:
    before = (torch.cuda.current_device, torch.cuda.Stream, torch.Tensor.type, torch.Tensor.cuda)
    with cpu_megatron():
        assert torch.cuda.current_device() == torch.device("cpu")
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
        assert torch.cuda.Stream() == torch.cuda.current_stream()
    assert (torch.cuda.current_device, torch.cuda.Stream, torch.Tensor.type, torch.Tensor.cuda) == before
    assert torch.zeros(2).type() == "torch.FloatTensor"


def test_a_rank_that_raises_ends_the_launch_and_its_error_is_shown(tmp_path: Path) -> None:
    launch = run_cases(
        CASES,
        ["launcher_cases.rank_number", "launcher_cases.one_rank_raises"],
        world_size=2,
        folder=tmp_path,
        timeout_s=60,
    )
    assert launch.of("launcher_cases.rank_number") == [0, 1]
    with pytest.raises(RankFailureError, match="expert 7 is lost"):
        launch.of("launcher_cases.one_rank_raises")


def test_a_rank_that_never_ends_is_killed_at_the_limit(tmp_path: Path) -> None:
    launch = run_cases(CASES, ["launcher_cases.never_ends"], world_size=1, folder=tmp_path, timeout_s=2)
    with pytest.raises(RankFailureError, match="did not finish"):
        launch.of("launcher_cases.never_ends")


def test_a_case_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    cases = [f"launcher_cases.{number}_training" for number in ("first", "second")]
    launch = run_cases(CASES, cases, world_size=2, folder=tmp_path, timeout_s=120)
    first, second = (launch.of(case) for case in cases)
    assert first == second
    assert [trainings for trainings, _ in first] == [0, 0]


@pytest.mark.multi_rank(world_size=2, case="plain_cases.plain_training_is_repeatable")
def test_plain_megatron_trains_repeatably_bit_for_bit(outcome: list) -> None:
    for first, second in outcome:
        assert first == second
        assert all(math.isfinite(value) for curve in first.values() for value in curve)
    assert outcome[0][0]["loss"] == outcome[1][0]["loss"]
