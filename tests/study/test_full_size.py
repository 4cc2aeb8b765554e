"""A batch of full-size micro-batches is drawn where nothing is said of them, and its speed-up is an interval."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runner import write_npz

import moe_rl
from moe_rl.config import CONFIGS
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.trace import RoutingTrace
from moe_rl.replay import count_sequences
from moe_rl.replay.sequences import concatenate
from moe_rl.study.plan_and_price import imbalance_left_open
from moe_rl.study.traces import open_trace

pytestmark = pytest.mark.lengthy
COUNTDOWN = CONFIGS / "traces" / "countdown-grpo.moetrace"
QUICK = {"cluster": "h100", "policy": ["static", "ultraep"], "seq_length": 4096, "vocab_size": 18992}


def test_with_nothing_said_micro_batches_are_of_full_size() -> None:
    report = moe_rl.simulate(COUNTDOWN, expert_model_parallel_size=16, num_ep_groups=1, **QUICK)
    setting = report.setting
    assert not report.scaled
    assert 0.75 * 8192 <= float(str(setting["tokens_per_rank"])) <= 8192
    assert float(str(report.trace["num_tokens"])) <= float(str(setting["global_batch_tokens"]))
    assert len(report.speedups) == 3
    assert report.speedups[0] == report.best.speedup_vs_static
    assert report.rl_speedup is not None
    assert 1.0 < report.rl_speedup < max(report.speedups)
    assert any("sampled, with replacement" in note for note in report.notes)
    seconds = report.baseline.breakdown_s or {}
    once = (seconds["step_fixed"] + seconds["optimizer"]) / (report.baseline.step_time_s or 1.0)
    assert any(
        note.startswith(f"{once:.0%} of the step time under static placement (optimizer,") for note in report.notes
    )


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording without a layout that fills a tenth of a full batch."""
    path = tmp_path_factory.mktemp("recording") / "run.npz"
    return write_npz(path, sequences=48, tokens=160, experts=32)


ASKED = {"expert_model_parallel_size": 8, "cluster": "h100", "policy": "static,moe-rl"}


