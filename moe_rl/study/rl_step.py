"""What balancing an update brings to the whole step of RL: `moe-rl rl-step`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import numpy as np

from moe_rl.core.errors import require
from moe_rl.simulators.rl_step import RlStep, RlStepSetting, rl_step
from moe_rl.study.options import COMMON, SimulationOptions, option
from moe_rl.study.predict import plans_beside_static, pricing_of
from moe_rl.study.scenario import Progress, Scenario

RL = "Step of RL"


class RlStepOptions(SimulationOptions):
    """A simulation's options, and how the rest of the step is run."""

    prompt_tokens: Annotated[
        int, option(RL, "Tokens of a sequence that are its prompt; 0 is assumed: all of it is decoded.")
    ] = 0
    rollout_gpus: Annotated[
        int | None, option(RL, "GPUs of the rollout; without it they are the trainer's, one after the other.")
    ] = None
    rollout_engine_size: Annotated[int, option(COMMON, "GPUs of one rollout engine.")] = 1
    rollout_enforce_eager: Annotated[
        bool, option(RL, "Run the rollout engine without CUDA graphs (vLLM's enforce_eager).")
    ] = False
    rollout_tokens_per_s: Annotated[
        float | None,
        option(COMMON, "Measured response tokens/s per rollout GPU; without it a forecast, not validated."),
    ] = None
    staleness: Annotated[
        int, option(RL, "Updates that the rollout's policy may be behind; from 1 on the rollout runs beside training.")
    ] = 0
    finished_share: Annotated[
        float, option(RL, "Share of the samples whose end the rollout waits for (partial rollout).")
    ] = 1.0
    reward_seconds: Annotated[float, option(RL, "Seconds that rewards take after the last sample.")] = 0.0
    reference_passes: Annotated[int, option(RL, "Forward passes of a reference model.")] = 1
    old_log_prob_passes: Annotated[int, option(RL, "Forward passes for the policy's own log-probabilities.")] = 1
    update_epochs: Annotated[int, option(RL, "Times that every sample is trained on.")] = 1
    weight_sync_seconds: Annotated[
        float | None, option(RL, "Measured seconds of the weight sync; without it a forecast.")
    ] = None


def rl_steps(scenario: Scenario, options: RlStepOptions, progress: Progress) -> dict[str, RlStep]:
    """Return the step of RL under every policy, static among them; the trace's step holds all its samples."""
    options.require_times("a step of RL is time")
    require(
        options.tokens_per_rank is None, "--tokens-per-rank scales loads: a step of RL has the samples of the trace."
    )
    require(
        not options.forward_only and not options.log_prob_passes,
        "--forward-only and --log-prob-passes describe a single pass: a step of RL has its own passes.",
    )
    topology = scenario.topology
    setting = RlStepSetting(
        train_gpus=topology.num_ranks * options.pipeline_model_parallel_size,
        rollout_gpus=options.rollout_gpus,
        engine_size=options.rollout_engine_size,
        rollout_cuda_graph=not options.rollout_enforce_eager,
        rollout_tokens_per_s=options.rollout_tokens_per_s,
        staleness=options.staleness,
        finished_share=options.finished_share,
        reward_s=options.reward_seconds,
        reference_passes=options.reference_passes,
        log_prob_passes=options.old_log_prob_passes,
        update_epochs=options.update_epochs,
        weight_sync_s=options.weight_sync_seconds,
    )
    plans = plans_beside_static(scenario, progress)
    progress("simulating", 0, 1)
    simulate, _ = pricing_of(scenario, plans)
    pass_setting = scenario.training_step.setting
    update, forward = simulate(pass_setting), simulate(replace(pass_setting, forward_only=True))
    lengths = np.maximum(scenario.batch.lengths - options.prompt_tokens, 1)
    return {
        name: rl_step(
            scenario.model.spec,
            topology.hardware,
            setting,
            response_lengths=lengths,
            prompt_tokens=options.prompt_tokens,
            forward_s=forward.policies[name].step_time_s,
            update_s=result.step_time_s,
        )
        for name, result in update.policies.items()
    }


def rl_notes(options: RlStepOptions) -> list[str]:
    """Return what a reader must know beside the numbers."""
    said = [
        "simulated: the update of the one published breakdown of a MoE run is met within a fifth; rewards, and what "
        "moves to and from the host between rollout and training, are not in it."
    ]
    if options.rollout_tokens_per_s is None:
        said.append(
            "the rollout is a forecast: of four published totals of whole steps one is met, three are about twice as "
            "long, and one published rollout without CUDA graphs is met within a fifth. Measure it "
            "(--rollout-tokens-per-s)."
        )
    if options.rollout_tokens_per_s is not None and options.rollout_enforce_eager:
        said.append("--rollout-enforce-eager changes nothing beside a measured rate.")
    if options.prompt_tokens == 0:
        said.append("prompts are taken to have no tokens: --prompt-tokens.")
    return said


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
