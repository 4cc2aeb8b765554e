"""verl's own `_balance_batch` with our packing after it: rules, mini-batches and samples are verl's."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.packing import RankSequences, packed_micro_batches
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.layout import BatchLayout
from moe_rl.core.native import native_core
from moe_rl.core.trace import RoutingTrace
from moe_rl.frameworks.run_settings import Settings
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.registry import make_planner
from moe_rl.study.options import SimulationOptions
from moe_rl.study.plan_and_price import pricing_of
from moe_rl.study.scenario import Scenario, state_scenario

pytestmark = [pytest.mark.framework, pytest.mark.filterwarnings("ignore")]  # of Ray and verl's engines, on import
verl = pytest.importorskip("verl")
torch = pytest.importorskip("torch")
needs_core = pytest.mark.skipif(native_core() is None, reason="packing needs the C++ core")

RANKS, MINI_BATCHES, SAMPLES, BUDGET = 4, 2, 64, 2048
LONG_BUDGET = 16384
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


def settings_of(ranks_per_node: int = 4) -> Settings:
    return Settings(balancer=BalancerConfig(ranks_per_node=ranks_per_node))


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


def balanced(config: Any, lengths: np.ndarray, *, ours: bool, ranks_per_node: int = 4) -> Any:
    from verl.trainer.ppo import ray_trainer

    from moe_rl.frameworks.verl.driver import install

    undo = install(ray_trainer, "RayPPOTrainer", settings_of(ranks_per_node)) if ours else lambda: None
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
        ({"use_dynamic_bsz": False}, "micro-batches hold a fixed number of samples"),
        ({"shuffle": True}, "actor.shuffle draws mini-batches at random within each rank"),
        ({"use_prefix_grouper": True}, "use_prefix_grouper keeps the samples of a prompt on one rank"),
        ({"megatron": None}, "moe_rl balances only verl's Megatron engine"),
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


def topical_trace(lengths: np.ndarray, seed: int) -> RoutingTrace:
    """Routes [tokens, 4, 2] of sequences that favor a topic's experts, 16 experts."""
    rng = np.random.default_rng(seed)
    popularity = rng.dirichlet(np.full(16, 0.7), size=(6, 4))
    sequences = []
    for length in lengths:
        of_topic = np.log(popularity[rng.integers(6)] + 1e-9)
        drawn = of_topic + rng.gumbel(size=(int(length), 4, 16))
        sequences.append(np.argsort(-drawn, axis=2)[:, :, :2].astype(np.uint8))
    return RoutingTrace.from_sequences(sequences, num_experts=16)


def dealt_by_workers(layout: BatchLayout, scenario: Scenario, home_rank: np.ndarray) -> BatchLayout:
    """The layout after workers' own function has dealt the sequences of every rank, with these homes."""
    problem, micro_batch = scenario.problem, layout.micro_batch.copy()
    own_sequences = [np.flatnonzero(layout.dp_rank == rank) for rank in range(RANKS)]
    everyone = []
    for rank, own in enumerate(own_sequences):
        batches = [np.flatnonzero(layout.micro_batch[own] == number) for number in range(layout.num_micro_batches)]
        of_rank = RankSequences.of(
            problem.sequence_load.of(own), home_rank, tokens=problem.sequence_tokens[own].tolist(),
            topology=problem.topology, by_rank=False, dp_rank=rank, stage=0, micro_batches=batches,
        )  # fmt: skip
        everyone.append(of_rank)
    dealt = packed_micro_batches(
        everyone, config=BalancerConfig(ranks_per_node=2), model=problem.model, ep_size=RANKS, num_ep_groups=1,
        token_budget=layout.token_budget, setting=None,
    )  # fmt: skip
    assert dealt is not None
    for rank, own in enumerate(own_sequences):
        micro_batch[own] = dealt[rank]
    return replace(layout, micro_batch=micro_batch, order=np.arange(len(micro_batch), dtype=np.int32))


