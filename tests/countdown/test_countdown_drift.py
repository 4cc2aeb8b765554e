"""The study of drifting routers: what a collapse is, what intervals are, and that a killed run goes on."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from examples.countdown.metrics import METRICS_FILE, read_metrics

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # as for a script there


@pytest.fixture(scope="module")
def drift() -> ModuleType:
    return importlib.import_module("countdown_drift")


def a_run(
    drift: ModuleType, rewards: list[float], *, arm: str = "plain", seed: int = 0, lift: float = 0.0, kl: float = 0.0
) -> Any:
    steps = [
        {"step": step, "reward/mean": reward, "actor/ppo_kl": kl, "router/agreement": 1.0 - kl}
        for step, reward in enumerate(rewards, 1)
    ]
    steps[-1]["evaluation/accuracy"] = 0.5 + lift
    first = {"step": 0, "evaluation/accuracy": 0.5}
    return drift.Run(regime="learning rate", arm=arm, seed=seed, commit="abc", records=(first, *steps))


def test_a_run_collapsed_where_it_stays_below_half_and_is_healthy_where_it_never_falls(drift: ModuleType) -> None:
    assert a_run(drift, [0.6, 0.2, 0.5, 0.29, 0.1]).collapsed_at == 2
    assert a_run(drift, [0.6, 0.2, 0.5]).collapsed_at is None, "it came back"
    assert a_run(drift, [0.6, 0.48, 0.7]).is_healthy
    assert not a_run(drift, [0.6, 0.47, 0.7]).is_healthy
    assert a_run(drift, [0.0, 0.0]).collapsed_at is None


def test_an_alarm_counts_where_it_came_before_the_collapse(drift: ModuleType) -> None:
    collapsed, late = a_run(drift, [0.6, 0.6, 0.1], kl=0.3), a_run(drift, [0.6, 0.1], kl=0.0)
    assert collapsed.first_alarm(drift.alarms) == 1
    assert collapsed.first_alarm(drift.danger) == 2, "one step is no danger yet"
    assert late.first_alarm(drift.alarms) is None
    text = drift.verdicts([collapsed, late])
    assert "2 runs collapsed. Under the protocol's rule, `moe-rl advise` predicted 1 of these" in text


def test_intervals_are_students(drift: ModuleType) -> None:
    found = drift.Interval.of([0.0, 0.1, 0.2, 0.3, 0.4])
    # A standard deviation of 0.1581 over the root of 5, times 2.776.
    assert (found.mean, found.half) == (pytest.approx(0.2), pytest.approx(0.19629, abs=1e-4))
    assert str(found) == "+0.200 ± 0.196"
    assert str(drift.Interval.of([0.1])) == "+0.100 ± nan"


def test_arms_are_compared_with_plain_on_the_same_seeds(drift: ModuleType) -> None:
    runs = [a_run(drift, [0.6], seed=seed, lift=lift) for seed, lift in ((0, 0.0), (1, 0.3), (2, -0.2))]
    runs += [a_run(drift, [0.6], arm="R3", seed=seed, lift=lift) for seed, lift in ((0, 0.11), (1, 0.4), (2, -0.1))]
    row = next(line for line in drift.table(runs).splitlines() if "| R3 |" in line)
    assert "| +0.103 ± 0.014 |" in row
    assert (
        "In 1 of 1 comparisons with `plain`, the interval excludes 0: `R3` in regime `learning rate` (+0.103 ± 0.014)"
        in drift.verdicts(runs)
    )
    assert drift.picture(runs).count("<circle") == 6


def test_the_page_and_the_picture_are_what_the_results_say(drift: ModuleType) -> None:
    document = json.loads(drift.STEM.with_suffix(".json").read_text())
    runs = [drift.Run.from_json(run) for run in document["runs"]]
    assert [run.as_json() for run in runs] == document["runs"]
    for name, now in (("regimes", drift.REGIMES), ("arms", drift.ARMS)):
        assert document[name] == {each: list(given) for each, given in now.items()}
    assert drift.block(runs) in drift.PAGE.read_text()
    drawn, kept = str(drift.picture(runs)), (ROOT / "docs" / "pictures" / "countdown-drift.svg").read_text()
    assert kept.partition("</style>")[2] == drawn.partition("</style>")[2] + "\n", "the style is that of all pictures"


@pytest.mark.slow
def test_one_seed_of_the_study_and_a_killed_run_goes_on_to_the_same_curve(drift: ModuleType, tmp_path: Path) -> None:
    """18 runs in about ten minutes of one core; one is killed while it runs, and resumed."""
    command = [sys.executable, str(ROOT / "benchmarks" / "countdown_drift.py"), "--seeds", "0", "--no-results"]
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    victim = Path(drift.config_of("learning rate", "plain", 0, tmp_path / "killed").out) / METRICS_FILE
    started = subprocess.Popen([*command, "--out", str(tmp_path / "killed")], env=environment, start_new_session=True)
    while not victim.exists() or victim.read_text().count("\n") < 10:
        assert started.poll() is None
        time.sleep(0.2)
    os.killpg(started.pid, signal.SIGKILL)
    started.wait()
    assert len(drift.complete([0], tmp_path / "killed", start=False)) == 0
    subprocess.run([*command, "--out", str(tmp_path / "whole")], env=environment, check=True)
    runs = drift.complete([0], tmp_path / "whole", start=False)
    assert len(runs) == len(drift.REGIMES) * len(drift.ARMS)
    assert all(len(run.steps) == 24 for run in runs)
    drifting = {run.regime: run.mean("router/agreement") for run in runs if run.arm == "plain"}
    assert drifting["updates per rollout"] < drifting["quantized rollout"]

    with warnings.catch_warnings(action="ignore"):  # Megatron warns when it is imported
        drift.run_forked(drift.config_of("learning rate", "plain", 0, tmp_path / "killed"))
    resumed, whole = (
        [{name: value for name, value in line.items() if not name.startswith("time/")} for line in read_metrics(folder)]
        for folder in (victim.parent, Path(drift.config_of("learning rate", "plain", 0, tmp_path / "whole").out))
    )
    assert resumed == whole
