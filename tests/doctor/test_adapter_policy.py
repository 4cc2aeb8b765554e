"""What `MOE_RL` in a script says of moves: a policy may move experts, `observe` and `MOE_RL_REORDERS=false` do not."""

from pathlib import Path

import pytest
from runs import changed, diagnose


@pytest.mark.parametrize(
    ("variables", "moves"),
    [
        ({"MOE_RL": "moe-rl"}, True),
        ({"MOE_RL": "observe"}, False),
        ({"MOE_RL": "ultraep"}, False),
        ({"MOE_RL": "moe-rl", "MOE_RL_REORDERS": "false"}, False),
        ({"MOE_RL": "moe-rl", "MOE_RL_REORDERS": "true"}, True),
    ],
)
def test_moves_of_offloaded_state_are_a_trap_where_experts_may_move(
    tmp_path: Path, variables: dict[str, str], moves: bool
) -> None:
    changes = [(f"env:{name}", value) for name, value in variables.items()]
    traps = {finding.trap.name for finding in diagnose(changed(tmp_path, "slime", changes)).findings}
    assert ("reorder-of-offloaded-state" in traps) == moves
    assert "expert-order-in-export" not in traps, "the adapter brings experts home before it writes weights"


def test_a_job_that_shares_its_gpus_or_takes_fewer_adds_up(tmp_path: Path) -> None:
    for change in ("--colocate --rollout-num-gpus 16", "--rollout-num-gpus 8"):
        path = changed(tmp_path, "slime", [("text:--colocate", change)])
        assert "gpus-do-not-add-up" not in {finding.trap.name for finding in diagnose(path).findings}
