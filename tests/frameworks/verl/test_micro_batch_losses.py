"""Which of verl's losses depend on the samples that share a micro-batch: its own functions say."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from moe_rl.frameworks.verl.micro_batch_losses import why_micro_batches_matter

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.framework, pytest.mark.filterwarnings("ignore")]
SAMPLES, CUTS = 8, ([range(4), range(4, 8)], [(0, 2, 4, 6, 7), (1, 3, 5)])
"""Samples of a mini-batch, and two ways to cut it into micro-batches."""


def loss_of(cut: Any, mode: str, *, loss_agg_mode: str, loss_scale_factor: int | None) -> float:
    """The loss of a mini-batch: of every micro-batch with responses padded to its longest, as verl's workers do."""
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    from verl.workers.config import ActorConfig, PolicyLossConfig

    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([3, 11, 5, 17, 4, 29, 8, 21])
    width = int(lengths.max())
    mask = torch.arange(width) < lengths[:, None]
    old, new, advantage = (0.3 * torch.randn(SAMPLES, width, generator=generator, dtype=torch.float64) for _ in "abc")
    settings = PolicyLossConfig(loss_mode=mode, clip_cov_ratio=0.1, clip_cov_lb=0.01, kl_cov_ratio=0.1, dro_beta=0.5)
    config = ActorConfig(
        strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss=settings,
        loss_agg_mode=loss_agg_mode, loss_scale_factor=loss_scale_factor,
    )  # fmt: skip
    config.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=int(mask.sum()),
        global_batch_size=SAMPLES,
        loss_scale_factor=loss_scale_factor,
    )
    total = 0.0
    for samples in map(list, cut):
        longest = int(lengths[samples].max())
        torch.manual_seed(0)  # clip_cov draws tokens
        loss, _ = core_algos.get_policy_loss_fn(mode)(
            old_log_prob=(old - 2)[samples, :longest],
            log_prob=(new - 2)[samples, :longest],
            advantages=(advantage * mask)[samples, :longest],
            response_mask=mask[samples, :longest],
            loss_agg_mode=loss_agg_mode,
            config=config,
        )
        total += float(loss)
    return total


@pytest.mark.parametrize(
    "mode",
    ["vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "dro", "cispo", "geo_mean", "clip_cov", "kl_cov"],
)
@pytest.mark.parametrize(
    ("loss_agg_mode", "loss_scale_factor"),
    [
        ("token-mean", None),
        ("seq-mean-token-mean", None),
        ("seq-mean-token-sum-norm", None),
        ("seq-mean-token-sum-norm", 1024),
    ],
)
def test_losses_that_micro_batches_change_are_those_that_are_named(
    mode: str, loss_agg_mode: str, loss_scale_factor: int | None
) -> None:
    one, other = (loss_of(cut, mode, loss_agg_mode=loss_agg_mode, loss_scale_factor=loss_scale_factor) for cut in CUTS)
    reason = why_micro_batches_matter(mode, loss_agg_mode, loss_scale_factor)
    if mode == "sapo":  # always seq-mean-token-mean; only the entropy and KL terms beside it follow loss_agg_mode
        reason = None
    assert (reason is not None) == (abs(one - other) > 1e-6 * abs(one)), (one, other, reason)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "Set actor.loss_scale_factor to a constant"),
        ({"policy_loss": {"loss_mode": "moe_rl_gmpo"}}, "loss_mode=moe_rl_gmpo takes the mean"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm", "use_dynamic_bsz": False}, ""),
        ({"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 1024}, ""),
        ({}, ""),
    ],
    ids=["longest response", "gmpo", "fixed micro-batches", "constant", "defaults"],
)
def test_a_run_that_packs_says_so_once(changes: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture) -> None:
    from omegaconf import OmegaConf

    from moe_rl.balancing.config import BalancerConfig
    from moe_rl.frameworks.run_settings import Settings
    from moe_rl.frameworks.verl.driver import install

    actor = {"use_dynamic_bsz": True, "loss_agg_mode": "token-mean", **changes}
    config = OmegaConf.create({"actor_rollout_ref": {"actor": actor, "model": {}}, "trainer": {}})

    class Trainer:
        """verl's, as far as the hook looks: only the losses' settings are right, so it says why nothing is packed."""

        def __init__(self) -> None:
            self.config = config
            self.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 1]})

        def _balance_batch(self, batch: Any) -> None:
            pass

        def _update_actor(self, batch: Any) -> None:
            pass

    undo = install(SimpleNamespace(Trainer=Trainer), "Trainer", Settings(balancer=BalancerConfig()))  # type: ignore[arg-type]
    trainer = Trainer()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            trainer._balance_batch(SimpleNamespace(tags=[]))
    undo()
    said = [line for line in caplog.messages if "packing changes this loss" in line]
    assert len(said) == bool(words)
    assert words in "".join(said)
