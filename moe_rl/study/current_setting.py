"""The setting that a run has today, beside the fastest setting of every EP size: `moe-rl tune --current`.

All speeds are by the routes of the trace. A ratio of two settings is priced again under other constants, routes
included, and under the other kind of software, for which moe-rl plans anew.

Example: `--current ep=8,pp=2` on 64 GPUs: TP, CP and expert TP are 1, and the token budget is the one with which the
framework's own layout is fastest. `--current ep=8,pp=2,tokens=16384,recompute=none` leaves nothing but the dispatcher
to choose.
"""

from dataclasses import dataclass, replace
from math import hypot, log, sqrt
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moe_rl.config import load_software
from moe_rl.core.cost import Floats
from moe_rl.core.errors import require, require_known
from moe_rl.core.interval import Interval
from moe_rl.core.mappings import attributes
from moe_rl.core.software import TUNED, TYPICAL, SoftwareCosts
from moe_rl.core.step_words import Recompute
from moe_rl.core.topology import HardwareSpec
from moe_rl.profiling.posterior import Posterior
from moe_rl.report.size_comparison import ComparedSize, SizeComparison, with_moe_rl
from moe_rl.report.tuned_settings import SIZES, ParallelLayout, ShapeLevers, TunedSetting
from moe_rl.study.intervals import GAIN_SPREAD, LEAST_SPREAD, around
from moe_rl.study.options import merge_options
from moe_rl.study.parallel_shapes import shapes_of
from moe_rl.study.rl_options import TuneOptions
from moe_rl.study.shape_levers import SampledRoutes, ShapeSample
from moe_rl.study.shape_task import ShapeTask

