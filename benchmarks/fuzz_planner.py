"""Does any policy beat `moe-rl` with the same slots, or is it slower than doing nothing? Random settings say.

    python benchmarks/fuzz_planner.py                    60 settings, drawn anew every day
    python benchmarks/fuzz_planner.py --settings 200 --seed 7
    python benchmarks/fuzz_planner.py --seed 7 --only 38 the 38th setting of a seed again
    make fuzz-planner

A setting is a trace (the bundled one, the development trace where it lies beside the checkout, synthetic routes of 32
to 128 experts; as recorded, or as a long-tailed batch), an EP size, a number of tokens, a cluster, a dispatcher, slots,
and an update or a forward pass. All policies plan it, the simulator prices the plans. A policy *beats* `moe-rl` if its
step is more than `TOLERANCE` faster. Policies that hold more copies than the slots allow are left out.
"""

import argparse
import datetime
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_rl.config import CONFIGS
from moe_rl.core.trace import RoutingTrace
from moe_rl.planner.registry import POLICIES
from moe_rl.replay.sequences import concatenate
from moe_rl.simulators.synthetic import PRESET_A, PRESET_B, PRESET_C, synthetic_trace
from moe_rl.study.options import SimulationOptions
from moe_rl.study.plan_and_price import make_plans, pricing_of
from moe_rl.study.scenario import state_scenario
from moe_rl.study.traces import open_trace
from moe_rl.yaml_files import FROM_TRACE

