"""The options of `moe-rl rl-step` and `moe-rl tune`: a simulation's, the samples of a step, and how the rest is run."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from moe_rl.option_groups import OptionGroup
from moe_rl.study.groups import Names, ParallelOptions
from moe_rl.study.options import SimulationOptions

if TYPE_CHECKING:
    from moe_rl.simulators.rl_step import RlStepSetting

RL = "Step of RL"  # Panel of the options that say how the rest of the step is run.


class SampleOptions(OptionGroup):
    """Samples of a step of which there is no trace, and their lengths."""

    num_samples: int | None = None
    mean_length: int | None = None
    max_length: int | None = None
    length_spread: float = 0.33


class RolloutOptions(OptionGroup):
    """How samples are generated."""

    prompt_tokens: int = 0
    rollout_gpus: int | None = None
    rollout_engine_size: int | None = None
    rollout_attention_size: int | None = None
    rollout_precision: str = "bf16"
    rollout_max_running: int = 256
    rollout_enforce_eager: bool = False
    rollout_imbalance: float = 1.0
    rollout_map: bool = False
    rollout_tokens_per_s: float | None = None
    samples_per_prompt: int = 1
    draft_tokens: int = 0
    accepted_tokens: float = 1.0
    environment_seconds: float = 0.0
    staleness: int = 0
    finished_share: float = 1.0


class TrainerOptions(OptionGroup):
    """What the trainer does of a step beside the passes of an update."""

    imbalance: float = 1.5
    train_gpus: int | None = None
    mini_batches: int = 1
    reward_seconds: float = 0.0
    reference_passes: int = 1
    old_log_prob_passes: int = 1
    routes_from: str = "log_prob"
    update_epochs: int = 1
    framework_share: float | None = None
    offload_seconds: float | None = None
    offloaded_state: Names = Field(default=["parameters", "gradients", "optimizer"])


class SyncOptions(OptionGroup):
    """How weights reach the rollout engines."""

    weight_sync_seconds: float | None = None
    weight_sync_transport: str = ""
    weight_sync_control_seconds: float = 0.0


class LengthOptions(SimulationOptions):
    """A simulation's options, and the lengths of a step's samples where there is no trace."""

    samples: SampleOptions = SampleOptions()


class RlStepOptions(LengthOptions):
    """A simulation's options, and how the rest of the step is run."""

    rollout: RolloutOptions = RolloutOptions()
    trainer: TrainerOptions = TrainerOptions()
    sync: SyncOptions = SyncOptions()

    def rl_setting(self, train_gpus: int, framework_share: float, *, engine_size: int) -> "RlStepSetting":
        """Return the simulator's setting; `framework_share` is the software's, where no option states it."""
        from moe_rl.simulators.rl_step import RlStepSetting

        other: dict[str, Any] = {
            "rollout_cuda_graph": not self.rollout.rollout_enforce_eager,
            "train_gpus": train_gpus,
            "engine_size": engine_size,
            "offloaded_state": tuple(name for name in self.trainer.offloaded_state if name != "none"),
        }
        if self.trainer.framework_share is None:
            other["framework_share"] = framework_share
        names = {item.name for item in fields(RlStepSetting)} - set(other)
        return RlStepSetting(**other, **{name: self.value_of(OPTION_OF.get(name, name)) for name in names})


# Fields of `RlStepSetting` that are called otherwise on the command line.
OPTION_OF = {
    "attention_size": "rollout_attention_size",
    "max_running_samples": "rollout_max_running", "environment_s": "environment_seconds",
    "reward_s": "reward_seconds", "log_prob_passes": "old_log_prob_passes", "weight_sync_s": "weight_sync_seconds",
    "weight_sync_control_s": "weight_sync_control_seconds",
    "offload_s": "offload_seconds", "trainer_ep_size": "expert_model_parallel_size",
    "trainer_pp_size": "pipeline_model_parallel_size",
}  # fmt: skip


class KnownTrainer(TrainerOptions):
    """The trainer of a step that was measured."""

    imbalance: float = 1.0
    micro_batch_size: int | None = None


class KnownStepOptions(RlStepOptions):
    """The setting of a step that was measured, where it is not the command's own: a row in the user's words."""

    trainer: KnownTrainer = KnownTrainer()


class TunedParallel(ParallelOptions):
    """How GPUs share the model: sizes that are not stated are searched."""

    gpus: int = 32


class TuneOptions(LengthOptions):
    """A simulation's options: of `search_layouts.SEARCHED` those not given are found; the others hold everywhere."""

    of_all_gpus: ClassVar[bool] = True
    parallel: TunedParallel = TunedParallel()
    routes_like: str | None = None
    current: Names = Field(default=[])
