"""Attribution on small hand-checked recordings, and on a real torch.profiler trace taken here on CPU."""

import gzip
import json
import sqlite3
from pathlib import Path

import pytest

from moe_rl.core.errors import InvalidInputError
from moe_rl.profiling import ranges
from moe_rl.profiling.attribution import CATEGORIES, attribute, busy_time, seconds_by_category, seconds_by_part
from moe_rl.profiling.chrome_trace import read_chrome_trace
from moe_rl.profiling.comparison import compare, measured_parts
from moe_rl.profiling.nsys_sqlite import read_nsys_sqlite
from moe_rl.profiling.recordings import read_recording, read_recordings
from moe_rl.profiling.waiting import split_waiting

DISPATCH = "void deep_ep::intranode::dispatch<8>(int4*)"
COMBINE = "void deep_ep::intranode::combine<8>(int4*)"
GROUPED = "sm90_m_grouped_fp8_gemm_1d2d_impl"
ADD = "vectorized_elementwise_kernel"


def chrome_events(dispatch_us: float, gemm_us: float, combine_us: float = 50.0) -> list[dict]:
    """One layer: dispatch, an elementwise kernel and a grouped GEMM inside the expert range, combine, an optimizer."""
    spans = [
        ("moe_rl/dispatch/L0/mb0/forward", 0, 10),
        ("moe_rl/expert_gemm/L0/mb0/forward", 10, 30),
        ("moe_rl/combine/L0/mb0/forward", 30, 40),
    ]
    kernels = [
        (DISPATCH, 5, dispatch_us),
        (ADD, 15, 7.0),
        (GROUPED, 20, gemm_us),
        (COMBINE, 35, combine_us),
        ("adam", 45, 3.0),
    ]
    events: list[dict] = [
        {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": end - start, "pid": 1, "tid": 1}
        for name, start, end in spans
    ]
    for correlation, (name, launch, duration) in enumerate(kernels):
        link = {"correlation": correlation, "stream": 7}
        events.append(
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "ts": launch,
                "dur": 1,
                "pid": 1,
                "tid": 1,
                "args": link,
            }
        )
        events.append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": name,
                "ts": 1000 + launch,
                "dur": duration,
                "pid": 0,
                "tid": 7,
                "args": link,
            }
        )
    return events


def write_chrome(path: Path, events: list[dict], rank: int = 0) -> Path:
    path.write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": rank, "world_size": 2}}))
    return path


def test_kernels_count_for_the_range_that_launched_them(tmp_path: Path) -> None:
    """The elementwise kernel launched inside the expert range is expert time; the optimizer outside is other."""
    run = read_chrome_trace(write_chrome(tmp_path / "r0.json", chrome_events(100.0, 40.0), rank=3))
    assert (run.rank, run.device, run.unlinked) == (3, "cuda", 0)
    seconds = seconds_by_category(attribute(run))
    some = {"dispatch": 100e-6, "expert_gemm": 47e-6, "combine": 50e-6, "optimizer": 3e-6}
    assert seconds == pytest.approx(dict.fromkeys(CATEGORIES, 0.0) | some)


def test_waiting_is_what_a_rank_spends_beyond_the_shortest(tmp_path: Path) -> None:
    """Rank 0 has few rows: its experts take 40 us less, and it waits as long in the combine that follows."""
    runs = [
        read_chrome_trace(write_chrome(tmp_path / "r0.json", chrome_events(60.0, 40.0, combine_us=90.0))),
        read_chrome_trace(write_chrome(tmp_path / "r1.json", chrome_events(60.0, 80.0, combine_us=50.0))),
    ]
    split = split_waiting([attribute(run) for run in runs])
    assert split.transfer_s == pytest.approx((60 + 50) * 1e-6)
    assert split.wait_s == pytest.approx((40e-6, 0.0))
    assert split.imbalance_loss_s == pytest.approx(20e-6)
    assert split.expert_loss_s == pytest.approx((87 - 67) * 1e-6)
    assert split.slowest_experts_s == pytest.approx(87e-6)
    assert split.expert_imbalance == pytest.approx(87 / 67)


