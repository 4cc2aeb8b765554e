"""What a study of several runs shows: one summary per run, means and spreads over seeds, tables and pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Self

from markupsafe import Markup

from examples.countdown.metrics import read_metrics
from moe_rl.core.errors import require
from moe_rl.report.colors import BASELINE_COLOR, SERIES
from moe_rl.report.curves import Axes, Box, Line, plot
from moe_rl.report.svg import Svg, standalone

ACCURACY, GREEDY, MISMATCH = "evaluation/accuracy", "evaluation/greedy_accuracy", "mismatch/k3_kl"
MEANS = {
    "mismatch_k3_kl": MISMATCH,
    "replayed_k3_kl": "mismatch/replayed_k3_kl",
    "free_k3_kl": "mismatch/free_k3_kl",
    "max_logprob_diff": "mismatch/max_logprob_diff",
    "mean_logprob_diff": "mismatch/mean_logprob_diff",
    "route_agreement": "mismatch/router_agreement",
    "ppo_kl": "actor/ppo_kl",
    "clip_fraction": "actor/pg_clipfrac",
    "clip_fraction_lower": "actor/pg_clipfrac_lower",
    "router_agreement": "router/agreement",
    "router_shift_ratio": "router_corr/gamma_mean",
    "static_imbalance": "moe_rl/static_imbalance",
    "imbalance": "moe_rl/imbalance",
    "correction_weight": "rollout_corr/rollout_is_mean",
    "correction_weight_std": "rollout_corr/rollout_is_std",
}
"""Figures that are means over all steps of a run, where the run logged them."""
MAXIMA = {
    "max_correction_weight": "rollout_corr/rollout_is_max",
    "export_max_token_k3": "export/max_token_k3",
}
"""Figures that are the largest of all steps of a run."""

COLUMNS = {
    "KL train/rollout": ("mismatch_k3_kl", "{:.1e}"),
    "without replay": ("free_k3_kl", "{:.1e}"),
    "with replay": ("replayed_k3_kl", "{:.1e}"),
    "difference of log-probabilities": ("mean_logprob_diff", "{:.1e}"),
    "largest": ("max_logprob_diff", "{:.1e}"),
    "other experts": ("other_experts", "{:.2%}"),
    "correction, spread": ("correction_weight_std", "{:.1e}"),
    "largest weight": ("max_correction_weight", "{:.2f}"),
    "export, worst token": ("export_max_token_k3", "{:.0e}"),
    "KL to old policy": ("ppo_kl", "{:.1e}"),
    "clipped": ("clip_fraction", "{:.2%}"),
    "router agreement": ("router_agreement", "{:.3f}"),
    "gamma": ("router_shift_ratio", "{:.3f}"),
    "busiest rank": ("imbalance", "{:.3f}"),
    "not balanced": ("static_imbalance", "{:.3f}"),
}
"""Columns that a table may have: figure of a run, and how its mean over seeds is written; a maximum stays one."""
OBJECTIVES = ("KL train/rollout", "KL to old policy", "clipped", "router agreement", "gamma", "busiest rank")
PRECISIONS = (
    "with replay",
    "without replay",
    "difference of log-probabilities",
    "largest",
    "other experts",
    "correction, spread",
    "largest weight",
    "export, worst token",
)


DRAWN_MISMATCH = 1e-8
PER_ROW, COLUMN, ROW, LEFT, TOP = 3, 300, 216, 62, 88
"""Panels of a picture: how many stand side by side, and the room of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run of one arm."""

    arm: str
    seed: int
    num_steps: int
    evaluations: tuple[tuple[int, float, float], ...]
    """(step, accuracy of samples, greedy accuracy) on held-out problems; step 0 is the supervised start."""
    rewards: tuple[float, ...]
    """Mean reward of every step's rollouts."""
    means: Mapping[str, float]
    seconds: float
    """Of all steps, on a machine that others use too."""
    machine: Mapping[str, Any]
    """What it ran on, the commit among it."""
    maxima: Mapping[str, float] = field(default_factory=dict)
    mismatch: tuple[float, ...] = ()
    """k3 divergence of trainer and rollout engine in every step; empty in results of before it was kept."""

    @classmethod
    def read(cls, folder: Path, *, arm: str, seed: int, machine: Mapping[str, Any]) -> Self:
        """Read a run's metrics."""
        lines = read_metrics(folder)
        steps = [line for line in lines if line["step"] > 0]
        require(len(steps) > 0, f"the run in {folder} has no finished step.")
        return cls(
            arm=arm,
            seed=seed,
            num_steps=len(steps),
            evaluations=tuple((line["step"], line[ACCURACY], line[GREEDY]) for line in lines if ACCURACY in line),
            rewards=tuple(line["reward/mean"] for line in steps),
            means={name: mean(line[key] for line in steps) for name, key in MEANS.items() if key in steps[0]},
            seconds=sum(line["time/step_s"] for line in steps),
            machine=dict(machine),
            maxima={name: max(line[key] for line in steps) for name, key in MAXIMA.items() if key in steps[0]},
            mismatch=tuple(line[MISMATCH] for line in steps),
        )

    @classmethod
    def from_json(cls, run: Mapping[str, Any]) -> Self:
        """Return what `as_json` was called on."""
        return cls(
            arm=run["arm"],
            seed=run["seed"],
            num_steps=run["num_steps"],
            evaluations=tuple((one["step"], one["accuracy"], one["greedy_accuracy"]) for one in run["evaluations"]),
            rewards=tuple(run["rewards"]),
            means=run["means"],
            seconds=run["seconds"],
            machine=run["machine"],
            maxima=run.get("maxima", {}),
            mismatch=tuple(run.get("mismatch", ())),
        )

    @property
    def lift(self) -> float:
        """Accuracy of samples on held-out problems, last minus first."""
        return self.evaluations[-1][1] - self.evaluations[0][1]

    @property
    def greedy_lift(self) -> float:
        """The same of greedy answers."""
        return self.evaluations[-1][2] - self.evaluations[0][2]

    def as_json(self) -> dict[str, Any]:
        """Return every figure."""
        return {
            "arm": self.arm,
            "seed": self.seed,
            "num_steps": self.num_steps,
            "evaluations": [
                {"step": step, "accuracy": sampled, "greedy_accuracy": greedy}
                for step, sampled, greedy in self.evaluations
            ],
            "rewards": list(self.rewards),
            "means": dict(self.means),
            "maxima": dict(self.maxima),
            "mismatch": list(self.mismatch),
            "accuracy_lift": self.lift,
            "greedy_accuracy_lift": self.greedy_lift,
            "seconds": self.seconds,
            "machine": dict(self.machine),
        }

    def figure(self, name: str) -> float | None:
        """Return one of the run's means or maxima; None where the run has none of that name."""
        if name == "other_experts":
            agreement = self.means.get("route_agreement")
            return None if agreement is None else 1.0 - agreement
        return self.means.get(name, self.maxima.get(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveComparison:
    """How far the curves of two arms are apart, means over the seeds that both have, beside the spread of seeds."""

    curve: str
    """"held-out accuracy" or "reward"."""
    arms: tuple[str, str]
    seeds: tuple[int, ...]
    steps: tuple[int, ...]
    differences: tuple[float, ...]
    """Second arm minus first in every step."""
    spreads: tuple[float, ...]
    """Sample standard deviation over seeds in every step: the root of the mean of both arms' variances."""
    equal_until: tuple[int, ...]
    """By seed, the last step up to which both arms have the same numbers; -1: not even the first."""

    @classmethod
    def of(cls, curve: str, runs: Sequence[RunSummary], arms: tuple[str, str]) -> Self | None:
        """Compare two arms; None while they have fewer than two seeds in common."""
        first, second = ({run.seed: _curve(run, curve) for run in runs if run.arm == arm} for arm in arms)
        seeds = tuple(sorted(first.keys() & second.keys()))
        if len(seeds) <= 1:
            return None
        steps = tuple(first[seeds[0]])
        common = []
        for seed in seeds:
            equal = [step for step in steps if first[seed][step] == second[seed][step]]
            common.append(max((step for n, step in enumerate(equal) if step == steps[n]), default=-1))
        by_step = [[[of_arm[seed][step] for seed in seeds] for of_arm in (first, second)] for step in steps]
        return cls(
            curve=curve,
            arms=arms,
            seeds=seeds,
            steps=steps,
            differences=tuple(mean(ours) - mean(base) for base, ours in by_step),
            spreads=tuple(sqrt((stdev(base) ** 2 + stdev(ours) ** 2) / 2) for base, ours in by_step),
            equal_until=tuple(common),
        )

    @property
    def largest(self) -> tuple[int, float, float]:
        """(step, difference, spread) where the curves are furthest apart."""
        at = max(range(len(self.steps)), key=lambda index: abs(self.differences[index]))
        return self.steps[at], self.differences[at], self.spreads[at]

    @property
    def steps_within(self) -> int:
        """Steps in which the difference is no larger than the spread."""
        return sum(abs(gap) <= spread for gap, spread in zip(self.differences, self.spreads, strict=True))

    def as_json(self) -> dict[str, Any]:
        """Return every figure."""
        step, difference, spread = self.largest
        return {
            "curve": self.curve,
            "arms": list(self.arms),
            "seeds": list(self.seeds),
            "largest_difference": {"step": step, "difference": difference, "spread_of_seeds": spread},
            "mean_difference": mean(self.differences),
            "mean_spread_of_seeds": mean(self.spreads),
            "steps": len(self.steps),
            "steps_within_the_spread": self.steps_within,
            "equal_until_step": list(self.equal_until),
        }

    def sentence(self) -> str:
        """Return it for a person."""
        step, difference, spread = self.largest
        first, second = self.arms
        return (
            f"{self.curve.capitalize()} of `{second}` minus `{first}`, means over seeds "
            f"{', '.join(map(str, self.seeds))}: furthest apart at step {step} with {difference:+.3f}, where seeds "
            f"spread by {spread:.3f} (sample standard deviation). On average over steps the difference is "
            f"{mean(self.differences):+.4f}, the spread {mean(self.spreads):.3f}; it is within the spread in "
            f"{self.steps_within} of {len(self.steps)} steps. Number for number, runs of one seed are the same up to "
            f"step {', '.join(map(str, self.equal_until))}."
        )


def merged(kept: Sequence[RunSummary], new: Sequence[RunSummary], arms: Sequence[str]) -> list[RunSummary]:
    """Return both, a new run in place of the kept one of its arm and seed, in the order of `arms`, then seeds.

    Runs of other arms are left out.
    """
    runs = {(run.arm, run.seed): run for run in (*kept, *new)}
    order = {arm: index for index, arm in enumerate(arms)}
    return sorted((run for run in runs.values() if run.arm in order), key=lambda run: (order[run.arm], run.seed))


def markdown_table(runs: Sequence[RunSummary], columns: Sequence[str] = OBJECTIVES) -> str:
    """Return one line per arm: means over its seeds, and the sample standard deviation of the lift.

    `columns` are names in `COLUMNS`, after those of the accuracy.
    """
    headings = ("arm", "seeds", "accuracy before", "after", "lift", "least lift", "greedy lift", *columns)
    lines = ["| " + " | ".join(headings) + " |", "|---" + "|---:" * (len(headings) - 1) + "|"]
    for arm, of_arm in _by_arm(runs).items():
        lifts = [run.lift for run in of_arm]
        spread = f" +- {stdev(lifts):.3f}" if len(lifts) > 1 else ""
        cells = (
            arm,
            str(len(of_arm)),
            f"{mean(run.evaluations[0][1] for run in of_arm):.3f}",
            f"{mean(run.evaluations[-1][1] for run in of_arm):.3f}",
            f"{mean(lifts):+.3f}{spread}",
            f"{min(lifts):+.3f}",
            f"{mean(run.greedy_lift for run in of_arm):+.3f}",
            *(_cell(of_arm, *COLUMNS[name]) for name in columns),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def accuracy_picture(runs: Sequence[RunSummary]) -> Markup:
    """Draw held-out accuracy against steps, a panel per arm: the mean over its seeds in the band of them all.

    In gray stands what the arm is compared with: arm "x" for "x + y", else the first arm.
    """
    return _picture(runs, "held-out accuracy", Axes(x="step", y="held-out accuracy"))


def reward_picture(runs: Sequence[RunSummary]) -> Markup:
    """Draw the mean reward of every step's rollouts like `accuracy_picture`."""
    return _picture(runs, "reward", Axes(x="step", y="mean reward of the rollouts"))


def mismatch_picture(runs: Sequence[RunSummary]) -> Markup:
    """Draw the divergence of trainer and rollout engine like `accuracy_picture`, on a logarithmic axis.

    Arms that differ by rounding alone are left out.
    """
    arms = _by_arm(runs)
    shown = [
        arm for arm, of_arm in arms.items() if mean(value for run in of_arm for value in run.mismatch) > DRAWN_MISMATCH
    ]
    axes = Axes(x="step", y="k3 divergence of trainer and rollout engine per token", log=True)
    return _picture([run for run in runs if run.arm in shown], "mismatch", axes)


def _picture(runs: Sequence[RunSummary], curve: str, axes: Axes) -> Markup:
    arms = _by_arm(runs)
    lines = {
        arm: (_line(of_arm, curve, SERIES[0]), replace(_line(of_arm, curve, BASELINE_COLOR), dashed=True))
        for arm, of_arm in arms.items()
    }
    values = [y for line, _ in lines.values() for _, *ends in line.band for y in ends if axes.can_show(y)]
    axes = replace(axes, limits=(min(values), max(values)))
    panels = list(arms)[1:] or list(arms)
    rows = -(-len(panels) // PER_ROW)
    svg = Svg(height=TOP + rows * ROW, width=LEFT + PER_ROW * COLUMN, label=f"{axes.y} of {', '.join(arms)}")
    svg.text(12, 20, axes.y.capitalize(), css="title")
    svg.text(
        12, 38, "Mean over seeds in the band of all seeds; gray and dashed: what the arm is compared with.", css="label"
    )
    for index, arm in enumerate(panels):
        row, column = divmod(index, PER_ROW)
        box = Box(left=LEFT + column * COLUMN, top=TOP + row * ROW, width=COLUMN - 24, height=ROW - 90)
        plain = arm.rpartition(" + ")[0]
        base = plain if plain in arms else next(iter(arms))
        drawn = {base: lines[base][1], arm: lines[arm][0]}
        svg.text(box.left, box.top - 24, arm)
        svg.text(box.left, box.top - 8, f"gray: {base}" if base != arm else "", css="label")
        plot(svg, drawn, axes, box, numbers=column == 0)
        svg.text(box.left + box.width / 2, box.top + box.height + 34, axes.x, anchor="middle", css="label")
    return standalone(svg.markup())


def _line(runs: Sequence[RunSummary], curve: str, color: str) -> Line:
    curves = [_curve(run, curve) for run in runs]
    by_step = {step: [one[step] for one in curves] for step in curves[0]}
    return Line(
        points=[(step, mean(values)) for step, values in by_step.items()],
        color=color,
        marker=None,
        band=[(step, min(values), max(values)) for step, values in by_step.items()],
    )


def _curve(run: RunSummary, curve: str) -> dict[int, float]:
    """Return a curve of a run by step."""
    if curve == "held-out accuracy":
        return {step: sampled for step, sampled, _ in run.evaluations}
    return dict(enumerate(run.rewards if curve == "reward" else run.mismatch, 1))


def _by_arm(runs: Sequence[RunSummary]) -> dict[str, list[RunSummary]]:
    arms: dict[str, list[RunSummary]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    return arms


def _cell(runs: Sequence[RunSummary], name: str, form: str) -> str:
    values = [value for run in runs if (value := run.figure(name)) is not None]
    return form.format((max if name in MAXIMA else mean)(values)) if values else ""
