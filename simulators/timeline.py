"""What every rank does when, as Chrome-trace JSON: open it in Perfetto beside a profiled run.

One process per policy and node, one row per rank. Micro-batches run back to back, as on one pipeline stage that holds
all layers; the update is drawn without overlap and without log-probability passes. Waits are drawn: what a profiler
shows as a long all-to-all on a fast rank is waiting for a slow one.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moe_rl.core.cost import Floats, LayerRows, all_to_all_time, gemm_time, prefetch_time, replicate_time
from moe_rl.core.errors import require
from moe_rl.core.plan import Plan
from moe_rl.simulators.base_time import SourceWork, head_parts, layer_parts, rank_seconds
from moe_rl.simulators.pricing import StepPricing, TrainingStep

WAIT = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """One stretch of one rank's time."""

    name: str
    rank: int
    start_s: float
    duration_s: float
    micro_batch: int
    layer: int | None
    """Index among the MoE layers; None outside them."""
    rows: int | None = None
    """Rows that an expert GEMM computes."""


def step_timeline(
    plan: Plan, step: TrainingStep, *, group: int = 0, micro_batches: Sequence[int] | None = None
) -> list[TimelineEvent]:
    """Return the events of one EP group in the given micro-batches (None: all), one after the other.

    `step` has the plan's layout, and the load under it.
    """
    load, setting = step.load, step.setting
    chosen = range(load.num_micro_batches) if micro_batches is None else micro_batches
    for micro_batch in chosen:
        require(
            0 <= micro_batch < load.num_micro_batches,
            f"micro-batch {micro_batch} is outside 0 .. {load.num_micro_batches - 1}.",
        )
    require(0 <= group < load.num_ep_groups, f"EP group {group} is outside 0 .. {load.num_ep_groups - 1}.")
    pricing = StepPricing.of(step)
    rows = pricing.destinations(plan, load).rows
    drawing = _Drawing.of(pricing, rows, SourceWork.of(step), group)
    for micro_batch in chosen:
        if load.tokens[group, micro_batch].any():
            drawing.draw(micro_batch, updates=not setting.forward_only, recompute=setting.recompute)
    return drawing.events


def chrome_json(timelines: Mapping[str, Iterable[TimelineEvent]], *, ranks_per_node: int) -> str:
    """Return the timelines of several policies as one Chrome trace in JSON."""
    events: list[dict[str, object]] = []
    processes: dict[tuple[str, int], int] = {}
    for policy, timeline in timelines.items():
        rows: set[tuple[int, int]] = set()
        for event in timeline:
            node = event.rank // ranks_per_node
            if (policy, node) not in processes:
                processes[policy, node] = len(processes)
                events.append(_name("process_name", f"{policy}, node {node}", processes[policy, node]))
            process = processes[policy, node]
            if (process, event.rank) not in rows:
                rows.add((process, event.rank))
                events.append(_name("thread_name", f"rank {event.rank}", process, event.rank))
            events.append(_complete(event, process))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _name(kind: str, name: str, process: int, thread: int = 0) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _complete(event: TimelineEvent, process: int) -> dict[str, object]:
    values = {"micro_batch": event.micro_batch, "layer": event.layer, "rows": event.rows}
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.name.split()[0],
        "pid": process,
        "tid": event.rank,
        "ts": event.start_s * 1e6,
        "dur": event.duration_s * 1e6,
        "args": {name: value for name, value in values.items() if value is not None},
    }


