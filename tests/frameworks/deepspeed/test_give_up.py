"""A cycle of DeepSpeed that breaks off on all ranks: the run saves and goes on, as plain DeepSpeed does after the same.

Six combinations are drawn a day (`drawn.py`): which exception, in which micro-batch and where, in what kind of run. One
of them is part of `make test-integrations`, the others are slow.
"""

from pathlib import Path
from typing import Any

import pytest
from curves import FP32_LIMIT, relative_difference
from lone_break import FOLDER, require_lone_save

pytestmark = pytest.mark.framework


def drawn(number: int) -> Any:
    marks = [pytest.mark.multi_rank(world_size=2, case=f"break_cases.drawn_{number}", launch="deepspeed")]
    marks += [pytest.mark.slow] if number else []
    return pytest.param(marks=marks, id=f"drawn_{number}")


@pytest.mark.parametrize((), [drawn(number) for number in range(6)])
def test_a_run_goes_on_as_deepspeed_does(outcome: list[Any]) -> None:
    """Micro-batches have one length here, so others than plain DeepSpeed's differ by rounding as well: the limit is
    the runtime's own."""
    for rank in outcome:
        plain, ours, combination = rank["plain"], rank["ours"], rank["combination"]
        assert ours["raised"] == plain["raised"] != "", combination
        assert relative_difference(plain["curve"], ours["curve"]) <= FP32_LIMIT, combination
        assert relative_difference(rank["unbroken"], rank["loaded"]) <= FP32_LIMIT, combination
        for metrics in ours["metrics"]:
            assert metrics["moe_rl/fallback"] == 0, combination
            assert metrics["moe_rl/imbalance"] < metrics["moe_rl/static_imbalance"], combination


@pytest.mark.slow
@pytest.mark.parametrize("case", ["alone_in_deepspeed", "alone_balanced"])
def test_a_rank_whose_loss_raises_alone_saves_at_once_and_the_other_ends_with_it(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    require_lone_save(Path(__file__).parent, case, tmp_path)
