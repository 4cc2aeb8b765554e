"""`moe-rl bench layer`: times of a GPU that is not there, beside times that an H200 took."""

import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_runner import moe_rl

pytest.importorskip("triton", reason="launches are recorded as Triton makes them")

from benchmarks.gpu.rows import read
from benchmarks.kernels import expert_times

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.triton
PARTLY_PLAIN, ALL_PLAIN = "forward, dgrad specialized; wgrad plain", "forward, dgrad, wgrad plain"

PREDICT = """
import json
from dataclasses import asdict
from benchmarks.kernels.expert_times import read
from benchmarks.kernels.held_out import even_layers, held_out, recorded_ranks
from benchmarks.kernels.predicted_layer import as_text, layer_document
from moe_rl.config import load_model, model_names

def document(model, gpu="h100", tokens=4096, ep_size=8):
    return layer_document(load_model(model).spec, gpu=gpu, ep_size=ep_size, tokens=tokens, command="")

example = {gpu: document("qwen3-235b-a22b", gpu, 16384) for gpu in ("h100", "h200")}
ranks = list(recorded_ranks(every=8))
print(json.dumps({
    "models": {model: document(model) for model in model_names()},
    "example": example,
    "texts": {gpu: as_text(layer) for gpu, layer in example.items()},
    "30b on an h200": document("qwen3-30b-a3b", "h200"),
    "small": document("qwen3-30b-a3b", tokens=255 * 16 // 8),
    "by ep_size": {ep_size: document("qwen3-30b-a3b", ep_size=ep_size) for ep_size in (1, 8)},
    "held out": [asdict(found) for found in held_out(ranks)],
    "ranks": [asdict(rank) for rank in ranks],
    "even layers": [asdict(layer) for layer in even_layers()],
}))
"""


