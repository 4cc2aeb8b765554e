"""What `moe-rl tune` found: a table of the best settings, the lines to paste, and a picture of the trade."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from moe_rl.core.mappings import attributes, not_none
from moe_rl.core.step_words import Dispatcher, Recompute
from moe_rl.report.colors import policy_colors
from moe_rl.report.curves import Axes, Line, Point, line_chart
from moe_rl.report.html import render_picture, save_as
from moe_rl.report.svg import standalone
from moe_rl.report.units import format_count, largest_shares, spaced

if TYPE_CHECKING:
    from moe_rl.report.size_comparison import SizeComparison

BEST = 10
# Of settings whose forecasts differ by less the simplest comes first. Whether two settings can be told apart is a
# question to the interval of their ratio.
ALIKE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """How the GPUs are shared out."""

    expert_model_parallel_size: int
    tensor_model_parallel_size: int
    context_parallel_size: int
    pipeline_model_parallel_size: int
    num_virtual_stages: int
    dispatcher: Dispatcher
    expert_tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "dispatcher", Dispatcher(self.dispatcher))  # A file of results has the word.

    @property
    def expert_ranks(self) -> int:
        """Ranks that share one set of experts."""
        return self.expert_model_parallel_size * self.expert_tensor_parallel_size

    @property
    def slices(self) -> int:
        """TP x CP."""
        return self.tensor_model_parallel_size * self.context_parallel_size

    @property
    def name(self) -> str:
        """The parallel layout in a few letters."""
        return " ".join([f"EP{self.expert_model_parallel_size}", *self._degrees_beside_ep()])

    @property
    def num_kinds(self) -> int:
        """Kinds of parallelism beside EP and data parallelism."""
        return len(self._degrees_beside_ep())

    def _degrees_beside_ep(self) -> list[str]:
        """Return e.g. ["TP2", "CP4"]."""
        sizes = {
            "ETP": self.expert_tensor_parallel_size,
            "TP": self.tensor_model_parallel_size,
            "CP": self.context_parallel_size,
            "PP": self.pipeline_model_parallel_size,
            "VP": self.num_virtual_stages,
        }
        return [f"{letters}{size}" for letters, size in sizes.items() if size > 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedSetting(ParallelLayout):
    """One setting of a shape, priced."""

    micro_batch_tokens: int
    """Token budget of a data-parallel rank."""
    num_micro_batches: int
    recompute: Recompute
    tokens_per_s_per_gpu: float
    peak_gib: float
    parts: Mapping[str, float]
    """Shares of the step by part."""
    packing_gain: float = 1.0
    """Step on the framework's layout over the step on the packed one, by lengths."""
    resident_slots: int = 0
    """Copies of experts per rank and layer for which the peak has room; balanced routing gains nothing from them."""
    tokens_per_s_interval: tuple[float, float] | None = None
    """Both ends of the 80 % interval; None far behind the fastest."""
    behind_fastest: tuple[float, float] | None = None
    """The same of this setting's step over the fastest's: where it holds 1, the two are not told apart."""
    peak_interval_gib: tuple[float, float] | None = None
    cp_comm_type: str | None = None
    """How the CP ranks exchange keys and values; None without context parallelism."""

    def __post_init__(self) -> None:
        ParallelLayout.__post_init__(self)
        object.__setattr__(self, "recompute", Recompute(self.recompute))

    @property
    def shape(self) -> ParallelLayout:
        """The layout alone."""
        return ParallelLayout(**attributes(self, ParallelLayout.__slots__))

    @property
    def told_apart(self) -> bool:
        """Whether the fastest setting is called faster than this one."""
        return self.behind_fastest is not None and self.behind_fastest[0] > 1.0

    @property
    def limits(self) -> str:
        """The largest parts of the step."""
        return largest_shares(self.parts)

    def lines(self, framework: str) -> str:
        """Return what a run of this framework sets: `megatron`, `verl`, `slime` or `nemo-rl`."""
        return PASTED[framework](self)


