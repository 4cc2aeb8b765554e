"""The script for one GPU runs on a CPU, and says what is right, wrong and not reached."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "runtime_on_streams.py"

pytestmark = pytest.mark.multi_rank


def rows_of(folder: Path, *arguments: str) -> tuple[int, list[dict[str, object]]]:
    command = [sys.executable, str(SCRIPT), "--out", str(folder), "--device", "cpu", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    assert (folder / "runtime_on_streams.jsonl").read_text().splitlines() == ran.stdout.splitlines(), ran.stderr
    return ran.returncode, rows


def test_four_processes_train_to_megatrons_losses(tmp_path: Path) -> None:
    code, rows = rows_of(tmp_path, "--limit-s", "240", "--cases", "residents", "reorder with Adam state")
    assert [row["outcome"] for row in rows] == ["right", "right"], rows
    assert code == 0


def test_what_there_is_no_time_for_is_not_reached(tmp_path: Path) -> None:
    code, rows = rows_of(tmp_path, "--limit-s", "4", "--cases", "replicas", "recompute")
    assert [(row["case"], row["outcome"]) for row in rows] == [
        ("replicas", "not reached"),
        ("recompute", "not reached"),
    ]
    assert code == 1
