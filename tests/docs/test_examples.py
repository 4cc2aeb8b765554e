"""The examples run as their first lines say. Those of frameworks are run by `make test-integrations`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT

EXAMPLES = ROOT / "examples"


def run(*command: str, folder: Path) -> str:
    ran = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False, timeout=240
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.lengthy
def test_megatron_on_two_ranks_loses_nothing_and_waits_less(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    said = run(*launcher, str(EXAMPLES / "megatron_cpu.py"), folder=tmp_path)
    busiest = re.findall(r"busiest rank ([\d.]+) -> ([\d.]+)", said)
    assert len(busiest) == 3
    assert all(float(after) < float(before) for before, after in busiest)
    losses = re.findall(r"loss ([\d.]+) plain, ([\d.]+) balanced", said)
    assert len(losses) == 3


@pytest.mark.lengthy
def test_a_recorded_model_of_hugging_face_is_a_trace(tmp_path: Path) -> None:
    said = run(str(EXAMPLES / "record_hf.py"), "run.moetrace", "--sequences", "4", "--new-tokens", "4", folder=tmp_path)
    assert "4 sequences" in said
    assert (tmp_path / "run.moetrace" / "manifest.json").exists()
