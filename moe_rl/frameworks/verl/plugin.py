"""What verl loads through its entry points `verl.plugins`: our policy losses and rollout correction, and with MOE_RL
set, balanced workers.

verl keeps what a plug-in raises to itself (a line at DEBUG), so settings that are wrong end the process here, before
anything has started.
"""

import sys
from types import ModuleType
from typing import Any

from moe_rl.core.errors import InvalidInputError
from moe_rl.core.post_import import when_imported, wrap
from moe_rl.frameworks.ranks import unbalanced
from moe_rl.frameworks.run_settings import settings_from_environment, variables


def _register_policy_losses(core_algos: ModuleType) -> None:
    """Offer every objective as `actor.policy_loss.loss_mode=moe_rl_<objective>`."""
    from moe_rl.frameworks.verl.losses import GAMMA, policy_losses

    gamma = (lambda _: GAMMA.get()) if _settings is not None and _settings.router_shift else None
    for name, loss in policy_losses(gamma=gamma).items():
        core_algos.register_policy_loss(name)(loss)


def _offer_rollout_correction(helper: ModuleType) -> None:
    """Offer our rollout correction as `algorithm.rollout_correction.rollout_is=moe_rl_token` and so on."""
    from moe_rl.frameworks.contract import logger
    from moe_rl.frameworks.verl.contract import FRAMEWORK
    from moe_rl.frameworks.verl.losses import rollout_corrected

    correction = next(symbol for symbol in FRAMEWORK.beside if "rollout_corr_helper" in symbol.name)
    if problem := correction.problem():
        logger.warning(
            "moe_rl: rollout_correction does not accept moe_rl_* values of rollout_is and rollout_rs: %s", problem
        )
        return
    helper.compute_rollout_correction_and_rejection_mask = rollout_corrected(helper)  # type: ignore[attr-defined]


def _pass_settings_on(constants: ModuleType) -> None:
    """Let verl give Ray's workers, on other nodes too, the variables that switch moe_rl on here."""

    def with_ours(original: Any, *args: Any, **kwargs: Any) -> Any:
        runtime_env = original(*args, **kwargs)
        return {**runtime_env, "env_vars": {**runtime_env.get("env_vars", {}), **variables()}}

    wrap(constants, "get_ppo_ray_runtime_env", with_ours)


def _check_settings(actor: ModuleType) -> None:
    """Check one of our losses' settings, and the engine, where verl makes its actor config: before workers start."""
    from moe_rl.frameworks.verl.losses import checked_settings

    def checked(original: Any, self: Any) -> None:
        original(self)
        gamma = bool(_settings and _settings.router_shift)
        checked_settings(self, router_shift=gamma)
        if _settings is not None and "megatron" not in self.strategy:
            wanted = "MOE_RL_ROUTER_SHIFT" if gamma else "MOE_RL"
            sentence = f"{wanted} works only with verl's Megatron engine, but actor.strategy is {self.strategy}."
            unbalanced("verl", InvalidInputError(sentence), strict=_settings.strict or gamma)

    wrap(actor.ActorConfig, "__post_init__", checked)


def _register_checkpoint_engine(base: ModuleType) -> None:
    """Offer planned weight syncs as `checkpoint_engine.backend=moe_rl`."""
    from moe_rl.frameworks.verl.checkpoint_engine import register

    register(base)


def _load_packed_batches(delta_loader: ModuleType) -> None:
    """Take batches of a planned sync in SGLang's processes."""
    from moe_rl.frameworks.verl.sync_rollouts import load_packed_batches

    load_packed_batches(delta_loader)


def _take_maps(vllm_utils: ModuleType) -> None:
    """Take the expert map of a planned sync in vLLM's processes."""
    from moe_rl.frameworks.verl.sync_rollouts import take_maps

    take_maps(vllm_utils)


try:
    _settings = settings_from_environment()
except InvalidInputError as error:
    sys.stderr.write(f"moe_rl: {error}\n")
    raise SystemExit(2) from error
when_imported("verl.checkpoint_engine.base", _register_checkpoint_engine)
when_imported("verl.workers.rollout.sglang_rollout.delta_loader", _load_packed_batches)
when_imported("verl.workers.rollout.vllm_rollout.utils", _take_maps)
when_imported("verl.trainer.ppo.core_algos", _register_policy_losses)
when_imported("verl.workers.config.actor", _check_settings)
when_imported("verl.trainer.ppo.rollout_corr_helper", _offer_rollout_correction)
if _settings is not None:
    from moe_rl.frameworks.verl import attach, driver

    attach.install_when_imported(_settings)
    driver.install_when_imported(_settings)
    when_imported("verl.trainer.constants_ppo", _pass_settings_on)
