"""Tests of one checkout never run on the moe_rl of another."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moe_rl

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.lengthy
def test_a_checkout_whose_moe_rl_is_elsewhere_is_not_tested(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for name in ("pyproject.toml", "tests/conftest.py", "tests/drawn.py", "tests/local_ranks.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    test = tmp_path / "tests" / "test_nothing.py"
    test.write_text("def test_nothing(): pass\n")
    ran = subprocess.run([sys.executable, "-m", "pytest"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 4
    imported = Path(moe_rl.__file__).resolve().parent
    assert f"moe_rl is imported from {imported}, not from this checkout: `make test` in {tmp_path}." in ran.stderr
    assert "passed" not in ran.stdout