@pytest.fixture(scope="module")
def predicted() -> Any:
    """Documents by a process of its own: other tests of this one may have Triton's interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PREDICT], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def milliseconds(document: Any) -> list[float]:
    return [row["experts_us"] / 1e3 for row in document["rows"]]


@pytest.mark.lengthy
def test_times_of_an_h200_that_gave_no_rates_are_predicted_as_well_as_the_page_says(predicted: Any) -> None:
    page = " ".join((ROOT / "docs" / "kernels.md").read_text().split())
    assert "predictions are 0.83 to 1.12 of the measured times" in page
    assert [len(found["ratios"]) for found in predicted["held out"]] == [8, 8, 8]
    *times, speedups = predicted["held out"]
    assert all(0.83 <= round(ratio, 2) <= 1.12 for found in times for ratio in found["ratios"])
    assert all(0.94 <= round(ratio, 2) <= 1.02 for ratio in speedups["ratios"])


@pytest.mark.lengthy
def test_the_record_has_what_is_predicted_now(predicted: Any) -> None:
    """`python -m benchmarks.kernels.held_out --save` writes it, in tenths of a microsecond."""
    record = [asdict(times) for times in expert_times.read()]
    recorded_ranks = [times for times in record if times["tokens"] is None]
    even_layers = [times for times in record if times["tokens"] is not None]
    for now, saved in zip(
        (*predicted["ranks"], *predicted["even layers"]), (*recorded_ranks[::8], *even_layers), strict=True
    ):
        assert {name: now[name] for name in ("model", "rows", "tokens", "measured")} == {
            name: saved[name] for name in ("model", "rows", "tokens", "measured")
        }
        for gpu in ("h200", "h100"):
            assert saved[gpu] == pytest.approx(now[gpu], abs=0.051)


@pytest.mark.lengthy
def test_the_speedup_of_fp8_is_printed_with_its_known_error(predicted: Any) -> None:
    example = predicted["example"]["h100"]
    bf16_us, fp8_us = (row["experts_us"] for row in example["rows"])
    permutation_us = example["rows"][0]["permutation_us"]
    assert example["speedup"] == {
        "experts": pytest.approx(bf16_us / fp8_us),
        "with permutations": pytest.approx((bf16_us + permutation_us) / (fp8_us + permutation_us)),
    }
    ranks = [times for times in expert_times.read() if times.measured is not None]
    measured = [times.measured.bf16_us / times.measured.fp8_us for times in ranks if times.measured]
    ratios = [times.h200.bf16_us / times.h200.fp8_us / speedup for times, speedup in zip(ranks, measured, strict=True)]
    assert example["speedup_error"] == pytest.approx(
        {"mean": statistics.mean(ratios), "low": min(ratios), "high": max(ratios)}
    )
    text = predicted["texts"]["h100"]
    assert f"FP8 is {bf16_us / fp8_us:.2f}x as fast (experts), " in text
    assert "were 0.94 to 1.02 of the measured ones, on average 0.97 (Qwen3-30B-A3B, 5,316 to 29,529 rows" in text
    assert "No speed-up was measured on an H100." in text
    assert "measured on an H100" not in predicted["texts"]["h200"]
    page = " ".join((ROOT / "docs" / "kernels.md").read_text().split())
    assert "its GEMMs alone are 1.47x as fast, as are 235B's" in page
    assert "36 % of FP8's time (28 % on an H200; 235B on an H100: 22 %)" in page
    gains, shares = [], []
    for document in (predicted["by ep_size"]["8"], example):
        bf16, fp8 = document["rows"]
        gains.append(f"{bf16['gemms_us'] / fp8['gemms_us']:.2f}")
        shares.append(f"{1 - fp8['gemms_us'] / fp8['experts_us']:.0%}")
    assert (gains, shares) == (["1.47", "1.47"], ["36%", "22%"])
    bf16, fp8 = predicted["30b on an h200"]["rows"]
    assert f"{1 - fp8['gemms_us'] / fp8['experts_us']:.0%}" == "28%"


def test_the_table_of_speedups_has_the_measured_times() -> None:
    """Of every rank of the recorded step, static placement was timed first of three plans."""
    rows = read(ROOT / "benchmarks" / "results" / "gpu" / "h200")
    figures = {row.step: row.figures for row in rows if row.phase == "promise"}
    bf16_us, fp8_us = (figures[step]["us of rows"][::3] for step in ("bf16", "fp8"))
    num_rows = figures["bf16"]["rows"][::3]
    for low, high, cell in ((0, 12_000, "1.18x"), (12_000, 20_000, "1.22x"), (20_000, 10**6, "1.22x")):
        speedups = [bf16 / fp8 for bf16, fp8, rows in zip(bf16_us, fp8_us, num_rows, strict=True) if low <= rows < high]
        assert f"{statistics.mean(speedups):.2f}x" == cell
        assert f"| {len(speedups)} recorded ranks | {cell} |" in expert_times.table(expert_times.read())


@pytest.mark.lengthy
def test_a_layer_is_faster_on_an_h200(predicted: Any) -> None:
    assert all(
        h200 < h100 for h200, h100 in zip(*map(milliseconds, reversed(predicted["example"].values())), strict=True)
    )


@pytest.mark.lengthy
def test_every_model_has_a_prediction_with_the_loops_that_its_rows_take(predicted: Any) -> None:
    for document in predicted["models"].values():
        assert document["measured"] is False
        loops = {row["loops"] for row in document["rows"]}
        are_specialized = document["rows_of_expert"] >= 256
        assert loops == {PARTLY_PLAIN if are_specialized else ALL_PLAIN}
        assert ("fewer than 256 rows" in document["why_plain"]) == (not are_specialized)
        assert all(row["tflops"] < 990 for row in document["rows"]), "of bf16; weight gradients in FP8 hold FP8 back"
    assert predicted["small"]["rows_of_expert"] == 255
    assert {row["loops"] for row in predicted["small"]["rows"]} == {ALL_PLAIN}
    assert "that of FP8 has not passed all checks on a GPU yet" in predicted["example"]["h100"]["why_plain"]
    assert "The plain wgrad in bf16 was never measured: 93% of its roof" in predicted["small"]["why_plain"]


@pytest.mark.parametrize(
    ("loops", "tiles", "reason"),
    [
        ([ALL_PLAIN], (), "All loops are plain, because none is verified on this GPU."),
        ([ALL_PLAIN], (("forward", 256),), "because experts have fewer than 256 rows on average"),
        ([PARTLY_PLAIN], (("forward", 256),), "that of FP8 has not passed all checks on a GPU yet"),
        (
            [PARTLY_PLAIN],
            (("forward", 256), ("wgrad", 128)),
            "wgrad in bf16 is plain, because no specialized loop exists.",
        ),
    ],
)
def test_the_reason_for_plain_loops_is_that_of_the_record(
    loops: list[str], tiles: tuple[tuple[str, int], ...], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = SimpleNamespace(tiles=[SimpleNamespace(op=op, tile=SimpleNamespace(block_m=rows)) for op, rows in tiles])
    from benchmarks.kernels.predicted_layer import why_plain  # not before other tests have set up Triton

    monkeypatch.setattr("benchmarks.kernels.predicted_layer.proven_on", lambda _chip: record)
    assert reason in why_plain(loops, 0.93)


@pytest.mark.lengthy
def test_with_ep_the_received_rows_are_permuted_too(predicted: Any) -> None:
    one, many = predicted["by ep_size"]["1"], predicted["by ep_size"]["8"]
    assert list(one["permutations_us"]) == ["tokens"]
    assert many["received_rows"] == 4096 * 8
    assert many["permutations_us"]["tokens"] == one["permutations_us"]["tokens"]
    # Both kernels of the second permutation, forward and backward, read and write every row.
    bytes_moved = 4 * 2 * 4096 * 8 * 2048 * 2
    assert many["permutations_us"]["received rows"] > bytes_moved / 3.35e6
    for document in (one, many):
        total_us = pytest.approx(sum(document["permutations_us"].values()))
        assert all(row["permutation_us"] == total_us for row in document["rows"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--gpu", "h10"), "--gpu: 'h10' is unknown. Did you mean 'h100'?"),
        (("--ep-size", "3"), "--ep-size must divide the 128 experts of Qwen3-30B-A3B, got 3."),
        (("--tokens", "0"), "--tokens must be positive, got 0."),
        (("--json", "/"), "--json / is a folder"),
    ],
)
def test_wrong_values_are_refused(options: tuple[str, ...], sentence: str) -> None:
    ran = moe_rl("bench", "layer", *options)
    assert (ran.code, ran.out) == (2, "")
    assert sentence in ran.err


ASK_FOR_A_PEBIBYTE = """
import torch
from benchmarks.kernels.predicted_layer import refused_without_address_space
with refused_without_address_space(num_experts=256):
    torch.empty(1 << 50, dtype=torch.uint8)
"""


def test_tensors_that_the_machine_has_no_room_for_are_refused() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-c", ASK_FOR_A_PEBIBYTE], capture_output=True, text=True, env=environment, check=False
    )
    assert "InvalidInputError: the tensors of 256 experts are too large" in done.stderr
    assert "set a larger --ep-size" in done.stderr


@pytest.mark.lengthy
def test_the_command_says_that_nothing_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.kernels.predicted_layer.is_interpreted", lambda: True)
    refused = moe_rl("bench", "layer")
    assert (refused.code, refused.out) == (2, "")
    assert "without TRITON_INTERPRET=1" in refused.err
    command = [sys.executable, "-c", "from moe_rl.cli import main; main()", "bench", "layer", "--json", "rows.json"]
    hidden = ("TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Predicted, not measured: H100")
    assert "UserWarning" not in done.stderr
    assert "Included: both permutations" in done.stdout
    document = json.loads((tmp_path / "rows.json").read_text())
    for row in document["rows"]:
        assert f"| `{row['recipe']}` | {row['experts_us'] / 1e3:.2f} |" in done.stdout
