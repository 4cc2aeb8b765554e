"""When a rank dies the others get an error at once; nothing waits for it."""

from pathlib import Path

import pytest

from moe_rl.megatron.launcher import run_cases

FOLDER = Path(__file__).parent
TIMEOUT_S = 120.0


@pytest.mark.multi_rank
@pytest.mark.parametrize(
    "case",
    ["rank_dies_while_experts_move", pytest.param("rank_dies_while_gradients_return", marks=pytest.mark.slow)],
)
def test_the_other_rank_gets_an_error_and_does_not_wait(case: str, tmp_path: Path) -> None:
    launch = run_cases(FOLDER, [f"fault_cases.{case}"], world_size=2, folder=tmp_path, timeout_s=TIMEOUT_S)
    assert "rank 1 ended with exit code 3" in launch.failure
    assert "rank 0 was told:" in launch.failure
    assert not launch.results
