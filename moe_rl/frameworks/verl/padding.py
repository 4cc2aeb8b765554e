"""Padding samples of verl's trainer v1: ranks get unequal numbers of samples, and are filled up to as many.

verl makes such samples itself where a rollout is no multiple of its mini-batches: a prompt and a response that no loss
counts, tagged `is_padding` so that no metric does. Ours are made by verl's own function, behind the samples of a step.
What divides a loss is a constant of the real samples: their tokens (`batch_num_tokens`, by the loss mask) or their
number (`global_batch_size`, which stays as configured). Only `mini_batch_size`, by which workers cut their shares,
counts the padding. What reads the number of rows instead is refused by name.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from moe_rl.balancing.driver_packing import PADDING_TOKENS
from moe_rl.core.post_import import wrap
from moe_rl.frameworks.verl.micro_batch_losses import BY_LONGEST, divides_by_longest_response

# Of verl 0.9.1: advantages by uid or over the response mask. Others divide by rows (gpg), or were not looked at.
EXACT_ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
# Aggregated by `agg_loss` over the whole mini-batch. geo_mean, clip_cov and kl_cov depend on the rows of a micro-batch.
EXACT_LOSSES = (
    "vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "dro", "cispo",
    "moe_rl_ppo", "moe_rl_dppo_tv", "moe_rl_dppo_kl", "moe_rl_gspo", "moe_rl_sapo", "moe_rl_dro", "moe_rl_cispo",
)  # fmt: skip
# Families whose routers have no bias that moves by the tokens of every expert, padding samples' included.
UNBIASED_ROUTERS = ("qwen2_moe", "qwen3_moe", "qwen3_next", "gpt_oss", "mixtral", "olmoe")


def why_not_padded(trainer: Any) -> str | None:
    """Return which setting counts padding samples, as a sentence; None: none does, so losses stay what they are.

    `trainer` is one of v1.
    """
    config = trainer.config
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    algorithm, transformer = _block(config, "algorithm"), _block(actor.megatron, "override_transformer_config")
    estimator, family = algorithm.get("adv_estimator", "grpo"), _model_type(model)
    estimator = str(getattr(estimator, "value", estimator))
    loss = str(_block(actor, "policy_loss").get("loss_mode", "vanilla"))
    adaptive = _block(algorithm, "kl_ctrl").get("type", "fixed") != "fixed"
    refusals = {
        f"algorithm.adv_estimator={estimator} may count padding samples.": estimator not in EXACT_ESTIMATORS,
        f"policy_loss.loss_mode={loss} depends on which sequences are in a micro-batch.": loss not in EXACT_LOSSES,
        f"{BY_LONGEST}.": divides_by_longest_response(
            actor.get("loss_agg_mode", "token-mean"), actor.get("loss_scale_factor", None)
        ),
        "an adaptive algorithm.kl_ctrl takes the mean over all samples, padding samples included.": (
            bool(algorithm.get("use_kl_in_reward", False)) and adaptive
        ),
        "a critic forms its own mini-batches.": bool(getattr(trainer, "use_critic", False)),
        "a distillation loss may count padding samples.": bool(_block(config, "distillation").get("enabled", False)),
        "the loss of multi-token prediction may count padding samples.": bool(
            _block(model, "mtp").get("enable", False)
        ),
        "the router's auxiliary loss counts every token, padding included.": (
            transformer.get("moe_router_load_balancing_type", "none") != "none"
            or bool(transformer.get("moe_z_loss_coeff", None))
        ),
        f"routers of {family} may have an expert bias, whose update counts every token, padding included.": (
            family not in UNBIASED_ROUTERS or bool(transformer.get("moe_router_enable_expert_bias", False))
        ),
    }
    return next((sentence for sentence, holds in refusals.items() if holds), None)


def _block(config: Any, name: str) -> Any:
    """Return a part of a configuration; an empty one where it is missing."""
    block = config.get(name, None)
    return {} if block is None else block


def _model_type(model: Any) -> str:
    from transformers import AutoConfig

    trusted = bool(model.get("trust_remote_code", False))
    return str(AutoConfig.from_pretrained(str(model.path), trust_remote_code=trusted).model_type)


def with_padding_samples(batch: Any, samples: int, eos_token_id: int) -> Any:
    """Return v1's batch with padding samples behind its own, so many samples in all, stored where theirs are."""
    from verl.trainer.ppo import padding_utils

    of_verl = padding_utils.SYNTHETIC_PADDING_SEQ_LEN
    padding_utils.SYNTHETIC_PADDING_SEQ_LEN = PADDING_TOKENS
    try:
        # It fills up to a multiple of a number of samples: of this one, which is more than there are.
        return padding_utils.upsample_batch_to_divisible_size(batch, samples, eos_token_id)
    finally:
        padding_utils.SYNTHETIC_PADDING_SEQ_LEN = of_verl


@contextlib.contextmanager
def mini_batches_of(workers: Any, samples: int) -> Iterator[None]:
    """Let the actor's workers cut their shares into mini-batches of so many samples on all ranks together."""

    def cut(original: Any, batch: Any, *arguments: Any, **more: Any) -> Any:
        batch.extra_info["mini_batch_size"] = samples
        return original(batch, *arguments, **more)

    undo = wrap(workers, "update_actor", cut)
    try:
        yield
    finally:
        undo()
