"""verl's own `_balance_batch` with our packing after it: rules, mini-batches and samples are verl's."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moe_rl.balancing.config import BalancerConfig
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.native import native_core
from moe_rl.frameworks.run_settings import Settings

pytestmark = [pytest.mark.framework, pytest.mark.filterwarnings("ignore")]  # of Ray and verl's engines, on import
verl = pytest.importorskip("verl")
torch = pytest.importorskip("torch")
needs_core = pytest.mark.skipif(native_core() is None, reason="packing needs the C++ core")

RANKS, MINI_BATCHES, SAMPLES, BUDGET = 4, 2, 64, 2048
MODEL = {
    "model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 2, "hidden_size": 256,
    "moe_intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 1024,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Any) -> Any:
    """verl's configuration, as far as `_balance_batch` and ours read it."""
    from omegaconf import OmegaConf
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(**{name: value for name, value in MODEL.items() if name != "model_type"}).save_pretrained(tmp_path)
    megatron = {
        "tensor_model_parallel_size": 1, "context_parallel_size": 1, "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": None,
    }  # fmt: skip
    actor = {
        "use_dynamic_bsz": True, "shuffle": False, "ppo_mini_batch_size": SAMPLES // MINI_BATCHES // 2,
        "ppo_max_token_len_per_gpu": BUDGET, "megatron": megatron,
    }  # fmt: skip
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": actor, "model": {"path": str(tmp_path)}, "rollout": {"n": 2}},
            "trainer": {"balance_batch": True},
        }
    )


def settings_of(**changes: Any) -> Settings:
    return Settings(balancer=BalancerConfig(ranks_per_node=4, **changes))


def batch_of(lengths: np.ndarray) -> Any:
    from verl import DataProto

    longest = int(lengths.max())
    mask = (torch.arange(longest)[None, :] < torch.from_numpy(lengths)[:, None]).long()
    names = np.array([f"sample {number}" for number in range(len(lengths))], dtype=object)
    return DataProto.from_dict(
        tensors={"attention_mask": mask, "index": torch.arange(len(lengths))}, non_tensors={"uid": names}
    )


def trainer_of(config: Any, module: Any) -> Any:
    """A trainer that was never initialized: `_balance_batch` reads configuration and dispatch info alone."""
    trainer = object.__new__(module.RayPPOTrainer)
    trainer.config, trainer.use_prefix_grouper = config, False
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": list(range(RANKS))})
    return trainer


def lengths_of(seed: int) -> np.ndarray:
    return np.clip(np.exp(np.random.default_rng(seed).normal(5.0, 1.2, SAMPLES)), 8, BUDGET).astype(np.int64)


def balanced(config: Any, lengths: np.ndarray, *, ours: bool) -> Any:
    from verl.trainer.ppo import ray_trainer

    from moe_rl.frameworks.verl.driver import install

    undo = install(ray_trainer, "RayPPOTrainer", settings_of()) if ours else lambda: None
    try:
        batch = batch_of(lengths)
        trainer_of(config, ray_trainer)._balance_batch(batch, metrics={})
    finally:
        undo()
    return batch


@needs_core
@pytest.mark.lengthy
@pytest.mark.parametrize("seed", range(3))
def test_mini_batches_hold_verls_samples_and_ranks_as_many_as_before(config: Any, seed: int) -> None:
    from moe_rl.frameworks.verl.driver import COLUMN

    lengths = lengths_of(seed)
    plain, packed = (balanced(config, lengths, ours=ours) for ours in (False, True))
    shape = RANKS, MINI_BATCHES, -1
    before, after = (batch.batch["index"].numpy().reshape(shape) for batch in (plain, packed))
    assert sorted(after.ravel()) == list(range(SAMPLES))
    assert (after != before).any()
    for number in range(MINI_BATCHES):
        assert set(after[:, number].ravel()) == set(before[:, number].ravel())
    # Every field went along with its sample.
    assert (packed.batch["attention_mask"].sum(-1).numpy() == lengths[packed.batch["index"].numpy()]).all()
    assert list(packed.non_tensor_batch["uid"]) == [f"sample {number}" for number in packed.batch["index"].tolist()]
    micro_batch = packed.batch[COLUMN].numpy().reshape(shape)
    for number in range(MINI_BATCHES):
        assert len({int(rank.max()) for rank in micro_batch[:, number]}) == 1
        for rank in range(RANKS):
            tokens = np.bincount(micro_batch[rank, number], weights=lengths[after[rank, number]])
            assert 0 < tokens.min() <= tokens.max() <= BUDGET


@needs_core
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"use_dynamic_bsz": False}, "micro-batches hold a fixed number"),
        ({"shuffle": True}, "actor.shuffle draws mini-batches by rank"),
        ({"use_prefix_grouper": True}, "use_prefix_grouper keeps the samples of a prompt on one rank"),
        ({"megatron": None}, "only verl's Megatron engine is balanced"),
    ],
)
def test_settings_that_leave_nothing_to_pack_are_named(config: Any, changes: dict[str, Any], sentence: str) -> None:
    from omegaconf import OmegaConf

    from moe_rl.frameworks.verl.driver import packing_of

    config.actor_rollout_ref.actor = OmegaConf.merge(config.actor_rollout_ref.actor, changes)
    with pytest.raises(InvalidInputError, match=sentence):
        packing_of(config, num_dp_ranks=RANKS, settings=settings_of())


@needs_core
def test_a_rollout_that_mini_batches_do_not_divide_stays_as_verl_has_it(config: Any) -> None:
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 5
    lengths = lengths_of(0)
    plain, packed = (balanced(config, lengths, ours=ours) for ours in (False, True))
    assert (plain.batch["index"] == packed.batch["index"]).all()


@needs_core
def test_v1_reorders_keys_by_their_tags(config: Any) -> None:
    """v1 hands keys over, and lengths are their tags."""
    from moe_rl.frameworks.verl.driver import _pack, packing_of

    lengths = lengths_of(0)

    class Keys:
        def __init__(self) -> None:
            self.tags = [{"seq_len": int(length)} for length in lengths]
            self.keys = list(range(SAMPLES))

        def reorder(self, order: list[int]) -> None:
            self.keys = [self.keys[index] for index in order]

    batch = Keys()
    _pack(batch, packing_of(config, num_dp_ranks=RANKS, settings=settings_of()), config.actor_rollout_ref)
    assert sorted(batch.keys) == list(range(SAMPLES))
    assert batch.keys != list(range(SAMPLES))


@pytest.mark.parametrize("others", [[], [(True, 2)], [(False, 2)], [(True, 3)]], ids=str)
def test_workers_take_the_drivers_micro_batches_where_all_ranks_can(
    others: list[tuple[bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moe_rl.balancing import exchange
    from moe_rl.frameworks.verl.driver import COLUMN, micro_batches_of_column

    tokens = [torch.arange(length) for length in (30, 20, 10)]
    data = {"input_ids": torch.nested.as_nested_tensor(tokens, layout=torch.jagged), COLUMN: torch.tensor([1, 0, 1])}
    monkeypatch.setattr(exchange, "gathered", lambda mine: [mine, *others])
    agreed = all(other == (True, 2) for other in others)
    assert micro_batches_of_column(data, 40) == ([[1], [0, 2]] if agreed else None)
    assert micro_batches_of_column(data, 39) is None  # 30 + 10 tokens are over the budget
    del data[COLUMN]
    assert micro_batches_of_column(data, 40) is None
