"""The planner's promise on one GPU: every EP rank's rows of a recorded step in turn, the slowest rank of each layer.

The ratio between plans beside simulate's for the same cells, and the simulator's constants refitted from the same rows:
an expert MLP takes `fixed + rows / rate`, and the rate of other widths says where the half width lies.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.rank_loads import BASELINE, POLICIES, RankLoads

if TYPE_CHECKING:
    from benchmarks.gpu.machine import Machine
    from benchmarks.gpu.rows import Figure

STEPS = ("bf16", "other widths", "fp8")
WIDTHS = (256, 384, 512, 768, 1024, 1536, 2048, 4096)
"""Widths of an expert at 4,096 rows in each of 4 slots: which share of its rate a narrow product reaches."""
REPEATS = 5
PASSES, GEMM_FACTOR, MICRO = 3.0, 6.0, 1e-6
"""Forward and the two products of backward; 6 h f operations of a row in each; a microsecond in seconds."""


def run(step: str, machine: Machine) -> dict[str, Figure]:
    """Measure the promise in bf16 or FP8, or the widths."""
    loads = RankLoads.read()
    if step == "other widths":
        return fitted_widths(machine, loads.hidden)
    return measured(machine, loads, step)


def measured(machine: Machine, loads: RankLoads, kind: str) -> dict[str, Figure]:
    """Time every rank of every cell under each plan; plans take turns, so that clocks that drift meet all alike."""
    cells, ranks = len(loads.cells), len(loads.rows[BASELINE][0])
    experts = Experts(machine, machine.full(loads.hidden, 256), machine.full(loads.intermediate, 128), kind)
    slowest: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    by_rows: list[tuple[float, float]] = []
    for cell in range(machine.full(cells, 1)):
        times: dict[str, list[float]] = {policy: [] for policy in POLICIES}
        for rank in range(machine.full(ranks, 1)):
            for policy in POLICIES:
                rows = loads.rows[policy][cell][rank]
                taken_us = experts.microseconds(machine.full(rows, [min(3, n) for n in rows]))
                times[policy].append(taken_us)
                by_rows.append((float(sum(rows)), taken_us))
            machine.beat(kind)
        for policy, of_ranks in times.items():
            slowest[policy].append(max(of_ranks))
    figures = ratios(loads, slowest, kind)
    if machine.is_gpu:
        fixed_us, rate = fitted_line(by_rows)
        flops = PASSES * GEMM_FACTOR * loads.hidden * loads.intermediate
        figures |= {"fixed us": fixed_us, "gemm_fixed_us": fixed_us / PASSES, "TFLOPS": flops * rate * MICRO}
        figures |= {"rows": [rows for rows, _ in by_rows], "us of rows": [round(us, 1) for _, us in by_rows]}
    return figures


def ratios(loads: RankLoads, slowest: dict[str, list[float]], kind: str) -> dict[str, Figure]:
    """Return the slowest ranks' time under each plan, and how much longer static takes: measured, and as predicted."""
    figures: dict[str, Figure] = {f"{policy} us": sum(found) for policy, found in slowest.items()}
    for policy in POLICIES[1:]:
        predicted = {name: sum(map(max, loads.predicted_s[kind][name])) for name in (BASELINE, policy)}
        rows = {name: sum(max(map(sum, cell)) for cell in loads.rows[name]) for name in (BASELINE, policy)}
        figures[f"static / {policy}"] = sum(slowest[BASELINE]) / max(sum(slowest[policy]), 1e-9)
        figures[f"static / {policy}, simulate"] = predicted[BASELINE] / predicted[policy]
        figures[f"static / {policy}, rows"] = rows[BASELINE] / rows[policy]
    return figures


