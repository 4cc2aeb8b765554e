"""`--known-step` and intervals in every command: one step moves the forecast, and a wrong one gets a sentence."""

import json
from math import log
from pathlib import Path
from typing import Any

import pytest
from cli_runner import moe_rl, simulated, write_npz

SMALL = ("--ep", 4, "--ep-group-tokens", 200, "--num-experts", 8, "--policy", "static,ultraep")
RL = (
    "--model", "qwen3-30b-a3b", "--ep", 8, "--train-gpus", 16, "--num-samples", 128, "--mean-length", 2000,
    "--max-length", 4096, "--micro-batch-tokens", 8192, "--rollout-engine-size", 2,
)  # fmt: skip
TUNE = (
    "--model", "gpt-oss-20b", "--gpus", 8, "--num-samples", 64, "--mean-length", 1000,
    "--tensor-model-parallel-size", 1, "--pipeline-model-parallel-size", 1, "--jobs", 1,
)  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_npz(tmp_path / "t.npz")


def static(document: dict[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = document["policies"]["static"]
    return figures


def width(ends: list[float]) -> float:
    return log(ends[1] / ends[0])


def test_every_figure_has_an_interval_and_what_policies_share_cancels_in_their_ratio(
    tmp_path: Path, trace: Path
) -> None:
    document = simulated(tmp_path, trace, *SMALL)
    for figures in document["policies"].values():
        low, high = figures["step_time_interval_s"]
        assert low < figures["step_time_s"] < high
        assert figures["peak_memory_interval_bytes"][0] < figures["peak_memory_bytes"]
    ultraep = document["policies"]["ultraep"]
    low, high = ultraep["speedup_interval"]
    assert low <= ultraep["speedup_vs_static"] <= high
    assert width([low, high]) < 0.3 * width(ultraep["step_time_interval_s"])
    assert static(document)["speedup_interval"] == [1.0, 1.0]


def test_one_known_step_is_met_and_narrows_the_interval(tmp_path: Path, trace: Path) -> None:
    before = static(simulated(tmp_path, trace, *SMALL))
    seconds = 1.3 * before["step_time_s"]
    document = simulated(tmp_path, trace, *SMALL, "--known-step", seconds)
    after = static(document)
    assert after["step_time_s"] == pytest.approx(seconds)
    assert width(after["step_time_interval_s"]) < 0.5 * width(before["step_time_interval_s"])
    assert document["setting"]["software_chosen_by"] == "--known-step"
    assert any("1 known step: " in note for note in document["notes"])


def test_plan_takes_a_known_step_and_refuses_what_is_none(tmp_path: Path, trace: Path) -> None:
    own = ("--ep", 4, "--ep-group-tokens", 200, "--num-experts", 8, "--policy", "ultraep")
    seconds = 1.3 * static(simulated(tmp_path, trace, *SMALL))["step_time_s"]
    out = tmp_path / "plan.npz"
    planned = moe_rl("plan", trace, *own, "--known-step", seconds, "--out", out)
    assert planned.code == 0, planned.err
    assert out.exists()
    refused = moe_rl("plan", trace, *own, "--known-step", 1e6 * seconds, "--out", tmp_path / "other.npz")
    assert refused.code == 2
    assert "times the predicted" in refused.err
    assert not (tmp_path / "other.npz").exists()


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "line",
    [
        "iteration 5/ 100 | elapsed time per iteration (ms): {ms:.3f} | learning rate: 1e-6",
        "step:3 - timing_s/gen:10.2 - timing_s/update_actor:{s:.6f} - timing_s/step:55.0",
        "perf/actor_train_time: {s:.6f}",
        "  policy_training: {s:.6f}s (40.1%)",
        "{s:.6f}s",
        "{ms:.3f}ms",
    ],
)
def test_a_line_of_a_log_is_a_step(tmp_path: Path, trace: Path, line: str) -> None:
    seconds = 1.1 * static(simulated(tmp_path, trace, *SMALL))["step_time_s"]
    text = line.format(s=seconds, ms=1e3 * seconds)
    known = static(simulated(tmp_path, trace, *SMALL, "--known-step", text))
    assert known["step_time_s"] == pytest.approx(seconds, rel=1e-3)
    log_file = tmp_path / "train.log"
    slow_first = line.format(s=9 * seconds, ms=9e3 * seconds)  # the first iteration compiles
    log_file.write_text("\n".join([slow_first, "other", text, text]))
    if "\n" not in line and "/" in line + ":":
        from_file = static(simulated(tmp_path, trace, *SMALL, "--known-step", log_file)) if ":" in line else known
        assert from_file["step_time_s"] == pytest.approx(seconds, rel=1e-3)


def test_two_known_steps_narrow_it_further_and_a_config_says_where_the_other_ran(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("train_gpus: 32\nep: 16\nmicro_batch_tokens: 4096\n")
    rl = ("rl-step", *RL, "--json", "-")
    widths = []
    for known in ((), (5000,), (5000, 5500)):
        # Steps of another setting leave this one its own error: only the constants narrow.
        given = [
            word for one in known for word in ("--known-step", f"{one}tokens/s/gpu", "--known-step-config", config)
        ]
        ran = moe_rl(*rl, *given)
        assert ran.code == 0, ran.err
        widths.append(width(json.loads(ran.out)["policies"]["static"]["step_time_interval_s"]))
    assert widths[0] > widths[1] > widths[2]


@pytest.mark.lengthy
def test_a_step_of_rl_is_known_by_its_total_or_by_its_update() -> None:
    before = json.loads(moe_rl("rl-step", *RL, "--json", "-").out)["policies"]["static"]
    total, update = 1.2 * before["step_time_s"], 1.2 * before["parts_s"]["update"]
    known = json.loads(moe_rl("rl-step", *RL, "--json", "-", "--known-step", total).out)["policies"]["static"]
    assert known["step_time_s"] == pytest.approx(total)
    line = f"timing_s/update_actor:{update}"
    known = json.loads(moe_rl("rl-step", *RL, "--json", "-", "--known-step", line).out)["policies"]["static"]
    assert known["parts_s"]["update"] == pytest.approx(update)
    assert known["parts_s"]["rollout"] == pytest.approx(before["parts_s"]["rollout"], rel=0.05)


@pytest.mark.lengthy
def test_tune_takes_a_step_of_a_setting_that_is_named_and_prints_intervals(tmp_path: Path) -> None:
    ran = moe_rl("tune", *TUNE, "--known-step", 3)
    assert ran.code == 2
    assert "this command has no training setting to compare the step with" in ran.err
    config = tmp_path / "run.yaml"
    config.write_text("gpus: 8\nep: 8\nmicro_batch_tokens: 8192\nrecompute_granularity: full\n")
    out = tmp_path / "tune.json"
    ran = moe_rl("tune", *TUNE, "--known-step", 3.5, "--known-step-config", config, "--json", out)
    assert ran.code == 0, ran.err
    document = json.loads(out.read_text())
    assert any("1 known step" in note for note in document["notes"])
    best = document["settings"][0]
    assert best["tokens_per_s_interval"][0] < best["tokens_per_s_per_gpu"] < best["tokens_per_s_interval"][1]
    assert "80 % interval" in ran.out


@pytest.mark.lengthy
def test_a_sweep_moves_all_points_by_the_step_of_the_setting_before_it_is_varied(tmp_path: Path, trace: Path) -> None:
    def steps(*more: object) -> list[float]:
        out = tmp_path / f"sweep{len(more)}.jsonl"
        ran = moe_rl("sweep", trace, *SMALL, "--sweep", "seq_length=40,400000", "--out", out, "--jobs", 1, *more)
        assert ran.code == 0, ran.err
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        return [static(line)["step_time_s"] for line in lines]

    own = static(simulated(tmp_path, trace, *SMALL))["step_time_s"]
    before, after = steps(), steps("--known-step", 1.3 * own)
    assert all(slower > faster for slower, faster in zip(after, before, strict=True))


@pytest.mark.parametrize(
    ("known", "sentence"),
    [
        (("--known-step", "nonsense"), "give a step time in seconds (41.2), a throughput"),
        (("--known-step", "0"), "a step must take more than 0 s"),
        (("--known-step", "50"), "times the predicted"),
        (("--known-step", "1e-9"), "this is too short for a step: its GEMMs alone take"),
        (("--known-step", "timing_s/step:41.2"), "is the time of an RL step, but this command predicts only an update"),
        (("--known-step", "absent.yaml"), "the file does not exist"),
        (("--known-step", "1", "--known-step-config", "a", "--known-step-config", "b"), "Give one --known-step-config"),
        (("--known-step", "1", "--objective", "imbalance"), "--known-step gives a time"),
        (("--known-memory", "900"), "It may belong to another setting"),
    ],
)
def test_a_wrong_step_gets_a_sentence(trace: Path, known: tuple[str, ...], sentence: str) -> None:
    ran = moe_rl("simulate", trace, *SMALL, *known)
    assert ran.code == 2
    assert sentence in ran.err
    assert ran.err.count("\n") == 1


def test_tokens_per_second_for_seconds_and_another_models_step_are_recognized(tmp_path: Path) -> None:
    before = json.loads(moe_rl("rl-step", *RL, "--json", "-").out)["policies"]["static"]
    throughput = 128 * 2000 / before["step_time_s"]
    ran = moe_rl("rl-step", *RL, "--known-step", round(throughput))
    assert (ran.code, "this number looks like tokens/s of all GPUs" in ran.err) == (2, True), ran.err
    config = tmp_path / "run.yaml"
    config.write_text("model: deepseek-v3\ntrain_gpus: 256\nep: 16\n")
    ran = moe_rl("rl-step", *RL, "--known-step", 40, "--known-step-config", config)
    assert ran.code == 2
    assert "this step is for DeepSeek-V3, but the prediction is for Qwen3-30B-A3B" in ran.err


def test_a_known_peak_moves_the_forecast_peak_part_of_the_way(tmp_path: Path, trace: Path) -> None:
    before = static(simulated(tmp_path, trace, *SMALL))
    gib = 1.1 * before["peak_memory_bytes"] / 2**30
    after = static(simulated(tmp_path, trace, *SMALL, "--known-memory", gib))
    assert before["peak_memory_bytes"] < after["peak_memory_bytes"] < gib * 2**30
    assert width(after["peak_memory_interval_bytes"]) < width(before["peak_memory_interval_bytes"])


def test_what_published_runs_contradict_is_refused_or_named(tmp_path: Path, trace: Path) -> None:
    ran = moe_rl("simulate", trace, *SMALL, "--use-megatron-fsdp", "--optimizer-offload-fraction", 1)
    assert ran.code == 2
    assert "no step time can be predicted for --use-megatron-fsdp with --optimizer-offload-fraction" in ran.err
    alone = simulated(tmp_path, trace, "--ep", 1, "--ep-group-tokens", 200, "--num-experts", 8, "--policy", "static")
    assert any("without expert parallelism" in note for note in alone["notes"])
    elsewhere = simulated(tmp_path, trace, *SMALL, "--cluster", "b300")
    assert any("cluster b300 (fitted: h100" in note for note in elsewhere["notes"])


def test_a_policy_whose_published_gain_is_not_met_is_refused_for_that_dispatcher(trace: Path) -> None:
    own = ("--ep", 4, "--ep-group-tokens", 200, "--num-experts", 8, "--policy", "static,llep")
    refused = moe_rl("simulate", trace, *own, "--moe-token-dispatcher-type", "alltoall")
    assert refused.code == 2
    assert "the time of --policy llep" in refused.err
    assert "18 to 68 % too high" in refused.err
    assert moe_rl("simulate", trace, *own).code == 0
