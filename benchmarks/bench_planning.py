"""What a rank works to plan a pass, and how long the training loop waits for it: CPU seconds of one EP group.

    python benchmarks/bench_planning.py                 a table; --policy moe-rl, --json FILE
    pytest benchmarks/bench_planning.py                 the same for a small model, seconds

All P ranks of the group plan at once, each on a thread of this process, through the code that runs inside Megatron
(`PassPlanner`, `PassTables`, `Balancer`). Messages are pickled and copied as they are there, and then handed over in
memory: what is missing is the network and gloo's own copies. `work` is CPU time of a rank's thread, so that ranks may
share cores; the C++ core is told to use one thread. `begin + end` is wall-clock of `begin_pass` and `end_pass` of rank
0 when its pass is ready: no device, whose copy of the tables is asynchronous. Routes are random, with shares of
experts that differ between layers; ids are uint8, as rollout engines give them.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.in_memory_exchange import Hub, InMemory
from moe_rl.balancing.config import BalancerConfig
from moe_rl.balancing.loads import RankRows
from moe_rl.balancing.pass_planner import PassPlanner
from moe_rl.balancing.pass_queue import PreparedPart, PreparedPass
from moe_rl.balancing.pass_request import PassRequest, PlannedPass
from moe_rl.balancing.pass_source import CountedRows, PassSource
from moe_rl.config import load_model
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.placement import ExpertPlacement

TOKENS_PER_RANK, MICRO_BATCHES = 2048, 64
CASES = (("qwen3-235b-a22b", 32, 1), ("qwen3-235b-a22b", 32, 8), ("deepseek-v3", 64, 1), ("deepseek-v3", 64, 16))
"""(model, EP size, pipeline stages)"""
DISTINCT = 6
"""Micro-batches of routes that are drawn; ranks and micro-batches take them in turn."""


@dataclass(frozen=True)
class Case:
    """One EP group of the first pipeline stage."""

    model: MoeModelSpec
    ep_size: int
    stages: int
    config: BalancerConfig
    routes: list[np.ndarray]
    draws: bool = True
    """Whether drawn routes travel with the counts."""

    @property
    def layers(self) -> list[int]:
        """Layers of the stage."""
        return list(range(-(-self.model.num_moe_layers // self.stages)))

    def count(self, rank: int) -> RankRows:
        """Count the routes of a rank."""
        routes = [self.routes[(7 * rank + batch) % len(self.routes)] for batch in range(MICRO_BATCHES)]
        rows = RankRows.of(routes, model=self.model, layers=self.layers)
        return rows if self.draws else replace(rows, routes=())

    def request(self) -> PassRequest:
        """What the pass is asked to be."""
        placement = ExpertPlacement.contiguous(
            num_layers=self.model.num_moe_layers,
            num_experts=self.model.num_experts,
            ep_size=self.ep_size,
            spare_slots=self.config.slots.spare,
        )
        return PassRequest(config=self.config, placement=placement)


def draw_routes(model: MoeModelSpec, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Return [tokens, L, K] uint8 distinct ids, skewed by layer."""
    taste = rng.normal(0.0, 1.0, (1, model.num_moe_layers, model.num_experts)).astype(np.float32)
    ids = np.empty((tokens, model.num_moe_layers, model.top_k), np.uint8)
    for first in range(0, tokens, 256):
        uniform = rng.random((min(256, tokens - first), *taste.shape[1:]), dtype=np.float32)
        score = taste - np.log(-np.log(np.maximum(uniform, 1e-9)))
        ids[first : first + 256] = np.argpartition(-score, model.top_k, axis=2)[..., : model.top_k]
    return ids


def measure(case: Case, *, rounds: int = 3) -> dict[str, Any]:
    """Return CPU seconds of every rank by part, milliseconds of begin and end, and what travelled."""
    activate = pytest.importorskip("moe_rl.megatron.activate")
    work = {part: np.zeros(case.ep_size) for part in ("count", "plan", "tables")}
    hub = Hub(case.ep_size)
    if not torch.distributed.is_initialized():  # a balancer asks which rank may speak
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    waits: list[list[float]] = []

    def rank_of_group(rank: int) -> None:
        planner = PassPlanner(InMemory(hub, rank), layers=case.layers, model=case.model)
        counts = timed(work["count"], rank, lambda: case.count(rank))
        planned = timed(work["plan"], rank, lambda: planner.plan_pass(case.request(), CountedRows(counts)))
        states, transport = states_of(case.layers), Ends(rank)
        tables = timed(work["tables"], rank, lambda: activate.PassTables.of_pass(planned, states, transport, (0, 1)))
        if rank == 0:
            waits.append(begin_and_end(case, planner, planned, tables, rounds=rounds))
        else:
            for _ in range(rounds):
                planner.exchange.gather(np.zeros((MICRO_BATCHES, len(case.layers)), np.int64))
        replicas[rank] = planned.local_plan.replicas.copies

    replicas = np.zeros(case.ep_size, np.int64)
    with ThreadPoolExecutor(case.ep_size) as pool:
        for done in [pool.submit(rank_of_group, rank) for rank in range(case.ep_size)]:
            done.result()
    together = sum(work.values())
    return {
        "model": case.model.name,
        "ep_size": case.ep_size,
        "stages": case.stages,
        "layers": len(case.layers),
        "policy": case.config.policy,
        "replicas": int(replicas[0]),
        **{f"{part}_s": float(seconds.max()) for part, seconds in work.items()},
        "work_s": float(together.max()),
        "begin_end_ms": 1e3 * statistics.median(waits[0]),
        "sent_bytes_per_rank": sum(hub.sent_bytes) // case.ep_size,
    }


