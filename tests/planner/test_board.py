"""The board scores a plan file of anybody, by a judge of its own."""

from pathlib import Path

import pytest
from cli_runner import moe_rl as command

import moe_rl
from benchmarks import board
from moe_rl.core.errors import InvalidInputError
from moe_rl.study import make_plans


@pytest.mark.lengthy
def test_an_entry_is_scored_like_the_policy_that_made_it_and_a_cheat_is_named(tmp_path: Path) -> None:
    scenario = board.scenario_of(8)
    plan = make_plans(scenario, ["ultraep"], lambda *_: None)["ultraep"]
    plan.save(tmp_path / "mine.npz")
    ours = board.judged(scenario, "ultraep", plan)
    entry = board.judged(scenario, "mine", moe_rl.load_plan(tmp_path / "mine.npz"))
    assert entry == ours | {"plan": "mine"}
    plan.replicas.source_quota[0] += 1_000_000  # more tokens than there are
    assert board.judged(scenario, "mine", plan)["broken"]
    assert "broken rule" in board.as_text([ours])


def test_a_plan_of_another_size_and_no_plan_are_refused(tmp_path: Path) -> None:
    plan = make_plans(board.scenario_of(8), ["static"], lambda *_: None)["static"]
    odd = moe_rl.plan("countdown-grpo", policy="static", ep=4, cluster="h100", ep_group_tokens=1024)
    odd.save(tmp_path / "odd.npz")
    with pytest.raises(InvalidInputError, match="is a plan for EP4: the board has 8, 16, 32"):
        board.board((tmp_path / "odd.npz",))
    assert plan.placement.ep_size == 8
    ran = command("bench", "planner", "--board", tmp_path / "none.npz")
    assert (ran.code, ran.out) == (2, "")
    assert "there is no plan file" in ran.err
