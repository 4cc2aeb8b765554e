"""`moe-rl bench layer`: times of a GPU that is not there, beside times that an H200 took."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runner import moe_rl

pytest.importorskip("triton", reason="launches are recorded as Triton makes them")

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.triton

PREDICT = """
import json
from dataclasses import asdict
from benchmarks.kernels.predicted_layer import held_out, layer_document
from moe_rl.config import load_model, model_names

def document(model, gpu="h100", tokens=4096, ep_size=8):
    return layer_document(load_model(model).spec, gpu=gpu, ep_size=ep_size, tokens=tokens, command="")

print(json.dumps({
    "models": {model: document(model) for model in model_names()},
    "example": {gpu: document("qwen3-235b-a22b", gpu, 16384) for gpu in ("h100", "h200")},
    "small": document("qwen3-30b-a3b", tokens=255 * 16 // 8),
    "by ep_size": {ep_size: document("qwen3-30b-a3b", ep_size=ep_size) for ep_size in (1, 8)},
    "held out": [asdict(found) for found in held_out(every=8)],
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
    page = (ROOT / "docs" / "kernels.md").read_text()
    assert "predictions are 0.83 to 1.12 of the\nmeasured times" in page
    assert [len(found["ratios"]) for found in predicted["held out"]] == [8, 8]
    assert all(0.83 <= round(ratio, 2) <= 1.12 for found in predicted["held out"] for ratio in found["ratios"])


@pytest.mark.lengthy
def test_the_page_has_the_times_of_its_example(predicted: Any) -> None:
    bf16, fp8 = milliseconds(predicted["example"]["h100"])
    page = " ".join((ROOT / "docs" / "kernels.md").read_text().split())
    assert f"take {bf16:.1f} ms in bf16 and {fp8:.1f} ms in FP8" in page
    assert all(
        h200 < h100 for h200, h100 in zip(*map(milliseconds, reversed(predicted["example"].values())), strict=True)
    )


@pytest.mark.lengthy
def test_every_model_has_a_prediction_with_the_loops_that_its_rows_take(predicted: Any) -> None:
    for document in predicted["models"].values():
        assert document["measured"] is False
        loops = {row["loops"] for row in document["rows"]}
        assert loops == {"4 specialized, 2 plain" if document["rows_of_expert"] >= 256 else "0 specialized, 6 plain"}
        assert all(row["tflops"] < 990 for row in document["rows"]), "of bf16; weight gradients in FP8 hold FP8 back"
    assert predicted["small"]["rows_of_expert"] == 255
    assert {row["loops"] for row in predicted["small"]["rows"]} == {"0 specialized, 6 plain"}


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
