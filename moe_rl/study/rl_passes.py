"""What balancing an update brings to the whole step of RL, from a trace or from lengths alone: `moe-rl rl-step`."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.config import load_cluster, load_software
from moe_rl.core.cost import Floats
from moe_rl.core.errors import require
from moe_rl.core.mappings import subset
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.plan import Plan
from moe_rl.core.software import TUNED, TYPICAL, SoftwareCosts
from moe_rl.core.topology import HardwareSpec
from moe_rl.option_groups import words_of
from moe_rl.profiling.posterior import Posterior
from moe_rl.replay.traces import MEAN_PROMPT_TOKENS
from moe_rl.report.faces import SimulationReport
from moe_rl.report.units import GIB, counted
from moe_rl.report.whole_step import MemoryMisfit, Remedy, RlGain
from moe_rl.simulators.memory import dense_params
from moe_rl.simulators.movement import STEP_PARTS
from moe_rl.simulators.result import PolicyResult, SimulationResult
from moe_rl.simulators.rl_step import RlStep, RlStepSetting, rl_step, sync_price, sync_setting
from moe_rl.simulators.rl_update import trainer_seconds
from moe_rl.simulators.setting import StepSetting
from moe_rl.simulators.weight_sync import PART_SOURCES, TRANSPORTS, price_sync
from moe_rl.study.conditions import chosen_by
from moe_rl.study.expert_parts import model_in_parts, model_of_whole_experts
from moe_rl.study.intervals import GAIN_SPREAD, LEAST_SPREAD, around
from moe_rl.study.known_steps import RL_STEP, UPDATE, OwnStep, PricedRun, posterior_of, priors_of, surprises
from moe_rl.study.lengths import FULL_SIZE_TOKENS, drawn_lengths, needed
from moe_rl.study.options import SCALED, merge_options
from moe_rl.study.plan_and_price import beside_static, make_plans, predict, pricing_of
from moe_rl.study.population import (
    FITTED_RL_CLUSTERS,
    check_population,
    population_cautions,
    population_notes,
    sink_cautions,
)
from moe_rl.study.ranks import checked_gpus_of_group
from moe_rl.study.remedies import Fitting, mildest_that_fits
from moe_rl.study.resident_slots import open_scenario
from moe_rl.study.rl_options import RL, RlStepOptions, RolloutOptions
from moe_rl.study.scenario import Progress, Scenario, named_model
from moe_rl.study.shown import SHOWN
from moe_rl.study.traces import TraceLike

FORCED = "forced_balance"
# What the bounds of a run are given for that nobody has measured: an even one, and those of the recipes' table.
GUESSED_IMBALANCES = (1.2, 1.5, 2.5)
# A planned sync is worth a word from two per cent of a step on.
WORTH_SAYING = 1.02
logger = logging.getLogger(__name__)

# Parts of an update that every mini-batch has again.
ONCE_PER_UPDATE = (*STEP_PARTS, "pipeline_bubble")


# (cluster, software) -> seconds by policy: one forward pass and one update.
PassSeconds = Callable[[HardwareSpec, SoftwareCosts], dict[str, tuple[float, float]]]
# Standard deviation of the logarithm of a step of RL that no constant explains: published steps of models that were
# held out are 12.6 % off on average, others' 18 %.
RL_LEFT_OPEN = 0.18


@dataclass(frozen=True, slots=True, kw_only=True)
class RlIntervals:
    """Both ends of the 80 % intervals of a step of RL."""

    step_time_s: list[float]
    speedup: list[float]
    """Of the step over that under static placement; what both share cancels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPasses:
    """The samples of a step, and what the trainer's passes over them take under every policy."""

    model: MoeModelSpec
    hardware: HardwareSpec
    train_gpus: int
    lengths: NDArray[np.int64]
    """[N] tokens of the samples, prompts included."""
    seconds: Mapping[str, tuple[float, float]]
    """By policy, static first: one forward pass and one update."""
    costs: SoftwareCosts
    posterior: Posterior
    seconds_under: PassSeconds
    """`seconds` under other constants."""
    mean_prompt_tokens: float = 0.0
    """Of the recorded samples, if the trace knows it; else 0."""
    own_step: OwnStep = field(default_factory=OwnStep)
    """What a known step of RL says of this very step beside the constants."""

    def under(self, hardware: HardwareSpec, costs: SoftwareCosts) -> "TrainingPasses":
        """Return the passes under other constants."""
        return replace(self, hardware=hardware, costs=costs, seconds=self.seconds_under(hardware, costs))

    def with_known_step(self, options: RlStepOptions) -> "TrainingPasses":
        """Return the passes under the constants that `--known-step` shows; a number is the whole step of RL."""
        if not options.pricing.known_step:
            return self

        def step(hardware: HardwareSpec, costs: SoftwareCosts) -> Floats:
            return np.array([self.under(hardware, costs).steps(options)["static"].step_time_s])

        def update(hardware: HardwareSpec, costs: SoftwareCosts) -> Floats:
            return np.array([self.seconds_under(hardware, costs)["static"][1]])

        tokens = float(self.lengths.sum())
        timed = {
            RL_STEP: PricedRun(price=step, tokens=tokens, gpus=self.train_gpus),
            UPDATE: PricedRun(price=update, tokens=tokens, gpus=self.train_gpus),
        }
        posterior, left = posterior_of(options, load_cluster(options.pricing.cluster), timed, self.lengths)
        for sentence in (posterior.sentence(), *surprises(posterior)):
            logger.warning("%s", sentence)
        factor, before = left[UPDATE].factor, self.seconds_under

        def timed_passes(hardware: HardwareSpec, costs: SoftwareCosts) -> dict[str, tuple[float, float]]:
            seconds = before(hardware, costs).items()
            return {name: (factor * forward_s, factor * update_s) for name, (forward_s, update_s) in seconds}

        passes = replace(self, posterior=posterior, own_step=left[RL_STEP], seconds_under=timed_passes)
        return passes.under(*posterior.likeliest.constants)

    def intervals(self, options: RlStepOptions) -> dict[str, RlIntervals]:
        """Return the 80 % intervals of every policy's step and of its speed-up over static placement."""
        names = list(self.seconds)

        def price(hardware: HardwareSpec, costs: SoftwareCosts) -> Floats:
            steps = self.under(hardware, costs).steps(options)
            return np.array([steps[name].step_time_s for name in names])

        figures, priced_steps = self.posterior.figures(price), self.steps(options)
        if self.own_step.left_open is not None:
            left_open = self.own_step.left_open
        else:
            left_open = RL_LEFT_OPEN
        static, intervals = names.index("static"), {}
        for index, name in enumerate(names):
            gain = priced_steps["static"].step_time_s / priced_steps[name].step_time_s
            ratio = figures.ratio(static, index, unexplained=max(GAIN_SPREAD * abs(float(np.log(gain))), LEAST_SPREAD))
            step = figures.interval(
                index, constants_share=0.0 if self.own_step.left_open is not None else 1.0, unexplained=left_open
            )
            speedup = [1.0, 1.0]
            if name != "static":
                speedup = around(gain, ratio)
            intervals[name] = RlIntervals(step_time_s=around(priced_steps[name].step_time_s, step), speedup=speedup)
        return intervals

    def setting(self, options: RlStepOptions) -> RlStepSetting:
        """Return the simulator's setting, with the size of rollout engines that is chosen if no option states one."""
        size = options.rollout.rollout_engine_size
        if size is None:
            # A power of two, so the largest divisor of the GPUs up to it: 6 GPUs get engines of 2 instead of 4.
            size = math.gcd(_engine_size(self.model, self.hardware), options.rollout.rollout_gpus or self.train_gpus)
        return options.rl_setting(self.train_gpus, self.costs.framework_share, engine_size=size)

    def steps(self, options: RlStepOptions) -> dict[str, RlStep]:
        """Return the step of RL under every policy; passes that the run does not balance are static's for all."""
        setting = self.setting(options)
        response_lengths = np.maximum(self.lengths - options.rollout.prompt_tokens, 1)
        step_by_policy = {}
        for name, (forward_s, update_s) in self.seconds.items():
            step = rl_step(
                self.model,
                self.hardware,
                setting,
                response_lengths=response_lengths,
                prompt_tokens=options.rollout.prompt_tokens,
                forward_s=forward_s,
                update_s=update_s,
                static_s=self.seconds["static"],
            )
            parts_s = {part: self.own_step.factor * seconds for part, seconds in step.parts_s.items()}
            step_by_policy[name] = replace(step, parts_s=parts_s)
        return step_by_policy


