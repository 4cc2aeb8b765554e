"""`moe-rl sweep`: every point once, whatever stops it on the way; and a picture of what it found."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from cli_runner import Ran, moe_rl, snapshot, write_npz

from moe_rl.config import cluster_yaml, load_cluster
from moe_rl.core.errors import InvalidInputError
from moe_rl.option_groups import words_of
from moe_rl.report.curves import LETTER
from moe_rl.report.sweep_chart import check_picture
from moe_rl.study.executors import executor_named
from moe_rl.study.options import SimulationOptions
from moe_rl.study.run_sweep import NOT_SWEPT, flags, parse_grid
from moe_rl.study.sweep_file import open_sweep
from moe_rl.version import install_line

SETTING = ("--ep-group-tokens", 200, "--tokens-per-rank", 4096, "--num-experts", 8, "--policy", "eplb-oracle,moe-rl")
GRID = ("--sweep", "ep=2,4", "--sweep", "replica_slots=0,1")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_npz(tmp_path / "t.npz")


def sweep(trace: Path, *arguments: object, setting: tuple[object, ...] = SETTING) -> Ran:
    return moe_rl("sweep", trace, *setting, *arguments)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- what a sweep computes ----------------------------------------------------------------------------------


@pytest.mark.lengthy
def test_every_combination_is_simulated_once_and_equals_simulate(tmp_path: Path, trace: Path) -> None:
    out = tmp_path / "s.jsonl"
    ran = sweep(trace, *GRID, "--out", out)
    assert ran.code == 0, ran.err
    lines = lines_of(out)
    assert [line["point"] for line in lines] == [
        {"expert_model_parallel_size": ep, "replica_slots": slots} for ep in (2, 4) for slots in (0, 1)
    ]
    alone = tmp_path / "one.json"
    moe_rl("simulate", trace, *SETTING, "--ep", 4, "--replica-slots", 1, "--json", alone)
    expected = json.loads(alone.read_text())
    for name, figures in lines[3]["policies"].items():
        for key, value in figures.items():
            if key != "plan_time_s":
                assert value == expected["policies"][name][key], (name, key)
    assert lines[3]["setting"]["phi"] == expected["setting"]["phi"]
    assert set(lines[0]["policies"]) == {"static", "eplb-oracle", "moe-rl"}


@pytest.mark.lengthy
def test_the_table_has_a_line_per_point(tmp_path: Path, trace: Path) -> None:
    ran = sweep(trace, *GRID, "--out", tmp_path / "s.jsonl")
    cells = [line.split() for line in ran.out.splitlines()]
    for line in lines_of(tmp_path / "s.jsonl"):
        figures = line["policies"]
        expected = [
            str(line["point"]["expert_model_parallel_size"]),
            str(line["point"]["replica_slots"]),
            f"{figures['static']['imbalance']:.3f}",
            f"{line['setting']['phi']:.2f}",
            *(f"{figures[name]['speedup_vs_static']:.3f}x" for name in ("eplb-oracle", "moe-rl")),
            f"{line['yardsticks']['forced_balance']['speedup_vs_static']:.3f}x",
        ]
        assert expected in cells


def test_a_number_of_gpus_can_be_swept_over_as_simulate_takes_it(tmp_path: Path, trace: Path) -> None:
    setting = ("--num-experts", 8, "--objective", "imbalance", "--policy", "static,moe-rl", "--seed", 0)
    ran = sweep(
        trace, "--gpus", 8, "--micro-batch-tokens", 80, "--sweep", "ep=2,4", "--out", tmp_path / "s.jsonl",
        setting=setting,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert [line["setting"]["num_ep_groups"] for line in lines_of(tmp_path / "s.jsonl")] == [4, 2]


def test_without_times_the_sweep_shows_imbalance(tmp_path: Path, trace: Path) -> None:
    plot = tmp_path / "s.svg"
    ran = sweep(trace, "--sweep", "ep=2,4", "--objective", "imbalance", "--out", tmp_path / "s.jsonl", "--plot", plot)
    assert ran.code == 0, ran.err
    assert "Max / mean rank load" in ran.out
    assert "phi" not in ran.out
    assert all("step_time_s" not in line["policies"]["moe-rl"] for line in lines_of(tmp_path / "s.jsonl"))
    assert "max / mean rank load" in plot.read_text()


@pytest.mark.lengthy
def test_every_kind_of_option_can_be_swept(tmp_path: Path, trace: Path) -> None:
    mine = tmp_path / "clusters_of_our_own_with_what_was_measured_on_them_in_november" / "mine.yaml"
    mine.parent.mkdir()
    mine.write_text(cluster_yaml(load_cluster("h100").perturbed(nvlink_gb_per_s=0.5)))
    ran = sweep(
        trace, "--ep", 4, "--sweep", "moe_token_dispatcher_type=flex,alltoall", "--sweep", f"cluster=h200,{mine}",
        "--sweep", "overlap-moe-expert-parallel-comm=false,true", "--sweep", "recompute_granularity=none,full",
        "--sweep", "--seq-length=512,none", "--out", tmp_path / "s.jsonl", "--plot", tmp_path / "s.svg",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    lines = lines_of(tmp_path / "s.jsonl")
    assert len({json.dumps(line["point"]) for line in lines}) == 2**5
    by_dispatcher = {line["setting"]["dispatcher"] for line in lines}
    assert by_dispatcher == {"deepep", "alltoall"}
    assert {line["setting"]["recompute"] for line in lines} == {"none", "full"}
    assert {line["setting"]["cluster"] for line in lines} == {"h200", "h100"}


def test_a_default_that_follows_from_another_option_follows_in_every_point() -> None:
    base = SimulationOptions(expert_model_parallel_size=4, ep_group_tokens=200)
    grid = parse_grid(["seq_length=2,3"], base)
    assert [options.passes.seq_length for options in grid.options] == [2, 3]
    assert all(set(options.stated_words()) == {*base.stated_words(), "seq_length"} for options in grid.options)
    assert all(options.parallel.expert_model_parallel_size == 4 for options in grid.options)
    lists = {"recompute_modules", "offload_modules", "software", "cuda_graph_scope", "known_step", "known_step_config"}
    assert set(flags().values()) == set(words_of(SimulationOptions)) - NOT_SWEPT - lists


# --- stopping and going on ----------------------------------------------------------------------------------


def run_until_a_point_is_done(trace: Path, out: Path, stop: signal.Signals) -> tuple[int, str]:
    """Start a sweep in a process of its own, stop it as soon as its file holds a line, and return what it said."""
    command = ["moe-rl", "sweep", trace, *SETTING, "--sweep", "ep=2,4", "--sweep", MANY, "--out", out]
    # A test run in the background of a shell inherits SIGINT ignored; a person's terminal does not.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"sys.argv = {list(map(str, command))!r}; from moe_rl.cli import main; main()"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env=environment)
    while running.poll() is None and not (out.exists() and out.read_bytes().count(b"\n")):
        time.sleep(0.005)
    running.send_signal(stop)
    said = running.communicate(timeout=120)[1]
    return running.returncode, said


MANY = "seq_length=" + ",".join(str(256 * number) for number in range(1, 13))
"""Twelve points for each EP: far more than are done before the signal arrives."""


@pytest.mark.lengthy
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_a_sweep_that_was_stopped_goes_on_where_it_was(tmp_path: Path, trace: Path, stop: signal.Signals) -> None:
    out = tmp_path / "s.jsonl"
    code, said = run_until_a_point_is_done(trace, out, stop)
    assert code == (-signal.SIGKILL if stop is signal.SIGKILL else 130), said
    before = out.read_bytes()
    done = before.count(b"\n")
    assert 1 <= done < 24
    assert before.endswith(b"\n")
    if stop is signal.SIGINT:
        assert f"stopped with {done} points in" in said
        assert "Traceback" not in said
    ran = sweep(trace, "--sweep", "ep=2,4", "--sweep", MANY, "--out", out)
    assert ran.code == 0, ran.err
    assert f"{done} of 24 points are in" in ran.err
    after = out.read_bytes()
    assert after.startswith(before)
    points = [json.dumps(line["point"]) for line in lines_of(out)]
    assert len(points) == len(set(points)) == 24


@pytest.mark.lengthy
def test_a_finished_sweep_only_draws(tmp_path: Path, trace: Path) -> None:
    out, plot = tmp_path / "s.jsonl", tmp_path / "s.svg"
    first = sweep(trace, *GRID, "--out", out, "--plot", plot)
    content, picture = out.read_bytes(), plot.read_bytes()
    again = sweep(trace, *GRID, "--out", out, "--plot", plot)
    assert (again.code, again.out) == (0, first.out)
    assert "4 of 4 points are in" in again.err
    assert out.read_bytes() == content
    assert plot.read_bytes() == picture


@pytest.mark.lengthy
def test_an_incomplete_last_line_is_simulated_again(tmp_path: Path, trace: Path) -> None:
    out = tmp_path / "s.jsonl"
    sweep(trace, *GRID, "--out", out)
    whole = out.read_bytes()
    cut = whole[: whole.rstrip(b"\n").rfind(b"\n") + 40]
    out.write_bytes(cut)
    ran = sweep(trace, *GRID, "--out", out)
    assert ran.code == 0, ran.err
    assert "was incomplete; its point is simulated again" in " ".join(ran.err.split())
    assert [line["point"] for line in lines_of(out)] == [json.loads(line)["point"] for line in whole.splitlines()]


@pytest.mark.lengthy
def test_values_may_be_added_and_left_out(tmp_path: Path, trace: Path) -> None:
    out = tmp_path / "s.jsonl"
    sweep(trace, "--sweep", "ep=2", "--sweep", "replica_slots=0,1", "--out", out)
    ran = sweep(trace, *GRID, "--out", out)
    assert "2 of 4 points are in" in ran.err
    ran = sweep(trace, "--sweep", "ep=4", "--sweep", "replica_slots=1", "--out", out)
    assert "1 of 1 points are in" in ran.err
    assert len(lines_of(out)) == 4


@pytest.mark.lengthy
def test_the_trace_may_move(tmp_path: Path, trace: Path) -> None:
    out = tmp_path / "s.jsonl"
    sweep(trace, *GRID, "--out", out)
    moved = trace.rename(tmp_path / "other.npz")
    assert "4 of 4 points are in" in sweep(moved, *GRID, "--out", out).err


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("grid", "setting", "sentence"),
    [
        (GRID, (*SETTING[:-1], "moe-rl"), 'options.policy ["eplb-oracle", "moe-rl"], not ["moe-rl"]'),
        (GRID, (*SETTING, "--seed", 3), "options.seed 0, not 3"),
        (GRID, (*SETTING, "--cluster", "h200"), 'options.cluster "h100", not "h200"'),
        (("--sweep", "ep=2,4"), SETTING, 'swept ["expert_model_parallel_size", "replica_slots"], not'),
    ],
)
def test_other_settings_are_refused_by_name_and_the_file_stays(
    tmp_path: Path, trace: Path, grid: tuple[str, ...], setting: tuple[object, ...], sentence: str
) -> None:
    out = tmp_path / "s.jsonl"
    assert sweep(trace, *GRID, "--out", out).code == 0
    before = snapshot(tmp_path)
    ran = sweep(trace, *grid, "--out", out, "--plot", tmp_path / "s.svg", setting=setting)
    assert (ran.code, ran.out) == (2, "")
    assert "s.jsonl was made with" in ran.err
    assert sentence in ran.err
    assert snapshot(tmp_path) == before


@pytest.mark.lengthy
def test_another_trace_of_the_same_name_is_refused(tmp_path: Path, trace: Path) -> None:
    out = tmp_path / "s.jsonl"
    sweep(trace, *GRID, "--out", out)
    write_npz(trace, sequences=11)
    ran = sweep(trace, *GRID, "--out", out)
    assert ran.code == 2
    assert "trace_sha256" in ran.err


def test_a_cluster_file_that_changed_is_refused(tmp_path: Path, trace: Path) -> None:
    mine, out = tmp_path / "mine.yaml", tmp_path / "s.jsonl"
    mine.write_text(cluster_yaml(load_cluster("h100")))
    sweep(trace, *GRID, "--cluster", mine, "--out", out)
    mine.write_text(cluster_yaml(load_cluster("h100").perturbed(gemm_tflops=0.5)))
    ran = sweep(trace, *GRID, "--cluster", mine, "--out", out)
    assert ran.code == 2
    rate = load_cluster("h100").gemm_tflops
    assert f"cluster.gemm_tflops {rate}, not {rate / 2}" in ran.err


@pytest.mark.parametrize("content", ["my notes\n", '{"a": 1}\n', "half a line", '{"schema": "moe_rl.sweep/1"}\n', "\n"])
def test_a_file_of_something_else_is_never_written(tmp_path: Path, trace: Path, content: str) -> None:
    out = tmp_path / "s.jsonl"
    out.write_text(content)
    ran = sweep(trace, *GRID, "--out", out)
    assert ran.code == 2
    assert "moe-rl sweep" in ran.err
    assert out.read_text() == content


def test_two_sweeps_do_not_share_a_file(tmp_path: Path) -> None:
    out = tmp_path / "s.jsonl"
    with (
        open_sweep(out, {}),
        pytest.raises(InvalidInputError, match="another sweep is writing to"),
        open_sweep(out, {}),
    ):
        pass
    assert not out.exists()


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    """A limit on the size of files stops the write half-way, as a full disk does."""
    resource = pytest.importorskip("resource")
    out = tmp_path / "s.jsonl"
    with open_sweep(out, {}) as file:
        file.append({"ep": 1}, {"policies": {}})
        before = out.read_bytes()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))
        try:
            with pytest.raises(InvalidInputError, match=r"s\.jsonl cannot be written: (No space left|File too large)"):
                file.append({"ep": 2}, {"policies": {}})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, ignored)
    assert out.read_bytes() == before


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--sweep", "ep=2,3"), "EP 3: --ep 3 does not divide the 8 experts"),
        (("--sweep", "ep=two"), "key 'expert_model_parallel_size'"),
        (("--sweep", "ep"), "must have the form name=value,value"),
        (("--sweep", "ep="), "must have the form name=value,value"),
        (("--sweep", "replica_slot=2"), "is not an option whose values can be compared. Did you mean 'replica_slots'?"),
        (("--sweep", "objective=time,imbalance"), "--sweep 'objective' is not an option whose values can be compared"),
        (("--sweep", "policy=static"), "--sweep 'policy' is not an option whose values can be compared"),
        (("--sweep", "ep=2,2"), "gives a value of expert_model_parallel_size twice"),
        (("--sweep", "ep=2", "--sweep", "expert-model-parallel-size=4"), "gives expert_model_parallel_size twice"),
        (("--sweep", "moe_token_dispatcher_type=flex,alltoal"), "Did you mean 'alltoall'"),
        (("--sweep", "cluster=h100,h1000"), "unknown cluster 'h1000'"),
        (("--sweep", "ep=2", "--out", "s.json"), "--out s.json must end in .jsonl"),
        (("--sweep", "ep=2", "--plot", "s.gif"), "--plot s.gif must end in .html, .svg, .png or .pdf"),
        (("--sweep", "ep=2", "--plot", "t.npz"), "must end in .html"),
    ],
)
def test_a_wrong_grid_or_file_is_refused_before_any_point(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    given = arguments if "--out" in arguments else (*arguments, "--out", "s.jsonl")
    ran = sweep(trace, *given)
    assert (ran.code, ran.out) == (2, "")
    assert sentence in " ".join(ran.err.split())
    assert snapshot(tmp_path) == before


def test_a_point_that_fails_names_itself_and_keeps_the_others(tmp_path: Path, trace: Path) -> None:
    """eplb needs two micro-batches in this trace of one step: at most 1000 tokens it has one."""
    out = tmp_path / "s.jsonl"
    setting = ("--ep", 4, "--num-experts", 8, "--policy", "eplb")
    ran = sweep(trace, "--sweep", "ep_group_tokens=200,1000", "--out", out, setting=setting)
    assert ran.code == 2
    assert "tokens/EP group 1,000: policy 'eplb' plans from an earlier step" in ran.err
    assert len(lines_of(out)) == 1
    ran = sweep(trace, "--sweep", "ep_group_tokens=200,240", "--out", out, setting=setting)
    assert ran.code == 0, ran.err


# --- where points run ---------------------------------------------------------------------------------------


def without_plan_times(path: Path) -> list[dict[str, Any]]:
    lines = lines_of(path)
    for line in lines:
        for figures in line["policies"].values():
            figures.pop("plan_time_s")
    return lines


@pytest.mark.lengthy
def test_results_and_their_order_do_not_depend_on_the_number_of_jobs(tmp_path: Path, trace: Path) -> None:
    for jobs in (1, 3):
        ran = sweep(trace, *GRID, "--jobs", jobs, "--out", tmp_path / f"{jobs}.jsonl")
        assert ran.code == 0, ran.err
    assert without_plan_times(tmp_path / "1.jsonl") == without_plan_times(tmp_path / "3.jsonl")


def test_a_killed_worker_ends_the_sweep_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="a worker process was killed"):
        list(executor_named("local", jobs=2)(killed_at_two, range(6)))
    assert sorted(executor_named("local", jobs=2)(doubled, range(6))) == [(i, 2 * i) for i in range(6)]


def doubled(index: int) -> int:
    return 2 * index


def killed_at_two(index: int) -> int:
    if index == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return index


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--executor", "slurm"), "executor 'slurm' is unknown. Known: local, ray."),
        (("--ray-address", "auto"), "ray_address requires executor 'ray'."),
        (("--jobs", 0), "jobs must be at least 1, got 0."),
    ],
)
def test_unknown_executors_are_refused(
    tmp_path: Path, trace: Path, arguments: tuple[object, ...], message: str
) -> None:
    ran = sweep(trace, *GRID, *arguments, "--out", tmp_path / "s.jsonl")
    assert (ran.code, (tmp_path / "s.jsonl").exists()) == (2, False)
    assert message in ran.err


# --- the picture --------------------------------------------------------------------------------------------


def test_the_page_says_what_the_sweep_found(tmp_path: Path, trace: Path) -> None:
    page, out = tmp_path / "s.html", tmp_path / "s.jsonl"
    ran = sweep(trace, "--sweep", "ep=2,4,8", "--out", out, "--plot", page)
    assert ran.code == 0, ran.err
    points = [json.loads(line) for line in out.read_text().splitlines()]
    speedups = [point["policies"]["moe-rl"]["speedup_vs_static"] for point in points]
    said = re.search("<h1>(.*)</h1>", page.read_text())
    assert said is not None
    assert f"moe-rl is {min(speedups):.2f}x to {max(speedups):.2f}x as fast as static placement" in said[1]
    assert f"{max(speedups):.3f}x" in page.read_text()  # the table
    assert "http:" not in page.read_text().replace("http://www.w3.org", "")


def test_the_picture_names_every_policy_parameter_and_unit(tmp_path: Path, trace: Path) -> None:
    plot = tmp_path / "s.svg"
    grid = ("--sweep", "ep=2,4,8", "--sweep", "seq_length=1024,4096")
    ran = sweep(trace, *grid, "--out", tmp_path / "s.jsonl", "--plot", plot)
    assert ran.code == 0, ran.err
    texts = {element.text for element in ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}text")}
    for text in (
        "expert-parallel size (ranks)", "sequence length (tokens)", "speed-up over static placement (×)", "eplb-oracle",
        "moe-rl", "forced balance", "EP 4", "sequence 4,096",
    ):  # fmt: skip
        assert text in texts
    title = " ".join(text for text in texts if text)
    assert "t.npz" in title
    assert "4,096 tokens per rank and micro-batch" in title


def places(plot: Path) -> list[list[tuple[float, float]]]:
    """The points of every line that is drawn."""
    found = re.findall(r'<polyline[^>]*points="([^"]*)"', plot.read_text())
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in line.split())] for line in found]


def test_every_value_is_drawn_at_its_height(tmp_path: Path, trace: Path) -> None:
    """One scale for all plots: speed-ups are an affine function of the height, the same for every line."""
    plot, out = tmp_path / "s.svg", tmp_path / "s.jsonl"
    sweep(trace, "--sweep", "ep=2,4", "--out", out, "--plot", plot)
    lines = lines_of(out)
    static, balanced, *policies = places(plot)[:4]
    values = [[line["policies"][name]["speedup_vs_static"] for line in lines] for name in ("eplb-oracle", "moe-rl")]
    values.append([line["yardsticks"]["forced_balance"]["speedup_vs_static"] for line in lines])
    drawn = [y for line in (*policies, balanced) for _, y in line]
    flat = [value for of_line in values for value in of_line]
    (top, largest), (bottom, least) = min(zip(drawn, flat, strict=True)), (static[0][1], 1.0)
    for y, value in zip(drawn, flat, strict=True):
        assert y == pytest.approx(bottom + (top - bottom) * (value - least) / (largest - least), abs=0.2)


def test_a_picture_is_the_same_every_time_and_inside_its_frame(tmp_path: Path, trace: Path) -> None:
    mine = tmp_path / "clusters_of_our_own_with_what_was_measured_on_them_in_november" / "mine.yaml"
    mine.parent.mkdir()
    mine.write_text(cluster_yaml(load_cluster("h100")))
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    grid = ("--ep", 4, "--sweep", f"cluster=h100,{mine}", "--sweep", "replica_slots=0,1")
    for plot in (first, second):
        assert sweep(trace, *grid, "--out", tmp_path / "s.jsonl", "--plot", plot).code == 0
    assert first.read_bytes() == second.read_bytes()
    root = ElementTree.parse(first).getroot()
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    for element in root.iter("{http://www.w3.org/2000/svg}text"):
        x, y, letters = float(element.attrib["x"]), float(element.attrib["y"]), LETTER * len(element.text or "")
        left, right = {"start": (0.0, letters), "middle": (letters / 2, letters / 2), "end": (letters, 0.0)}[
            element.attrib["text-anchor"]
        ]
        assert 0 < y < height
        assert (x - left >= 0 and x + right <= width) or "rotate" in element.attrib.get("transform", ""), element.text
    assert all(0 < x < width and 0 < y < height for line in places(first) for x, y in line)


@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG"), ("svg", b"<svg"), ("pdf", b"%PDF")])
def test_the_picture_is_of_the_kind_that_its_name_says(tmp_path: Path, trace: Path, kind: str, start: bytes) -> None:
    try:
        check_picture(kind)
    except InvalidInputError as error:
        pytest.skip(str(error))
    plot = tmp_path / f"s.{kind}"
    assert sweep(trace, "--sweep", "ep=4", "--out", tmp_path / "s.jsonl", "--plot", plot).code == 0
    assert plot.read_bytes().startswith(start)


def test_a_picture_of_static_placement_alone_is_refused_before_any_point(tmp_path: Path, trace: Path) -> None:
    out = tmp_path / "o.jsonl"
    ran = moe_rl("sweep", trace, "--sweep", "ep=2", "--policy", "static", "--out", out, "--html", tmp_path / "p.html")
    assert (ran.code, "give another policy besides static" in ran.err) == (2, True), ran.err
    assert not out.exists()


@pytest.mark.parametrize("kind", ["png", "pdf"])
def test_a_picture_that_cannot_be_made_is_refused_before_any_point(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    before = snapshot(tmp_path)
    ran = sweep(trace, "--sweep", "ep=4", "--out", tmp_path / "s.jsonl", "--plot", tmp_path / f"s.{kind}")
    assert (ran.code, ran.out) == (2, "")
    assert f"a .{kind} file needs CairoSVG ({install_line('plot')})" in ran.err
    assert snapshot(tmp_path) == before
