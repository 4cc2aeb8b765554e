"""Three regimes of drift x six arms x five seeds on the Countdown task; the protocol is docs/countdown-drift.md.

    python benchmarks/countdown_drift.py                   every run that is missing, then results and the page's table
    python benchmarks/countdown_drift.py --seeds 0 1       only these
    python benchmarks/countdown_drift.py --results-only

A run that was ended half-way goes on at its last checkpoint, a complete one is not repeated. Every run is a fork of
this process, on one core. Results: benchmarks/results/cpu/countdown_drift.json, docs/pictures/countdown-drift.svg and a
block of the page.
"""

import argparse
import json
import math
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Self

os.environ.update(OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1", GLOO_SOCKET_IFNAME="lo")
from countdown_study import is_complete, machine, say
from markupsafe import Markup

from examples.countdown.config import CountdownGrpoConfig, load_config
from examples.countdown.metrics import read_metrics
from examples.countdown.run import run_forked
from moe_rl.core.errors import require
from moe_rl.doctor.advisor import advise, verdict
from moe_rl.report.colors import SERIES
from moe_rl.report.svg import Svg, standalone
from moe_rl.yaml_files import read_yaml

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "countdown" / "drift.yaml"
STEM = ROOT / "benchmarks" / "results" / "cpu" / "countdown_drift"
PAGE = ROOT / "docs" / "countdown-drift.md"
MARKS = "<!-- benchmarks/countdown_drift.py writes from here -->\n", "<!-- to here -->\n"

SEEDS = (0, 1, 2, 3, 4)
SHARED = ("num_steps=24", "evaluation.every=24", "checkpoint_every=8")
REGIMES: Mapping[str, tuple[str, ...]] = {
    "learning rate": ("train.learning_rate=1.2e-3",),
    "updates per rollout": ("train.learning_rate=5e-4", "train.num_mini_batches=16", "train.micro_batch_size=8"),
    "quantized rollout": ("train.learning_rate=5e-4", "rollout.precision=fp8-block"),
}
GAMMA = "train.router_shift={floor: 0.7, order: before-clip}"
# GSPO's width for answers of 6 tokens: GRPO's 0.2 for one token over the root of 6.
GSPO = ("train.objective=gspo", "train.objective_options={clip_ratio_low: 0.08, clip_ratio_high: 0.08}")
PLAIN = "plain"
ARMS: Mapping[str, tuple[str, ...]] = {
    PLAIN: (),
    "R2": ("train.replay=R2",),
    "R3": ("train.replay=R3",),
    "router shift": (GAMMA,),
    "GSPO": GSPO,
    "router shift + R3": (GAMMA, "train.replay=R3"),
}
KEPT = (
    "actor/non_finite_tokens",
    "actor/pg_clipfrac",
    "actor/ppo_kl",
    "evaluation/accuracy",
    "mismatch/k3_kl",
    "mismatch/mean_logprob_diff",
    "mismatch/router_agreement",
    "policy/entropy",
    "reward/mean",
    "router/agreement",
    "router_corr/gamma_mean",
    "train/grad_norm",
)
"""What results keep of every step."""
ALARMS = {
    "clipped-often",
    "engine-off",
    "entropy-collapses",
    "gamma-low",
    "gradient-jumps",
    "policy-moved",
    "router-disagrees",
    "router-drifts",
}
"""Advice that says that a run is in danger."""
COLLAPSED, HEALTHY = 0.5, 0.8
"""Of the first step's reward: a collapsed run ends below the one, a healthy one has no step below the other."""


def alarms(records: Sequence[Mapping[str, float]]) -> bool:
    """Return whether any rule of danger speaks: the protocol's reading."""
    return bool({each.rule for each in advise(records)} & ALARMS)


def danger(records: Sequence[Mapping[str, float]]) -> bool:
    """Return whether `moe-rl advise` calls it a danger."""
    return verdict(records).in_danger is True


T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t for 95 %, by the number of seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of one arm in one regime."""

    regime: str
    arm: str
    seed: int
    commit: str
    records: tuple[Mapping[str, float], ...]
    """What was logged in every step, the first weights' evaluation first."""

    @classmethod
    def read(cls, config: CountdownGrpoConfig, regime: str, arm: str, commit: str) -> Self:
        """Read a complete run."""
        kept = tuple(
            {name: float(f"{line[name]:.6g}") for name in ("step", *KEPT) if name in line}
            for line in read_metrics(Path(config.out))
        )
        return cls(regime=regime, arm=arm, seed=config.seed, commit=commit, records=kept)

    @property
    def steps(self) -> tuple[Mapping[str, float], ...]:
        """The records of steps."""
        return self.records[1:]

    @property
    def lift(self) -> float:
        """Held-out accuracy after the last step minus before the first."""
        return self.records[-1]["evaluation/accuracy"] - self.records[0]["evaluation/accuracy"]

    @property
    def collapsed_at(self) -> int | None:
        """The first step whose reward is below half of the first one's, where the last one's is too; else None."""
        rewards = [line["reward/mean"] for line in self.steps]
        low = [step for step, reward in enumerate(rewards, 1) if reward < COLLAPSED * rewards[0]]
        return low[0] if low and low[-1] == len(rewards) else None

    @property
    def is_healthy(self) -> bool:
        """Whether no step's reward fell below 0.8 of the first one's."""
        return all(line["reward/mean"] >= HEALTHY * self.steps[0]["reward/mean"] for line in self.steps)

    def first_alarm(self, alarm: Callable[[Sequence[Mapping[str, float]]], bool]) -> int | None:
        """Return the first step after which the log read so far is an `alarm`; None: never."""
        return next((step for step in range(1, len(self.steps) + 1) if alarm(self.steps[:step])), None)

    def mean(self, name: str) -> float | None:
        """Return the mean of a metric over the steps that logged it."""
        values = [line[name] for line in self.steps if name in line]
        return fmean(values) if values else None

    def as_json(self) -> dict[str, Any]:
        """Return every figure."""
        figures = {name: [line.get(name) for line in self.records] for name in KEPT}
        return {
            "regime": self.regime, "arm": self.arm, "seed": self.seed, "commit": self.commit,
            "records": {name: values for name, values in figures.items() if any(v is not None for v in values)},
        }  # fmt: skip

    @classmethod
    def from_json(cls, run: Mapping[str, Any]) -> Self:
        """Return what `as_json` was called on."""
        columns = run["records"]
        size = len(next(iter(columns.values())))
        records = tuple(
            {"step": float(step), **{name: each[step] for name, each in columns.items() if each[step] is not None}}
            for step in range(size)
        )
        return cls(**{name: run[name] for name in ("regime", "arm", "seed", "commit")}, records=records)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--out", type=Path, default=Path("out/countdown_drift"), help="folder of the runs")
    parser.add_argument("--results-only", action="store_true")
    parser.add_argument("--no-results", action="store_true", help="leave results and page as they are")
    given = parser.parse_args(argv)
    runs = complete(given.seeds, given.out, start=not given.results_only)
    if not given.no_results:
        write_results(runs)
    return 0


def complete(seeds: Sequence[int], out: Path, *, start: bool = True) -> list[Run]:
    """Return the complete runs of all regimes and arms, after starting those that are missing, seed by seed."""
    wanted = [(seed, regime, arm) for seed in seeds for regime in REGIMES for arm in ARMS]
    runs = []
    commit = str(machine()["commit"])
    for number, (seed, regime, arm) in enumerate(wanted, 1):
        config = config_of(regime, arm, seed, out)
        made_on = Path(f"{config.out}.commit")
        if start and not is_complete(config):
            import examples.countdown.rank  # noqa: F401  # what every fork needs, loaded once

            say(f"run {number} of {len(wanted)}: {regime}, {arm}, seed {seed}; {cpu_seconds():.0f} s of CPU so far")
            made_on.parent.mkdir(parents=True, exist_ok=True)
            made_on.write_text(commit, encoding="utf-8")
            run_forked(config)
        if is_complete(config):
            runs.append(Run.read(config, regime, arm, made_on.read_text("utf-8")))
    return runs


def cpu_seconds() -> float:
    """Return what the runs of this process have taken."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def config_of(regime: str, arm: str, seed: int, out: Path) -> CountdownGrpoConfig:
    """Return the settings of one run."""
    name = "-".join((*regime.split(), *arm.replace("+ ", "").split(), f"seed{seed}")).lower()
    return load_config(CONFIG, (*SHARED, *REGIMES[regime], *ARMS[arm], f"seed={seed}", f"out={out / name}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean over seeds in its 95 % interval of Student's t."""

    mean: float
    half: float
    """nan with one seed."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return it of one value per seed."""
        require(len(values) > 0, "an interval needs a value.")
        size = len(values)
        half = T_95[size] * stdev(values) / math.sqrt(size) if size in T_95 else math.nan
        return cls(mean=fmean(values), half=half)

    def __str__(self) -> str:
        """Return "+0.012 ± 0.034"."""
        return f"{self.mean:+.3f} ± {self.half:.3f}"


def table(runs: Sequence[Run]) -> str:
    """Return a line per regime and arm."""
    headings = (
        "regime", "arm", "seeds", "lift of held-out accuracy", "lift minus plain's, same seeds", "collapsed",
        "router agreement", "gamma", "KL to old policy", "clipped", "KL to rollout engine",
    )  # fmt: skip
    lines = ["| " + " | ".join(headings) + " |", "|---|---|" + "---:|" * (len(headings) - 2)]
    for regime in REGIMES:
        plain = {run.seed: run.lift for run in runs if (run.regime, run.arm) == (regime, PLAIN)}
        for arm in ARMS:
            of_arm = [run for run in runs if (run.regime, run.arm) == (regime, arm)]
            if not of_arm:
                continue
            paired = [run.lift - plain[run.seed] for run in of_arm if run.seed in plain]
            cells = (
                regime, arm, str(len(of_arm)), str(Interval.of([run.lift for run in of_arm])),
                "" if arm == PLAIN or not paired else str(Interval.of(paired)),
                str(sum(run.collapsed_at is not None for run in of_arm)),
                *map(partial(_cell, of_arm), ("router/agreement", "router_corr/gamma_mean", "actor/ppo_kl"),
                     ("{:.3f}", "{:.3f}", "{:.1e}")),
                _cell(of_arm, "actor/pg_clipfrac", "{:.2%}"), _cell(of_arm, "mismatch/k3_kl", "{:.1e}"),
            )  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(runs: Sequence[Run], name: str, form: str) -> str:
    values = [value for run in runs if (value := run.mean(name)) is not None]
    return form.format(fmean(values)) if values else ""


def verdicts(runs: Sequence[Run]) -> str:
    """Return what differs from plain beyond its interval, and how the advisor did, in sentences."""
    apart, compared = [], 0
    for regime in REGIMES:
        plain = {run.seed: run.lift for run in runs if (run.regime, run.arm) == (regime, PLAIN)}
        for arm in [name for name in ARMS if name != PLAIN]:
            of_arm = [run for run in runs if (run.regime, run.arm) == (regime, arm) and run.seed in plain]
            if len(of_arm) <= 1:
                continue
            compared += 1
            gap = Interval.of([run.lift - plain[run.seed] for run in of_arm])
            if abs(gap.mean) > gap.half:
                apart.append(f"`{arm}` in regime `{regime}` ({gap})")
    collapsed = [run for run in runs if run.collapsed_at is not None]
    healthy = [run for run in runs if run.is_healthy]
    counts = []
    for alarm in (alarms, danger):
        firsts = {id(run): run.first_alarm(alarm) for run in (*collapsed, *healthy)}
        named = sum(1 for run in collapsed if (first := firsts[id(run)]) and first < (run.collapsed_at or 0))
        counts.append((named, sum(1 for run in healthy if firsts[id(run)])))
    (named, false), (named_later, false_later) = counts
    return (
        f"{len(runs)} runs are complete. In {len(apart)} of {compared} comparisons with `plain`, the interval "
        f"excludes 0{': ' if apart else ''}{'; '.join(apart)}. By chance alone, 1 in 20 intervals would exclude 0.\n\n"
        f"{len(collapsed)} runs collapsed. Under the protocol's rule, `moe-rl advise` predicted {named} of these "
        f"collapses at least one step ahead and raised an alarm in {false} of {len(healthy)} healthy runs. Under its "
        f"present rule (after the first step, danger rules for two different kinds of metrics must fire), it predicted "
        f"{named_later} collapses at least one step ahead and raised an alarm in {false_later} healthy runs. "
        f"{len(runs) - len(collapsed) - len(healthy)} runs neither collapsed nor were healthy.\n"
    )


def picture(runs: Sequence[Run]) -> Markup:
    """Draw the lift of every arm with its interval, and every seed as a dot, a panel per regime."""
    left, panel, row, top = 130, 210, 26, 66
    shown = {
        (regime, arm): [run.lift for run in runs if (run.regime, run.arm) == (regime, arm)]
        for regime in REGIMES
        for arm in ARMS
    }
    found = {case: Interval.of(lifts) for case, lifts in shown.items() if len(lifts) > 1}
    ends = [end for each in found.values() for end in (each.mean - each.half, each.mean + each.half)]
    low, high = (extreme([0.0, *ends, *(run.lift for run in runs)]) for extreme in (min, max))
    svg = Svg(
        height=top + row * len(ARMS) + 44,
        width=left + panel * len(REGIMES) + 10,
        label=f"lift of held-out accuracy of {', '.join(ARMS)} in {len(REGIMES)} regimes",
    )
    svg.text(12, 20, "Lift of held-out accuracy over 24 steps", css="title")
    svg.text(12, 38, "Dots: seeds. Bars: mean and 95 % interval.", css="label")
    for column, regime in enumerate(REGIMES):
        start = left + column * panel

        def at(lift: float, start: int = start) -> float:
            return start + (lift - low) / ((high - low) or 1.0) * (panel - 40)

        svg.text(start, top - 10, regime)
        svg.line(at(0.0), top, at(0.0), top + row * len(ARMS), css="axis")
        for tick in [step / 10 for step in range(-20, 21, 4) if low <= step / 10 <= high]:
            svg.text(at(tick), top + row * len(ARMS) + 18, f"{tick:+.1f}", anchor="middle", css="tick")
        for line, arm in enumerate(ARMS):
            y = top + row * (line + 0.5)
            if column == 0:
                svg.text(left - 14, y + 4, arm, anchor="end")
            for lift in shown[regime, arm]:
                svg.raw(f'<circle cx="{at(lift):.1f}" cy="{y:.1f}" r="2.4" fill="{SERIES[0]}" fill-opacity="0.45"/>')
            if (regime, arm) in found:
                one = found[regime, arm]
                svg.line(at(one.mean - one.half), y, at(one.mean + one.half), y, css="axis")
                svg.line(at(one.mean), y - 7, at(one.mean), y + 7, css="axis")
    return standalone(svg.markup())


def write_results(runs: Sequence[Run]) -> None:
    """Write JSON, picture and the block of the page; what was measured before goes, unless it is among `runs`."""
    require(len(runs) > 0, "there is no complete run to write results of.")
    document = {
        "benchmark": "countdown_drift",
        "command": "python benchmarks/countdown_drift.py",
        "machine": {name: value for name, value in machine().items() if name != "commit"},
        "base": read_yaml(CONFIG),
        "shared": SHARED,
        "regimes": REGIMES,
        "arms": ARMS,
    }
    head = json.dumps(document, indent=1).removesuffix("\n}")
    lines = ",\n".join(json.dumps(run.as_json()) for run in runs)
    STEM.with_suffix(".json").write_text(f'{head},\n "runs": [\n{lines}\n]}}\n', encoding="utf-8")
    (ROOT / "docs" / "pictures" / "countdown-drift.svg").write_text(picture(runs) + "\n", encoding="utf-8")
    before, _, rest = PAGE.read_text("utf-8").partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text(f"{before}{MARKS[0]}{block(runs)}{MARKS[1]}{after}", encoding="utf-8")


def block(runs: Sequence[Run]) -> str:
    """Return what the page says of the results."""
    return f"{verdicts(runs)}\n{table(runs)}"


if __name__ == "__main__":
    sys.exit(main())