def test_steps_recorded_in_one_file_are_split_one_by_one(tmp_path: Path) -> None:
    """Rank 0 is fast in the first step and rank 1 in the second: together both waited, although their totals agree."""
    both = []
    for rank, durations in enumerate(((90.0, 50.0), (50.0, 90.0))):
        events = []
        for step, combine_us in enumerate(durations):
            events += [
                {**event, "ts": event["ts"] + 5000 * step}
                | (
                    {"args": {**event["args"], "correlation": event["args"]["correlation"] + 100 * step}}
                    if "args" in event
                    else {}
                )
                for event in chrome_events(60.0, 40.0, combine_us=combine_us)
            ]
        both.append(attribute(read_chrome_trace(write_chrome(tmp_path / f"r{rank}.json", events))))
    split = split_waiting(both)
    assert split.transfer_s == pytest.approx(2 * (60 + 50) * 1e-6)
    assert split.wait_s == pytest.approx((40e-6, 40e-6))


def test_permutation_inside_a_dispatch_range_is_expert_time_and_never_waiting(tmp_path: Path) -> None:
    """Megatron permutes inside its dispatcher; the cost model prices permutation with the experts."""
    runs = []
    for rank, permute_us in enumerate((10.0, 30.0)):
        events = chrome_events(60.0, 40.0)
        link = {"correlation": 77, "stream": 7}
        events.append(
            {"ph": "X", "cat": "cuda_runtime", "name": "l", "ts": 6, "dur": 1, "pid": 1, "tid": 1, "args": link}
        )
        events.append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": "_permute_kernel",
                "ts": 1100,
                "dur": permute_us,
                "pid": 0,
                "tid": 7,
                "args": link,
            }
        )
        runs.append(attribute(read_chrome_trace(write_chrome(tmp_path / f"r{rank}.json", events))))
    split = split_waiting(runs)
    assert split.wait_s == pytest.approx((0.0, 0.0))
    assert split.slowest_experts_s == pytest.approx((47 + 30) * 1e-6)
    assert seconds_by_category(runs[1])["dispatch"] == pytest.approx(90e-6)
    assert seconds_by_part(runs[1]) == pytest.approx({"all_to_all": 110e-6, "expert_gemm": 77e-6, "optimizer": 3e-6})


def test_ranks_with_other_all_to_alls_are_not_compared(tmp_path: Path) -> None:
    full = read_chrome_trace(write_chrome(tmp_path / "r0.json", chrome_events(1.0, 1.0)))
    none = [event for event in chrome_events(1.0, 1.0) if event["cat"] != "user_annotation"]
    bare = read_chrome_trace(write_chrome(tmp_path / "r1.json", none))
    with pytest.raises(InvalidInputError, match="recording 1 has 0 all-to-alls"):
        split_waiting([attribute(full), attribute(bare)])
    with pytest.raises(InvalidInputError, match="no all-to-all is in a moe_rl range"):
        split_waiting([attribute(bare), attribute(bare)])
    with pytest.raises(InvalidInputError, match="recordings of at least two ranks"):
        split_waiting([attribute(full)])


def test_a_kernel_without_a_launch_counts_by_its_name(tmp_path: Path) -> None:
    events = [event for event in chrome_events(9.0, 1.0) if event["cat"] == "kernel"]
    run = read_chrome_trace(write_chrome(tmp_path / "r0.json", events))
    assert run.unlinked == 5
    assert seconds_by_category(attribute(run))["dispatch"] == pytest.approx(9e-6)


def test_the_inner_range_wins_and_a_closed_one_does_not(tmp_path: Path) -> None:
    spans = [("moe_rl/expert_gemm/L1", 0, 100), ("moe_rl/replicate/L1", 10, 20), ("something else", 30, 40)]
    events: list[dict] = [
        {"ph": "X", "cat": "user_annotation", "name": n, "ts": a, "dur": b - a, "pid": 1, "tid": 1} for n, a, b in spans
    ]
    for correlation, launch in enumerate((5, 15, 25, 35)):
        link = {"correlation": correlation}
        common = {"ph": "X", "args": link, "dur": 1}
        events.append({**common, "cat": "cuda_runtime", "name": "launch", "ts": launch, "pid": 1, "tid": 1})
        events.append({**common, "cat": "kernel", "name": ADD, "ts": launch, "pid": 0, "tid": 7})
    run = read_chrome_trace(write_chrome(tmp_path / "t.json", events))
    assert [item.category for item in attribute(run)] == ["expert_gemm", "replicate", "expert_gemm", "expert_gemm"]


