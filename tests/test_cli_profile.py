"""`moe-rl profile`: hand-checked recordings, a real one of torch.profiler, and the loop back into `calibrate`."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from cli_runner import Ran, moe_rl, snapshot, write_npz

from moe_rl.config import load_cluster, load_model
from moe_rl.profiling.measurements import Measurement, measurements_csv, read_measurements
from moe_rl.profiling.ranges import RangeName
from moe_rl.study.measured import predicted_seconds

KERNELS = {
    "dispatch": "void deep_ep::internode::dispatch<false, 4, 8>(int4*)",
    "combine": "void deep_ep::internode::combine<__nv_bfloat16>(int4*)",
    "expert_gemm": "sm90_m_grouped_bf16_gemm_impl",
    "attention": "flash_fwd_kernel<128, 128, 64>",
    "router": "topk_softmax_kernel",
    "other": "vectorized_elementwise_kernel",
}
FORWARD_US = {"router": 5.0, "dispatch": 60.0, "expert_gemm": 40.0, "combine": 50.0, "attention": 30.0, "other": 10.0}


class Recording:
    """A GPU recording as torch.profiler writes it, kernel after kernel."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now = 0.0

    def add(
        self, kernel: str, duration_us: float, where: RangeName | None = None, *, start_us: float | None = None
    ) -> None:
        start = self.now if start_us is None else start_us
        link = {"correlation": len(self.events), "stream": 7}
        host = {"ph": "X", "ts": start, "dur": duration_us, "pid": 1, "tid": 1}
        if where is not None:
            # The host is done with a range before the GPU is.
            self.events.append({**host, "cat": "user_annotation", "name": str(where), "dur": duration_us / 2})
        self.events.append({**host, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 0.0, "args": link})
        self.events.append({**host, "cat": "kernel", "name": kernel, "pid": 0, "tid": 7, "args": link})
        self.now = start + duration_us

    def write(self, path: Path, rank: int) -> Path:
        path.write_text(json.dumps({"traceEvents": self.events, "distributedInfo": {"rank": rank}}))
        return path


def one_layer(folder: Path, rank: int, *, ranges: bool = True, **changes: float) -> Path:
    """One layer, forward, of one micro-batch: `FORWARD_US` with changes, each kernel in the range of its category."""
    recording = Recording()
    for category, duration in (FORWARD_US | changes).items():
        marked = ranges and category != "other"
        where = RangeName(category=category, layer=0, micro_batch=0, phase="forward") if marked else None
        recording.add(KERNELS[category], duration, where)
    return recording.write(folder / f"r{rank}.json", rank)


def document(*arguments: object) -> dict[str, Any]:
    ran = moe_rl("profile", *arguments, "--json", "-")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert isinstance(found, dict)
    return found


def test_seconds_of_every_category_and_kind_are_those_of_the_kernels(tmp_path: Path) -> None:
    found = document(one_layer(tmp_path, 0))
    rank = found["ranks"]["0"]
    assert {name: round(1e6 * s, 6) for name, s in rank["seconds"].items() if s} == FORWARD_US
    assert rank["communication_s"] == pytest.approx(110e-6)
    assert rank["compute_s"] == pytest.approx(85e-6)
    assert rank["busy"]["idle_s"] == pytest.approx(0.0, abs=1e-12)
    assert rank["busy"]["span_s"] == pytest.approx(195e-6)
    assert "waiting" not in found


def test_the_table_shows_every_rank_and_what_imbalance_cost(tmp_path: Path) -> None:
    """Rank 1's experts take 40 us longer, so rank 0's combine lasts 40 us longer."""
    ran = moe_rl("profile", one_layer(tmp_path, 0, combine=90.0), one_layer(tmp_path, 1, expert_gemm=80.0))
    assert ran.code == 0, ran.err
    lines = [line.split() for line in ran.out.splitlines()]
    assert ["combine", "0.0900", "0.0500", "0.0700"] in lines
    assert ["communication", "0.1500", "0.1100", "0.1300"] in lines
    assert ["waiting", "for", "slower", "ranks", "0.0400", "0.0000", "0.0200"] in lines
    assert (
        "Because of imbalance, a rank waits 0.0200 ms on average. The slowest rank's experts explain 0.0200 ms"
        in " ".join(ran.out.split())
    )


