"""From a scenario to its report: plan every policy, simulate the plans, bound their imbalance from below."""

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.core.certificate import certify
from moe_rl.core.load import StepLoad
from moe_rl.core.mappings import subset
from moe_rl.core.metrics import StepPrediction
from moe_rl.core.plan import Plan
from moe_rl.core.topology import ClusterTopology, HardwareSpec
from moe_rl.planner.base import ALL_LEVERS
from moe_rl.planner.bounds import mean_bound, node_bound, placement_bound
from moe_rl.planner.domain_engine import engine_of
from moe_rl.planner.others.moonep import MoonEpPlanner
from moe_rl.planner.registry import POLICIES, make_planner
from moe_rl.profiling.posterior import NORMAL_80
from moe_rl.report.faces import SimulationReport
from moe_rl.report.simulation import BASELINE, UNPACKED, LoadBounds, PolicyLoads
from moe_rl.simulators.result import PolicyResult, SimulationResult
from moe_rl.simulators.sensitivity import perturbed_rankings
from moe_rl.simulators.setting import StepSetting
from moe_rl.simulators.step import DestinationsByPolicy, simulate_policies
from moe_rl.simulators.timeline import chrome_json, step_timeline
from moe_rl.study.batch import Batch, counts_of, lengths_of
from moe_rl.study.conditions import (
    MOE_RL,
    break_even,
    cautions,
    model_caution,
    notes,
    setting_facts,
    small_batch_caution,
    software_note,
    trace_facts,
)
from moe_rl.study.engine_row import in_order, leading_row, planned_as, remaining_levers
from moe_rl.study.intervals import intervals_of
from moe_rl.study.options import SimulationOptions
from moe_rl.study.scenario import Progress, Scenario, Simulate
from moe_rl.version import __version__

RESAMPLES = 128  # Traces that might have been recorded instead, by which the headline's interval is estimated.
# Half of the interval: of 800 random tenths of the development trace 96, 96 and 97 % then hold the whole trace's
# imbalance at EP8, 16 and 32 (with 2.0: 95, 95 and 97 %).
STANDARD_ERRORS = 2.2
PRECISE = 0.03  # Half of an interval that is narrow enough.
# Figures that mean nothing where a plan took copies to be free.
UNTIMED: dict[str, Any] = dict.fromkeys((
    "step_time_s", "tokens_per_s", "speedup_vs_static", "fraction_of_forced_balance", "fraction_of_ideal", "phi",
    "reorder_share", "breakdown_s",
))  # fmt: skip


def make_plans(scenario: Scenario, policies: Sequence[str], progress: Progress) -> dict[str, Plan]:
    """Return the plan of every policy, by name, made side by side."""
    plans = {}
    # Threads, not processes: numpy and the core let others run, and nobody copies the loads.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # The last ones take longest (235B, EP32: moe-rl 2.3 s, eplb 0.1 s), so they start first.
        futures = {name: pool.submit(plan_of_policy, *planned_as(scenario, name)) for name in reversed(policies)}
        for index, name in enumerate(policies):
            progress(f"planning {name}", index, len(policies))
            plan = futures[name].result()
            # Counting 235B again takes 0.8 s: only for the plan that was asked for, or that a report is about.
            about = len(policies) == 1 or plan.policy in (MOE_RL, UNPACKED)
            plans[name] = certified(planned_as(scenario, name)[0], plan) if about else plan
    return plans


def certified(scenario: Scenario, plan: Plan) -> Plan:
    """Return the plan with its capacity; without one where routes are missing in loads of another size."""
    load, tokens = scenario.told.known_of_layout(plan.layout)
    if load.scaled and load.tokens is not tokens:
        return plan
    if plan.policy == MOE_RL:
        engine = engine_of(scenario.problem.domain_balance)
    else:
        engine = None
    exact = plan.policy == MoonEpPlanner.name or (engine is not None and engine.exact)
    if exact:
        domain = scenario.topology.ranks_per_domain
    else:
        domain = 1
    return replace(
        plan, capacity=certify(plan, load, tokens, risk=scenario.options.knowledge.capacity_risk, exact_domain=domain)
    )