def training_passes(trace: TraceLike | None, options: RlStepOptions, progress: Progress) -> TrainingPasses:
    """Price the trainer's passes on the step of a trace, or without one on lengths that the options describe."""
    options.pricing.require_times("an RL step is computed from times")
    check_population(options.memory)
    require(
        not options.passes.forward_only and not options.passes.log_prob_passes,
        "--forward-only and --log-prob-passes describe a single pass, but an RL step consists of several passes.",
    )
    if trace is None:
        passes = _of_lengths(options)
    else:
        passes = _of_trace(trace, options, progress)
    return passes.with_known_step(options)


def _of_trace(trace: TraceLike, options: RlStepOptions, progress: Progress) -> TrainingPasses:
    for name in ("num_samples", "mean_length", "max_length"):
        value, flag = options.value_of(name), SHOWN[name].flags[0]
        # `--json out.json` makes out.json the trace, since --json takes no value here: name what was taken for one.
        require(value is None, f"{flag} {value} only applies without a trace: leave out {flag} or the trace ({trace}).")
    if options.trainer.train_gpus is not None:
        options = options.with_words(gpus=_trainer_gpus(options))
    # A known step is one of RL here, and of no scenario.
    scenario = open_scenario(trace, options.with_words(known_step=[], known_step_config=[]), progress)
    require(
        scenario.options.sequences.batch != SCALED,
        f"an RL step cannot use --batch {SCALED} (implied by --tokens-per-rank with --ep-group-tokens), which "
        "scales expert loads: an RL step needs the samples of the trace.",
    )
    plans = make_plans(scenario, beside_static(scenario.options.planning.policy), progress)
    progress("simulating", 0, 1)
    passes = _passes(scenario, plans, mini_batches=options.trainer.mini_batches)

    def of_plans(hardware: HardwareSpec, costs: SoftwareCosts) -> dict[str, tuple[float, float]]:
        seconds = passes.seconds_under(hardware, costs)
        return subset(seconds, plans)

    return replace(passes, seconds=subset(passes.seconds, plans), seconds_under=of_plans)


