"""The report of an RL run: what was learned, how far the two engines are apart, and what balancing did.

A figure that the run did not measure is left out, chart and row alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from markupsafe import Markup
from rich.console import Console
from rich.text import Text

from moe_rl.core.errors import require
from moe_rl.report.colors import BASELINE_COLOR, SERIES
from moe_rl.report.columns import chosen_columns
from moe_rl.report.curves import SAMPLE_WIDTH, Axes, Line, draw_sample, line_chart
from moe_rl.report.headline import headline
from moe_rl.report.html import asset, environment, policy_rows
from moe_rl.report.simulation import ReportData
from moe_rl.report.svg import Svg
from moe_rl.report.tables import figures_table
from moe_rl.report.terminal import MAX_WIDTH

ENDS = 5
"""Steps that a figure of the beginning or the end of a run is the mean of."""

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One metric along the run."""

    metric: str
    name: str
    color: str
    dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Metrics that belong together; those that may lie on others come last and are dashed, so that none is hidden."""

    title: str
    caption: str
    axes: Axes
    series: tuple[Series, ...]


BLUE, ORANGE, GREEN, PINK = SERIES[:4]
CHARTS = (
    Chart(
        title="Reward",
        caption="Mean reward of the samples that a step trains on, and accuracy on problems that are never trained on: "
        "of samples at the same temperature, and of greedy answers.",
        axes=Axes(x="step", y="reward, accuracy"),
        series=(
            Series(metric="reward/mean", name="reward of the rollouts", color=BASELINE_COLOR),
            Series(metric="evaluation/accuracy", name="held-out accuracy", color=BLUE),
            Series(metric="evaluation/greedy_accuracy", name="the same, greedy answers", color=ORANGE, dashed=True),
        ),
    ),
    Chart(
        title="Trainer against rollout engine",
        caption="KL divergence (k3, mean over response tokens) between the log-probabilities that the rollout engine "
        "sampled with and those of the trainer on the same weights: with the recorded experts replayed, and with the "
        "trainer's router free to choose others.",
        axes=Axes(x="step", y="KL divergence", log=True),
        series=(
            Series(metric="mismatch/free_k3_kl", name="without replay", color=ORANGE),
            Series(metric="mismatch/replayed_k3_kl", name="with replay", color=BLUE, dashed=True),
        ),
    ),
    Chart(
        title="Load of the busiest rank",
        caption="Rows of the busiest expert-parallel rank over the mean (sums over micro-batches, mean over layers): "
        "with every expert on its home alone, planned from the recorded routes before the pass, and counted in it.",
        axes=Axes(x="step", y="max / mean rank load", from_one=True),
        series=(
            Series(metric="moe_rl/static_imbalance", name="static", color=BASELINE_COLOR),
            Series(metric="moe_rl/imbalance", name="balanced, counted", color=GREEN),
            Series(metric="moe_rl/predicted_imbalance", name="balanced, predicted", color=PINK, dashed=True),
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """What a run measured, ready to be shown."""

    title: str
    steps: Sequence[Metrics]
    """One line per step, with the key "step"; step 0 is the start."""
    setting: Mapping[str, object]
    """Under which conditions; shown as it is."""
    projection: ReportData | None = None
    """The recorded routes simulated on a real cluster."""
    projection_file: str = ""
    """Name of the projection's own page, beside this one."""
    notes: tuple[str, ...] = ()
    command: str = ""

    def __post_init__(self) -> None:
        require(
            any(line["step"] > 0 for line in self.steps),
            "the run has not finished a step, so there is nothing to show.",
        )

    def points(self, metric: str) -> list[tuple[float, float]]:
        """Return (step, value) where the metric was measured."""
        return [(line["step"], line[metric]) for line in self.steps if metric in line]

    def ends(self, metric: str) -> tuple[float, float] | None:
        """Return the means over the first and the last steps; evaluations, which are rare, are taken singly."""
        values = [value for _, value in self.points(metric)]
        if not values:
            return None
        count = 1 if metric.startswith("evaluation/") else min(ENDS, max(1, len(values) // 2))
        return mean(values[:count]), mean(values[-count:])

    @property
    def finding(self) -> str:
        """What the run showed, in one line: the page's heading; without such figures it is the run's title."""
        found = []
        if accuracy := self.ends("evaluation/accuracy"):
            found.append(f"held-out accuracy {accuracy[0]:.2f} → {accuracy[1]:.2f}")
        static, balanced = self.ends("moe_rl/static_imbalance"), self.ends("moe_rl/imbalance")
        if static and balanced:
            found.append(f"busiest rank {static[1]:.2f} → {balanced[1]:.2f} of the mean load")
        text = ", ".join(found) or self.title
        return text[0].upper() + text[1:]

    @property
    def sentences(self) -> tuple[str, ...]:
        """What the figures say; every sentence follows from them."""
        said = []
        if accuracy := self.ends("evaluation/accuracy"):
            greedy = self.ends("evaluation/greedy_accuracy")
            of_greedy = "" if greedy is None else f", that of greedy answers from {greedy[0]:.3f} to {greedy[1]:.3f}"
            said.append(f"Held-out accuracy of samples went from {accuracy[0]:.3f} to {accuracy[1]:.3f}{of_greedy}.")
        free, replayed = (
            [value for _, value in self.points(f"mismatch/{kind}_k3_kl")] for kind in ("free", "replayed")
        )
        if free and replayed and mean(free) > 0:
            said.append(
                f"Over the run the KL between trainer and rollout engine is {max(mean(replayed), 0.0):.1e} with the "
                f"engine's experts replayed, and {mean(free):.1e} without."
            )
        static, balanced = self.ends("moe_rl/static_imbalance"), self.ends("moe_rl/imbalance")
        if static and balanced:
            said.append(
                f"The busiest rank had {static[1]:.2f} times the mean load with experts at home, {balanced[1]:.2f} "
                "times with replicas."
            )
        if misplaced := self.points("moe_rl/misplaced_share"):
            worst = max(share for _, share in misplaced)
            said.append(
                f"At most {worst:.2%} of a step's rows ran on a different rank than planned."
                if worst > 0
                else "Every row of every step ran on the rank that was planned before the pass."
            )
        return tuple(said)


ROWS = (
    ("reward of the rollouts", "reward/mean", "{:.3f}"),
    ("held-out accuracy", "evaluation/accuracy", "{:.3f}"),
    ("held-out accuracy, greedy", "evaluation/greedy_accuracy", "{:.3f}"),
    ("KL trainer/rollout, with replay", "mismatch/replayed_k3_kl", "{:.1e}"),
    ("KL trainer/rollout, without replay", "mismatch/free_k3_kl", "{:.1e}"),
    ("routes on which both engines agree", "mismatch/router_agreement", "{:.2%}"),
    ("busiest rank, static", "moe_rl/static_imbalance", "{:.3f}"),
    ("busiest rank, balanced", "moe_rl/imbalance", "{:.3f}"),
    ("busiest rank, predicted", "moe_rl/predicted_imbalance", "{:.3f}"),
    ("replicas per pass", "moe_rl/replicas", "{:.1f}"),
    ("seconds per step", "time/step_s", "{:.2f}"),
)
"""(words, metric, form) of the table."""


def table_rows(report: TrainingReport) -> list[tuple[str, str, str]]:
    """Return (words, first steps, last steps) of what was measured."""
    rows = []
    for words, metric, form in ROWS:
        if (ends := report.ends(metric)) is not None:
            rows.append((words, form.format(ends[0]), form.format(ends[1])))
    return rows


def print_training_report(report: TrainingReport, console: Console) -> None:
    """Print the table and what it says."""
    width = min(console.width, MAX_WIDTH)
    table = figures_table(report.title, "first steps", "last steps", gap=0)
    for words, first, last in table_rows(report):
        table.add_row(Text(words), first, last)
    console.print(table, width=width)
    for sentence in report.sentences:
        console.print(Text(sentence), width=width)
    for note in report.notes:
        console.print(Text(f"note: {note}", style="yellow"), width=width)


def render_training_html(report: TrainingReport) -> str:
    """Return the page."""
    shown = []
    for chart in CHARTS:
        measured = [
            series for series in chart.series if any(chart.axes.can_show(y) for _, y in report.points(series.metric))
        ]
        if measured:
            lines = {
                one.name: Line(points=report.points(one.metric), color=one.color, dashed=one.dashed) for one in measured
            }
            legend = {name: _line_sample(line, name) for name, line in lines.items()}
            shown.append({"chart": chart, "legend": legend, "svg": line_chart(lines, chart.axes)})
    template = Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8")
    return (
        environment()
        .from_string(template)
        .render(
            report=report,
            charts=shown,
            rows=table_rows(report),
            ends=ENDS,
            projection=report.projection and _projection(report.projection),
            style=asset("style.css"),
        )
    )


def _projection(report: ReportData) -> dict[str, object]:
    return {"headline": headline(report), "table": policy_rows(report, chosen_columns(report))}


def _line_sample(line: Line, name: str) -> Markup:
    """Return a small picture of how a line is drawn, for a legend beside the chart."""
    svg = Svg(height=10, width=SAMPLE_WIDTH, label=f"how {name} is drawn")
    draw_sample(svg, line, 0, 5)
    return svg.markup()