@needs_core
@pytest.mark.lengthy
@pytest.mark.parametrize("seed", range(3))
def test_what_verls_driver_and_workers_pack_is_priced_as_simulate_says(config: Any, seed: int, tmp_path: Any) -> None:
    """Sequences as long as the budget allows, two nodes: verl's own `_balance_batch`, ours, then the workers' deal."""
    from moe_rl.frameworks.verl.driver import COLUMN

    config.actor_rollout_ref.actor.ppo_mini_batch_size = SAMPLES // 2  # one mini-batch
    shape = {**MODEL, "hidden_size": 2048, "moe_intermediate_size": 1024, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "num_key_value_heads": 4, "head_dim": 128}))
    config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = LONG_BUDGET
    lengths = np.clip(8 * lengths_of(seed), 64, LONG_BUDGET)
    packed = balanced(config, lengths, ours=True, ranks_per_node=2)
    options = SimulationOptions(
        model=str(tmp_path), expert_model_parallel_size=RANKS, num_ep_groups=1, ranks_per_node=2, batch="recorded",
        micro_batch_tokens=LONG_BUDGET, policy=["static", "moe-rl"],
    )  # fmt: skip
    scenario = state_scenario(topical_trace(lengths, seed), options, lambda *_: None)
    problem, sequence = scenario.problem, packed.batch["index"].numpy()
    micro_batch, dp_rank = np.empty((2, SAMPLES), np.int32)
    micro_batch[sequence] = packed.batch[COLUMN].numpy()
    dp_rank[sequence] = np.repeat(np.arange(RANKS), SAMPLES // RANKS)
    of_driver = BatchLayout(
        micro_batch=micro_batch, dp_rank=dp_rank, order=np.arange(SAMPLES, dtype=np.int32),
        num_micro_batches=int(micro_batch.max()) + 1, num_dp_ranks=RANKS, token_budget=LONG_BUDGET,
    )  # fmt: skip
    homes = make_planner("moe-rl-unpacked").plan(on_layout(problem, of_driver)).placement.home_rank
    run = on_layout(problem, dealt_by_workers(of_driver, scenario, homes))
    unpacked = make_planner("moe-rl-unpacked")
    plans = {
        "simulated": make_planner("moe-rl").plan(problem),
        "run": unpacked.plan(run),
        "verl's": unpacked.plan(problem),
    }
    assert plans["simulated"].layout.num_micro_batches > 1
    simulate, _ = pricing_of(scenario, plans)
    policies = simulate(scenario.training_step.setting).policies
    step_s = {name: policies[name].step_time_s for name in plans}
    assert abs(step_s["run"] / step_s["simulated"] - 1.0) <= 0.01, step_s
    assert step_s["run"] < 0.99 * step_s["verl's"], step_s


def on_layout(problem: PlanProblem, layout: BatchLayout) -> PlanProblem:
    assert problem.load_of_layout is not None
    return replace(problem, layout=replace(layout, fixed=True), load=problem.load_of_layout(layout))


class Keys:
    """What v1 hands over of a batch: keys, and lengths as their tags."""

    def __init__(self, lengths: np.ndarray, fields: list[str] | None) -> None:
        self.tags = [{"seq_len": int(length)} for length in lengths]
        self.keys = [f"sample {number}" for number in range(len(lengths))]
        self.partition_id, self.fields = "train", fields

    def reorder(self, order: list[int]) -> None:
        self.keys = [self.keys[index] for index in order]


@needs_core
@pytest.mark.parametrize("fields", [None, ["input_ids"]], ids=str)
def test_v1_reorders_keys_and_puts_micro_batches_beside_their_fields(
    config: Any, fields: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.utils import transferqueue_utils

    from moe_rl.frameworks.verl.driver import COLUMN, DriverState, _pack, packing_of

    lengths, store = lengths_of(0), dict[tuple[str, str], int]()

    def kv_batch_put(*, keys: list[str], partition_id: str, fields: Any) -> None:
        assert list(fields.keys()) == [COLUMN]
        store.update({(partition_id, key): int(number) for key, number in zip(keys, fields[COLUMN], strict=True)})

    monkeypatch.setattr(transferqueue_utils, "tq", SimpleNamespace(kv_batch_put=kv_batch_put))
    batch = Keys(lengths, fields)
    driver = DriverState(packing=packing_of(config, num_dp_ranks=RANKS, settings=settings_of()))
    assert _pack(batch, driver, SimpleNamespace(config=config)) is batch
    assert driver.mini_batch_size is None
    assert sorted(batch.keys) == sorted(f"sample {number}" for number in range(SAMPLES))
    assert batch.keys != [f"sample {number}" for number in range(SAMPLES)]
    assert batch.fields == (None if fields is None else ["input_ids", COLUMN])
    # A worker that fetches by key has v0's micro-batches: none over the budget, as many on every rank.
    shape = RANKS, MINI_BATCHES, -1
    tokens = np.array([lengths[int(key.split()[1])] for key in batch.keys]).reshape(shape)
    micro_batch = np.array([store["train", key] for key in batch.keys]).reshape(shape)
    for number in range(MINI_BATCHES):
        assert len({int(rank.max()) for rank in micro_batch[:, number]}) == 1
        for rank in range(RANKS):
            held = np.bincount(micro_batch[rank, number], weights=tokens[rank, number])
            assert 0 < held.min() <= held.max() <= BUDGET


@pytest.mark.parametrize("shape", ["[S]", "[S, 1]", "nested"])
@pytest.mark.parametrize("others", [[], [(True, 2)], [(False, 2)], [(True, 3)]], ids=str)
def test_workers_take_the_drivers_micro_batches_where_all_ranks_can(
    others: list[tuple[bool, int]], shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """v0's column has one dimension, and TransferQueue hands v1's back with two or as rows."""
    from moe_rl.balancing import exchange
    from moe_rl.frameworks.verl.driver import COLUMN, micro_batches_of_column

    tokens = [torch.arange(length) for length in (30, 20, 10)]
    column = torch.tensor([1, 0, 1])
    if shape == "[S, 1]":
        column = column[:, None]
    elif shape == "nested":
        column = torch.nested.as_nested_tensor([row[None] for row in column], layout=torch.jagged)
    data = {"input_ids": torch.nested.as_nested_tensor(tokens, layout=torch.jagged), COLUMN: column}
    monkeypatch.setattr(exchange, "gathered", lambda mine: [mine, *others])
    agreed = all(other == (True, 2) for other in others)
    assert micro_batches_of_column(data, 40) == ([[1], [0, 2]] if agreed else None)
    assert micro_batches_of_column(data, 39) is None  # 30 + 10 tokens are over the budget
    del data[COLUMN]
    assert micro_batches_of_column(data, 40) is None