def _passes(
    scenario: Scenario, plans: Mapping[str, Plan], *, mini_batches: int, setting: StepSetting | None = None
) -> TrainingPasses:
    """Price a forward pass and an update under every plan and under forced balance, in a setting (the scenario's)."""
    simulate, _ = pricing_of(scenario, plans)
    pass_setting = setting or scenario.training_step.setting

    def seconds_under(hardware: HardwareSpec, costs: SoftwareCosts) -> dict[str, tuple[float, float]]:
        setting = replace(pass_setting, software=costs)
        update, forward = simulate(setting, hardware), simulate(replace(setting, forward_only=True), hardware)
        seconds = {}
        for name, result in update.policies.items():
            forward_s = forward.policies[name].step_time_s
            seconds[name] = (forward_s, _of_mini_batches(result, mini_batches))
        return {**seconds, FORCED: _forced_seconds(forward, update, mini_batches)}

    hardware = scenario.topology.hardware
    parts = scenario.options.parallel.expert_tensor_parallel_size or 1
    return TrainingPasses(
        model=model_of_whole_experts(scenario.model.spec, parts),
        hardware=hardware,
        train_gpus=scenario.topology.num_ranks * pass_setting.pipeline_model_parallel_size,
        lengths=scenario.batch.lengths,
        seconds=seconds_under(hardware, pass_setting.software),
        costs=pass_setting.software,
        posterior=scenario.posterior,
        seconds_under=seconds_under,
        mean_prompt_tokens=float(scenario.source.origin.get(MEAN_PROMPT_TOKENS, 0.0)),
    )


def _forced_seconds(forward: SimulationResult, update: SimulationResult, mini_batches: int) -> tuple[float, float]:
    return forward.forced_balance.step_time_s, _of_mini_batches(update.forced_balance, mini_batches)


