"""Studies on the Countdown run: objectives and replay under several updates per rollout, and FP8 on one or both sides.

    python benchmarks/countdown_study.py objectives               every run that is missing, then the results
    python benchmarks/countdown_study.py fp8
    python benchmarks/countdown_study.py objectives --arms grpo gspo --seeds 0
    python benchmarks/countdown_study.py objectives --results-only

A run that was ended half-way is resumed at its last checkpoint, a complete one is not repeated. Results go to
benchmarks/results/cpu/countdown_<study>.json, .md and .svg after every run; they hold complete runs alone. Every arm
differs from configs/experiments/countdown_grpo.yaml in what `STUDIES` says and in nothing else.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from megatron import core as megatron_core

from moe_rl.core.errors import InvalidInputError
from moe_rl.recipes.countdown_grpo.config import CountdownGrpoConfig, load_config
from moe_rl.recipes.countdown_grpo.metrics import METRICS_FILE, read_metrics
from moe_rl.recipes.countdown_grpo.run import RunFailedError, run
from moe_rl.recipes.countdown_grpo.study import RunSummary, accuracy_picture, markdown_table

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "experiments" / "countdown_grpo.yaml"
RESULTS = ROOT / "benchmarks" / "results" / "cpu"

GAMMA = "train.router_shift={floor: 0.7, order: before-clip}"
# GSPO publishes 3e-4 and 4e-4, for answers of thousands of tokens: a mean over n tokens spreads like 1 / sqrt(n). Here
# answers have 9 tokens, and 0.07 is the width that GRPO gives one token, 0.2, over the root of 9.
GSPO = ("train.objective=gspo", "train.objective_options={clip_ratio_low: 0.07, clip_ratio_high: 0.07}")
FP8_ROLLOUT = ("rollout.precision=fp8-block", "train.compare_replay=true", "checks.export_kl_limit=0.5")
FP8_TRAINING = ("balancer.experts=grouped", "balancer.recipe=fp8-block")
CORRECTION = ("train.rollout_correction={rollout_is: token, rollout_is_threshold: 2.0}",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Arms that are compared."""

    arms: Mapping[str, tuple[str, ...]]
    """Overrides of the config, by arm."""
    overrides: tuple[str, ...] = ()
    """Of all arms."""
    seeds: tuple[int, ...] = (0, 1, 2)


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
        },
    ),
    "fp8": Study(
        arms={
            "float32 rollout, float32 training": ("train.compare_replay=true",),
            "fp8 rollout, float32 training": FP8_ROLLOUT,
            "fp8 rollout, float32 training + correction": (*FP8_ROLLOUT, *CORRECTION),
            "fp8 rollout, fp8 training": (*FP8_ROLLOUT, *FP8_TRAINING),
            "fp8 rollout, fp8 training + correction": (*FP8_ROLLOUT, *FP8_TRAINING, *CORRECTION),
        },
        overrides=("num_steps=12", "evaluation.every=12"),
        seeds=(0,),
    ),
}

PICTURE_STYLE = (
    "<style>text{font:12px sans-serif;fill:#1b1f24}.tick,.label{fill:#5b6570}.grid{stroke:#dfe3e8}.axis{stroke:#5b6570}"
    ".curve{fill:none;stroke-width:2}</style>"
)


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


def write_results(name: str, out: Path) -> None:
    """Write table, picture and JSON of the study's runs in `out` that are complete."""
    study, runs = STUDIES[name], []
    seeds = sorted({int(path.name.rpartition("-seed")[2]) for path in out.glob("*-seed*")})
    for arm in study.arms:
        for seed in seeds:
            config = config_of(study, arm, seed, out)
            if is_complete(config):
                runs.append(RunSummary.read(Path(config.out), arm=arm, seed=seed))
    if not runs:
        return
    document = {
        "benchmark": f"countdown_{name}",
        "command": f"python benchmarks/countdown_study.py {name}",
        "config": CONFIG.relative_to(ROOT).as_posix(),
        "overrides": list(study.overrides),
        "arms": {arm: list(overrides) for arm, overrides in study.arms.items()},
        "machine": machine(),
        "runs": [one.as_json() for one in runs],
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    stem = RESULTS / f"countdown_{name}"
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(markdown_table(runs), encoding="utf-8")
    picture = str(accuracy_picture(runs)).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    head, _, rest = picture.partition(">")
    stem.with_suffix(".svg").write_text(f"{head}>{PICTURE_STYLE}{rest}\n", encoding="utf-8")


def machine() -> dict[str, object]:
    """Return what the figures were made on."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "megatron_core": megatron_core.__version__,
        "commit": commit.stdout.strip(),
    }


def say(sentence: str) -> None:
    """Write a line for the person who watches."""
    sys.stderr.write(sentence + "\n")


if __name__ == "__main__":
    sys.exit(main())
