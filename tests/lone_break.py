"""One rank's loss raises, the other ranks' do not: what frameworks' cases of it have to show."""

from pathlib import Path

from local_ranks import run_cases

TIMEOUT_S = 240.0
FOLDER = "MOE_RL_TEST_CHECKPOINTS"
"""Variable with the folder into which rank 1 of such a case saves what it holds, as of_rank_1.pt."""


def require_lone_save(cases: Path, case: str, folder: Path) -> None:
    """Run a case of `break_cases` in the folder `cases` on two ranks; `folder` is where `FOLDER` points.

    The rank that raised has saved at once, and the other was told before the grace ended that ranks have after one of
    them failed, as in the framework without moe_rl: else it would have been killed, and its log would not say so.
    """
    launch = run_cases(cases, [f"break_cases.{case}"], world_size=2, folder=folder / case, timeout_s=TIMEOUT_S)
    assert "in the user's loss" in launch.failure
    assert (folder / "of_rank_1.pt").exists()
    assert "rank 0 was told" in launch.failure
    assert not launch.results
