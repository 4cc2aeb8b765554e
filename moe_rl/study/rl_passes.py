"""What balancing an update brings to the whole step of RL, from a trace or from lengths alone: `moe-rl rl-step`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_rl.config import load_cluster
from moe_rl.core.errors import require
from moe_rl.core.model import MoeModelSpec
from moe_rl.core.plan import Plan
from moe_rl.core.topology import HardwareSpec
from moe_rl.report.faces import SimulationReport
from moe_rl.report.units import GIB
from moe_rl.simulators.memory import dense_params
from moe_rl.simulators.movement import STEP_PARTS
from moe_rl.simulators.rl_step import RlStep, rl_step
from moe_rl.simulators.rl_update import trainer_seconds
from moe_rl.study.options import SCALED, SHOWN, merge_options
from moe_rl.study.plan_and_price import beside_static, make_plans, predict, pricing_of
from moe_rl.study.resident_slots import open_scenario
from moe_rl.study.rl_options import RL, LengthOptions, RlStepOptions
from moe_rl.study.scenario import Progress, Scenario, named_model
from moe_rl.study.traces import TraceLike

# Parts of an update that every mini-batch has again.
ONCE_PER_UPDATE = (*STEP_PARTS, "pipeline_bubble")


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

    def steps(self, options: RlStepOptions) -> dict[str, RlStep]:
        """Return the step of RL under every policy."""
        setting = options.rl_setting(self.train_gpus)
        return {
            name: rl_step(
                self.model,
                self.hardware,
                setting,
                response_lengths=np.maximum(self.lengths - options.prompt_tokens, 1),
                prompt_tokens=options.prompt_tokens,
                forward_s=forward_s,
                update_s=update_s,
            )
            for name, (forward_s, update_s) in self.seconds.items()
        }


def training_passes(trace: TraceLike | None, options: RlStepOptions, progress: Progress) -> TrainingPasses:
    """Price the trainer's passes on the step of a trace, or without one on lengths that the options describe."""
    options.require_times("a step of RL is time")
    require(
        not options.forward_only and not options.log_prob_passes,
        "--forward-only and --log-prob-passes describe a single pass: a step of RL has its own passes.",
    )
    return _of_lengths(options) if trace is None else _of_trace(trace, options, progress)


def _of_trace(trace: TraceLike, options: RlStepOptions, progress: Progress) -> TrainingPasses:
    for name in ("num_samples", "mean_length", "max_length", "train_gpus"):
        given, flag = getattr(options, name), SHOWN[name].flags[0]
        require(given is None, f"{flag} {given} describes a step without a trace: leave it out.")
    scenario = open_scenario(trace, options, progress)
    require(
        scenario.options.batch != SCALED,
        f"--batch {SCALED} (--tokens-per-rank with --ep-group-tokens) scales loads: a step of RL has the samples of "
        "the trace.",
    )
    plans = make_plans(scenario, beside_static(options.policy), progress)
    progress("simulating", 0, 1)
    return _passes(scenario, plans, mini_batches=options.mini_batches)


def _passes(scenario: Scenario, plans: Mapping[str, Plan], *, mini_batches: int) -> TrainingPasses:
    """Price a forward pass and an update under every plan."""
    simulate, _ = pricing_of(scenario, plans)
    pass_setting = scenario.training_step.setting
    update, forward = simulate(pass_setting), simulate(replace(pass_setting, forward_only=True))
    seconds = {}
    for name, result in update.policies.items():
        breakdown = result.prediction.breakdown_s or {}
        again = sum(breakdown.get(part, 0.0) for part in ONCE_PER_UPDATE)
        whole = result.step_time_s + (mini_batches - 1) * again
        seconds[name] = (forward.policies[name].step_time_s, whole)
    return TrainingPasses(
        model=scenario.model.spec,
        hardware=scenario.topology.hardware,
        train_gpus=scenario.topology.num_ranks * scenario.options.pipeline_model_parallel_size,
        lengths=scenario.batch.lengths,
        seconds=seconds,
    )


def predict_with_rl(scenario: Scenario, progress: Progress, **asked: Any) -> SimulationReport:
    """Return `predict`'s report and, of an update with times, what its best policy brings to a whole step of RL.

    What the options do not say of the step is `RlStepOptions`' default; the report's notes say so.
    """
    report, setting = predict(scenario, progress, **asked), scenario.training_step.setting
    other_pass = setting.forward_only or setting.log_prob_passes
    if not report.timed or other_pass or report.best is report.baseline:
        return report
    if report.scaled:
        # The rollout would generate the recorded samples, and the update train on many times their tokens.
        return replace(report, notes=(f"no step of RL: {SCALED} loads are of no samples; see --batch.", *report.notes))
    best = report.best.policy
    plans = {name: report.plans[name] for name in ("static", best)}
    passes = _passes(scenario, plans, mini_batches=1)
    engine = _engine_size(passes.model, passes.hardware)
    if passes.train_gpus % engine:
        note = f"no step of RL: a rollout engine would need {engine} GPUs, which do not divide the {passes.train_gpus}."
        return replace(report, notes=(note, *report.notes))
    steps = passes.steps(RlStepOptions(rollout_engine_size=engine))
    share = steps["static"].parts_s["rollout"] / steps["static"].step_time_s
    note = f"the step of RL spends {share:.0%} on the rollout, a forecast; moe-rl rl-step takes your rates and lengths."
    gain = steps["static"].step_time_s / steps[best].step_time_s
    return replace(report, rl_speedup=gain, notes=(note, *report.notes))


