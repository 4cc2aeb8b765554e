"""What half and double of a search constant does: seconds of the planned step, and CPU seconds of planning it.

    python benchmarks/bench_search_constants.py                           a table; minutes of CPU
    python benchmarks/bench_search_constants.py --constant LATER_TURNS    one constant alone

Every figure is a change against the constant as it is, the mean over `SEEDS` of the search; `chance` is how far the
step differs between the seeds. Settings are 8 layers of the development trace (where it lies beside the checkout) and
of the bundled trace. Constants of the rollout map have the load of the busiest rank, max/mean over decode batches that
were not planned on, in place of the step.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from benchmarks.fuzz_planner import DEV_TRACE, long_tailed_batch, trace_of
from moe_rl.core.expert_map import ExpertMap
from moe_rl.core.trace import RoutingTrace
from moe_rl.planner import layout_search, packing, rollout_map, search, weights
from moe_rl.planner.registry import make_planner
from moe_rl.study.options import SimulationOptions
from moe_rl.study.plan_and_price import pricing_of
from moe_rl.study.scenario import Scenario, state_scenario
from moe_rl.yaml_files import FROM_TRACE

SEEDS = (0, 1)
LAYERS = 8
DECODE_TOKENS = 256
"""Tokens of a decode batch."""
BUNDLED, RECORDED = "countdown-grpo", "gptoss_dev"
ON_SEVERAL_NODES = {"moe_token_dispatcher_type": "flex", "tokens_per_rank": 8192, "cross_node_slots": 1}
FEW_TOKENS = {"moe_token_dispatcher_type": "alltoall", "tokens_per_rank": 2048, "forward_only": True}
"""Moves of homes are a large part of such a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One problem to plan."""

    routes: str
    ep_size: int
    words: dict[str, object]
    long_tailed: bool = False
    micro_batches: int = 16
    """About; no fewer tokens than the longest sequence."""

    def __str__(self) -> str:
        """Return the name of its row."""
        slots = f", {self.words['resident_slots']} resident" if "resident_slots" in self.words else ""
        return f"{self.routes}, EP{self.ep_size}{slots}{', long tail' if self.long_tailed else ''}"

    def scenario(self, seed: int) -> Scenario:
        """Return the step, ready to plan."""
        trace, asked = routes_of(self.routes), dict(self.words)
        if self.long_tailed:
            trace = long_tailed_batch(trace, tokens=128 * 8192, longest=8192, seed=0)
            groups = max(1, 32 // self.ep_size)
            asked |= {"micro_batch_tokens": 8192, "num_ep_groups": groups, "packing": "free", "batch": "recorded"}
        else:
            total, longest = int(trace.sequence_lengths.sum()), int(trace.sequence_lengths.max())
            asked |= {"ep_group_tokens": max(longest, total // self.micro_batches)}
        options = SimulationOptions(
            model=FROM_TRACE,
            cluster="h100",
            expert_model_parallel_size=self.ep_size,
            policy=["moe-rl"],
            seed=seed,
            **asked,
        )
        return state_scenario(trace, options, lambda *_: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One constant of a search."""

    module: ModuleType
    name: str
    measure: Callable[[Setting, int], float]
    """Return what the constant changes, for a setting and a seed."""
    settings: Sequence[Setting]

    @property
    def value(self) -> float:
        """What it is today."""
        value: float = getattr(self.module, self.name)
        return value

    def half_and_double(self) -> tuple[float, float]:
        """Return the values that it is compared with."""
        half, double = self.value / 2, self.value * 2
        if isinstance(self.value, int):
            return max(1, int(half)), int(double)
        return half, double


@cache
def routes_of(name: str) -> RoutingTrace:
    """Return the first layers of a trace."""
    trace = trace_of(name)
    rows = [slice(begin, end) for begin, end in zip(trace.cu_seqlens[:-1], trace.cu_seqlens[1:], strict=True)]
    layers = [trace.routed_experts[each, :LAYERS] for each in rows]
    return RoutingTrace.from_sequences(layers, num_experts=trace.num_experts)


def step_s(setting: Setting, seed: int) -> float:
    """Return the simulated seconds of the step under the plan."""
    scenario = setting.scenario(seed)
    simulate, _ = pricing_of(scenario, {"moe-rl": make_planner("moe-rl").plan(scenario.problem)})
    return float(simulate(scenario.training_step.setting).policies["moe-rl"].step_time_s)


