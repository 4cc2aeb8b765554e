"""Quality and time of every planning policy, on real and on synthetic routing.

    python benchmarks/bench_planner.py                    tables for people, then one JSON document on the last line
    python benchmarks/bench_planner.py --output FILE      the JSON document into FILE as well
    python benchmarks/bench_planner.py --sections speed   only some of: trace, synthetic, time, perturbed, speed, scale
    pytest benchmarks/bench_planner.py                    some cases under pytest-benchmark
    moe-rl bench planner                                  the same tables

Sections. `trace`: GPT-OSS-20B routing (`../shared/data/gptoss_dev.npz`, or `--trace`; left out when absent), objective
imbalance, R = 1, nodes of 8, micro-batches of 2048 and 8192 tokens of the EP group. `synthetic`: generator presets A
and B. `time`: objective time at 8192 tokens per rank on Dirichlet loads of Qwen3 shapes; predicted, not measured on a
GPU. `perturbed`: the ranking there when single constants are 30 % off. `speed`: seconds of the searches, with the CPU
time of the process beside the clock because other programs may share the machine. `scale`: seconds and memory of the
largest steps, only if it is named.

Columns: `bound` is the least imbalance of any split over the plan's own instances, `in node` that of any plan with its
homes and replicas inside nodes; `NIC` the most cross-node copies that one NIC receives/sends for one layer.
"""

from __future__ import annotations  # names of pytest stand in annotations alone: the tables need no test environment

import argparse
import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.dirichlet import DIRICHLET_SCENARIOS, dirichlet_steps, expected_load
from benchmarks.hardware import record_hardware
from benchmarks.memory import peak_resident_bytes
from benchmarks.planner_rows import PolicyRow, measure_policies, policy_table
from moe_rl.config import load_cluster, load_model
from moe_rl.core.cost import layer_cost_params
from moe_rl.core.errors import InvalidInputError
from moe_rl.core.layout import BatchLayout
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.native import native_core, why_not_native
from moe_rl.core.reduce import reduce_load
from moe_rl.core.routes import RouteSample
from moe_rl.core.sequence_load import SequenceLoad
from moe_rl.core.topology import ClusterTopology, HardwareSpec
from moe_rl.core.trace import RoutingTrace
from moe_rl.planner.base import PlanProblem
from moe_rl.planner.registry import make_planner
from moe_rl.planner.relayout import load_for_layout
from moe_rl.replay.sequences import count_sequences
from moe_rl.simulators.synthetic import PRESET_A, PRESET_B, SequenceModel, synthetic_trace

if TYPE_CHECKING:
    import pytest
    from pytest_benchmark.fixture import BenchmarkFixture

ROOT = Path(__file__).resolve().parent.parent
DEV_TRACE = ROOT.parent / "shared" / "data" / "gptoss_dev.npz"
HARDWARE = load_cluster("h100")
TOKENS_PER_RANK = 8192
NIC_IDLE_S = {"qwen3-30b-a3b": 0.014, "qwen3-235b-a22b": 0.033}
"""NIC time per layer at 8192 tokens per rank and EP32 that cross-node replicas may use, by model."""
PERTURBED = ("gemm_tflops", "hbm_gb_per_s", "nvlink_gb_per_s", "nvlink_p2p_gb_per_s", "rdma_gb_per_s")
Record = dict[str, object]


def reshaped(model: MoeModelSpec, *, layers: int, experts: int, top_k: int) -> MoeModelSpec:
    """The model with another MoE shape, all layers alike."""
    return replace(
        model,
        num_layers=layers,
        moe_layer_ids=tuple(range(layers)),
        num_experts=experts,
        top_k=top_k,
        num_expert_groups=1,
        expert_group_top_k=0,
        sliding_window=0,
        num_sliding_window_layers=0,
    )


