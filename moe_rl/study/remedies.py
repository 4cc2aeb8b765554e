"""What makes a step fit into memory: options are tried, the mildest first, and the first that works is reported."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from moe_rl.core.step_words import Recompute
from moe_rl.report.units import GIB
from moe_rl.simulators.result import SimulationResult
from moe_rl.simulators.setting import StepSetting

MOST_STAGES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A setting that may fit, and the options that ask for it."""

    options: str
    setting: StepSetting
    gpu_factor: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """The mildest trial whose peak fits, and its step."""

    trial: Trial
    result: SimulationResult
    peak_gib: float


def trials(setting: StepSetting, num_layers: int) -> Iterator[Trial]:
    """Yield settings that need less memory, from those that cost least time: recomputation, offload, more GPUs."""
    savings = {
        Recompute.MOE: "--recompute-granularity selective --recompute-modules moe",
        Recompute.FULL: "--recompute-granularity full",
    }
    for recompute in setting.recompute.stronger:
        yield Trial(options=savings[recompute], setting=replace(setting, recompute=recompute))
    with_full_recompute = replace(setting, recompute=Recompute.FULL)
    words = [] if setting.recompute is Recompute.FULL else [savings[Recompute.FULL]]
    if setting.optimizer_offload_fraction < 1:
        offload = replace(with_full_recompute, optimizer_offload_fraction=1.0)
        yield Trial(options=" ".join([*words, "--optimizer-offload-fraction 1"]), setting=offload)
    stages = 2 * setting.pipeline_model_parallel_size
    while stages <= min(MOST_STAGES, num_layers) and setting.num_virtual_stages == 1:
        yield Trial(
            options=" ".join([*words, f"--pp {stages}"]),
            setting=replace(with_full_recompute, pipeline_model_parallel_size=stages),
            gpu_factor=stages // setting.pipeline_model_parallel_size,
        )
        stages *= 2


def mildest_that_fits(
    setting: StepSetting, policy: str, num_layers: int, simulate: Callable[[StepSetting], SimulationResult]
) -> Fitting | None:
    """Return the first trial under which `policy` and static placement fit; None if none does."""
    for trial in trials(setting, num_layers):
        result = simulate(trial.setting)
        static, balanced = result.policies["static"].memory, result.policies[policy].memory
        if static.fits and balanced.fits:
            peak = max(static.peak_bytes, balanced.peak_bytes) / GIB
            return Fitting(trial=trial, result=result, peak_gib=peak)
    return None
