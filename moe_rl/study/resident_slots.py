"""`--resident-slots auto`, `--cross-node-slots auto`: as many as a rank's memory takes and a shorter step repays.

A resident slot is a buffer in every MoE layer, for weights and gradient of one expert; one across nodes is two buffers
that all layers share. Resident ones are chosen first: beside them the others hardly pay. Slots are added one at a time,
the step is planned and simulated with each number, and the last one stays whose forecast fits and which saves more than
the search's own chance. Within that number planners choose copies per layer and rank, and leave a slot empty where no
copy pays.
"""

import logging
from dataclasses import replace

import numpy as np

from moe_rl.core.cost import Floats
from moe_rl.core.errors import require
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.software import SoftwareCosts
from moe_rl.core.topology import HardwareSpec
from moe_rl.option_groups import AUTO
from moe_rl.planner.registry import POLICIES
from moe_rl.report.units import GIB, counted
from moe_rl.simulators.balanced import flops_per_token
from moe_rl.simulators.result import PolicyResult
from moe_rl.study.groups import PlanningOptions, PricingOptions
from moe_rl.study.known_steps import UPDATE, KnownMemory, OwnStep, PricedRun, posterior_of, surprises
from moe_rl.study.options import SimulationOptions
from moe_rl.study.plan_and_price import make_plans, pricing_of
from moe_rl.study.scenario import Progress, Scenario, state_scenario
from moe_rl.study.traces import TraceLike

logger = logging.getLogger(__name__)

# Slots that can be chosen, in this order.
KINDS = {"resident_slots": "resident slot", "cross_node_slots": "cross-node slot"}
LEAST_GAIN = 0.005  # Share of the step that a slot has to save: with other seeds a step differs by .003.
# Share of a GPU's memory that stays free: above the largest error of forecast peaks of whole runs (docs/simulator.md).
SPARE_MEMORY = 0.044


def open_scenario(
    trace: TraceLike, options: SimulationOptions, progress: Progress, *, measured: SimulationOptions | None = None
) -> Scenario:
    """Read the trace, resolve model and cluster, and state the planning problem, with slots chosen.

    `measured`: options of the setting that `--known-step` timed where it names none; None: the same `options`.
    """
    scenario = state_scenario(trace, options, progress)
    if options.pricing.known_step or options.pricing.known_memory is not None:
        if measured is None:
            measured_scenario = scenario
        else:
            measured_scenario = state_scenario(trace, measured, progress)
        scenario = _with_measured(scenario, measured_scenario, progress)
    for name in KINDS:
        if options.value_of(name) == AUTO:
            scenario = _with_slots_chosen(scenario, name, progress)
    return scenario


def _with_measured(scenario: Scenario, measured_scenario: Scenario, progress: Progress) -> Scenario:
    """Return the scenario under the constants that known steps of `measured_scenario`, or of others, show."""
    options = scenario.options
    options.pricing.require_times("--known-step gives a time")
    progress("pricing known steps", 0, 1)
    plans = make_plans(measured_scenario, ["static"], lambda *_: None)
    simulate, _ = pricing_of(measured_scenario, plans)
    setting = measured_scenario.training_step.setting
    static = simulate(setting).static
    memory = KnownMemory.of(options.pricing.known_memory, static.memory.peak_bytes / GIB)
    if not options.pricing.known_step:
        return replace(scenario, memory=memory)

    def price(hardware: HardwareSpec, costs: SoftwareCosts) -> Floats:
        return np.array([simulate(replace(setting, software=costs), hardware).static.step_time_s])

    squares = measured_scenario.training_step.lengths.astype(np.float64) ** 2
    effective = float(squares.sum()) / max(1.0, float(measured_scenario.training_step.lengths.sum()))
    gpus = measured_scenario.topology.num_ranks * measured_scenario.options.parallel.pipeline_model_parallel_size
    flops = static.tokens * flops_per_token(measured_scenario.model.spec, effective)
    run = PricedRun(price=price, tokens=float(static.tokens), gpus=gpus, flops=flops)
    posterior, left = posterior_of(
        options, scenario.topology.hardware, {UPDATE: run}, measured_scenario.training_step.lengths
    )
    logger.warning("%s", posterior.sentence())
    for sentence in surprises(posterior):
        logger.warning("%s", sentence)
    # A point of a sweep has another setting than the one that was timed.
    at_own = scenario.options == measured_scenario.options
    return replace(scenario.with_posterior(posterior, left[UPDATE] if at_own else OwnStep()), memory=memory)