@pytest.mark.parametrize(
    "spelled",
    [
        {"micro_batch_tokens": 8192},
        {"batch": "drawn"},
        {"tokens_per_rank": 8192},
        {"batch": "drawn", "ep_group_tokens": 2048, "tokens_per_rank": 8192},
        {"micro_batch_tokens": 8192, "global_batch_tokens": 4 * 8 * 8192 * 15 // 16},
    ],
    ids=str,
)
def test_one_batch_gives_one_figure_however_it_is_spelled(recording: Path, spelled: dict[str, Any]) -> None:
    reports = [moe_rl.simulate(recording, **ASKED, **given) for given in ({}, spelled)]
    plain, other = (report.as_json()["policies"] for report in reports)
    assert [policy["step_time_s"] for policy in plain.values()] == [p["step_time_s"] for p in other.values()]
    assert reports[0].rl_speedup == reports[1].rl_speedup


def test_a_point_of_a_sweep_and_a_tuned_setting_have_the_figure_of_a_simulation(recording: Path) -> None:
    alone = moe_rl.simulate(recording, **ASKED)
    (point,) = moe_rl.sweep(recording, {"micro_batch_tokens": [8192]}, jobs=1, **ASKED).points
    assert dict(point.policies) == {row.policy: row.speedup_vs_static for row in alone.policies}
    layout = {"expert_model_parallel_size": 8, "cluster": "h100", "moe_token_dispatcher_type": "alltoall"}
    whole = {"tensor_model_parallel_size": 1, "context_parallel_size": 1, "pipeline_model_parallel_size": 1}
    same = {**layout, **whole, "micro_batch_tokens": 8192, "recompute_granularity": "full"}
    simulated = moe_rl.simulate(recording, policy="static", **same)
    tuned = moe_rl.tune(recording, gpus=8, jobs=1, **same).best
    # A search prices balanced routing.
    seconds = float(str(simulated.trace["num_tokens"])) / tuned.tokens_per_s_per_gpu / 8
    assert seconds == pytest.approx(simulated.yardstick("forced_balance").step_time_s, rel=0.01)


def test_packed_rows_cost_the_same_in_a_search_of_layouts_and_in_a_simulation(tmp_path: Path) -> None:
    trace = write_npz(tmp_path / "run.npz", sequences=48, tokens=160, experts=32, layers=24, top_k=4)
    ratios = []
    for packed in (False, True):
        same: dict[str, Any] = {
            "model": "gpt-oss-20b", "cluster": "h100", "expert_model_parallel_size": 8, "micro_batch_tokens": 8192,
            "tensor_model_parallel_size": 1, "context_parallel_size": 1, "pipeline_model_parallel_size": 1,
            "moe_token_dispatcher_type": "alltoall", "recompute_granularity": "full", "packed_sequences": packed,
        }  # fmt: skip
        simulated = moe_rl.simulate(trace, policy="static", **same)
        tuned = moe_rl.tune(trace, gpus=8, jobs=1, **same)
        seconds = float(str(simulated.trace["num_tokens"])) / tuned.best.tokens_per_s_per_gpu / 8
        ratios.append(seconds / simulated.yardstick("forced_balance").step_time_s)
        for sentences in (simulated.all_cautions, tuned.cautions):
            assert any("has attention sinks" in sentence for sentence in sentences) != packed
    assert ratios == pytest.approx([1.0, 1.0], rel=0.01)


def test_eplb_pays_a_twentieth_of_its_moves_by_itself(recording: Path) -> None:
    asked = {**ASKED, "policy": "static,eplb", "batch": "recorded", "micro_batch_tokens": 320}
    moved = [
        moe_rl.simulate(recording, **asked, policy_option=option).policies[1].breakdown_s["reorder"]
        for option in ([], ["eplb.reorder_interval=1"], ["eplb.reorder_interval=5"])
    ]
    # Its copies travel in every step, its homes once in an interval.
    homes = (moved[1] - moved[2]) / (1 - 1 / 5)
    assert homes > 0
    assert moved[0] == pytest.approx(moved[1] - homes * (1 - 1 / 20))


def test_the_header_says_what_was_done_to_the_batch(recording: Path) -> None:
    asked = ASKED | {"policy": "static"}
    heads = {
        kind: str(moe_rl.simulate(recording, batch=kind, **asked)).splitlines()[0]
        for kind in ("drawn", "recorded", "scaled")
    }
    assert "batch of 1536 sequences (246k tokens) sampled from 48 recorded sequences" in heads["drawn"]
    assert "batch as recorded: 48 sequences, 7,680 tokens" in heads["recorded"]
    assert "batch of 48 recorded sequences (7,680 tokens), loads scaled" in heads["scaled"]


def test_options_without_a_batch_ask_for_the_kind_that_they_describe(recording: Path) -> None:
    asked, cut = ASKED | {"policy": "static"}, {"ep_group_tokens": 2048}
    kinds = {
        "drawn": {},
        "recorded": cut,
        "scaled": {**cut, "tokens_per_rank": 4096},
    }
    for kind, given in kinds.items():
        assert moe_rl.simulate(recording, **asked, **given).setting["batch"] == kind
    drawn = moe_rl.simulate(recording, **asked, **cut, global_batch_tokens=50_000)
    assert drawn.setting["batch"] == "drawn"
    for name in ("global_batch_tokens", "tokens_per_rank"):
        with pytest.raises(InvalidInputError, match=f"--{name.replace('_', '-')} works only with --batch"):
            moe_rl.simulate(recording, **asked, batch="recorded", **{name: 9000})


def test_scaled_loads_have_no_step_of_rl(recording: Path) -> None:
    """The rollout would generate the recorded samples while the update trains on many times their tokens."""
    report = moe_rl.simulate(recording, **ASKED, batch="scaled", tokens_per_rank=8192)
    assert report.rl_speedup is None
    assert any(note.startswith("there is no RL step") for note in report.notes)


def test_a_stated_batch_is_drawn_and_kept_to() -> None:
    report = moe_rl.simulate(COUNTDOWN, global_batch_tokens=50_000, micro_batch_tokens=4096, **QUICK)
    assert 45_000 <= int(str(report.trace["num_tokens"])) <= 50_000


@pytest.mark.slow
def test_a_tenth_of_a_trace_foretells_the_speed_up_of_the_whole_within_3_percent() -> None:
    source = open_trace(COUNTDOWN)
    whole = concatenate(tuple(source.parts(source.steps[-1])))
    assert isinstance(whole, RoutingTrace)
    some = np.sort(np.random.default_rng(0).permutation(whole.num_sequences)[: whole.num_sequences // 10])
    found = [
        moe_rl.simulate(trace, expert_model_parallel_size=16, **QUICK).speedups[0]
        for trace in (whole, whole.select(some))
    ]
    assert found[1] == pytest.approx(found[0], rel=0.03)


@pytest.mark.slow
def test_a_trace_of_27_sequences_says_how_little_it_knows(dev_trace_path: Path) -> None:
    """Its imbalance scatters by 5 %, so 3 % cannot be held: the whole trace's speed-up lies in the interval.

    Of ten intervals that hold the truth 19 times of 20, fewer than eight do so once in 90 draws.
    """
    source = open_trace(dev_trace_path)
    whole = concatenate(tuple(source.parts(source.steps[-1])))
    assert isinstance(whole, RoutingTrace)
    asked = {"model": "gpt-oss-20b", "cluster": "h100", "policy": ["static", "moe-rl"]}

    def speedups(trace: RoutingTrace) -> tuple[float, ...]:
        report = moe_rl.simulate(trace, expert_model_parallel_size=16, **asked)
        assert any("recorded sequences, the speed-up may be up to" in note for note in report.notes)
        return report.speedups

    of_whole = speedups(whole)
    rngs = [np.random.default_rng(seed) for seed in range(10)]
    found = [speedups(whole.select(np.sort(rng.permutation(whole.num_sequences)[:27]))) for rng in rngs]
    assert sum(low < of_whole[0] < high for _, low, high in found) >= 8
    assert all(of_whole[2] - of_whole[1] < high - low for _, low, high in found)


@pytest.mark.parametrize("ep_size", [8, 16, 32])
def test_of_a_hundred_tenths_95_hold_the_imbalance_of_the_whole(ep_size: int, dev_trace_path: Path) -> None:
    source = open_trace(dev_trace_path)
    (whole,) = source.parts(source.steps[-1])
    assert isinstance(whole, RoutingTrace)
    counts, lengths = count_sequences(whole).tokens_per_expert, whole.sequence_lengths
    rows = counts.reshape(*counts.shape[:2], ep_size, -1).sum(axis=3, dtype=np.float32)
    rng, truth, held = np.random.default_rng(0), _imbalance(rows), []
    for _ in range(400):
        some = rng.permutation(len(rows))[: len(rows) // 10]
        below, above = imbalance_left_open(rows[some], lengths[some], drawn=1800, seed=0)
        held.append(1 - below < truth / _imbalance(rows[some]) < 1 + above)
    assert np.mean(held) >= 0.95


def test_equal_sequences_leave_nothing_open() -> None:
    rows = np.broadcast_to(np.array([1, 2, 5], np.float32), (6, 4, 3))
    below, above = imbalance_left_open(rows, np.full(6, 8), drawn=100, seed=0)
    assert (below, above) == pytest.approx((0.0, 0.0), abs=1e-6)


def _imbalance(rows: np.ndarray) -> float:
    loads = rows.sum(axis=0)
    return float((loads.max(axis=1) / loads.mean(axis=1)).mean())


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["ultraep", "moe-rl"])
def test_how_a_batch_is_cut_moves_the_speed_up_by_3_percent_at_most(policy: str) -> None:
    asked = QUICK | {"policy": ["static", policy], "expert_model_parallel_size": 16, "global_batch_tokens": 500_000}
    cuts: list[dict[str, int]] = [
        {}, {"micro_batch_tokens": 16384}, {"ep_group_tokens": 131072}, {"ep_group_tokens": 262144},
    ]  # fmt: skip
    found = [moe_rl.simulate(COUNTDOWN, **asked, **cut).speedups[0] for cut in cuts]
    assert max(found) / min(found) < 1.03


@pytest.mark.parametrize("size", [1, 40, 257])
def test_a_number_of_sequences_is_drawn_exactly(size: int) -> None:
    """As many tokens as 40 sequences of mean length are 39 or 41 sequences of a recording with uneven lengths."""
    asked = QUICK | {"policy": "static", "seed": 2, "expert_model_parallel_size": 8}
    for cut in ({}, {"ep_group_tokens": 2048}, {"layout": "megatron", "micro_batch_tokens": 1024}):
        report = moe_rl.simulate(COUNTDOWN, global_batch_size=size, **asked, **cut)
        assert report.trace["num_sequences"] == size
        assert report.setting["global_batch_tokens"] == report.trace["num_tokens"]
        assert report.setting.get("layout") == (None if "ep_group_tokens" in cut else cut.get("layout", "verl"))


def test_who_states_the_number_of_sequences_gets_no_advice_on_another_option() -> None:
    asked = QUICK | {"policy": "static", "expert_model_parallel_size": 8}
    by_tokens, by_number = (
        moe_rl.simulate(COUNTDOWN, **asked, **size)
        for size in ({"global_batch_tokens": 4000}, {"global_batch_size": 40})
    )
    assert "set a larger --global-batch-tokens" in by_tokens.small_batch_caution
    assert any("a larger --global-batch-tokens increases the gain" in note for note in by_tokens.notes)
    assert by_number.small_batch_caution.endswith("that a rank's micro-batch may have.")
    said = (by_number.small_batch_caution, *by_number.cautions, *by_number.notes)
    assert not any("--global-batch-tokens" in sentence for sentence in said)
    assert any("(options --batch and --global-batch-size)" in note for note in by_number.notes)


def test_as_many_sequences_as_cells_fill_whole_rounds_of_fixed_micro_batches() -> None:
    """256 sequences on 64 ranks of one sequence each are 4 micro-batches; one sequence more would be a fifth."""
    report = moe_rl.simulate(
        COUNTDOWN, global_batch_size=256, layout="megatron", micro_batch_tokens=1, expert_model_parallel_size=8,
        gpus=64, seed=2, **QUICK | {"policy": "static"},
    )  # fmt: skip
    assert report.setting["num_micro_batches"] == 4