def plan_of_policy(scenario: Scenario, name: str) -> Plan:
    """Return the policy's plan of the step, with the homes that it last chose where it can keep homes."""
    parameters, policy, problem = scenario.options.planning.parameters_of(name), POLICIES[name], scenario.problem
    # The half of this step that stands in for an earlier one is for policies that cannot do without.
    if not policy.needs_history and not scenario.knows_earlier_steps:
        problem = replace(problem, history=None)
    # EPLB has one kind of copies: they get the memory of both kinds of slots.
    if policy.fills_slots_for_a_step:
        slots = problem.replica_slots + problem.resident_slots
        problem = replace(problem, replica_slots=slots, resident_slots=0)
    planner = make_planner(name, **parameters)
    if scenario.homes_chosen_at is None or not (policy.levers.move_homes and policy.keeps_homes):
        return planner.plan(problem)
    then = planner.plan(replace(scenario.homes_chosen_at, history=problem.history))
    now = replace(problem, current_placement=then.placement)
    # The moves to these homes are paid for by all steps that they serve, this one among them.
    return replace(planner.plan(now, replace(ALL_LEVERS, move_homes=False)), migration=then.migration)


def load_under(plan: Plan, batch: Batch) -> StepLoad:
    """Return the step's load under the layout of the plan, which may pack sequences its own way."""
    if plan.layout.same_cells(batch.layout):
        return batch.load
    return batch.load_of_layout(plan.layout)


def predict(
    scenario: Scenario,
    progress: Progress,
    *,
    command: str = "",
    warnings: Sequence[str] = (),
    sensitivity: bool = False,
) -> SimulationReport:
    """Plan and simulate every policy of the scenario, static always among them.

    With `sensitivity` the same plans are simulated again under constants that are 30 % off.
    """
    stated = beside_static(scenario.options.planning.policy)
    leading = leading_row(scenario, stated)
    policies = in_order(stated, leading)
    # One more plan, which gets no row: the sentence below the table says how much balancing gains without packing.
    split = MOE_RL in policies and UNPACKED not in policies and scenario.problem.sequence_load is not None
    priced = make_plans(scenario, [*policies, *[UNPACKED] * split], progress)
    plans = subset(priced, policies)
    progress("simulating", 0, 1)
    timed = scenario.options.pricing.in_seconds
    simulate, loads = pricing_of(scenario, priced)
    setting = scenario.training_step.setting
    result = simulate(setting)
    shown_rows, yardsticks = _predictions(result.policies), _predictions(result.yardsticks())
    if timed:
        intervals = intervals_of(scenario, simulate, [*shown_rows, *yardsticks])
        shown_rows, yardsticks = intervals.beside(shown_rows), intervals.beside(yardsticks)
    else:
        shown_rows = {name: replace(prediction, **UNTIMED) for name, prediction in shown_rows.items()}
        yardsticks = {}
    alone = None
    if split:
        alone = shown_rows.pop(UNPACKED)
    fastest = min(shown_rows.values(), key=lambda prediction: prediction.step_time_s or 0.0)
    if timed and fastest.speedup_interval:
        speedups = _speedups(scenario, shown_rows[BASELINE], fastest)
    else:
        speedups = ()
    sentences = notes(scenario, plans, result)
    if leading:
        sentences = [remaining_levers(scenario, leading, plans[leading]), *sentences]
    warned = cautions(scenario, result, simulate)
    if timed:
        software = software_note(scenario, result, simulate, best=fastest.policy)
        if caution := software.caution(speedups):
            warned = [caution, *warned]
        else:
            sentences = [software.sentence, *sentences]
    sentences += [*_sequences_wanted(scenario, speedups), *break_even(scenario, plans, loads)]
    return SimulationReport(
        trace=trace_facts(scenario),
        setting=setting_facts(scenario, result, timed=timed),
        policies=tuple(shown_rows.values()),
        balancing_alone=alone,
        speedups=speedups,
        yardsticks=tuple(yardsticks.values()),
        loads={name: PolicyLoads.from_rank_loads(policy.rank_load) for name, policy in result.policies.items()},
        bounds={name: load_bounds(plan, loads[name], scenario.topology) for name, plan in plans.items()},
        memory={name: policy.memory for name, policy in {**result.policies, **result.yardsticks()}.items()},
        sensitivity=tuple(perturbed_rankings(simulate, setting)) if sensitivity else (),
        model_caution=model_caution(scenario),
        small_batch_caution=small_batch_caution(scenario),
        cautions=tuple(dict.fromkeys([*warned, *warnings])),
        notes=tuple(dict.fromkeys(sentences)),
        engines=tuple(name for name in stated if POLICIES[name].is_engine),
        above_engine=leading,
        plans=plans,
        command=command,
        version=__version__,
    )


