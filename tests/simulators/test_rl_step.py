"""A whole step of RL: its parts, what runs beside what, and how far it is from published totals."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.config import load_cluster, load_model
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.topology import ClusterTopology
from moe_rl.simulators.balanced import BalancedBatch
from moe_rl.simulators.rl_step import RlStep, RlStepSetting, rl_step, rollout_seconds
from moe_rl.simulators.setting import StepSetting

MODEL, H100 = load_model("qwen3-30b-a3b").spec, load_cluster("h100")
LENGTHS = np.random.default_rng(0).integers(200, 4000, 256)
COLOCATED = RlStepSetting(train_gpus=32, engine_size=4)


def step_of(setting: RlStepSetting, lengths: np.ndarray = LENGTHS, *, update_s: float = 60.0) -> RlStep:
    return rl_step(
        MODEL, H100, setting, response_lengths=lengths, prompt_tokens=200.0, forward_s=20.0, update_s=update_s
    )


@given(
    st.sampled_from([0, 1, 2]), st.sampled_from([0, 1]), st.sampled_from([1, 2]), st.floats(0, 50), st.floats(0.1, 1)
)
def test_a_step_is_its_parts_or_the_longer_of_two_sides(
    staleness: int, references: int, epochs: int, reward_s: float, finished: float
) -> None:
    setting = RlStepSetting(
        train_gpus=32,
        rollout_gpus=32,
        engine_size=4,
        staleness=staleness,
        reference_passes=references,
        update_epochs=epochs,
        reward_s=reward_s,
        finished_share=finished,
    )
    step = step_of(setting)
    assert all(seconds >= 0 for seconds in step.parts_s.values())
    total = sum(step.parts_s.values())
    assert step.step_time_s <= total * (1 + 1e-12)
    if staleness == 0:
        assert step.step_time_s == pytest.approx(total)
    else:
        assert step.step_time_s >= max(step.rollout_s, step.training_s)
    assert step.parts_s["update"] == epochs * 60.0
    assert step.parts_s["reference"] == references * 20.0


def test_balancing_the_update_brings_no_more_to_the_step_than_its_share() -> None:
    slow, fast = step_of(COLOCATED, update_s=60.0), step_of(COLOCATED, update_s=40.0)
    assert 1.0 < slow.step_time_s / fast.step_time_s < 1.5
    beside = replace(COLOCATED, rollout_gpus=8, staleness=1, rollout_tokens_per_s=10.0)
    assert step_of(beside, update_s=40.0).step_time_s == step_of(beside, update_s=60.0).step_time_s  # rollout-bound


def test_a_measured_rate_is_taken_as_it_is() -> None:
    measured = replace(COLOCATED, rollout_tokens_per_s=500.0, weight_sync_s=3.0)
    parts = step_of(measured).parts_s
    assert parts["rollout"] == pytest.approx(LENGTHS.sum() / (500 * 32))
    assert parts["weight_sync"] == 3.0


def test_longer_answers_take_longer_and_cutting_the_tail_saves_time() -> None:
    def seconds(lengths: np.ndarray, **changes: float) -> float:
        return rollout_seconds(MODEL, H100, replace(COLOCATED, **changes), lengths, 200.0)

    assert seconds(2 * LENGTHS) > seconds(LENGTHS)
    tail = np.append(LENGTHS, 30_000)
    assert seconds(tail) > 2 * seconds(LENGTHS)
    assert seconds(tail, finished_share=0.99) <= seconds(LENGTHS) * 1.05
    many = np.repeat(LENGTHS, 200)  # where samples do not fit the cache they take turns
    assert seconds(np.repeat(many, 2)) == pytest.approx(2 * seconds(many), rel=0.1)
    assert seconds(np.zeros(0, np.int64)) == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"staleness": 1}, "needs rollout_gpus of their own"),
        ({"engine_size": 5}, "engine_size 5 does not divide the 32 rollout GPUs"),
        ({"finished_share": 0.0}, "finished_share must lie in"),
        ({"reward_s": -1.0}, "reward_s must not be negative"),
        ({"rollout_tokens_per_s": 0.0}, "rollout_tokens_per_s must be positive"),
    ],
)
def test_contradictory_facts_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        replace(COLOCATED, **changes)


def test_weights_that_fit_no_engine_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="does not hold the weights"):
        rollout_seconds(load_model("deepseek-v3").spec, H100, COLOCATED, LENGTHS, 0.0)


PUBLISHED = [
    # model, train GPUs, rollout GPUs (None: the same), engine size, samples, mean and longest sequence, tokens per
    # rank, setting, EP, seconds
    ("qwen3-30b-a3b", 32, None, 4, 2048, 3154, 4096, 2048, {"tensor_model_parallel_size": 2}, 8, 225.0),
    ("qwen3-30b-a3b", 16, 16, 2, 2048, 3158, 4096, 4096, {"pipeline_model_parallel_size": 2}, 8, 244.0),
    ("qwen3-235b-a22b", 128, None, 16, 512, 5671, 8192, 2048, {"tensor_model_parallel_size": 2,
     "context_parallel_size": 2, "pipeline_model_parallel_size": 8, "recompute": "full"}, 16, 506.0),
    ("qwen3-235b-a22b", 128, 128, 8, 512, 5691, 8192, 2048, {"tensor_model_parallel_size": 4,
     "pipeline_model_parallel_size": 8, "recompute": "full"}, 16, 241.0),
]  # fmt: skip
"""NVIDIA-NeMo/RL@06beed9:docs/about/performance-summary.md: GRPO on H100, v0.4, on-policy and one step off; totals
alone. The half of the GPUs that trains and the half that decodes are taken to be equal; 235B computes its activations
again (@1b37cb8:examples/configs/recipes/llm/performance/grpo-qwen3-235b-16n8g.yaml)."""


def forecast(row: tuple) -> RlStep:
    name, gpus, rollout_gpus, engine, samples, mean, longest, tokens, layout, ep, _ = row
    model = load_model(name).spec
    setting = StepSetting(dispatcher="alltoall", **layout)
    stages = setting.pipeline_model_parallel_size
    topology = ClusterTopology(hardware=H100, ep_size=ep, num_ep_groups=gpus // stages // ep, ranks_per_node=8)
    batch = BalancedBatch.of(model, topology, setting, tokens_per_rank=tokens, sequence_length=mean)
    micro_batches = round(samples * mean / (tokens * gpus // stages))
    update, forward = (
        batch.step(topology, one, num_micro_batches=micro_batches).step_time_s
        for one in (setting, replace(setting, forward_only=True))
    )
    lengths = np.clip(np.random.default_rng(0).normal(mean, mean / 3, samples), 1, longest).astype(np.int64)
    apart = {} if rollout_gpus is None else {"rollout_gpus": rollout_gpus, "staleness": 1}
    return rl_step(
        model,
        H100,
        RlStepSetting(train_gpus=gpus, engine_size=engine, **apart),
        response_lengths=lengths,
        prompt_tokens=0.0,
        forward_s=forward,
        update_s=update,
    )


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row[0]}-{row[1]}")
def test_published_totals_are_met_within_a_factor(row: tuple) -> None:
    """Nothing is fitted on them, and the parts are not published: the page says how wide of them the forecast is."""
    assert 0.4 < forecast(row).step_time_s / row[-1] < 2.5


VERL_MODEL, H20 = load_model("qwen3-30b-a3b").spec, load_cluster("h20")
VERL = {"rollout": 348.05, "log_prob": 28.73, "reference": 20.86, "update": 86.27}
"""verl-project/verl@5a79090:docs/advance/fully_async.md, "30B Model Mode Experiment", colocate sync: Qwen3-30B-A3B-Base
on 128 H20, 512 prompts x 16 samples of at most 8192 tokens, mini-batches of 128 prompts. The mean length is not there.
Layout and `enforce_eager` are those of the asynchronous run beside it, in verl/experimental/fully_async_policy/shell,
@d23b282:grpo_30b_a3b_base_math_megatron_96_32.sh."""
SYNCS = {"qwen3-30b-a3b": (4.38, 15.76), "qwen3-235b-a22b": (23.70, 58.57)}
"""The same page: weight sync on H20 in seconds, with the checkpoint engine and without."""


def verl_step(mean_length: float) -> RlStep:
    setting = StepSetting(tensor_model_parallel_size=2, context_parallel_size=2, optimizer_offload_fraction=1.0)
    topology = ClusterTopology(hardware=H20, ep_size=8, num_ep_groups=16)
    batch = BalancedBatch.of(VERL_MODEL, topology, setting, tokens_per_rank=5120, sequence_length=round(mean_length))
    updates, micro_batches = 4, round(8192 * mean_length / (5120 * 128 * 4))
    update, forward = (
        batch.step(topology, one, num_micro_batches=micro_batches).step_time_s
        for one in (setting, replace(setting, forward_only=True))
    )
    lengths = np.clip(np.random.default_rng(0).normal(mean_length, 0.6 * mean_length, 8192), 1, 8192)
    return rl_step(
        VERL_MODEL,
        H20,
        RlStepSetting(train_gpus=128, engine_size=4, rollout_cuda_graph=False),
        response_lengths=lengths.astype(np.int64),
        prompt_tokens=150.0,
        forward_s=updates * forward,
        update_s=updates * update,
    )


def test_a_published_breakdown_is_met_part_by_part() -> None:
    """The length that the two published passes imply on average then tests the update and the rollout."""
    passes = (VERL["log_prob"] + VERL["reference"]) / 2
    steps = {length: verl_step(length) for length in range(2000, 6001, 250)}
    length = min(steps, key=lambda one: abs(steps[one].parts_s["reference"] - passes))
    parts = steps[length].parts_s
    assert 3000 < length < 5000  # of at most 8192
    assert parts["update"] == pytest.approx(VERL["update"], rel=0.2)
    assert parts["rollout"] == pytest.approx(VERL["rollout"], rel=0.2)
    with_graphs = rollout_seconds(
        VERL_MODEL, H20, RlStepSetting(train_gpus=128, engine_size=4), np.full(8192, length), 150.0
    )
    assert with_graphs < parts["rollout"]


@pytest.mark.parametrize("name", SYNCS)
def test_weights_take_no_longer_than_published_syncs_but_the_same_order(name: str) -> None:
    step = rl_step(
        load_model(name).spec,
        H20,
        RlStepSetting(train_gpus=64, rollout_gpus=64, engine_size=16),
        response_lengths=LENGTHS,
        prompt_tokens=0.0,
        forward_s=1.0,
        update_s=3.0,
    )
    quick, slow = SYNCS[name]
    assert 0.5 * quick < step.parts_s["weight_sync"] < slow