# Words of `--current`, and the part of a setting that each decides.
SIZES_OF_CURRENT = {**{name: name for name in SIZES}, "num_virtual_stages_per_pipeline_rank": "num_virtual_stages"}
OTHERS_OF_CURRENT = (
    "micro_batch_tokens", "moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "recompute_granularity",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentSetting:
    """The setting of `--current`, priced."""

    row: TunedSetting
    unstated: tuple[str, ...]
    """What `--current` leaves out, as `tune` chose it, e.g. "tokens=8192"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StatedSetting:
    """The words of `--current`."""

    text: str
    options: TuneOptions
    recompute: Recompute | None
    """None: not stated."""

    @classmethod
    def of(cls, parts: list[str]) -> Self:
        """Read option=value parts; raise where one is unknown, or the same for every setting."""
        words = dict[str, str]()
        for part in parts:
            name, equals, value = part.partition("=")
            require(bool(equals and value), f"--current {part!r} must have the form option=value, e.g. ep=8.")
            words[name.strip().replace("-", "_")] = value.strip()
        recompute = words.pop("recompute", None)
        if recompute is not None:
            require_known(recompute, tuple(Recompute), f"--current recompute={recompute} is unknown.")
        if "tokens" in words:
            require("micro_batch_tokens" not in words, "--current states tokens and micro_batch_tokens: give only one.")
            words["micro_batch_tokens"] = words.pop("tokens")
        options = merge_options(TuneOptions, words)
        for name in options.stated_words():
            require(
                name in SIZES_OF_CURRENT or name in OTHERS_OF_CURRENT,
                f"--current cannot contain {name}, because it is the same for every setting.",
            )
        if recompute is None and options.states("recompute_granularity"):
            recompute = options.memory.recompute
        return cls(text=",".join(parts), options=options, recompute=None if recompute is None else Recompute(recompute))

    @property
    def names_dispatcher(self) -> bool:
        """Whether a part names the dispatcher."""
        return self.options.states("moe_token_dispatcher_type") or self.options.states("moe_flex_dispatcher_backend")


def current_setting(options: TuneOptions, task: ShapeTask) -> CurrentSetting:
    """Return the setting of `--current`, priced; raise where Megatron could not start it, or it does not fit."""
    stated = _StatedSetting.of(options.current)
    sizes = {place: stated.options.value_of(name) or 1 for name, place in SIZES_OF_CURRENT.items()}
    kernels = stated.options.kernels if stated.names_dispatcher else options.kernels
    shape = ParallelLayout(**sizes, dispatcher=kernels.dispatcher)
    # hybridep is not searched, but a run may have it.
    possible = shapes_of(task.model, task.hardware, task.gpus, task.ranks_per_node, shape.expert_tensor_parallel_size)
    is_possible = any(attributes(other, tuple(sizes)) == sizes for other in possible)
    require(is_possible, f"--current {stated.text}: {shape.name} is not possible on {task.gpus} GPUs.")
    budget = stated.options.sequences.micro_batch_tokens
    own = replace(
        task,
        shapes=(shape,),
        micro_batch_tokens=task.micro_batch_tokens if budget is None else max(budget, int(task.lengths.max())),
        recompute=task.recompute if stated.recompute is None else (stated.recompute,),
    )
    settings = own.settings_of(0)
    require(len(settings) > 0, f"--current {stated.text}: {shape.name} does not fit into memory.")
    # Today's run has the framework's layout: of the budgets, the one with which that is fastest.
    row = max(settings, key=lambda row: row.tokens_per_s_per_gpu / row.packing_gain)
    unstated = []
    if own.micro_batch_tokens is None:
        unstated.append(f"tokens={row.micro_batch_tokens}")
    if len(own.recompute) > 1:
        unstated.append(f"recompute={row.recompute}")
    if not stated.names_dispatcher and not options.states("moe_token_dispatcher_type"):
        unstated.append(f"moe_token_dispatcher_type={row.dispatcher.as_options['moe_token_dispatcher_type']}")
    return CurrentSetting(row=row, unstated=tuple(unstated))


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeComparer:
    """Compares settings with today's by the routes of a trace."""

    options: TuneOptions
    task: ShapeTask
    posterior: Posterior
    sampled: SampledRoutes
    lengths: NDArray[np.int64]

    def compare(
        self, today: ShapeLevers, levers: tuple[ShapeLevers, ...], *, unstated: tuple[str, ...]
    ) -> SizeComparison:
        """Return today's setting and the fastest setting of every EP size; `levers` are the fastest first."""
        fastest = dict[int, ShapeLevers]()
        for shape in levers:
            fastest.setdefault(shape.setting.expert_model_parallel_size, shape)
        shapes = [today, *(fastest[size] for size in sorted(fastest))]
        intervals = self._intervals(shapes)
        software = self.posterior.likeliest.prior.software.name
        other = TYPICAL if software == TUNED else TUNED
        if self.options.pricing.known_step:
            others: list[tuple[float, float] | None] = [None] * len(shapes)
        else:
            others = list(self._under(other, shapes))
        static = today.speeds["static"]
        rows = []
        for shape, interval, of_other in zip(shapes, intervals, others, strict=True):
            speed = shape.speeds[with_moe_rl(shape.speeds)]
            low, high = around(speed / static, interval)
            rows.append(
                ComparedSize(
                    setting=shape.setting, static=shape.speeds["static"] / static, moe_rl=speed / static,
                    interval=(low, high), other=of_other,
                )
            )  # fmt: skip
        return SizeComparison(today=today, unstated=unstated, software=software, other_software=other, rows=tuple(rows))

    def sample_of(self, row: TunedSetting, options: TuneOptions | None = None) -> ShapeSample:
        """Return the sample of a setting, planned for the options' software."""
        room = self.task.free_slots(row)
        return ShapeSample.of(row, self.sampled, options or self.options, lengths=self.lengths, room=room)

    def _intervals(self, shapes: list[ShapeLevers]) -> list[Interval]:
        """Return each shape's speed with moe-rl over today's with static placement, both priced on samples."""
        levers = [with_moe_rl(shape.speeds) for shape in shapes]
        samples = [
            self.sample_of(shape.setting).with_levers_only(lever) for shape, lever in zip(shapes, levers, strict=True)
        ]
        today = self.sample_of(shapes[0].setting).with_levers_only("static")

        def price(hardware: HardwareSpec, costs: SoftwareCosts) -> Floats:
            def seconds(sample: ShapeSample, lever: str) -> float:
                return self.task.repriced(sample.row, hardware, costs) * sample.slowdowns(hardware, costs)[lever]

            return np.array([seconds(today, "static"), *map(seconds, samples, levers)])

        figures, left_open = self.posterior.figures(price), self.posterior.likeliest.prior.left_open
        intervals = []
        for place, shape in enumerate(shapes):
            gain = abs(log(shape.speeds[levers[place]] / shape.speeds["static"]))
            unexplained = max(GAIN_SPREAD * gain, LEAST_SPREAD)
            # Two layouts are off by themselves; one layout under two plans is not.
            if shape.setting.shape != shapes[0].setting.shape:
                unexplained = hypot(sqrt(2.0) * left_open, unexplained)
            intervals.append(figures.ratio(0, 1 + place, unexplained=unexplained))
        return intervals

    def _under(self, software: str, shapes: list[ShapeLevers]) -> list[tuple[float, float]]:
        """Return static placement and moe-rl of each shape over today's static placement, all with other software."""
        costs, options = load_software(software).costs, self.options.with_words(software=[software])
        speeds = [self.sample_of(self.task.under(shape.setting, costs), options).levers().speeds for shape in shapes]
        static = speeds[0]["static"]
        return [(by_lever["static"] / static, by_lever[with_moe_rl(by_lever)] / static) for by_lever in speeds]
