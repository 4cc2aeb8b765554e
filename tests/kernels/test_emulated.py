"""What Triton makes of the kernels runs on the emulator, and gives what the references and the interpreter give.

The whole of it, every launch and mutant, is `make kernel-emulate`.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from emulator.exchange import PLAIN_TILES, plain_results

ROOT = Path(__file__).resolve().parents[2]
RIGHT_OF_THE_SPLIT = {*range(64, 128), *range(192, 200)}


def outside(*arguments: str) -> str:
    """Run Python where Triton compiles instead of interpreting."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "tests"), str(ROOT)))
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.lengthy
def test_an_offset_that_the_compiler_counts_twice_is_caught() -> None:
    """The loop as it was reads other rows' scales in the second half of every tile; the cured one does not."""
    rows = json.loads(outside("-m", "emulator.doubled_offset"))
    assert rows["True"] == []
    assert len(rows["False"]) > 60
    assert set(rows["False"]) <= RIGHT_OF_THE_SPLIT


@pytest.mark.parametrize(
    # Hopper's loops run as they are carried, under as many schedules, in test_carried.py.
    "arch",
    [pytest.param(90, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.lengthy)],
)
def test_products_are_exact_under_four_schedules(arch: int) -> None:
    printed = outside("-m", "emulator", "--quick", "--arch", str(arch), "--processes", "1")
    assert "FAULT" not in printed
    assert "checks right in 4 schedules" in printed


@pytest.mark.slow
def test_mutants_of_the_loops_die_and_of_those_that_live_the_reason_is_known() -> None:
    printed = outside("-m", "emulator", "--quick", "--arch", "100", "--mutants")
    said, total = map(int, re.search(r"what the loops say: (\d+) of (\d+) mutants die", printed).groups())
    assert said == total > 100
    assert "NO REASON" not in printed


@pytest.mark.slow
def test_machine_code_waits_for_tensor_memory_before_it_uses_it() -> None:
    rows = json.loads(outside("-m", "emulator.tensor_loads"))
    assert sum(loads for loads, _ in rows.values()) > 8
    assert {name: uses for name, (_, uses) in rows.items() if uses} == {}


@pytest.mark.lengthy
@pytest.mark.parametrize("name", PLAIN_TILES)
def test_a_plain_tile_has_the_bits_of_the_interpreter(name: str, device: str, tmp_path: Path) -> None:
    """On the same operands, of which every sum is exact."""
    outside("-m", "emulator.exchange", name, str(tmp_path / "emulated.pt"))
    emulated = torch.load(tmp_path / "emulated.pt")
    for got, want in zip(emulated, plain_results(name), strict=True):
        assert torch.equal(got, want)