def test_a_real_cpu_profile_is_attributed(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    torch.set_num_threads(1)
    x = torch.randn(64, 64)
    ranges.enable(nvtx=False, record_function=True)
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            with ranges.range("expert_gemm", layer=0, micro_batch=0, phase="forward"):
                for _ in range(5):
                    x = torch.nn.functional.silu(x @ x.T)
            x.softmax(dim=-1)
    finally:
        ranges.disable()
    profile.export_chrome_trace(str(tmp_path / "cpu.json"))
    run = read_chrome_trace(tmp_path / "cpu.json")
    assert run.device == "cpu"
    attributed = attribute(run)
    inside = [item for item in attributed if item.call is not None]
    assert {item.work.name for item in inside} >= {"aten::mm", "aten::silu"}
    assert all(item.category == "expert_gemm" for item in inside)
    assert {item.call.occurrence for item in inside} == {0}
    assert {item.category for item in attributed if "softmax" in item.work.name} == {"router"}
    total = sum(event.self_cpu_time_total for event in profile.key_averages() if event.key.startswith("aten::"))
    assert sum(item.work.duration_us for item in attributed) == pytest.approx(total, rel=0.02)
    with gzip.open(tmp_path / "cpu.json.gz", "wt") as file:
        file.write((tmp_path / "cpu.json").read_text())
    assert read_chrome_trace(tmp_path / "cpu.json.gz") == run


PROCESS = 5 << 24
"""A serialized process id; its threads differ in the lowest 24 bits."""


def write_nsys(path: Path, *, other_process: int = PROCESS) -> Path:
    """The tables and columns of an nsys export that the reader uses, with one layer of hand-checked kernels.

    The copy has the correlation id of a call in another process, which did not launch it.
    """
    thread = PROCESS + 9
    strings = {1: DISPATCH, 2: GROUPED, 3: COMBINE, 4: "moe_rl/dispatch/L0/mb0/forward"}
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", strings.items())
        database.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, streamId INTEGER, "
            "correlationId INTEGER, globalPid INTEGER, demangledName INTEGER)"
        )
        kernels = [
            (5_000, 105_000, 7, 1, PROCESS, 1),
            (120_000, 160_000, 7, 2, PROCESS, 2),
            (170_000, 220_000, 7, 3, other_process, 3),
        ]
        database.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?)", kernels)
        database.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, streamId INTEGER, "
            "correlationId INTEGER, globalPid INTEGER, bytes INTEGER)"
        )
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (106000, 116000, 8, 4, ?, 64)", (PROCESS,))
        database.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, "
            "correlationId INTEGER)"
        )
        database.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?)",
            [
                (1_000, 2_000, thread, 1),
                (11_000, 12_000, thread, 2),
                (21_000, 22_000, thread, 3),
                (5_000, 6_000, (6 << 24) + 9, 4),
            ],
        )
        database.execute(
            "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, textId INTEGER, "
            "globalTid INTEGER)"
        )
        database.executemany(
            "INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)",
            [
                (0, 10_000, 59, None, 4, thread),
                (10_000, 20_000, 59, "moe_rl/expert_gemm/L0/mb0/forward", None, thread),
            ],
        )
    return path


def test_an_nsys_export_gives_the_same_answers(tmp_path: Path) -> None:
    run = read_nsys_sqlite(write_nsys(tmp_path / "r0.sqlite"))
    seconds = seconds_by_category(attribute(run))
    assert seconds["dispatch"] == pytest.approx(100e-6)
    assert seconds["expert_gemm"] == pytest.approx(40e-6)
    assert seconds["combine"] == pytest.approx(50e-6)
    assert [item.call is not None for item in attribute(run)] == [True, False, True, False]
    assert (run.unlinked, seconds["other"]) == (1, pytest.approx(10e-6))


def test_an_nsys_export_of_several_processes_is_refused(tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "r0.sqlite", other_process=7 << 24)
    with pytest.raises(InvalidInputError, match="kernels of 2 processes: record one file per rank"):
        read_nsys_sqlite(path)


def test_communication_is_hidden_only_where_it_overlaps_computation(tmp_path: Path) -> None:
    """Communication 0..100 and 200..220 us, computation 60..140 on one and 80..100 on another stream, idle 140..200."""
    spans = [(DISPATCH, 0, 100, 1), (GROUPED, 60, 80, 2), (ADD, 80, 20, 3), (COMBINE, 200, 20, 1)]
    events = [
        {
            "ph": "X",
            "cat": "kernel",
            "name": name,
            "ts": ts,
            "dur": dur,
            "pid": 0,
            "tid": stream,
            "args": {"stream": stream},
        }
        for name, ts, dur, stream in spans
    ]
    busy = busy_time(attribute(read_chrome_trace(write_chrome(tmp_path / "t.json", events))))
    assert busy.span_s == pytest.approx(220e-6)
    assert busy.communicating_s == pytest.approx(120e-6)
    assert busy.computing_s == pytest.approx(80e-6)
    assert busy.hidden_s == pytest.approx(40e-6)
    assert busy.exposed_communication_s == pytest.approx(80e-6)
    assert busy.idle_s == pytest.approx(60e-6)


