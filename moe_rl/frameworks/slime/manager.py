"""slime's and miles' rollout manager: every update's samples are packed over all data-parallel ranks by their lengths.

`build_dp_schedule` runs in the process of the rollout manager, where none of our hooks does. So the packing travels
with what trainers tell the manager of their ranks (`set_train_parallel_config`): a mapping that, unpickled there,
installs it. The manager's class is a Ray actor, which Ray pickles by value: its methods have kept the function itself,
and a name put into a module would reach none of them. The function gets other code (`wrap_everywhere`).

Every optimizer step keeps its samples, all ranks get as many micro-batches, each at most the token budget. slime has no
rule of equal counts, so ranks may get any number of samples.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from moe_rl.balancing.driver_packing import DriverPacking, packs_in_driver
from moe_rl.core.errors import InvalidInputError, require
from moe_rl.core.post_import import when_imported, wrap, wrap_everywhere
from moe_rl.frameworks.contract import logger
from moe_rl.frameworks.run_settings import Settings
from moe_rl.frameworks.slime.driver import packed_by_lengths, schedule_from_steps, schedules_of_steps
from moe_rl.huggingface import model_of_config
from moe_rl.simulators.setting import StepSetting

FUNCTION = "build_dp_schedule"


class ParallelConfig(dict[str, Any]):
    """A `train_parallel_config` with which a packing travels: unpickled, it is installed in that process."""

    def __init__(self, values: Mapping[str, Any], *, framework: str, settings: Settings) -> None:
        super().__init__(values)
        self.framework, self.settings = framework, settings

    def __reduce__(self) -> tuple[Any, ...]:
        return arrived, (dict(self), self.framework, self.settings)


def arrived(values: dict[str, Any], framework: str, settings: Settings) -> ParallelConfig:
    """Return the mapping after its packing was installed in this process."""
    install(framework, settings)
    return ParallelConfig(values, framework=framework, settings=settings)


def install_when_imported(framework: str, settings: Settings) -> None:
    """Let the packing travel from this trainer, as soon as the framework's base class of trainers is there."""
    if settings.balances and packs_in_driver(settings.balancer) and settings.plans is None:
        when_imported(f"{framework}.ray.train_actor", lambda module: _wrap_trainer(module, framework, settings))


def _wrap_trainer(module: ModuleType, framework: str, settings: Settings) -> None:
    def with_packing(original: Callable[..., Any], trainer: Any, *arguments: Any, **more: Any) -> Any:
        config = getattr(trainer, "train_parallel_config", None)
        if config:
            trainer.train_parallel_config = ParallelConfig(config, framework=framework, settings=settings)
        return original(trainer, *arguments, **more)

    wrap(module.TrainRayActor, "set_rollout_manager", with_packing)


def install(framework: str, settings: Settings) -> None:
    """Pack what the framework's `build_dp_schedule` returns in this process; a second call changes nothing."""
    function = getattr(import_module(f"{framework}.utils.dp_schedule"), FUNCTION)
    if not hasattr(function, "moe_rl_packs"):
        function.moe_rl_packs = _Packer(framework, settings)
        wrap_everywhere(function, function.moe_rl_packs)


class _Packer:
    """What runs in place of `build_dp_schedule`."""

    def __init__(self, framework: str, settings: Settings) -> None:
        self.framework, self.settings = framework, settings
        self._packing: DriverPacking | None = None
        self._why_not: str | None = None

    def __call__(
        self, original: Callable[..., Any], args: Any, parallel: Mapping[str, Any], lengths: Sequence[int], **more: Any
    ) -> Any:
        schedule = original(args, parallel, lengths, **more)
        packing = self._of_run(args, parallel)
        if packing is None:
            return schedule
        partitions, indices, counts, *others = schedule
        steps = packed_by_lengths(
            lengths,
            schedules_of_steps(partitions, indices, counts),
            packing,
            multiple_of=_multiple(parallel),
        )
        return (*schedule_from_steps(steps), *others)

    def _of_run(self, args: Any, parallel: Mapping[str, Any]) -> DriverPacking | None:
        """Return how the run is packed; None, after one sentence, where its settings leave nothing to pack."""
        if self._packing is None and self._why_not is None:
            try:
                self._packing = packing_of(args, parallel, self.settings)
                logger.info("moe_rl: %s packs the samples of an update by length, across all ranks.", self.framework)
            except InvalidInputError as error:
                if self.settings.strict:
                    raise
                self._why_not = str(error)
                logger.warning(
                    "moe_rl: %s assigns samples to ranks itself, because moe_rl cannot pack them: %s",
                    self.framework,
                    error,
                )
        return self._packing


def _multiple(parallel: Mapping[str, Any]) -> int:
    """Return what the number of micro-batches of a rank is a multiple of."""
    group = parallel["microbatch_group_size_per_vp_stage"]
    if not ((parallel["vpp_size"] or 1) > 1):
        return 1
    return int(group)


def packing_of(args: Any, parallel: Mapping[str, Any], settings: Settings) -> DriverPacking:
    """Return how updates are packed, from the framework's arguments and what its trainers tell of their ranks.

    Raises `InvalidInputError` where micro-batches are a number of samples, where data-parallel ranks are cells that run
    by themselves, and where the model's configuration is of no family that we know.
    """
    from transformers import AutoConfig

    dynamic, budget = getattr(args, "use_dynamic_batch_size", False), getattr(args, "max_tokens_per_gpu", None) or 0
    require(
        bool(dynamic and budget),
        "--use-dynamic-batch-size is off, so all micro-batches have the same number of samples.",
    )
    require(
        not getattr(args, "indep_dp", False),
        "indep_dp is on, so data-parallel cells run independently and do not wait for each other.",
    )
    path = str(args.hf_checkpoint)
    model, _ = model_of_config(AutoConfig.from_pretrained(path, trust_remote_code=True).to_dict(), where=path)
    shape = StepSetting(
        pipeline_model_parallel_size=int(args.pipeline_model_parallel_size),
        num_virtual_stages=int(parallel["vpp_size"] or 1),
        tensor_model_parallel_size=int(args.tensor_model_parallel_size),
        context_parallel_size=int(parallel["cp_size"]),
    )
    return DriverPacking.of_run(
        "slime",
        settings.balancer,
        model=model,
        shape=shape,
        num_dp_ranks=int(parallel["dp_size"]),
        ep_size=int(args.expert_model_parallel_size),
        tokens_per_gpu=int(budget),
    )
