"""What the plug-in changes in verl's own modules, without verl."""

from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
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
    assert ("continues without balancing" in caplog.text) == (strategy != "megatron")


@pytest.mark.parametrize(
    ("rollout", "ep_size", "refused"), [("sglang", 2, True), ("sglang", 1, False), ("vllm", 2, False)]
)
def test_an_engine_that_names_experts_by_the_first_rank_is_refused(rollout: str, ep_size: int, refused: bool) -> None:
    """With expert parallelism and verl's own loader, a worker of SGLang raises before weights travel."""
    pytest.importorskip("torch")
    from moe_rl.frameworks.verl.checkpoint_engine import PlannedCheckpointEngine, register

    module: Any = ModuleType("base")
    registered: dict[str, Any] = {}
    module.CheckpointEngineRegistry = SimpleNamespace(
        register=lambda name: lambda made: registered.update({name: made})
    )
    module.CheckpointEngineWorker = type(
        "CheckpointEngineWorker",
        (),
        {"__init__": lambda self, rollout_config, model_config: vars(self).update(made=True, checkpoint_engine=None)},
    )
    register(module)
    assert registered == {"moe_rl": PlannedCheckpointEngine}
    chosen = SimpleNamespace(backend="moe_rl", engine_kwargs={"moe_rl": {"ep_size": ep_size}})
    config = SimpleNamespace(name=rollout, checkpoint_engine=chosen, engine_kwargs={})
    if refused:
        with pytest.raises(InvalidInputError, match="custom_weight_loader"):
            module.CheckpointEngineWorker(config, None)
    else:
        assert module.CheckpointEngineWorker(config, None).made
