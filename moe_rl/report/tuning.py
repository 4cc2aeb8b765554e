"""What `moe-rl tune` found: a table of the best settings, the lines to paste, and a picture of the trade."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from moe_rl.core.mappings import attributes, not_none
from moe_rl.report.colors import policy_colors
from moe_rl.report.curves import Axes, Line, Point, line_chart
from moe_rl.report.html import render_picture, save_as
from moe_rl.report.size_comparison import SizeComparison
from moe_rl.report.svg import standalone
from moe_rl.report.tuned_settings import ALIKE, LEVERS, PASTED, ShapeLevers, TunedSetting
from moe_rl.report.units import format_count, spaced

BEST = 10


def _lever_line(name: str, cells: Sequence[str]) -> str:
    """Return a line of the table of levers: a name and a cell per lever."""
    return f"{name:44}{'  '.join(f'{cell:>15}' for cell in cells)}".rstrip()


def _point(row: TunedSetting) -> Point:
    """Return the place of a setting in the picture: GiB, 1,000 tokens/s/GPU."""
    return row.peak_gib, row.tokens_per_s_per_gpu / 1000


def _ends(interval: tuple[float, float] | None) -> str:
    if interval is None:
        return ""
    return f"{interval[0]:,.0f}-{interval[1]:,.0f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The settings that fit: the best, then those that are slower or need more memory."""

    model: str
    cluster: str
    gpus: int
    num_tokens: int
    num_sequences: int
    num_shapes: int
    num_laid_out: int
    """Shapes whose settings were laid out and priced; the others are slower by their estimate."""
    num_alike: int
    """How many settings the interval of the ratio does not tell apart from the fastest."""
    settings: tuple[TunedSetting, ...]
    batch: str = ""
    """What was done to get the sequences, as `batch_words` says it."""
    levers: tuple[ShapeLevers, ...] = ()
    """With routes: the fastest setting of every EP size and dispatcher with an engine and levers, fastest first."""
    comparison: SizeComparison | None = None
    """Every EP size beside the setting that the run has today."""
    cautions: tuple[str, ...] = ()
    """What published runs of the best layout's kind contradict; stands above the figures."""
    notes: tuple[str, ...] = ()
    """Which software was priced, and whether cluster and model are among the fitted ones."""

    @property
    def best(self) -> TunedSetting:
        """The setting of the fastest combination with levers; without routes the simplest of the fastest settings."""
        if self.levers:
            return self.levers[0].setting
        return self.settings[0]

    def first_of(self, key: str) -> dict[Any, TunedSetting]:
        """Return the first setting for every value of a field."""
        best_by_value: dict[Any, TunedSetting] = {}
        for row in self.settings:
            best_by_value.setdefault(getattr(row, key), row)
        return best_by_value

    def sentences(self) -> list[str]:
        """Return what the search found in words: the best, and why larger or smaller EP groups are slower."""
        best = self.settings[0]
        trains = f"{best.name} trains {best.tokens_per_s_per_gpu:,.0f} tokens/s/GPU: {best.limits}."
        if self.levers:
            trains = f"With balanced routing, {trains}"
        sentences = [*self.sentences_of_levers(), trains]
        if self.comparison is not None:
            sentences = [*self.comparison.sentences(), *sentences]
        if self.num_alike > 1:
            sentences.append(
                f"{self.num_alike} settings are equally fast within the error of the forecast: the 80 % interval of "
                f"their speed relative to the fastest setting contains 1. Of the settings within {ALIKE:.0%} of the "
                "fastest, the one with the fewest kinds of parallelism comes first."
            )
        # An EP size has one percentage: by routes where it is compared with levers.
        by_routes = {shape.setting.expert_model_parallel_size for shape in self.levers}
        for ep, row in self.first_of("expert_model_parallel_size").items():
            if ep in by_routes:
                continue
            longer = best.tokens_per_s_per_gpu / row.tokens_per_s_per_gpu - 1.0
            name, more = self.grown_part(best, row)
            if row.told_apart or (longer >= ALIKE and row.behind_fastest is None):
                sentences.append(
                    f"{row.name}, the fastest with EP{ep}, takes at least {longer:.1%} longer than {best.name}: {name} "
                    f"alone adds {more:.1%}."
                )
            elif row is not best:
                behind = f"is probably {longer:.1%} slower, but" if longer >= ALIKE else "is equally fast"
                sentences.append(
                    f"EP{ep} {behind} within the error of the forecast: {row.name}, {row.tokens_per_s_per_gpu:,.0f} "
                    f"tokens/s/GPU, peak {row.peak_gib:.1f} GiB."
                )
        return sentences

    def sentences_of_levers(self) -> list[str]:
        """Return shape, engine and levers of the fastest, what each adds, and why the next shapes are slower."""
        if not self.levers:
            return []
        best, *others = self.levers
        added = ", ".join(f"{name} {gain:+.1%}" for name, gain in best.gains.items()) or "no lever helps"
        gain = best.fastest / best.speeds["static"] - 1.0
        sentences = [
            f"With these routes, {best.name} reaches {best.fastest:,.0f} tokens/s/GPU, {gain:.1%} more than static "
            f"placement ({added})."
        ]
        if best.command:
            sentences.append(f"To get the same numbers: {best.command}")
        for other in others:
            behind = best.fastest / other.fastest - 1.0
            name, more = self.grown_part(best.setting, other.setting)
            sentences.append(
                f"{other.name} ({other.fastest:,.0f} tokens/s/GPU) takes {behind:.1%} longer: with balanced "
                f"routing, {name} alone adds {more:.1%}."
            )
        return sentences

    @staticmethod
    def grown_part(best: TunedSetting, other: TunedSetting) -> tuple[str, float]:
        """Return the part by which the other's balanced step is longest beyond the best's, as a share of the latter."""
        longer = best.tokens_per_s_per_gpu / other.tokens_per_s_per_gpu
        growth = {name: share * longer - best.parts.get(name, 0.0) for name, share in other.parts.items()}
        name = max(growth, key=lambda name: growth[name])
        return spaced(name), growth[name]

    def table_of_levers(self) -> str:
        """Return tokens/s/GPU by shape and lever."""
        lines = [_lever_line("tokens/s/GPU as levers are added", LEVERS)]
        for shape in self.levers:
            figures = []
            for lever in LEVERS:
                if lever in shape.speeds:
                    figures.append(f"{shape.speeds[lever]:,.0f}")
                else:
                    figures.append("")
            lines.append(_lever_line(f"{shape.setting.name}, {shape.setting.dispatcher}", figures))
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return all settings as JSON values."""
        rows = [not_none(asdict(row)) | {"limits": row.limits} for row in self.settings]
        facts = attributes(self, ("model", "cluster", "gpus", "num_tokens", "num_sequences", "batch"))
        document = {"schema": "moe_rl.tune/1", **facts, "settings": rows, "notes": [*self.cautions, *self.notes]}
        if self.levers:
            document["levers"] = [shape.as_json() for shape in self.levers]
        if self.comparison is not None:
            document["current"] = self.comparison.as_json()
        return document

    def __str__(self) -> str:
        head = "  tokens/s/GPU  80 % interval  peak GiB  micro-batches  recompute  dispatcher  layout; what limits it"
        rows = [
            f"{row.tokens_per_s_per_gpu:14,.0f}  {_ends(row.tokens_per_s_interval):>13}  {row.peak_gib:8.1f}  "
            f"{row.num_micro_batches:4} x "
            f"{format_count(row.micro_batch_tokens):>6}  {row.recompute:9}  {row.dispatcher:10}  "
            f"{row.name}; {row.limits}"
            for row in self.settings[:BEST]
        ]
        if self.levers:
            levers = ["", self.table_of_levers()]
        else:
            levers = []
        if self.comparison is not None:
            levers = ["", str(self.comparison), *levers]
        notes = [f"note: {note}" for note in self.notes]
        cautions = [f"warning: {caution}" for caution in self.cautions]
        return "\n".join([*self._title(), *cautions, head, *rows, *levers, "", *self.sentences(), *notes])

    def _title(self) -> list[str]:
        """Return the line above the table: what was tuned, on which batch."""
        if not self.batch:
            return []
        return [f"{self.model} on {self.gpus} GPUs of {self.cluster}, {self.batch}"]

    def picture(self, width: float = 640) -> Markup:
        """Return the trade as a drawing: for every EP size, the most tokens/s/GPU within a peak memory; the best has a
        ring.
        """
        points_by_ep: dict[str, list[Point]] = {}
        # In the order of the sizes, so that each has its color however fast it is.
        for row in sorted(self.settings, key=lambda row: row.expert_model_parallel_size):
            points_by_ep.setdefault(f"EP{row.expert_model_parallel_size}", []).append(_point(row))
        colors = policy_colors(points_by_ep)
        lines = {}
        for name, settings in points_by_ep.items():
            ring = None
            if name == f"EP{self.best.expert_model_parallel_size}":
                ring = _point(self.best)
            points, fastest = [], 0.0
            for point in sorted(settings):
                # More memory is only worth a point where it is faster than everything that needs less. The answer has
                # one always: of settings that the interval does not tell apart it is the simplest, not the fastest.
                if point[1] > fastest or point == ring:
                    points.append(point)
                fastest = max(fastest, point[1])
            lines[name] = Line(points=points, color=colors[name], answer=ring, answer_name=self.best.name)
        axes = Axes(x="peak memory, GiB", y="1,000 tokens/s/GPU")
        return line_chart(lines, axes, width=width, height=320, legend=True)

    def page(self) -> bytes:
        """Return the picture with the table and the lines to paste, as a page."""
        sentences = self.sentences()
        pasted = [f"\n\n{framework}:\n{self.best.lines(framework)}" for framework in PASTED]
        table = str(self).partition("\n\n")[0] + "".join(pasted)
        return render_picture(
            f"moe_rl tune, {self.gpus} GPUs",
            sentences[0],
            self.picture,
            table,
            [*self.cautions, *sentences[1:], *self.notes],
        )

    def save(self, path: Path | str) -> None:
        """Write a page (.html) or the picture alone (.svg)."""
        save_as(path, {".html": self.page, ".svg": lambda: standalone(self.picture()).encode()})