@dataclass(slots=True, kw_only=True)
class _Drawing:
    """A cursor per rank, moved by computation and joined by barriers."""

    seconds: Mapping[str, Floats]
    """[M, P] of attention parts, dense layers and head, forward and backward."""
    gemm: tuple[Floats, Floats]
    """[M, L, P] forward and backward"""
    all_to_all: Floats
    """[M, L] of one dispatch or combine"""
    replicas: Mapping[str, Floats]
    """[M, L] exposed seconds"""
    rows: Floats
    """[M, L, P] that each expert GEMM computes."""
    now: Floats
    """[P] end of what each rank has done"""
    micro_batch: int = 0
    events: list[TimelineEvent] = field(default_factory=list)

    @classmethod
    def of(cls, pricing: StepPricing, rows: LayerRows, work: SourceWork, group: int) -> "_Drawing":
        params, model, hardware = pricing.passes[0], pricing.model, pricing.topology.hardware
        num_dense = model.num_layers - model.num_moe_layers

        def layer(*, backward: bool, moe_layer: bool) -> Floats:
            parts = layer_parts(model, hardware, pricing.setting, backward=backward, moe_layer=moe_layer)
            total: Floats = np.sum([*rank_seconds(parts, work).values()], axis=0)[group]
            return total

        seconds: dict[str, Floats] = {}
        for phase, backward in (("", False), (" backward", True)):
            seconds[f"attention{phase}"] = layer(backward=backward, moe_layer=True)
            seconds[f"dense layers{phase}"] = num_dense * layer(backward=backward, moe_layer=False)
            seconds[f"head{phase}"] = rank_seconds(head_parts(model, hardware, backward=backward), work)["head"][group]
        return cls(
            seconds=seconds,
            gemm=(gemm_time(params, rows)[group], gemm_time(params, rows, backward=True)[group]),
            all_to_all=(all_to_all_time(params, rows) * pricing.congestion(rows))[group],
            replicas={
                "replicate": replicate_time(params, rows.replicas)[group],
                "prefetch": prefetch_time(params, rows.cross_node_replicas)[group],
            },
            rows=rows.rows[group],
            now=np.zeros(rows.rows.shape[3]),
        )

    def draw(self, micro_batch: int, *, updates: bool, recompute: str) -> None:
        """Draw forward through all layers, and backward through them in reverse for an update."""
        self.micro_batch = micro_batch
        layers = range(self.rows.shape[1])
        self._outside("dense layers")
        for layer in layers:
            self._compute("attention", self.seconds["attention"][micro_batch], layer)
            for name, exposed in self.replicas.items():
                self._together(name, float(exposed[micro_batch, layer]), layer)
            self._experts(layer)
        self._outside("head")
        if not updates:
            return
        self._outside("head backward")
        for layer in reversed(layers):
            if recompute == "full":
                self._compute("attention recompute", self.seconds["attention"][micro_batch], layer)
            if recompute != "none":
                self._experts(layer, " recompute")
            self._experts(layer, " backward", backward=True)
            self._compute("attention backward", self.seconds["attention backward"][micro_batch], layer)
            self._wait(layer)
        if recompute == "full":
            self._outside("dense layers", " recompute")
        self._outside("dense layers backward")

    def _experts(self, layer: int, phase: str = "", *, backward: bool = False) -> None:
        transfer = float(self.all_to_all[self.micro_batch, layer])
        first, last = ("combine", "dispatch") if backward else ("dispatch", "combine")
        self._together(first + phase, transfer, layer)
        self._compute("expert_gemm" + phase, self.gemm[backward][self.micro_batch, layer], layer, rows=True)
        self._together(last + phase, transfer, layer)

    def _outside(self, name: str, phase: str = "") -> None:
        self._compute(name + phase, self.seconds[name][self.micro_batch], None)
        self._wait(None)

    def _compute(self, name: str, seconds: Floats, layer: int | None, *, rows: bool = False) -> None:
        for rank, duration in enumerate(seconds.tolist()):
            count = int(self.rows[self.micro_batch, layer, rank]) if rows and layer is not None else None
            self._add(name, rank, duration, layer, count)
        self.now = self.now + seconds

    def _wait(self, layer: int | None) -> None:
        """Let every rank wait for the slowest."""
        slowest = float(self.now.max())
        for rank, now in enumerate(self.now.tolist()):
            self._add(WAIT, rank, slowest - now, layer)
        self.now = np.full_like(self.now, slowest)

    def _together(self, name: str, seconds: float, layer: int) -> None:
        if seconds <= 0.0:
            return
        self._wait(layer)
        for rank in range(len(self.now)):
            self._add(name, rank, seconds, layer)
        self.now = self.now + seconds

    def _add(self, name: str, rank: int, duration: float, layer: int | None, rows: int | None = None) -> None:
        if duration > 0.0:
            self.events.append(
                TimelineEvent(
                    name=name,
                    rank=rank,
                    start_s=float(self.now[rank]),
                    duration_s=duration,
                    micro_batch=self.micro_batch,
                    layer=layer,
                    rows=rows,
                )
            )
