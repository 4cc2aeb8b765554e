"""The examples run as their first lines say: by `make examples`, those of frameworks by `make test-integrations`."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT

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


@pytest.mark.triton
@pytest.mark.lengthy
@pytest.mark.parametrize("options", [(), ("--interpret",)], ids=["reference", "interpreted"])
def test_an_moe_layer_in_fp8_is_plain_torch_up_to_rounding(options: tuple[str, ...], tmp_path: Path) -> None:
    """Each result depends on at most six rounded operands: by 2^-4 at most in E4M3, by 2^-8 in bf16."""
    printed_text = run(str(EXAMPLES / "moe_layer_in_fp8.py"), *options, folder=tmp_path)
    rows = dict(re.findall(r"^(bf16|fp8-block) +([\d. ]+)$", printed_text, re.MULTILINE))
    errors = {recipe: [float(error) for error in row.split()] for recipe, row in rows.items()}
    assert [len(row) for row in errors.values()] == [5, 5]
    assert max(errors["bf16"]) < 6**0.5 * 2**-8
    assert max(errors["fp8-block"]) < 6**0.5 * 2**-4
    assert "the same bits as GroupedExperts" in printed_text
    page = (ROOT / "docs" / "tutorials" / "kernels.md").read_text()
    assert {f"{error:.0%}" for error in errors["fp8-block"]} == {"6%", "7%"}
    assert f"{max(errors['bf16']):.1%}" == "0.4%"
    assert "6 to 7 % in FP8 and at most 0.4 % in bf16" in " ".join(page.split())


def test_an_moe_layer_in_fp8_takes_other_sizes(tmp_path: Path) -> None:
    sizes = ["--tokens", "24", "--top-k", "3", "--experts", "5", "--hidden", "144", "--intermediate", "208"]
    printed_text = run(str(EXAMPLES / "moe_layer_in_fp8.py"), *sizes, folder=tmp_path)
    assert printed_text.startswith("24 tokens, top 3 of 5 experts, H = 144, I = 208\n")
    (fp8,) = re.findall(r"^fp8-block +([\d. ]+)$", printed_text, re.MULTILINE)
    assert all(0.02 < float(error) < 6**0.5 * 2**-4 for error in fp8.split())
    with pytest.raises(AssertionError, match=r"--top-k must be at most the 4 experts, got 5\."):
        run(str(EXAMPLES / "moe_layer_in_fp8.py"), "--top-k", "5", folder=tmp_path)


@pytest.mark.multi_rank
@pytest.mark.lengthy
def test_an_moe_layer_has_the_bits_of_one_rank_on_two(tmp_path: Path) -> None:
    printed_text = run(*TORCHRUN, str(EXAMPLES / "moe_layer_in_fp8.py"), folder=tmp_path)
    assert printed_text.count("have the bits of one rank") == 4


@pytest.mark.framework  # those of Transformers and TRL run in the tests of these frameworks
def test_balanced_deepspeed_learns_the_same_and_waits_less(tmp_path: Path) -> None:
    printed_lines = run(*TORCHRUN, str(EXAMPLES / "deepspeed_autoep.py"), folder=tmp_path)
    steps = re.findall(r"step \d: (losses .*); busiest rank / mean ([\d.]+)", printed_lines)
    plain, balanced = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    assert len(plain) == len(balanced) == 3
    for (loss, busiest), (same, less) in zip(plain, balanced, strict=True):
        assert loss == same
        assert float(less) < float(busiest)