def _of_mini_batches(result: PolicyResult, mini_batches: int) -> float:
    """Return the seconds of an update that is cut into mini-batches, each with an optimizer step of its own."""
    breakdown = result.prediction.breakdown_s or {}
    once_per_update_s = sum(breakdown.get(part, 0.0) for part in ONCE_PER_UPDATE)
    return result.step_time_s + (mini_batches - 1) * once_per_update_s


def predict_with_rl(scenario: Scenario, progress: Progress, **options: Any) -> SimulationReport:
    """Return `predict`'s report with what is said of the whole run: whether it fits, and a step of RL.

    What the options do not say of the step is `RlStepOptions`' default; the report's notes say so.
    """
    report, setting = predict(scenario, progress, **options), scenario.training_step.setting
    if not report.timed:
        return report
    policies = dict.fromkeys(row.policy for row in (report.baseline, report.runner_up, report.best) if row is not None)
    plans = subset(report.plans, policies)
    report = _with_misfit(scenario, plans, report)
    if setting.forward_only or setting.log_prob_passes or report.best is report.baseline:
        return report
    if report.scaled:
        # The rollout would generate the recorded samples, and the update train on many times their tokens.
        note = f"there is no RL step, because {SCALED} loads cannot be assigned to samples. See --batch."
        return replace(report, notes=(note, *report.notes))
    passes = _passes(scenario, plans, mini_batches=1)
    engine = _engine_size(passes.model, passes.hardware)
    if passes.train_gpus % engine:
        note = (
            f"there is no RL step, because {passes.train_gpus} GPUs cannot be divided into rollout engines of {engine} "
            "GPUs."
        )
        return replace(report, notes=(note, *report.notes))
    gain = _gain(passes, report, engine)
    note = (
        f"the RL step spends {gain.shares['rollout']:.0%} on the rollout, whose time is predicted for engines of "
        f"{counted(engine, 'GPU', 'GPUs')}. Of the trainer's passes, only the update is balanced. Give your own rates, "
        "lengths and passes to moe-rl rl-step."
    )
    return replace(report, rl=gain, notes=(note, *report.notes))


def _gain(passes: TrainingPasses, report: SimulationReport, engine_size: int) -> RlGain:
    """Return what the report's best policy brings to a step of RL, with the interval of its update's speed-up."""
    options, best = RlStepOptions(rollout=RolloutOptions(rollout_engine_size=engine_size)), report.best.policy
    steps = passes.steps(options)

    def speedup(update_speedup: float) -> float:
        """Return that of the step where the update's is another: forward passes follow it."""
        forward_s, update_s = passes.seconds[best]
        factor = report.speedups[0] / update_speedup
        seconds = {**passes.seconds, best: (factor * forward_s, factor * update_s)}
        other = replace(passes, seconds=seconds).steps(options)
        return steps["static"].step_time_s / other[best].step_time_s

    itself = steps["static"].step_time_s / steps[best].step_time_s
    ends = [speedup(end) for end in report.speedups if end > 0] or [itself]
    return RlGain(
        speedup=itself, low=min(ends), high=max(ends), gpus=passes.train_gpus, steps=steps,
    )  # fmt: skip


def _with_misfit(scenario: Scenario, plans: Mapping[str, Plan], report: SimulationReport) -> SimulationReport:
    """Return the report with the mildest option that makes its best policy fit, where that does not."""
    best, forecast = report.best, report.memory[report.best.policy]
    if forecast.fits:
        return report
    simulate, _ = pricing_of(scenario, plans)
    fitting = mildest_that_fits(scenario.training_step.setting, best.policy, scenario.model.spec.num_layers, simulate)
    if fitting is None:
        remedy = None
    else:
        remedy = _remedy(scenario, plans, report, fitting)
    hbm_gib = scenario.topology.hardware.hbm_gib
    return replace(report, misfit=MemoryMisfit(peak_gib=forecast.peak_bytes / GIB, hbm_gib=hbm_gib, remedy=remedy))


