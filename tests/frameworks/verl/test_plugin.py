"""What the plug-in changes in verl's own modules, without verl."""

from types import ModuleType
from typing import Any

import pytest

from moe_rl.frameworks.verl import plugin


def test_workers_on_other_nodes_get_the_variables_and_verls_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_RL", "moe-rl")
    monkeypatch.setenv("MOE_RL_REPLICA_SLOTS", "2")
    constants: Any = ModuleType("constants_ppo")
    constants.get_ppo_ray_runtime_env = lambda config=None: {"env_vars": {"NCCL_DEBUG": "WARN"}, "working_dir": config}
    plugin._pass_settings_on(constants)
    assert constants.get_ppo_ray_runtime_env("folder") == {
        "env_vars": {"NCCL_DEBUG": "WARN", "MOE_RL": "moe-rl", "MOE_RL_REPLICA_SLOTS": "2"},
        "working_dir": "folder",
    }
