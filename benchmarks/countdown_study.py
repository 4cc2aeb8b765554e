"""Studies on the Countdown run: objectives and replay under several updates per rollout, and FP8 on one or both sides.

    python benchmarks/countdown_study.py objectives               every run that is missing, then the results
    python benchmarks/countdown_study.py fp8
    python benchmarks/countdown_study.py objectives --arms grpo gspo --seeds 0
    python benchmarks/countdown_study.py objectives --results-only

A run that was ended half-way is resumed at its last checkpoint, a complete one is not repeated. Results go to
benchmarks/results/cpu/countdown_<study>.json, .md and .svg after every run; they hold complete runs alone. Runs that
they held before stay, each with the commit and machine it was made on, until one of the same arm and seed takes their
place, or their settings are no longer those of the arm. Every arm differs from examples/countdown/grpo.yaml
in what `STUDIES` says and in nothing else.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from countdown_results import (
    OBJECTIVES,
    PRECISIONS,
    CurveComparison,
    RunSummary,
    accuracy_picture,
    markdown_table,
    merged,
    mismatch_picture,
    reward_picture,
)
from markupsafe import Markup

from examples.countdown.config import CountdownGrpoConfig, load_config
from examples.countdown.metrics import METRICS_FILE, read_metrics
from examples.countdown.run import RunFailedError, run
from moe_rl.core.errors import InvalidInputError
from moe_rl.yaml_files import read_yaml

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "countdown" / "grpo.yaml"
RESULTS = ROOT / "benchmarks" / "results" / "cpu"

GAMMA = "train.router_shift={floor: 0.7, order: before-clip}"
# GSPO publishes 3e-4 and 4e-4, for answers of thousands of tokens: a mean over n tokens spreads like 1 / sqrt(n). Here
# answers have 9 tokens, and 0.07 is the width that GRPO gives one token, 0.2, over the root of 9.
GSPO = ("train.objective=gspo", "train.objective_options={clip_ratio_low: 0.07, clip_ratio_high: 0.07}")
COMPARED = "train.compare_replay=true"
BF16_TRAINING = "train.precision=bfloat16"
FP8_ROLLOUT = ("rollout.precision=fp8-block", COMPARED)
FP8_TRAINING = ("balancer.experts=grouped", "balancer.recipe=fp8-block")
CORRECTION = ("train.rollout_correction={rollout_is: token, rollout_is_threshold: 2.0}",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Arms that are compared."""

    arms: Mapping[str, tuple[str, ...]]
    """Overrides of the config, by arm."""
    overrides: tuple[str, ...] = ()
    """Overrides of the config that all arms share."""
    seeds: tuple[int, ...] = (0, 1, 2)
    columns: tuple[str, ...] = OBJECTIVES
    """Columns of the printed table."""
    compared: tuple[str, str] | None = None
    """Two arms whose curves should agree within the spread of seeds."""
    picture: Callable[[Sequence[RunSummary]], Markup] = accuracy_picture


