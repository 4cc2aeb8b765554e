"""A whole step of RL: its parts, what runs beside what, and how far it is from published totals."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fit_rl_step import PublishedStep
from moe_rl.config import load_cluster, load_model
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.topology import ClusterTopology
from moe_rl.simulators.balanced import BalancedBatch
from moe_rl.simulators.rl_step import RlStep, RlStepSetting, framework_seconds, rl_step, rollout_of
from moe_rl.simulators.rl_update import first_fit, trainer_seconds
from moe_rl.simulators.setting import StepSetting, TrainingRun

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


def seconds(lengths: np.ndarray, **changes: object) -> float:
    return rollout_of(MODEL, H100, replace(COLOCATED, **changes), lengths, 200.0).seconds


def test_longer_answers_take_longer_and_cutting_the_tail_saves_time() -> None:
    assert seconds(2 * LENGTHS) > seconds(LENGTHS)
    tail = np.append(LENGTHS, 30_000)
    assert seconds(tail) > 2 * seconds(LENGTHS)
    assert seconds(np.tile(tail, 8), finished_share=0.9) < seconds(np.tile(tail, 8))
    many = np.repeat(LENGTHS, 200)  # where samples do not fit the cache they take turns
    assert seconds(np.repeat(many, 2)) == pytest.approx(2 * seconds(many), rel=0.1)
    assert seconds(np.zeros(0, np.int64)) == 0.0
    assert seconds(np.zeros(5, np.int64)) == 0.0


@given(st.integers(1, 400), st.sampled_from([1.0, 0.9, 0.5, 0.2]), st.sampled_from([1, 3, 256]), st.integers(0, 3))
def test_every_token_is_decoded_once(count: int, share: float, running: int, staleness: int) -> None:
    """What a step decodes is what its N finished samples hold, up to what the samples in flight hold beforehand."""
    lengths = np.random.default_rng(count).integers(1, 2000, count)
    apart = {"rollout_gpus": 32, "staleness": staleness} if staleness else {}
    setting = replace(COLOCATED, finished_share=share, max_running_samples=running, **apart)
    decoded = rollout_of(MODEL, H100, setting, lengths, 100.0).decoded_tokens
    total = float(lengths.sum())
    # Over the 4 counted steps the samples in flight may gain or lose at most all they hold.
    spare = setting.in_flight(count) / 4 * 2000 if setting.in_flight(count) > count else 0.0
    assert abs(decoded - total) <= spare + 1e-6 * total


def test_more_in_flight_hides_the_tail_down_to_the_throughput_of_the_engines() -> None:
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(7.0, 1.0, 512), 1, 16_000).astype(np.int64)
    apart = [seconds(lengths, rollout_gpus=32, staleness=depth) for depth in (1, 2, 4, 8, 100)]
    assert apart[0] > 1.2 * apart[2]
    for shallow, deep in pairwise(apart):
        assert deep <= 1.02 * shallow
    # Never faster than all slots filled all the time.
    engine = replace(COLOCATED, rollout_gpus=32)
    full = rollout_of(MODEL, H100, engine, np.full(20_000, int(lengths.mean())), 200.0)
    assert apart[-1] >= 0.8 * full.seconds * len(lengths) / 20_000
    partial = [seconds(lengths, finished_share=share) for share in (1.0, 0.8, 0.5)]
    assert partial == sorted(partial, reverse=True)


def test_the_engine_and_what_it_is_given() -> None:
    assert seconds(LENGTHS, rollout_precision="fp8") < seconds(LENGTHS)
    # Few tokens per expert: a hot expert is read once, and cold ones are read less often.
    assert seconds(LENGTHS, rollout_imbalance=1.5) <= 1.01 * seconds(LENGTHS)
    assert seconds(LENGTHS, draft_tokens=3, accepted_tokens=2.5) < seconds(LENGTHS)
    assert seconds(LENGTHS, draft_tokens=3, accepted_tokens=1.0) > seconds(LENGTHS)
    assert seconds(LENGTHS, environment_s=30.0) == pytest.approx(seconds(LENGTHS) + 30.0, rel=0.3)
    few = {"samples_per_prompt": 16}
    assert 0 < seconds(LENGTHS, **few) < seconds(LENGTHS)
    assert seconds(LENGTHS, max_running_samples=4) > seconds(LENGTHS)


def test_a_latent_cache_is_whole_on_every_tensor_parallel_gpu() -> None:
    model = load_model("deepseek-v3").spec
    assert model.latent_cache_width == 576
    setting = RlStepSetting(train_gpus=64, rollout_gpus=64, engine_size=32, rollout_precision="fp8")
    lengths = np.full(4096, 8000)
    apart = rollout_of(model, H100, replace(setting, attention_size=1), lengths, 0.0).seconds
    assert apart < rollout_of(model, H100, setting, lengths, 0.0).seconds


def test_a_step_without_rollout_and_framework_is_its_passes() -> None:
    """rl-step of zero rollout is simulate's update, and nothing else."""
    setting = replace(
        COLOCATED, reference_passes=0, log_prob_passes=0, framework_share=0.0, weight_sync_s=1e-9, offload_s=1e-9
    )
    assert step_of(setting, np.zeros(4, np.int64)).step_time_s == pytest.approx(60.0)


