"""Figures of kernels: what has grown is named, and what nobody compares."""

import json
from pathlib import Path

from benchmarks.bench_kernel_figures import Counted, compared, read_baseline, table, write_baseline
from benchmarks.kernels.sass import WAITS

ROOT = Path(__file__).resolve().parents[2]


def test_one_percent_of_slots_and_one_wait_more_are_named() -> None:
    before = {"a": Counted(issue_slots=1000.0, waits=[1, 0, 2, 0]), "gone": Counted(issue_slots=1.0)}
    same = {"a": Counted(issue_slots=1009.0, waits=[1, 0, 2, 0]), "gone": before["gone"]}
    assert compared(same, before, 0.01) == []
    grown = {"a": Counted(issue_slots=1011.0, waits=[1, 1, 2, 0]), "new": Counted(issue_slots=1.0)}
    assert compared(grown, before, 0.01) == [
        "new has no figure to compare with",
        "gone is in the baseline and no problem any more",
        "a: 1,011 issue slots, before 1,000",
        "a: 1 FENCE, before 0",
    ]
    fewer = {"a": Counted(issue_slots=10.0, waits=[0, 0, 0, 0]), "gone": before["gone"]}
    assert compared(fewer, before, 0.0) == []


def test_a_baseline_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = {"a": Counted(issue_slots=2.5, waits=[0] * len(WAITS)), "b": Counted(device_us=7.0)}
    write_baseline(tmp_path / "figures.json", found)
    assert read_baseline(tmp_path / "figures.json") == found
    assert read_baseline(tmp_path / "none.json") == {}
    assert "issue slots" in table({"a": found["a"]})


def test_the_committed_figures_are_no_times() -> None:
    """An H100 takes 35 us for 34.4 GFLOP in bf16; the 7.18 us that stood here were instructions over a clock."""
    committed = json.loads((ROOT / "benchmarks" / "results" / "static" / "kernel_figures.json").read_text())
    assert len(committed) > 100
    for name, row in committed.items():
        assert row["issue_slots"] > 0, name
        assert row["device_us"] is None, name
