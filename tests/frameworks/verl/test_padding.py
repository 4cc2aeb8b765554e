"""Padding samples of verl's trainer v1: ranks get unequal numbers of samples, and losses are plain verl's."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from curves import DRAWS, relative_difference, times_the_yardstick

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.framework, pytest.mark.filterwarnings("ignore")]
RANKS, MINI_BATCHES, SAMPLES = 4, 2, 48


@pytest.mark.multi_rank(world_size=4, case="padding_cases.with_padding_samples", launch="verl")
def test_updates_with_padding_samples_are_plain_verls(outcome: list[Any]) -> None:
    for rank in outcome:
        keys, is_padding = rank["keys"], np.array([tag["is_padding"] for tag in rank["tags"]])
        assert len(keys) == MINI_BATCHES * rank["extra"]["mini_batch_size"] > SAMPLES, "none was needed: blind"
        assert rank["extra"]["global_batch_size"] == SAMPLES // MINI_BATCHES
        assert [key.startswith("pad") for key in keys] == is_padding.tolist()
        real = (~is_padding).reshape(RANKS, MINI_BATCHES, -1).sum(axis=2)
        assert (real.sum(axis=0) == SAMPLES // MINI_BATCHES).all()
        assert real.max() > real.min(), "all ranks have equally many: the test is blind"
        assert times_the_yardstick(rank["plain"], rank["ours"], *rank["yardsticks"]) <= DRAWS
        of_mode = {name: values[4:6] for name, values in rank["plain"].items()}
        assert relative_difference(of_mode, rank["counted"]) > 0.01, "a wrong denominator would go unnoticed"
        assert rank["metrics"]
        for metrics in rank["metrics"]:
            assert metrics["moe_rl/fallback"] == 0


def trainer_of(config: Any, *, use_critic: bool = False) -> Any:
    return SimpleNamespace(config=config, use_critic=use_critic)


def config_of(folder: Path, **changes: Any) -> Any:
    """verl's configuration as far as padding samples depend on it; `changes` by dotted names, __ for a dot."""
    from omegaconf import OmegaConf
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(num_hidden_layers=1).save_pretrained(folder)
    actor = {"loss_agg_mode": "token-mean", "megatron": {"override_transformer_config": {}}}
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": actor, "model": {"path": str(folder)}},
            "algorithm": {"adv_estimator": "grpo", "kl_ctrl": {"type": "fixed"}},
        }
    )
    for name, value in changes.items():
        OmegaConf.update(config, name.replace("__", "."), value, force_add=True)
    return config


ACTOR = "actor_rollout_ref__actor__"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"algorithm__adv_estimator": "gpg"}, "adv_estimator=gpg may count padding samples"),
        ({f"{ACTOR}policy_loss__loss_mode": "geo_mean"}, "loss_mode=geo_mean depends on which sequences"),
        ({f"{ACTOR}policy_loss__loss_mode": "moe_rl_gmpo"}, "loss_mode=moe_rl_gmpo depends on which sequences"),
        ({f"{ACTOR}loss_agg_mode": "seq-mean-token-sum-norm"}, "divides by the longest response of a micro-batch"),
        (
            {"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__type": "adaptive"},
            "takes the mean over all samples",
        ),
        ({"distillation__enabled": True}, "distillation"),
        ({"actor_rollout_ref__model__mtp__enable": True}, "multi-token prediction"),
        (
            {f"{ACTOR}megatron__override_transformer_config__moe_router_load_balancing_type": "aux_loss"},
            "the router's auxiliary loss counts every token",
        ),
        (
            {f"{ACTOR}megatron__override_transformer_config__moe_router_enable_expert_bias": True},
            "routers of qwen3_moe may have an expert bias",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_count_padding_samples_are_named(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    from moe_rl.frameworks.verl.padding import why_not_padded

    assert sentence in (why_not_padded(trainer_of(config_of(tmp_path, **changes))) or "")


def test_common_settings_count_none(tmp_path: Path) -> None:
    from moe_rl.frameworks.verl.padding import why_not_padded

    stated = {f"{ACTOR}loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}loss_scale_factor": 1024}
    for changes in ({}, stated, {f"{ACTOR}policy_loss__loss_mode": "gspo"}, {"algorithm__use_kl_in_reward": True}):
        assert why_not_padded(trainer_of(config_of(tmp_path, **changes))) is None, changes
    assert "critic" in (why_not_padded(trainer_of(config_of(tmp_path), use_critic=True)) or "")


def test_every_estimator_that_is_called_exact_leaves_the_advantages_of_real_samples_alone() -> None:
    """verl's own functions, with and without three padding samples of one uid behind eight real ones."""
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    from moe_rl.frameworks.verl.padding import EXACT_ESTIMATORS

    generator, real, paddings = torch.Generator().manual_seed(0), 8, 3
    mask = (torch.arange(5) < torch.randint(1, 6, (real, 1), generator=generator)).float()
    rewards = torch.randn(real, 5, generator=generator) * mask
    more = torch.zeros(paddings, 5)
    uid = np.array([f"prompt {number // 4}" for number in range(real)] + ["padding"] * paddings, dtype=object)
    for name in EXACT_ESTIMATORS:
        found = []
        for rows, of_rows in ((rewards, mask), (torch.cat([rewards, more]), torch.cat([mask, more]))):
            values, _ = core_algos.get_adv_estimator_fn(name)(
                token_level_rewards=rows.clone(), response_mask=of_rows, index=uid[: len(rows)],
                config=SimpleNamespace(gamma=1.0, get=lambda *_: None),
            )  # fmt: skip
            found.append(values)
        plain, padded = found
        torch.testing.assert_close(padded[:real], plain)
        assert not padded[real:].any()


def test_every_loss_that_is_called_exact_is_the_sum_over_real_samples() -> None:
    """verl's own functions on one micro-batch of a mini-batch whose constants are those of its real samples."""
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    from verl.workers.config import ActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    from moe_rl.frameworks.verl.losses import policy_losses
    from moe_rl.frameworks.verl.padding import EXACT_LOSSES

    generator, real, paddings = torch.Generator().manual_seed(1), 6, 2
    mask = (torch.arange(5) < torch.randint(1, 6, (real, 1), generator=generator)).float()
    columns = [torch.randn(real, 5, generator=generator) * 0.1 - 1.0 for _ in range(2)]
    columns += [torch.randn(real, 1, generator=generator) * mask, mask]
    padded = [torch.cat([column, torch.zeros(paddings, 5)]) for column in columns]
    for name in EXACT_LOSSES:
        ours = policy_losses().get(name)
        loss = ours or core_algos.get_policy_loss_fn(name)
        for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
            config = ActorConfig(
                strategy="megatron", rollout_n=1, use_dynamic_bsz=True, loss_agg_mode=mode,
                policy_loss=PolicyLossConfig(loss_mode=name, dro_beta=0.1),
            )  # fmt: skip
            config.global_batch_info.update(dp_size=2, batch_num_tokens=40, global_batch_size=12)
            values = [
                loss(old, new, advantages, response, loss_agg_mode=mode, config=config)[0]
                for old, new, advantages, response in (columns, padded)
            ]
            torch.testing.assert_close(values[1], values[0], msg=f"{name}, {mode}")
