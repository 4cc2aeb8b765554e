"""The work of every rank over time, as Chrome-trace JSON: open it in Perfetto beside a profiled run.

One process per policy and node, one row per rank. Micro-batches run back to back, as on one pipeline stage that holds
all layers; the update is drawn without overlap and without log-probability passes. Waits are drawn: a profiler
shows them as a long all-to-all on a fast rank.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moe_rl.core.cost import Floats, LayerRows, all_to_all_time, gemm_time, prefetch_time, replicate_time
from moe_rl.core.errors import require
from moe_rl.core.plan import Plan
from moe_rl.core.step_words import Recompute
from moe_rl.simulators.base_time import SourceWork, head_parts, layer_parts, rank_seconds
from moe_rl.simulators.pricing import StepPricing, TrainingStep


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
    shown_batches = range(load.num_micro_batches) if micro_batches is None else micro_batches
    for micro_batch in shown_batches:
        require(
            0 <= micro_batch < load.num_micro_batches,
            f"micro-batch {micro_batch} does not exist: micro-batches are numbered 0 to {load.num_micro_batches - 1}.",
        )
    require(
        0 <= group < load.num_ep_groups,
        f"EP group {group} does not exist: EP groups are numbered 0 to {load.num_ep_groups - 1}.",
    )
    pricing = StepPricing.of(step)
    rows = pricing.destinations(plan, load).rows
    drawing = _Drawing(pricing, rows, SourceWork.of(step), group)
    for micro_batch in shown_batches:
        if load.tokens[group, micro_batch].any():
            drawing.draw(micro_batch, updates=not setting.forward_only, recompute=setting.recompute)
    return drawing.events


def chrome_json(timelines: Mapping[str, Iterable[TimelineEvent]], *, ranks_per_node: int) -> str:
    """Return the timelines of several policies as one Chrome-trace JSON file: a process per policy and node."""
    events: list[dict[str, object]] = []
    processes: dict[str, int] = {}
    threads: set[tuple[int, int]] = set()

    def name(kind: str, title: str, process: int, thread: int = 0) -> None:
        events.append({"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": title}})

    for policy, timeline in timelines.items():
        for event in timeline:
            node = f"{policy}, node {event.rank // ranks_per_node}"
            if node not in processes:
                processes[node] = len(processes)
                name("process_name", node, processes[node])
            place = processes[node], event.rank
            if place not in threads:
                threads.add(place)
                name("thread_name", f"rank {event.rank}", *place)
            values = {"micro_batch": event.micro_batch, "layer": event.layer, "rows": event.rows}
            # Chrome counts in microseconds, and shows `args` for an event that is clicked on.
            events.append(
                {
                    "ph": "X",
                    "name": event.name,
                    "cat": event.name.split()[0],
                    "pid": place[0],
                    "tid": place[1],
                    "ts": event.start_s * 1e6,
                    "dur": event.duration_s * 1e6,
                    "args": {name: value for name, value in values.items() if value is not None},
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


class _Drawing:
    """A cursor per rank of one EP group, moved by computation and joined by barriers. M, L, P as everywhere."""

    def __init__(self, pricing: StepPricing, rows: LayerRows, work: SourceWork, group: int) -> None:
        params, model, hardware = pricing.passes[0], pricing.model, pricing.topology.hardware

        def layer(*, backward: bool, moe_layer: bool) -> Floats:
            parts = layer_parts(model, hardware, pricing.setting, backward=backward, moe_layer=moe_layer)
            total: Floats = np.sum([*rank_seconds(parts, work).values()], axis=0)[group]
            return total

        self.seconds: dict[str, Floats] = {}  # [M, P] outside the routed experts
        for phase, backward in (("", False), (" backward", True)):
            head = rank_seconds(head_parts(model, hardware, backward=backward), work)["head"]
            self.seconds[f"attention{phase}"] = layer(backward=backward, moe_layer=True)
            dense = model.num_layers - model.num_moe_layers
            self.seconds[f"dense layers{phase}"] = dense * layer(backward=backward, moe_layer=False)
            self.seconds[f"head{phase}"] = head[group]
        self.rows = rows.rows[group]  # [M, L, P]
        self.gemm = [gemm_time(params, rows, backward=backward)[group] for backward in (False, True)]  # [M, L, P]
        # [M, L]: one dispatch or combine, and the seconds of copies that other work does not hide
        self.all_to_all = all_to_all_time(params, rows)[group]
        self.copies = {
            "replicate": replicate_time(params, rows.replicas)[group],
            "prefetch": prefetch_time(params, rows.cross_node_replicas)[group],
        }
        self.now = np.zeros(self.rows.shape[2])  # [P] end of what each rank has done
        self.micro_batch = 0
        self.events: list[TimelineEvent] = []

    def draw(self, micro_batch: int, *, updates: bool, recompute: Recompute) -> None:
        """Draw forward through all layers, and backward through them in reverse for an update."""
        self.micro_batch = micro_batch
        layers = range(self.rows.shape[1])
        self._outside("dense layers")
        for layer in layers:
            self._compute("attention", self.seconds["attention"][micro_batch], layer)
            for name, exposed in self.copies.items():
                self._together(name, float(exposed[micro_batch, layer]), layer)
            self._experts(layer)
        self._outside("head")
        if not updates:
            return
        self._outside("head backward")
        for layer in reversed(layers):
            if recompute.repeats_layer:
                self._compute("attention recompute", self.seconds["attention"][micro_batch], layer)
            if recompute.repeats_experts:
                self._experts(layer, " recompute")
            self._experts(layer, " backward", backward=True)
            self._compute("attention backward", self.seconds["attention backward"][micro_batch], layer)
            self._wait(layer)
        if recompute.repeats_layer:
            self._outside("dense layers", " recompute")
        self._outside("dense layers backward")

    def _experts(self, layer: int, phase: str = "", *, backward: bool = False) -> None:
        transfer = float(self.all_to_all[self.micro_batch, layer])
        # Backward sends gradients the way back: combine's rows go out again, dispatch's come home.
        opening, ending = ("combine", "dispatch") if backward else ("dispatch", "combine")
        self._together(opening + phase, transfer, layer)
        self._compute("expert_gemm" + phase, self.gemm[backward][self.micro_batch, layer], layer, rows=True)
        self._together(ending + phase, transfer, layer)

    def _outside(self, name: str, phase: str = "") -> None:
        self._compute(name + phase, self.seconds[name][self.micro_batch], None)
        self._wait(None)

    def _wait(self, layer: int | None) -> None:
        """Let every rank wait for the slowest."""
        slowest = self.now.max()
        self._compute("wait", slowest - self.now, layer)
        # now + (slowest - now) may miss `slowest` by a rounding error, which the next wait would draw.
        self.now = np.full_like(self.now, slowest)

    def _together(self, name: str, seconds: float, layer: int) -> None:
        if seconds > 0.0:
            self._wait(layer)
            self._compute(name, np.full_like(self.now, seconds), layer)

    def _compute(self, name: str, seconds: Floats, layer: int | None, *, rows: bool = False) -> None:
        """Let rank p be busy for seconds[p]; a rank with none shows nothing."""
        if rows:
            rows_of_ranks = self.rows[self.micro_batch, layer].tolist()
        else:
            rows_of_ranks = [None] * len(self.now)
        for rank in np.flatnonzero(seconds > 0.0).tolist():
            self.events.append(
                TimelineEvent(
                    name=name,
                    rank=rank,
                    start_s=float(self.now[rank]),
                    duration_s=float(seconds[rank]),
                    micro_batch=self.micro_batch,
                    layer=layer,
                    rows=None if rows_of_ranks[rank] is None else int(rows_of_ranks[rank]),
                )
            )
        self.now = self.now + seconds