def map_imbalance(setting: Setting, seed: int) -> float:
    """Return max/mean of the ranks' loads over the decode batches that were not planned on."""
    trace, ranks = routes_of(setting.routes), setting.ep_size
    rows = np.random.default_rng(seed).permutation(len(trace.routed_experts))
    batches = rows[: len(rows) // DECODE_TOKENS * DECODE_TOKENS].reshape(-1, DECODE_TOKENS)[:64]
    ids = trace.routed_experts[batches]
    load: NDArray[np.float64] = np.stack(
        [
            np.stack([np.bincount(layer.ravel(), minlength=trace.num_experts) for layer in batch.swapaxes(0, 1)])
            for batch in ids
        ]
    ).astype(float)
    layers = load.shape[1]
    start = ExpertMap.start(
        num_layers=layers,
        moe_layer_ids=tuple(range(layers)),
        num_experts=trace.num_experts,
        ep_size=ranks,
        copies=ranks,
    )
    made = rollout_map.spread_copies(load[::2], start, iterations=int(rollout_map.ITERATIONS), seed=seed)
    judged = rollout_map._share(load[1::2], made)
    of_ranks = judged.reshape(*judged.shape[:2], ranks, -1).sum(axis=3)
    return float(of_ranks.max(axis=2).sum() / of_ranks.mean(axis=2).sum())


LARGE = tuple(
    Setting(routes=routes, ep_size=ep_size, words=ON_SEVERAL_NODES | {"resident_slots": slots})
    for routes, ep_size in ((RECORDED, 16), (RECORDED, 32), (BUNDLED, 16))
    for slots in (0, 1)
)
MANY_BATCHES = tuple(replace(setting, micro_batches=128) for setting in LARGE[2:])
"""With fewer, every cell has a pool of its own and `POOL_TOKENS` steers nothing."""
SMALL = tuple(
    Setting(routes=routes, ep_size=ep_size, words=FEW_TOKENS | {"replica_slots": slots})
    for routes, ep_size in ((RECORDED, 8), (RECORDED, 16), (BUNDLED, 16))
    for slots in (0, 1)
)
PACKED = tuple(
    Setting(routes=routes, ep_size=ep_size, words={}, long_tailed=True)
    for routes, ep_size in ((RECORDED, 8), (RECORDED, 16), (RECORDED, 32), (BUNDLED, 16))
)
MAPS = tuple(
    Setting(routes=routes, ep_size=ep_size, words={})
    for routes, ep_size in ((RECORDED, 8), (RECORDED, 16), (BUNDLED, 8), (BUNDLED, 16))
)
CONSTANTS = (
    Constant(module=search, name="POOL_TOKENS", measure=step_s, settings=MANY_BATCHES),
    Constant(module=search, name="LATER_TURNS", measure=step_s, settings=LARGE),
    Constant(module=layout_search, name="RESIDENT_TOKENS", measure=step_s, settings=LARGE[1::2]),
    Constant(module=weights, name="MIGRATION_SPREAD", measure=step_s, settings=SMALL),
    Constant(module=packing, name="TRIED_COUNTS", measure=step_s, settings=PACKED),
    *(
        Constant(module=rollout_map, name=name, measure=map_imbalance, settings=MAPS)
        for name in ("ITERATIONS", "TEMPERATURE", "POWER")
    ),
)


def measured(constant: Constant, value: float, setting: Setting, seeds: Sequence[int]) -> NDArray[np.float64]:
    """Return [seeds, 2]: what the constant changes, and CPU seconds, with that value."""
    before, results = constant.value, []
    setattr(constant.module, constant.name, value)
    try:
        for seed in seeds:
            started = time.process_time()
            results.append((constant.measure(setting, seed), time.process_time() - started))
    finally:
        setattr(constant.module, constant.name, before)
    return np.array(results)


def rows_of(constant: Constant, seeds: Sequence[int]) -> Iterator[str]:
    """Yield the rows of the table for one constant."""
    usable = [one for one in constant.settings if one.routes == BUNDLED or DEV_TRACE.is_file()]
    changes = []
    for setting in usable:
        now, *others = [
            measured(constant, value, setting, seeds) for value in (constant.value, *constant.half_and_double())
        ]
        change = [other.mean(axis=0) / now.mean(axis=0) - 1.0 for other in others]
        chance = f"{np.ptp(now[:, 0]) / now[:, 0].mean():.2%}" if len(seeds) > 1 else ""
        changes.append(change)
        yield row(f"{constant.name}, {setting}", now.mean(axis=0), change, chance)
    mean = np.mean(changes, axis=0)
    values = " and ".join(f"{value:g}" for value in constant.half_and_double())
    yield row(f"**{constant.name}, {constant.value:g} against {values}**", None, list(mean), "")


def row(name: str, now: NDArray[np.float64] | None, change: Sequence[NDArray[np.float64]], chance: str) -> str:
    """Return one row: what is measured today, and the changes with half and double the constant."""
    today = ["", ""] if now is None else [f"{now[0]:.4f}", f"{now[1]:.1f} s"]
    return f"| {' | '.join([name, *today, *(f'{one[0]:+.2%}, CPU {one[1]:+.0%}' for one in change), chance])} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--constant", action="append", choices=[constant.name for constant in CONSTANTS])
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    asked = parser.parse_args()
    heads = ["constant, setting", "today", "CPU", "half", "double", "chance"]
    print(f"| {' | '.join(heads)} |\n" + "|---" * len(heads) + "|")
    for constant in CONSTANTS:
        if asked.constant is None or constant.name in asked.constant:
            for line in rows_of(constant, range(asked.seeds)):
                print(line, flush=True)


if __name__ == "__main__":
    main()
