"""Plans of weight syncs at full size: milliseconds to plan, and steps against the bound that no schedule beats.

    python benchmarks/bench_sync.py
    pytest benchmarks/bench_sync.py                 time to plan the smallest, with pytest-benchmark

Homes and engine maps are drawn; no weights move. A step is one atom over one NIC. Seconds are what its bytes take at
43 GB/s, computed, not measured. `CPU ms` is one core's time to plan, the least of three. `with dense` are the seconds
of experts and of everything else, batch by batch, over the bound of both. `busiest trainer` is its atoms against the
least that any assignment gives it; `peak experts` is what the fullest of sixteen ranks stages at once, `of bound` its
share of two buckets of 512 MB and an expert.
"""

import argparse
import math
import time
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from moe_rl.sync.dense import bucket_size, dense_problem
from moe_rl.sync.layouts import EngineLayout, SyncProblem, TrainerLayout
from moe_rl.sync.plan import plan_sync
from moe_rl.sync.rank_plan import RankPlan


class Model(TypedDict):
    """Sizes of a model's experts in bf16."""

    layers: int
    experts: int
    expert_bytes: int
    dense_bytes: float
    """Attention, norms, routers, shared experts and embeddings."""


RANKS_PER_NODE = 8
NIC_BYTES_PER_S = 43e9
WIDTHS = (9, 10, 8, 8, 13, 10, 15, 12, 9)
# A quarter of verl's default update_weights_bucket_megabytes; a dense batch has as much.
BUCKET_BYTES = 512 << 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """A published or typical pair of layouts."""

    name: str
    layers: int
    experts: int
    expert_bytes: int
    dense_bytes: float
    ep_size: int
    pp_size: int = 1
    edp_size: int = 1
    etp_size: int = 1
    engines: int
    engine_ep: int
    engine_tp: int = 1
    redundant: int = 0

    def problem(self) -> SyncProblem:
        """Return the layouts with drawn homes and maps."""
        rng = np.random.default_rng(0)
        homes = [rng.permutation(np.arange(self.experts) % self.ep_size) for _ in range(self.layers)]
        # Stages may have one layer more than others.
        stages = tuple(layer * self.pp_size // self.layers for layer in range(self.layers))
        trainer = TrainerLayout.in_megatron_order(
            np.array(homes), ep_size=self.ep_size, etp_size=self.etp_size, edp_size=self.edp_size, stage_of_layer=stages
        )
        engines = tuple(
            EngineLayout(slots=self._slots(rng), ep_size=self.engine_ep, tp_size=self.engine_tp)
            for _ in range(self.engines)
        )
        trainer_nodes = [rank // RANKS_PER_NODE for rank in range(trainer.size)]
        first = trainer_nodes[-1] + 1
        engine_nodes = [first + rank // RANKS_PER_NODE for rank in range(self.engines * engines[0].size)]
        return SyncProblem(
            trainer=trainer, engines=engines, node_of=(*trainer_nodes, *engine_nodes), expert_bytes=self.expert_bytes
        )

    def dense_seconds(self, problem: SyncProblem) -> tuple[float, float]:
        """Return the seconds of dense weights by plan, a batch after the other, and their bound."""
        size = bucket_size(problem, BUCKET_BYTES)
        buckets = math.ceil(self.dense_bytes / size)
        batches, rest = divmod(buckets, problem.trainer.size)
        steps = 0
        for count, times in ((problem.trainer.size, batches), (rest, 1)):
            if count and times:
                dense = dense_problem(problem, buckets=count, bucket_bytes=size)
                steps += times * plan_sync(dense, message_bytes=1).num_steps
        # Every engine node takes in all of it, over its NICs; the trainers send it once.
        ports = min(RANKS_PER_NODE, problem.size - problem.trainer.size, problem.trainer.size)
        return steps * size / NIC_BYTES_PER_S, self.dense_bytes / ports / NIC_BYTES_PER_S

    def _slots(self, rng: np.random.Generator) -> NDArray[np.int32]:
        rows = []
        for _ in range(self.layers):
            own = rng.permutation(self.experts).reshape(self.engine_ep, -1)
            copies = [
                rng.choice(np.setdiff1d(np.arange(self.experts), row), self.redundant, replace=False) for row in own
            ]
            rows.append(np.concatenate([own, np.array(copies, int).reshape(self.engine_ep, -1)], axis=1).ravel())
        return np.array(rows, np.int32)


QWEN3_30B: Model = {"layers": 48, "experts": 128, "expert_bytes": 9437184, "dense_bytes": 3.1e9}
QWEN3_235B: Model = {"layers": 94, "experts": 128, "expert_bytes": 37748736, "dense_bytes": 16e9}
DEEPSEEK_V3: Model = {"layers": 58, "experts": 256, "expert_bytes": 88080384, "dense_bytes": 34e9}
CASES = (
    Case(name="30B EP8 -> 1 node EP8", ep_size=8, engines=1, engine_ep=8, **QWEN3_30B),
    Case(name="30B EP8 PP2 -> 8 x TP2", ep_size=8, pp_size=2, engines=8, engine_ep=1, engine_tp=2, **QWEN3_30B),
    Case(name="30B EP8 PP2 -> 2 x EP8 + 2", ep_size=8, pp_size=2, engines=2, engine_ep=8, redundant=2, **QWEN3_30B),
    Case(name="30B EP8 -> 4 x EP8", ep_size=8, engines=4, engine_ep=8, **QWEN3_30B),
    Case(name="30B EP4 ETP2 EDP2 -> 4 x TP4", ep_size=4, etp_size=2, edp_size=2, engines=4, engine_ep=1, engine_tp=4,
         **QWEN3_30B),
    Case(name="30B EP8 -> 12 x EP8", ep_size=8, engines=12, engine_ep=8, **QWEN3_30B),
    Case(name="235B EP16 PP8 -> 4 x EP32", ep_size=16, pp_size=8, engines=4, engine_ep=32, **QWEN3_235B),
    Case(name="235B EP16 PP8 -> 16 x TP8", ep_size=16, pp_size=8, engines=16, engine_ep=1, engine_tp=8, **QWEN3_235B),
    Case(name="DSv3 EP16 PP16 -> 8 x EP32", ep_size=16, pp_size=16, engines=8, engine_ep=32, **DEEPSEEK_V3),
)  # fmt: skip


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    columns = (
        "ranks", "deliveries", "CPU ms", "bound s", "steps / bound", "with dense", "busiest trainer", "peak experts",
        "of bound",
    )  # fmt: skip
    print(f"{'case':30s}", *(f"{column:>{width}s}" for column, width in zip(columns, WIDTHS, strict=True)))
    for case in CASES:
        problem = case.problem()
        times = []
        for _ in range(3):
            begun = time.process_time()
            plan = plan_sync(problem)
            times.append(time.process_time() - begun)
        trainers = problem.trainer.size
        bound_s = plan.least_steps * problem.atom_bytes / NIC_BYTES_PER_S
        # Atoms leave their trainers once, twins share: no plan that relays makes the busiest send fewer.
        holders, counts = np.unique(problem.holders_of_atoms(), axis=0, return_counts=True)
        fair = int(np.max(-(-counts // holders.shape[1])))
        sample = RankPlan.of_ranks(plan, range(0, problem.size, max(1, problem.size // 16)))
        peak = max(own.peak_parts() for own in sample.values()) / problem.parts_per_expert
        dense_s, dense_bound_s = case.dense_seconds(problem)
        planned_s = plan.num_steps * problem.atom_bytes / NIC_BYTES_PER_S
        most_staged = (2 * BUCKET_BYTES + case.expert_bytes) / case.expert_bytes
        values = (
            f"{trainers}+{problem.size - trainers}",
            f"{len(plan.deliveries.atom)}",
            f"{1e3 * min(times):.0f}",
            f"{bound_s:.3f}",
            f"{plan.num_steps / plan.least_steps:.3f}",
            f"{(planned_s + dense_s) / (bound_s + dense_bound_s):.3f}",
            f"{plan.atoms_out[:trainers].max() / fair:.3f}",
            f"{peak:.1f}",
            f"{peak / most_staged:.2f}",
        )
        print(f"{case.name:30s}", *(f"{value:>{width}s}" for value, width in zip(values, WIDTHS, strict=True)))


def test_planning(benchmark: Any) -> None:
    """Plan the smallest case."""
    problem = CASES[0].problem()
    plan = benchmark(plan_sync, problem)
    assert plan.num_steps == plan.least_steps


if __name__ == "__main__":
    main()
