"""An update of verl whose loss raises on all ranks: the worker saves and goes on, as plain verl does after the same.

Six combinations are drawn a day (`drawn.py`): which exception, at which micro-batch, in what kind of run. One of them
is part of `make test-integrations`, the others are slow.
"""

from pathlib import Path
from typing import Any

import pytest
from curves import times_the_yardstick
from lone_break import FOLDER, require_lone_save

pytestmark = pytest.mark.framework
SHARE = 1 / 20
"""Of the distance between plain verl and plain verl with other micro-batches."""


def drawn(case: str, *more: pytest.MarkDecorator, world_size: int = 2) -> Any:
    marks = pytest.mark.multi_rank(world_size=world_size, case=f"break_cases.{case}", launch="breaks")
    return pytest.param(marks=[marks, *more], id=case)


@pytest.mark.parametrize(
    (),
    [
        drawn("drawn_0"),
        *(drawn(f"drawn_{number}", pytest.mark.slow) for number in range(1, 5)),
        drawn("two_stages", pytest.mark.slow, world_size=4),
    ],
)
def test_a_run_goes_on_as_verl_does(outcome: list[Any]) -> None:
    for rank in outcome:
        plain, ours, yardstick, combination = (rank[name] for name in ("plain", "ours", "yardstick", "combination"))
        assert ours["raised"] == plain["raised"] == "in the user's loss", combination
        assert ours["moved"] > 0, "experts were at home, and no copy stayed: nothing had to be brought home"
        assert ours["exported"] == plain["exported"] > 0, combination
        if plain["after"]["loss"]:  # of the last stage
            for curve in (ours["after"], rank["loaded"]):
                assert times_the_yardstick(plain["after"], curve, yardstick["after"]) <= SHARE, combination
        for metrics in ours["metrics"][-3:]:
            assert metrics["moe_rl/fallback"] == 0, combination
            assert metrics["moe_rl/imbalance"] < metrics["moe_rl/static_imbalance"], combination


@pytest.mark.slow
@pytest.mark.parametrize("case", ["alone_in_verl", "alone_balanced"])
def test_a_rank_whose_loss_raises_alone_saves_at_once_and_the_other_ends_with_it(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    require_lone_save(Path(__file__).parent, case, tmp_path)
