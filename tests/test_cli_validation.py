"""`moe-rl validate-model`: published sets beside predictions, and an exit code that says whether the limits hold."""

import json
from pathlib import Path

import pytest
import yaml
from cli_runner import moe_rl

from moe_rl.core.errors import InvalidInputError
from moe_rl.simulators.validation import published_folder

pytestmark = pytest.mark.lengthy


WHOLE_RUNS = ("whole_runs", "memory_peaks")
"""Kinds of sets that take most of the time; tests/simulators/test_validation.py holds these to their limits."""


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The quick sets."""
    try:
        folder = published_folder()
    except InvalidInputError as error:
        pytest.skip(str(error))
    for path in folder.glob("*.yaml"):
        content = yaml.safe_load(path.read_text())
        if content["kind"] not in WHOLE_RUNS:
            (tmp_path / path.name).write_text(yaml.safe_dump(content))
    return tmp_path


def test_the_shipped_constants_hold_their_limits_and_points_are_printed_on_demand(published: Path) -> None:
    ran, with_points = (moe_rl("validate-model", "--published", published, *more) for more in ((), ("--points",)))
    assert ran.code == with_points.code == 0, ran.out
    assert "missed" not in ran.out
    assert len(with_points.out.splitlines()) > 2 * len(ran.out.splitlines())


def test_json_holds_every_point_and_what_was_fitted(published: Path) -> None:
    document = json.loads(moe_rl("validate-model", "--published", published, "--json").out)
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
    ran = moe_rl("validate-model", "--published", published)
    assert ran.code == 1
    assert "missed" in ran.out


def test_a_folder_without_sets_is_refused(tmp_path: Path) -> None:
    ran = moe_rl("validate-model", "--published", tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert "holds no published sets" in ran.err
