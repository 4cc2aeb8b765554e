"""What a run of verl gets of packing, beside packing that no framework does: simulated seconds of an update.

    python benchmarks/bench_packing.py                      the table of docs/packing.md
    python benchmarks/bench_packing.py --ep 32 --seed 1     other lengths of the same distributions
    python benchmarks/bench_packing.py --lengths bimodal --drawings 8     eight drawings; what is kept, by EP size

Routes are those of the development trace, 32 H100, 32,768 tokens per rank, one replica slot. `verl's` is the layout
that verl makes, `run` the one of a run with moe_rl (the driver packs by lengths alone, equally many sequences per rank;
workers deal those of their rank by routes), `free` that of a search with routes over all ranks; homes and replicas are
planned for each. `kept` is the share of what `free` saves that `run` saves, too. With `--routes` there is a column for
a driver that has routes and keeps equal counts: what it does not keep is lost by that rule. With `--paddings 4` there
is one for `padding_samples=4`: ranks may have four sequences more than others, which are filled up with padding samples
(trainer v1 of verl; 2 tokens each, which are not priced).
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from benchmarks.fuzz_planner import DEV_TRACE
from moe_rl.core.schedules import with_rule
from moe_rl.core.trace import RoutingTrace
from moe_rl.planner.registry import make_planner
from moe_rl.study.plan_and_price import pricing_of
from moe_rl.study.traces import open_trace
from tests.study.test_packing import LONG_TAILED, LONGEST, SHARED, batch_of, lengths_of, scenario_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedUpdate:
    """Simulated seconds of one batch."""

    lengths: str
    ep_size: int
    static_s: float
    verl_s: float
    run_s: float
    free_s: float
    plan_s: float
    """CPU seconds of the plan of a run."""
    equal_s: float | None = None
    """Equally many sequences per rank, packed with routes; None: not planned."""
    padded_s: float | None = None
    """A run whose ranks are filled up with padding samples; None: not planned."""

    @property
    def kept(self) -> float:
        """Share of the gain of free packing that a run has, too."""
        return self.share_of_gain(self.run_s)

    def share_of_gain(self, seconds: float) -> float:
        """Return which share of what free packing saves on verl's layout an update of so many seconds saves."""
        return (self.verl_s - seconds) / (self.verl_s - self.free_s)

    def row(self, drawing: int) -> str:
        """Return the row of the table."""
        columns = [self.static_s, self.verl_s, self.run_s, self.free_s]
        columns += [seconds for seconds in (self.equal_s, self.padded_s) if seconds is not None]
        figures = [f"{seconds:.3f}" for seconds in columns]
        return " | ".join(
            [f"{self.lengths}, {drawing}", str(self.ep_size), *figures, f"{self.kept:.0%}", f"{self.plan_s:.1f}"]
        )


def packed_update(
    trace: RoutingTrace, name: str, ep_size: int, *, with_routes: bool = False, paddings: int = 0
) -> PackedUpdate:
    """Plan and price one batch under the rules."""
    scenario = scenario_of(trace, "gpt-oss-20b", ep_size, LONGEST)
    free = replace(scenario.problem, layout=with_rule(scenario.problem.layout, "verl", "free"))
    run = replace(scenario.problem, layout=with_rule(scenario.problem.layout, "verl"))
    started = time.process_time()
    plans = {"run": make_planner("moe-rl").plan(run)}
    plan_s = time.process_time() - started
    plans |= {"static": make_planner("static").plan(free), "verl": make_planner("moe-rl-unpacked").plan(free)}
    plans["free"] = make_planner("moe-rl").plan(free)
    if with_routes:
        plans["equal"] = make_planner("moe-rl").plan(replace(run, layout=replace(run.layout, lengths_alone=False)))
    if paddings:
        padded = with_rule(scenario.problem.layout, "verl", padding_samples=paddings)
        plans["padded"] = make_planner("moe-rl").plan(replace(scenario.problem, layout=padded))
    simulate, _ = pricing_of(scenario, plans)
    result = simulate(scenario.training_step.setting)
    seconds = {f"{each}_s": result.policies[each].step_time_s for each in plans}
    return PackedUpdate(lengths=name, ep_size=ep_size, plan_s=plan_s, **seconds)


def updates(
    ep_sizes: Sequence[int],
    tokens: int,
    seeds: Sequence[int],
    names: Sequence[str],
    *,
    with_routes: bool,
    paddings: int,
) -> list[PackedUpdate]:
    """Return all batches, printed as rows of a table."""
    source = open_trace(DEV_TRACE)
    (recorded,) = source.parts(source.steps[-1])
    assert isinstance(recorded, RoutingTrace)
    more = ["equal counts, routes"] if with_routes else []
    more += [f"{paddings} paddings"] if paddings else []
    heads = ["lengths, drawing", "EP", "`static`", "verl's", "run", "free", *more, "kept", "plan, CPU s"]
    print(f"| {' | '.join(heads)} |\n" + "|---" * len(heads) + "|")
    found = []
    for name, seed in product(names, seeds):
        trace = batch_of(recorded, lengths_of(name, tokens, seed), alike=SHARED if name == "agentic" else 1)
        for ep_size in ep_sizes:
            one = packed_update(trace, name, ep_size, with_routes=with_routes, paddings=paddings)
            print(f"| {one.row(seed)} |", flush=True)
            found.append(one)
    return found


def main() -> None:
    """Print the table and the mean of what is kept."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ep", type=int, action="append")
    parser.add_argument("--tokens", type=int, default=1_500_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drawings", type=int, default=1, help="seeds, from --seed on")
    parser.add_argument("--lengths", action="append", choices=LONG_TAILED)
    parser.add_argument("--routes", action="store_true", help="also equal counts with routes at the driver")
    parser.add_argument("--paddings", type=int, default=0, help="also ranks with so many sequences more than others")
    asked = parser.parse_args()
    seeds = range(asked.seed, asked.seed + asked.drawings)
    names = asked.lengths or LONG_TAILED
    ep_sizes = asked.ep or (8, 16, 32)
    batches = updates(ep_sizes, asked.tokens, seeds, names, with_routes=asked.routes, paddings=asked.paddings)
    for name, ep_size in sorted({(batch.lengths, batch.ep_size) for batch in batches}):
        alike = [batch for batch in batches if (batch.lengths, batch.ep_size) == (name, ep_size)]
        kept = [batch.kept for batch in alike]
        line = f"kept, {name}, EP{ep_size}: {np.mean(kept):.1%} on average, {min(kept):.1%} at least"
        if asked.paddings:
            padded = [batch.share_of_gain(batch.padded_s) for batch in alike if batch.padded_s is not None]
            line += f"; with {asked.paddings} paddings {np.mean(padded):.1%} and {min(padded):.1%}"
        print(line)


if __name__ == "__main__":
    main()
