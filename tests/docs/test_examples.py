"""The examples run as their first lines say: by `make examples`, those of frameworks by `make test-integrations`."""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import ROOT

from moe_rl.balancing.config import GROUPED, BalancerConfig

EXAMPLES = ROOT / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(*command: str, folder: Path) -> str:
    ran = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False, timeout=240
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_megatron_on_two_ranks_loses_nothing_and_waits_less(tmp_path: Path) -> None:
    """The example itself compares the losses. Its table is the one of the tutorial, but for a loss's last digits."""
    printed_lines = run(*TORCHRUN, str(EXAMPLES / "megatron_cpu.py"), folder=tmp_path).splitlines()
    page = (ROOT / "docs" / "tutorials" / "run.md").read_text()
    block = re.search(r"```text\n( +MOE_RL=observe.*?)```", page, re.DOTALL)
    assert block is not None
    heads, rows = printed_lines[:2], [line.split() for line in printed_lines[2:]]
    assert "\n".join(heads) in block[1]
    assert [row[:4] for row in rows] == [line.split()[:4] for line in block[1].splitlines()[2:]]
    assert all(float(balanced) < float(observed) for _, observed, _, balanced, *_ in rows)


@pytest.mark.slow
def test_a_recorded_model_of_hugging_face_is_a_trace(tmp_path: Path) -> None:
    said = run(str(EXAMPLES / "record_hf.py"), "run.moetrace", "--sequences", "4", "--new-tokens", "4", folder=tmp_path)
    assert "4 sequences" in said
    assert (tmp_path / "run.moetrace" / "manifest.json").exists()


@pytest.mark.slow
def test_a_countdown_run_is_trained_and_its_routes_are_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said = run("-m", "examples.countdown.train", "run", folder=tmp_path)
    busiest = re.findall(r"step \d: reward [\d.]+, busiest rank ([\d.]+) -> ([\d.]+)", said)
    assert len(busiest) == 4
    assert all(float(after) <= float(before) for before, after in busiest)
    assert re.search(r"^ *moe-rl +1\.\d+", said, re.MULTILINE)


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLES / "simulate_my_trace.ipynb", as_version=4)
    kept = printed(notebook)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    kinds = {kind for output in shown for kind in output.get("data", {})}
    assert {"text/html", "image/svg+xml"} <= kinds
    assert "report.html" in str(shown[-1])
    assert kept == printed(notebook), "make tables keeps what the notebook shows"