def problem_on(trace: RoutingTrace, ep_size: int, token_budget: int, cross_node_slots: int = 0) -> PlanProblem:
    """The comparison protocol: micro-batches of the whole EP group, balance of token-expert pairs."""
    topology = ClusterTopology(hardware=HARDWARE, ep_size=ep_size, slices_per_dp_rank=ep_size)
    layout = BatchLayout.ep_group(trace.sequence_lengths, token_budget=token_budget)
    model = reshaped(
        load_model("gpt-oss-20b").spec, layers=trace.num_layers, experts=trace.num_experts, top_k=trace.top_k
    )
    load = reduce_load([trace], layout=layout, topology=topology)
    return PlanProblem(
        load=load,
        history=load.micro_batches(np.arange(max(1, load.num_micro_batches // 2))),
        layout=layout,
        model=model,
        topology=topology,
        cost=layer_cost_params(model, topology),
        objective="imbalance",
        cross_node_slots=cross_node_slots,
        sequence_load=SequenceLoad.of_different(count_sequences(trace).tokens_per_expert),
        sequence_tokens=trace.sequence_lengths,
        load_of_layout=lambda other: reduce_load([trace], layout=other, topology=topology),
    )


def trace_problems(path: Path) -> Iterator[tuple[str, PlanProblem]]:
    """Real routing at EP8, 16 and 32."""
    arrays = np.load(path)
    trace = RoutingTrace.from_sequences([arrays[key] for key in arrays], num_experts=32)
    for budget in (2048, 8192):
        for ep_size in (8, 16, 32):
            for slots in (0, 1) if ep_size > 8 else (0,):
                yield f"{path.stem} {budget} EP{ep_size} C={slots}", problem_on(trace, ep_size, budget, slots)


def synthetic_problems() -> Iterator[tuple[str, PlanProblem]]:
    """Generator presets A and B, four layers each."""
    presets: tuple[tuple[str, SequenceModel, int], ...] = (("A", PRESET_A, 1024), ("B", PRESET_B, 2048))
    for name, preset, budget in presets:
        trace = synthetic_trace(replace(preset, num_layers=4))
        for ep_size in (8, 16, 32):
            yield f"preset {name} {budget} EP{ep_size}", problem_on(trace, ep_size, budget)


def time_problem(name: str, ep_size: int, scenario: str, slots: int, hardware: HardwareSpec = HARDWARE) -> PlanProblem:
    """One step of 8 micro-batches of a Qwen3 model under objective time; the step before is the history."""
    model = load_model(name).spec
    topology = ClusterTopology(hardware=hardware, ep_size=ep_size)
    steps = dirichlet_steps(
        DIRICHLET_SCENARIOS[scenario], num_layers=model.num_moe_layers, num_experts=model.num_experts, top_k=model.top_k
    )
    before, load = (
        expected_load(step, topology=topology, tokens_per_rank=TOKENS_PER_RANK, top_k=model.top_k) for step in steps
    )
    micro_batch, dp_rank = np.divmod(np.arange(8 * ep_size, dtype=np.int32), ep_size)
    layout = BatchLayout(
        micro_batch=micro_batch,
        dp_rank=dp_rank,
        order=np.arange(8 * ep_size, dtype=np.int32),
        num_micro_batches=8,
        num_dp_ranks=ep_size,
        fixed=True,
    )
    cost = replace(layer_cost_params(model, topology), prefetch_hidden_s=NIC_IDLE_S[name] if slots else 0.0)
    return PlanProblem(
        load=load, history=before, layout=layout, model=model, topology=topology, cost=cost, cross_node_slots=slots
    )


def time_problems() -> Iterator[tuple[str, PlanProblem]]:
    """Qwen3-30B and 235B at EP16 and EP32."""
    for name in NIC_IDLE_S:
        for ep_size in (16, 32):
            for scenario in ("medium", "bursty"):
                for slots in (0, 1):
                    yield f"{name} EP{ep_size} {scenario} C={slots}", time_problem(name, ep_size, scenario, slots)


def perturbed_problems() -> Iterator[tuple[str, PlanProblem]]:
    """Qwen3-30B with single constants 30 % lower or higher; every policy plans with the perturbed ones."""
    for field in PERTURBED:
        for factor in (0.7, 1.3):
            hardware = HARDWARE.perturbed(**{field: factor})
            for ep_size in (16, 32):
                case = f"30b EP{ep_size} {field} x{factor}"
                yield case, time_problem("qwen3-30b-a3b", ep_size, "medium", 0, hardware)


def flips(rows: list[PolicyRow]) -> list[str]:
    """Say where another policy is predicted faster than moe-rl, moves included."""
    cost = {(row.case, row.policy): row.predicted_s + row.move_s for row in rows}
    return [
        f"{case}: {policy} {seconds:.4f} s is faster than moe-rl {cost[case, 'moe-rl']:.4f} s"
        for (case, policy), seconds in cost.items()
        if seconds < cost[case, "moe-rl"]
    ]


def best_of(run: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Return the least (clock, CPU) seconds of some runs."""
    clock, processor = [], []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        clock.append(time.perf_counter() - wall)
        processor.append(time.process_time() - cpu)
    return min(clock), min(processor)


def replicate_case(
    *,
    layers: int,
    micro_batches: int,
    ep_size: int,
    search_nodes: int,
    tolerance_ppm: int,
    threads: int,
    experts: int = 128,
    ranks_per_domain: int = 8,
) -> Callable[[], object]:
    """All replica plans of a step, R = 1, lognormal loads of 4096 tokens per rank, top-8."""
    rng = np.random.default_rng(0)
    share = np.exp(0.9 * rng.standard_normal((micro_batches * layers, experts)))
    rows = rng.multinomial(4096 * ep_size * 8, share / share.sum(axis=1, keepdims=True)).astype(np.int64)
    upto = rows[:, None, :] * np.arange(1, ep_size + 1)[:, None] // ep_size
    pairs = np.diff(upto, axis=1, prepend=0).astype(np.int32).reshape(1, micro_batches, layers, ep_size, experts)
    home = np.tile(np.repeat(np.arange(ep_size, dtype=np.int32), experts // ep_size), (layers, 1))
    core = native_core()
    if core is None:
        raise InvalidInputError(f"the section speed times the C++ core: {why_not_native()}.")
    tokens = np.full((1, micro_batches, ep_size), 4096)
    return lambda: core.replicate(
        core.Load(pairs, tokens, None, ranks_per_domain),
        home=home,
        replica_slots=1,
        cross_node_slots=0,
        spare_slots=1,
        cost=None,
        search_nodes=search_nodes,
        tolerance_ppm=tolerance_ppm,
        cross_gain_ppm=0,
        num_threads=threads,
        residents=np.zeros((layers, ep_size, 0), np.int32),
        thorough=False,
    )


def whole_plan_problem(
    objective: str,
    *,
    sequences: int,
    micro_batches: int,
    layers: int,
    name: str = "qwen3-235b-a22b",
    ep_size: int = 32,
    routed_tokens: int = 0,
    longest: int = 3000,
) -> PlanProblem:
    """Sequences with tastes of their own in four domains; of each, `routed_tokens` carry their routes.

    Lengths are lognormal around a fifth of the `longest`.
    """
    rng = np.random.default_rng(0)
    given = load_model(name).spec
    experts, top_k = given.num_experts, given.top_k
    tokens = np.minimum(rng.lognormal(np.log(longest / 5), 0.6, sequences), longest).astype(np.int64)
    base, domain = rng.normal(0, 0.6, (layers, experts)), rng.normal(0, 0.6, (4, layers, experts))
    load = np.empty((sequences, layers, experts), np.int32)
    routes = np.empty((layers, sequences * routed_tokens, top_k), np.uint16)
    for sequence in range(sequences):
        logits = base + domain[sequence % 4] + rng.normal(0, 0.9, (layers, experts))
        share = np.exp(logits)
        load[sequence] = rng.multinomial(tokens[sequence] * top_k, share / share.sum(axis=1, keepdims=True))
        if routed_tokens:
            score = logits[:, None, :] + rng.gumbel(size=(layers, routed_tokens, experts))
            some = slice(sequence * routed_tokens, (sequence + 1) * routed_tokens)
            routes[:, some] = np.argpartition(-score, top_k, axis=2)[:, :, :top_k]
    topology = ClusterTopology(hardware=HARDWARE, ep_size=ep_size, slices_per_dp_rank=ep_size)
    token_budget = max(int(tokens.max()), int(tokens.sum() / micro_batches * 1.08))
    layout = BatchLayout.ep_group(tokens, token_budget=token_budget)
    model = reshaped(given, layers=layers, experts=experts, top_k=top_k)
    sequence_load = SequenceLoad.of_different(load)
    counted = load_for_layout(sequence_load, tokens, layout, topology, top_k)
    if routed_tokens:
        none = np.zeros(0, np.int64)
        drawn = RouteSample(
            routes=routes,
            sequence=np.repeat(np.arange(sequences), routed_tokens),
            position=(np.arange(routed_tokens) * tokens[:, None] // routed_tokens).reshape(-1),
            token=none,
            source=none.astype(np.int32),
            cell_start=none,
        )
        counted = replace(counted, routes=drawn.under(layout, tokens, topology))
    return PlanProblem(
        load=counted,
        layout=layout,
        model=model,
        topology=topology,
        cost=layer_cost_params(model, topology),
        objective=objective,
        sequence_load=sequence_load,
        sequence_tokens=tokens,
    )


def flat_domain() -> Iterator[Record]:
    """Yield the time of one replica plan of a flat domain of 64 ranks (NVL72): DeepSeek-V3's 256 experts, and 128."""
    for experts in (128, 256):
        run = replicate_case(
            layers=29,
            micro_batches=8,
            ep_size=64,
            search_nodes=200,
            tolerance_ppm=500,
            threads=1,
            experts=experts,
            ranks_per_domain=64,
        )
        wall, cpu = best_of(run, 3)
        what = f"one replicate plan, {experts} experts, one domain of 64 ranks"
        yield {"what": what, "wall_us": wall / (29 * 8) * 1e6, "cpu_us": cpu / (29 * 8) * 1e6}


def counting() -> Record:
    """Return the time of counting routes, per expert id."""
    tokens, layers, top_k = 16384, 48, 8
    routes = np.random.default_rng(0).integers(0, 16, (tokens, layers, top_k), np.uint8)
    routes += np.arange(0, 128, 16, dtype=np.uint8)  # the ids of a token are distinct
    trace = RoutingTrace.from_sequences(np.split(routes, 64), num_experts=128)
    topology = ClusterTopology(hardware=HARDWARE, ep_size=8)
    layout = BatchLayout.in_order(trace.sequence_lengths, num_dp_ranks=8, token_budget=1024)
    wall, cpu = best_of(lambda: reduce_load([trace], layout=layout, topology=topology), 5)
    what = f"counting {tokens} tokens x {layers} layers x top-{top_k}, per id"
    return {"what": what, "wall_ns": wall / routes.size * 1e9, "cpu_ns": cpu / routes.size * 1e9}


def whole_steps() -> Iterator[Record]:
    """Yield the times of whole steps under objective time, routes known, and how they grow to ten times the size.

    Those of the main thread alone are what a quiet machine would wait for.
    """
    replicas = {"pack": False, "reorder": False}
    qwen, deepseek = ("qwen3-235b-a22b", 32), ("deepseek-v3", 64)
    slots = "all levers, 1 slot across nodes and 1 resident slot"
    cases = [
        (qwen, 94, 64, replicas, "replicate only"),
        (qwen, 94, 64, {}, "all levers"),
        *((qwen, layers, batches, {}, slots) for layers, batches in ((94, 64), (47, 64), (94, 32))),
        (deepseek, 58, 64, {}, "all levers"),
        *((qwen, layers, batches, replicas, "replicate only") for layers, batches in ((9, 64), (94, 6), (94, 60))),
    ]
    for (name, ep_size), layers, batches, parameters, levers in cases:
        problem = whole_plan_problem(
            "time",
            sequences=16 * batches,
            micro_batches=batches,
            layers=layers,
            name=name,
            ep_size=ep_size,
            routed_tokens=16,
        )
        if levers == slots:
            problem = replace(problem, cross_node_slots=1, resident_slots=1)
        cpu, own = time.process_time(), time.thread_time()
        plan = make_planner("moe-rl", **parameters).plan(problem)
        cpu, own = time.process_time() - cpu, time.thread_time() - own
        what = f"whole plan, time, {levers}: {name}, {layers} layers x {batches} micro-batches x EP{ep_size}"
        yield {"what": what, "wall_s": plan.solve_time_s, "cpu_s": cpu, "main_thread_s": own}


def speed() -> Iterator[Record]:
    """Yield the times of the searches, of single plans and of whole steps, and how they grow."""
    for label, nodes, ppm in (("first feasible, 1 % tolerance", 0, 10_000), ("fewest copies, 0.05 %", 200, 500)):
        run = replicate_case(layers=48, micro_batches=20, ep_size=8, search_nodes=nodes, tolerance_ppm=ppm, threads=1)
        wall, cpu = best_of(run, 5)
        yield {
            "what": f"one replicate plan, 128 experts, 8 ranks: {label}",
            "wall_us": wall / 960 * 1e6,
            "cpu_us": cpu / 960 * 1e6,
        }
    for layers, micro_batches in ((94, 32), (47, 32), (94, 16), (94, 64)):
        run = replicate_case(
            layers=layers, micro_batches=micro_batches, ep_size=32, search_nodes=200, tolerance_ppm=500, threads=0
        )
        wall, cpu = best_of(run, 3)
        yield {
            "what": f"replicate, {layers} layers x {micro_batches} micro-batches x 4 nodes",
            "wall_s": wall,
            "cpu_s": cpu,
        }
    yield from flat_domain()
    yield counting()
    yield from whole_steps()
    for objective in ("imbalance", "time"):
        for layers, micro_batches, sequences in ((94, 32, 1024), (47, 32, 1024), (94, 16, 512)):
            problem = whole_plan_problem(objective, sequences=sequences, micro_batches=micro_batches, layers=layers)
            cpu = time.process_time()
            plan = make_planner("moe-rl").plan(problem)
            cpu = time.process_time() - cpu
            what = f"whole plan, {objective}: {sequences} sequences, {layers} layers, {micro_batches} micro-batches"
            yield {"what": what, "wall_s": plan.solve_time_s, "cpu_s": cpu}


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeStep:
    """A step of `scale`: all MoE layers of a model, all levers."""

    model: str
    ep_size: int
    micro_batches: int
    longest: int = 3000
    """Tokens of the longest sequence."""
    sequences_per_micro_batch: int = 8

    @property
    def what(self) -> str:
        """The name of its row."""
        shape = f"{self.model}, EP{self.ep_size}, {self.micro_batches} micro-batches"
        return (
            f"{shape}, {self.micro_batches * self.sequences_per_micro_batch} sequences of up to {self.longest} tokens"
        )


LARGE_STEPS = (
    *(LargeStep(model="qwen3-235b-a22b", ep_size=32, micro_batches=count) for count in (64, 128, 256)),
    *(LargeStep(model="qwen3-235b-a22b", ep_size=ranks, micro_batches=64) for ranks in (64, 128)),
    *(LargeStep(model="deepseek-v3", ep_size=64, micro_batches=count) for count in (64, 128)),
    *(LargeStep(model="kimi-k2", ep_size=64, micro_batches=count) for count in (32, 64)),
    LargeStep(model="qwen3-235b-a22b", ep_size=32, micro_batches=64, longest=1_000_000),
)


def planned_large_step(step: LargeStep) -> Record:
    """Return seconds and memory of one plan; for a process of its own, whose peak counts."""
    problem = whole_plan_problem(
        "time",
        sequences=step.sequences_per_micro_batch * step.micro_batches,
        micro_batches=step.micro_batches,
        layers=load_model(step.model).spec.num_moe_layers,
        name=step.model,
        ep_size=step.ep_size,
        routed_tokens=16,
        longest=step.longest,
    )
    before, cpu = peak_resident_bytes(), time.process_time()
    plan = make_planner("moe-rl").plan(problem)
    cpu = time.process_time() - cpu
    peak = peak_resident_bytes()
    memory = {"peak_gb": peak / 1e9, "of_planning_gb": (peak - before) / 1e9}
    return {"what": step.what, "wall_s": plan.solve_time_s, "cpu_s": cpu, **memory}


def scale() -> Iterator[Record]:
    """Yield the times and the memory of large steps, how they grow with micro-batches and with ranks."""
    for step in LARGE_STEPS:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            yield process.submit(planned_large_step, step).result()


SECTIONS: dict[str, Callable[[Path], Iterator[tuple[str, PlanProblem]]]] = {
    "trace": trace_problems,
    "synthetic": lambda _: synthetic_problems(),
    "time": lambda _: time_problems(),
    "perturbed": lambda _: perturbed_problems(),
}


ALL_SECTIONS = (*SECTIONS, "speed")
BY_NAME = {"speed": speed, "scale": scale}
"""Sections of times. `scale` takes minutes, and 4 GB: it is left out unless it is named."""


def quality(section: str, trace: Path) -> Record:
    """Measure every policy on the problems of a section, print the table, and return its part of the document."""
    if section == "trace" and not trace.exists():
        print(f"{section}: {trace} is not there, left out\n")
        return {}
    rows = [row for case, problem in SECTIONS[section](trace) for row in measure_policies({case: problem})]
    print(f"{section}\n{policy_table(rows)}\n")
    part: Record = {section: [row.as_json() for row in rows]}
    if section in ("time", "perturbed"):
        part[f"{section}_flips"] = found = flips(rows)
        cases = len({row.case for row in rows})
        print("\n".join(found) or f"moe-rl is predicted fastest in all {cases} cases", "\n")
    return part


def run_sections(sections: Sequence[str], trace: Path = DEV_TRACE, *, command: str) -> Record:
    """Run the sections, print their tables, and return the JSON document."""
    machine = record_hardware(ROOT) | {"native": native_core() is not None}
    document: Record = {"benchmark": "planner", "command": command, "machine": machine}
    for section in sections:
        if section in SECTIONS:
            document |= quality(section, trace)
    for section, measured in BY_NAME.items():
        if section in sections:
            document[section] = shown(measured())
    return document


def shown(measured: Iterator[Record]) -> list[Record]:
    """Return the records, printed as they come."""
    records = []
    for record in measured:
        figures = ", ".join(f"{name} {value:.3f}" for name, value in record.items() if name != "what")
        print(f"{record['what']}: {figures}", flush=True)
        records.append(record)
    return records


def main() -> None:
    """Run the sections asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="*", default=ALL_SECTIONS, choices=(*ALL_SECTIONS, "scale"))
    parser.add_argument("--trace", type=Path, default=DEV_TRACE)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    command = shlex.join(["python", "benchmarks/bench_planner.py", "--sections", *options.sections])
    document = run_sections(options.sections, options.trace, command=command)
    if options.output:
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


def test_replicate_plans_of_a_qwen3_235b_step(benchmark: BenchmarkFixture) -> None:
    """94 layers x 32 micro-batches x 4 nodes, R = 1."""
    benchmark(replicate_case(layers=94, micro_batches=32, ep_size=32, search_nodes=200, tolerance_ppm=500, threads=0))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Plan with every policy that searches."""
    if "policy" in metafunc.fixturenames:
        metafunc.parametrize("policy", ["ultraep", "relibra", "moe-rl"])


def test_plan_of_a_synthetic_step(benchmark: BenchmarkFixture, policy: str) -> None:
    """Generator preset B at EP16: 4 layers, micro-batches of 2048 tokens."""
    problem = problem_on(synthetic_trace(replace(PRESET_B, num_layers=4)), 16, 2048)
    benchmark(make_planner(policy).plan, problem)


if __name__ == "__main__":
    main()
