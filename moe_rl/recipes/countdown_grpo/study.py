"""What a study of several runs shows: one summary per run, means and spreads over seeds, a table and a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Self

from markupsafe import Markup

from moe_rl.core.errors import require
from moe_rl.recipes.countdown_grpo.metrics import read_metrics
from moe_rl.report.colors import SERIES
from moe_rl.report.curves import Axes, Line, line_chart

ACCURACY, GREEDY = "evaluation/accuracy", "evaluation/greedy_accuracy"
MEANS = {
    "mismatch_k3_kl": "mismatch/k3_kl",
    "replayed_k3_kl": "mismatch/replayed_k3_kl",
    "free_k3_kl": "mismatch/free_k3_kl",
    "max_logprob_diff": "mismatch/max_logprob_diff",
    "route_agreement": "mismatch/router_agreement",
    "ppo_kl": "actor/ppo_kl",
    "clip_fraction": "actor/pg_clipfrac",
    "clip_fraction_lower": "actor/pg_clipfrac_lower",
    "router_agreement": "router/agreement",
    "router_shift_ratio": "router_corr/gamma_mean",
    "static_imbalance": "moe_rl/static_imbalance",
    "imbalance": "moe_rl/imbalance",
}
"""Figures that are means over all steps of a run, where the run logged them."""


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

    @classmethod
    def read(cls, folder: Path, *, arm: str, seed: int) -> Self:
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
            "accuracy_lift": self.lift,
            "greedy_accuracy_lift": self.greedy_lift,
            "seconds": self.seconds,
        }


def markdown_table(runs: Sequence[RunSummary]) -> str:
    """Return one line per arm: means over its seeds, and the sample standard deviation of the lift."""
    headings = (
        "arm",
        "seeds",
        "accuracy before",
        "after",
        "lift",
        "least lift",
        "greedy lift",
        "KL train/rollout",
        "without replay",
        "KL to old policy",
        "clipped",
        "router agreement",
        "gamma",
    )
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
            *(
                _mean_cell(of_arm, name, form)
                for name, form in (
                    ("mismatch_k3_kl", "{:.1e}"),
                    ("free_k3_kl", "{:.1e}"),
                    ("ppo_kl", "{:.1e}"),
                    ("clip_fraction", "{:.2%}"),
                    ("router_agreement", "{:.3f}"),
                    ("router_shift_ratio", "{:.3f}"),
                )
            ),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def accuracy_picture(runs: Sequence[RunSummary]) -> Markup:
    """Draw held-out accuracy against steps, one line per arm: the mean over its seeds."""
    lines = {}
    for index, (arm, of_arm) in enumerate(_by_arm(runs).items()):
        steps = [step for step, _, _ in of_arm[0].evaluations]
        values = [mean(run.evaluations[at][1] for run in of_arm) for at in range(len(steps))]
        lines[arm] = Line(
            points=list(zip(steps, values, strict=True)),
            color=SERIES[index // 2 % len(SERIES)],
            dashed=index % 2 == 1,
        )
    return line_chart(lines, Axes(x="step", y="held-out accuracy"), width=720, height=360, legend=True)


def _by_arm(runs: Sequence[RunSummary]) -> dict[str, list[RunSummary]]:
    arms: dict[str, list[RunSummary]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run)
    return arms


def _mean_cell(runs: Sequence[RunSummary], name: str, form: str) -> str:
    values = [run.means[name] for run in runs if name in run.means]
    return form.format(mean(values)) if values else ""