LEVERS = ("static", "engine", "packing", "homes", "resident copies", "moe-rl replicas")
"""In the order in which each is added to those before; the replicas of `moe-rl` take the engine's place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeLevers:
    """A setting's tokens/s/GPU under the routes of a trace, as an engine and the levers of `moe-rl` are added."""

    setting: TunedSetting
    engine: str | None
    """Value of `domain_balance`; None: the dispatcher has no engine, copies are ours."""
    resident_slots: int
    speeds: Mapping[str, float]
    """By lever, of `LEVERS`; those that the setting does not have are absent."""
    command: str = ""
    """The line that simulates the fastest combination; empty: priced on a sample of layers alone."""

    @property
    def lever(self) -> str:
        """The last lever of the fastest combination; of equal ones the first."""
        return max(self.speeds, key=lambda name: self.speeds[name])

    @property
    def fastest(self) -> float:
        """Tokens/s/GPU of the fastest combination."""
        return self.speeds[self.lever]

    @property
    def name(self) -> str:
        """Layout, dispatcher, engine and levers of the fastest combination."""
        words = [self.setting.name, self.setting.dispatcher]
        for lever in self._added()[1:]:
            if lever == "engine":
                words.append(self.engine or "")
            elif lever == "resident copies":
                words.append(f"{self.resident_slots} resident copies per rank")
            else:
                words.append(lever)
        return ", ".join(words)

    @property
    def gains(self) -> dict[str, float]:
        """What each lever of the fastest combination adds to those before it, as a share."""
        gains, before = dict[str, float](), self.speeds["static"]
        for lever in self._added()[1:]:
            gains[lever] = self.speeds[lever] / before - 1.0
            before = self.speeds[lever]
        return gains

    def as_json(self) -> dict[str, Any]:
        """Return the shape and its speeds as JSON values."""
        document = {
            "name": self.setting.name,
            "dispatcher": self.setting.dispatcher,
            "engine": self.engine or "ours",
            "resident_slots": self.resident_slots,
            "tokens_per_s_per_gpu": dict(self.speeds),
            "best": self.lever,
        }
        if self.command:
            document["command"] = self.command
        return document

    def _added(self) -> list[str]:
        """Return the levers of the fastest combination, static first."""
        if self.lever == "moe-rl replicas":
            return ["static", "moe-rl replicas"]
        names = list(self.speeds)
        return names[: names.index(self.lever) + 1]


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


SIZES = (
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
)
RECOMPUTE: dict[Recompute, dict[str, object]] = {
    Recompute.NONE: {},
    Recompute.MOE: {"recompute_granularity": "selective", "recompute_modules": "moe"},
    Recompute.FULL: {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def _sizes(row: TunedSetting) -> dict[str, object]:
    return attributes(row, SIZES)


def _others(row: TunedSetting) -> dict[str, object]:
    """Return what is not a parallel size, under the names of Megatron's configuration."""
    # p2p is Megatron's default.
    if row.cp_comm_type in (None, "p2p"):
        exchange = {}
    else:
        exchange = {"cp_comm_type": row.cp_comm_type}
    return RECOMPUTE[row.recompute] | row.dispatcher.as_options | exchange


def _megatron(row: TunedSetting) -> str:
    options = _sizes(row) | _others(row)
    if row.num_virtual_stages > 1:
        options["num_virtual_stages_per_pipeline_rank"] = row.num_virtual_stages
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in options.items()]
    if row.tensor_model_parallel_size > 1:
        flags.append("--sequence-parallel")
    return " ".join(flags)


def _slime(row: TunedSetting) -> str:
    # slime counts the tokens of a GPU, and CP cuts each sequence over several.
    per_gpu = row.micro_batch_tokens // row.context_parallel_size
    return f"{_megatron(row)} --use-dynamic-batch-size --max-tokens-per-gpu {per_gpu}"


def _verl(row: TunedSetting) -> str:
    sizes, overrides = _sizes(row), _others(row)
    if row.num_virtual_stages > 1:
        sizes["virtual_pipeline_model_parallel_size"] = row.num_virtual_stages
    if "recompute_modules" in overrides:
        overrides["recompute_modules"] = f"[{overrides['recompute_modules']}]"
    batching = {
        "use_dynamic_bsz": True,
        "ppo_max_token_len_per_gpu": row.micro_batch_tokens // row.context_parallel_size,
    }
    actor = "actor_rollout_ref.actor"
    assignments = [
        *_assignments(f"{actor}.megatron", sizes),
        *_assignments(f"+{actor}.megatron.override_transformer_config", overrides),
        *_assignments(actor, batching),
    ]
    return " ".join(assignments)


def _nemo_rl(row: TunedSetting) -> str:
    options = _sizes(row) | {
        "sequence_parallel": _yaml_bool(row.tensor_model_parallel_size > 1),
        "activation_checkpointing": _yaml_bool(row.recompute.repeats_layer),
        "moe_token_dispatcher_type": row.dispatcher.as_options["moe_token_dispatcher_type"],
    }
    packing = {"enabled": _yaml_bool(True), "train_mb_tokens": row.micro_batch_tokens}
    assignments = _assignments("policy.megatron_cfg", options) + _assignments("policy.sequence_packing", packing)
    return " ".join(assignments)


def _assignments(section: str, values: Mapping[str, object]) -> list[str]:
    """Return "section.name=value" for every value."""
    return [f"{section}.{name}={value}" for name, value in values.items()]


def _yaml_bool(value: bool) -> str:
    return str(value).lower()


PASTED = {"megatron": _megatron, "verl": _verl, "slime": _slime, "nemo-rl": _nemo_rl}


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
    comparison: "SizeComparison | None" = None
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