def test_many_ranks_are_shown_by_their_spread(tmp_path: Path) -> None:
    ran = moe_rl("profile", *(one_layer(tmp_path, rank, attention=10.0 + rank) for rank in range(9)))
    assert ["attention", "0.0140", "0.0100", "0.0180"] in [line.split() for line in ran.out.splitlines()]


def test_without_ranges_the_command_says_that_waiting_is_not_known(tmp_path: Path) -> None:
    ran = moe_rl("profile", one_layer(tmp_path, 0, ranges=False), one_layer(tmp_path, 1, ranges=False))
    assert ran.code == 0
    assert "waiting cannot be computed: no all-to-all is in a moe_rl range" in ran.out
    assert "kernels are assigned to a part of the step by their names" in " ".join(ran.out.split())


def simulated_recording(trace_out: Path, folder: Path, *, ranks: int) -> list[Path]:
    """Turn the simulator's timeline into recordings: what a GPU would show if every prediction came true.

    A rank's wait before an exchange becomes a part of the exchange, as a profiler sees it.
    """
    timeline = [e for e in json.loads(trace_out.read_text())["traceEvents"] if e["ph"] == "X"]
    by_rank = defaultdict(list)
    for event in timeline:
        by_rank[event["tid"]].append(event)
    assert len(by_rank) == ranks
    paths = []
    for rank, events in by_rank.items():
        recording, waiting = Recording(), None
        for event in events:
            category, _, phase = event["name"].partition(" ")
            if category == "wait":
                waiting = event
                continue
            args = event.get("args", {})
            marked = category in ("dispatch", "combine", "expert_gemm", "attention")
            where = RangeName(
                category=category, layer=args["layer"], micro_batch=args["micro_batch"], phase=phase or "forward"
            ) if marked else None  # fmt: skip
            start = event["ts"]
            if waiting is not None and category in ("dispatch", "combine"):
                start = waiting["ts"]
            duration = event["ts"] + event["dur"] - start
            recording.add(KERNELS.get(category, KERNELS["other"]), duration, where, start_us=start)
            waiting = None
        paths.append(recording.write(folder / f"r{rank}.json", rank))
    return paths


@pytest.fixture(scope="module")
def prediction(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path], list[Path]]:
    """A simulated step with every micro-batch recorded, and with two of them."""
    folder = tmp_path_factory.mktemp("predicted")
    trace = write_npz(folder / "t.npz")
    recordings = []
    for name, drawn in (("all", 99), ("two", 2)):
        (folder / name).mkdir()
        out = folder / f"{name}.trace.json"
        shape = ("--ep", 4, "--ranks-per-node", 2, "--ep-group-tokens", 100, "--tokens-per-rank", 4096)
        how = ("--policy", "static", "--moe-token-dispatcher-type", "alltoall")
        drawing = ("--trace-out", out, "--trace-micro-batches", drawn)
        ran = moe_rl("simulate", trace, *shape, *how, *drawing, "--json", folder / "out.json")
        assert ran.code == 0, ran.err
        recordings.append(simulated_recording(out, folder / name, ranks=4))
    return folder / "out.json", recordings[0], recordings[1]


def outside_routed_experts(parts: dict[str, Any], side: str) -> float:
    """The timeline draws a layer's fixed and shared costs as a part of its attention."""
    return float(parts["attention"][side] + parts["outside_experts"][side])


def test_a_recording_that_is_exactly_the_prediction_shows_no_error(
    prediction: tuple[Path, list[Path], list[Path]],
) -> None:
    out, whole, _ = prediction
    found = document(*whole, "--predicted", out, "--policy-name", "static")
    parts = found["comparison"]["parts"]
    for name in ("expert_gemm", "all_to_all"):
        assert parts[name]["relative_error"] == pytest.approx(0.0, abs=1e-6), name
    assert outside_routed_experts(parts, "predicted_s") == pytest.approx(outside_routed_experts(parts, "measured_s"))
    breakdown = json.loads(out.read_text())["policies"]["static"]["breakdown_s"]
    assert parts["optimizer"]["predicted_s"] == breakdown["optimizer"]
    # All work of a rank is equal but its experts, so that they explain all the waiting.
    assert found["waiting"]["imbalance_loss_s"] == pytest.approx(found["waiting"]["expert_loss_s"])
    assert found["waiting"]["imbalance_loss_s"] > 0


