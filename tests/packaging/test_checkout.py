"""Tests of one checkout never run on the moe_rl of another."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import moe_rl
from moe_rl.cli.copies import unused_copy

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


def test_another_copy_on_the_path_is_found(tmp_path: Path) -> None:
    own = str(ROOT)
    (tmp_path / "moe_rl").mkdir()
    # What an editable install keeps there: the compiled core alone.
    assert unused_copy([own, str(tmp_path), str(tmp_path / "absent")]) is None
    (tmp_path / "moe_rl" / "__init__.py").touch()
    assert unused_copy([own, str(tmp_path)]) == (tmp_path / "moe_rl").resolve()


@pytest.mark.lengthy
@pytest.mark.skipif(
    not any(type(finder).__name__.startswith("ScikitBuild") for finder in sys.meta_path),
    reason="moe_rl is not installed as editable, so the path decides which copy runs",
)
def test_a_checkout_on_the_path_is_told_that_the_installed_one_runs(tmp_path: Path) -> None:
    (tmp_path / "moe_rl").mkdir()
    (tmp_path / "moe_rl" / "__init__.py").write_text("raise ImportError('this copy must not run')")
    command = [sys.executable, "-c", "from moe_rl.cli import main; main()", "--version"]
    environment = os.environ | {"PYTHONPATH": "."}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    running = Path(moe_rl.__file__).resolve().parent
    assert (ran.returncode, ran.stdout) == (0, f"moe-rl {moe_rl.__version__} in {running}\n")
    assert f"note: this command runs moe_rl from {running}, not from {(tmp_path / 'moe_rl').resolve()}" in ran.stderr
    quiet = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert quiet.stderr == ""
