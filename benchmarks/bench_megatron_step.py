"""What the balancer adds to a step of real Megatron-Core: interleaved A/B medians on CPU over gloo.

    python benchmarks/bench_megatron_step.py --json        a table, then one line of JSON; --out FILE writes it as well
    pytest benchmarks/bench_megatron_step.py               the same with few rounds, a minute

A tiny GPT-MoE (the one of tests/megatron) on two local processes, EP 2, DDP and distributed optimizer, four
micro-batches. In every round each variant runs one step, so that load from elsewhere falls on all alike; a step's time
is that of its slower rank, barrier to barrier. On CPU the figures say what the added operations cost next to a step of
this size, not what balancing gains: the ranks share the cores, so an even split saves no time.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hardware import record_hardware
from moe_rl.balancing.pass_source import PassSource

FOLDER = Path(__file__).resolve().parent
MODEL_FOLDER = FOLDER.parent / "tests" / "megatron"
ROUNDS = "MOE_RL_BENCH_ROUNDS"
MICRO_BATCHES = 4
WORLD_SIZE = 2
TIMEOUT_S = 280.0
VARIANTS = ("plain Megatron", "attached, static", "ultraep replicas", "ultraep + reorder of every expert")


def measure() -> dict[str, dict[str, list[float]]]:
    """Run on every rank: seconds of each step by routing and variant."""
    sys.path.insert(0, str(MODEL_FOLDER))
    import tiny_gpt
    import torch

    with tiny_gpt.parallel(WORLD_SIZE):
        balanced = torch.arange(tiny_gpt.SEQUENCE * tiny_gpt.BATCH * tiny_gpt.NUM_LAYERS * 2) % tiny_gpt.NUM_EXPERTS
        even = [balanced.view(-1, tiny_gpt.NUM_LAYERS, 2)] * MICRO_BATCHES
        skewed = [tiny_gpt.skewed_routes(0, m) for m in range(MICRO_BATCHES)]
        steps = {name: _step_of(name) for name in VARIANTS}
        seconds: dict[str, dict[str, list[float]]] = {}
        for routing, routes in (("balanced", even), ("skewed", skewed)):
            seconds[routing] = {name: [] for name in VARIANTS}
            for round_index in range(int(os.environ[ROUNDS]) + 1):
                for name, step in steps.items():
                    taken = _timed(functools.partial(step, routes))
                    if round_index:  # the first round warms up
                        seconds[routing][name].append(taken)
    return seconds


def _timed(step: Callable[[], None]) -> float:
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def _step_of(variant: str) -> Callable[[list[Any]], None]:
    """Return a function that runs one step of its own model under `variant`."""
    import numpy as np
    import tiny_gpt

    from moe_rl.core.placement import ExpertPlacement
    from moe_rl.megatron import BalancerConfig, attach

    run = tiny_gpt.build()
    curve = tiny_gpt.history()
    if variant == VARIANTS[0]:
        return lambda routes: tiny_gpt.update(run, 0, routes, curve)
    policy = "static" if variant == VARIANTS[1] else "ultraep"
    balancer = attach([run.model], run.optimizer, BalancerConfig(policy=policy, objective="imbalance"))
    home = balancer.megatron_placement.home_rank
    placements = [ExpertPlacement.from_home_rank(rank, ep_size=WORLD_SIZE) for rank in (np.roll(home, 4, 1), home)]

    def step(routes: list[Any]) -> None:
        if variant == VARIANTS[3]:
            placements.append(placements.pop(0))
            balancer.reorder(placements[0])
        balancer.begin_pass(PassSource.replayed(routes))
        tiny_gpt.update(run, 0, routes, curve)
        balancer.end_pass()

    return step


def document(rounds: int) -> dict[str, Any]:
    """Return medians over rounds, with what they were taken on."""
    sys.path.insert(0, str(MODEL_FOLDER.parent))
    from local_ranks import run_cases

    os.environ[ROUNDS] = str(rounds)
    with tempfile.TemporaryDirectory() as folder:
        launch = run_cases(
            FOLDER,
            ["bench_megatron_step.measure"],
            world_size=WORLD_SIZE,
            folder=Path(folder),
            timeout_s=TIMEOUT_S,
        )
        ranks = launch.of("bench_megatron_step.measure")
    rows = []
    for routing, variants in ranks[0].items():
        for name in variants:
            per_step = [max(each) for each in zip(*(rank[routing][name] for rank in ranks), strict=True)]
            rows.append(
                {
                    "routing": routing,
                    "variant": name,
                    "median_s": statistics.median(per_step),
                    "fastest_s": min(per_step),
                    "steps": len(per_step),
                }
            )
    return {
        "benchmark": "megatron_step",
        "command": f"python benchmarks/bench_megatron_step.py --json --rounds {rounds}",
        "machine": record_hardware(FOLDER),
        "rows": rows,
    }


def as_text(row: dict[str, Any]) -> str:
    """Return one line of the table."""
    milliseconds = f"{row['median_s'] * 1e3:10.1f} {row['fastest_s'] * 1e3:10.1f}"
    return f"{row['routing']:10s} {row['variant']:36s} {milliseconds} {row['steps']:6d}"


@pytest.mark.multi_rank
def test_every_variant_is_timed() -> None:
    """Every row of the table is there and holds times."""
    rows = document(rounds=3)["rows"]
    assert {(row["routing"], row["variant"]) for row in rows} == {
        (routing, variant) for routing in ("balanced", "skewed") for variant in VARIANTS
    }
    assert all(row["median_s"] >= row["fastest_s"] > 0 and row["steps"] == 3 for row in rows)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--out", type=Path, help="write the JSON to this file")
    parser.add_argument("--rounds", type=int, default=30, help="steps of every variant")
    arguments = parser.parse_args()
    found = document(arguments.rounds)
    print(f"{'routing':10s} {'variant':36s} {'median ms':>10s} {'fastest ms':>10s} {'steps':>6s}")
    for row in found["rows"]:
        print(as_text(row))
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
