"""Reports with known numbers."""

from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console

from moe_rl.core.metrics import StepPrediction
from moe_rl.report.faces import SimulationReport
from moe_rl.report.simulation import LoadBounds, PolicyLoads
from moe_rl.report.terminal import print_report
from moe_rl.report.units import GIB
from moe_rl.simulators.memory import MemoryForecast

SETTING: dict[str, object] = {
    "model": "gpt-oss-20b",
    "cluster": "h100",
    "ep_size": 16,
    "num_gpus": 16,
    "ranks_per_node": 8,
    "num_micro_batches": 3,
    "tokens_per_rank": 8192.0,
    "sequence_length": 400.0,
    "slots": 1,
    "cross_node_slots": 0,
    "objective": "time",
    "dispatcher": "deepep",
    "recompute": "none",
    "scaled": False,
    "assumptions": ["kv_channels: assumed"],
    "constants": {"rdma_gb_per_s": {"value": 43.0, "source": "a table"}},
}


TRACE: dict[str, object] = {
    "name": "run.npz",
    "num_sequences": 12,
    "num_tokens": 74_470,
    "num_moe_layers": 4,
    "num_experts": 32,
    "top_k": 4,
    "provenance": "R3",
    "moe_layer_ids": [3, 4, 5, 6],
}


BOUNDS = {
    "static": LoadBounds(lb0=1.0, node=1.05, placement=2.2),
    "ultraep": LoadBounds(lb0=1.0, node=1.05, placement=1.08),
}


def prediction(policy: str, seconds: float, *, load: float, node: float = 1.05, static: float = 10.0) -> StepPrediction:
    """A policy of a step whose forced-balance time is 6 s and bound 5 s."""
    return StepPrediction(
        policy=policy,
        imbalance=load,
        node_imbalance=node,
        step_time_s=seconds,
        tokens_per_s=1e6 / seconds,
        speedup_vs_static=static / seconds,
        fraction_of_forced_balance=6.0 / seconds,
        fraction_of_ideal=5.0 / seconds,
        phi=0.5,
        replicas_per_plan=0.0 if policy == "static" else 2.5,
        cross_node_replicas_per_plan=0.0,
        moved_bytes=0 if policy == "static" else 3_000_000_000,
        plan_time_s=0.1,
        breakdown_s={"attention": seconds - 3.0, "expert_gemm": 2.0, "all_to_all": 1.0, "reorder": 0.0},
    )


def loads(seed: int = 0, skew: float = 1.0) -> PolicyLoads:
    rng = np.random.default_rng(seed)
    return PolicyLoads.from_rank_loads((1000 * rng.gamma(1 / skew, skew, (1, 3, 4, 16))).astype(np.int64))


def report(*predictions: StepPrediction, **changes: object) -> SimulationReport:
    policies = predictions or (prediction("static", 10.0, load=2.2), prediction("ultraep", 7.0, load=1.1))
    yardsticks = (prediction("forced_balance", 6.0, load=1.0), prediction("ideal", 5.0, load=1.0))
    values: dict[str, object] = {
        "trace": TRACE,
        "setting": SETTING,
        "policies": policies,
        "yardsticks": yardsticks,
        "loads": {policy.policy: loads(index) for index, policy in enumerate(policies)},
        "notes": ("eplb has no history.",),
        "command": "moe-rl simulate run.npz --ep 16",
        "version": "0.1.0",
    }
    return SimulationReport(**values | changes)  # type: ignore[arg-type]


def untimed(policy: StepPrediction) -> StepPrediction:
    return replace(policy, step_time_s=None, breakdown_s=None, speedup_vs_static=None, phi=None)


def forecast(peak_gib: float, *, hbm_gib: float = 80.0) -> MemoryForecast:
    """A fourth of the peak are weights, the rest routed rows."""
    peak = round(peak_gib * GIB)
    return MemoryForecast(
        parts_bytes={"weights": peak // 4, "routed_rows": peak - peak // 4},
        rank_peak_bytes=np.array([peak // 2, peak]),
        hbm_bytes=round(hbm_gib * GIB),
    )


def printed(shown: SimulationReport, width: int, **how: Any) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), markup=False)  # noqa: PTH123, SIM115
    with console.file:
        print_report(shown, console, **how)
        return console.export_text()
