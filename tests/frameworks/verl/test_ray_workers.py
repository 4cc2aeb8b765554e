"""verl's own workers in Ray, driven by verl's own trainer, train the same losses when MOE_RL stands at the driver."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from curves import FP32_LIMIT

pytestmark = [pytest.mark.framework, pytest.mark.filterwarnings("ignore")]  # Ray leaves its own files open
LIMIT_S = 600.0
"""Far above what six processes that import verl take on a busy machine."""


@pytest.mark.lengthy
def test_two_workers_are_balanced_by_a_variable_of_the_driver(ray_cluster: Any, tmp_path: Path) -> None:
    assert "MOE_RL" not in os.environ, "Ray's own processes would hand it to the workers"
    result = tmp_path / "result.json"
    address = ray_cluster.get_runtime_context().gcs_address
    ran = subprocess.run(
        [sys.executable, Path(__file__).with_name("ray_driver.py"), address, result],
        env={**os.environ, "MOE_RL": "moe-rl", "MOE_RL_OBJECTIVE": "imbalance", "MOE_RL_STRICT": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]
    plain, balanced = (json.loads(result.read_text())[name] for name in ("plain", "balanced"))
    for passes, own, ours in zip((3, 6), plain["steps"], balanced["steps"], strict=True):
        assert ours["log_probs"] == own["log_probs"]
        for name in ("actor/loss", "actor/pg_loss"):
            assert ours["metrics"][name] == own["metrics"][name], name
        assert ours["metrics"]["actor/grad_norm"] == pytest.approx(own["metrics"]["actor/grad_norm"], rel=FP32_LIMIT)
        sent = [[worker["weights"] for worker in each["workers"]] for each in (own, ours)]
        assert sent[0] == sent[1], "what update_weights sends to the rollout"
        assert len(sent[0][0]) > 3 * 8 * 3
        assert not [name for name in own["metrics"] if "moe" in name]
        updates, ranks = 2, 2
        for name in ("imbalance", "predicted_imbalance", "static_imbalance", "known_share"):
            assert len(ours["metrics"][f"actor/moe_rl/{name}"]) == updates * ranks
        assert min(ours["metrics"]["actor/moe_rl/static_imbalance"]) > 1.9
        assert max(ours["metrics"]["actor/moe_rl/imbalance"]) <= 1.02
        assert min(ours["metrics"]["actor/moe_rl/known_share"]) == 1.0, "the log-prob pass was heard"
        # What update_weights has put away is away, ours with verl's.
        assert [worker["parameters"] for worker in ours["workers"]] == [0, 0]
        assert [worker["buffers"] for worker in ours["workers"]] == [0, 0]
        # Log-prob passes are not foretold, nor a rollout's first update where sequences are packed and homes searched.
        prepared = [False, False, True, False, False, True][:passes]
        assert [worker["prepared"] for worker in ours["workers"]] == [prepared] * 2
    for worker in balanced["awake"]:
        assert worker["ranks_per_node"] == 2, "read from the hosts"
        assert worker["parameters"] > 0
        assert worker["buffers"] > 0
        assert worker["woken"] == ["weights", "kv_cache"] * len(plain["steps"])