def _predictions(policies: Mapping[str, PolicyResult]) -> dict[str, StepPrediction]:
    return {name: policy.prediction for name, policy in policies.items()}


def _speedups(scenario: Scenario, static: StepPrediction, best: StepPrediction) -> tuple[float, ...]:
    """Return the speed-up of the fastest policy, and both ends of its 80 % interval.

    It holds the error of the model, and of a drawn batch also which sequences were recorded: both on logarithms.
    """
    speedup = best.speedup_vs_static or 1.0
    low, high = best.speedup_interval or [speedup, speedup]
    below, above = _left_open_by_the_draw(scenario, static) if scenario.resampled else (0.0, 0.0)
    # The draw's interval reaches 2.2 standard errors to either side.
    draw_error = [NORMAL_80 / STANDARD_ERRORS * -math.log(max(1e-6, 1.0 - below)), NORMAL_80 / STANDARD_ERRORS * above]
    log_down = math.hypot(math.log(speedup / low), draw_error[0])
    log_up = math.hypot(math.log(high / speedup), draw_error[1])
    return speedup, speedup * math.exp(-log_down), speedup * math.exp(log_up)


def _left_open_by_the_draw(scenario: Scenario, static: StepPrediction) -> tuple[float, float]:
    """Return by which shares the speed-up of a recording's other sequences may lie below and above."""
    topology, rows, seconds = scenario.topology, list[NDArray[np.float32]](), static.breakdown_s or {}
    parts = tuple(scenario.source.parts(scenario.batch.step))
    for part in parts:
        pairs = counts_of(part).tokens_per_expert
        rows.append(pairs.reshape(*pairs.shape[:2], topology.ep_size, -1).sum(axis=3, dtype=np.float32))
    seed, drawn = scenario.options.planning.seed, len(scenario.batch.lengths)
    below, above = imbalance_left_open(np.concatenate(rows), lengths_of(parts), drawn=drawn, seed=seed)
    # The imbalance of static placement moves its experts and all-to-all, while a balanced step hardly changes.
    waiting_share = sum(seconds.get(name, 0.0) for name in ("expert_gemm", "all_to_all")) / (static.step_time_s or 1.0)
    return waiting_share * below, waiting_share * above


def _sequences_wanted(scenario: Scenario, speedups: tuple[float, ...]) -> list[str]:
    """Say how many sequences would narrow the interval to `PRECISE`, where it is wider: errors shrink as roots do."""
    if not speedups or (above := speedups[2] / speedups[0] - 1.0) <= PRECISE:
        return []
    num_recorded = len(lengths_of(tuple(scenario.source.parts(scenario.batch.step))))
    return [
        f"with {num_recorded:,} recorded sequences, the speed-up may be up to {above:.1%} higher. About "
        f"{num_recorded * (above / PRECISE) ** 2:,.0f} sequences would reduce this uncertainty to {PRECISE:.0%}."
    ]


def imbalance_left_open(
    rows: NDArray[np.float32], lengths: NDArray[np.int64], *, drawn: int, seed: int
) -> tuple[float, float]:
    """Return by which shares the imbalance of `drawn` sequences may lie below and above that of the recorded ones.

    From [S, L, P] rows of every sequence and [S] lengths: recordings are drawn anew, and from each a batch.
    """
    num_recorded, rng = len(rows), np.random.default_rng(seed)
    times = [
        np.bincount(rng.choice(rng.integers(num_recorded, size=num_recorded), size=drawn), minlength=num_recorded)
        for _ in range(RESAMPLES)
    ]
    loads = np.tensordot(np.array([np.ones(num_recorded), *times], np.float32), rows, axes=1)
    recorded_imbalance, *drawn_imbalances = (
        (loads.max(axis=2) / np.maximum(loads.mean(axis=2), 1.0)).mean(axis=1).tolist()
    )
    # A long sequence counts more, so all are worth fewer; Student's t of so few is wider than a normal error.
    effective_sequences = float(lengths.sum()) ** 2 / float((lengths.astype(np.float64) ** 2).sum())
    half = (
        STANDARD_ERRORS
        * math.sqrt(effective_sequences / max(1.0, effective_sequences - 3.0))
        * float(np.std(drawn_imbalances))
    )
    # The fullest rank of few sequences is too full: the interval goes as far down again as redrawn recordings exceed
    # this one. The speed-up itself stays: 27 sequences of the development trace have at EP16 an imbalance that is off
    # by 5.7 % (root mean square), corrected so by 6.0 %.
    return (
        half + max(0.0, float(np.mean(drawn_imbalances)) - recorded_imbalance)
    ) / recorded_imbalance, half / recorded_imbalance