def fitted_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (microseconds that no row takes, rows per microsecond), by least squares."""
    rows, times = zip(*points, strict=True)
    slope = statistics.linear_regression(rows, times)
    return slope.intercept, 1.0 / slope.slope


def fitted_widths(machine: Machine, hidden: int) -> dict[str, Figure]:
    """Return the rate at each width, and the half width that fits them best; see `HardwareSpec.gemm_share`."""
    rates: list[tuple[int, float]] = []
    rows = machine.full([4096] * 4, [3, 0])
    for width in machine.full(WIDTHS, (128,)):
        experts = Experts(machine, machine.full(hidden, 256), width, "bf16")
        taken_us = experts.microseconds(rows)
        rates.append((width, PASSES * GEMM_FACTOR * hidden * width * sum(rows) / taken_us / 1e6))
        machine.beat("widths")
    figures: dict[str, Figure] = {
        "TFLOPS": [round(rate, 1) for _, rate in rates], "widths": [float(width) for width, _ in rates]
    }  # fmt: skip
    if machine.is_gpu:
        half_width, peak = fitted_half_width(rates, hidden)
        figures |= {"gemm_half_width": half_width, "gemm_tflops": peak}
    return figures


def fitted_half_width(rates: Sequence[tuple[int, float]], hidden: int) -> tuple[float, float]:
    """Return (half width, rate of wide products) whose `gemm_share` fits the rates best."""
    from moe_rl.core.topology import KNEE

    def share(half_width: float, width: float) -> float:
        return float((1.0 + (half_width / width) ** KNEE) ** (-1.0 / KNEE))

    def shares(half_width: float) -> list[float]:
        return [share(half_width, width) * share(half_width, hidden) for width, _ in rates]

    def error(half_width: float) -> tuple[float, float]:
        of_width = shares(half_width)
        peak = statistics.fmean(rate / of_one for (_, rate), of_one in zip(rates, of_width, strict=True))
        return sum((peak * of_one / rate - 1.0) ** 2 for (_, rate), of_one in zip(rates, of_width, strict=True)), peak

    best = min(range(50, 3000, 10), key=lambda half_width: error(float(half_width))[0])
    return float(best), error(float(best))[1]


class Experts:
    """Forward and backward of one rank's expert MLP: weights and main gradients behind tables, as in a run."""

    def __init__(self, machine: Machine, hidden: int, intermediate: int, kind: str) -> None:
        from moe_rl.kernels import BF16, FP8_BLOCK, GroupedExperts

        self.machine, self.hidden, self.intermediate = machine, hidden, intermediate
        self.recipe = BF16 if kind == "bf16" else FP8_BLOCK
        self.experts = GroupedExperts(recipe=self.recipe)
        self._weights: dict[int, Any] = {}
        self._head_start = 0
        """Cycles for which the GPU sleeps while the host submits a pass, which does not depend on its rows."""

    def microseconds(self, rows: list[int]) -> float:
        """Return the median of some passes over so many rows per slot."""
        import torch

        from benchmarks.operators.timer import head_start_cycles

        call = self.call(rows)
        if not self.machine.is_gpu:
            call()
            return float(sum(rows))
        call()
        self._head_start = self._head_start or head_start_cycles(call)
        found = []
        for _ in range(REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(self._head_start)
            start.record()
            call()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1e3)
        return statistics.median(found)

    def call(self, rows: list[int]) -> Callable[[], object]:
        """Return a pass."""
        import torch

        machine, count = self.machine, max(1, sum(rows))
        if len(rows) not in self._weights:
            self._weights.clear()
            self._weights[len(rows)] = self._made(len(rows))
        masters, (fc1, fc2), main_grads = self._weights[len(rows)]
        x = machine.random(count, self.hidden).requires_grad_()
        probs = torch.rand(count, device=machine.device).requires_grad_()
        grad = machine.random(count, self.hidden, seed=1)
        offsets = machine.offsets(rows)

        def call() -> object:
            y = self.experts(x, probs, fc1, fc2, offsets, masters=masters, main_grads=main_grads)
            return torch.autograd.grad(y, (x, probs), grad)

        return call

    def _made(self, slots: int) -> Any:
        import torch

        from moe_rl.kernels import prepare
        from moe_rl.kernels.gemm.weights import ExpertGradients

        shapes = (2 * self.intermediate, self.hidden), (self.hidden, self.intermediate)
        made = [self.machine.random(slots, *shape, seed=2) * 0.02 for shape in shapes]
        layers = [prepare(list(w), self.recipe) for w in made]
        grads = [
            ExpertGradients.of_parts([torch.zeros(shape, device=self.machine.device) for _ in range(slots)])
            for shape in shapes
        ]
        return tuple(w.requires_grad_() for w in made), layers, tuple(grads)