def timed(into: np.ndarray, rank: int, step: Any) -> Any:
    """Return what `step` returns; add the CPU seconds of this thread."""
    started = time.thread_time()
    result = step()
    into[rank] += time.thread_time() - started
    return result


def states_of(layers: Sequence[int]) -> list[Any]:
    """Return what `activate` needs of the layers of one model chunk."""
    clock = SimpleNamespace(reset=lambda: None, stop=lambda: None)
    return [
        SimpleNamespace(layer=layer, clock=clock, plans=None, rows=dict.fromkeys(range(MICRO_BATCHES), 2048),
                        routed=None, home_dispatcher=None, current=None, begun=False, counter=None)
        for layer in layers
    ]  # fmt: skip


class Ends:
    """The transport of a rank that sends nothing: R = 1, C = 0."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.counters = SimpleNamespace(pushed_bytes=0, returned_bytes=0)
        self.buffers = SimpleNamespace(
            weights=torch.zeros(1),
            replica_slots=1,
            num_slots=1,
            messages=2,
            staging_capacity=lambda *, hosted, across: 1 + 2 * (1 - hosted),
        )

    def reset(self) -> None:
        """Nothing is on its way."""


def begin_and_end(case: Case, planner: PassPlanner, planned: PlannedPass, tables: Any, *, rounds: int) -> list[float]:
    """Return seconds of `begin_pass` and `end_pass` of a pass that is ready; a collective of the group."""
    balancer_module = pytest.importorskip("moe_rl.megatron.balancer")
    residents = SimpleNamespace(begin_pass=lambda *_, **__: None, end_pass=lambda: None)
    groups = SimpleNamespace(ep_size=case.ep_size, num_ep_groups=1, part=(0, 1),
                             device=torch.device("cpu"))  # fmt: skip
    seconds = []
    with ThreadPoolExecutor(1) as ready:
        for _ in range(rounds):
            states = states_of(case.layers)
            balancer = balancer_module.Balancer(
                layers=[SimpleNamespace(config=SimpleNamespace()) for _ in states],
                states=states,
                clocks=[states[0].clock],
                optimizer=None,
                config=case.config,
                model=case.model,
                groups=groups,
                transport=Ends(0),
                residents=residents,
                exchange=planner.exchange,
            )
            pass_ready = ready.submit(lambda: PreparedPart(planned=planned, tables=tables))
            pass_ready.result()
            prepared = PreparedPass(
                parts=[pass_ready], homes=None, source=PassSource.unknown(1), forward_only=True, counter=None
            )
            balancer._queue.passes.append(prepared)
            started = time.perf_counter()
            balancer.begin_pass()
            begun = time.perf_counter() - started
            began_end = time.perf_counter()
            balancer.end_pass().as_dict()
            seconds.append(begun + time.perf_counter() - began_end)
            balancer.run.thread.shutdown()
    return seconds


def case_of(
    name: str, ep_size: int, stages: int, policy: str, *, tokens: int = TOKENS_PER_RANK, draws: bool = True
) -> Case:
    """Return a case with its routes drawn."""
    model = load_model(name).spec
    rng = np.random.default_rng(0)
    parameters = {"num_threads": 1} if policy == "moe-rl" else {}
    config = BalancerConfig(policy=policy, parameters=parameters)
    routes = [draw_routes(model, tokens, rng) for _ in range(DISTINCT)]
    return Case(model, ep_size, stages, config, routes, draws)


def test_work_of_a_small_group() -> None:
    """Every rank gets the plan, and replicas there are."""
    case = case_of("olmoe", 8, 1, "ultraep", tokens=128)
    row = measure(case, rounds=1)
    assert row["replicas"] > 0
    assert row["work_s"] > 0


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32])
def test_counts_of_65536_rows_in_48_layers(benchmark: Any, dtype: type) -> None:
    """On one core, from routes as frameworks hold them."""
    model = load_model("qwen3-30b-a3b").spec
    draw = np.random.default_rng(0)
    few = draw.random((4096, model.num_experts)).argpartition(model.top_k)[:, : model.top_k]
    routes = few[draw.integers(0, len(few), (65_536, model.num_moe_layers))].astype(dtype)
    layers = list(range(model.num_moe_layers))
    found = benchmark(lambda: RankRows.of([routes], model=model, layers=layers))
    assert found.pairs.sum() == routes.size


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    options.add_argument("--policy", default="ultraep")
    options.add_argument("--counts-only", action="store_true", help="no drawn routes travel")
    options.add_argument("--case", type=int, choices=range(len(CASES)), help="one row of the table alone")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    rows = []
    print("model              EP  PP layers  count    plan  tables    work  begin + end  sent/rank  replicas/cell")
    for name, ep_size, stages in CASES if given.case is None else [CASES[given.case]]:
        row = measure(case_of(name, ep_size, stages, given.policy, draws=not given.counts_only))
        rows.append(row)
        per_cell = row["replicas"] / MICRO_BATCHES / row["layers"]
        print(
            f"{name:18} {ep_size:3} {stages:3} {row['layers']:6} {row['count_s']:5.2f} s {row['plan_s']:5.2f} s "
            f"{row['tables_s']:5.2f} s {row['work_s']:5.2f} s {row['begin_end_ms']:8.1f} ms "
            f"{row['sent_bytes_per_rank'] / 1e6:7.1f} MB {per_cell:10.1f}",
            flush=True,
        )
    if given.json is not None:
        given.json.write_text(json.dumps({"command": "python benchmarks/bench_planning.py", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
