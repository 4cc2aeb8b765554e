"""The options of `moe-rl rl-step` and `moe-rl tune`: a simulation's, the samples of a step, and how the rest is run."""

from dataclasses import fields
from typing import Annotated, Any

from moe_rl.simulators.rl_step import FITTED, PRECISIONS, RlStepSetting
from moe_rl.study.options import BATCH, COMMON, SimulationOptions, option

RL, LENGTHS = "Step of RL", "Without a trace"


class LengthOptions(SimulationOptions):
    """A simulation's options, and the lengths of a step's samples where there is no trace."""

    num_samples: Annotated[int | None, option(LENGTHS, "Samples of a step.")] = None
    mean_length: Annotated[int | None, option(LENGTHS, "Mean tokens of a sample, its prompt included.")] = None
    max_length: Annotated[int | None, option(LENGTHS, "Longest sample; by default four times the mean.")] = None
    length_spread: Annotated[
        float, option(LENGTHS, "Standard deviation of the lengths (lognormal), as a share of their mean.")
    ] = 0.33


class RlStepOptions(LengthOptions):
    """A simulation's options, and how the rest of the step is run."""

    imbalance: Annotated[
        float, option(LENGTHS, "Rows of the fullest EP rank over the mean without balancing; assumed.")
    ] = 1.5
    train_gpus: Annotated[int | None, option(LENGTHS, "GPUs of the trainer.")] = None

    prompt_tokens: Annotated[
        int, option(RL, "Tokens of a sequence that are its prompt; 0 is assumed: all of it is decoded.")
    ] = 0
    mini_batches: Annotated[int, option(BATCH, "Optimizer steps in which the samples are used once.")] = 1
    rollout_gpus: Annotated[
        int | None, option(RL, "GPUs of the rollout; without it they are the trainer's, one after the other.")
    ] = None
    rollout_engine_size: Annotated[int, option(COMMON, "GPUs of one rollout engine.")] = 1
    rollout_dp_attention: Annotated[
        bool, option(RL, "Every GPU of an engine attends for requests of its own (SGLang's enable_dp_attention).")
    ] = False
    rollout_precision: Annotated[str, option(RL, f"Of the engine's weights: {' or '.join(PRECISIONS)}.")] = "bf16"
    rollout_max_running: Annotated[int, option(RL, "Samples that an engine decodes at once at most.")] = 256
    rollout_enforce_eager: Annotated[
        bool, option(RL, "Run the rollout engine without CUDA graphs (vLLM's enforce_eager).")
    ] = False
    rollout_imbalance: Annotated[
        float, option(RL, "Largest over mean load of an engine's ranks; moe-rl rollout-map prints it for a map.")
    ] = 1.0
    rollout_tokens_per_s: Annotated[
        float | None, option(COMMON, "Measured response tokens/s per rollout GPU; without it a forecast.")
    ] = None
    samples_per_prompt: Annotated[int, option(RL, "Samples that share a prompt, which is prefilled once.")] = 1
    draft_tokens: Annotated[int, option(RL, "Tokens that a speculative draft proposes per iteration.")] = 0
    accepted_tokens: Annotated[float, option(RL, "Mean tokens gained per iteration with drafts.")] = 1.0
    environment_seconds: Annotated[float, option(RL, "What a sample waits for its environment in all its turns.")] = 0.0
    staleness: Annotated[
        int, option(RL, "Batches in flight beside training; 0 takes turns, 1 is one step off, more hide long tails.")
    ] = 0
    finished_share: Annotated[
        float, option(RL, "Partial rollout: share of the samples in flight that end in a step; the others go on.")
    ] = 1.0
    reward_seconds: Annotated[float, option(RL, "Seconds that rewards take after the last sample.")] = 0.0
    reference_passes: Annotated[int, option(RL, "Forward passes of a reference model.")] = 1
    old_log_prob_passes: Annotated[int, option(RL, "Forward passes for the policy's own log-probabilities.")] = 1
    update_epochs: Annotated[int, option(RL, "Times that every sample is trained on.")] = 1
    framework_share: Annotated[
        float, option(RL, "Time that the framework adds to the trainer's passes, as a share of them; fitted.")
    ] = FITTED["framework_share"]
    weight_sync_seconds: Annotated[
        float | None, option(RL, "Measured seconds of the weight sync; without it a forecast.")
    ] = None
    offload_seconds: Annotated[
        float | None, option(RL, "Measured seconds in which the trainer's state leaves shared GPUs and comes back.")
    ] = None

    def rl_setting(self, train_gpus: int) -> RlStepSetting:
        """Return the simulator's setting."""
        other: dict[str, Any] = {"rollout_cuda_graph": not self.rollout_enforce_eager, "train_gpus": train_gpus}
        told = {item.name for item in fields(RlStepSetting)} - set(other)
        return RlStepSetting(**other, **{name: getattr(self, OPTION_OF.get(name, name)) for name in told})


OPTION_OF = {
    "engine_size": "rollout_engine_size", "attention_data_parallel": "rollout_dp_attention",
    "max_running_samples": "rollout_max_running", "environment_s": "environment_seconds",
    "reward_s": "reward_seconds", "log_prob_passes": "old_log_prob_passes", "weight_sync_s": "weight_sync_seconds",
    "offload_s": "offload_seconds",
}  # fmt: skip
"""Fields of `RlStepSetting` that are called otherwise on the command line."""


class TuneOptions(LengthOptions):
    """A simulation's options: of `search_layouts.SEARCHED` those not given are found; the others hold everywhere."""

    gpus: Annotated[int, option(COMMON, "GPUs of the trainer.")] = 32
