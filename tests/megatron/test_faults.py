"""When a rank is lost the others get an error in time, and the last checkpoint brings the run back."""

import re
from pathlib import Path

import pytest
from curves import FP32_LIMIT, relative_difference
from local_ranks import Launch, run_cases

CASES = Path(__file__).parent
FOLDER = "MOE_RL_TEST_CHECKPOINTS"
TIMEOUT_S = 240.0
GROUP_TIMEOUT_S = 6.0
SLACK_S = 20.0
"""What a busy machine may add to a group's time limit."""

pytestmark = pytest.mark.multi_rank


def launched(case: str, folder: Path, world_size: int = 2) -> Launch:
    return run_cases(CASES, [f"fault_cases.{case}"], world_size=world_size, folder=folder / case, timeout_s=TIMEOUT_S)


def survivors(launch: Launch) -> dict[int, str]:
    """Rank -> the error that it reported."""
    found = re.findall(r"RuntimeError: rank (\d+) was told after \d+ s: (.*)", launch.failure)
    return {int(rank): message for rank, message in found}


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_and_the_checkpoint_brings_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    for case in ("killed_in_a_reorder", "killed_in_a_step"):
        launch = launched(case, tmp_path)
        assert "rank 1 ended with exit code -9" in launch.failure
        assert set(survivors(launch)) == {0}
        assert not launch.results
        if case == "killed_in_a_reorder":
            assert "on the rank where the earlier rounds put it" in survivors(launch)[0]
    for rank in launched("restarted", tmp_path).of("fault_cases.restarted"):
        for where in ("in_a_reorder", "in_a_step"):
            assert rank[f"{where}_placement"], "the placement was not restored"
            assert relative_difference(rank["plain"], rank[where]) <= FP32_LIMIT


@pytest.mark.parametrize("case", ["killed_while_planning", pytest.param("killed_in_a_push", marks=pytest.mark.slow)])
def test_the_other_rank_gets_an_error_wherever_one_is_killed(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    launch = launched(case, tmp_path)
    assert "rank 1 ended with exit code -9" in launch.failure
    assert set(survivors(launch)) == {0}
    assert not launch.results


@pytest.mark.parametrize(
    "case", ["alone_in_megatron", "alone_balanced", pytest.param("moved_and_alone", marks=pytest.mark.slow)]
)
def test_a_rank_whose_loss_raises_alone_saves_at_once_and_the_other_ends_with_it(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    launch = launched(case, tmp_path)
    assert "in the user's loss" in launch.failure
    assert (tmp_path / "of_rank_1.pt").exists()
    # Within the grace that the ranks have after one has failed, as in plain Megatron: else it would have been killed.
    assert set(survivors(launch)) == {0}
    assert not launch.results


@pytest.mark.slow
@pytest.mark.parametrize("case", ["killed_in_a_reorder_at_ep4", "killed_in_a_step_at_ep4"])
def test_all_others_get_an_error_when_one_of_four_is_killed(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    launch = launched(case, tmp_path, world_size=4)
    assert "rank 1 ended with exit code -9" in launch.failure
    assert set(survivors(launch)) == {0, 2, 3}


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_reorder_ends_it_within_the_time_limit_of_megatrons_groups(tmp_path: Path) -> None:
    launch = launched("hangs_in_a_reorder", tmp_path)
    assert set(survivors(launch)) == {0}
    waited = re.search(r"rank 0 was told after (\d+) s", launch.failure)
    assert waited is not None
    assert int(waited[1]) <= GROUP_TIMEOUT_S + SLACK_S
