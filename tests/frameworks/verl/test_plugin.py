"""What the plug-in changes in verl's own modules, without verl."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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


@pytest.mark.parametrize(("floor", "wanted"), [(0.0, "MOE_RL"), (0.5, "MOE_RL_ROUTER_SHIFT")])
def test_the_variable_that_needs_megatron_is_named(floor: float, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("actor")
    fields = {"strategy": "fsdp", "policy_loss": SimpleNamespace(loss_mode="moe_rl_ppo")}
    module.ActorConfig = type("ActorConfig", (), {"__init__": lambda self: self.__post_init__(), **fields})
    module.ActorConfig.__post_init__ = lambda self: None
    monkeypatch.setattr(plugin, "_settings", Settings(balancer=BalancerConfig(), strict=True, router_shift=floor))
    plugin._check_settings(module)
    with pytest.raises(InvalidInputError, match=f"^{wanted} works only with verl's Megatron engine"):
        module.ActorConfig()
    if floor:
        module.ActorConfig.policy_loss.loss_mode = "vanilla"
        with pytest.raises(InvalidInputError, match=r"^MOE_RL_ROUTER_SHIFT needs a moe_rl loss, but .* is vanilla"):
            module.ActorConfig()


@pytest.mark.parametrize("floor", [None, 0.0, 0.5])
def test_registered_losses_take_the_router_shift_where_it_is_switched_on(
    floor: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from moe_rl.frameworks.verl.losses import GAMMA, policy_losses

    settings = None if floor is None else Settings(balancer=BalancerConfig(), router_shift=floor)
    monkeypatch.setattr(plugin, "_settings", settings)
    registered: dict[str, Callable[..., Any]] = {}
    core_algos: Any = ModuleType("core_algos")
    core_algos.register_policy_loss = lambda name: lambda loss: registered.update({name: loss})
    plugin._register_policy_losses(core_algos)
    assert registered.keys() == policy_losses().keys()
    log_prob = torch.full((2, 3), -1.0)
    names = ("old_log_prob", "log_prob", "advantages", "response_mask")
    call = dict(zip(names, (log_prob, log_prob, torch.ones(2, 3), torch.ones(2, 3)), strict=True))
    monkeypatch.setattr(plugin, "_settings", None)
    token = GAMMA.set(torch.full((2, 3), 0.25))
    try:
        loss, _ = registered["moe_rl_ppo"](**call)
    finally:
        GAMMA.reset(token)
    assert loss.item() == pytest.approx(-0.25 if floor else -1.0)


def correction_helper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in of verl.trainer.ppo.rollout_corr_helper, whose function says what it was called with."""

    def compute_rollout_correction_and_rejection_mask(
        old_log_prob: Any,
        rollout_log_prob: Any,
        response_mask: Any,
        rollout_is: str | None = None,
        rollout_is_threshold: Any = 2.0,
        rollout_is_batch_normalize: bool = False,
        rollout_rs: str | None = None,
        rollout_rs_threshold: Any = None,
    ) -> Any:
        options = (rollout_is, rollout_is_threshold, rollout_is_batch_normalize, rollout_rs, rollout_rs_threshold)
        return "verl's", options

    name = "verl.trainer.ppo.rollout_corr_helper"
    helper: Any = ModuleType(name)
    helper.compute_rollout_correction_and_rejection_mask = compute_rollout_correction_and_rejection_mask
    helper.DataProto = SimpleNamespace(from_dict=lambda tensors: SimpleNamespace(batch=tensors))
    for parent in ("verl", "verl.trainer", "verl.trainer.ppo"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, helper)
    return helper


def test_rollout_correction_under_our_names_is_ours_and_under_verls_verls(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from moe_rl.importance.rollout_correction import rollout_correction

    helper = correction_helper(monkeypatch)
    plugin._offer_rollout_correction(helper)
    corrected = helper.compute_rollout_correction_and_rejection_mask
    generator = torch.Generator().manual_seed(0)
    old, rollout = (-torch.rand(4, 5, generator=generator) for _ in range(2))
    mask = (torch.arange(5) < torch.tensor([[5], [3], [4], [1]])).float()
    thresholds: dict[str, Any] = {"rollout_is_threshold": "0.8_1.2", "rollout_rs_threshold": "0.7_1.3"}
    for names in ((None, None), ("token", None), (None, "token_k1")):
        whose, options = corrected(old, rollout, mask, rollout_is=names[0], rollout_rs=names[1], **thresholds)
        assert (whose, options) == ("verl's", (names[0], "0.8_1.2", False, names[1], "0.7_1.3"))
    for level, rejection in (("token", None), ("token", "token_k1"), (None, "token_k1")):
        expected = rollout_correction(old, rollout, mask, rollout_is=level, rollout_rs=rejection, **thresholds)
        proto, kept, metrics = corrected(
            old, rollout, mask,
            rollout_is=level and f"moe_rl_{level}", rollout_rs=rejection and f" moe_rl_{rejection} ,", **thresholds,
        )  # fmt: skip
        assert (proto is None) == (level is None)
        if proto is not None:
            torch.testing.assert_close(proto.batch["rollout_is_weights"], expected[0])
        torch.testing.assert_close(kept, expected[1])
        assert (kept.sum() < mask.sum()) == (rejection is not None), "nothing is rejected: blind"
        assert metrics.keys() == expected[2].keys()
        assert all(isinstance(value, float) for value in metrics.values())
    with pytest.raises(InvalidInputError, match=r"with and without the prefix moe_rl_ .* Add it to token_k1\."):
        corrected(old, rollout, mask, rollout_is="moe_rl_token", rollout_rs="token_k1", **thresholds)


def test_a_rollout_correction_of_another_version_stays_verls_and_is_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = correction_helper(monkeypatch)
    helper.compute_rollout_correction_and_rejection_mask = verls = lambda log_prob, response_mask: None
    plugin._offer_rollout_correction(helper)
    assert helper.compute_rollout_correction_and_rejection_mask is verls
    assert "rollout_correction does not accept moe_rl_* values" in caplog.text


@pytest.mark.lengthy
@pytest.mark.parametrize("switched_on", [False, True])
def test_workers_get_variables_only_from_a_process_that_is_switched_on(switched_on: bool, tmp_path: Path) -> None:
    """In a process of its own, on a folder that stands in for verl: the plug-in is imported before the module."""
    folder = tmp_path / "verl" / "trainer"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").write_text("")
    (folder / "constants_ppo.py").write_text("def get_ppo_ray_runtime_env():\n    return {'env_vars': {}}\n")
    script = (
        "import sys\nimport moe_rl.frameworks.verl.plugin\nfrom verl.trainer import constants_ppo\n"
        "print(sorted(constants_ppo.get_ppo_ray_runtime_env()['env_vars']))\n"
        "print([name for name in sys.modules if name == 'moe_rl.frameworks.verl.attach'])\n"
    )
    variables = {name: value for name, value in os.environ.items() if name.partition("_RL")[0] != "MOE"}
    # What a test of mutants puts into processes that a test starts.
    variables |= {name: value for name, value in os.environ.items() if name.startswith("MOE_RL_TEST_MUTANT_")}
    variables |= {"MOE_RL": "moe-rl"} if switched_on else {}
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), *sys.path])
    ran = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=True)
    expected = [["MOE_RL"], ["moe_rl.frameworks.verl.attach"]] if switched_on else [[], []]
    assert ran.stdout.splitlines() == [str(each) for each in expected]


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