@given(st.floats(0.0, 2.0), st.floats(0.1, 60.0))
def test_the_framework_takes_as_long_whatever_the_policy_saves(share: float, update_s: float) -> None:
    """What balancing saves of a step is what it saves of the passes: time of the framework is not experts' time."""
    setting = replace(COLOCATED, framework_share=share)
    static = step_of(setting)
    framework_s = framework_seconds(setting, forward_s=20.0, update_s=60.0)
    assert static.parts_s["framework"] == framework_s
    balanced = rl_step(
        MODEL, H100, setting, response_lengths=LENGTHS, prompt_tokens=200.0, forward_s=20.0, update_s=update_s,
        static_s=(20.0, 60.0),
    )  # fmt: skip
    assert static.step_time_s - balanced.step_time_s == pytest.approx(60.0 - update_s, abs=1e-6)


@pytest.mark.parametrize(
    ("routes_from", "log_prob_passes", "expected"),
    [
        # Under the policy a forward pass takes 15 s instead of 20, an update 40 s instead of 60.
        ("log_prob", 1, (20, 20, 40)),
        ("log_prob", 2, (20 + 15, 20, 40)),
        ("log_prob", 0, (0, 20, 60)),
        ("rollout", 1, (15, 20, 40)),
        ("rollout", 0, (0, 20, 40)),
        ("previous_pass", 2, (40, 20, 60)),
    ],
)
def test_only_passes_with_known_routes_are_balanced(
    routes_from: str, log_prob_passes: int, expected: tuple[int, int, int]
) -> None:
    setting = replace(COLOCATED, routes_from=routes_from, log_prob_passes=log_prob_passes)
    parts = rl_step(
        MODEL, H100, setting, response_lengths=LENGTHS, prompt_tokens=200.0, forward_s=15.0, update_s=40.0,
        static_s=(20.0, 60.0),
    ).parts_s  # fmt: skip
    assert (parts["log_prob"], parts["reference"], parts["update"]) == expected
    # Its time is that of static placement's passes, whatever is balanced.
    assert parts["framework"] == framework_seconds(setting, forward_s=20.0, update_s=60.0)


def test_state_that_stays_on_the_gpu_takes_no_time_to_offload() -> None:
    def offload_s(*state: str) -> float:
        return step_of(replace(COLOCATED, offloaded_state=state)).parts_s["offload"]

    whole = step_of(COLOCATED).parts_s["offload"]
    assert offload_s() == 0.0
    assert offload_s("optimizer") == pytest.approx(0.75 * whole)  # 12 of 16 bytes of a parameter
    assert offload_s("parameters", "gradients") == pytest.approx(0.25 * whole)
    with pytest.raises(InvalidInputError, match="offloaded_state 'optimiser' is unknown"):
        offload_s("optimiser")


@pytest.mark.parametrize("mini_batches", [1, 4])
def test_lengths_alone_price_what_a_trainer_runs(mini_batches: int) -> None:
    def priced(lengths: np.ndarray = LENGTHS, *, ep_size: int = 8, imbalance: float = 1.0) -> tuple[float, float]:
        return trainer_seconds(
            MODEL, H100, StepSetting(), lengths, train_gpus=32, ep_size=ep_size, micro_batch_tokens=8192,
            mini_batches=mini_batches, imbalance=imbalance,
        )  # fmt: skip

    forward, update = priced()
    assert 0 < forward < update
    skewed = priced(imbalance=2.0)
    assert skewed[0] > forward
    assert skewed[1] > update
    assert priced(np.zeros(0, np.int64)) == (0.0, 0.0)
    with pytest.raises(InvalidInputError, match=r"does not divide the number of training GPUs \(32\)"):
        priced(ep_size=64)


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 120))
def test_first_fit_keeps_every_token_and_the_budget(lengths: list[int], budget: int) -> None:
    bins = first_fit(np.array(lengths, np.int64), budget)
    assert sum(bins) == sum(lengths)
    assert all(held <= budget or held in lengths for held in bins)
    assert sum(2 * held <= budget for held in bins) <= 1  # two half-empty ones would have been one


