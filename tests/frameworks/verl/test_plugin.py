"""What the plug-in changes in verl's own modules, without verl."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from moe_rl.balancing import BalancerConfig
from moe_rl.core.errors import InvalidInputError
from moe_rl.frameworks.run_settings import Settings
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


@pytest.mark.parametrize("strategy", ["megatron", "fsdp", "fsdp2", "veomni"])
def test_an_actor_of_another_engine_is_a_warning_or_an_error(
    strategy: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for strict in (False, True):
        module: Any = ModuleType("actor")
        module.ActorConfig = dataclass(
            type("ActorConfig", (), {"__post_init__": lambda self: None, "strategy": strategy})
        )
        monkeypatch.setattr(plugin, "_settings", Settings(balancer=BalancerConfig(), strict=strict))
        plugin._check_settings(module)
        if strict and strategy != "megatron":
            with pytest.raises(InvalidInputError, match=f"actor.strategy is {strategy}"):
                module.ActorConfig()
        else:
            module.ActorConfig()
    assert ("goes on unbalanced" in caplog.text) == (strategy != "megatron")
