"""The script for one GPU runs on a CPU, and says what is right, wrong and not reached."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.rows import Outcome, Row, read
from benchmarks.gpu.runtime_on_streams import CASE_LIMIT_S, START_S, _failed

ROOT = Path(__file__).resolve().parents[2]
MODULE = "benchmarks.gpu.runtime_on_streams"

pytestmark = pytest.mark.multi_rank


def rows_of(folder: Path, *arguments: str) -> tuple[int, list[Row]]:
    command = [sys.executable, "-m", MODULE, "--out", str(folder), "--device", "cpu", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    rows = [Row.parse(line) for line in ran.stdout.splitlines()]
    assert read(folder) == rows, ran.stderr
    return ran.returncode, rows


@pytest.mark.lengthy
def test_four_processes_train_to_megatrons_losses(tmp_path: Path) -> None:
    cases = ("residents", "reorder with Adam state")
    code, rows = rows_of(tmp_path, "--limit-s", "3000", "--patience", "60", "--cases", *cases)
    assert [(row.step, row.outcome, row.why) for row in rows] == [(case, Outcome.RIGHT, "") for case in cases]
    assert all(0.0 <= row.figures["difference"] <= row.figures["limit"] for row in rows)  # type: ignore[operator]
    assert code == 0


def test_what_there_is_no_time_for_is_not_reached(tmp_path: Path) -> None:
    code, rows = rows_of(tmp_path, "--limit-s", "3", "--cases", "replicas", "recompute")
    assert [(row.step, row.outcome) for row in rows] == [
        ("replicas", Outcome.NOT_REACHED),
        ("recompute", Outcome.NOT_REACHED),
    ]
    assert {row.why for row in rows} == {"out of time: all cases together had 3 s"}
    assert code == 2


@pytest.mark.lengthy
def test_a_case_that_hangs_is_ended(tmp_path: Path) -> None:
    fault = ("--fault", "replicas", "--patience", "0.1")
    allowed_s = 0.1 * (START_S + CASE_LIMIT_S)
    code, rows = rows_of(tmp_path, "--limit-s", "3000", "--cases", "replicas", *fault)
    assert [(row.outcome, row.why) for row in rows] == [
        (Outcome.NOT_REACHED, f"hangs: no result after {allowed_s:.0f} s")
    ]
    assert code == 2


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (
            {"rank": 2, "at": 1.5, "outcome": "wrong", "why": "AssertionError: 3"},
            (Outcome.WRONG, "rank 2: AssertionError: 3"),
        ),
        (
            {"rank": 2, "at": 1.5, "outcome": "not reached", "why": "no torch"},
            (Outcome.NOT_REACHED, "rank 2: no torch"),
        ),
        (None, (Outcome.NOT_REACHED, "a rank ended with code [-11]")),
    ],
)
def test_the_first_rank_that_fails_says_why(
    tmp_path: Path, first: dict[str, object] | None, expected: tuple[Outcome, str]
) -> None:
    class Ended:
        returncode = -11

        def wait(self, timeout: float) -> int:
            return self.returncode

    if first is not None:
        later = {"rank": 0, "at": 2.5, "outcome": "not reached", "why": "RuntimeError: connection closed by peer"}
        for failure in (later, first):
            (tmp_path / f"failed.{failure['rank']}.json").write_text(json.dumps(failure))
    row = _failed("replicas", tmp_path, [Ended()], argparse.Namespace(patience=1.0))  # type: ignore[list-item]
    assert (row.outcome, row.why) == expected
