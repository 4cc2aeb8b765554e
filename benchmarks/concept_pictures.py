"""Pictures of single ideas for the documents, each computed by the code that its page is about.

`benchmarks/make_tables.py` writes them, on white and on black. Everything in them is simulated or counted.
"""

from collections.abc import Mapping

import numpy as np
import torch
from markupsafe import Markup
from numpy.typing import NDArray

from benchmarks import recipe_gains
from moe_rl.core.layout import BatchLayout
from moe_rl.core.native import native_core
from moe_rl.core.schedules import with_rule
from moe_rl.core.trace import RoutingTrace
from moe_rl.importance.rollout_correction import rollout_correction
from moe_rl.planner.packing import best_start
from moe_rl.report.bars import Bar, stacked
from moe_rl.report.colors import SERIES, part_color
from moe_rl.report.curves import Axes, Line, line_chart
from moe_rl.report.svg import Svg
from moe_rl.study.options import SimulationOptions
from moe_rl.study.scenario import state_scenario
from moe_rl.sync import EngineLayout, SyncProblem, TrainerLayout, plan_sync
from moe_rl.yaml_files import FROM_TRACE

Floats = NDArray[np.float64]
LEFT, RIGHT = 84, 16
ROW, ROW_GAP = 14, 4


def correction_weights() -> Markup:
    """Draw the weight of a token against the ratio of its probabilities, trainer over rollout, by kind of bound."""
    ratio = torch.linspace(0.05, 4.0, 159)
    rollout = torch.full((len(ratio), 1), -2.0)  # one token per sequence
    old = rollout + ratio.log()[:, None]
    mask = torch.ones_like(old)
    bounds: Mapping[str, float | str] = {"truncated (TIS, C = 2)": 2.0, "band (IcePop, 0.5 to 2)": "0.5_2.0"}
    lines = {"no bound": Line(points=[(float(x), float(x)) for x in ratio], color=SERIES[5], dashed=True, marker=None)}
    for color, (name, bound) in zip(SERIES, bounds.items(), strict=False):
        weights, _, _ = rollout_correction(old, rollout, mask, "token", bound)
        assert weights is not None
        points = [(float(x), float(y)) for x, y in zip(ratio, weights[:, 0], strict=True)]
        lines[name] = Line(points=points, color=color, marker=None)
    axes = Axes(x="probability of the token: trainer / rollout engine", y="weight in the loss")
    return line_chart(lines, axes, width=600, height=280, legend=True)


def bimodal_trace(num_sequences: int = 96) -> RoutingTrace:
    """Return sequences of about 600 or about 6,000 tokens, with routes drawn evenly: the picture is about lengths."""
    rng = np.random.default_rng(3)
    lengths = np.where(
        rng.random(num_sequences) < 0.8, rng.normal(600, 120, num_sequences), rng.normal(6000, 900, num_sequences)
    )
    routes = [
        rng.permuted(np.tile(np.arange(32, dtype=np.int16), (int(length), 1)), axis=1)[:, None, :4]
        for length in np.maximum(lengths, 64)
    ]
    return RoutingTrace.from_sequences(routes, num_experts=32)


def packing_waits() -> Markup:
    """Draw 8 ranks through a step under verl's layout and under the packing of a run: who works, who waits."""
    options = SimulationOptions(
        model=FROM_TRACE,
        expert_model_parallel_size=8,
        batch="recorded",
        micro_batch_tokens=16384,
        policy=["static", "moe-rl"],
        packing="run",  # a problem states what its policies need
    )
    problem = state_scenario(bimodal_trace(), options, lambda *_: None).problem
    cost, tokens = problem.micro_batch_cost, problem.sequence_tokens
    assert cost is not None
    assert tokens is not None
    work_s = cost.sequence_s.sum(axis=0)
    ruled = with_rule(problem.layout, "verl")
    packed = best_start(ruled, cost, tokens, problem.topology, native_core())
    return lanes({"verl's layout": problem.layout, "packed by moe-rl, under verl's rules": packed}, work_s)


