"""Padding samples without verl: which setting is named, and what of verl's is changed while its function runs."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from moe_rl.balancing.driver_packing import PADDING_TOKENS
from moe_rl.frameworks.verl import padding
from moe_rl.frameworks.verl.micro_batch_losses import BY_LONGEST


class Block(dict[str, Any]):
    """A block of a configuration, read by `get` and by attribute as OmegaConf's are."""

    __getattr__ = dict.__getitem__


def trainer_with(**of_actor: Any) -> Any:
    """A stand-in of verl's trainer as far as `why_not_padded` reads it; no setting of the defaults counts padding."""
    actor = Block(megatron=Block(), **of_actor)
    config = Block(actor_rollout_ref=Block(actor=actor, model=Block()), algorithm=None)
    return SimpleNamespace(config=config)


@pytest.mark.parametrize(
    ("of_actor", "reason"),
    [
        ({}, None),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, BY_LONGEST),
        ({"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 1024}, None),
        ({"policy_loss": Block(loss_mode="kl_cov")}, "policy_loss.loss_mode=kl_cov depends on"),
        ({"policy_loss": Block(loss_mode="cispo")}, None),
    ],
)
def test_a_loss_that_padding_samples_change_is_named(
    of_actor: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padding, "_model_type", lambda model: "qwen3_moe")
    sentence = padding.why_not_padded(trainer_with(**of_actor))
    if reason is None:
        assert sentence is None
    else:
        assert sentence is not None
        assert sentence.startswith(reason)


def verls_padding_utils(upsample: Callable[[Any, int, int], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in of verl.trainer.ppo.padding_utils."""
    module: Any = ModuleType("verl.trainer.ppo.padding_utils")
    module.SYNTHETIC_PADDING_SEQ_LEN = 1
    module.upsample_batch_to_divisible_size = upsample
    parent: Any = ModuleType("verl.trainer.ppo")
    parent.padding_utils = module
    for name in ("verl", "verl.trainer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo", parent)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_verls_function_makes_samples_of_our_length_and_then_of_its_own_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def upsample(batch: list[Any], multiple: int, eos_token_id: int) -> list[Any]:
        more = -len(batch) % multiple
        return batch + [(eos_token_id, module.SYNTHETIC_PADDING_SEQ_LEN)] * more

    module = verls_padding_utils(upsample, monkeypatch)
    assert padding.with_padding_samples(["a", "b", "c"], 5, 7) == ["a", "b", "c", *[(7, PADDING_TOKENS)] * 2]
    assert module.SYNTHETIC_PADDING_SEQ_LEN == 1 != PADDING_TOKENS


def test_verls_length_comes_back_after_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def upsample(batch: list[Any], multiple: int, eos_token_id: int) -> list[Any]:
        raise ValueError(module.SYNTHETIC_PADDING_SEQ_LEN)

    module = verls_padding_utils(upsample, monkeypatch)
    with pytest.raises(ValueError, match=str(PADDING_TOKENS)):
        padding.with_padding_samples([], 5, 7)
    assert module.SYNTHETIC_PADDING_SEQ_LEN == 1


def test_workers_cut_by_the_padded_number_only_inside_the_block() -> None:
    workers = SimpleNamespace(update_actor=lambda batch, *, epochs: (batch.extra_info["mini_batch_size"], epochs))
    batch = SimpleNamespace(extra_info={"mini_batch_size": 24, "global_batch_size": 24})
    with padding.mini_batches_of(workers, 32):
        assert workers.update_actor(batch, epochs=1) == (32, 1)
    batch.extra_info["mini_batch_size"] = 24
    assert workers.update_actor(batch, epochs=2) == (24, 2)
    assert batch.extra_info["global_batch_size"] == 24
