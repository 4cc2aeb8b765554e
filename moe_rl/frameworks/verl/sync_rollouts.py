"""Rollout engines of a planned sync in verl: which can take experts by name, and how their processes take them.

Called when verl's modules are imported (`plugin.py`): in its rollout workers, and in the processes of SGLang and vLLM.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from moe_rl.core.errors import require
from moe_rl.core.post_import import wrap
from moe_rl.frameworks.sglang import weight_loader
from moe_rl.frameworks.vllm import sync_map

NAME = "moe_rl"


def load_packed_batches(module: ModuleType) -> None:
    """Let verl's loader in SGLang's processes take our batches, too; `module` is its `delta_loader`."""

    def loaded(original: Callable[..., None], model: Any, named_tensors: Any) -> None:
        batch = list(named_tensors)
        (weight_loader.load if weight_loader.is_packed(batch) else original)(model, batch)

    wrap(module, "apply_delta", loaded)


def take_maps(module: ModuleType) -> None:
    """Let vLLM's workers take the map among the weights; `module` is verl's `vllm_rollout.utils`."""

    def taken(original: Callable[..., None], self: Any, weights: Any, *args: Any, **kwargs: Any) -> None:
        original(self, sync_map.without_map(self.model_runner, weights), *args, **kwargs)

    # Releases before 0.8 load elsewhere; a map that comes is then an unknown weight, which vLLM refuses.
    if hasattr(module.vLLMColocateWorkerExtension, "_update_weights"):
        wrap(module.vLLMColocateWorkerExtension, "_update_weights", taken)


# Rollout engines into which verl loads the batches of all ranks under the first rank's names
# (verl/workers/rollout/sglang_rollout, sglang.srt.weight_sync.utils.update_weights).
ZIPPED_BY_POSITION = ("sglang",)
# verl's wire format of batches that SGLang hands to this loader of `custom_weight_loader`.
BATCHES = "delta_flush"
LOADER = "verl.workers.rollout.sglang_rollout.delta_loader.apply_delta"


def check_rollout(rollout_config: Any) -> None:
    """Raise for a rollout engine whose slots a planned sync cannot fill."""
    chosen, name = rollout_config.checkpoint_engine, rollout_config.name
    if chosen.backend != NAME:
        return
    launch = dict((rollout_config.engine_kwargs or {}).get(name) or {})
    refuse_reshuffled(name, launch, getattr(rollout_config, "quantization", None))
    if name in ZIPPED_BY_POSITION and chosen.engine_kwargs.get(NAME, {}).get("ep_size", 1) > 1:
        require(
            LOADER in (launch.get("custom_weight_loader") or ()),
            f"checkpoint_engine.backend=moe_rl with rollout.name={name} and ep_size above 1 needs a weight loader "
            f"in the rollout engine: add {LOADER} to rollout.engine_kwargs.{name}.custom_weight_loader.",
        )
        require(
            getattr(rollout_config, "quantization", None) is None,
            f"checkpoint_engine.backend=moe_rl with rollout.name={name} and ep_size above 1 does not use verl's "
            "quantizer: remove rollout.quantization or ep_size.",
        )


# Kernels of an engine that keep experts' matrices in an order of their own, in which a loader cannot write them again.
RESHUFFLING_KERNELS = {
    "vllm": ("moe_backend", ("flashinfer_trtllm", "marlin", "aiter")),
    "sglang": (
        "moe_runner_backend",
        ("flashinfer_trtllm", "flashinfer_trtllm_routed", "flashinfer_mxfp4", "marlin", "aiter"),
    ),
}
# What verl quantizes on arrival, on every rank its own experts.
QUANTIZED_ON_ARRIVAL = (None, "fp8", "mxfp8")


def refuse_reshuffled(rollout: str, launch: Mapping[str, Any], quantization: str | None) -> None:
    """Raise if an engine's launch options make it keep experts in an order in which no loader writes them again."""
    require(
        quantization in QUANTIZED_ON_ARRIVAL,
        f"checkpoint_engine.backend=moe_rl sends bf16 weights, but with rollout.quantization={quantization} the "
        "engine stores experts in a layout that bf16 weights cannot overwrite. Remove rollout.quantization, or set it "
        "to fp8.",
    )
    option, kernels = RESHUFFLING_KERNELS.get(rollout, ("", ()))
    chosen = launch.get(option)
    require(
        chosen not in kernels,
        f"checkpoint_engine.backend=moe_rl writes experts through {rollout}'s loader, but with {option}={chosen} "
        f"the engine reorders the experts' weights after the first load. Set {option} to triton.",
    )