def _remedy(scenario: Scenario, plans: Mapping[str, Plan], report: SimulationReport, fitting: Fitting) -> Remedy:
    """Return the step of a fitting trial, and the step of RL where the report has one."""
    trial, best = fitting.trial, fitting.result.policies[report.best.policy]
    rl_speedup, setting = None, trial.setting
    if not (setting.forward_only or setting.log_prob_passes or report.scaled):
        passes = _passes(scenario, plans, mini_batches=1, setting=setting)
        engine = _engine_size(passes.model, passes.hardware)
        if passes.train_gpus % engine == 0:
            steps = passes.steps(RlStepOptions(rollout=RolloutOptions(rollout_engine_size=engine)))
            rl_speedup = steps["static"].step_time_s / steps[report.best.policy].step_time_s
    return Remedy(
        options=trial.options, peak_gib=fitting.peak_gib, gpu_factor=trial.gpu_factor, rl_speedup=rl_speedup,
        slower=best.step_time_s / (report.best.step_time_s or best.step_time_s) - 1.0,
        speedup=best.prediction.speedup_vs_static or 1.0,
    )  # fmt: skip


def _engine_size(model: MoeModelSpec, hardware: HardwareSpec) -> int:
    """Return the GPUs of the smallest rollout engine whose weights take at most half of its memory."""
    # BF16 weights; the other half is for keys and values, without which an engine decodes few samples at once.
    size = 2 * (dense_params(model) + model.num_moe_layers * model.num_experts * model.expert_params)
    return 1 << max(0, int(np.ceil(np.log2(2 * size / (hardware.hbm_gib * GIB)))))


def _trainer_gpus(options: RlStepOptions) -> int:
    """Return the number of trainer GPUs, which has two names; raise where none is given, or two numbers are."""
    gpus = needed(options, "train_gpus" if options.parallel.gpus is None else "gpus")
    require(
        options.trainer.train_gpus in (None, gpus),
        f"--train-gpus {options.trainer.train_gpus} and --gpus {gpus} differ: give only one.",
    )
    if options.parallel.expert_tensor_parallel_size not in (None, 1):
        checked_gpus_of_group(options.parallel, gpus, "--train-gpus" if options.parallel.gpus is None else "--gpus")
    return gpus


def _of_lengths(options: RlStepOptions) -> TrainingPasses:
    gpus = _trainer_gpus(options)
    # As a simulation of a trace cuts it where nothing is said.
    slices = options.parallel.tensor_model_parallel_size * options.parallel.context_parallel_size
    budget = options.sequences.micro_batch_tokens or FULL_SIZE_TOKENS * slices
    lengths = drawn_lengths(options)
    model, hardware = named_model(options, "an RL step"), load_cluster(options.pricing.cluster)
    setting = options.step_setting()
    parts = options.parallel.expert_tensor_parallel_size or 1
    model_of_parts = model_in_parts(model, parts)

    def seconds_under(hardware: HardwareSpec, costs: SoftwareCosts) -> dict[str, tuple[float, float]]:
        priced = partial(
            trainer_seconds, model_of_parts, hardware, replace(setting, software=costs), lengths,
            train_gpus=gpus, ep_size=options.parallel.expert_model_parallel_size * parts, micro_batch_tokens=budget,
            mini_batches=options.trainer.mini_batches,
        )  # fmt: skip
        return {"static": priced(imbalance=options.trainer.imbalance), "forced_balance": priced()}

    return TrainingPasses(
        model=model,
        hardware=hardware,
        train_gpus=gpus,
        lengths=lengths,
        seconds=seconds_under(hardware, setting.software),
        costs=setting.software,
        posterior=Posterior.of(priors_of(options, hardware, steps_known=False)),
        seconds_under=seconds_under,
    )


def _imbalance_note(options: RlStepOptions) -> str:
    """Say what figures without a trace rest on; if nobody stated the imbalance, with the bounds of several guesses."""
    if options.states("imbalance"):
        return (
            f"there is no trace: with static placement, the busiest rank gets {options.trainer.imbalance:g} times the "
            "mean number of token-expert pairs (--imbalance). forced_balance shows the most that balancing can gain."
        )
    bounds = []
    for imbalance in GUESSED_IMBALANCES:
        guess = options.with_words(imbalance=imbalance)
        steps = RlPoint.of(_of_lengths(guess).with_known_step(guess), guess).steps
        speedup = steps["static"].step_time_s / steps[FORCED].step_time_s
        bounds.append(f"{speedup:.3f}x as fast with {imbalance:g}")
    return (
        f"there is no trace, so the imbalance (load of the busiest rank over the mean) is a guess, "
        f"{options.trainer.imbalance:g}. At most, the RL step is {', '.join(bounds)}. MOE_RL=observe measures the "
        "imbalance of a run: set --imbalance."
    )