DEV_TRACE = Path(__file__).resolve().parents[2] / "shared" / "data" / "gptoss_dev.npz"
TOLERANCE = 0.001
"""Share of the step by which a policy must be faster to count: prices of planner and simulator differ by less."""
OURS = "moe-rl"
# The exact engines hold as many copies as they like in a domain, whatever the slots.
MORE_COPIES = ("llep", "moonep")
PARTS = tuple(policy.name for policy in POLICIES if policy.variant_of == OURS)
SYNTHETIC = {
    "fine experts": replace(PRESET_A, num_layers=4),
    "coarse experts": replace(PRESET_B, num_layers=4),
    "topics": replace(PRESET_C, num_layers=4),
    "128 experts": replace(PRESET_A, num_layers=4, num_experts=128, top_k=8, num_topics=16, topic_sigma=1.5),
}
CLUSTERS = ("a100", "h100", "h800", "h20", "b200", "gb200", "h200")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSetting:
    """One setting: the routes and the options of a simulation."""

    routes: str
    """Name of a trace (`traces`)."""
    long_tailed: bool
    """Sequences of very different lengths, packed anew; else scaled loads of the recorded ones."""
    tokens: int
    """Tokens of a rank in a micro-batch."""
    options: Mapping[str, object]

    def __str__(self) -> str:
        words = [self.routes, "long tail" if self.long_tailed else "as recorded", f"{self.tokens} tokens"]
        return ", ".join([*words, *(f"{name} {value}" for name, value in self.options.items())])


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Seconds of the step under every policy that was compared."""

    setting: DrawnSetting
    step_s: Mapping[str, float]
    plan_s: float
    """CPU seconds of planning and pricing all of them."""

    @property
    def rival(self) -> str:
        """The fastest of the other policies."""
        return min((name for name in self.step_s if name != OURS), key=self.step_s.__getitem__)

    @property
    def lost(self) -> float:
        """Share by which `moe-rl` is slower than the fastest other policy; negative where it wins."""
        return self.step_s[OURS] / self.step_s[self.rival] - 1.0


def drawn_settings(seed: int, count: int) -> Iterator[DrawnSetting]:
    """Yield settings; the first n of a seed are the same whatever the count."""
    for index in range(count):
        rng = np.random.default_rng((seed, index))
        routes = str(rng.choice(list(traces())))
        experts = trace_of(routes).num_experts
        sizes = [size for size in (4, 8, 16, 32, 64) if size <= experts]
        slots = int(rng.choice([0, 1, 1, 2]))
        yield DrawnSetting(
            routes=routes,
            long_tailed=bool(rng.random() < 0.4),
            tokens=int(rng.choice([512, 2048, 8192, 16384])),
            options={
                "expert_model_parallel_size": int(rng.choice(sizes)),
                "cluster": str(rng.choice(CLUSTERS)),
                "moe_token_dispatcher_type": str(rng.choice(["flex", "alltoall"])),
                "replica_slots": slots,
                "cross_node_slots": int(rng.choice([0, 0, 1, 2])) if slots else 0,
                "resident_slots": int(rng.choice([0, 0, 1, 2])) if slots else 0,
                "forward_only": bool(rng.random() < 0.3),
                "seed": int(rng.integers(4)),
            },
        )


def traces() -> tuple[str, ...]:
    """Return the names of the routes that are drawn from."""
    recorded = ("countdown-grpo", *["gptoss_dev"] * DEV_TRACE.is_file())
    return (*recorded, *SYNTHETIC)


@cache
def trace_of(name: str) -> RoutingTrace:
    """Return the last step of the trace called so, without tokens that have no route."""
    if name in SYNTHETIC:
        return synthetic_trace(SYNTHETIC[name])
    path = DEV_TRACE if name == "gptoss_dev" else CONFIGS / "traces" / f"{name}.moetrace"
    source = open_trace(path)
    whole = concatenate(tuple(source.parts(source.steps[-1])))
    assert isinstance(whole, RoutingTrace)
    rows = [slice(begin, end) for begin, end in zip(whole.cu_seqlens[:-1], whole.cu_seqlens[1:], strict=True)]
    sequences = [whole.routed_experts[each][whole.valid[each]] for each in rows]
    return RoutingTrace.from_sequences([each for each in sequences if len(each)], num_experts=whole.num_experts)


def long_tailed_batch(trace: RoutingTrace, *, tokens: int, longest: int, seed: int) -> RoutingTrace:
    """Return about `tokens` tokens in sequences of lognormal lengths, each made of the tokens of one of the trace's."""
    rng = np.random.default_rng(seed)
    drawn = np.exp(rng.normal(np.log(longest / 8), 1.1, 8 * tokens // longest))
    lengths: NDArray[np.int64] = np.clip(drawn, 32, longest).astype(np.int64)
    lengths = lengths[: max(64, int((np.cumsum(lengths) <= tokens).sum()))]
    sequences = []
    for length in lengths.tolist():
        source = int(rng.integers(trace.num_sequences))
        begin, recorded = int(trace.cu_seqlens[source]), int(trace.sequence_lengths[source])
        sequences.append(trace.routed_experts[begin + np.arange(length) % recorded])
    return RoutingTrace.from_sequences(sequences, num_experts=trace.num_experts)


def judged(setting: DrawnSetting, rivals: Sequence[str] | None = None) -> Verdict:
    """Plan the setting with `moe-rl` and its rivals, every policy with the same slots unless named; price the plans."""
    started, trace, asked = time.process_time(), trace_of(setting.routes), dict(setting.options)
    ep_size, seed = int(str(asked["expert_model_parallel_size"])), int(str(asked["seed"]))
    ranks = max(8, ep_size)
    if setting.long_tailed:
        longest = max(1024, setting.tokens)
        trace = long_tailed_batch(trace, tokens=4 * ranks * longest, longest=longest, seed=seed)
        # Free packing is the whole search: what a run's driver makes by lengths alone is not chosen by these routes.
        asked |= {
            "micro_batch_tokens": longest,
            "num_ep_groups": ranks // ep_size,
            "packing": "free",
            "batch": "recorded",
        }
    else:
        total, longest = int(trace.sequence_lengths.sum()), int(trace.sequence_lengths.max())
        asked |= {"ep_group_tokens": max(longest, total // 4), "tokens_per_rank": setting.tokens}
    compared = [one.name for one in POLICIES if one.slot_limits and not one.needs_history]
    compared = [name for name in compared if name not in MORE_COPIES and (rivals is None or name in (OURS, *rivals))]
    options = SimulationOptions(model=FROM_TRACE, policy=compared, **asked)
    scenario = state_scenario(trace, options, lambda *_: None)
    plans = make_plans(scenario, compared, lambda *_: None)
    simulate, _ = pricing_of(scenario, plans)
    result = simulate(scenario.training_step.setting)
    step_s = {name: result.policies[name].step_time_s for name in compared}
    return Verdict(setting=setting, step_s=step_s, plan_s=time.process_time() - started)


def main() -> None:
    """Print a line per setting that `moe-rl` loses, and what it gains over the others."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--settings", type=int, default=60)
    parser.add_argument("--seed", type=int, default=datetime.date.today().toordinal())
    parser.add_argument("--only", type=int)
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    settings = list(drawn_settings(asked.seed, asked.settings if asked.only is None else asked.only + 1))
    numbered = list(enumerate(settings))[-1 if asked.only is not None else 0 :]
    verdicts = []
    with ProcessPoolExecutor(asked.jobs) as pool:
        for (index, _), verdict in zip(numbered, pool.map(judged, (setting for _, setting in numbered)), strict=True):
            verdicts.append(verdict)
            if verdict.lost > TOLERANCE or asked.only is not None:
                times = ", ".join(f"{name} {1e3 * seconds:.4g} ms" for name, seconds in verdict.step_s.items())
                lost = f"{verdict.lost:+.2%} against {verdict.rival}"
                print(f"setting {index}: {lost}: {verdict.setting}: {times}", flush=True)
    losses = sum(verdict.lost > TOLERANCE for verdict in verdicts)
    others = [name for name in verdicts[0].step_s if name not in (OURS, *PARTS)]
    gains = sorted(min(verdict.step_s[name] for name in others) / verdict.step_s[OURS] for verdict in verdicts)
    print(
        f"seed {asked.seed}: moe-rl loses {losses} of {len(verdicts)} settings by more than {TOLERANCE:.1%}; it is "
        f"{gains[len(gains) // 2]:.3f}x the best policy that is no part of it (median, at most {gains[-1]:.3f}x); "
        f"{sum(verdict.plan_s for verdict in verdicts):.0f} CPU s"
    )
    if losses:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