def test_a_part_of_a_step_is_compared_with_that_part(prediction: tuple[Path, list[Path], list[Path]]) -> None:
    out, _, two = prediction
    predicted = json.loads(out.read_text())
    setting, breakdown = predicted["setting"], predicted["policies"]["static"]["breakdown_s"]
    found = document(*two, "--predicted", out, "--policy-name", "static")
    said = f"the recording contains 2 of the {setting['num_micro_batches']} micro-batches"
    assert any(said in note for note in found["notes"])
    # Micro-batches of equal size differ only in their routing.
    parts = found["comparison"]["parts"]
    assert outside_routed_experts(parts, "predicted_s") == pytest.approx(outside_routed_experts(parts, "measured_s"))
    assert parts["expert_gemm"]["predicted_s"] == pytest.approx(
        breakdown["expert_gemm"] * 2 / setting["num_micro_batches"]
    )


def test_the_comparison_is_printed_with_what_it_leaves_out(
    prediction: tuple[Path, list[Path], list[Path]], tmp_path: Path
) -> None:
    out, whole, _ = prediction
    changed = json.loads(out.read_text())
    changed["policies"]["static"]["breakdown_s"]["pipeline_bubble"] = 0.25
    (tmp_path / "out.json").write_text(json.dumps(changed))
    ran = moe_rl("profile", *whole, "--predicted", tmp_path / "out.json", "--policy-name", "static")
    assert "pipeline_bubble 0.25 s" in ran.out
    shown = next(line.split() for line in ran.out.splitlines() if line.split()[:1] == ["all-to-all"])
    assert shown[-1] in ("+0.0%", "-0.0%")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--predicted", "out.json"), "--predicted needs --policy-name"),
        (("--policy-name", "static"), "--policy-name needs --predicted"),
        (("--predicted", "absent.json", "--policy-name", "static"), "absent.json does not exist"),
        (("--predicted", "r0.json", "--policy-name", "static"), "was not written by moe-rl simulate --json"),
        (("--predicted", "r0.npz", "--policy-name", "static"), "is not a JSON file"),
        (("--predicted", "out.json", "--policy-name", "statik"), "Did you mean 'static'"),
        (("--measurements", "m.csv"), "give --model, --expert-model-parallel-size, --tokens-per-rank"),
        (("--measurements", "m.json"), "must end in .csv"),
        (("--measurements", "r0.json"), "would overwrite the input"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    prediction: tuple[Path, list[Path], list[Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    one_layer(tmp_path, 0)
    (tmp_path / "out.json").write_bytes(prediction[0].read_bytes())
    (tmp_path / "r0.npz").write_bytes(b"\xff\xfe")
    before = snapshot(tmp_path)
    ran = moe_rl("profile", "r0.json", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert sentence in " ".join(ran.err.split())
    assert snapshot(tmp_path) == before


def test_a_prediction_without_times_or_of_another_step_is_refused(
    prediction: tuple[Path, list[Path], list[Path]], tmp_path: Path
) -> None:
    out, whole, _ = prediction
    content = json.loads(out.read_text())
    (tmp_path / "few.json").write_text(json.dumps(content | {"setting": {"num_micro_batches": 1}}))
    ran = moe_rl("profile", *whole, "--predicted", tmp_path / "few.json", "--policy-name", "static")
    assert ran.code == 2
    assert "the prediction only 1" in ran.err
    del content["policies"]["static"]["breakdown_s"]
    (tmp_path / "untimed.json").write_text(json.dumps(content))
    ran = moe_rl("profile", *whole, "--predicted", tmp_path / "untimed.json", "--policy-name", "static")
    assert ran.code == 2
    assert "has no times for 'static'" in ran.err


# --- measurements -------------------------------------------------------------------------------------------

SHAPE = ("--model", "qwen3-30b-a3b", "--ep", 8, "--moe-token-dispatcher-type", "flex")


def balanced_run(folder: Path, tokens: int, *, ranks: int = 8, skew: float = 0.0) -> list[Path]:
    """A step as an H100 with a slower NVLink would record it under forced balance; two layers, both phases.

    `skew` makes rank 0's experts slower and the other ranks wait for them.
    """
    model, cluster = load_model("qwen3-30b-a3b").spec, truth()
    paths = []
    folder.mkdir()
    for rank in range(ranks):
        recording = Recording()
        for layer in (0, 1):
            for phase in ("forward", "backward"):
                for category in ("dispatch", "expert_gemm", "combine"):
                    kind = "expert_gemm" if category == "expert_gemm" else "all_to_all"
                    seconds = predicted_seconds(measured(kind, phase, tokens), cluster)
                    experts = predicted_seconds(measured("expert_gemm", phase, tokens), cluster)
                    if category == "expert_gemm" and rank == 0:
                        seconds += skew * experts
                    if category == "combine" and rank != 0:
                        seconds += skew * experts
                    where = RangeName(category=category, layer=layer, micro_batch=0, phase=phase)
                    recording.add(KERNELS[category], 1e6 * seconds, where)
        paths.append(recording.write(folder / f"r{rank}.json", rank))
    assert model.num_experts == 128
    return paths


def truth() -> Any:
    return load_cluster("h100").perturbed(nvlink_gb_per_s=0.7, gemm_tflops=0.8)


def measured(kind: str, phase: str, tokens: int) -> Measurement:
    return Measurement(
        kind=kind, phase=phase, dispatcher="deepep", hidden_size=2048, moe_ffn_hidden_size=768, num_experts=128,
        top_k=8, ep_size=8, ranks_per_node=8, tokens_per_rank=tokens, time_ms=1.0, group="qwen3-30b-a3b",
    )  # fmt: skip


def profiled(paths: list[Path], out: Path, tokens: int, *extra: object) -> Ran:
    return moe_rl("profile", *paths, "--measurements", out, *SHAPE, "--tokens-per-rank", tokens, *extra)


def test_recordings_feed_calibrate_which_finds_the_cluster_that_made_them(tmp_path: Path) -> None:
    files = []
    for tokens in (1024, 4096, 16384):
        files.append(tmp_path / f"{tokens}.csv")
        ran = profiled(balanced_run(tmp_path / str(tokens), tokens), files[-1], tokens)
        assert ran.code == 0, ran.err
        assert "no moe_layer rows (for layer_fixed_forward_ms" in ran.err
    rows = read_measurements(files[0])
    assert [(row.kind, row.phase) for row in rows] == [
        ("expert_gemm", "forward"), ("expert_gemm", "backward"), ("all_to_all", "forward"), ("all_to_all", "backward"),
    ]  # fmt: skip
    assert rows[2].time_ms == pytest.approx(1e3 * predicted_seconds(measured("all_to_all", "forward", 1024), truth()))
    out = tmp_path / "mine.yaml"
    ran = moe_rl("calibrate", *files, "--cluster", "h100", "--constants", "gemm_tflops,nvlink_gb_per_s", "--out", out)
    assert ran.code == 0, ran.err
    found = load_cluster(str(out))
    assert found.nvlink_gb_per_s == pytest.approx(truth().nvlink_gb_per_s, rel=1e-3)
    assert found.gemm_tflops == pytest.approx(truth().gemm_tflops, rel=1e-3)


@pytest.mark.parametrize(
    ("ranks", "skew", "sentence"),
    [
        (2, 0.0, "2 of 8 ranks were recorded, so waiting is not known"),
        (8, 0.5, "the busiest rank's experts took 1.41 times the mean"),
    ],
)
def test_all_to_alls_that_are_not_uniform_transfers_are_left_out(
    tmp_path: Path, ranks: int, skew: float, sentence: str
) -> None:
    ran = profiled(balanced_run(tmp_path / "run", 4096, ranks=ranks, skew=skew), tmp_path / "m.csv", 4096)
    assert ran.code == 0, ran.err
    assert sentence in " ".join(ran.err.split())
    rows = read_measurements(tmp_path / "m.csv")
    assert {row.kind for row in rows} == {"expert_gemm"}
    expected = predicted_seconds(measured("expert_gemm", "forward", 4096), truth()) * (1 + skew / 8)
    assert rows[0].time_ms == pytest.approx(1e3 * expected)


def test_a_group_limited_router_gives_no_all_to_all_row(tmp_path: Path) -> None:
    """Tokens of DeepSeek-V3 visit at most half of the nodes; calibration draws experts independently."""
    paths = balanced_run(tmp_path / "run", 4096)
    ran = moe_rl(
        "profile", *paths, "--measurements", tmp_path / "m.csv", "--model", "deepseek-v3", "--ep", 8,
        "--tokens-per-rank", 4096,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "does not support the expert groups" in ran.err
    assert {row.kind for row in read_measurements(tmp_path / "m.csv")} == {"expert_gemm"}


def test_a_recording_without_ranges_gives_no_row_and_no_file(tmp_path: Path) -> None:
    ran = profiled([one_layer(tmp_path, 0, ranges=False)], tmp_path / "m.csv", 4096)
    assert ran.code == 2
    assert "no rows for --measurements can be derived from the recording" in ran.err
    assert not (tmp_path / "m.csv").exists()


def test_a_shape_that_cannot_be_is_refused(tmp_path: Path) -> None:
    paths = balanced_run(tmp_path / "run", 64)
    ran = moe_rl(
        "profile", *paths, "--measurements", tmp_path / "m.csv", "--model", "qwen3-30b-a3b", "--ep", 7,
        "--tokens-per-rank", 64,
    )  # fmt: skip
    assert ran.code == 2
    assert "ep_size 7 does not divide the 128 experts" in ran.err
    assert not (tmp_path / "m.csv").exists()
    ran = profiled(paths, tmp_path / "m.csv", 64, "--moe-token-dispatcher-type", "deep")
    assert "--moe-token-dispatcher-type 'deep' is unknown" in ran.err


# --- real recordings ----------------------------------------------------------------------------------------

TWO_RANKS = """
import os, sys, torch, torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule
from moe_rl.profiling import ranges
from moe_rl.study.measured import predicted_seconds
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
ranges.enable(nvtx=False, record_function=True)
x, weight = torch.randn(64, 64), torch.randn(64, 64)
steps = schedule(wait=0, warmup=1, active=2, repeat=1)
with profile(activities=[ProfilerActivity.CPU], schedule=steps) as recorded:
    for step in range(3):
        for layer in range(2):
            at = {"layer": layer, "micro_batch": 0, "phase": "forward"}
            with ranges.range("dispatch", **at):
                received = torch.empty_like(x)
                dist.all_to_all_single(received, x)
            with ranges.range("expert_gemm", **at):
                for _ in range(3 + 3 * rank):
                    received = torch.nn.functional.silu(received @ weight)
            with ranges.range("combine", **at):
                dist.all_to_all_single(x, received)
        recorded.step()
recorded.export_chrome_trace(f"{folder}/r{rank}.json")
dist.destroy_process_group()
# The recording is on disk. Now and then the profiler's and gloo's threads abort the interpreter's shutdown
# ("terminate called without an active exception"), which is not what this test is about.
sys.stderr.flush()
os._exit(0)
"""


@pytest.mark.multi_rank
def test_real_recordings_of_two_ranks_are_split_and_compared(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_RANKS, str(rank), str(tmp_path)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors.decode()
    found = document(tmp_path / "r1.json", tmp_path / "r0.json")
    assert list(found["ranks"]) == ["0", "1"]
    assert (found["device"], found["steps"]) == ("cpu", 2)
    for rank in found["ranks"].values():
        assert rank["seconds"]["dispatch"] > 0
        assert rank["seconds"]["expert_gemm"] > 0
        assert rank["communication_s"] > 0
        assert "busy" not in rank
    assert found["waiting"]["transfer_s"] > 0
    assert any("no GPU work was recorded" in note for note in found["notes"])
    ran = profiled([tmp_path / "r0.json", tmp_path / "r1.json"], tmp_path / "m.csv", 64)
    assert ran.code == 2
    assert "these contain only CPU operators" in ran.err
    text = (tmp_path / "r0.json").read_text()
    (tmp_path / "cut.json").write_text(text[: len(text) // 2])
    ran = moe_rl("profile", tmp_path / "cut.json")
    assert (ran.code, ran.out) == (2, "")
    assert "cut.json is not a readable Chrome trace" in ran.err


def test_measurements_of_a_recording_survive_the_file(tmp_path: Path) -> None:
    rows = [measured("expert_gemm", "forward", 64)]
    (tmp_path / "m.csv").write_text(measurements_csv(rows))
    assert read_measurements(tmp_path / "m.csv") == rows