def printed(notebook: Any) -> list[str]:
    """What the cells print."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [output["text"] for output in outputs if output["output_type"] == "stream"]


LAYER = EXAMPLES / "moe_layer_in_fp8.py"


def layer_rows(printed_text: str) -> dict[str, list[float]]:
    """The errors that the layer prints, by the name of the row."""
    rows = re.findall(r"^(bf16|fp8-block|fp8-block - bf16) +([\d. ]+)$", printed_text, re.MULTILINE)
    return {name: [float(error) for error in row.split()] for name, row in rows}


@pytest.mark.triton
@pytest.mark.lengthy
@pytest.mark.parametrize("options", [(), ("--interpret",)], ids=["reference", "interpreted"])
def test_an_moe_layer_in_fp8_is_plain_torch_up_to_rounding(options: tuple[str, ...], tmp_path: Path) -> None:
    printed_text = run(str(LAYER), *options, folder=tmp_path)
    errors = layer_rows(printed_text)
    assert [len(row) for row in errors.values()] == [5, 5, 5]
    assert "the same bits as GroupedExperts" in printed_text
    assert printed_text.splitlines()[-1].startswith("PASSED: y and all gradients are those of plain torch")
    page = (ROOT / "docs" / "tutorials" / "kernels.md").read_text()
    smallest, largest = (f"{100 * error:.1f}" for error in (min(errors["fp8-block"]), max(errors["fp8-block"])))
    assert f"{max(errors['bf16']):.1%}" == "0.4%"
    assert f"{smallest} to {largest} % in FP8 and at most 0.4 % in bf16" in " ".join(page.split())


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("factor", "failing"), [(1.0, set()), (1.02, {"bf16"}), (1.15, {"bf16", "fp8-block", "fp8-block - bf16"})]
)
def test_an_moe_layer_with_wrong_weights_fails(factor: float, failing: set[str], tmp_path: Path) -> None:
    """Both recipes multiply by weights that are `factor` times too large; the comparison with bf16 only FP8's."""
    script = f"""
import runpy
import moe_rl.kernels as kernels
prepare = kernels.prepare
def too_large(weights, recipe, **on):
    factor = {factor} if {factor} < 1.1 or recipe.name != "bf16" else 1.02
    return prepare((weights.detach() * factor).to(weights.dtype), recipe, **on)
kernels.prepare = too_large
runpy.run_path({str(LAYER)!r}, run_name="__main__")
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ran.returncode == (1 if failing else 0), ran.stdout + ran.stderr
    assert set(re.findall(r"^(.+): the error of y is", ran.stdout, re.MULTILINE)) == failing
    assert ("FAILED:" in ran.stdout, "PASSED" in ran.stdout) == (bool(failing), not failing)


def test_the_bounds_of_the_layer_are_the_roundings_of_its_formats() -> None:
    """The largest relative error is half a spacing, and 1 / sqrt(3) of it the root mean square of a uniform one.

    silu's factor is an integral over a normal gate.
    """
    layer = runpy.run_path(str(LAYER))
    sizes = layer["Sizes"](tokens=10**9, hidden=4096, intermediate=4096)  # so many values that norms do not vary
    for is_fp8, dtype, roundings in (
        (False, torch.bfloat16, layer["BF16_ROUNDINGS"]),
        (True, torch.float8_e4m3fn, layer["FP8_ROUNDINGS"]),
    ):
        at_most = layer["bounds"](sizes, sizes.tokens, is_fp8=is_fp8)
        rms = torch.finfo(dtype).eps / 2 / 3**0.5
        for bound, count in zip(at_most, roundings, strict=True):
            assert bound == pytest.approx((1.07 * count) ** 0.5 * rms, rel=0.01)
    gate = torch.linspace(-12, 12, 100_001, dtype=torch.float64, requires_grad=True)
    density = torch.exp(-(gate.detach() ** 2) / 2)
    values = torch.nn.functional.silu(gate)
    (slopes,) = torch.autograd.grad(values.sum(), gate)
    amplified = float((slopes**2 * density).sum() / (values.detach() ** 2 * density).sum())
    assert f"{amplified:.2f}" == f"{layer['GATE']}"


@pytest.mark.lengthy
def test_an_moe_layer_in_fp8_takes_other_sizes(tmp_path: Path) -> None:
    sizes = ["--tokens", "24", "--top-k", "3", "--experts", "5", "--hidden", "144", "--intermediate", "208"]
    printed_text = run(str(LAYER), *sizes, folder=tmp_path)
    assert printed_text.startswith("24 tokens, top 3 of 5 experts, H = 144, I = 208\n")
    assert min(layer_rows(printed_text)["fp8-block"]) > 0.02
    with pytest.raises(AssertionError, match=r"--top-k must be at most the 4 experts, got 5\."):
        run(str(LAYER), "--top-k", "5", folder=tmp_path)


@pytest.mark.lengthy
def test_an_moe_layer_needs_neither_the_core_nor_the_packages_of_the_command_line(tmp_path: Path) -> None:
    """With a checkout on PYTHONPATH and without what pip would install beside torch, numpy and Triton."""
    script = f"""
import runpy, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {{"pydantic", "yaml", "typer", "rich", "msgpack"}} or name == "moe_rl._native":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
sys.argv = ["layer", "--tokens", "8"]
runpy.run_path({str(LAYER)!r}, run_name="__main__")
"""
    assert run("-c", script, folder=tmp_path).splitlines()[-1].startswith("PASSED")


def test_the_line_for_fp8_in_megatron_is_a_configuration() -> None:
    text = (ROOT / "docs" / "tutorials" / "kernels.md").read_text()
    (call,) = re.findall(r"`attach\(\.\.\., (BalancerConfig\(.*?\))\)`", text)
    options = {word.arg: ast.literal_eval(word.value) for word in ast.parse(call, mode="eval").body.keywords}
    kernels = BalancerConfig(**options).kernels
    assert (kernels.experts, kernels.recipe, kernels.transposed_codes) == (GROUPED, "fp8-block", True)


@pytest.mark.multi_rank
@pytest.mark.lengthy
def test_an_moe_layer_has_the_bits_of_one_rank_on_two(tmp_path: Path) -> None:
    printed_text = run(*TORCHRUN, str(LAYER), folder=tmp_path)
    assert printed_text.count("have the bits of one rank") == 4
    assert printed_text.splitlines()[-1] == "PASSED: on 2 ranks, EP changes no bit in bf16 and in FP8."


@pytest.mark.framework  # those of Transformers and TRL run in the tests of these frameworks
def test_balanced_deepspeed_learns_the_same_and_waits_less(tmp_path: Path) -> None:
    printed_lines = run(*TORCHRUN, str(EXAMPLES / "deepspeed_autoep.py"), folder=tmp_path)
    steps = re.findall(r"step \d: (losses .*); busiest rank / mean ([\d.]+)", printed_lines)
    plain, balanced = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    assert len(plain) == len(balanced) == 3
    for (loss, busiest), (same, less) in zip(plain, balanced, strict=True):
        assert loss == same
        assert float(less) < float(busiest)