STUDIES = {
    # All under R3 where nothing else is said.
    "objectives": Study(
        arms={
            "grpo": ("train.objective=grpo",),
            "grpo + router shift": ("train.objective=grpo", GAMMA),
            "gspo": GSPO,
            "gspo + router shift": (*GSPO, GAMMA),
            "gmpo": ("train.objective=gmpo",),
            "gmpo + router shift": ("train.objective=gmpo", GAMMA),
            "grpo, R2": ("train.objective=grpo", "train.replay=R2"),
            "grpo, no replay": ("train.objective=grpo", "train.replay=off"),
            "grpo, not balanced": ("train.objective=grpo", "balancer.enabled=false"),
        },
        compared=("grpo", "grpo, not balanced"),
    ),
    "fp8": Study(
        arms={
            "float32 rollout, float32 training": (COMPARED,),
            "fp8 rollout, float32 training": FP8_ROLLOUT,
            "fp8 rollout, float32 training + correction": (*FP8_ROLLOUT, *CORRECTION),
            "fp8 rollout, fp8 training": (*FP8_ROLLOUT, *FP8_TRAINING),
            "fp8 rollout, fp8 training + correction": (*FP8_ROLLOUT, *FP8_TRAINING, *CORRECTION),
            # Everything but experts in FP8 is bfloat16, on both sides.
            "bf16 rollout, bf16 training": ("rollout.precision=bfloat16", COMPARED, BF16_TRAINING),
            "fp8 rollout, bf16 training": (*FP8_ROLLOUT, BF16_TRAINING),
            "fp8 rollout, bf16 training + correction": (*FP8_ROLLOUT, BF16_TRAINING, *CORRECTION),
            "fp8 rollout, fp8 training in bf16": (*FP8_ROLLOUT, BF16_TRAINING, *FP8_TRAINING),
            "fp8 rollout, fp8 training in bf16 + correction": (
                *FP8_ROLLOUT,
                BF16_TRAINING,
                *FP8_TRAINING,
                *CORRECTION,
            ),
        },
        overrides=("num_steps=12", "evaluation.every=12"),
        columns=PRECISIONS,
        picture=mismatch_picture,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="only these")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--out", type=Path, default=Path("out/countdown_study"), help="folder of the runs")
    parser.add_argument("--results-only", action="store_true")
    given = parser.parse_args(argv)
    study = STUDIES[given.study]
    unknown = sorted(set(given.arms or ()) - set(study.arms))
    if unknown:
        parser.error(f"study {given.study} has no arm {unknown[0]!r}; it has {', '.join(study.arms)}")
    wanted = [(seed, arm) for seed in given.seeds or study.seeds for arm in given.arms or study.arms]
    out = given.out / given.study
    for number, (seed, arm) in enumerate(wanted, 1):
        config = config_of(study, arm, seed, out)
        if given.results_only or is_complete(config):
            continue
        say(f"run {number} of {len(wanted)}: {arm}, seed {seed}")
        started = time.monotonic()
        out.mkdir(parents=True, exist_ok=True)
        machine_file(config).write_text(json.dumps(machine()), encoding="utf-8")
        try:
            run(config, resume=True)
        except (InvalidInputError, RunFailedError) as error:
            say(f"error: {error}")
            return 1
        write_results(given.study, out)
        say(f"done in {time.monotonic() - started:.0f} s")
    write_results(given.study, out)
    return 0


def config_of(study: Study, arm: str, seed: int, out: Path) -> CountdownGrpoConfig:
    """Return the settings of one run."""
    folder = out / f"{re.sub('[^a-z0-9]+', '-', arm.lower())}-seed{seed}"
    return load_config(CONFIG, (*study.overrides, *study.arms[arm], f"seed={seed}", f"out={folder}"))


def is_complete(config: CountdownGrpoConfig) -> bool:
    """Return whether the run's last step was logged."""
    folder = Path(config.out)
    if not (folder / METRICS_FILE).exists():
        return False
    lines = read_metrics(folder)
    return bool(lines) and lines[-1]["step"] == config.num_steps


def machine_file(config: CountdownGrpoConfig) -> Path:
    """Return where it says what a run was made on: beside its folder, which holds nothing but the run."""
    return Path(f"{config.out}.machine.json")


def runs_in(study: Study, out: Path) -> list[RunSummary]:
    """Return the complete runs of a study in the folder `out`."""
    runs = []
    seeds = sorted({int(path.name.rpartition("-seed")[2]) for path in out.glob("*-seed*") if path.is_dir()})
    for arm in study.arms:
        for seed in seeds:
            config = config_of(study, arm, seed, out)
            if is_complete(config):
                made_on = json.loads(machine_file(config).read_text("utf-8"))
                runs.append(RunSummary.read(Path(config.out), arm=arm, seed=seed, machine=made_on))
    return runs


def kept_runs(study: Study, document: Mapping[str, Any]) -> list[RunSummary]:
    """Return the runs of earlier results whose settings are still those of their arm."""
    now = settings(study)
    if any(document[name] != now[name] for name in ("base", "overrides")):
        return []
    same = {arm for arm, overrides in now["arms"].items() if document["arms"].get(arm) == overrides}
    return [RunSummary.from_json(run) for run in document["runs"] if run["arm"] in same]


def settings(study: Study) -> dict[str, Any]:
    """Return what the runs of a study depend on, beside their seeds."""
    return {
        "config": CONFIG.relative_to(ROOT).as_posix(),
        "base": read_yaml(CONFIG),
        "overrides": list(study.overrides),
        "arms": {arm: list(overrides) for arm, overrides in study.arms.items()},
    }


def write_results(name: str, out: Path) -> None:
    """Write table, pictures and JSON of the study's complete runs: those in `out`, and those of earlier results."""
    study, stem = STUDIES[name], RESULTS / f"countdown_{name}"
    before = stem.with_suffix(".json")
    kept = kept_runs(study, json.loads(before.read_text("utf-8"))) if before.exists() else []
    runs = merged(kept, runs_in(study, out), list(study.arms))
    if not runs:
        return
    compared = [
        found
        for curve in ("held-out accuracy", "reward")
        if study.compared and (found := CurveComparison.of(curve, runs, study.compared))
    ]
    document = {
        "benchmark": f"countdown_{name}",
        "command": f"python benchmarks/countdown_study.py {name}",
        **settings(study),
        "comparisons": [one.as_json() for one in compared],
        "runs": [one.as_json() for one in runs],
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sentences = "".join(f"\n{one.sentence()}\n" for one in compared)
    stem.with_suffix(".md").write_text(markdown_table(runs, study.columns) + sentences, encoding="utf-8")
    stem.with_suffix(".svg").write_text(study.picture(runs) + "\n", encoding="utf-8")
    if compared:
        pair = [run for run in runs if run.arm in compared[0].arms and run.seed in compared[0].seeds]
        stem.with_name(f"{stem.name}_balancing.svg").write_text(reward_picture(pair) + "\n", encoding="utf-8")


def machine() -> dict[str, object]:
    """Return what the figures were made on."""
    commit = _git("rev-parse", "--short=7", "HEAD")
    # What a run depends on: results that it has written meanwhile do not count.
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", "moe_rl", "configs", "benchmarks/*.py")
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "megatron_core": importlib.metadata.version("megatron-core"),
        "commit": f"{commit} with changes" if changed else commit,
    }


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def say(sentence: str) -> None:
    """Write a line for the person who watches."""
    sys.stderr.write(sentence + "\n")


if __name__ == "__main__":
    sys.exit(main())