def _with_slots_chosen(scenario: Scenario, name: str, progress: Progress) -> Scenario:
    """Return the scenario with the slots that are best for the policy that fills them, and say why so many."""
    spec, hardware, noun = scenario.model.spec, scenario.topology.hardware, KINDS[name]
    options, room_bytes = scenario.options, (1 - SPARE_MEMORY) * hardware.hbm_gib * GIB
    policy = deciding_policy(options.planning, options.pricing, spec, name)
    most = spec.num_experts - scenario.topology.experts_per_rank(spec.num_experts)

    def tried(slots: int) -> tuple[Scenario, PolicyResult]:
        progress(f"{policy} with {counted(slots, noun, f'{noun}s')}", slots, most)
        trial = scenario.with_slots(name, slots)
        simulate, _ = pricing_of(trial, make_plans(trial, [policy], lambda *_: None))
        return trial, simulate(scenario.training_step.setting).policies[policy]

    def lacking(result: PolicyResult) -> str:
        peak = result.memory.peak_bytes
        if peak <= room_bytes:
            return ""
        return f"{peak / GIB:.1f} of {hardware.hbm_gib:g} GiB"

    # One after the other, since the first slots save most: the search ends where the next saves too little.
    best_trial, best = tried(0)
    why = "every rank then has every expert"
    if lacking(best):
        most, why = 0, f"without any, the predicted peak is {lacking(best)}"
    for slots in range(1, most + 1):
        trial, seconds = tried(slots)
        saved = 0.0
        if best.step_time_s:
            saved = 1 - seconds.step_time_s / best.step_time_s
        if lacking(seconds):
            why = f"with {slots}, the predicted peak is {lacking(seconds)}, of which {SPARE_MEMORY:.1%} must stay free"
        elif saved < LEAST_GAIN:
            gain = "no shorter"
            if saved > 0:
                gain = f"{saved:.1%} shorter, but a slot must save at least {LEAST_GAIN:.1%}"
            why = f"with {slots}, the step is {gain}"
        else:
            best_trial, best = trial, seconds
            continue
        break
    slots_text = counted(getattr(best_trial.problem, name), noun, f"{noun}s")
    logger.warning("%s per rank, chosen for the policy %s: %s.", slots_text, policy, why)
    return best_trial


def deciding_policy(planning: PlanningOptions, pricing: PricingOptions, model: MoeModelSpec, name: str) -> str:
    """Return the policy whose step decides: one that fills such slots, or resident ones with copies that it holds.

    Raises where there is none, and where its time or memory would not be known.
    """
    flag, resident = f"--{name.replace('_', '-')}={AUTO}", name == "resident_slots"
    pricing.require_times(f"{flag} looks for the shortest step")
    require(
        not model.assumed_fields,
        f"{flag} needs a memory prediction, but moe_rl had to assume the model's {', '.join(model.assumed_fields)}. "
        "Set --model, or give a number of slots.",
    )
    choosing, holding = [], []
    for policy in planning.policy:
        levers = POLICIES[policy].levers
        if levers.choose_residents if resident else levers.cross_node:
            choosing.append(policy)
        if resident and POLICIES[policy].fills_slots_for_a_step:
            holding.append(policy)
    candidates = choosing or holding
    does = "makes replicas across nodes"
    if resident:
        does = "makes replicas for a whole step"
    require(
        len(candidates) > 0,
        f"{flag} has no effect, because no policy in --policy ({', '.join(planning.policy)}) {does}. Add the policy "
        "moe-rl.",
    )
    # moe-rl-unpacked decides only where moe-rl itself is not asked for.
    return min(candidates, key=lambda policy: POLICIES[policy].variant_of is not None)