ROWS = Path(__file__).parents[3] / "shared" / "data" / "rl_steps.json"


@pytest.mark.skipif(not ROWS.exists(), reason="rl_steps.json is not beside this checkout")
def test_published_steps_of_nemo_rl_are_met() -> None:
    """14 totals on H100: mean error at most 15 %, none refused; more GPUs of one model stay faster."""
    rows = json.loads(ROWS.read_text("utf-8"))["points"]
    steps = [PublishedStep(row) for row in rows]
    assert np.mean([abs(step.error) for step in steps]) <= 0.15
    colocated = [one for one in steps if one.row["rollout_gpus"] is None]
    for one in colocated:
        for other in colocated:
            same = one.row["model"] == other.row["model"]
            if (
                same
                and one.row["name"][:12] == other.row["name"][:12]
                and one.row["train_gpus"] < other.row["train_gpus"]
            ):
                assert one.predicted().step_time_s > other.predicted().step_time_s


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"staleness": 1}, "set rollout_gpus"),
        ({"engine_size": 5}, r"--rollout-engine-size \(5\) does not divide the number of rollout GPUs \(32\)"),
        ({"finished_share": 0.0}, "finished_share must be greater than 0"),
        ({"reward_s": -1.0}, "reward_s must be at least 0"),
        ({"rollout_tokens_per_s": 0.0}, "rollout_tokens_per_s must be positive"),
    ],
)
def test_contradictory_facts_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        replace(COLOCATED, **changes)


def test_weights_that_fit_no_engine_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="do not fit on"):
        rollout_of(load_model("deepseek-v3").spec, H100, COLOCATED, LENGTHS, 0.0)


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
    batch = BalancedBatch.of(
        TrainingRun(model=VERL_MODEL, topology=topology, setting=setting),
        tokens_per_rank=5120,
        sequence_length=round(mean_length),
    )
    updates, micro_batches = 4, round(8192 * mean_length / (5120 * 128 * 4))
    update, forward = (
        replace(batch, setting=one).step(micro_batches).step_time_s
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
    share = RlStepSetting(train_gpus=1).framework_share
    passes = (VERL["log_prob"] + VERL["reference"]) / 2 / (1 + share)
    steps = {length: verl_step(length) for length in range(2000, 6001, 250)}
    length = min(steps, key=lambda one: abs(steps[one].parts_s["reference"] - passes))
    parts = steps[length].parts_s
    assert 2000 < length < 5000  # of at most 8192
    assert parts["update"] * (1 + share) == pytest.approx(VERL["update"], rel=0.2)
    assert parts["rollout"] == pytest.approx(VERL["rollout"], rel=0.2)
    with_graphs = rollout_of(
        VERL_MODEL, H20, RlStepSetting(train_gpus=128, engine_size=4), np.full(8192, length), 150.0
    ).seconds
    assert with_graphs < parts["rollout"]


@pytest.mark.parametrize("name", SYNCS)
def test_weights_take_no_longer_than_published_syncs_but_the_same_order(name: str) -> None:
    """verl's take 2 to 3 times what one sender at full rate needs: NeMo-RL's steps leave no room for more."""
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
    assert quick / 3 < step.parts_s["weight_sync"] < slow


def test_an_engine_between_tensor_parallel_and_data_parallel_attention() -> None:
    """Its attention is tensor-parallel over some of its GPUs; over all of them by default."""

    def step(**more: object) -> float:
        setting = RlStepSetting(train_gpus=64, engine_size=16, max_running_samples=4096, **more)  # type: ignore[arg-type]
        return step_of(setting, np.full(4096, 4000)).parts_s["rollout"]

    assert step(attention_size=16) == step()
    # Four key-value heads: on 16 GPUs that attend together every head's cache is held four times.
    assert step(attention_size=4) < step()