def rl_notes(options: RlStepOptions, passes: TrainingPasses, *, of_lengths: bool) -> list[str]:
    """Return what a reader must know beside the numbers."""
    software = passes.posterior.likeliest.prior.software.name
    sentences = [_rl_fit_note(passes), _rl_software_note(options, passes, software)]
    sentences += population_notes(
        passes.model, passes.hardware, software, what="the prediction of the trainer's passes"
    )
    sentences += population_cautions(options.parallel, options.passes.seq_length, packed=True)
    sentences += sink_cautions(passes.model, packed_sequences=options.kernels.packed_sequences)
    sentences += filter(None, [load_cluster(options.pricing.cluster).assumption()])
    sentences += _unbalanced_notes(passes.setting(options))
    if of_lengths:
        sentences.append(_imbalance_note(options))
    if options.rollout.rollout_engine_size is None:
        size = passes.setting(options).engine_size
        sentences.append(
            f"each rollout engine is taken to have {counted(size, 'GPU', 'GPUs')}: set --rollout-engine-size."
        )
    if options.rollout.rollout_tokens_per_s is None:
        sentences.append(
            "the time of the rollout is predicted. If you have measured its rate, set --rollout-tokens-per-s."
        )
    elif options.rollout.rollout_enforce_eager:
        sentences.append("--rollout-enforce-eager has no effect if the rollout's rate is measured.")
    if options.rollout.prompt_tokens == 0:
        recorded = ""
        if passes.mean_prompt_tokens:
            recorded = f" {passes.mean_prompt_tokens:.0f}, the mean of the recorded prompts"
        sentences.append(f"prompts are assumed to be empty: set --prompt-tokens{recorded}.")
    return sentences


def _unbalanced_notes(setting: RlStepSetting) -> list[str]:
    """Return which of the trainer's passes are priced without balancing, and why."""
    passes = []
    if setting.balanced_log_prob_passes < setting.log_prob_passes:
        passes.append("old-log-prob pass")
    if setting.reference_passes:
        passes.append("reference pass")
    if not setting.balances_update:
        passes.append("update")
    if not passes:
        return []
    sentence = (
        f"not balanced, because its routes are not known before it runs (--routes-from {setting.routes_from}): the "
        f"{' and the '.join(passes)}."
    )
    if setting.routes_from == "previous_pass":
        sentence += " No gain is credited to plans from the previous pass's mean loads."
    elif setting.routes_from == "log_prob" and passes != ["reference pass"]:
        sentence += " If the trainer replays the rollout's routes (R3), set --routes-from rollout."
    return [sentence]


def sync_notes(passes: TrainingPasses, options: RlStepOptions) -> list[str]:
    """Return where the seconds of the weight sync come from, and what a planned one would bring to the step."""
    setting = passes.setting(options)
    lines = [_sync_lines(passes, setting)] if setting.weight_sync_s is None else []
    if options.rollout.rollout_gpus is None:
        return lines if setting.weight_sync_transport else []
    step = passes.steps(options)["static"]
    seconds = step.parts_s["weight_sync"]
    planned = price_sync("planned", sync_setting(passes.model, setting), passes.hardware)
    share = seconds / step.step_time_s
    after = step.step_time_s - seconds + min(seconds, planned.seconds)
    head = f"the weight sync takes {seconds:.2g} s, {share:.0%} of the step. A planned sync (moe_rl.sync) would take "
    head += f"{planned.seconds:.2g} s (the lower bound is {planned.bound_s:.2g} s), "
    if step.step_time_s / after < WORTH_SAYING:
        return [*lines, f"{head}which gains nothing."]
    return [
        *lines,
        f"{head}and the RL step would be {step.step_time_s / after:.2f}x as fast (not yet measured on a GPU).",
    ]