def test_recordings_are_taken_by_the_rank_they_name_else_by_position(tmp_path: Path) -> None:
    paths = [write_chrome(tmp_path / f"{rank}.json", chrome_events(1.0, 1.0), rank=rank) for rank in (2, 0)]
    assert list(read_recordings(paths)) == [0, 2]
    (tmp_path / "bare.json").write_text(json.dumps({"traceEvents": chrome_events(1.0, 1.0)}))
    assert list(read_recordings([paths[1], tmp_path / "bare.json"])) == [0, 1]
    with pytest.raises(InvalidInputError, match=r"0\.json and .*bare\.json both contain rank 0"):
        read_recordings([tmp_path / "bare.json", paths[1]])


def test_other_files_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"nsys export --type sqlite r0\.nsys-rep"):
        read_recording(tmp_path / "r0.nsys-rep")
    with pytest.raises(InvalidInputError, match=r"neither a torch\.profiler trace"):
        read_recording(tmp_path / "r0.csv")


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2", b'{"traceEvents": 3}', b'{"traceEvents": []}', b"\xff\xfe"])
def test_what_is_no_chrome_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=r"bad\.json"):
        read_chrome_trace(path)
    with pytest.raises(InvalidInputError, match=r"bad\.json"):
        read_nsys_sqlite(path)
    with pytest.raises(InvalidInputError, match="does not exist"):
        read_chrome_trace(tmp_path / "absent.json")


def test_damaged_events_are_refused_or_harmless(tmp_path: Path) -> None:
    for damage in ({"ts": None}, {"ts": float("nan")}, {"dur": "long"}, {"dur": float("inf")}, {"name": ...}):
        events = chrome_events(1.0, 1.0)
        events[-1] = {key: value for key, value in {**events[-1], **damage}.items() if value is not ...}
        with pytest.raises(InvalidInputError, match="is damaged"):
            read_chrome_trace(write_chrome(tmp_path / "t.json", events))
    for harmless in (None, 3, {"correlation": [1]}, {}):
        events = chrome_events(1.0, 1.0)
        events[-1]["args"] = harmless
        assert read_chrome_trace(write_chrome(tmp_path / "t.json", events)).unlinked == 1


def test_compare_lists_both_sides_in_the_parts_of_the_cost_model() -> None:
    breakdown = {"all_to_all": 1.1, "replicate": 0.2, "prefetch": 0.1, "head": 2.0, "overlap": -0.3, "optimizer": 0.4}
    rows = compare(breakdown, {"all_to_all": 1.0, "outside_experts": 0.5, "expert_gemm": 0.0}, share_of_step=0.5)
    assert [(row.part, row.predicted_s, row.measured_s) for row in rows] == [
        ("all_to_all", pytest.approx(0.55), 1.0),
        ("replicate", pytest.approx(0.15), 0.0),
        ("outside_experts", 1.0, 0.5),
        ("optimizer", 0.4, 0.0),
    ]
    assert rows[0].relative_error == pytest.approx(-0.45)
    assert rows[1].relative_error is None


def test_attention_that_no_range_marks_is_compared_with_the_rest() -> None:
    rows = compare({"attention": 2.0, "head": 1.0}, {"attention": 0.5, "outside_experts": 1.5}, attention_marked=False)
    assert [(row.part, row.predicted_s, row.measured_s) for row in rows] == [("outside_experts", 3.0, 2.0)]


def test_without_ranges_the_least_waiting_rank_stands_for_the_transfer(tmp_path: Path) -> None:
    bare = []
    for rank, (dispatch_us, gemm_us) in enumerate(((100.0, 40.0), (30.0, 80.0))):
        events = [event for event in chrome_events(dispatch_us, gemm_us) if event["cat"] != "user_annotation"]
        bare.append(attribute(read_chrome_trace(write_chrome(tmp_path / f"{rank}.json", events))))
    measured = measured_parts(bare, None)
    assert measured["all_to_all"] == pytest.approx(80e-6)
    assert measured["expert_gemm"] == pytest.approx(80e-6)
