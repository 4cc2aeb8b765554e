"""How Megatron runs a training step, as the simulator and the planner price it."""

from typing import Any

from moe_rl.simulators.setting import DISPATCHERS, RECOMPUTE_MODULES, StepSetting


def step_setting_of(config: Any) -> StepSetting:
    """Return the setting of a `TransformerConfig`: dispatcher, recomputation, precision, overlap, TP and CP.

    Options that an older megatron-core lacks are off. Its allgather dispatcher is priced as its alltoall.
    """

    def option(name: str, otherwise: Any = None) -> Any:
        return getattr(config, name, otherwise)

    modules = option("recompute_modules") or ()
    selective = option("recompute_granularity") == "selective"
    recompute = "full" if option("recompute_granularity") == "full" else "none"
    flex = option("moe_token_dispatcher_type") == "flex"
    backend = option("moe_flex_dispatcher_backend")
    return StepSetting(
        dispatcher=(backend if backend in DISPATCHERS else "deepep") if flex else "alltoall",
        recompute="moe" if selective and "moe" in modules else recompute,
        recompute_modules=tuple(name for name in RECOMPUTE_MODULES if selective and name in modules),
        tensor_model_parallel_size=option("tensor_model_parallel_size", 1),
        context_parallel_size=option("context_parallel_size", 1),
        precision="fp8" if option("fp8") else "bf16",
        overlap_all_to_all=bool(option("overlap_moe_expert_parallel_comm")),
        overlap_shared_experts=bool(option("moe_shared_expert_overlap")),
    )