def beside_static(policies: Sequence[str]) -> Sequence[str]:
    """Return the policies with static, with which all are compared, among them."""
    if BASELINE in policies:
        return policies
    return [BASELINE, *policies]


class _OccurringLoads:
    """The loads that occur where others were planned: rerouted as the options say, and without routes if no times are
    asked for. Plans that share a load share what occurs, too, so that its visits are counted once.
    """

    def __init__(self, options: SimulationOptions) -> None:
        self._options = options
        self._pairs: list[tuple[StepLoad, StepLoad]] = []
        """Planned and occurring."""

    def of(self, planned: StepLoad) -> StepLoad:
        """Return the load that occurs."""
        for load, occurring in self._pairs:
            if load is planned:
                return occurring
        occurring, reroute = planned, self._options.knowledge.reroute
        if not self._options.pricing.in_seconds:
            occurring = replace(planned, routes=None)
        if reroute:
            occurring = occurring.rerouted(reroute, seed=self._options.planning.seed)
        self._pairs.append((planned, occurring))
        return occurring


def pricing_of(scenario: Scenario, plans: Mapping[str, Plan]) -> tuple[Simulate, dict[str, StepLoad]]:
    """Return a function that prices the plans under a setting, and the load that occurs under each plan's layout.

    The function also takes other constants of the cluster than the scenario's.
    """
    batch, occurring_loads = scenario.batch, _OccurringLoads(scenario.options)
    batch_load = occurring_loads.of(batch.load)
    loads, repacked = {}, {}
    for name, plan in plans.items():
        planned = load_under(plan, batch)
        loads[name] = occurring_loads.of(planned)
        if planned is not batch.load:
            repacked[name] = loads[name]
    destinations: DestinationsByPolicy = {}  # Where rows go does not depend on the setting: counted for the first.

    def simulate(setting: StepSetting, hardware: HardwareSpec | None = None) -> SimulationResult:
        if hardware is None:
            topology = scenario.topology
        else:
            topology = replace(scenario.topology, hardware=hardware)
        step = replace(scenario.training_step, setting=setting, topology=topology, load=batch_load)
        return simulate_policies(plans, step, loads=repacked, destinations=destinations)

    return simulate, loads


def load_bounds(plan: Plan, load: StepLoad, topology: ClusterTopology) -> LoadBounds:
    """Return lower bounds of a plan's imbalance on its own layout's load."""
    node, home = topology.node_of_rank, plan.placement.home_rank
    layer, rank, expert = np.nonzero(plan.placement.instances_per_rank())
    # A copy on another node takes tokens there, so a node's load is then no longer that of its experts.
    lives_elsewhere = bool((node[rank] != node[home[layer, expert]]).any())
    crosses = lives_elsewhere or plan.cross_node_replicas_per_plan(node) > 0
    return LoadBounds(
        lb0=mean_bound(load).imbalance,
        node=None if crosses else node_bound(load, home, topology.ranks_per_domain).imbalance,
        placement=placement_bound(load, plan).imbalance,
    )


def chrome_trace(scenario: Scenario, plans: Mapping[str, Plan], *, num_micro_batches: int) -> bytes:
    """Return a Chrome trace, for Perfetto, of the first micro-batches of EP group 0 under every plan."""
    timelines = {}
    for name, plan in plans.items():
        load = load_under(plan, scenario.batch)
        step = replace(scenario.training_step, load=load, layout=plan.layout)
        micro_batches = range(min(num_micro_batches, plan.layout.num_micro_batches))
        timelines[name] = step_timeline(plan, step, micro_batches=micro_batches)
    return chrome_json(timelines, ranks_per_node=scenario.topology.ranks_per_domain).encode()