def _engine_size(model: MoeModelSpec, hardware: HardwareSpec) -> int:
    """Return the GPUs of the smallest rollout engine whose weights take at most half of its memory."""
    # BF16 weights; the other half is for keys and values, without which an engine decodes few samples at once.
    size = 2 * (dense_params(model) + model.num_moe_layers * model.num_experts * model.expert_params)
    return 1 << max(0, int(np.ceil(np.log2(2 * size / (hardware.hbm_gib * GIB)))))


def drawn_lengths(options: LengthOptions) -> NDArray[np.int64]:
    """Return [N] lognormal lengths of the samples that the options describe."""
    samples, mean = _needed(options, "num_samples"), _needed(options, "mean_length")
    require(options.length_spread >= 0, f"--length-spread must be at least 0, got {options.length_spread}.")
    longest = options.max_length or 4 * mean
    require(mean <= longest, f"--mean-length {mean} is above --max-length {longest}.")
    sigma = float(np.sqrt(np.log1p(options.length_spread**2)))
    # exp(N(-s^2 / 2, s)) has mean 1.
    drawn = mean * np.random.default_rng(options.seed).lognormal(-(sigma**2) / 2, sigma, samples)
    lengths: NDArray[np.int64] = np.clip(np.rint(drawn), 1, longest).astype(np.int64)
    return lengths


def _of_lengths(options: RlStepOptions) -> TrainingPasses:
    gpus, budget = _needed(options, "train_gpus"), _needed(options, "micro_batch_tokens")
    lengths = drawn_lengths(options)
    model, hardware = named_model(options, "a step of RL"), load_cluster(options.cluster)
    priced = partial(
        trainer_seconds, model, hardware, options.step_setting(), lengths,
        train_gpus=gpus, ep_size=options.expert_model_parallel_size, micro_batch_tokens=budget,
        mini_batches=options.mini_batches,
    )  # fmt: skip
    return TrainingPasses(
        model=model,
        hardware=hardware,
        train_gpus=gpus,
        lengths=lengths,
        seconds={"static": priced(imbalance=options.imbalance), "forced_balance": priced()},
    )


def _needed(options: LengthOptions, name: str) -> int:
    value, flag = getattr(options, name), SHOWN[name].flags[0]
    require(value is not None, f"without a trace {flag} is needed.")
    require(value >= 1, f"{flag} must be at least 1, got {value}.")
    return int(value)


def rl_notes(options: RlStepOptions, *, of_lengths: bool) -> list[str]:
    """Return what a reader must know beside the numbers."""
    said = [
        "simulated: five constants of rollout, weight sync and framework were fitted on 14 published NeMo-RL steps on "
        "H100, which the forecast meets within 7 % on average, and within 13 % when their model is held out."
    ]
    said += filter(None, [load_cluster(options.cluster).assumption()])
    if of_lengths:
        said.append(
            f"no trace: static has {options.imbalance:g} times the mean rows on its fullest rank (--imbalance), and "
            "forced_balance is the most that balancing alone can bring."
        )
    if options.rollout_tokens_per_s is None:
        said.append("the rollout is a forecast: --rollout-tokens-per-s takes a measured rate.")
    elif options.rollout_enforce_eager:
        said.append("--rollout-enforce-eager changes nothing beside a measured rate.")
    if options.prompt_tokens == 0:
        said.append("prompts are taken to have no tokens: --prompt-tokens.")
    return said


def swept_steps(passes: TrainingPasses, options: RlStepOptions, sweep: str) -> dict[str, dict[str, RlStep]]:
    """Return steps by "name=value" for every value of one option of the RL step; without a sweep, by ""."""
    if not sweep:
        return {"": passes.steps(options)}
    name, _, values = sweep.partition("=")
    field = name.lstrip("-").replace("-", "_")
    swept = field in RlStepOptions.model_fields and SHOWN[field].panel == RL
    require(bool(values) and swept, f"--sweep {sweep!r} must read NAME=VALUE,VALUE with an option of the RL step.")
    given = options.model_dump(exclude_unset=True)
    points = {value: merge_options(RlStepOptions, {**given, field: value}) for value in values.split(",")}
    return {f"{field}={value}": passes.steps(point) for value, point in points.items()}


def as_json(steps: Mapping[str, RlStep]) -> dict[str, object]:
    """Return the figures by policy, with what balancing brings to the step and to the update alone."""
    static = steps["static"]
    return {
        name: {
            "parts_s": dict(step.parts_s),
            "step_time_s": step.step_time_s,
            "speedup_vs_static": static.step_time_s / step.step_time_s,
            "update_speedup_vs_static": static.parts_s["update"] / step.parts_s["update"],
        }
        for name, step in steps.items()
    }
