"""`moe-rl bench gemm` and its siblings: what they print, write and refuse where there is no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runner import moe_rl

pytest.importorskip("torch", reason="kernel benchmarks need torch")

import torch

from benchmarks.operators.gemm_suites import ALL_SUITES
from benchmarks.operators.run import select
from moe_rl.cli.bench import KERNEL_SUITES
from moe_rl.core.errors import InvalidInputError
from moe_rl.kernels.registry import is_interpreted

pytestmark = pytest.mark.triton

QUICK = ("--device", "cpu", "--budget-s", "0.001", "--tokens", "16")


def test_every_suite_has_a_command() -> None:
    assert set(KERNEL_SUITES) == set(ALL_SUITES)


@pytest.mark.parametrize("suite", ["permute", "quantize", "swiglu", "experts", "router"])
def test_a_suite_prints_a_table_of_checked_rows_and_writes_the_document(suite: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    ran = moe_rl("bench", suite, *QUICK, "--model", "tiny-oai", "--routing", "hot", "--json", out)
    assert ran.code == 0, ran.err
    document = json.loads(out.read_text())
    assert document["command"].startswith(f"moe-rl bench {suite}")
    timed = [row for row in document["rows"] if "time_us" in row]
    assert timed
    assert all(row["passed"] and row["provider"] in ("reference", "torch") for row in timed)
    assert {row["case"] for row in document["rows"]} == {"tiny-oai T16 hot"}
    predicted = [row for row in document["rows"] if "predicted_us" in row]
    assert {row["provider"] for row in predicted} == (set() if is_interpreted() else {"triton"})
    assert not any("mxfp8" in row["variant"] for row in predicted), "an H100 has no block-scaled products"
    assert ran.out.count("\n| ") == len(timed) + len(predicted)
    assert "not run: triton: " in ran.err
    assert {f"  {row['operator']}, {row['variant']}, {row['pass']}" for row in timed} <= set(ran.err.splitlines())


def test_on_one_rank_all_experts_of_the_model_are_timed() -> None:
    (case,) = select("gemm", device="cpu", models="qwen3-30b-a3b", routings="even", tokens=2048, ep_size=1).cases
    assert case.m_offsets("cpu").diff().tolist() == [2048 * 8 // 128] * 128
    assert str(case) == "qwen3-30b-a3b EP1 T2048 even"
    (usual,) = select("gemm", device="cpu", models="qwen3-30b-a3b", routings="even", tokens=2048).cases
    assert usual.m_offsets("cpu").diff().tolist() == [2048 * 8 * 8 // 128] * 16
    assert str(usual) == "qwen3-30b-a3b T2048 even"


def test_passes_and_providers_are_chosen(tmp_path: Path) -> None:
    options = ("--model", "tiny", "--routing", "even", "--pass", "dgrad,wgrad", "--provider", "torch", "--json", "-")
    ran = moe_rl("bench", "gemm", *QUICK, *options)
    assert ran.code == 0, ran.err
    rows = json.loads(ran.out)["rows"]
    assert {(row["operator"], row["pass"]) for row in rows} == {
        ("grouped_gemm_dgrad", "dgrad"), ("grouped_gemm_wgrad", "wgrad")
    }  # fmt: skip
    assert {row["provider"] for row in rows} == {"torch"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_ends_with_2() -> None:
    ran = moe_rl("bench", "gemm")
    assert (ran.code, ran.out) == (2, "")
    assert "there is no CUDA GPU here" in ran.err
    assert "--device cpu" in ran.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "qwen3-30b"), "--model: 'qwen3-30b' is unknown. Did you mean 'qwen3-30b-a3b'?"),
        (("--routing", "zpif"), "--routing: 'zpif' is unknown. Did you mean 'zipf'?"),
        (("--pass", "dgad"), "Did you mean 'dgrad'?"),
        (("--pass", "backward"), "--pass: gemm has no pass backward, only forward, dgrad, wgrad, end-to-end."),
        (("--ep-size", "3"), "--ep-size must divide the 8 experts of tiny, got 3."),
        (("--provider", "tritn"), "Did you mean 'triton'?"),
        (("--device", "gpu"), "--device: 'gpu' is unknown."),
        (("--tokens", "-1"), "--tokens must not be negative, got -1."),
        (("--budget-s", "0"), "--budget-s must be positive, got 0.0."),
        (("--trace", "none.moetrace"), "there is no trace at none.moetrace."),
        (("--routing", "trace"), "countdown-grpo.moetrace fits none of tiny, tiny-oai"),
        (("--json", "/"), "--json / is a folder"),
    ],
)
def test_wrong_values_are_refused(options: tuple[str, ...], said: str) -> None:
    ran = moe_rl("bench", "gemm", "--device", "cpu", *options)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


def test_a_recorded_trace_is_left_out_where_it_fits_no_model_and_taken_where_it_does() -> None:
    on_gpu = select("permute", device="cuda").cases
    traced = {case.model.name for case in on_gpu if case.routing == "trace"}
    assert traced == {"qwen3-30b-a3b", "qwen3-235b-a22b"}
    assert {case.routing for case in select("permute", device="cpu").cases} == {
        "uniform",
        "zipf",
        "hot",
        "hot-last",
        "even",
    }
    with pytest.raises(InvalidInputError, match="fits none of gpt-oss-120b"):
        select("permute", device="cuda", models="gpt-oss-120b", routings="trace")


PRESET = """
import sys
from moe_rl.cli import main
sys.argv = ["moe-rl", "bench"]
main()
"""


@pytest.mark.lengthy
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_command_every_suite_runs_on_a_tiny_model_beside_what_an_h100_would_take() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PRESET], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "| tiny T" in line
    ]
    ours = [row for row in cells if row[4] == "triton"]
    assert len(ours) >= 30, "every operator of every suite has a roof"
    assert all(row[5] == "" and float(row[-1]) >= 2.0 for row in ours), "a launch alone takes 2 us"
    assert all(float(row[5]) > 0 for row in cells if row[4] != "triton")


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, moe_rl.cli.bench; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_without_torch_the_sentence_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_rl.cli.bench.importlib.util.find_spec", lambda name: None)
    ran = moe_rl("bench", "permute")
    assert (ran.code, ran.out) == (2, "")
    assert "moe-rl bench permute needs torch: pip install" in ran.err
