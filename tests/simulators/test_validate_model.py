"""benchmarks/validate_model: published sets beside predictions; its exit code says whether the limits hold."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from click.testing import Result
from typer.testing import CliRunner

from benchmarks.validate_model.__main__ import validate_model as command
from benchmarks.validate_model.compare import PUBLISHED

pytestmark = pytest.mark.lengthy


WHOLE_RUNS = ("whole_runs", "memory_peaks")
"""Kinds of sets that take most of the time; tests/simulators/test_validation.py holds these to their limits."""


def validate_model(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The quick sets."""
    for path in PUBLISHED.glob("*.yaml"):
        content = yaml.safe_load(path.read_text())
        if content["kind"] not in WHOLE_RUNS:
            (tmp_path / path.name).write_text(yaml.safe_dump(content))
    return tmp_path


def test_the_shipped_constants_hold_their_limits_and_points_are_printed_on_demand(published: Path) -> None:
    ran, with_points = (validate_model("--published", published, *more) for more in ((), ("--points",)))
    assert ran.exit_code == with_points.exit_code == 0, ran.stdout
    assert "missed" not in ran.stdout
    assert len(with_points.stdout.splitlines()) > 2 * len(ran.stdout.splitlines())


def test_json_holds_every_point_and_what_was_fitted(published: Path) -> None:
    document = json.loads(validate_model("--published", published, "--json").stdout)
    assert document["schema"] == "moe_rl.validate-model/1"
    for found in document["sets"].values():
        assert found["source"]
        assert found["fitted"]
        errors = [abs(point["predicted"] / point["published"] - 1) for point in found["points"]]
        assert found["mean_error"] == pytest.approx(sum(errors) / len(errors))


def test_a_missed_limit_ends_with_exit_code_1(published: Path) -> None:
    changed = 0
    for path in published.glob("*.yaml"):
        content = yaml.safe_load(path.read_text())
        if "limit_mean_error" in content:
            path.write_text(yaml.safe_dump(content | {"limit_mean_error": 0.0}))
            changed += 1
    assert changed
    ran = validate_model("--published", published)
    assert ran.exit_code == 1
    assert "missed" in ran.stdout


def test_a_folder_without_sets_is_refused(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.validate_model", "--published", str(tmp_path)],
        cwd=PUBLISHED.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "holds no published sets" in ran.stderr
