"""docs/tutorials/trace.md, literally: its commands run one after the other on payloads of each engine."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pages import ROOT, blocks, shell_lines, words
from rollouts import make_rollout, save_sglang, save_slime, save_verl_padded, save_vllm

TUTORIAL = (ROOT / "docs" / "tutorials" / "trace.md").read_text()
PAYLOADS = {
    "vLLM": (save_vllm, "responses.jsonl"),
    "SGLang": (save_sglang, "responses.json"),
    "verl": (save_verl_padded, "batch.pt"),
    "slime": (save_slime, "rollout_0.pt"),
    "Hugging Face": (None, ""),
    "Synthetic routes": (None, ""),
}
"""What an engine leaves behind, and what the tutorial calls it."""


def recording(engine: str) -> str:
    """Return the command under an engine's heading."""
    tabs = dict(re.findall(r"^### ([^\n]+)\n(.*?)(?=^### |^\[Routing)", TUTORIAL, re.DOTALL | re.MULTILINE))
    assert set(tabs) == set(PAYLOADS)
    (line,) = shell_lines(tabs[engine])
    return line


def run(line: str, folder: Path) -> str:
    program, *arguments = words(line)
    start = {
        "moe-rl": [sys.executable, "-c", "from moe_rl.cli import main; main()"],
        "python": [sys.executable],
    }[program]
    ran = subprocess.run([*start, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{line}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("engine", PAYLOADS)
def test_the_commands_of_the_tutorial_end_with_a_report(engine: str, tmp_path: Path) -> None:
    save, file = PAYLOADS[engine]
    if save is not None:
        lengths = tuple(np.random.default_rng(0).integers(20, 200, size=48).tolist())
        path, _ = save(make_rollout(0, lengths, num_experts=128, top_k=8, layers=48), tmp_path)
        path.rename(tmp_path / file)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    run(recording(engine), tmp_path)
    rest = TUTORIAL[TUTORIAL.index("Check the trace:") :]
    lines = [line for block in blocks(rest) if block.reason is None for line in block.lines]
    assert len(lines) >= 4
    for line in lines:
        # The example's tiny model is none that has a name.
        run(line.replace("--model qwen3-30b-a3b ", "") if engine == "Hugging Face" else line, tmp_path)
    assert {"report.html", "report.json"} <= {file.name for file in tmp_path.iterdir()}
