"""Kill a Countdown run at random moments and resume it: only the current step is lost, and the curve is the same.

`python benchmarks/kill_trials.py --trials 20` runs a small config once without interruption. Each trial then starts it
again, kills one of its processes (the parent or a rank, `kill -9`) at a random moment, waits for the others to leave,
resumes, and compares everything but wall-clock times with the uninterrupted run. One JSON line per trial on stdout, all
of them in `--out FILE`; exit code 1 if any trial fails.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from examples.countdown.checkpointing import last_checkpoint
from examples.countdown.config import CountdownGrpoConfig
from examples.countdown.metrics import METRICS_FILE, WALL_CLOCK_PREFIX, read_metrics
from moe_rl.replay import TraceReader

LEAVE_LIMIT_S = 30.0
"""All processes of a killed run are gone within this time."""
RUN_LIMIT_S = 900.0
START_SHARE = 0.25
"""Share of the kills that fall before the first step is done."""
POLL_S = 0.02

SMALL: dict[str, Any] = {
    "num_steps": 8,
    "model": {"num_layers": 2, "hidden_size": 32, "kv_channels": 8, "num_experts": 8, "moe_ffn_hidden_size": 32},
    "problems": {"num_numbers": 2, "max_target": 18},
    "warm_start": {"num_updates": 150, "batch_problems": 32},
    "rollout": {"problems_per_step": 4, "group_size": 4},
    "train": {"num_mini_batches": 2, "micro_batch_size": 2, "learning_rate": 1e-4},
    "balancer": {"policy": "relibra", "parameters": {"iterations": 200}, "reorder_every": 3},
    "evaluation": {"every": 3, "num_problems": 4},
}
"""A run of seconds in which experts are replicated and move."""

Curve = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one kill did."""

    victim: str
    """"parent", or "rank r"."""
    lines_at_kill: int
    """Whole lines in the metrics file when the kill struck: the step-0 line and one per finished step."""
    resumed_at: int
    """Steps of the checkpoint that the resumed run started from; -1: there was none."""
    left_after_s: float
    """Until every other process of the run was gone."""
    same_curve: bool
    whole_trace: bool

    @property
    def problem(self) -> str:
        """Why the trial failed; empty when it did not."""
        if self.resumed_at < self.lines_at_kill - 2:
            return f"{self.lines_at_kill - 1} steps were logged, but the run resumed at step {self.resumed_at}"
        if not self.same_curve:
            return "the resumed curve differs from the uninterrupted one"
        return "" if self.whole_trace else "the trace does not hold every step once"


def small_config(folder: Path, **changes: Any) -> Path:
    """Write the small config of a run in `folder` and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "small.yaml"
    config = CountdownGrpoConfig.model_validate({**SMALL, **changes, "out": str(folder / "run")})
    path.write_text(config.yaml(), encoding="utf-8")
    return path


def start(config: Path, *, log: Path) -> subprocess.Popen[bytes]:
    """Start the run, or resume it; the warm start is kept beside the config's folder."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(config.parents[1] / "cache")}
    command = [sys.executable, "-m", "examples.countdown", str(config), "--resume"]
    with log.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment)


def curve_of(folder: Path) -> Curve:
    """Return the run's metrics without its wall-clock times."""
    return [
        {name: value for name, value in line.items() if not name.startswith(WALL_CLOCK_PREFIX)}
        for line in read_metrics(folder / "run")
    ]


def uninterrupted(folder: Path, **changes: Any) -> Curve:
    """Run the small config to its end and return its curve."""
    config = small_config(folder, **changes)
    process = start(config, log=folder / "log")
    code = process.wait(RUN_LIMIT_S)
    if code:
        raise RuntimeError(f"the run ended with exit code {code}: {(folder / 'log').read_text()[-3000:]}")
    return curve_of(folder)


def kill_and_resume(folder: Path, reference: Curve, rng: random.Random, **changes: Any) -> Trial:
    """Do one trial in `folder`."""
    config = small_config(folder, **changes)
    process = start(config, log=folder / "log")
    metrics = folder / "run" / METRICS_FILE
    num_steps = len(reference) - 1
    wanted = 0 if rng.random() < START_SHARE else rng.randint(1, num_steps)
    _await(lambda: _lines(metrics) >= wanted or process.poll() is not None)
    time.sleep(rng.random() * (2.0 if wanted == 0 else 0.5))
    victim, left_after_s = _kill_one(process, rng)
    lines = _lines(metrics)
    checkpoint = last_checkpoint(folder / "run" / "checkpoints")
    code = start(config, log=folder / "log").wait(RUN_LIMIT_S)
    if code:
        raise RuntimeError(f"resuming ended with exit code {code}: {(folder / 'log').read_text()[-3000:]}")
    return Trial(
        victim=victim,
        lines_at_kill=lines,
        resumed_at=-1 if checkpoint is None else checkpoint.step,
        left_after_s=left_after_s,
        same_curve=curve_of(folder) == reference,
        whole_trace=TraceReader(folder / "run" / "trace.moetrace").manifest.steps == tuple(range(1, num_steps + 1)),
    )


def _kill_one(process: subprocess.Popen[bytes], rng: random.Random) -> tuple[str, float]:
    """Kill the run's parent or one of its ranks; return which, and how long the others needed to leave."""
    try:
        ranks = sorted(psutil.Process(process.pid).children(), key=lambda child: child.pid)
    except psutil.NoSuchProcess:
        ranks = []
    choice = rng.randint(0, len(ranks))
    started = time.monotonic()
    with contextlib.suppress(psutil.NoSuchProcess):  # it had finished: resuming a finished run must change nothing
        (process if choice == 0 else ranks[choice - 1]).kill()
    process.wait(LEAVE_LIMIT_S)
    _, alive = psutil.wait_procs(ranks, LEAVE_LIMIT_S)
    if alive:
        raise RuntimeError(f"{len(alive)} processes were left behind {LEAVE_LIMIT_S:.0f} s after the kill.")
    return "parent" if choice == 0 else f"rank {choice - 1}", time.monotonic() - started


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _await(condition: Any) -> None:
    deadline = time.monotonic() + RUN_LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the run did not get far enough within {RUN_LIMIT_S:.0f} s.")
        time.sleep(POLL_S)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the runs go; a temporary folder without it")
    parser.add_argument("--out", type=Path, help="write all trials to this file")
    given = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        reference = uninterrupted(folder / "reference")
        for index in range(given.trials):
            trial = kill_and_resume(folder / f"trial-{index}", reference, random.Random(f"{given.seed} {index}"))
            rows.append({"trial": index, **asdict(trial), "problem": trial.problem})
            print(json.dumps(rows[-1]), flush=True)
    failed = sum(bool(row["problem"]) for row in rows)
    command = f"python benchmarks/kill_trials.py --trials {given.trials} --seed {given.seed}"
    found = {"benchmark": "kill_trials", "command": command, "failed": failed, "rows": rows}
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"trials": given.trials, "failed": failed}))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