def lanes(layouts: Mapping[str, BatchLayout], work_s: Floats) -> Markup:
    """Draw every rank's micro-batches one after the other: each begins when the slowest rank is done."""
    seconds = {name: seconds_of_cells(layout, work_s) for name, layout in layouts.items()}
    longest = max(float(cells_MD.max(axis=1).sum()) for cells_MD in seconds.values())
    svg = Svg(height=8, label="Ranks that work and wait, before and after packing", width=760)
    scale = (svg.width - LEFT - RIGHT) / longest
    for name, cells_MD in seconds.items():
        whole = float(cells_MD.max(axis=1).sum())
        waiting = 1.0 - float(cells_MD.mean(axis=1).sum()) / whole
        svg.text(
            LEFT, svg.height + 14, f"{name}: {whole / longest:.0%}, of which ranks wait {waiting:.0%}", css="title"
        )
        top = svg.height + 24
        for rank in range(cells_MD.shape[1]):
            y, start = top + rank * (ROW + ROW_GAP), float(LEFT)
            svg.text(LEFT - 8, y + 11, f"rank {rank}", anchor="end", css="tick")
            for cells_D in cells_MD:
                busy, slowest = float(cells_D[rank]) * scale, float(cells_D.max()) * scale
                svg.raw(rectangle(start, y, busy - 1, part_color("busy")))
                svg.raw(rectangle(start + busy, y, slowest - busy - 1, part_color("waiting")))
                start += slowest
        svg.height = top + cells_MD.shape[1] * (ROW + ROW_GAP) + 10
    svg.text(LEFT, svg.height + 10, "blue: works; red: waits for the slowest rank of the micro-batch", css="label")
    svg.height += 20
    return svg.markup()


def seconds_of_cells(layout: BatchLayout, work_s: Floats) -> Floats:
    """Return [M, D] seconds of every rank in every micro-batch, beside routed experts."""
    cells_MD = np.zeros((layout.num_micro_batches, layout.num_dp_ranks))
    np.add.at(cells_MD, (layout.micro_batch, layout.dp_rank), work_s)
    return cells_MD


def rectangle(x: float, y: float, width: float, color: str) -> str:
    """Return a bar of a lane."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.0):.1f}" height="{ROW}" fill="{color}"/>'


def sync_calendar() -> Markup:
    """Draw when each NIC of four engine nodes takes an atom in, from a trainer or from another engine node."""
    rng = np.random.default_rng(0)
    layers, experts, trainers, nodes, node_size = 2, 32, 8, 4, 4
    home_rank = np.stack([rng.permutation(np.repeat(np.arange(trainers), experts // trainers)) for _ in range(layers)])
    maps = [np.stack([rng.permutation(experts) for _ in range(layers)]).astype(np.int32) for _ in range(nodes)]
    problem = SyncProblem(
        trainer=TrainerLayout.in_megatron_order(home_rank.astype(np.int32), ep_size=trainers),
        engines=tuple(EngineLayout(slots=slots, ep_size=node_size) for slots in maps),
        node_of=tuple([0] * trainers + [1 + node for node in range(nodes) for _ in range(node_size)]),
        expert_bytes=9 << 20,
    )
    plan = plan_sync(problem)
    deliveries, travels = plan.deliveries, plan.by_nic
    svg = Svg(height=24, label="Which NIC takes an atom in at which step of a weight sync", width=760)
    size = (svg.width - LEFT - RIGHT) / plan.num_steps
    title = (
        f"{layers * experts} experts to {nodes} engine nodes: {plan.num_steps} steps, the bound is {plan.least_steps}"
    )
    svg.text(LEFT, 14, title, css="title")
    colors = {"from a trainer": part_color("expert_gemm"), "from another engine node": part_color("attention")}
    for rank in range(trainers, problem.size):
        node = problem.node_of[rank] - 1
        y = 28.0 + (rank - trainers) * (ROW + 1) + node * 2 * ROW_GAP
        svg.text(LEFT - 8, y + 11, f"node {node}, {(rank - trainers) % node_size}", anchor="end", css="tick")
        rows = np.flatnonzero(travels & (deliveries.ingress == rank))
        for row in rows:
            kind = "from a trainer" if deliveries.source[row] < trainers else "from another engine node"
            svg.raw(rectangle(LEFT + size * int(deliveries.step[row]), y, size - 1, colors[kind]))
        svg.height = y + ROW + 8
    svg.text(LEFT, svg.height + 8, "step: the time of one expert over one NIC", css="label")
    svg.height = svg.legend(
        colors, lambda name, x, y: svg.raw(rectangle(x, y - 4, 20, colors[name])), top=svg.height + 14
    )
    return svg.markup()


def recipe_parts() -> Markup:
    """Draw what a step of RL of the published recipes spends its time on, in per cent of the step."""
    bars = []
    for gain in recipe_gains.gains():
        whole_s = sum(gain.static.parts_s.values())
        shares = {part: 100.0 * part_s / whole_s for part, part_s in gain.static.parts_s.items()}
        bars.append(Bar(name=short_name(gain.name), parts=shares, end=f"{gain.static.step_time_s:.0f} s"))
    return stacked(
        bars,
        label="Parts of an RL step of published recipes",
        axis="parts of a step of RL, simulated",
        unit="%",
        legend=True,
        width=760,
    )


def short_name(recipe: str) -> str:
    """Return a name that fits before a bar.

    >>> short_name("Qwen3-235B-A22B, 256 H100")
    'Qwen3-235B, 256'
    """
    model, _, gpus = recipe.partition(", ")
    return f"{model.partition('-A')[0]}, {gpus.removesuffix(' H100').replace(' H100', '')}"