def _sync_lines(passes: TrainingPasses, setting: RlStepSetting) -> str:
    """Return the seconds of every part of a named transport with their sources; what the forecast is without a name."""
    if not setting.weight_sync_transport:
        return (
            "the constants of the weight sync are fitted to whole steps of NeMo-RL 0.5 and 0.6, where one trainer "
            "sends over one NIC. Set your own transport with --weight-sync-transport (newer NeMo-RL uses "
            "packed-broadcast)."
        )
    price = sync_price(passes.model, passes.hardware, setting)
    parts = [f"{name} {seconds:.2g} s ({PART_SOURCES[name]})" for name, seconds in price.parts_s.items() if seconds]
    alone = TRANSPORTS[setting.weight_sync_transport].num_fitted == 1
    caution = (
        " Its constant comes from one published sync, so only the order of magnitude is reliable." if alone else ""
    )
    return f"the weight sync by {setting.weight_sync_transport}: {'; '.join(parts)}.{caution}"


def _rl_fit_note(passes: TrainingPasses) -> str:
    """Say what the parts of a step of RL were fitted on, and whether this one is of that kind."""
    sentence = (
        "simulated: rollout, weight sync and framework have five constants of their own, fitted to 14 published step "
        "times of NeMo-RL on H100 (DeepSeek-V3, Qwen3-30B, Qwen3-235B). The mean error is 7 %, and 13 % on a model "
        "that was left out of the fit"
    )
    elsewhere = passes.hardware.name not in FITTED_RL_CLUSTERS
    if elsewhere:
        return f"{sentence}. None of these runs used {passes.hardware.name}."
    return f"{sentence}."


def _rl_software_note(options: RlStepOptions, passes: TrainingPasses, software: str) -> str:
    """Say which software was priced, and what the other kind would give."""
    if options.pricing.known_step:
        return f"software: {software}, with constants fitted to the known steps."
    other = load_software(TYPICAL if software == TUNED else TUNED)
    priced, own = passes.under(passes.hardware, other.costs).steps(options), passes.steps(options)
    reason = chosen_by(options.pricing, options.kernels)
    other_s, own_s = priced["static"].step_time_s, own["static"].step_time_s
    return (
        f"software: {software} ({reason}). With --software {other.name}, a step under static placement takes "
        f"{other_s:.3g} s instead of {own_s:.3g} s. Both are fitted to the same published RL steps, so the "
        "difference does not show which software is faster."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RlPoint:
    """The step of RL under every policy, at one value of a swept option."""

    steps: Mapping[str, RlStep]
    intervals: Mapping[str, RlIntervals]
    balances_update: bool
    """Whether the update's routes are known before it runs."""

    @classmethod
    def of(cls, passes: TrainingPasses, options: RlStepOptions) -> "RlPoint":
        """Return the steps that these options make of the passes."""
        setting = passes.setting(options)
        return cls(
            steps=passes.steps(options), intervals=passes.intervals(options), balances_update=setting.balances_update
        )


def swept_steps(passes: TrainingPasses, options: RlStepOptions, sweep: str) -> dict[str, RlPoint]:
    """Return steps by "name=value" for every value of one option of the RL step; without a sweep, by ""."""
    if not sweep:
        return {"": RlPoint.of(passes, options)}
    name, _, values = sweep.partition("=")
    field = name.lstrip("-").replace("-", "_")
    swept = field in words_of(RlStepOptions) and SHOWN[field].panel == RL
    require(
        bool(values) and swept,
        f"--sweep {sweep!r} must have the form NAME=VALUE,VALUE, where NAME is an option of the RL step.",
    )
    given = options.stated_words()
    # Every value is checked before any is priced.
    points = {f"{field}={value}": merge_options(RlStepOptions, {**given, field: value}) for value in values.split(",")}
    return {name: RlPoint.of(passes, point) for name, point in points.items()}


def as_json(steps: Mapping[str, RlStep], intervals: Mapping[str, RlIntervals]) -> dict[str, object]:
    """Return the figures by policy, with what balancing brings to the step and to the update alone."""
    static = steps["static"]
    return {
        name: {
            "parts_s": dict(step.parts_s),
            "step_time_s": step.step_time_s,
            "speedup_vs_static": static.step_time_s / step.step_time_s,
            "update_speedup_vs_static": static.parts_s["update"] / step.parts_s["update"],
            "step_time_interval_s": intervals[name].step_time_s,
            "speedup_interval": intervals[name].speedup,
        }
        for name, step in steps.items()
    }
