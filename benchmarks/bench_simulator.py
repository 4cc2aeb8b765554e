"""How long simulating a step takes, once it is planned, and what memory that needs. CPU only.

    pytest benchmarks/bench_simulator.py                   pytest-benchmark suite
    python benchmarks/bench_simulator.py --json            a table, then one line of JSON; --out FILE writes it as well

The step is Qwen3-30B-A3B's at EP32: 48 MoE layers, 64 micro-batches of 8192 tokens per rank, heavy and bursty
synthetic loads, 7 policies with up to 2 replicas per rank in every layer and micro-batch.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.dirichlet import DIRICHLET_SCENARIOS, dirichlet_steps, expected_load
from benchmarks.hardware import record_hardware
from benchmarks.memory import peak_resident_bytes
from moe_rl.config import load_cluster, load_model
from moe_rl.core.layout import BatchLayout
from moe_rl.core.load import StepLoad
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertMigration, ExpertPlacement
from moe_rl.core.plan import Plan, ReplicaPlan
from moe_rl.core.topology import ClusterTopology
from moe_rl.simulators.pricing import TrainingStep
from moe_rl.simulators.result import SimulationResult
from moe_rl.simulators.setting import StepSetting
from moe_rl.simulators.step import simulate_policies

POLICIES, SLOTS = 7, 2
LIMIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A planned step."""

    model: MoeModelSpec
    topology: ClusterTopology
    load: StepLoad
    layout: BatchLayout
    lengths: np.ndarray[Any, np.dtype[np.int64]]
    plans: dict[str, Plan]

    def simulate(self, setting: StepSetting) -> SimulationResult:
        """Simulate all policies."""
        step = TrainingStep(
            load=self.load,
            layout=self.layout,
            lengths=self.lengths,
            model=self.model,
            topology=self.topology,
            setting=setting,
        )
        return simulate_policies(self.plans, step)


def planned_step(ep_size: int = 32, micro_batches: int = 64, policies: int = POLICIES) -> Case:
    """Return the step with random replicas: what a plan holds decides the time, not how good it is."""
    model = load_model("qwen3-30b-a3b").spec
    topology = ClusterTopology(hardware=load_cluster("h100"), ep_size=ep_size)
    (probability,) = dirichlet_steps(
        DIRICHLET_SCENARIOS["heavy+bursty"],
        num_layers=model.num_moe_layers,
        num_experts=model.num_experts,
        top_k=model.top_k,
        num_micro_batches=micro_batches,
        num_steps=1,
    )
    load = expected_load(probability, topology=topology, tokens_per_rank=8192, top_k=model.top_k)
    cells = micro_batches * ep_size
    layout = BatchLayout(
        micro_batch=np.repeat(np.arange(micro_batches, dtype=np.int32), ep_size),
        dp_rank=np.tile(np.arange(ep_size, dtype=np.int32), micro_batches),
        order=np.zeros(cells, np.int32),
        num_micro_batches=micro_batches,
        num_dp_ranks=ep_size,
    )
    rng = np.random.default_rng(0)
    plans = {f"random {index}": _random_plan(rng, load, layout) for index in range(policies)}
    return Case(model=model, topology=topology, load=load, layout=layout, lengths=np.full(cells, 8192), plans=plans)


def _random_plan(rng: np.random.Generator, load: StepLoad, layout: BatchLayout) -> Plan:
    """Return a plan whose replicas fill half of the slots of every cell."""
    ranks, layers, experts = load.ep_size, load.num_layers, load.num_experts
    placement = ExpertPlacement.contiguous(num_layers=layers, num_experts=experts, ep_size=ranks, spare_slots=SLOTS)
    cells, per_rank = load.num_micro_batches * layers, placement.slots_per_rank
    spare = (np.arange(ranks)[:, None] * per_rank + per_rank - SLOTS + np.arange(SLOTS)).ravel()
    cell, slot = np.nonzero(rng.random((cells, len(spare))) < 0.5)
    expert = rng.integers(0, experts, len(cell))
    available = load.pairs.reshape(cells, ranks, experts)[cell, :, expert]
    return Plan(
        policy="random",
        layout=layout,
        placement=placement,
        replicas=ReplicaPlan(
            offsets=np.concatenate([[0], np.cumsum(np.bincount(cell, minlength=cells))]),
            expert=expert.astype(np.int32),
            physical_id=spare[slot].astype(np.int32),
            source_quota=available // 2,
            source_pairs=available,
            resident=np.zeros(len(cell), np.bool_),
            num_ep_groups=1,
            num_micro_batches=load.num_micro_batches,
            num_layers=layers,
        ),
        migration=ExpertMigration.between(placement, placement, expert_bytes=0),
    )


@pytest.fixture(scope="module")
def case() -> Case:
    """The step of the acceptance limit, planned once for all tests."""
    return planned_step()


def test_seven_policies_at_ep32(benchmark: Callable[..., SimulationResult], case: Case) -> None:
    """The case of the acceptance limit: at most 5 s on 2 cores."""
    result = benchmark(case.simulate, StepSetting())
    assert len(result.policies) == POLICIES


def test_one_policy_at_ep8(benchmark: Callable[..., SimulationResult]) -> None:
    """One node, flat all-to-all."""
    small = planned_step(ep_size=8, policies=1)
    assert benchmark(small.simulate, StepSetting(dispatcher="alltoall")).conditions.ep_size == 8


def main() -> None:
    """Print the table and, with --json, one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    step = planned_step()
    planned_bytes = peak_resident_bytes()
    times = []
    for _ in range(3):
        started = time.perf_counter()
        step.simulate(StepSetting())
        times.append(time.perf_counter() - started)
    replicas = sum(len(plan.replicas.expert) for plan in step.plans.values())
    row = {
        "case": f"{POLICIES} policies, EP32, 48 layers, 64 micro-batches, {replicas} replicas",
        "simulate_s": min(times),
        "limit_s": LIMIT_S,
        "peak_resident_bytes": peak_resident_bytes(),
        "resident_before_bytes": planned_bytes,
        "machine": record_hardware(Path(__file__).parent),
    }
    print(f"{row['case']}: {min(times):.2f} s (limit {LIMIT_S} s), peak {row['peak_resident_bytes'] / 1e9:.2f} GB")
    if options.json:
        print(json.dumps(row))
    if options.out:
        options.out.write_text(json.dumps(row) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
